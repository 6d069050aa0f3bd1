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
import tarfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ludus
from ludus.core.plugins import did_you_mean
from ludus.errors import LudusError, UnknownName, UsageError, WorkerFailed
from ludus.io.atomic_file import replace_file
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, ProcessStatus, checked
from ludus.launch.ssh.connection import ANSWER_S, Conversation, SshNode, SshSettings, checked_settings, ssh_words
from ludus.launch.ssh.job_split import Known, combined, split
from ludus.launch.ssh.remote_agent import PartStatus

__all__ = ["SshNode", "SshOrchestrator", "SshSettings"]

KEPT = 50

_SSH, _KNOWN, _CANCELLED = "ssh.json", "known.json", "cancelled"
_AGAIN_S = 5.0
"""A machine that did not answer is not asked again for so long: whoever waits for a job asks often."""
_ATTEMPTS = 5
_COPY_S = 3600.0


# -- what is kept here ----------------------------------------------------------------------------------------------------


class Entry:
    """The directory of one job."""

    def __init__(self, path: Path) -> None:
        self.path, self.id = path, path.name

    def create(self, job: Job, settings: SshSettings, known: Known) -> None:
        """Raises FileExistsError."""
        self.path.mkdir(mode=job_dir.PRIVATE)
        self._write(job_dir.JOB, job_dir.write_job(job))
        self._write(_SSH, _settings_text(replace(settings, nodes=settings.nodes[: job.nodes], copy=())))
        self.note(known)

    def submitted(self, port: int) -> None:
        self._write("port", f"{port}\n")

    def port(self) -> int:
        return int((self.path / "port").read_text())

    def job(self) -> Job:
        return job_dir.read_job((self.path / job_dir.JOB).read_text(encoding="utf-8"))

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
        replace_file(self.path / name, text, mode=0o600)


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
        self.directory = (directory or job_dir.state_home()) / "ssh"
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
        files = {job_dir.JOB: job_dir.write_job(job)}
        lines = []
        for node, part in enumerate(parts):
            files[f"{settings.nodes[node].host}/part.json"] = part.text()
            if settings.copy:
                lines.append(shlex.join(ssh_words(settings, node, "ludus.launch.ssh.remote_agent", "unpack", settings.workdir)))
            lines.append(shlex.join(ssh_words(settings, node)))
        return files | {"commands.txt": "\n".join(lines) + "\n"}

    def submit(self, job: Job) -> str:
        checked(job, os.environ)
        settings = self._own()
        settings = replace(settings, nodes=settings.nodes[: job.nodes], copy=settings.copy)
        split(job, self._own(), job.name)
        with self._lock:
            self._silent.clear()
            self._greet(settings, range(job.nodes))
            for node in range(job.nodes if settings.copy else 0):
                _copy(settings, node)
            job_dir.make_private(self.directory.parent)
            job_dir.make_private(self.directory)
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
                f"The job {job_id} is cancelled, but {', '.join(silent)} could not be notified: no answer.",
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
            if entry.cancelled:
                raise WorkerFailed(f"The job {entry.id} was cancelled while it was submitted.")
            for nodes in (range(1, job.nodes), range(1)):
                for said in self._ask(settings, nodes, step, again=False).values():
                    if isinstance(said, LudusError):
                        raise said
        known = entry.known()
        entry.note(replace(known, status=replace(known.status, state="running")))  # all have said so

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
        hosts = [node.host for node in settings.nodes]
        seen = combined(
            entry.job(),
            hosts,
            known,
            found,
            time.time(),
            cancelled=entry.cancelled,
            patience_s=settings.patience_s + 2 * entry.job().grace_s,
        )
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
                self._silent.setdefault((settings, node), (time.monotonic(), why))  # since it was asked, not since we looked
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
