"""Directory of a job: its specification, its status and its logs.

    job.json  status.json  logs/ROLE-N.log  logs/supervisor.log  scratch/ (while it runs)
    run.json (the run of its main role)  token, secrets (until it is over)  cancel (cancellation was requested)

Only the owner has access. `status.json` is replaced atomically, so that readers need no lock.
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
_PADDING = 1024
"""status.json is padded with blanks to multiples of this, so that a longer status fits in place when the disk is full."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Process id with its start time, which detects that the id was reused."""

    pid: int
    started: str

    @staticmethod
    def this() -> ProcessIdentity:
        return ProcessIdentity(os.getpid(), identity.start_time(os.getpid()) or "")

    def alive(self) -> bool:
        return identity.is_alive(self.pid, self.started)


@dataclass(frozen=True)
class JobRecord:
    """Content of `status.json`. `machine`: the `machine_id()` on which its process ids are valid."""

    status: JobStatus
    machine: str = ""
    supervisor: ProcessIdentity | None = None
    guard: ProcessIdentity | None = None

    def is_supervised(self) -> bool:
        return any(process is not None and process.alive() for process in (self.supervisor, self.guard))


class JobDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.logs = path / LOGS
        self.scratch = path / SCRATCH

    def create(self, files: Mapping[str, str], status: JobStatus) -> None:
        self.path.mkdir(mode=PRIVATE, exist_ok=True)
        for directory in (self.logs, self.scratch):
            directory.mkdir(mode=PRIVATE)
        for name, text in files.items():
            self._write(name, text)
        self.write(JobRecord(status, machine_id()))

    def job(self) -> Job:
        """Raises Damaged."""
        try:
            return job_from_json((self.path / JOB).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Damaged(f"{self.path / JOB} is damaged: {error}.") from error

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def write(self, record: JobRecord) -> tuple[int, int]:
        """Replace status.json, or overwrite it in place if the disk is full: the end of a job must not be lost.

        Returns the stamp of the written file, even if another process has replaced it since.
        """
        # No fsync: after a power loss the job is gone anyway, and a slow disk must not block the supervisor.
        text = json.dumps(asdict(record), indent=1)
        text = text.ljust(_PADDING * (len(text) // _PADDING + 2))
        try:
            return self._write(STATUS, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with open(self.path / STATUS, "r+", encoding="utf-8") as file:
                file.write(text[: max(os.fstat(file.fileno()).st_size, len(text.rstrip()))])
                file.flush()
                return _stamp_of(os.fstat(file.fileno()))

    def read(self) -> JobRecord:
        """Raises FileNotFoundError, Damaged."""
        data = (self.path / STATUS).read_bytes()
        try:
            return _record_from_json(json.loads(data))
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged(f"{self.path / STATUS} is damaged: {error}.") from error

    def stamp(self) -> tuple[int, int]:
        """Return size and modification time of status.json, which show changes by other processes; (0, 0) if it is missing."""
        try:
            return _stamp_of((self.path / STATUS).stat())
        except OSError:
            return 0, 0

    def record_failure(self, reason: str) -> None:
        """Mark the job as failed unless it is over already. For use when the supervisor has died."""
        record = self.read()
        if record.status.state not in OVER:
            self.write(replace(record, status=as_failed(record.status, reason)))

    def token(self) -> Path:
        """Return the file with the secret that the processes of this job share; created on the first call."""
        path = self.path / TOKEN
        if not path.exists():
            self._write(TOKEN, secrets.token_hex(32))
        return path

    def write_secrets(self, values: Mapping[str, str]) -> None:
        """Store secret variables for processes that cannot inherit them. `clear` deletes the file."""
        self._write(SECRETS, json.dumps(dict(values)))

    def read_secrets(self) -> dict[str, str]:
        try:
            values = json.loads((self.path / SECRETS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise Damaged(f"{self.path / SECRETS} is damaged.") from error
        return {str(name): str(value) for name, value in values.items()}

    def request_cancel(self) -> None:
        """Mark the job as cancelled by the user. Without the mark, a stopped job may be restarted by its queue."""
        self._write(CANCEL, "")

    def cancel_requested(self) -> bool:
        return (self.path / CANCEL).exists()

    def clear(self) -> None:
        """Delete what only running processes need: scratch directory, token and secrets."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        for name in (TOKEN, SECRETS):
            (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> tuple[int, int]:
        with open_for_replace(self.path / name, mode=0o600) as file:
            file.write(text.encode())
            file.flush()
            return _stamp_of(os.fstat(file.fileno()))


def _stamp_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def as_failed(status: JobStatus, reason: str) -> JobStatus:
    """Return the status of a job that ended without a supervisor to record its end."""
    processes = tuple(replace(p, state="ended", pid=None) if p.state != "ended" else p for p in status.processes)
    return replace(status, state="failed", exit_code=1, processes=processes, reason=reason)


def state_dir() -> Path:
    """Return the directory of this user's job records: LUDUS_STATE_DIR, else XDG_STATE_HOME/ludus, else ~/.local/state/ludus."""
    own, shared = os.environ.get("LUDUS_STATE_DIR"), os.environ.get("XDG_STATE_HOME")
    if own:
        return Path(own).absolute()
    if shared and Path(shared).is_absolute():  # the XDG specification says to ignore relative paths
        return Path(shared) / "ludus"
    return Path.home() / ".local" / "state" / "ludus"


def make_private(directory: Path) -> Path:
    """Create a directory with mode 0700; its parents keep their modes. Raises UsageError if it belongs to another user."""
    try:
        if not directory.parent.exists():
            directory.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        above = directory.parent.stat()
        if above.st_uid not in (0, os.getuid()) and not above.st_mode & stat.S_ISVTX:  # its owner could replace our directory
            raise UsageError(f"{directory.parent} belongs to another user.", "Set LUDUS_STATE_DIR to a directory of your own.")
        directory.mkdir(mode=PRIVATE, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.getuid():
            raise UsageError(f"{directory} belongs to another user.", "Set LUDUS_STATE_DIR to a directory of your own.")
        if status.st_mode & 0o077:
            directory.chmod(PRIVATE)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be used: {error.strerror}.", "Set LUDUS_STATE_DIR to a directory of your own."
        ) from error
    return directory


def machine_id() -> str:
    """Return host name, PID namespace (containers on one host reuse process ids) and boot id, separated by blanks."""
    space = procfs.pid_namespace()
    return f"{hostname()} {f'pid:[{space}]' if space else sys.platform} {procfs.boot_id() or hostname()}"


def hostname() -> str:
    return platform.node().replace(" ", "-") or "?"


def is_this_machine(where: str) -> bool:
    """Return whether processes of a `machine_id()` would be visible here: the same machine, or the same before a reboot."""
    then, now = where.split(), machine_id().split()
    if len(then) != len(now):
        return True
    return then[1] == now[1] if then[2] == now[2] else then[0] == now[0]


# -- JSON ---------------------------------------------------------------------------------------------------------------


def job_to_json(job: Job) -> str:
    return json.dumps(asdict(job), indent=1, ensure_ascii=False) + "\n"


def job_from_json(text: str) -> Job:
    data = json.loads(text)
    roles = tuple(Role(**{**role, "command": tuple(role["command"]), "at": tuple(role.get("at", ()))}) for role in data["roles"])
    return Job(**{**data, "roles": roles, "secrets": tuple(data["secrets"])})


def _record_from_json(data: Mapping[str, Any]) -> JobRecord:
    status = dict(data["status"])
    processes = tuple(ProcessStatus(**process) for process in status.pop("processes"))
    guard = data["guard"] if "guard" in data else data["keeper"]  # its name in earlier releases
    owners = [ProcessIdentity(**owner) if owner else None for owner in (data["supervisor"], guard)]
    return JobRecord(JobStatus(**status, processes=processes), data["machine"], *owners)
