"""Jobs stored as subdirectories of one directory: created, listed, read and deleted. Each backend adds how they run."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ludus.core.plugins import did_you_mean
from ludus.errors import Damaged, UnknownName, UsageError, WorkerFailed
from ludus.io.rotating_log import LogReader
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, ProcessStatus
from ludus.launch.job_dir import JobDirectory, JobRecord
from ludus.launch.supervisor import TICK_S
from ludus.process import identity

T = TypeVar("T")

MAX_ENDED_JOBS = 50
"""Ended jobs whose directories are kept."""

_POLL_S = 0.1
_ATTEMPTS = 5
_INCOMPLETE_S = 3600.0
_UNREADABLE_S = 30 * 86_400.0


class JobIndex(ABC):
    """`directory`: private to the user; each job is a subdirectory named by its id. `kind`: the backend's name in messages."""

    kind = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def status(self, job_id: str) -> JobStatus:
        return self._status(self._find(job_id))

    def list(self) -> list[JobStatus]:
        return sorted(map(self._status, self._directories()), key=lambda status: (status.submitted_at, status.id))

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        directory = self._find(job_id)
        processes = pending_processes(directory.job())
        if role is not None:
            roles = sorted({process.role for process in processes})
            if role not in roles:
                raise UnknownName(f"The job {job_id} has no role {role!r}.", did_you_mean(role, roles))
            processes = [process for process in processes if process.role == role]
        return self._lines(directory, [process.name for process in processes], follow)

    def remove(self, job_id: str) -> None:
        """Remove the record and the logs of a job that is over. Raises UnknownName; UsageError while it is not over."""
        directory = self._find(job_id)
        if not self._status(directory).over or self._may_run(directory.path):
            raise UsageError(f"The job {job_id} is not over.", f"Cancel it first: ludus jobs cancel {job_id}")
        shutil.rmtree(directory.path, ignore_errors=True)

    @abstractmethod
    def _status(self, directory: JobDirectory) -> JobStatus: ...

    # -- supervisor

    def _signal_supervisor(self, directory: JobDirectory, *, at_once: bool) -> None:
        """Cancel a job whose supervisor runs on this machine. Raises UsageError if it runs on another one."""
        record = directory.read()
        if not job_dir.is_this_machine(record.machine):
            raise UsageError(f"The job {directory.id} runs on {record.machine.split()[0]}, not here.", "Cancel it there.")
        if record.supervisor is not None:  # if it has just died, its guard ends the job
            identity.send_signal(record.supervisor.pid, record.supervisor.started, signal.SIGQUIT if at_once else signal.SIGTERM)

    def _read_status(self, directory: JobDirectory) -> JobStatus:
        try:
            return directory.read().status
        except (Damaged, OSError) as error:
            why = f"its record cannot be read: {error}"
            return JobStatus(directory.id, directory.id, "failed", 1, (), why, str(directory.logs))

    def _supervised_status(self, directory: JobDirectory, start_s: float) -> JobStatus:
        """Return the status of a job whose supervisor runs on this machine, and starts within `start_s`."""
        try:
            record = directory.read()
        except Damaged:  # a running supervisor rewrites it
            time.sleep(1.5 * TICK_S)
            record = JobRecord(self._read_status(directory))
        except OSError:
            record = JobRecord(self._read_status(directory))
        status = record.status
        if status.over or not job_dir.is_this_machine(record.machine) or record.is_supervised():
            return status
        if record.supervisor is None and time.time() - status.submitted_at < start_s:
            return status
        again = self._read_status(directory)  # it may have ended in the meantime
        if again.over:
            return again
        with contextlib.suppress(OSError):
            directory.clear()
        return job_dir.as_failed(status, "its supervisor is gone")

    # -- directories

    @contextlib.contextmanager
    def _new_directory(self, job: Job, files: Mapping[str, str]) -> Iterator[JobDirectory]:
        """Create the directory of a job. If the block fails or is interrupted, the directory is removed."""
        job_dir.make_private(self.directory)
        self._delete_old()
        with contextlib.ExitStack() as undo:
            try:
                directory = JobDirectory(new_job_path(self.directory, job.name))
                undo.callback(shutil.rmtree, directory.path, ignore_errors=True)
                processes, logs = tuple(pending_processes(job)), str(directory.logs)
                status = JobStatus(directory.id, job.name, "pending", None, processes, "", logs, time.time(), job.place)
                directory.create(files, status)
            except OSError as error:
                raise UsageError(
                    f"{self.directory} cannot be written: {error.strerror}.",
                    "Make room there, or set LUDUS_STATE_DIR to another directory.",
                ) from error
            yield directory
            undo.pop_all()

    def _find(self, job_id: str) -> JobDirectory:
        return find_by_id(job_id, {directory.id: directory for directory in self._directories()}, self.kind)

    def _directories(self) -> Sequence[JobDirectory]:
        try:
            return [JobDirectory(path) for path in self.directory.iterdir() if (path / job_dir.STATUS).is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _delete_old(self) -> None:
        """Delete the oldest ended jobs beyond MAX_ENDED_JOBS, and incomplete directories of killed submissions.

        A job with an unreadable record is kept while it may still run.
        """
        over = [status for status in self.list() if status.over and not self._may_run(self.directory / status.id)]
        for status in over[:-MAX_ENDED_JOBS]:
            shutil.rmtree(self.directory / status.id, ignore_errors=True)
        for path in self.directory.iterdir():
            if not (path / job_dir.STATUS).exists() and path.is_dir() and _age_s(path) > _INCOMPLETE_S:
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _may_run(path: Path) -> bool:
        try:
            JobDirectory(path).read()
        except (Damaged, OSError):
            return _age_s(path / job_dir.LOGS / "supervisor.log") < _UNREADABLE_S
        return False

    # -- logs

    def _lines(self, directory: JobDirectory, names: Sequence[str], follow: bool) -> Iterator[str]:
        label = len(names) > 1
        with contextlib.ExitStack() as stack:
            readers = {name: LogReader(directory.log(name)) for name in names}
            for reader in readers.values():
                stack.callback(reader.close)
            while True:
                over = not follow or self._status(directory).over  # read before the logs, so that the last lines are not missed
                found = False
                for name, reader in readers.items():
                    while lines := reader.lines():
                        found = True
                        yield from (f"{name}: {line}" if label else line for line in lines)
                        if len(names) > 1 and follow:
                            break  # a process that writes without end must not starve the others
                if over and not found:
                    break
                if not found:
                    time.sleep(_POLL_S)
            for name, reader in readers.items():
                yield from (f"{name}: {line}" if label else line for line in reader.rest())


def new_job_path(parent: Path, name: str) -> Path:
    """Create a private directory named by the job, the time and a random suffix. Raises OSError, WorkerFailed."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for _ in range(_ATTEMPTS):
        path = parent / f"{name}-{stamp}-{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=job_dir.PRIVATE)
            return path
    raise WorkerFailed(f"There is no free id for the job {name} in {parent}.")


def find_by_id(job_id: str, known: Mapping[str, T], kind: str) -> T:
    """Raises UnknownName."""
    if job_id not in known:
        raise UnknownName(f"There is no job {job_id!r} of {kind} here.", did_you_mean(job_id, known))
    return known[job_id]


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def pending_processes(job: Job) -> list[ProcessStatus]:
    """Return the processes of a job as they are before the start."""
    return [ProcessStatus(role.name, index, "pending") for role in job.roles for index in range(role.count)]
