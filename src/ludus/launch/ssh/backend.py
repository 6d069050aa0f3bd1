"""Backend that runs jobs on a list of machines over SSH. Each machine runs its part of the job without a connection to this one.

A part is a local job on its machine, started by `remote_agent.py`. The first machine ends the others' parts through `lifeline.py`.
This machine stores the specification and the last known status; logs, tokens and secrets are on the machines.

    job.json  ssh.json (settings)  known.json (last known status)  port  cancelled (an empty file)
"""

from __future__ import annotations

import contextlib
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import ludus
from ludus.core.plugins import did_you_mean
from ludus.errors import LudusError, UnknownName, UsageError, WorkerFailed
from ludus.io.atomic_file import replace_file
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, ProcessStatus, check_job
from ludus.launch.job_index import MAX_ENDED_JOBS, find_by_id, new_job_path
from ludus.launch.ssh.connection import ANSWER_S, AgentConnection, SshNode, SshSettings, check_settings, ssh_words
from ludus.launch.ssh.job_split import KnownStatus, combine_statuses, split_job
from ludus.launch.ssh.remote_agent import JobPartStatus

__all__ = ["SshNode", "SshOrchestrator", "SshSettings"]

_SSH, _KNOWN, _CANCELLED = "ssh.json", "known.json", "cancelled"
_RETRY_S = 5.0
"""A machine that did not answer is not contacted again for this long: clients poll often."""
_COPY_S = 3600.0


# -- files ----------------------------------------------------------------------------------------------------------------


class SshJobDir:
    """Directory of one job on the submitting machine."""

    def __init__(self, path: Path) -> None:
        self.path, self.id = path, path.name

    def create(self, job: Job, settings: SshSettings, known: KnownStatus) -> None:
        self._write(job_dir.JOB, job_dir.job_to_json(job))
        self._write(_SSH, replace(settings, nodes=settings.nodes[: job.nodes], copy=()).to_json())
        self.write_status(known)

    def write_port(self, port: int) -> None:
        self._write("port", f"{port}\n")

    def port(self) -> int:
        return int((self.path / "port").read_text())

    def job(self) -> Job:
        return job_dir.job_from_json((self.path / job_dir.JOB).read_text(encoding="utf-8"))

    def settings(self) -> SshSettings:
        return SshSettings.from_json((self.path / _SSH).read_text(encoding="utf-8"))

    def known_status(self) -> KnownStatus:
        try:
            return KnownStatus.of((self.path / _KNOWN).read_text(encoding="utf-8"))
        except (ValueError, TypeError, KeyError, OSError) as error:
            return KnownStatus(JobStatus(self.id, self.id, "failed", 1, (), f"its record cannot be read: {error}"), True)

    def write_status(self, known: KnownStatus) -> None:
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


# -- the orchestrator -----------------------------------------------------------------------------------------------------

_Key = tuple[SshSettings, int]


class SshOrchestrator:
    """`settings`: for new jobs; submitted jobs have theirs stored. Connections stay open until `close`. Thread-safe."""

    def __init__(self, directory: Path | None = None, settings: SshSettings | None = None) -> None:
        self.directory = (directory or job_dir.state_dir()) / "ssh"
        self._settings = None if settings is None else check_settings(settings)
        self._connections: dict[_Key, AgentConnection] = {}
        self._unreachable: dict[_Key, tuple[float, LudusError]] = {}
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _close_all, self._connections)

    def __enter__(self) -> SshOrchestrator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            _close_all(self._connections)

    # -- the protocol

    def render(self, job: Job) -> dict[str, str]:
        settings = self._require_settings()
        parts = split_job(job, settings, job.name)
        files = {job_dir.JOB: job_dir.job_to_json(job)}
        lines = []
        for node, part in enumerate(parts):
            files[f"{settings.nodes[node].host}/part.json"] = part.text()
            if settings.copy:
                lines.append(shlex.join(ssh_words(settings, node, "ludus.launch.ssh.remote_agent", "unpack", settings.workdir)))
            lines.append(shlex.join(ssh_words(settings, node)))
        return files | {"commands.txt": "\n".join(lines) + "\n"}

    def submit(self, job: Job) -> str:
        check_job(job, os.environ)
        settings = self._require_settings()
        split_job(job, settings, job.name)
        settings = replace(settings, nodes=settings.nodes[: job.nodes])
        with self._lock:
            self._unreachable.clear()
            self._check_machines(settings, range(job.nodes))
            for node in range(job.nodes if settings.copy else 0):
                _copy_files(settings, node)
            job_dir.make_private(self.directory.parent)
            job_dir.make_private(self.directory)
            self._delete_old()
            directory = self._create(job, settings)
            with contextlib.ExitStack() as undo:  # an interrupt must not leave an incomplete job
                undo.callback(directory.remove)
                undo.callback(self.close)  # parts that are not confirmed end with their connection
                self._start(directory, job, settings)
                undo.pop_all()
        return directory.id

    def status(self, job_id: str) -> JobStatus:
        return self._refresh(self._find(job_id)).status

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False, inner: bool = False) -> Iterator[str]:
        """`inner`: include the internal roles that connect the parts."""
        directory = self._find(job_id)
        job, settings = directory.job(), directory.settings()
        names = [each.name for each in job.roles]
        if role is not None and role not in names:
            raise UnknownName(f"The job {job_id} has no role {role!r}.", did_you_mean(role, names))
        selected = [(each, index) for each in job.roles if role in (None, each.name) for index in range(each.count)]
        nodes = sorted({each.node(index) for each, index in selected}) if not inner else list(range(job.nodes))
        request = {"verb": "logs", "job": job_id, "role": role, "follow": follow, "inner": inner}
        return self._lines(settings, nodes, request, label=len(selected) > 1 or inner)

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        """Raises WorkerFailed if a machine does not answer; its part ends by itself after `patience_s`."""
        directory = self._find(job_id)
        known = directory.known_status()
        if known.final:
            return
        directory.cancel()
        settings = directory.settings()
        nodes = range(len(settings.nodes))
        with self._lock:
            # The first node ends the others after its main role has ended; they serve it until then.
            self._request_all(
                settings, nodes if at_once else [0], lambda at: {"verb": "cancel", "job": job_id, "node": at, "at_once": at_once}
            )
            statuses = self._query_parts(job_id, settings)
            if not at_once and (isinstance(statuses[0], LudusError) or statuses[0].over):
                self._request_all(settings, nodes[1:], lambda at: {"verb": "cancel", "job": job_id, "node": at})
        silent = [settings.nodes[node].host for node, status in enumerate(statuses) if isinstance(status, WorkerFailed)]
        if silent:
            raise WorkerFailed(
                f"The job {job_id} is cancelled, but {', '.join(silent)} could not be notified: no answer.",
                f"Its processes end by themselves after {settings.patience_s:g} s without a connection to the first machine. "
                "If it is the first machine, cancel again when it is back.",
            )

    def list(self) -> list[JobStatus]:
        return sorted(
            (self._refresh(directory).status for directory in self._directories()),
            key=lambda status: (status.submitted_at, status.id),
        )

    # -- beyond the protocol

    def hellos(self) -> Sequence[dict[str, Any] | LudusError]:
        """Return the `remote_agent.hello` of each machine of the settings, or the error."""
        settings = self._require_settings()
        with self._lock:
            return [self._hello(settings, node) for node in self._connect(settings, range(len(settings.nodes)))]

    def mend(self, job_id: str) -> Sequence[str]:
        """Restart the parts that were lost with their machines, main included, and return the hosts. Raises LudusError."""
        directory = self._find(job_id)
        job, settings = check_job(directory.job(), os.environ), directory.settings()
        with self._lock:
            self._unreachable.clear()
            statuses = self._query_parts(directory.id, settings)
            head = statuses[0]
            if isinstance(head, LudusError):
                raise head
            if head.over and not head.lost and head.state != "missing":
                raise UsageError(f"The job {job_id} is over: {head.reason or head.state}.", "Submit it again.")
            missing = [node for node, part in enumerate(statuses) if isinstance(part, JobPartStatus) and part.over]
            token = self._fetch_token(directory.id, settings, missing)
            parts = split_job(job, settings, directory.id, directory.port())
            values = {name: os.environ[name] for name in job.secrets}
            for node in [*missing[1:], *missing[:1]] if 0 in missing else missing:
                request = {"verb": "submit", "part": parts[node].text(), "token": token, "secrets": values}
                self._request(settings, node, request)
                self._request(settings, node, {"verb": "keep", "job": directory.id, "node": node})
            known = directory.known_status()
            directory.write_status(
                replace(known, final=False, status=replace(known.status, state="running", exit_code=None, reason=""))
            )
        return [settings.nodes[node].host for node in missing]

    # -- submitting

    def _start(self, directory: SshJobDir, job: Job, settings: SshSettings) -> None:
        """Start all parts or none, the first machine last: main starts when all others are ready."""
        port = int(self._request(settings, 0, {"verb": "ports", "job": directory.id})["port"])
        token = secrets.token_hex(32)
        values = {name: os.environ[name] for name in job.secrets}
        parts = split_job(job, settings, directory.id, port)
        directory.write_port(port)

        steps: tuple[Callable[[int], dict[str, Any]], ...] = (
            lambda node: {"verb": "submit", "part": parts[node].text(), "token": token, "secrets": values},
            lambda node: {"verb": "keep", "job": directory.id, "node": node},
        )
        for step in steps:
            if directory.cancelled:
                raise WorkerFailed(f"The job {directory.id} was cancelled while it was submitted.")
            for nodes in (range(1, job.nodes), range(1)):
                for answer in self._request_all(settings, nodes, step, again=False).values():
                    if isinstance(answer, LudusError):
                        raise answer
        known = directory.known_status()
        directory.write_status(replace(known, status=replace(known.status, state="running")))

    def _check_machines(self, settings: SshSettings, nodes: Sequence[int]) -> None:
        """Check that all machines answer and have this version of Ludus. Raises one LudusError for all failures."""
        errors: list[LudusError] = []
        for node in self._connect(settings, nodes):
            hello = self._hello(settings, node)
            if isinstance(hello, LudusError):
                errors.append(hello)
            elif hello.get("ludus") != ludus.__version__:
                host = settings.nodes[node].host
                errors.append(UsageError(
                    f"{host} has Ludus {hello.get('ludus')}, and this machine {ludus.__version__}.", "Install the same on all machines.",
                ))  # fmt: skip
        if len(errors) == 1:
            raise errors[0]
        if errors:
            kind = UsageError if all(isinstance(error, UsageError) for error in errors) else WorkerFailed
            raise kind(" ".join(error.message for error in errors), errors[0].hint)

    def _fetch_token(self, job_id: str, settings: SshSettings, missing: Sequence[int]) -> str:
        """Fetch the job's token from a machine that still has it; this machine does not store it."""
        order = [node for node in range(len(settings.nodes)) if node not in missing] + list(missing)
        for node in order:
            answer = self._request_all(settings, [node], lambda at: {"verb": "token", "job": job_id, "node": at})[node]
            if not isinstance(answer, LudusError):
                return str(answer["token"])
        raise WorkerFailed(f"No machine of the job {job_id} has its token any more.", "Submit it again.")

    # -- requests

    def _require_settings(self) -> SshSettings:
        if self._settings is None:
            raise UsageError("No machines are given.", "Add --iplist FILE, with a line `address user port slots` for each.")
        return self._settings

    def _refresh(self, directory: SshJobDir) -> KnownStatus:
        known = directory.known_status()
        if known.final:
            return known
        settings = directory.settings()
        with self._lock:
            statuses = self._query_parts(directory.id, settings)
        hosts = [node.host for node in settings.nodes]
        current = combine_statuses(
            directory.job(),
            hosts,
            known,
            statuses,
            time.time(),
            cancelled=directory.cancelled,
            patience_s=settings.patience_s + 2 * directory.job().grace_s,
        )
        if current != known and directory.path.exists():
            directory.write_status(current)
        return current

    def _query_parts(self, job_id: str, settings: SshSettings) -> Sequence[JobPartStatus | LudusError]:
        nodes = range(len(settings.nodes))
        answers = self._request_all(settings, nodes, lambda node: {"verb": "status", "job": job_id, "node": node})
        found = [answers[node] for node in nodes]
        return [answer if isinstance(answer, LudusError) else JobPartStatus.of(answer) for answer in found]

    def _request(self, settings: SshSettings, node: int, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._request_all(settings, [node], lambda _: request, again=False)[node]
        if isinstance(answer, LudusError):
            raise answer
        return answer

    def _request_all(
        self, settings: SshSettings, nodes: Sequence[int], request: Callable[[int], Mapping[str, Any]], *, again: bool = True
    ) -> dict[int, dict[str, Any] | LudusError]:
        """Send requests to all nodes, then collect the answers. `again`: retry once over a new connection if an old one is broken."""
        reused = {node for node in nodes if (settings, node) in self._connections}
        answers: dict[int, dict[str, Any] | LudusError] = {}
        sent = []
        for node in self._connect(settings, nodes):
            hello = self._hello(settings, node)
            try:
                if isinstance(hello, LudusError):
                    raise hello
                self._connections[settings, node].send(request(node))
                sent.append(node)
            except LudusError as error:
                answers[node] = error
        deadline = time.monotonic() + (ANSWER_S if not again else settings.connect_s)
        for node in sent:
            try:
                answers[node] = self._connections[settings, node].receive_result(deadline)
            except LudusError as error:
                answers[node] = error
        broken = {node: answer for node, answer in answers.items() if isinstance(answer, WorkerFailed)}
        for node, why in broken.items():
            self._drop(settings, node)
            if not (again and node in reused):
                self._unreachable.setdefault((settings, node), (time.monotonic(), why))  # keeps the time of the first failure
        if again and (retried := [node for node in broken if node in reused]):
            answers |= self._request_all(settings, retried, request)
        return answers

    def _connect(self, settings: SshSettings, nodes: Sequence[int]) -> Sequence[int]:
        """Start the missing connections without waiting for them; return the nodes."""
        for node in nodes:
            key = (settings, node)
            silent = self._unreachable.get(key)
            if key not in self._connections and (silent is None or time.monotonic() - silent[0] > _RETRY_S):
                self._unreachable.pop(key, None)
                self._connections[key] = AgentConnection(settings, node)
        return nodes

    def _hello(self, settings: SshSettings, node: int) -> dict[str, Any] | LudusError:
        key = (settings, node)
        if key in self._unreachable:
            return self._unreachable[key][1]
        try:
            return self._connections[key].await_hello()
        except LudusError as error:
            self._drop(settings, node)
            self._unreachable[key] = (time.monotonic(), error)
            return error

    def _drop(self, settings: SshSettings, node: int) -> None:
        if connection := self._connections.pop((settings, node), None):
            connection.close(0.1)

    # -- logs

    def _lines(self, settings: SshSettings, nodes: Sequence[int], request: Mapping[str, Any], *, label: bool) -> Iterator[str]:
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            connections = {}
            for node in nodes:
                connections[node] = AgentConnection(settings, node)
                stack.callback(connections[node].close)
            errors = []
            for node, connection in connections.items():
                try:
                    connection.await_hello()
                    connection.send({**request, "node": node})
                    selector.register(connection, selectors.EVENT_READ, connection)
                except LudusError as error:
                    errors.append(error)
            if len(errors) == len(connections):
                raise errors[0]
            yield from (f"ludus: {each.message}" for each in errors)
            while selector.get_map():
                for key, _ in selector.select():
                    connection = key.data
                    ended = not connection.read_available()
                    try:
                        while connection.has_answer:
                            answer = connection.next_answer()
                            if "line" not in answer:
                                ended = True
                                break
                            name, line = answer["line"]
                            yield f"{name}: {line}" if label else line
                    except LudusError as error:
                        ended = True
                        yield f"ludus: {error.message}"
                    if ended:
                        selector.unregister(connection)

    # -- directories

    def _create(self, job: Job, settings: SshSettings) -> SshJobDir:
        processes = tuple(
            ProcessStatus(role.name, index, "pending", host=settings.nodes[role.node(index)].host)
            for role in job.roles
            for index in range(role.count)
        )
        directory = SshJobDir(new_job_path(self.directory, job.name))
        status = JobStatus(directory.id, job.name, "pending", None, processes, "", "", time.time(), job.place)
        directory.create(job, settings, KnownStatus(status))
        return directory

    def _find(self, job_id: str) -> SshJobDir:
        return find_by_id(job_id, {directory.id: directory for directory in self._directories()}, "SSH")

    def _directories(self) -> Sequence[SshJobDir]:
        try:
            return [SshJobDir(path) for path in self.directory.iterdir() if (path / _KNOWN).is_file()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _delete_old(self) -> None:
        over = [directory for directory in self._directories() if directory.known_status().final]
        over.sort(key=lambda directory: directory.known_status().status.submitted_at)
        for directory in over[:-MAX_ENDED_JOBS]:
            directory.remove()


def _close_all(connections: dict[_Key, AgentConnection]) -> None:
    while connections:
        connections.popitem()[1].close()


def _copy_files(settings: SshSettings, node: int) -> None:
    """Raises LudusError."""
    connection = AgentConnection(settings, node, "unpack", settings.workdir)
    try:
        try:
            with tarfile.open(fileobj=connection.input, mode="w|") as archive:
                for path in settings.copy:
                    archive.add(path, arcname=path.absolute().name)
            connection.input.close()
        except BrokenPipeError:
            pass  # the agent's answer has the error
        except OSError as error:
            raise UsageError(f"{error.filename or settings.copy} cannot be copied: {error.strerror}.") from error
        connection.receive_result(time.monotonic() + _COPY_S)
    finally:
        connection.close()
