"""A job as the parts of several machines, and what these say of it as the status of one job. Nothing is read, written or started here."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ludus.errors import LudusError, UsageError
from ludus.launch.job import Job, JobState, JobStatus, ProcessStatus, Role, checked
from ludus.launch.ssh.connection import SshSettings
from ludus.launch.ssh.remote_agent import INNER, Part, PartStatus

DOOR, HOLD = f"{INNER}door", f"{INNER}hold"

_HEEDING = 'env --block-signal=TERM true 2>/dev/null && exec env --block-signal=TERM "$@"; exec "$@"'
"""A job may be over before its door is open: it shall hear of that then, instead of dying of it. Where `env` cannot, the others wait."""
_UNSURE_S = 60.0
"""A job that is being submitted may not be on its machines for so long."""


def split(job: Job, settings: SshSettings, job_id: str, port: int = 0) -> list[Part]:
    """What each machine gets. Raises UsageError for a job that cannot be."""
    checked(job)
    if job.nodes > len(settings.nodes):
        raise UsageError(f"The job {job.name} needs {job.nodes} machines, and {len(settings.nodes)} are listed.")
    if ours := [role.name for role in job.roles if role.name.startswith(INNER)]:
        raise UsageError(f"The role {ours[0]!r} is called as one of Ludus' own.", f"Names must not begin with {INNER!r}.")
    addresses = tuple(node.reached for node in settings.nodes[: job.nodes])
    parts = []
    for node in range(job.nodes):
        seats = {role.name: tuple(index for index in range(role.count) if role.node(index) == node) for role in job.roles}
        seats = {name: indices for name, indices in seats.items() if indices}
        python = settings.interpreter(node)
        roles = [
            replace(role, command=_for(role.command, python, settings), count=len(seats[role.name]), at=())
            for role in job.roles
            if role.name in seats
        ]
        tether = (python, "-P", "-m", "ludus.launch.ssh.lifeline")
        if node > 0:
            hold = (*tether, "hold", "--patience-s", f"{settings.patience_s:g}")
            roles.insert(0, Role(HOLD, hold, restart="when-killed"))
        elif job.nodes > 1:  # the first to start is the last to end
            roles.insert(0, Role(DOOR, ("sh", "-c", _HEEDING, "sh", *tether, "door"), restart="on-failure"))
        own = replace(job, roles=tuple(roles), main=job.main if node == 0 else HOLD, nodes=1, ray=0)
        parts.append(Part(job_id, node, addresses, own, seats, port, job.ray, job.wait_s, settings.workdir))
    return parts


def _for(command: tuple[str, ...], python: str, settings: SshSettings) -> tuple[str, ...]:
    """Our interpreter is not theirs."""
    return (python, *command[1:]) if command[0] in (sys.executable, settings.python) else command


@dataclass(frozen=True)
class Known:
    """How a job was when last seen. `final`: it will not change. `silent`: machines that do not answer, and since when."""

    status: JobStatus
    final: bool = False
    silent: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def of(text: str) -> Known:
        """Raises ValueError, TypeError, KeyError."""
        data = json.loads(text)
        processes = tuple(ProcessStatus(**process) for process in data["status"]["processes"])
        return Known(JobStatus(**{**data["status"], "processes": processes}), data["final"], data["silent"])


def combined(
    job: Job,
    hosts: Sequence[str],
    known: Known,
    found: Sequence[PartStatus | LudusError],
    now: float,
    *,
    cancelled: bool = False,
    patience_s: float = math.inf,
) -> Known:
    """How the job is, from what its machines say; an error: that one does not answer. `cancelled`: that was asked for."""
    silent = {hosts[n]: known.silent.get(hosts[n], now) for n, part in enumerate(found) if isinstance(part, LudusError)}
    complaints = [f"{host} does not answer since {_clock(since)}" for host, since in silent.items()]
    head, others = found[0], found[1:]
    ending = any(isinstance(part, PartStatus) and not part.over for part in others)
    status = replace(known.status, processes=_processes(job, hosts, known.status, found))
    if isinstance(head, LudusError):
        if cancelled and not ending:
            status = replace(status, state="cancelled", exit_code=1)
        return Known(replace(status, reason="; ".join(complaints)), False, silent)
    if head.state == "missing":
        if not cancelled and now - known.status.submitted_at < _UNSURE_S and known.status.state == "pending":
            return Known(status, False, silent)
        why = f"{hosts[0]} knows nothing of it: it was not submitted to the end"
        head = replace(head, state="cancelled" if cancelled else "failed", exit_code=1, reason=why)
    status = replace(status, logs=f"{hosts[0]}:{head.logs}" if head.logs else "")
    if not head.over or ending:
        shown = [part for part in zip(hosts, found, strict=True) if part[1] is not head or head.lost]
        complaints += [
            f"its part on {host} is over: {part.reason or part.state}"
            for host, part in shown
            if isinstance(part, PartStatus) and part.over and (part is head or not head.over)
        ]
        state: JobState = "pending" if head.state == "pending" else "running"
        return Known(replace(status, state=state, exit_code=None, reason="; ".join(complaints)), False, silent)
    over: JobState = "succeeded" if head.state == "succeeded" else "cancelled" if head.state == "cancelled" else "failed"
    reason = "; ".join([head.reason, *complaints] if head.reason else complaints)
    # Whatever is left on a machine that does not answer has ended by then, for want of the first one.
    final = all(now - since > patience_s for since in silent.values())
    return Known(replace(status, state=over, exit_code=head.exit_code, reason=reason), final, silent)


def _processes(
    job: Job, hosts: Sequence[str], before: JobStatus, found: Sequence[PartStatus | LudusError]
) -> tuple[ProcessStatus, ...]:
    """Of a machine that does not answer, as they were."""
    known = {process.name: process for process in before.processes}
    for part in found:
        if isinstance(part, PartStatus):
            known |= {process.name: process for process in part.processes}
    processes = []
    for role in job.roles:
        for index in range(role.count):
            part = found[role.node(index)]
            process = known.get(f"{role.name}-{index}", ProcessStatus(role.name, index, "pending"))
            if isinstance(part, PartStatus) and part.over and process.state != "ended":
                process = replace(process, state="ended", pid=None)
            processes.append(replace(process, host=hosts[role.node(index)]))
    return tuple(processes)


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
