"""Agent that starts and queries one machine's parts of SSH jobs: `python -m ludus.launch.ssh.remote_agent`.

Requests on stdin and answers on stdout are JSON lines. Answers start with a mark, because login scripts may print to stdout too.
A part is a local job with its own supervisor. It outlives this process once the client has confirmed that all parts have started
(`keep`). Until then it ends with the connection, so that no incomplete job remains.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import ludus
from ludus.errors import LudusError, UnknownName, UsageError
from ludus.io import json_lines
from ludus.io.json_lines import LineReader, LineTooLong
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, ProcessStatus, wait
from ludus.launch.local import LocalOrchestrator
from ludus.process.auth import read_token, write_token
from ludus.process.job_env import PORTS, RUN, JobEnv, find_free_ports

PROTOCOL = 1
MARK = "ludus-agent "
INTERNAL = "ludus."
"""Prefix of the internal roles that connect the parts of a job."""

MAX_PARTS = 50
MAX_LINE = 64_000_000
_PART, _TOKEN, _RUN_FILE = "part.json", "token", "run"
_PARTS = "parts"
_CONFIRM_S = 120.0
_END_S = 30.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SET_INDEX = (
    'seats=$1; shift; for seat in $seats; do [ "$LUDUS_JOB_INDEX" -eq 0 ] && break; '
    'LUDUS_JOB_INDEX=$((LUDUS_JOB_INDEX - 1)); done; export LUDUS_JOB_INDEX="$seat"; exec "$@"'
)


@dataclass(frozen=True)
class JobPart:
    """One machine's part of a job. `job`: the local job of its supervisor. `seats`: indices of its processes in the whole job, by role.

    `nodes`: addresses of all machines; `node`: number of this one.
    """

    id: str
    node: int
    nodes: tuple[str, ...]
    job: Job
    seats: Mapping[str, tuple[int, ...]]
    port: int = 0
    ray: int = 0
    wait_s: float = 300.0
    workdir: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    @staticmethod
    def of(text: str) -> JobPart:
        """Raises UsageError."""
        try:
            data = json.loads(text)
            seats = {role: tuple(map(int, indices)) for role, indices in data["seats"].items()}
            job = job_dir.job_from_json(json.dumps(data["job"]))
            return JobPart(**{**data, "nodes": tuple(data["nodes"]), "seats": seats, "job": job})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"The part of the job is invalid: {type(error).__name__}: {error}.") from error

    def local_job(self, token: Path, run_file: Path) -> Job:
        """Return the local job, whose processes get the node and the index that they have in the whole job."""
        env = JobEnv(self.nodes, self.node, self.port, token, self.ray, self.wait_s)
        variables = env.environment() | {"LUDUS_JOB_ID": self.id, RUN: str(run_file)}
        roles = []
        for role in self.job.roles:
            seats = self.seats.get(role.name, tuple(range(role.count)))
            command, log = role.command, role.log
            if seats != tuple(range(role.count)):
                command = ("sh", "-c", _SET_INDEX, "sh", " ".join(map(str, seats)), *command)
                log = log.replace("{index}", str(seats[0])) if len(seats) == 1 else log
            roles.append(replace(role, command=command, log=log, environment={**variables, **role.environment}))
        return replace(self.job, roles=tuple(roles))


@dataclass(frozen=True)
class JobPartStatus:
    """`lost`: its end was not recorded, because the machine was rebooted or the supervisor killed."""

    state: str
    exit_code: int | None = None
    reason: str = ""
    logs: str = ""
    lost: bool = False
    processes: tuple[ProcessStatus, ...] = ()

    @property
    def over(self) -> bool:
        return self.state not in ("pending", "running")

    @staticmethod
    def of(data: Mapping[str, Any]) -> JobPartStatus:
        """Raises TypeError, KeyError."""
        return JobPartStatus(**{**data, "processes": tuple(ProcessStatus(**process) for process in data["processes"])})


class RemoteAgent:
    """The parts on this machine, for one connection. Not thread-safe, but any thread may call `abandon`."""

    def __init__(self, state_dir: Path | None = None) -> None:
        self._state_dir = state_dir or job_dir.state_dir()
        self._unconfirmed: dict[tuple[str, int], tuple[str, bool]] = {}
        """Id of the local job, and whether the part is new on this machine."""
        self._abandoning = threading.Lock()
        self._verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "ports": self._ports, "submit": self._submit, "keep": self._keep, "status": self._status, "cancel": self._cancel,
            "token": self._read_token, "forget": self._forget, "list": self._list,
        }  # fmt: skip

    @property
    def waiting(self) -> bool:
        """Whether a part waits for its confirmation."""
        return bool(self._unconfirmed)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises LudusError."""
        verb = self._verbs.get(str(request.get("verb")))
        if verb is None:
            raise UsageError(f"Unknown request {request.get('verb')!r}.", f"Use one of: {', '.join(self._verbs)}.")
        try:
            return verb(request)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"The request {request.get('verb')!r} is invalid: {type(error).__name__}: {error}.") from error
        except OSError as error:
            raise LudusError(f"{error.filename or 'The system'}: {error.strerror or error}.") from error

    def lines(self, request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the log lines of a part, each with the name of its process in the whole job. Raises LudusError."""
        directory = self._find(request)
        part, orchestrator = _read_part(directory), LocalOrchestrator(directory)
        role, follow, inner = request.get("role"), bool(request.get("follow")), bool(request.get("inner"))
        processes = [(r.name, i) for r in part.job.roles if role in (None, r.name) for i in range(r.count)]
        names = {
            f"{name}-{index}": f"{name}-{part.seats[name][index] if name in part.seats else index}"
            for name, index in processes
            if inner or not name.startswith(INTERNAL)
        }
        if not names:
            return
        for line in orchestrator.logs(self._latest(directory).id, role=role, follow=follow):
            name, text = line.split(": ", 1) if len(processes) > 1 else (next(iter(names)), line)
            if name in names:
                yield names[name], text

    def abandon(self) -> None:
        """Kill and delete unconfirmed parts. Waits for another thread that is doing so."""
        with self._abandoning:
            for (job, node), (job_id, first) in self._unconfirmed.items():
                directory = self._part_dir(job, node)
                orchestrator = LocalOrchestrator(directory)
                with contextlib.suppress(LudusError):
                    orchestrator.cancel(job_id, at_once=True)
                    wait(orchestrator, job_id, _END_S)
                    if first:
                        shutil.rmtree(directory, ignore_errors=True)
            self._unconfirmed.clear()

    # -- requests

    def _ports(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"port": find_free_ports(str(request["job"]), PORTS)}

    def _submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        part = JobPart.of(request["part"])
        directory = self._part_dir(part.id, part.node)
        with contextlib.suppress(UnknownName):
            latest = self._latest(directory)
            if not latest.over:
                return {"part": latest.id, "was": True}
        try:
            os.chdir(_workdir(part.workdir))
        except OSError as error:
            where = f"{part.workdir or 'The home directory'} on {job_dir.hostname()}"
            raise UsageError(f"{where}: {error.strerror}.", "Set workdir, or copy something there.") from error
        self._prune()
        first = not directory.exists()
        job_dir.make_private(directory.parent)
        job_dir.make_private(directory)
        with contextlib.ExitStack() as undo:  # an interrupt must not leave an incomplete part
            if first:
                undo.callback(shutil.rmtree, directory, ignore_errors=True)
            (directory / _TOKEN).unlink(missing_ok=True)
            write_token(directory / _TOKEN, str(request["token"]).encode())
            (directory / _PART).write_text(part.text(), encoding="utf-8")
            os.environ.update({str(name): str(value) for name, value in dict(request.get("secrets", {})).items()})
            job_id = LocalOrchestrator(directory).submit(part.local_job(directory / _TOKEN, directory / _RUN_FILE))
            undo.pop_all()
        self._unconfirmed[part.id, part.node] = job_id, first
        return {"part": job_id, "was": False}

    def _keep(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._unconfirmed.pop((str(request["job"]), int(request["node"])), None)
        return {}

    def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            directory = self._find(request)
            part, status = _read_part(directory), self._latest(directory)
        except UnknownName:
            return asdict(JobPartStatus("missing", reason="it is unknown there"))
        return asdict(_to_part_status(part, status))

    def _cancel(self, request: Mapping[str, Any]) -> dict[str, Any]:
        directory = self._find(request)
        LocalOrchestrator(directory).cancel(self._latest(directory).id, at_once=bool(request.get("at_once")))
        return {}

    def _read_token(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the job's token to its owner, who needs it to restart the part of another machine."""
        return {"token": read_token(self._find(request) / _TOKEN).decode()}

    def _forget(self, request: Mapping[str, Any]) -> dict[str, Any]:
        directory = self._find(request)
        if not self._latest(directory).over:
            raise UsageError(f"The job {request['job']} still runs on {job_dir.hostname()}.", "Cancel it first.")
        shutil.rmtree(directory, ignore_errors=True)
        return {}

    def _list(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"parts": [{"job": part.id, "node": part.node} for part in map(_read_part, self._part_dirs())]}

    # -- directories

    def _part_dir(self, job: str, node: int) -> Path:
        if not _ID.fullmatch(job):
            raise UnknownName(f"{job!r} is not a valid job id.")
        return self._state_dir / _PARTS / f"{job}.{node}"

    def _find(self, request: Mapping[str, Any]) -> Path:
        directory = self._part_dir(str(request["job"]), int(request["node"]))
        if not (directory / _PART).is_file():
            raise UnknownName(f"The job {request['job']} is unknown on {job_dir.hostname()}.")
        return directory

    def _latest(self, directory: Path) -> JobStatus:
        jobs = LocalOrchestrator(directory).list()
        if not jobs:
            raise UnknownName(f"The job {directory.name} was never started on {job_dir.hostname()}.")
        return jobs[-1]

    def _part_dirs(self) -> list[Path]:
        files = (self._state_dir / _PARTS).glob(f"*/{_PART}")
        return [path.parent for path in sorted(files, key=lambda path: path.stat().st_mtime)]

    def _prune(self) -> None:
        for directory in self._part_dirs()[:-MAX_PARTS]:
            with contextlib.suppress(UnknownName):
                if not self._latest(directory).over:
                    continue
            shutil.rmtree(directory, ignore_errors=True)


def _read_part(directory: Path) -> JobPart:
    return JobPart.of((directory / _PART).read_text(encoding="utf-8"))


def _workdir(named: str) -> Path:
    return Path(named).expanduser() if named else Path.home()


def _to_part_status(part: JobPart, status: JobStatus) -> JobPartStatus:
    """Return the status with the indices of the whole job and without internal roles."""
    processes = tuple(
        replace(process, index=part.seats[process.role][process.index])
        for process in status.processes
        if process.role in part.seats and process.index < len(part.seats[process.role])
    )
    main = status.of(part.job.main)
    lost = status.state == "failed" and all(process.exit_code is None for process in main)
    return JobPartStatus(status.state, status.exit_code, status.reason, status.logs, lost, processes)


# -- copied files ---------------------------------------------------------------------------------------------------------


def unpack(stream: BinaryIO, workdir: str) -> int:
    """Extract a tar archive into a directory, replacing each file atomically; return their number. Raises UsageError."""
    target = _workdir(workdir)
    count = 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".ludus-") as temporary:
            with tarfile.open(fileobj=stream, mode="r|*") as archive:
                archive.extractall(temporary, filter="data")  # rejects devices, and paths and links that lead outside
            for path in sorted(Path(temporary).rglob("*")):
                destination = target / path.relative_to(temporary)
                if path.is_dir() and not path.is_symlink():
                    destination.mkdir(exist_ok=True)
                else:
                    os.replace(path, destination)
                    count += 1
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(f"The archive for {target} on {job_dir.hostname()} is invalid: {error}.") from error
    except OSError as error:
        raise UsageError(
            f"{error.filename or target} on {job_dir.hostname()}: {error.strerror}.", "Set another workdir."
        ) from error
    return count


# -- process ------------------------------------------------------------------------------------------------------------


def hello() -> dict[str, Any]:
    return {
        "protocol": PROTOCOL, "ludus": ludus.__version__, "python": platform.python_version(), "host": job_dir.hostname(),
        "time": time.time(),
    }  # fmt: skip


def requests(fd: int, has_timeout: Callable[[], bool]) -> Iterator[bytes]:
    """Yield lines to the end of the stream, or until none comes for _CONFIRM_S while `has_timeout()`."""
    reader = LineReader(fd, MAX_LINE)
    try:
        while (line := reader.read_line(_CONFIRM_S if has_timeout() else None)) is not None:
            yield line
    except TimeoutError:
        return
    except LineTooLong as error:
        raise UsageError(f"A request is longer than {MAX_LINE} bytes.") from error
    if reader.has_partial_line:
        raise UsageError("The last request is incomplete.")


def _send(answer: Mapping[str, Any]) -> None:
    json_lines.write_marked(MARK, answer)


def _send_error(error: LudusError) -> None:
    _send(
        {"error": {"kind": "usage" if isinstance(error, UsageError) else "other", "message": error.message, "hint": error.hint}}
    )


def _parse(line: bytes) -> Mapping[str, Any]:
    try:
        return json_lines.decode(line)
    except ValueError as error:
        raise UsageError(
            f"{line[:40]!r} is not a request: it must be a line of JSON.", "`ludus submit --on ssh` runs this program."
        ) from error


def _stream(agent: RemoteAgent, request: Mapping[str, Any]) -> None:
    """Send log lines until the client closes the connection."""

    def exit_with_client() -> None:
        while os.read(0, 1 << 16):
            pass
        agent.abandon()  # waits for the main thread if that is doing so
        os._exit(0)

    threading.Thread(target=exit_with_client, daemon=True).start()
    for name, line in agent.lines(request):
        _send({"line": [name, line]})
    _send({"ok": {}})


def _serve(agent: RemoteAgent) -> int:
    _send({"hello": hello()})
    for line in requests(0, lambda: agent.waiting):
        try:
            request = _parse(line)
        except UsageError as error:
            _send_error(error)
            return 2
        try:
            if request.get("verb") == "logs":
                _stream(agent, request)
                return 0
            _send({"ok": agent.answer(request)})
        except LudusError as error:
            _send_error(error)
    return 0


def main(words: Sequence[str]) -> int:
    """`unpack DIRECTORY` reads an archive from stdin; without arguments, serve requests."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    agent = RemoteAgent()
    try:
        if words[:1] == ["unpack"]:
            _send({"ok": {"files": unpack(sys.stdin.buffer, "".join(words[1:2]))}})
            return 0
        return _serve(agent)
    except LudusError as error:
        _send_error(error)
        return 2
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python reports the broken pipe again at exit
        return 1
    finally:
        agent.abandon()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
