"""Jobs as processes of this machine. Each has a small supervisor of its own, which needs nobody to go on."""

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
from ludus.launch.job import Job, JobStatus, checked
from ludus.launch.job_dir import JobDirectory, Record
from ludus.launch.job_index import Shelf
from ludus.launch.supervisor import TICK_S
from ludus.process import identity

_START_S = 60.0
_SUPERVISOR = (sys.executable, "-P", "-m", "ludus.launch.supervisor")


class LocalOrchestrator(Shelf):
    """`attached`: the jobs submitted here are cancelled when this object is closed, or when its process is gone, however that happens.

    Otherwise a job goes on without whoever submitted it, until its main role ends or it is cancelled. Roles share this machine:
    their `cpus` and `gpus` are not enforced.
    """

    kind = "local processes"

    def __init__(self, directory: Path | None = None, *, attached: bool = False) -> None:
        if sys.platform == "win32":
            raise UsageError("Jobs of local processes need Linux or macOS.", "Use WSL, or start the roles by hand.")
        super().__init__((directory or job_dir.state_home()) / "jobs")
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
        """What submit would run, after it has written what `render` says into the directory of the job."""
        return shlex.join([*_SUPERVISOR, str(self.directory / "ID")])

    def render(self, job: Job) -> dict[str, str]:
        return {job_dir.JOB: job_dir.write_job(checked(job))}

    def submit(self, job: Job) -> str:
        checked(job, os.environ)
        files = self.render(job)
        place = self._create(job, files)
        try:
            self._launch(place)
        except BaseException:
            shutil.rmtree(place.path, ignore_errors=True)
            raise
        return place.id

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        place = self._find(job_id)
        if self._status(place).over:
            return
        with contextlib.suppress(OSError):  # a disk that is full: then the signal has to do
            place.mark_cancelled()  # first: a supervisor that is still on its way looks for it
        found = place.read()
        if not job_dir.is_here(found.machine):
            raise UsageError(f"The job {job_id} runs on {found.machine.split()[0]}, not here.", "Cancel it there.")
        if found.supervisor is not None:  # gone since we looked: then its keeper is ending the job
            identity.send_signal(found.supervisor.pid, found.supervisor.started, signal.SIGQUIT if at_once else signal.SIGTERM)

    def _launch(self, place: JobDirectory) -> None:
        words = [*_SUPERVISOR, str(place.path)]
        ours = theirs = -1
        if self._attached:
            theirs, ours = os.pipe()
        try:
            with open(place.log("supervisor"), "ab", opener=_private) as said:
                code = subprocess.run(  # noqa: S603
                    [*words, *([str(theirs)] if self._attached else [])],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                    pass_fds=(theirs,) if self._attached else (),
                    timeout=_START_S,
                    check=False,
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            _close(ours)
            raise WorkerFailed(f"The supervisor of {place.id} did not start: {error}.") from error
        finally:
            _close(theirs)
        if code != 0:
            _close(ours)
            raise WorkerFailed(f"The supervisor of {place.id} did not start: {_end_of(place.log('supervisor'))}")
        if ours >= 0:
            self._lifelines.append(ours)

    def _status(self, place: JobDirectory) -> JobStatus:
        try:
            found = _healed(place)
        except (Damaged, OSError) as error:
            return JobStatus(place.id, place.id, "failed", 1, (), f"its record cannot be read: {error}", str(place.logs))
        status = found.status
        if status.over or not job_dir.is_here(found.machine) or found.watched():
            return status
        if found.supervisor is None and time.time() - status.submitted_at < _START_S:
            return status
        again = _healed(place)  # it may have come to its end while we looked
        if again.status.over:
            return again.status
        with contextlib.suppress(OSError):
            place.clear()  # nobody is left to do it
        return job_dir.failed(status, "its supervisor is gone")


def _healed(place: JobDirectory) -> Record:
    """A supervisor that runs writes its record again when it was damaged. Raises Damaged, OSError."""
    try:
        return place.read()
    except Damaged:
        time.sleep(1.5 * TICK_S)
        return place.read()


def _end_of(log: Path) -> str:
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
