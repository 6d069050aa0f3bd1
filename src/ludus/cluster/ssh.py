"""Jobs on a list of machines that are reached by SSH. Each has a part of the job, which needs nobody to go on.

A part is a job of local processes of that machine (`far`); what is on the first node tells the others when it is over (`tether`).
What was asked for, and how it was when last seen, is kept here; logs, tokens and secrets are not.

    job.json  ssh.json (where its parts are)  known.json (how it was)  cancelled (an empty file)
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import shutil
import sys
import tarfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ludus
from ludus.cluster import record
from ludus.cluster.cluster import Job, JobState, JobStatus, ProcessStatus, Role, checked
from ludus.cluster.connection import ANSWER_S, Conversation, SshNode, SshSettings, checked_settings, ssh_words
from ludus.cluster.far import INNER, Part, PartStatus
from ludus.errors import LudusError, UnknownName, UsageError, WorkerFailed
from ludus.plugins import did_you_mean

__all__ = ["SshNode", "SshOrchestrator", "SshSettings", "combined", "split"]

KEPT = 50
DOOR, HOLD = f"{INNER}door", f"{INNER}hold"

_SSH, _KNOWN, _CANCELLED = "ssh.json", "known.json", "cancelled"
_HEEDING = 'env --block-signal=TERM true 2>/dev/null && exec env --block-signal=TERM "$@"; exec "$@"'
"""A job may be over before its door is open: it shall hear of that then, instead of dying of it. Where `env` cannot, the others wait."""
_UNSURE_S = 60.0
"""A job that is being submitted may not be on its machines for so long."""
_AGAIN_S = 5.0
"""A machine that did not answer is not asked again for so long: whoever waits for a job asks often."""
_ATTEMPTS = 5
_COPY_S = 3600.0


# -- a job as parts -------------------------------------------------------------------------------------------------------


def split(job: Job, settings: SshSettings, job_id: str, port: int = 0) -> list[Part]:
    """What each machine gets. Raises UsageError for a job that cannot be."""
    checked(job)
    if job.nodes > len(settings.nodes):
        raise UsageError(f"The job {job.name} needs {job.nodes} machines, and {len(settings.nodes)} are listed.")
    if ours := [role.name for role in job.roles if role.name.startswith(INNER)]:
        raise UsageError(f"The role {ours[0]!r} is called as one of Ludus' own.", f"Names must not begin with {INNER!r}.")
    addresses = tuple(node.reached for node in settings.nodes[: job.nodes])
    parts = []
    for node in range(job.nodes):
        seats = {role.name: tuple(index for index in range(role.count) if role.node(index) == node) for role in job.roles}
        seats = {name: indices for name, indices in seats.items() if indices}
        python = settings.interpreter(node)
        roles = [
            replace(role, command=_for(role.command, python, settings), count=len(seats[role.name]), at=())
            for role in job.roles
            if role.name in seats
        ]
        tether = (python, "-P", "-m", "ludus.cluster.tether")
        if node > 0:
            hold = (*tether, "hold", "--patience-s", f"{settings.patience_s:g}")
            roles.insert(0, Role(HOLD, hold, restart="when-killed"))
        elif job.nodes > 1:  # the first to start is the last to end
            roles.insert(0, Role(DOOR, ("sh", "-c", _HEEDING, "sh", *tether, "door"), restart="on-failure"))
        own = replace(job, roles=tuple(roles), main=job.main if node == 0 else HOLD, nodes=1, ray=0)
        parts.append(Part(job_id, node, addresses, own, seats, port, job.ray, job.wait_s, settings.workdir))
    return parts


def _for(command: tuple[str, ...], python: str, settings: SshSettings) -> tuple[str, ...]:
    """Our interpreter is not theirs."""
    return (python, *command[1:]) if command[0] in (sys.executable, settings.python) else command


@dataclass(frozen=True)
class Known:
    """How a job was when last seen. `final`: it will not change. `silent`: machines that do not answer, and since when."""

    status: JobStatus
    final: bool = False
    silent: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def of(text: str) -> Known:
        """Raises ValueError, TypeError, KeyError."""
        data = json.loads(text)
        processes = tuple(ProcessStatus(**process) for process in data["status"]["processes"])
        return Known(JobStatus(**{**data["status"], "processes": processes}), data["final"], data["silent"])


def combined(
    job: Job, hosts: Sequence[str], known: Known, found: Sequence[PartStatus | LudusError], now: float, cancelled: bool = False
) -> Known:
    """How the job is, from what its machines say; an error: that one does not answer."""
    silent = {hosts[n]: known.silent.get(hosts[n], now) for n, part in enumerate(found) if isinstance(part, LudusError)}
    before = {process.name: process for process in known.status.processes}
    processes = []
    for role in job.roles:
        for index in range(role.count):
            node = role.node(index)
            part = found[node]
            said = [] if isinstance(part, LudusError) else [p for p in part.processes if (p.role, p.index) == (role.name, index)]
            process = said[0] if said else before.get(f"{role.name}-{index}", ProcessStatus(role.name, index, "pending"))
            if not said and isinstance(part, PartStatus) and part.over:
                process = replace(process, state="ended", pid=None)
            processes.append(replace(process, host=hosts[node]))
    complaints = [f"{host} does not answer since {_clock(since)}" for host, since in silent.items()]
    head, others = found[0], found[1:]
    ending = any(isinstance(part, PartStatus) and not part.over for part in others)
    status = replace(known.status, processes=tuple(processes))
    if isinstance(head, LudusError):
        state: JobState = "cancelled" if cancelled and not ending else known.status.state
        code = 1 if cancelled and not ending else known.status.exit_code
        return Known(replace(status, state=state, exit_code=code, reason="; ".join(complaints)), False, silent)
    if head.state == "missing":
        if now - known.status.submitted_at < _UNSURE_S and known.status.state == "pending":
            return Known(status, False, silent)
        head = replace(
            head, state="failed", exit_code=1, reason=f"{hosts[0]} knows nothing of it: it was not submitted to the end"
        )
    if not head.over or ending:
        gone = zip(hosts[1:], others, strict=False)
        complaints += [
            f"its part on {host} is over: {part.reason or part.state}"
            for host, part in gone
            if isinstance(part, PartStatus) and part.over and not head.over
        ]
        state = "pending" if head.state == "pending" else "running"
        return Known(
            replace(status, state=state, exit_code=None, reason="; ".join(complaints), logs=_at(hosts[0], head)), False, silent
        )
    reason = "; ".join([head.reason, *complaints] if head.reason else complaints)
    over: JobState = "succeeded" if head.state == "succeeded" else "cancelled" if head.state == "cancelled" else "failed"
    status = replace(status, state=over, exit_code=head.exit_code, reason=reason, logs=_at(hosts[0], head))
    return Known(status, not silent, silent)


def _at(host: str, part: PartStatus) -> str:
    return f"{host}:{part.logs}" if part.logs else ""


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


# -- what is kept here ----------------------------------------------------------------------------------------------------


class Entry:
    """The directory of one job."""

    def __init__(self, path: Path) -> None:
        self.path, self.id = path, path.name

    def create(self, job: Job, settings: SshSettings, known: Known) -> None:
        """Raises FileExistsError."""
        self.path.mkdir(mode=record.PRIVATE)
        self._write(record.JOB, record.write_job(job))
        self._write(_SSH, _settings_text(replace(settings, nodes=settings.nodes[: job.nodes], copy=())))
        self.note(known)

    def submitted(self, port: int) -> None:
        self._write("port", f"{port}\n")

    def port(self) -> int:
        return int((self.path / "port").read_text())

    def job(self) -> Job:
        return record.read_job((self.path / record.JOB).read_text(encoding="utf-8"))

    def settings(self) -> SshSettings:
        return _settings_of((self.path / _SSH).read_text(encoding="utf-8"))

    def known(self) -> Known:
        try:
            return Known.of((self.path / _KNOWN).read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError, OSError) as error:
            return Known(JobStatus(self.id, self.id, "failed", 1, (), f"its record cannot be read: {error}"), True)

    def note(self, known: Known) -> None:
        self._write(_KNOWN, known.text())

    @property
    def cancelled(self) -> bool:
        return (self.path / _CANCELLED).exists()

    def cancel(self) -> None:
        (self.path / _CANCELLED).touch(mode=0o600)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, name: str, text: str) -> None:
        aside = self.path / f".{name}.{os.getpid()}.{threading.get_ident()}"
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(aside, self.path / name)


def _settings_text(settings: SshSettings) -> str:
    return json.dumps(asdict(settings), indent=1, default=str) + "\n"


def _settings_of(text: str) -> SshSettings:
    data = json.loads(text)
    paths = {name: Path(data[name]) if data[name] else None for name in ("identity", "known_hosts")}
    tuples = {name: tuple(data[name]) for name in ("setup", "options")}
    return SshSettings(**{**data, **paths, **tuples, "copy": (), "nodes": tuple(SshNode(**node) for node in data["nodes"])})


# -- the orchestrator -----------------------------------------------------------------------------------------------------

_Key = tuple[SshSettings, int]


class SshOrchestrator:
    """`settings`: for what is submitted; jobs that were know theirs. Connections are kept until it is closed, or gone."""

    def __init__(self, directory: Path | None = None, settings: SshSettings | None = None) -> None:
        self.directory = (directory or record.state_home()) / "ssh"
        self._settings = None if settings is None else checked_settings(settings)
        self._open: dict[_Key, Conversation] = {}
        self._silent: dict[_Key, tuple[float, LudusError]] = {}
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _hang_up, self._open)

    def __enter__(self) -> SshOrchestrator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            _hang_up(self._open)

    # -- the protocol

    def render(self, job: Job) -> dict[str, str]:
        settings = self._own()
        parts = split(job, settings, job.name)
        files = {record.JOB: record.write_job(job)}
        lines = []
        for node, part in enumerate(parts):
            files[f"{settings.nodes[node].host}/part.json"] = part.text()
            if settings.copy:
                lines.append(shlex.join(ssh_words(settings, node, "ludus.cluster.far", "unpack", settings.workdir)))
            lines.append(shlex.join(ssh_words(settings, node)))
        return files | {"commands.txt": "\n".join(lines) + "\n"}

    def submit(self, job: Job) -> str:
        checked(job, os.environ)
        settings = self._own()
        settings = replace(settings, nodes=settings.nodes[: job.nodes], copy=settings.copy)
        split(job, self._own(), job.name)
        with self._lock:
            self._greet(settings, range(job.nodes))
            for node in range(job.nodes if settings.copy else 0):
                _copy(settings, node)
            record.make_private(self.directory.parent)
            record.make_private(self.directory)
            self._forget()
            entry = self._create(job, settings)
            try:
                self._start(entry, job, settings)
            except BaseException:
                self.close()  # whatever was not kept ends with the connection
                entry.remove()
                raise
        return entry.id

    def status(self, job_id: str) -> JobStatus:
        return self._look(self._find(job_id)).status

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False, inner: bool = False) -> Iterator[str]:
        """`inner`: with what holds the parts together."""
        entry = self._find(job_id)
        job, settings = entry.job(), entry.settings()
        names = [each.name for each in job.roles]
        if role is not None and role not in names:
            raise UnknownName(f"The job {job_id} has no role {role!r}.", did_you_mean(role, names))
        shown = [(each, index) for each in job.roles if role in (None, each.name) for index in range(each.count)]
        nodes = sorted({each.node(index) for each, index in shown}) if not inner else list(range(job.nodes))
        request = {"verb": "logs", "job": job_id, "role": role, "follow": follow, "inner": inner}
        return self._lines(settings, nodes, request, label=len(shown) > 1 or inner)

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        """What a machine that does not answer has of it ends by itself, after a while. Raises WorkerFailed then, when all others know."""
        entry = self._find(job_id)
        known = entry.known()
        if known.final:
            return
        entry.cancel()
        settings = entry.settings()
        nodes = range(len(settings.nodes))
        with self._lock:
            # The first node tells the others when its main role has saved what it has; they serve it until then.
            self._ask(
                settings, nodes if at_once else [0], lambda at: {"verb": "cancel", "job": job_id, "node": at, "at_once": at_once}
            )
            found = self._statuses(job_id, settings)
            if not at_once and (isinstance(found[0], LudusError) or found[0].over):
                self._ask(settings, nodes[1:], lambda at: {"verb": "cancel", "job": job_id, "node": at})
        silent = [settings.nodes[node].host for node, said in enumerate(found) if isinstance(said, WorkerFailed)]
        if silent:
            raise WorkerFailed(
                f"The job {job_id} is cancelled, but {', '.join(silent)} could not be told: no answer.",
                f"What runs there ends by itself when it does not reach the first machine for {settings.patience_s:g} s; "
                "if that is the first machine, cancel again when it is back.",
            )

    def list(self) -> list[JobStatus]:
        return sorted((self._look(entry).status for entry in self._all()), key=lambda status: (status.submitted_at, status.id))

    # -- beyond it

    def greetings(self) -> Sequence[dict[str, Any] | LudusError]:
        """What each machine of the settings says of itself (`far.hello`), or why it does not."""
        settings = self._own()
        with self._lock:
            return [self._greeted(settings, node) for node in self._dialled(settings, range(len(settings.nodes)))]

    def mend(self, job_id: str) -> Sequence[str]:
        """Start again what is missing of a job on machines that are back; their hosts. Raises LudusError when one cannot be started.

        A main role that was lost with its machine is started too; one that has ended by itself is not.
        """
        entry = self._find(job_id)
        job, settings = checked(entry.job(), os.environ), entry.settings()
        with self._lock:
            self._silent.clear()
            found = self._statuses(entry.id, settings)
            head = found[0]
            if isinstance(head, LudusError):
                raise head
            if head.over and not head.lost and head.state != "missing":
                raise UsageError(f"The job {job_id} is over: {head.reason or head.state}.", "Submit it again.")
            missing = [node for node, part in enumerate(found) if isinstance(part, PartStatus) and part.over]
            token = self._token(entry.id, settings, missing)
            parts = split(job, settings, entry.id, entry.port())
            handed = {name: os.environ[name] for name in job.secrets}
            for node in [*missing[1:], *missing[:1]] if 0 in missing else missing:
                request = {"verb": "submit", "part": parts[node].text(), "token": token, "secrets": handed}
                self._told(settings, node, request)
                self._told(settings, node, {"verb": "keep", "job": entry.id, "node": node})
            known = entry.known()
            entry.note(replace(known, final=False, status=replace(known.status, state="running", exit_code=None, reason="")))
        return [settings.nodes[node].host for node in missing]

    # -- submitting

    def _start(self, entry: Entry, job: Job, settings: SshSettings) -> None:
        """The others first: main does not begin before all have what they need. All are kept, or none is."""
        port = int(self._told(settings, 0, {"verb": "ports", "job": entry.id})["port"])
        token = secrets.token_hex(32)
        handed = {name: os.environ[name] for name in job.secrets}
        parts = split(job, settings, entry.id, port)
        entry.submitted(port)

        def submission(node: int) -> dict[str, Any]:
            return {"verb": "submit", "part": parts[node].text(), "token": token, "secrets": handed}

        def kept(node: int) -> dict[str, Any]:
            return {"verb": "keep", "job": entry.id, "node": node}

        for step in (submission, kept):
            for nodes in (range(1, job.nodes), range(1)):
                for said in self._ask(settings, nodes, step, again=False).values():
                    if isinstance(said, LudusError):
                        raise said

    def _greet(self, settings: SshSettings, nodes: Sequence[int]) -> None:
        """All machines are there and have what we have. Raises LudusError with all that is wrong with them."""
        wrong: list[LudusError] = []
        for node in self._dialled(settings, nodes):
            hello = self._greeted(settings, node)
            if isinstance(hello, LudusError):
                wrong.append(hello)
            elif hello.get("ludus") != ludus.__version__:
                host = settings.nodes[node].host
                wrong.append(UsageError(
                    f"{host} has Ludus {hello.get('ludus')}, and here is {ludus.__version__}.", "Install the same on all machines.",
                ))  # fmt: skip
        if len(wrong) == 1:
            raise wrong[0]
        if wrong:
            kind = UsageError if all(isinstance(error, UsageError) for error in wrong) else WorkerFailed
            raise kind(" ".join(error.message for error in wrong), wrong[0].hint)

    def _token(self, job_id: str, settings: SshSettings, missing: Sequence[int]) -> str:
        """From a machine that has it: it is kept nowhere else."""
        order = [node for node in range(len(settings.nodes)) if node not in missing] + list(missing)
        for node in order:
            said = self._ask(settings, [node], lambda at: {"verb": "token", "job": job_id, "node": at})[node]
            if not isinstance(said, LudusError):
                return str(said["token"])
        raise WorkerFailed(f"No machine of the job {job_id} has its token any more.", "Submit it again.")

    # -- asking

    def _own(self) -> SshSettings:
        if self._settings is None:
            raise UsageError("No machines are named.", "Add --iplist FILE, with a line `address user port slots` for each.")
        return self._settings

    def _look(self, entry: Entry) -> Known:
        known = entry.known()
        if known.final:
            return known
        settings = entry.settings()
        with self._lock:
            found = self._statuses(entry.id, settings)
        seen = combined(entry.job(), [node.host for node in settings.nodes], known, found, time.time(), entry.cancelled)
        if seen != known and entry.path.exists():
            entry.note(seen)
        return seen

    def _statuses(self, job_id: str, settings: SshSettings) -> Sequence[PartStatus | LudusError]:
        nodes = range(len(settings.nodes))
        said = self._ask(settings, nodes, lambda node: {"verb": "status", "job": job_id, "node": node})
        return [_part_status(said[node]) for node in nodes]

    def _told(self, settings: SshSettings, node: int, request: Mapping[str, Any]) -> dict[str, Any]:
        said = self._ask(settings, [node], lambda _: request, again=False)[node]
        if isinstance(said, LudusError):
            raise said
        return said

    def _ask(
        self, settings: SshSettings, nodes: Sequence[int], request: Callable[[int], Mapping[str, Any]], *, again: bool = True
    ) -> dict[int, dict[str, Any] | LudusError]:
        """All at once, each with its answer. `again`: by a new connection, where an old one turns out to be broken."""
        reused = {node for node in nodes if (settings, node) in self._open}
        found: dict[int, dict[str, Any] | LudusError] = {}
        spoken = []
        for node in self._dialled(settings, nodes):
            hello = self._greeted(settings, node)
            try:
                if isinstance(hello, LudusError):
                    raise hello
                self._open[settings, node].send(request(node))
                spoken.append(node)
            except LudusError as error:
                found[node] = error
        deadline = time.monotonic() + (ANSWER_S if not again else settings.connect_s)
        for node in spoken:
            try:
                found[node] = self._open[settings, node].result(deadline)
            except LudusError as error:
                found[node] = error
        broken = {node: said for node, said in found.items() if isinstance(said, WorkerFailed)}
        for node, why in broken.items():
            self._drop(settings, node)
            if not (again and node in reused):
                self._silent[settings, node] = (time.monotonic(), why)
        if again and (anew := [node for node in broken if node in reused]):
            found |= self._ask(settings, anew, request)
        return found

    def _dialled(self, settings: SshSettings, nodes: Sequence[int]) -> Sequence[int]:
        """Begin to connect to all of them, without waiting."""
        for node in nodes:
            key = (settings, node)
            silent = self._silent.get(key)
            if key not in self._open and (silent is None or time.monotonic() - silent[0] > _AGAIN_S):
                self._silent.pop(key, None)
                self._open[key] = Conversation(settings, node)
        return nodes

    def _greeted(self, settings: SshSettings, node: int) -> dict[str, Any] | LudusError:
        key = (settings, node)
        if key in self._silent:
            return self._silent[key][1]
        try:
            return self._open[key].greet()
        except LudusError as error:
            self._drop(settings, node)
            self._silent[key] = (time.monotonic(), error)
            return error

    def _drop(self, settings: SshSettings, node: int) -> None:
        if conversation := self._open.pop((settings, node), None):
            conversation.close(0.1)

    # -- logs

    def _lines(self, settings: SshSettings, nodes: Sequence[int], request: Mapping[str, Any], *, label: bool) -> Iterator[str]:

        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            talks = {}
            for node in nodes:
                talks[node] = Conversation(settings, node)
                stack.callback(talks[node].close)
            errors = []
            for node, talk in talks.items():
                try:
                    talk.greet()
                    talk.send({**request, "node": node})
                    selector.register(talk, selectors.EVENT_READ, talk)
                except LudusError as error:
                    errors.append(error)
            if len(errors) == len(talks):
                raise errors[0]
            yield from (f"ludus: {each.message}" for each in errors)
            while selector.get_map():
                for key, _ in selector.select():
                    talk = key.data
                    ended = not talk.pull()
                    try:
                        while talk.waiting:
                            said = talk.next()
                            if "line" not in said:
                                ended = True
                                break
                            name, line = said["line"]
                            yield f"{name}: {line}" if label else line
                    except LudusError as error:
                        ended = True
                        yield f"ludus: {error.message}"
                    if ended:
                        selector.unregister(talk)

    # -- directories

    def _create(self, job: Job, settings: SshSettings) -> Entry:
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        members = tuple(
            ProcessStatus(role.name, index, "pending", host=settings.nodes[role.node(index)].host)
            for role in job.roles
            for index in range(role.count)
        )
        for _ in range(_ATTEMPTS):
            entry = Entry(self.directory / f"{job.name}-{stamp}-{secrets.token_hex(2)}")
            status = JobStatus(entry.id, job.name, "pending", None, members, "", "", now, job.place)
            with contextlib.suppress(FileExistsError):
                entry.create(job, settings, Known(status))
                return entry
        raise WorkerFailed(f"No free name for a job {job.name} in {self.directory}.")

    def _find(self, job_id: str) -> Entry:
        known = {entry.id: entry for entry in self._all()}
        if job_id not in known:
            raise UnknownName(f"There is no job {job_id!r} on machines by SSH.", did_you_mean(job_id, known))
        return known[job_id]

    def _all(self) -> Sequence[Entry]:
        try:
            return [Entry(path) for path in self.directory.iterdir() if (path / _KNOWN).is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _forget(self) -> None:
        over = sorted(
            (entry for entry in self._all() if entry.known().final), key=lambda entry: entry.known().status.submitted_at
        )
        for entry in over[: max(0, len(over) - KEPT)]:
            entry.remove()


def _part_status(said: dict[str, Any] | LudusError) -> PartStatus | LudusError:
    return said if isinstance(said, LudusError) else PartStatus.of(said)


def _hang_up(conversations: dict[_Key, Conversation]) -> None:
    while conversations:
        conversations.popitem()[1].close()


def _copy(settings: SshSettings, node: int) -> None:
    """Raises LudusError."""
    talk = Conversation(settings, node, "unpack", settings.workdir)
    try:
        try:
            with tarfile.open(fileobj=talk.input, mode="w|") as archive:
                for path in settings.copy:
                    archive.add(path, arcname=path.absolute().name)
            talk.input.close()
        except BrokenPipeError:
            pass  # why is what it says next
        except OSError as error:
            raise UsageError(f"{error.filename or settings.copy} cannot be copied: {error.strerror}.") from error
        talk.result(time.monotonic() + _COPY_S)
    finally:
        talk.close()
