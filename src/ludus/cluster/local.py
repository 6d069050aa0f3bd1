"""Jobs as processes of this machine. Each has a small supervisor of its own, which needs nobody to go on."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ludus.cluster import pids, record
from ludus.cluster.cluster import Job, JobStatus, ProcessStatus, checked
from ludus.cluster.record import JobDirectory
from ludus.errors import Damaged, LudusError, UnknownName, UsageError, WorkerFailed
from ludus.logfile import LogReader
from ludus.plugins import did_you_mean

KEPT = 50
"""Jobs that are over and of which directory and logs are kept."""

_START_S = 60.0
_POLL_S = 0.1
_ATTEMPTS = 5


class LocalOrchestrator:
    """`attached`: the jobs submitted here are cancelled when this object is closed, or when its process is gone, however that happens.

    Otherwise a job goes on without whoever submitted it, until its main role ends or it is cancelled. Roles share this machine:
    their `cpus` and `gpus` are not enforced.
    """

    def __init__(self, directory: Path | None = None, *, attached: bool = False) -> None:
        if sys.platform == "win32":
            raise UsageError("Jobs of local processes need Linux or macOS.", "Use WSL, or start the roles by hand.")
        self.directory = (directory or record.state_home()) / "jobs"
        self._attached = attached
        self._lifelines: list[int] = []

    def __enter__(self) -> LocalOrchestrator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._lifelines:
            os.close(self._lifelines.pop())

    def render(self, job: Job) -> dict[str, str]:
        return {record.JOB: record.write_job(checked(job))}

    def submit(self, job: Job) -> str:
        checked(job, os.environ)
        files = self.render(job)
        record.make_private(self.directory.parent)
        record.make_private(self.directory)
        self._forget()
        place = self._create(job, files)
        try:
            self._launch(place)
        except BaseException:
            shutil.rmtree(place.path, ignore_errors=True)
            raise
        return place.id

    def status(self, job_id: str) -> JobStatus:
        return self._status(self._find(job_id))

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        place = self._find(job_id)
        shown = _members(place.job())
        if role is not None:
            roles = sorted({member.role for member in shown})
            if role not in roles:
                raise UnknownName(f"The job {job_id} has no role {role!r}.", did_you_mean(role, roles))
            shown = [member for member in shown if member.role == role]
        return self._lines(place, [member.name for member in shown], follow)

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        place = self._find(job_id)
        if self._status(place).over:
            return
        found = place.read()
        if not record.is_here(found.machine):
            raise UsageError(f"The job {job_id} runs on {found.machine.split()[0]}, not here.", "Cancel it there.")
        if found.supervisor is not None:  # gone since we looked: then its keeper is ending the job
            pids.send(found.supervisor.pid, found.supervisor.started, signal.SIGQUIT if at_once else signal.SIGTERM)

    def list(self) -> list[JobStatus]:
        return sorted((self._status(place) for place in self._all()), key=lambda status: (status.submitted_at, status.id))

    # -- directories

    def _create(self, job: Job, files: dict[str, str]) -> JobDirectory:
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        for _ in range(_ATTEMPTS):
            place = JobDirectory(self.directory / f"{job.name}-{stamp}-{secrets.token_hex(2)}")
            status = JobStatus(place.id, job.name, "pending", None, tuple(_members(job)), "", str(place.logs), now, job.place)
            with contextlib.suppress(FileExistsError):
                place.create(files, status)
                return place
        raise WorkerFailed(f"No free name for a job {job.name} in {self.directory}.")

    def _launch(self, place: JobDirectory) -> None:
        words = [sys.executable, "-P", "-m", "ludus.cluster.supervisor", str(place.path)]
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

    def _find(self, job_id: str) -> JobDirectory:
        known = {place.id: place for place in self._all()}
        if job_id not in known:
            raise UnknownName(f"There is no job {job_id!r} of local processes.", did_you_mean(job_id, known))
        return known[job_id]

    def _all(self) -> Sequence[JobDirectory]:
        try:
            return [JobDirectory(path) for path in self.directory.iterdir() if (path / record.STATUS).is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _forget(self) -> None:
        """Remove the oldest of those that are over, so that there is an end to it."""
        over = [status for status in self.list() if status.over]
        for status in over[: max(0, len(over) - KEPT)]:
            shutil.rmtree(self.directory / status.id, ignore_errors=True)

    def _status(self, place: JobDirectory) -> JobStatus:
        try:
            found = place.read()
        except (Damaged, OSError) as error:
            return JobStatus(place.id, place.id, "failed", 1, (), f"its record cannot be read: {error}", str(place.logs))
        status = found.status
        if status.over or not record.is_here(found.machine) or found.watched():
            return status
        if found.supervisor is None and time.time() - status.submitted_at < _START_S:
            return status
        again = place.read()  # it may have come to its end while we looked
        return again.status if again.status.over else record.failed(status, "its supervisor is gone")

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


def _members(job: Job) -> list[ProcessStatus]:
    return [ProcessStatus(role.name, index, "pending") for role in job.roles for index in range(role.count)]


def _end_of(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        raise LudusError(f"{log} cannot be read: {error.strerror}.") from error
    return lines[-1] if lines else f"it said nothing; see {log}."


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
