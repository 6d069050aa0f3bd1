"""Jobs that are directories side by side: made, found, listed, read and forgotten. What runs them is the business of each backend."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ludus.core.plugins import did_you_mean
from ludus.errors import Damaged, UnknownName, UsageError, WorkerFailed
from ludus.io.rotating_log import LogReader
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, ProcessStatus
from ludus.launch.job_dir import JobDirectory

KEPT = 50
"""Jobs that are over and of which directory and logs are kept."""

_POLL_S = 0.1
_ATTEMPTS = 5
_BEGUN_S = 3600.0
_UNREADABLE_S = 30 * 86_400.0


class Shelf(ABC):
    """`directory`: of this user alone; each job has one in it, called like its id. `kind`: what the jobs are, for people."""

    kind = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def status(self, job_id: str) -> JobStatus:
        return self._status(self._find(job_id))

    def list(self) -> list[JobStatus]:
        return sorted((self._status(place) for place in self._all()), key=lambda status: (status.submitted_at, status.id))

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        place = self._find(job_id)
        shown = members(place.job())
        if role is not None:
            roles = sorted({member.role for member in shown})
            if role not in roles:
                raise UnknownName(f"The job {job_id} has no role {role!r}.", did_you_mean(role, roles))
            shown = [member for member in shown if member.role == role]
        return self._lines(place, [member.name for member in shown], follow)

    def remove(self, job_id: str) -> None:
        """Remove the record and the logs of a job that is over. Raises UnknownName; UsageError while it is not over."""
        place = self._find(job_id)
        if not self._status(place).over or self._may_run(place.path):
            raise UsageError(f"The job {job_id} is not over.", f"End it first: ludus jobs cancel {job_id}")
        shutil.rmtree(place.path, ignore_errors=True)

    @abstractmethod
    def _status(self, place: JobDirectory) -> JobStatus: ...

    # -- directories

    def _create(self, job: Job, files: Mapping[str, str]) -> JobDirectory:
        job_dir.make_private(self.directory)
        self._forget()
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        for _ in range(_ATTEMPTS):
            place = JobDirectory(self.directory / f"{job.name}-{stamp}-{secrets.token_hex(2)}")
            status = JobStatus(place.id, job.name, "pending", None, tuple(members(job)), "", str(place.logs), now, job.place)
            try:
                place.create(files, status)
            except FileExistsError:
                continue
            except OSError as error:
                shutil.rmtree(place.path, ignore_errors=True)
                raise UsageError(
                    f"{place.path} cannot be written: {error.strerror}.",
                    "Make room there, or set LUDUS_STATE_DIR to another directory.",
                ) from error
            return place
        raise WorkerFailed(f"No free name for a job {job.name} in {self.directory}.")

    def _find(self, job_id: str) -> JobDirectory:
        known = {place.id: place for place in self._all()}
        if job_id not in known:
            raise UnknownName(f"There is no job {job_id!r} of {self.kind}.", did_you_mean(job_id, known))
        return known[job_id]

    def _all(self) -> Sequence[JobDirectory]:
        try:
            return [JobDirectory(path) for path in self.directory.iterdir() if (path / job_dir.STATUS).is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _forget(self) -> None:
        """Remove the oldest of those that are over, so that there is an end to it; and what somebody who was killed has begun.

        Not one whose record cannot be read, as long as it may be running.
        """
        over = [status for status in self.list() if status.over and not self._may_run(self.directory / status.id)]
        for status in over[: max(0, len(over) - KEPT)]:
            shutil.rmtree(self.directory / status.id, ignore_errors=True)
        for path in self.directory.iterdir():
            if not (path / job_dir.STATUS).exists() and path.is_dir() and _age_s(path) > _BEGUN_S:
                shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _may_run(path: Path) -> bool:
        try:
            JobDirectory(path).read()
        except (Damaged, OSError):
            return _age_s(path / job_dir.LOGS / "supervisor.log") < _UNREADABLE_S
        return False

    # -- logs

    def _lines(self, place: JobDirectory, names: Sequence[str], follow: bool) -> Iterator[str]:
        label = len(names) > 1
        with contextlib.ExitStack() as stack:
            readers = {name: LogReader(place.log(name)) for name in names}
            for reader in readers.values():
                stack.callback(reader.close)
            while True:
                over = not follow or self._status(place).over  # asked before reading: what comes after is read once more
                found = False
                for name, reader in readers.items():
                    while lines := reader.lines():
                        found = True
                        yield from (f"{name}: {line}" if label else line for line in lines)
                        if len(names) > 1 and follow:
                            break  # one that never stops does not hide the others
                if over and not found:
                    break
                if not found:
                    time.sleep(_POLL_S)
            for name, reader in readers.items():
                yield from (f"{name}: {line}" if label else line for line in reader.rest())


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def members(job: Job) -> list[ProcessStatus]:
    """Its processes before any of them is started."""
    return [ProcessStatus(role.name, index, "pending") for role in job.roles for index in range(role.count)]
