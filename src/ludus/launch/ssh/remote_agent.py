"""The far side of jobs by SSH: `python -m ludus.launch.ssh.remote_agent`. It starts one machine's part of a job, and says how that fares.

Requests come in and answers go out as lines of JSON; in front of an answer is a mark, since what a login script prints comes along.
A part is a job of local processes with a supervisor of its own: it does not need this process, once whoever asked has said that
all parts are there (`keep`). Until then it ends when the connection does, so that nobody leaves half a job behind.
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
from ludus.process.job_env import PORTS, RUN, Surroundings, free_block

PROTOCOL = 1
MARK = "ludus-far "
INNER = "ludus."
"""Names of roles that begin so are ours: they hold the parts of a job together."""

KEPT = 50
MAX_LINE = 64_000_000
_PART, _TOKEN, _NOTE = "part.json", "token", "run"
_PARTS = "parts"
_KEEP_S = 120.0
_END_S = 30.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SEATS = (
    'seats=$1; shift; for seat in $seats; do [ "$LUDUS_JOB_INDEX" -eq 0 ] && break; '
    'LUDUS_JOB_INDEX=$((LUDUS_JOB_INDEX - 1)); done; export LUDUS_JOB_INDEX="$seat"; exec "$@"'
)


@dataclass(frozen=True)
class Part:
    """What one machine has to do in a job: `job` is that of its own supervisor. `seats`: which processes of the whole job its are.

    `nodes`: addresses of all machines; `node`: which of them this is.
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
    def of(text: str) -> Part:
        """Raises UsageError."""
        try:
            data = json.loads(text)
            seats = {role: tuple(map(int, indices)) for role, indices in data["seats"].items()}
            job = job_dir.read_job(json.dumps(data["job"]))
            return Part(**{**data, "nodes": tuple(data["nodes"]), "seats": seats, "job": job})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"This is no part of a job: {type(error).__name__}: {error}.") from error

    def local(self, token: Path, note: Path) -> Job:
        """As its supervisor gets it: every process knows where it is, and which one of the whole job."""
        around = Surroundings(self.nodes, self.node, self.port, token, self.ray, self.wait_s)
        told = around.environment() | {"LUDUS_JOB_ID": self.id, RUN: str(note)}
        roles = []
        for role in self.job.roles:
            seats = self.seats.get(role.name, tuple(range(role.count)))
            command, log = role.command, role.log
            if seats != tuple(range(role.count)):
                command = ("sh", "-c", _SEATS, "sh", " ".join(map(str, seats)), *command)
                log = log.replace("{index}", str(seats[0])) if len(seats) == 1 else log
            roles.append(replace(role, command=command, log=log, environment={**told, **role.environment}))
        return replace(self.job, roles=tuple(roles))


@dataclass(frozen=True)
class PartStatus:
    """`lost`: nobody saw how it ended: the machine was started anew, or its supervisor was killed."""

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
    def of(data: Mapping[str, Any]) -> PartStatus:
        """Raises TypeError, KeyError."""
        return PartStatus(**{**data, "processes": tuple(ProcessStatus(**process) for process in data["processes"])})


class Desk:
    """The parts of this machine. For one connection, and one thread; any may `abandon`."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home or job_dir.state_home()
        self._unkept: dict[tuple[str, int], tuple[str, bool]] = {}
        """The id of its local job, and whether it is its first."""
        self._leaving = threading.Lock()
        self._verbs: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "ports": self._ports, "submit": self._submit, "keep": self._keep, "status": self._status, "cancel": self._cancel,
            "token": self._told, "forget": self._forget, "list": self._list,
        }  # fmt: skip

    @property
    def waiting(self) -> bool:
        """Whether a part is here that nobody has said is to stay."""
        return bool(self._unkept)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises LudusError."""
        verb = self._verbs.get(str(request.get("verb")))
        if verb is None:
            raise UsageError(f"{request.get('verb')!r} is not asked of the far side.", f"It is one of: {', '.join(self._verbs)}.")
        try:
            return verb(request)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"The request {request.get('verb')!r} makes no sense: {type(error).__name__}: {error}.") from error
        except OSError as error:
            raise LudusError(f"{error.filename or 'The system'}: {error.strerror or error}.") from error

    def lines(self, request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Of the part's logs, each with the name of its process in the whole job. Raises LudusError."""
        place = self._find(request)
        part, orchestrator = _read(place), LocalOrchestrator(place)
        role, follow, inner = request.get("role"), bool(request.get("follow")), bool(request.get("inner"))
        members = [(r.name, i) for r in part.job.roles if role in (None, r.name) for i in range(r.count)]
        names = {f"{name}-{index}": _name(part, name, index) for name, index in members if inner or not _is_inner(name)}
        if not names:
            return
        for line in orchestrator.logs(self._latest(place).id, role=role, follow=follow):
            name, text = line.split(": ", 1) if len(members) > 1 else (next(iter(names)), line)
            if name in names:
                yield names[name], text

    def abandon(self) -> None:
        """End what was not kept, and leave nothing of it. When it returns that is done, whoever began it."""
        with self._leaving:
            for (job, node), (found, first) in self._unkept.items():
                place = self._place(job, node)
                orchestrator = LocalOrchestrator(place)
                with contextlib.suppress(LudusError):
                    orchestrator.cancel(found, at_once=True)
                    wait(orchestrator, found, _END_S)
                    if first:
                        shutil.rmtree(place, ignore_errors=True)
            self._unkept.clear()

    # -- what may be asked

    def _ports(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"port": free_block(str(request["job"]), PORTS)}

    def _submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        part = Part.of(request["part"])
        place = self._place(part.id, part.node)
        with contextlib.suppress(UnknownName):
            latest = self._latest(place)
            if not latest.over:
                return {"part": latest.id, "was": True}
        handed = {str(name): str(value) for name, value in dict(request.get("secrets", {})).items()}
        try:
            os.chdir(_workdir(part.workdir))
        except OSError as error:
            where = f"{part.workdir or 'The home directory'} on {job_dir.host()}"
            raise UsageError(f"{where}: {error.strerror}.", "Set workdir, or copy something there.") from error
        self._prune()
        first = not place.exists()
        job_dir.make_private(place.parent)
        job_dir.make_private(place)
        try:
            found = self._started(place, part, str(request["token"]), handed)
        except BaseException:
            if first:
                shutil.rmtree(place, ignore_errors=True)
            raise
        self._unkept[part.id, part.node] = found, first
        return {"part": found, "was": False}

    def _started(self, place: Path, part: Part, token: str, handed: Mapping[str, str]) -> str:
        (place / _TOKEN).unlink(missing_ok=True)
        write_token(place / _TOKEN, token.encode())
        (place / _PART).write_text(part.text(), encoding="utf-8")
        os.environ.update(handed)
        return LocalOrchestrator(place).submit(part.local(place / _TOKEN, place / _NOTE))

    def _keep(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._unkept.pop((str(request["job"]), int(request["node"])), None)
        return {}

    def _status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            place = self._find(request)
            part, found = _read(place), self._latest(place)
        except UnknownName:
            return asdict(PartStatus("missing", reason="nothing is known of it there"))
        return asdict(_translated(part, found))

    def _cancel(self, request: Mapping[str, Any]) -> dict[str, Any]:
        place = self._find(request)
        LocalOrchestrator(place).cancel(self._latest(place).id, at_once=bool(request.get("at_once")))
        return {}

    def _told(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """To the user whose it is, who has lost a machine: another one needs the same."""
        return {"token": read_token(self._find(request) / _TOKEN).decode()}

    def _forget(self, request: Mapping[str, Any]) -> dict[str, Any]:
        place = self._find(request)
        if not self._latest(place).over:
            raise UsageError(f"The job {request['job']} still runs on {job_dir.host()}.", "Cancel it first.")
        shutil.rmtree(place, ignore_errors=True)
        return {}

    def _list(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"parts": [{"job": part.id, "node": part.node} for part in map(_read, self._places())]}

    # -- directories

    def _place(self, job: str, node: int) -> Path:
        if not _ID.fullmatch(job):
            raise UnknownName(f"{job!r} is not the id of a job.")
        return self._home / _PARTS / f"{job}.{node}"

    def _find(self, request: Mapping[str, Any]) -> Path:
        place = self._place(str(request["job"]), int(request["node"]))
        if not (place / _PART).is_file():
            raise UnknownName(f"Nothing is known of the job {request['job']} on {job_dir.host()}.")
        return place

    def _latest(self, place: Path) -> JobStatus:
        lives = LocalOrchestrator(place).list()
        if not lives:
            raise UnknownName(f"Nothing of the job {place.name} was started on {job_dir.host()}.")
        return lives[-1]

    def _places(self) -> list[Path]:
        found = (self._home / _PARTS).glob(f"*/{_PART}")
        return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime)]

    def _prune(self) -> None:
        for place in self._places()[:-KEPT]:
            with contextlib.suppress(UnknownName):
                if not self._latest(place).over:
                    continue
            shutil.rmtree(place, ignore_errors=True)


def _read(place: Path) -> Part:
    return Part.of((place / _PART).read_text(encoding="utf-8"))


def _workdir(named: str) -> Path:
    return Path(named).expanduser() if named else Path.home()


def _is_inner(role: str) -> bool:
    return role.startswith(INNER)


def _name(part: Part, role: str, index: int) -> str:
    return f"{role}-{part.seats[role][index] if role in part.seats else index}"


def _translated(part: Part, status: JobStatus) -> PartStatus:
    """The processes as the whole job counts them; ours are not shown."""
    processes = tuple(
        replace(process, index=part.seats[process.role][process.index])
        for process in status.processes
        if process.role in part.seats and process.index < len(part.seats[process.role])
    )
    main = status.of(part.job.main)
    lost = status.state == "failed" and all(process.exit_code is None for process in main)
    return PartStatus(status.state, status.exit_code, status.reason, status.logs, lost, processes)


# -- files of whoever submits ---------------------------------------------------------------------------------------------


def unpack(stream: BinaryIO, workdir: str) -> int:
    """Files of a tar archive into a directory, each in the place of the one that was; how many. Raises UsageError."""
    target = _workdir(workdir)
    count = 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=".ludus-") as aside:
            with tarfile.open(fileobj=stream, mode="r|*") as archive:
                archive.extractall(aside, filter="data")  # nothing outside, no devices, no links that lead out
            for path in sorted(Path(aside).rglob("*")):
                place = target / path.relative_to(aside)
                if path.is_dir() and not path.is_symlink():
                    place.mkdir(exist_ok=True)
                else:
                    os.replace(path, place)  # whoever has the old one open keeps it
                    count += 1
    except (tarfile.TarError, EOFError) as error:
        raise UsageError(f"What was sent to {target} on {job_dir.host()} is no archive: {error}.") from error
    except OSError as error:
        raise UsageError(f"{error.filename or target} on {job_dir.host()}: {error.strerror}.", "Set another workdir.") from error
    return count


# -- the process --------------------------------------------------------------------------------------------------------


def hello() -> dict[str, Any]:
    return {
        "protocol": PROTOCOL, "ludus": ludus.__version__, "python": platform.python_version(), "host": job_dir.host(),
        "time": time.time(),
    }  # fmt: skip


def requests(fd: int, in_hurry: Callable[[], bool]) -> Iterator[bytes]:
    """Lines, until there are no more; or until none has come for long, when somebody waits for one."""
    reader = LineReader(fd, MAX_LINE)
    try:
        while (line := reader.read_line(_KEEP_S if in_hurry() else None)) is not None:
            yield line
    except TimeoutError:
        return
    except LineTooLong as error:
        raise UsageError(f"A request is longer than {MAX_LINE} bytes.") from error
    if reader.has_partial_line:
        raise UsageError("The last request has no end.")


def _say(answer: Mapping[str, Any]) -> None:
    json_lines.write_marked(MARK, answer)


def _complain(error: LudusError) -> None:
    _say({"error": {"kind": "usage" if isinstance(error, UsageError) else "other", "message": error.message, "hint": error.hint}})


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        return json_lines.decode(line)
    except ValueError as error:
        raise UsageError(
            f"{line[:40]!r} is no request: those are lines of JSON.", "This is the far side of `ludus submit --on ssh`."
        ) from error


def _stream(desk: Desk, request: Mapping[str, Any]) -> None:
    """Lines for as long as somebody reads them."""

    def leave_with_reader() -> None:
        while os.read(0, 1 << 16):
            pass
        desk.abandon()  # the other thread may be about to, and would be cut off in the middle of it
        os._exit(0)

    threading.Thread(target=leave_with_reader, daemon=True).start()
    for name, line in desk.lines(request):
        _say({"line": [name, line]})
    _say({"ok": {}})


def _serve(desk: Desk) -> int:
    _say({"hello": hello()})
    for line in requests(0, lambda: desk.waiting):
        try:
            request = _parsed(line)
        except UsageError as error:
            _complain(error)
            return 2
        try:
            if request.get("verb") == "logs":
                _stream(desk, request)
                return 0
            _say({"ok": desk.answer(request)})
        except LudusError as error:
            _complain(error)
    return 0


def main(words: Sequence[str]) -> int:
    """`unpack DIRECTORY` takes an archive; without a word it listens to requests."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))
    desk = Desk()
    try:
        if words[:1] == ["unpack"]:
            _say({"ok": {"files": unpack(sys.stdin.buffer, "".join(words[1:2]))}})
            return 0
        return _serve(desk)
    except LudusError as error:
        _complain(error)
        return 2
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads; Python would complain once more when it ends
        return 1
    finally:
        desk.abandon()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
