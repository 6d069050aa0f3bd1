"""Splits a job into one part per machine, and combines the statuses of the parts. Pure functions without I/O."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ludus.errors import LudusError, UsageError
from ludus.launch.job import Job, JobState, JobStatus, ProcessStatus, Role, check_job
from ludus.launch.ssh.connection import SshSettings
from ludus.launch.ssh.remote_agent import INTERNAL, JobPart, JobPartStatus

SERVER_ROLE, CLIENT_ROLE = f"{INTERNAL}lifeline", f"{INTERNAL}hold"

_BLOCK_SIGTERM = 'env --block-signal=TERM true 2>/dev/null && exec env --block-signal=TERM "$@"; exec "$@"'
"""Blocks SIGTERM until the lifeline server can handle it, as a short job may end before. Without support in `env`, the others time out."""
_SUBMITTING_S = 60.0
"""How long a machine may not know a job that is being submitted."""


def split_job(job: Job, settings: SshSettings, job_id: str, port: int = 0) -> list[JobPart]:
    """Return the part of each machine. Raises UsageError if the job is invalid."""
    check_job(job)
    if job.nodes > len(settings.nodes):
        raise UsageError(f"The job {job.name} needs {job.nodes} machines, and {len(settings.nodes)} are listed.")
    if reserved := [role.name for role in job.roles if role.name.startswith(INTERNAL)]:
        raise UsageError(f"The role name {reserved[0]!r} is reserved.", f"Names must not begin with {INTERNAL!r}.")
    addresses = tuple(node.node_address for node in settings.nodes[: job.nodes])
    parts = []
    for node in range(job.nodes):
        seats = {role.name: tuple(index for index in range(role.count) if role.node(index) == node) for role in job.roles}
        seats = {name: indices for name, indices in seats.items() if indices}
        python = settings.interpreter(node)
        roles = [
            replace(role, command=_replace_python(role.command, python, settings), count=len(seats[role.name]), at=())
            for role in job.roles
            if role.name in seats
        ]
        lifeline = (python, "-P", "-m", "ludus.launch.ssh.lifeline")
        if node > 0:
            hold = (*lifeline, "hold", "--patience-s", f"{settings.patience_s:g}")
            roles.insert(0, Role(CLIENT_ROLE, hold, restart="when-killed"))
        elif job.nodes > 1:  # the role that starts first ends last
            roles.insert(0, Role(SERVER_ROLE, ("sh", "-c", _BLOCK_SIGTERM, "sh", *lifeline, "serve"), restart="on-failure"))
        own = replace(job, roles=tuple(roles), main=job.main if node == 0 else CLIENT_ROLE, nodes=1, ray=0)
        parts.append(JobPart(job_id, node, addresses, own, seats, port, job.ray, job.wait_s, settings.workdir))
    return parts


def _replace_python(command: tuple[str, ...], python: str, settings: SshSettings) -> tuple[str, ...]:
    """Replace this machine's interpreter by that of the other machine."""
    return (python, *command[1:]) if command[0] in (sys.executable, settings.python) else command


@dataclass(frozen=True)
class KnownStatus:
    """Last known status of a job. `final`: it will not change. `silent`: machines that do not answer, and since when."""

    status: JobStatus
    final: bool = False
    silent: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def of(text: str) -> KnownStatus:
        """Raises ValueError, TypeError, KeyError."""
        data = json.loads(text)
        processes = tuple(ProcessStatus(**process) for process in data["status"]["processes"])
        return KnownStatus(JobStatus(**{**data["status"], "processes": processes}), data["final"], data["silent"])


def combine_statuses(
    job: Job,
    hosts: Sequence[str],
    known: KnownStatus,
    found: Sequence[JobPartStatus | LudusError],
    now: float,
    *,
    cancelled: bool = False,
    patience_s: float = math.inf,
) -> KnownStatus:
    """Combine the statuses of the parts; an error stands for a machine that does not answer. `cancelled`: cancellation was requested."""
    silent = {hosts[n]: known.silent.get(hosts[n], now) for n, part in enumerate(found) if isinstance(part, LudusError)}
    problems = [
        f"{host} does not answer since {time.strftime('%H:%M:%S', time.localtime(since))}" for host, since in silent.items()
    ]
    head, others = found[0], found[1:]
    ending = any(isinstance(part, JobPartStatus) and not part.over for part in others)
    status = replace(known.status, processes=_processes(job, hosts, known.status, found))
    if isinstance(head, LudusError):
        if cancelled and not ending:
            status = replace(status, state="cancelled", exit_code=1)
        return KnownStatus(replace(status, reason="; ".join(problems)), False, silent)
    if head.state == "missing":
        if not cancelled and now - known.status.submitted_at < _SUBMITTING_S and known.status.state == "pending":
            return KnownStatus(status, False, silent)
        why = f"{hosts[0]} does not know the job: it was not submitted completely"
        head = replace(head, state="cancelled" if cancelled else "failed", exit_code=1, reason=why)
    status = replace(status, logs=f"{hosts[0]}:{head.logs}" if head.logs else "")
    if not head.over or ending:
        shown = [part for part in zip(hosts, found, strict=True) if part[1] is not head or head.lost]
        problems += [
            f"its part on {host} is over: {part.reason or part.state}"
            for host, part in shown
            if isinstance(part, JobPartStatus) and part.over and (part is head or not head.over)
        ]
        state: JobState = "pending" if head.state == "pending" else "running"
        return KnownStatus(replace(status, state=state, exit_code=None, reason="; ".join(problems)), False, silent)
    over: JobState = "succeeded" if head.state == "succeeded" else "cancelled" if head.state == "cancelled" else "failed"
    reason = "; ".join([head.reason, *problems] if head.reason else problems)
    # Parts on silent machines have ended by then: their lifeline to the first machine has timed out.
    final = all(now - since > patience_s for since in silent.values())
    return KnownStatus(replace(status, state=over, exit_code=head.exit_code, reason=reason), final, silent)


def _processes(
    job: Job, hosts: Sequence[str], before: JobStatus, found: Sequence[JobPartStatus | LudusError]
) -> tuple[ProcessStatus, ...]:
    """Combine the processes of all parts; those of silent machines keep their last state."""
    known = {process.name: process for process in before.processes}
    for part in found:
        if isinstance(part, JobPartStatus):
            known |= {process.name: process for process in part.processes}
    processes = []
    for role in job.roles:
        for index in range(role.count):
            part = found[role.node(index)]
            process = known.get(f"{role.name}-{index}", ProcessStatus(role.name, index, "pending"))
            if isinstance(part, JobPartStatus) and part.over and process.state != "ended":
                process = replace(process, state="ended", pid=None)
            processes.append(replace(process, host=hosts[role.node(index)]))
    return tuple(processes)
