"""Jobs in the queue of a Slurm cluster. Each is a batch script that becomes the job's supervisor on the first of its nodes.

Everything about a job is in its directory, which all nodes share; Slurm is asked for what nobody was left to write down. The
processes of other nodes are started by `srun`, each behind a line to the supervisor (`member.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ludus.core.plugins import did_you_mean
from ludus.errors import Damaged, LudusError, UnknownName, UsageError, WorkerFailed
from ludus.io.addresses import local_address
from ludus.io.atomic_file import replace_json
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, checked
from ludus.launch.job_dir import JobDirectory
from ludus.launch.job_index import Shelf
from ludus.launch.slurm import commands
from ludus.launch.slurm.commands import Queued
from ludus.launch.slurm.sbatch import REACH, SCRIPT, SlurmGroup, SlurmSettings, options, overriding, script
from ludus.process import identity
from ludus.process.job_env import PORTS, Surroundings, free_block

__all__ = ["SlurmGroup", "SlurmOrchestrator", "SlurmReach", "SlurmSettings", "conclusion", "exported"]

ASK_EVERY_S = 2.0
"""Slurm is asked about a job at most so often while nothing about it changes: its controller serves everybody."""

_TICKET, _VERDICT, _AT_ONCE = "slurm.json", "verdict.json", "cancel-at-once"
_CANCELLED = 130
_HANDED_OVER_S = 2 * commands.SUBMIT_S
_KEPT_OF_SLURM = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")

_WAITS = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNS = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_ENDS: Mapping[str, str] = {
    "TIMEOUT": "its time limit was reached",
    "NODE_FAIL": "one of its nodes failed",
    "BOOT_FAIL": "one of its nodes could not be started",
    "OUT_OF_MEMORY": "it used more memory than it had asked for",
    "PREEMPTED": "a job of higher priority took its place",
    "DEADLINE": "its deadline was reached",
    "REVOKED": "another cluster has taken it",
}


class SlurmOrchestrator(Shelf):
    """`directory`: on a file system that this machine and all nodes share."""

    kind = "Slurm"

    def __init__(self, directory: Path | None = None, settings: SlurmSettings | None = None) -> None:
        super().__init__((directory or job_dir.state_home()) / "slurm")
        self.settings = settings or SlurmSettings()
        self._asked: dict[str, tuple[float, JobStatus, Queued | None]] = {}
        self._name: str | None = None

    def render(self, job: Job) -> dict[str, str]:
        return {SCRIPT: script(checked(job), self.settings), job_dir.JOB: job_dir.write_job(job)}

    def submit(self, job: Job) -> str:
        checked(job, os.environ)
        files = self.render(job)
        place = self._create(job, files)
        try:
            self._hide(place, job)
            cluster = self._cluster()
            number = commands.submit(place.path, SCRIPT, exported(os.environ, job.secrets, overriding(files[SCRIPT])))
        except BaseException:
            shutil.rmtree(place.path, ignore_errors=True)
            raise
        _write_ticket(place, number, cluster=cluster)
        return place.id

    def list(self) -> list[JobStatus]:
        """With one question to Slurm for all of them."""
        open_ = [place for place in self._all() if not self._recorded(place).over and not _ticket(place).interactive]
        open_ = [place for place in open_ if not self._elsewhere(_ticket(place))]
        numbers = {place.id: number for place in open_ if (number := _ticket(place).number)}
        queued, unheard = self._ask(list(numbers.values()))
        for place in open_ if not unheard else ():
            number = numbers.get(place.id, "")
            self._asked[place.id] = (time.monotonic(), self._recorded(place), queued.get(number))
        return super().list()

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        place = self._find(job_id)
        self._asked.pop(place.id, None)
        status = self._status(place)
        if status.over:
            return
        ticket = _ticket(place)
        if ticket.interactive:
            self._interrupt(place, at_once)
            return
        if not ticket.number:
            raise WorkerFailed(f"The number that Slurm gave to {place.id} is not known yet.", "Try again in a moment.")
        if cluster := self._elsewhere(ticket):
            raise UsageError(f"The job {place.id} is in the queue of another cluster, {cluster}.", "Cancel it there.")
        place.mark_cancelled()  # before anything else: should it be started just now, its script looks here
        commands.cancel_waiting(ticket.number)
        commands.signal(ticket.number, "QUIT" if at_once else "TERM")
        if at_once:
            asked_before = (place.path / _AT_ONCE).exists()
            (place.path / _AT_ONCE).touch(mode=0o600)
            if asked_before or status.state != "running":  # nobody listens
                commands.cancel(ticket.number)

    # -- in an allocation

    def salloc_words(self, job: Job) -> tuple[str, ...]:
        """What gets an allocation for the job; a command may follow, else it is a shell, in which `run_here` works."""
        return ("salloc", *options(checked(job), self.settings))

    def run_here(self, job: Job) -> int:
        """Run it in the allocation that this process is in, until it is over; main's lines go to the output. Its exit code."""
        number = os.environ.get("SLURM_JOB_ID", "")
        if not number:
            raise UsageError("This is no allocation of Slurm.", f"Get one first: {' '.join(self.salloc_words(job))}")
        checked(job, os.environ)
        place = self._create(job, self.render(job))
        self._hide(place, job)
        _write_ticket(place, number, interactive=True)
        theirs, ours = os.pipe()
        words = [sys.executable, "-P", "-m", "ludus.launch.supervisor", str(place.path), str(theirs), "--stay", "--reach", REACH]
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with open(place.log("supervisor.out"), "ab") as said, open(ours, "wb"):
            supervisor = subprocess.Popen(  # noqa: S603
                words, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, pass_fds=(theirs,)
            )
            os.close(theirs)
            return self._attend(place, job, supervisor)

    def _attend(self, place: JobDirectory, job: Job, supervisor: subprocess.Popen[bytes]) -> int:
        lines = self._lines(place, [f"{job.main}-0"], follow=True)
        asked = False
        while True:
            try:
                for line in lines:
                    sys.stdout.write(f"{line}\n")
                    sys.stdout.flush()
                return supervisor.wait()
            except KeyboardInterrupt:
                supervisor.send_signal(signal.SIGQUIT if asked else signal.SIGTERM)
                asked = True
                lines = self._lines(place, [], follow=True)  # an interrupted generator is at its end

    def _interrupt(self, place: JobDirectory, at_once: bool) -> None:
        found = place.read()
        if not job_dir.is_here(found.machine):
            raise UsageError(f"The job {place.id} was started by hand on {found.machine.split()[0]}.", "Interrupt it there.")
        if found.supervisor is not None:
            identity.send_signal(found.supervisor.pid, found.supervisor.started, signal.SIGQUIT if at_once else signal.SIGTERM)

    # -- how they fare

    def _hide(self, place: JobDirectory, job: Job) -> None:
        place.token()
        if job.secrets:
            place.write_secrets({name: os.environ[name] for name in job.secrets})

    def _find(self, job_id: str) -> JobDirectory:
        """By our name for it, or by Slurm's number."""
        known = {place.id: place for place in self._all()}
        if job_id.isdigit():
            known |= {
                ticket.number: place for place in known.values() if (ticket := _ticket(place)).number and not ticket.interactive
            }
        if job_id not in known:
            raise UnknownName(f"There is no job {job_id!r} of {self.kind} here.", did_you_mean(job_id, known))
        return known[job_id]

    def _recorded(self, place: JobDirectory) -> JobStatus:
        try:
            return place.read().status
        except (Damaged, OSError) as error:
            return JobStatus(place.id, place.id, "failed", 1, (), f"its record cannot be read: {error}", str(place.logs))

    def _status(self, place: JobDirectory) -> JobStatus:
        status = self._recorded(place)
        if status.over:
            return status
        ticket = _ticket(place)
        if ticket.interactive:
            return self._status_here(place, status)
        if not ticket.number:
            fresh = time.time() - status.submitted_at < _HANDED_OVER_S
            return status if fresh or status.state == "running" else job_dir.failed(status, "it was never handed over to Slurm")
        if cluster := self._elsewhere(ticket):
            return replace(status, reason=f"it is in the queue of another cluster, {cluster}, which cannot be asked from here")
        then, known, queued = self._asked.get(place.id, (-ASK_EVERY_S, None, None))
        if known != status or time.monotonic() - then > ASK_EVERY_S:
            found, unheard = self._ask([ticket.number])
            if unheard:
                return replace(status, reason=unheard)
            queued = found.get(ticket.number)
            self._asked[place.id] = (time.monotonic(), status, queued)
        return self._judged(place, ticket.number, queued)

    def _judged(self, place: JobDirectory, number: str, queued: Queued | None) -> JobStatus:
        status = self._recorded(place)  # again: its end may have been written while Slurm was asked
        if status.over:
            return status
        if queued is None and (verdict := _verdict(place, status)) is not None:
            return verdict
        code = None
        if queued is not None and queued.state == "FAILED":
            try:
                code = commands.exit_code(number)
            except LudusError:
                code = None
        judged = conclusion(status, queued, code, place.is_marked())
        if judged.over:
            _write_verdict(place, judged)
            place.clear()
        return judged

    def _status_here(self, place: JobDirectory, status: JobStatus) -> JobStatus:
        found = place.read()
        fresh = found.supervisor is None and time.time() - status.submitted_at < commands.ASK_S
        if not job_dir.is_here(found.machine) or found.watched() or fresh:
            return status
        again = self._recorded(place)
        return again if again.over else job_dir.failed(status, "its supervisor is gone")

    def _elsewhere(self, ticket: _Ticket) -> str:
        """The cluster that the job was submitted to, if it is not this one: homes are shared, and numbers mean another job here."""
        return ticket.cluster if ticket.cluster and self._cluster() not in ("", ticket.cluster) else ""

    def _cluster(self) -> str:
        """Asked once. Empty: it is not known, and jobs are taken for this one's."""
        if self._name is None:
            self._name = ""
            with contextlib.suppress(WorkerFailed, UsageError):
                self._name = commands.cluster()
        return self._name

    def _ask(self, numbers: Sequence[str]) -> tuple[dict[str, Queued], str]:
        """And why Slurm could not be asked: then the records are all there is."""
        try:
            return commands.states(numbers), ""
        except (WorkerFailed, UsageError) as error:
            return {}, str(error)


class SlurmReach:
    """From the first node of an allocation (or from where `salloc` was called) to all of them, by `srun`."""

    def __init__(self, directory: JobDirectory, job: Job, environ: Mapping[str, str] | None = None) -> None:
        self._directory, self._job = directory, job
        self._environ = os.environ if environ is None else environ
        self._number = self._environ.get("SLURM_JOB_ID", "")
        if not self._number:
            raise UsageError("There is no allocation of Slurm here: SLURM_JOB_ID is not set.")
        if not _ticket(directory).number:
            _write_ticket(directory, self._number, cluster=self._environ.get("SLURM_CLUSTER_NAME", ""))
        self._nodes = allocated(self._environ)
        if len(self._nodes) < job.nodes:
            raise UsageError(
                f"The job {job.name} needs {job.nodes} nodes, and the allocation {self._number} has {len(self._nodes)}."
            )
        self._nodes = self._nodes[: job.nodes]
        self._here = self._environ.get("SLURMD_NODENAME", "")

    def surroundings(self) -> Surroundings:
        several = self._job.nodes > 1
        port = free_block(self._directory.id, PORTS) if several else 0
        token = self._directory.token() if several else None
        return Surroundings(self._addresses(), 0, port, token, self._job.ray, self._job.wait_s)

    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name, _ in self._nodes)

    def words(self, node: int, command: tuple[str, ...]) -> tuple[str, ...]:
        group, name, cpus = self._nodes[node]
        if node == 0 and name == self._here:
            return command
        ours = (sys.executable, "-P", "-m", "ludus.launch.remote_process")
        het = (f"--het-group={group}",) if group is not None else ()
        bound = (f"--cpus-per-task={cpus}",) if cpus else ()  # else it would be one core of them
        srun = ("srun", "--quiet", f"--jobid={self._number}", *het, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}",
                *bound, "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0")  # fmt: skip
        return (*ours, "near", *srun, *ours, "far", *command)

    def goes_on(self) -> bool:
        return not _ticket(self._directory).interactive  # nothing starts an allocation of salloc again

    def requeue(self) -> str:
        return commands.requeue(self._number)

    def _addresses(self) -> tuple[str, ...]:
        known = commands.addresses(self.names())
        found = [_resolved(known.get(name, name)) for name in self.names()]
        others = [address for address in found[1:] if not address.startswith("127.")]
        if others and found[0].startswith("127."):  # a host that knows its own name as 127.0.1.1
            found[0] = _seen_by(others[0]) or found[0]
        return tuple(found)


# -- values -------------------------------------------------------------------------------------------------------------


def conclusion(status: JobStatus, queued: Queued | None, code: int | None, cancelled: bool) -> JobStatus:
    """How a job fares whose record says that it is not over. `queued`: None when Slurm does not know it. `code`: of its script."""
    if queued is not None and queued.state in _WAITS:
        processes = tuple(replace(process, state="pending", pid=None, host="") for process in status.processes)
        why = f"it waits: {queued.why}" if queued.why else "it waits"
        return replace(status, state="pending", exit_code=None, processes=processes, reason=why)
    if queued is not None and queued.state in _RUNS:
        return status if status.state == "running" or status.reason else replace(status, reason="it is being started")
    log = f"see {status.logs}/slurm-*.out"
    ended = job_dir.failed(status, "")
    if cancelled or (queued is not None and queued.state == "CANCELLED"):
        return replace(ended, state="cancelled", exit_code=_CANCELLED, reason="it was cancelled")
    if queued is None:
        return replace(ended, reason=f"Slurm does not know it any more; {log}")
    if queued.state in _ENDS:
        return replace(ended, reason=_ENDS[queued.state])
    if status.state == "pending" and status.reason:  # it was ended in order, and not queued again
        return replace(ended, exit_code=_CANCELLED, reason=status.reason)
    if queued.state == "COMPLETED" and status.state == "running":  # the end could not be written
        return replace(ended, state="succeeded", exit_code=0)
    said = "" if code is None else f" with code {code}"
    began = "" if status.state == "running" else " before anything of it was started"
    return replace(ended, exit_code=code or 1, reason=f"its script ended{said}{began} ({queued.state}); {log}")


def exported(environ: Mapping[str, str], secrets: Sequence[str], unwanted: Collection[str] = ()) -> dict[str, str]:
    """What sbatch, and so the job, is given: Slurm keeps it in files. Without secrets, whatever they are called, and without another job's."""
    hidden = [environ[name] for name in secrets if len(environ.get(name, "")) >= 8]

    def is_kept(name: str, value: str) -> bool:
        if name in secrets or name in unwanted or name == "LD_PRELOAD" or name.startswith("LUDUS_JOB_"):
            return False
        if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name not in _KEPT_OF_SLURM:
            return False
        return not any(secret in value for secret in hidden)

    return {name: value for name, value in environ.items() if is_kept(name, value)}


def allocated(environ: Mapping[str, str]) -> list[tuple[int | None, str, int]]:
    """Group (None where there is but one), name and cores of each node, the first group's first."""
    size = int(environ.get("SLURM_HET_SIZE") or 0)
    suffixes = [(group, f"_HET_GROUP_{group}") for group in range(size)] if size else [(None, "")]
    found: list[tuple[int | None, str, int]] = []
    for group, suffix in suffixes:
        names = commands.host_names(environ.get(f"SLURM_JOB_NODELIST{suffix}", ""))
        cpus = counts(environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", ""))
        found += [(group, name, cpus[i] if i < len(cpus) else 0) for i, name in enumerate(names)]
    return found


def counts(text: str) -> list[int]:
    """4(x2),8 → 4 4 8"""
    found: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(number)] * int(times or 1)
    return found


def _resolved(name: str) -> str:
    try:
        known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return name
    found = sorted(known, key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0])


def _seen_by(other: str) -> str:
    """The address from which this machine would speak to the other."""
    try:
        return local_address(other, family=socket.AF_INET)
    except OSError:
        return ""


# -- files of a job -----------------------------------------------------------------------------------------------------


class _Ticket:
    """`cluster`: its name; empty: nobody knew."""

    def __init__(self, number: str = "", interactive: bool = False, cluster: str = "") -> None:
        self.number, self.interactive, self.cluster = number, interactive, cluster


def _ticket(place: JobDirectory) -> _Ticket:
    try:
        found = json.loads((place.path / _TICKET).read_text(encoding="utf-8"))
        return _Ticket(str(found["number"]), bool(found["interactive"]), str(found.get("cluster", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return _Ticket()


def _write_ticket(place: JobDirectory, number: str, *, interactive: bool = False, cluster: str = "") -> None:
    replace_json(place.path / _TICKET, {"number": number, "interactive": interactive, "cluster": cluster}, mode=0o600)


def _verdict(place: JobDirectory, status: JobStatus) -> JobStatus | None:
    """What Slurm said about its end, when it still knew."""
    try:
        found = json.loads((place.path / _VERDICT).read_text(encoding="utf-8"))
        return replace(job_dir.failed(status, str(found["reason"])), state=found["state"], exit_code=int(found["exit_code"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_verdict(place: JobDirectory, status: JobStatus) -> None:
    """Not into the record, which is its supervisor's: on a file system of many machines his last word may arrive after Slurm's."""
    replace_json(
        place.path / _VERDICT, {"state": status.state, "exit_code": status.exit_code, "reason": status.reason}, mode=0o600
    )
