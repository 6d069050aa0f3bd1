"""The directory of a job of this machine: what was asked for, how it fares, and what its processes wrote.

    job.json  status.json  logs/ROLE-N.log  logs/supervisor.log  scratch/ (while it runs)
    run.json (what its main role has begun)  token, secrets (until it is over)  cancel (somebody has asked for its end)

Only its owner may look into it. `status.json` is replaced as a whole; nobody locks anything.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ludus.errors import Damaged, UsageError
from ludus.io.atomic_file import open_for_replace
from ludus.launch.job import OVER, Job, JobStatus, ProcessStatus, Role
from ludus.process import identity, procfs

JOB, STATUS, LOGS, SCRATCH, RUN = "job.json", "status.json", "logs", "scratch", "run.json"
TOKEN, SECRETS, CANCEL = "token", "secrets", "cancel"
PRIVATE = 0o700
_ROOM = 1024
"""A status is followed by blanks, so that a longer one can take its place on a disk that is full."""


@dataclass(frozen=True)
class Watcher:
    """A process that looks after a job, so that it can be told from another one that got its number."""

    pid: int
    started: str

    @staticmethod
    def this() -> Watcher:
        return Watcher(os.getpid(), identity.start_time(os.getpid()) or "")

    def alive(self) -> bool:
        return identity.is_alive(self.pid, self.started)


@dataclass(frozen=True)
class Record:
    """What is in `status.json`. `machine`: where its numbers of processes mean something."""

    status: JobStatus
    machine: str = ""
    supervisor: Watcher | None = None
    keeper: Watcher | None = None

    def watched(self) -> bool:
        return any(watcher is not None and watcher.alive() for watcher in (self.supervisor, self.keeper))


class JobDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.logs = path / LOGS
        self.scratch = path / SCRATCH

    def create(self, files: Mapping[str, str], status: JobStatus) -> None:
        """Raises FileExistsError."""
        self.path.mkdir(mode=PRIVATE)
        for directory in (self.logs, self.scratch):
            directory.mkdir(mode=PRIVATE)
        for name, text in files.items():
            self._write(name, text)
        self.write(Record(status, machine()))

    def job(self) -> Job:
        """Raises Damaged."""
        try:
            return read_job((self.path / JOB).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Damaged(f"{self.path / JOB} is damaged: {error}.") from error

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def write(self, record: Record) -> tuple[int, int]:
        """Where there is no room for another file, in the place of the one there is: how a job ended must not be lost.

        Returns the stamp of what was written, whatever others do to it by then."""
        # Not synced: after a loss of power the job is gone anyway, and a slow disk must not hold up whoever watches it.
        text = json.dumps(asdict(record), indent=1)
        text = text.ljust(_ROOM * (len(text) // _ROOM + 2))
        try:
            return self._write(STATUS, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with open(self.path / STATUS, "r+", encoding="utf-8") as file:
                file.write(text[: max(os.fstat(file.fileno()).st_size, len(text.rstrip()))])
                file.flush()
                return _stamp_of(os.fstat(file.fileno()))

    def read(self) -> Record:
        """Raises FileNotFoundError, Damaged."""
        data = (self.path / STATUS).read_bytes()
        try:
            return _record(json.loads(data))
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged(f"{self.path / STATUS} is damaged: {error}.") from error

    def stamp(self) -> tuple[int, int]:
        """Another one when somebody else has written, or damaged, the status; (0, 0): it is gone."""
        try:
            return _stamp_of((self.path / STATUS).stat())
        except OSError:
            return 0, 0

    def conclude(self, reason: str) -> None:
        """Say that it failed, unless it is over already: for when its supervisor cannot say so itself."""
        record = self.read()
        if record.status.state not in OVER:
            self.write(replace(record, status=failed(record.status, reason)))

    def token(self) -> Path:
        """A file with a secret that the processes of this job have in common; made when it is asked for first."""
        path = self.path / TOKEN
        if not path.exists():
            self._write(TOKEN, secrets.token_hex(32))
        return path

    def write_secrets(self, values: Mapping[str, str]) -> None:
        """Variables for its processes, where they cannot be inherited. Gone when the job is over."""
        self._write(SECRETS, json.dumps(dict(values)))

    def read_secrets(self) -> dict[str, str]:
        try:
            found = json.loads((self.path / SECRETS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise Damaged(f"{self.path / SECRETS} is damaged.") from error
        return {str(name): str(value) for name, value in found.items()}

    def mark_cancelled(self) -> None:
        """So that whoever looks after it can tell our asking from that of a queue, which may start it again."""
        self._write(CANCEL, "")

    def is_marked(self) -> bool:
        return (self.path / CANCEL).exists()

    def clear(self) -> None:
        """It is over: what only its processes needed goes."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        for name in (TOKEN, SECRETS):
            (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> tuple[int, int]:
        with open_for_replace(self.path / name, mode=0o600) as file:
            file.write(text.encode())
            file.flush()
            return _stamp_of(os.fstat(file.fileno()))


def _stamp_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def failed(status: JobStatus, reason: str) -> JobStatus:
    """As it is when nothing of it runs any more, and nobody saw how it ended."""
    processes = tuple(replace(p, state="ended", pid=None) if p.state != "ended" else p for p in status.processes)
    return replace(status, state="failed", exit_code=1, processes=processes, reason=reason)


def state_home() -> Path:
    """Where this user's jobs are recorded: LUDUS_STATE_DIR, else XDG_STATE_HOME/ludus, else ~/.local/state/ludus."""
    own, shared = os.environ.get("LUDUS_STATE_DIR"), os.environ.get("XDG_STATE_HOME")
    if own:
        return Path(own).absolute()
    if shared and Path(shared).is_absolute():  # the specification says to ignore others
        return Path(shared) / "ludus"
    return Path.home() / ".local" / "state" / "ludus"


def make_private(directory: Path) -> Path:
    """A directory that only this user can look into; those above it are as they are. Raises UsageError when somebody else's is there."""
    try:
        if not directory.parent.exists():
            directory.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        above = directory.parent.stat()
        if above.st_uid not in (0, os.getuid()) and not above.st_mode & stat.S_ISVTX:  # its owner could put another in our place
            raise UsageError(f"{directory.parent} belongs to another user.", "Set LUDUS_STATE_DIR to a directory of your own.")
        directory.mkdir(mode=PRIVATE, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.getuid():
            raise UsageError(f"{directory} belongs to another user.", "Set LUDUS_STATE_DIR to a directory of your own.")
        if found.st_mode & 0o077:
            directory.chmod(PRIVATE)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be used: {error.strerror}.", "Set LUDUS_STATE_DIR to a directory of your own."
        ) from error
    return directory


def machine() -> str:
    """Host, name space of its process numbers (in two containers the same number means two processes), and when it was started."""
    space = procfs.pid_namespace()
    return f"{host()} {f'pid:[{space}]' if space else sys.platform} {procfs.boot_id() or host()}"


def host() -> str:
    return platform.node().replace(" ", "-") or "?"


def is_here(where: str) -> bool:
    """Whether what runs at that `machine()` could be seen from here: it is this one, or was, before it was started anew."""
    then, now = where.split(), machine().split()
    if len(then) != len(now):
        return True
    return then[1] == now[1] if then[2] == now[2] else then[0] == now[0]


# -- as text ------------------------------------------------------------------------------------------------------------


def write_job(job: Job) -> str:
    return json.dumps(asdict(job), indent=1, ensure_ascii=False) + "\n"


def read_job(text: str) -> Job:
    data = json.loads(text)
    roles = tuple(Role(**{**role, "command": tuple(role["command"]), "at": tuple(role.get("at", ()))}) for role in data["roles"])
    return Job(**{**data, "roles": roles, "secrets": tuple(data["secrets"])})


def _record(data: Mapping[str, Any]) -> Record:
    status = dict(data["status"])
    processes = tuple(ProcessStatus(**process) for process in status.pop("processes"))
    watchers = {key: Watcher(**data[key]) if data[key] else None for key in ("supervisor", "keeper")}
    return Record(JobStatus(**status, processes=processes), data["machine"], **watchers)
