"""Backend that runs jobs as processes of this machine, each under its own supervisor process."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from ludus.errors import Damaged, LudusError, UsageError, WorkerFailed
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, check_job
from ludus.launch.job_dir import JobDirectory, JobRecord
from ludus.launch.job_index import JobIndex
from ludus.launch.supervisor import TICK_S
from ludus.process import identity

_START_S = 60.0
_SUPERVISOR = (sys.executable, "-P", "-m", "ludus.launch.supervisor")


class LocalOrchestrator(JobIndex):
    """`attached`: cancel the submitted jobs when this object is closed or its process ends in any way.

    Otherwise a job outlives the submitting process. `cpus` and `gpus` of roles are not enforced.
    """

    kind = "local processes"

    def __init__(self, directory: Path | None = None, *, attached: bool = False) -> None:
        if sys.platform == "win32":
            raise UsageError("Jobs of local processes need Linux or macOS.", "Use WSL, or start the roles by hand.")
        super().__init__((directory or job_dir.state_dir()) / "jobs")
        self._attached = attached
        self._lifelines: list[int] = []

    def __enter__(self) -> LocalOrchestrator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._lifelines:
            os.close(self._lifelines.pop())

    def command(self) -> str:
        """Return the command that `submit` runs after it has written the rendered files into the job directory."""
        return shlex.join([*_SUPERVISOR, str(self.directory / "ID")])

    def render(self, job: Job) -> dict[str, str]:
        return {job_dir.JOB: job_dir.job_to_json(check_job(job))}

    def submit(self, job: Job) -> str:
        check_job(job, os.environ)
        files = self.render(job)
        directory = self._create(job, files)
        try:
            self._launch(directory)
        except BaseException:  # also an interrupt must not leave an incomplete job
            shutil.rmtree(directory.path, ignore_errors=True)
            raise
        return directory.id

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        directory = self._find(job_id)
        if self._status(directory).over:
            return
        with contextlib.suppress(OSError):  # a full disk: the signal alone must do
            directory.request_cancel()  # before the signal: a supervisor that is still starting checks the mark
        record = directory.read()
        if not job_dir.is_this_machine(record.machine):
            raise UsageError(f"The job {job_id} runs on {record.machine.split()[0]}, not here.", "Cancel it there.")
        if record.supervisor is not None:  # if it has just died, its keeper ends the job
            identity.send_signal(record.supervisor.pid, record.supervisor.started, signal.SIGQUIT if at_once else signal.SIGTERM)

    def _launch(self, directory: JobDirectory) -> None:
        words = [*_SUPERVISOR, str(directory.path)]
        ours = theirs = -1
        if self._attached:
            theirs, ours = os.pipe()
        try:
            with open(directory.log("supervisor"), "ab", opener=_private) as log:
                code = subprocess.run(  # noqa: S603
                    [*words, *([str(theirs)] if self._attached else [])],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=(theirs,) if self._attached else (),
                    timeout=_START_S,
                    check=False,
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            _close(ours)
            raise WorkerFailed(f"The supervisor of {directory.id} did not start: {error}.") from error
        finally:
            _close(theirs)
        if code != 0:
            _close(ours)
            raise WorkerFailed(f"The supervisor of {directory.id} did not start: {_last_line(directory.log('supervisor'))}")
        if ours >= 0:
            self._lifelines.append(ours)

    def _status(self, directory: JobDirectory) -> JobStatus:
        try:
            record = _read_record(directory)
        except (Damaged, OSError) as error:
            return JobStatus(
                directory.id, directory.id, "failed", 1, (), f"its record cannot be read: {error}", str(directory.logs)
            )
        status = record.status
        if status.over or not job_dir.is_this_machine(record.machine) or record.is_supervised():
            return status
        if record.supervisor is None and time.time() - status.submitted_at < _START_S:
            return status
        record = _read_record(directory)  # it may have ended in the meantime
        if record.status.over:
            return record.status
        with contextlib.suppress(OSError):
            directory.clear()
        return job_dir.as_failed(status, "its supervisor is gone")


def _read_record(directory: JobDirectory) -> JobRecord:
    """Read the record, twice if it is damaged: a running supervisor rewrites it. Raises Damaged, OSError."""
    try:
        return directory.read()
    except Damaged:
        time.sleep(1.5 * TICK_S)
        return directory.read()


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        raise LudusError(f"{log} cannot be read: {error.strerror}.") from error
    return lines[-1] if lines else f"it printed nothing; see {log}."


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
