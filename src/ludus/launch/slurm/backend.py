"""Backend for Slurm. A job is a batch script that becomes the job's supervisor on the first of its nodes.

The state of a job is in its directory, on a file system that all nodes share. Slurm is queried for what no supervisor could record.
Processes on other nodes are started by `srun`, through `launch/remote_process.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io.addresses import local_address
from ludus.io.atomic_file import replace_json
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, check_job
from ludus.launch.job_dir import JobDirectory
from ludus.launch.job_index import JobIndex, find_by_id
from ludus.launch.slurm import commands
from ludus.launch.slurm.commands import QueueState
from ludus.launch.slurm.sbatch import (
    SCRIPT,
    STARTER,
    SlurmGroup,
    SlurmSettings,
    overriding_variables,
    render_script,
    salloc_options,
)
from ludus.process.job_env import PORTS, JobEnv, find_free_ports

__all__ = ["SlurmGroup", "SlurmOrchestrator", "SlurmSettings", "SlurmStarter", "batch_environment", "combine_status"]

QUERY_INTERVAL_S = 2.0
"""Minimum interval between queries about an unchanged job: all users share Slurm's controller."""

_SLURM_JOB, _END, _AT_ONCE = "slurm.json", "verdict.json", "cancel-at-once"
_CANCELLED = 130
_SUBMITTED_S = 2 * commands.SUBMIT_S
_EXPORTED_SLURM = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")

_WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING_STATES = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_END_REASONS: Mapping[str, str] = {
    "TIMEOUT": "its time limit was reached",
    "NODE_FAIL": "one of its nodes failed",
    "BOOT_FAIL": "one of its nodes could not be started",
    "OUT_OF_MEMORY": "it used more memory than it had requested",
    "PREEMPTED": "a job of higher priority preempted it",
    "DEADLINE": "its deadline was reached",
    "REVOKED": "another cluster has taken it",
}


class SlurmOrchestrator(JobIndex):
    """`directory`: on a file system shared by this machine and all nodes."""

    kind = "Slurm"

    def __init__(self, directory: Path | None = None, settings: SlurmSettings | None = None) -> None:
        super().__init__((directory or job_dir.state_dir()) / "slurm")
        self.settings = settings or SlurmSettings()
        self._queried: dict[str, tuple[float, JobStatus, QueueState | None]] = {}
        self._name: str | None = None

    def render(self, job: Job) -> dict[str, str]:
        return {SCRIPT: render_script(check_job(job), self.settings), job_dir.JOB: job_dir.job_to_json(job)}

    def submit(self, job: Job) -> str:
        check_job(job, os.environ)
        files = self.render(job)
        environ = batch_environment(os.environ, job.secrets, overriding_variables(files[SCRIPT]))
        with self._new_directory(job, files) as directory:
            self._write_secrets(directory, job)
            cluster = self._cluster()
            number = commands.submit(directory.path, SCRIPT, environ)
        _write_slurm_job(directory, number, cluster=cluster)
        return directory.id

    def list(self) -> list[JobStatus]:
        """Return all jobs, with one query to Slurm."""
        unfinished = {each: _read_slurm_job(each) for each in self._directories() if not self._read_status(each).over}
        numbers = {
            directory: slurm_job.number
            for directory, slurm_job in unfinished.items()
            if not slurm_job.interactive and not self._other_cluster(slurm_job)
        }
        queued, error = self._query([number for number in numbers.values() if number])
        for directory, number in numbers.items() if not error else ():
            self._queried[directory.id] = (time.monotonic(), self._read_status(directory), queued.get(number))
        return super().list()

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        directory = self._find(job_id)
        self._queried.pop(directory.id, None)
        status = self._status(directory)
        if status.over:
            return
        slurm_job = _read_slurm_job(directory)
        if slurm_job.interactive:
            self._signal_supervisor(directory, at_once=at_once)
            return
        if not slurm_job.number:
            raise WorkerFailed(f"Slurm's number of the job {directory.id} is not known yet.", "Try again in a moment.")
        if cluster := self._other_cluster(slurm_job):
            raise UsageError(f"The job {directory.id} is in the queue of another cluster, {cluster}.", "Cancel it there.")
        directory.request_cancel()  # first: the script checks the mark, should it start just now
        commands.cancel_waiting(slurm_job.number)
        commands.signal(slurm_job.number, "QUIT" if at_once else "TERM")
        if at_once:
            repeated = (directory.path / _AT_ONCE).exists()
            (directory.path / _AT_ONCE).touch(mode=0o600)
            if repeated or status.state != "running":  # no supervisor reacts to the signal
                commands.cancel(slurm_job.number)

    # -- in an allocation

    def salloc_words(self, job: Job) -> tuple[str, ...]:
        """Return the command that requests an allocation for the job. A command may be appended; without one, salloc starts a shell."""
        return ("salloc", *salloc_options(check_job(job), self.settings))

    def run_here(self, job: Job) -> int:
        """Run the job to its end in the current allocation and return its exit code. The output of main goes to stdout."""
        number = os.environ.get("SLURM_JOB_ID", "")
        if not number:
            raise UsageError(
                "This process is not in a Slurm allocation.", f"Request one first: {' '.join(self.salloc_words(job))}"
            )
        check_job(job, os.environ)
        with self._new_directory(job, self.render(job)) as directory:
            self._write_secrets(directory, job)
            _write_slurm_job(directory, number, interactive=True)
        theirs, ours = os.pipe()
        words = [sys.executable, "-P", "-m", "ludus.launch.supervisor", str(directory.path), str(theirs), "--stay"]
        words += ["--starter", STARTER]
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with open(directory.log("supervisor.out"), "ab") as log, open(ours, "wb"):
            supervisor = subprocess.Popen(  # noqa: S603
                words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(theirs,)
            )
            os.close(theirs)
            return self._follow_output(directory, job, supervisor)

    def _follow_output(self, directory: JobDirectory, job: Job, supervisor: subprocess.Popen[bytes]) -> int:
        lines = self._lines(directory, [f"{job.main}-0"], follow=True)
        interrupted = False
        while True:
            try:
                for line in lines:
                    sys.stdout.write(f"{line}\n")
                    sys.stdout.flush()
                return supervisor.wait()
            except KeyboardInterrupt:
                supervisor.send_signal(signal.SIGQUIT if interrupted else signal.SIGTERM)
                interrupted = True
                lines = self._lines(directory, [], follow=True)  # an interrupted generator cannot be continued

    # -- status

    def _write_secrets(self, directory: JobDirectory, job: Job) -> None:
        directory.token()
        if job.secrets:
            directory.write_secrets({name: os.environ[name] for name in job.secrets})

    def _find(self, job_id: str) -> JobDirectory:
        """Find a job by its id or by Slurm's number."""
        known = {directory.id: directory for directory in self._directories()}
        if job_id.isdigit():
            known |= {
                slurm_job.number: directory
                for directory in known.values()
                if (slurm_job := _read_slurm_job(directory)).number and not slurm_job.interactive
            }
        return find_by_id(job_id, known, self.kind)

    def _status(self, directory: JobDirectory) -> JobStatus:
        status = self._read_status(directory)
        if status.over:
            return status
        slurm_job = _read_slurm_job(directory)
        if slurm_job.interactive:
            return self._supervised_status(directory, commands.QUERY_S)
        if not slurm_job.number:
            fresh = time.time() - status.submitted_at < _SUBMITTED_S
            return status if fresh or status.state == "running" else job_dir.as_failed(status, "it was never submitted to Slurm")
        if cluster := self._other_cluster(slurm_job):
            return replace(status, reason=f"it is in the queue of another cluster, {cluster}, which cannot be queried from here")
        then, known, queued = self._queried.get(directory.id, (-QUERY_INTERVAL_S, None, None))
        if known != status or time.monotonic() - then > QUERY_INTERVAL_S:
            states, error = self._query([slurm_job.number])
            if error:
                return replace(status, reason=error)
            queued = states.get(slurm_job.number)
            self._queried[directory.id] = (time.monotonic(), status, queued)
        return self._combine(directory, slurm_job.number, queued)

    def _combine(self, directory: JobDirectory, number: str, queued: QueueState | None) -> JobStatus:
        status = self._read_status(directory)  # again: its end may have been written during the query
        if status.over:
            return status
        if queued is None and (end := _read_end(directory, status)) is not None:
            return end
        code = None
        if queued is not None and queued.state == "FAILED":
            with contextlib.suppress(LudusError):
                code = commands.exit_code(number)
        combined = combine_status(status, queued, code, directory.cancel_requested())
        if combined.over:
            # Not status.json, which belongs to the supervisor: its last write may arrive later on a shared file system.
            about = {"state": combined.state, "exit_code": combined.exit_code, "reason": combined.reason}
            replace_json(directory.path / _END, about, mode=0o600)
            directory.clear()
        return combined

    def _other_cluster(self, slurm_job: _SlurmJob) -> str:
        """Return the cluster of the job if it is not this one: clusters may share home directories, and then job numbers collide."""
        return slurm_job.cluster if slurm_job.cluster and self._cluster() not in ("", slurm_job.cluster) else ""

    def _cluster(self) -> str:
        """Return the name of this cluster, from one query; "" if it is unknown, and then all jobs count as this cluster's."""
        if self._name is None:
            self._name = ""
            with contextlib.suppress(WorkerFailed, UsageError):
                self._name = commands.cluster_name()
        return self._name

    def _query(self, numbers: Sequence[str]) -> tuple[dict[str, QueueState], str]:
        """Return the states of jobs, and the error if Slurm could not be queried."""
        try:
            return commands.states(numbers), ""
        except (WorkerFailed, UsageError) as error:
            return {}, str(error)


class SlurmStarter:
    """Starts processes on the nodes of an allocation by `srun`, from its first node or from where `salloc` was called."""

    def __init__(self, directory: JobDirectory, job: Job, environ: Mapping[str, str] | None = None) -> None:
        self._directory, self._job = directory, job
        self._environ = os.environ if environ is None else environ
        self._number = self._environ.get("SLURM_JOB_ID", "")
        if not self._number:
            raise UsageError("This process is not in a Slurm allocation: SLURM_JOB_ID is not set.")
        if not _read_slurm_job(directory).number:
            _write_slurm_job(directory, self._number, cluster=self._environ.get("SLURM_CLUSTER_NAME", ""))
        self._nodes = list_allocation(self._environ)
        if len(self._nodes) < job.nodes:
            raise UsageError(
                f"The job {job.name} needs {job.nodes} nodes, and the allocation {self._number} has {len(self._nodes)}."
            )
        self._nodes = self._nodes[: job.nodes]
        self._here = self._environ.get("SLURMD_NODENAME", "")

    def job_env(self) -> JobEnv:
        several = self._job.nodes > 1
        port = find_free_ports(self._directory.id, PORTS) if several else 0
        token = self._directory.token() if several else None
        return JobEnv(self._addresses(), 0, port, token, self._job.ray, self._job.wait_s)

    def node_names(self) -> tuple[str, ...]:
        return tuple(name for _, name, _ in self._nodes)

    def wrap_command(self, node: int, command: tuple[str, ...]) -> tuple[str, ...]:
        group, name, cpus = self._nodes[node]
        if node == 0 and name == self._here:
            return command
        module = (sys.executable, "-P", "-m", "ludus.launch.remote_process")
        het = (f"--het-group={group}",) if group is not None else ()
        cores = (f"--cpus-per-task={cpus}",) if cpus else ()  # else srun binds it to one core
        srun = ("srun", "--quiet", f"--jobid={self._number}", *het, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}",
                *cores, "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0")  # fmt: skip
        return (*module, "relay", *srun, *module, "run", *command)

    def restarts_job(self) -> bool:
        return not _read_slurm_job(self._directory).interactive  # Slurm does not restart an allocation of salloc

    def requeue(self) -> str:
        return commands.requeue(self._number)

    def _addresses(self) -> tuple[str, ...]:
        known = commands.node_addresses(self.node_names())
        addresses = [_resolve(known.get(name, name)) for name in self.node_names()]
        others = [address for address in addresses[1:] if not address.startswith("127.")]
        if others and addresses[0].startswith("127."):  # a host that resolves its own name to 127.0.1.1
            with contextlib.suppress(OSError):  # there is no route to the other node
                addresses[0] = local_address(others[0], family=socket.AF_INET)
        return tuple(addresses)


# -- values -------------------------------------------------------------------------------------------------------------


def combine_status(status: JobStatus, queued: QueueState | None, code: int | None, cancelled: bool) -> JobStatus:
    """Combine a recorded status that is not over with Slurm's state. `queued`: None if Slurm does not know the job. `code`: of its script."""
    if queued is not None and queued.state in _WAITING_STATES:
        processes = tuple(replace(process, state="pending", pid=None, host="") for process in status.processes)
        why = f"waiting in the queue: {queued.why}" if queued.why else "waiting in the queue"
        return replace(status, state="pending", exit_code=None, processes=processes, reason=why)
    if queued is not None and queued.state in _RUNNING_STATES:
        return status if status.state == "running" or status.reason else replace(status, reason="it is being started")
    log = f"see {status.logs}/slurm-*.out"
    ended = job_dir.as_failed(status, "")
    if cancelled or (queued is not None and queued.state == "CANCELLED"):
        return replace(ended, state="cancelled", exit_code=_CANCELLED, reason="it was cancelled")
    if queued is None:
        return replace(ended, reason=f"Slurm does not know it any more; {log}")
    if queued.state in _END_REASONS:
        return replace(ended, reason=_END_REASONS[queued.state])
    if status.state == "pending" and status.reason:  # it was interrupted and not queued again
        return replace(ended, exit_code=_CANCELLED, reason=status.reason)
    if queued.state == "COMPLETED" and status.state == "running":  # the end could not be written
        return replace(ended, state="succeeded", exit_code=0)
    with_code = "" if code is None else f" with code {code}"
    early = "" if status.state == "running" else " before any of its processes was started"
    return replace(ended, exit_code=code or 1, reason=f"its script ended{with_code}{early} ({queued.state}); {log}")


def batch_environment(environ: Mapping[str, str], secrets: Sequence[str], unwanted: Collection[str] = ()) -> dict[str, str]:
    """Return the environment for sbatch, without secret values, also under other names: Slurm stores it in files. Variables of another
    job are left out too."""
    hidden = [environ[name] for name in secrets if len(environ.get(name, "")) >= 8]

    def is_kept(name: str, value: str) -> bool:
        if name in secrets or name in unwanted or name == "LD_PRELOAD" or name.startswith("LUDUS_JOB_"):
            return False
        if name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name not in _EXPORTED_SLURM:
            return False
        return not any(secret in value for secret in hidden)

    return {name: value for name, value in environ.items() if is_kept(name, value)}


def list_allocation(environ: Mapping[str, str]) -> list[tuple[int | None, str, int]]:
    """Return group (None if the job is not heterogeneous), name and cores of each node, in the order of the groups."""
    size = int(environ.get("SLURM_HET_SIZE") or 0)
    suffixes = [(group, f"_HET_GROUP_{group}") for group in range(size)] if size else [(None, "")]
    found: list[tuple[int | None, str, int]] = []
    for group, suffix in suffixes:
        names = commands.host_names(environ.get(f"SLURM_JOB_NODELIST{suffix}", ""))
        cpus = parse_counts(environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", ""))
        found += [(group, name, cpus[i] if i < len(cpus) else 0) for i, name in enumerate(names)]
    return found


def parse_counts(text: str) -> list[int]:
    """Expand Slurm's counts per node: "4(x2),8" → [4, 4, 8]."""
    found: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(number)] * int(times or 1)
    return found


def _resolve(name: str) -> str:
    try:
        known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return name
    found = sorted(known, key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0])


# -- files of a job -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SlurmJob:
    """Content of slurm.json. `cluster`: its name; "" if unknown."""

    number: str = ""
    interactive: bool = False
    cluster: str = ""


def _read_slurm_job(directory: JobDirectory) -> _SlurmJob:
    try:
        found = json.loads((directory.path / _SLURM_JOB).read_text(encoding="utf-8"))
        return _SlurmJob(str(found["number"]), bool(found["interactive"]), str(found.get("cluster", "")))
    except (OSError, ValueError, KeyError, TypeError):
        return _SlurmJob()


def _write_slurm_job(directory: JobDirectory, number: str, *, interactive: bool = False, cluster: str = "") -> None:
    replace_json(directory.path / _SLURM_JOB, {"number": number, "interactive": interactive, "cluster": cluster}, mode=0o600)


def _read_end(directory: JobDirectory, status: JobStatus) -> JobStatus | None:
    """Return the end of the job as Slurm reported it before it forgot the job."""
    try:
        found = json.loads((directory.path / _END).read_text(encoding="utf-8"))
        return replace(job_dir.as_failed(status, str(found["reason"])), state=found["state"], exit_code=int(found["exit_code"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
