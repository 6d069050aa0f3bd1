"""The hub of a run: a server through which its processes find models and buffers by name and report metrics.

It runs in a thread of the process that opened the run and listens on a unix socket that only this user can reach. The hub's process
holds a lock in the run directory, which the kernel releases when the process ends: a run has at most one hub.
With a `ListenAddress` it also listens on TCP, for processes on other machines that have the token of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ludus.core.metrics import Numbers
from ludus.distributed.frames import Header
from ludus.distributed.gateway_workers import bind
from ludus.distributed.hub.buffer_service import BufferService
from ludus.distributed.hub.disk_thread import DiskThread
from ludus.distributed.hub.metrics_report import MetricsReport
from ludus.distributed.hub.model_service import ModelService
from ludus.distributed.hub.rpc import Operation, Peer, error_fields, listen_tcp, listen_unix
from ludus.errors import Damaged, LudusError, UsageError, WorkerFailed
from ludus.io.addresses import tcp_address
from ludus.io.atomic_file import replace_json
from ludus.models.weights.model_registry import ModelRegistry
from ludus.process.auth import Authenticator, read_token, write_token
from ludus.process.temp_dirs import TempDir, shared_memory_dir, short_temp_dir
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

RECORD, LOCK = "hub.json", ".hub.lock"
REPORT_S = 10.0
CLAIM_S = 15.0
_CLOSE_S = 30.0


# -- location and lock of the hub ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubLocation:
    """Where the hub of a run is, seen from one machine, and the directories that the run's processes share there."""

    directory: str
    """The run directory."""
    socket: str
    """Path of the hub's unix socket; on another machine its `tcp://host:port`."""
    scratch: str
    """Directory of sockets and rendezvous files; removed with the hub, or with the process that joined from another machine."""
    staging: str
    """Directory to which weights are written before they are published; empty on other machines, which upload them."""
    node: str = ""
    """Id of this machine within the run."""
    host: str = ""
    """Address of this machine for the others; empty if the run uses one machine only."""
    token_file: str = ""
    """File with the token of a run that other machines may join."""
    mirror: str = ""
    """Directory in which this machine caches weights; empty on the hub's machine."""

    @property
    def is_local(self) -> bool:
        """Whether the hub is on this machine, so that memory and files can be shared with it."""
        return not self.mirror


@dataclass(frozen=True)
class ListenAddress:
    """TCP address on which a hub listens for other machines."""

    host: str
    port: int = 0
    token_file: str = ""
    """File with the required token; the hub creates a token if empty."""


def find_or_start(
    directory: Path, report_s: float = REPORT_S, listen: ListenAddress | None = None
) -> tuple[HubLocation, Hub | None]:
    """Start the hub of a run, or find the running one. Concurrent callers get the same hub. Raises WorkerFailed, UsageError."""
    deadline = time.monotonic() + CLAIM_S
    while True:
        lock = _try_lock(directory)
        if lock is not None:
            hub = Hub(directory, lock, report_s, listen)
            return hub.location, hub
        record = _read_record(directory)
        if record is not None and record.get("host") not in (None, platform.node()):
            raise UsageError(
                f"The run {directory} is open in process {record.get('pid')} on {record['host']}.",
                "Stop it, work there, or let several machines take part: ludus.init(…, address=…) on each of them.",
            )
        location = _check_reachable(record)
        if location is not None:
            return location, None
        if time.monotonic() > deadline:
            raise WorkerFailed(
                f"The run {directory} is locked by process {(record or {}).get('pid', '?')}, which does not respond.",
                "Stop that process, or open another trial.",
            )
        time.sleep(0.02)  # the hub is starting or closing


def find_local_hub(directory: Path) -> HubLocation | None:
    """The hub of a run, if it is on this machine."""
    return _check_reachable(_read_record(directory))


def _try_lock(directory: Path) -> IO[str] | None:
    """The lock of the run, or None while another process holds it."""
    import fcntl

    private = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    for path in (directory / LOCK, Path(tempfile.gettempdir()) / f"ludus-{os.getuid()}-{private}.lock"):
        file = open(path, "a")  # noqa: SIM115 - held as long as the hub lives
        try:
            path.chmod(0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            file.close()
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        else:
            return file
    raise UsageError(f"Neither {directory} nor the temporary directory supports file locks.", "Set TMPDIR to one that does.")


def _read_record(directory: Path) -> dict[str, Any] | None:
    try:
        data = json.loads((directory / RECORD).read_bytes())
    except (OSError, ValueError):  # absent, or incomplete because its writer was killed
        return None
    return data if isinstance(data, dict) else None


def _check_reachable(record: Mapping[str, Any] | None) -> HubLocation | None:
    if record is None:
        return None
    try:
        location = HubLocation(**record["place"])
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(location.socket)
    except (OSError, KeyError, TypeError):
        return None
    return location


# -- the hub ------------------------------------------------------------------------------------------------------------


class Hub:
    """Serves until `close`. Operations run on its event loop, in its own thread; disk writes run in another thread."""

    def __init__(self, directory: Path, lock: IO[str], report_s: float = REPORT_S, listen: ListenAddress | None = None) -> None:
        """`lock`: of the run; released by `close`, and if starting fails."""
        self.directory, self._report_s, self._lock = directory, report_s, lock
        self._pid, self._closing = os.getpid(), False
        self.run_id = secrets.token_hex(8)
        """New with each start of the hub; names the caches on other machines."""
        self._authenticator: Authenticator | None = None
        self.address = ""
        """`tcp://host:port` for other machines; empty if it does not listen on TCP."""
        self._components: dict[str, Header] = {}
        self._peers: set[Peer] = set()
        self._servers: list[asyncio.Server] = []
        self._reporter: asyncio.Task[None] | None = None
        with contextlib.ExitStack() as undo:  # `close` undoes the steps in reverse order; an error does not stop it
            undo.callback(lock.close)
            bound = None if listen is None else undo.enter_context(bind(listen.host, listen.port))  # the most likely to fail
            scratch = undo.enter_context(contextlib.closing(TempDir(short_temp_dir())))
            shm = undo.enter_context(contextlib.closing(TempDir(shared_memory_dir())))
            registry = ModelRegistry(LocalStore(directory), shm.path)
            self.location = self._locate(scratch.path, registry.staging, listen, bound)
            self._disk = DiskThread()
            self._models = ModelService(registry, self.location.node, self._disk, _reply)
            self._buffers = BufferService(shm.path / "rings", _reply)
            undo.callback(self._buffers.close)
            self._metrics = MetricsReport(directory)
            self._operations: dict[str, Operation] = {
                "hello": self._hello,
                **self._models.operations,
                **self._buffers.operations,
                "metric": self._add_metrics,
                "report": self._report_now,
                "component": self._add_component,
                "names": self._list_names,
            }
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="ludus-hub", daemon=True)
            self._thread.start()
            undo.callback(self._stop_loop)
            undo.callback(Path(self.location.socket).unlink, missing_ok=True)
            undo.callback((directory / RECORD).unlink, missing_ok=True)
            undo.callback(self._run_on_loop, self._close_connections)
            undo.callback(self._write_final_state)
            undo.callback(self._run_on_loop, self._stop_serving)
            asyncio.run_coroutine_threadsafe(self._open(bound), self._loop).result(CLAIM_S)
            record = {"pid": self._pid, "host": platform.node(), "address": self.address, "place": vars(self.location)}
            replace_json(directory / RECORD, record, mode=0o600, indent=1)
            self._undo = undo.pop_all()

    def _locate(self, scratch: Path, staging: Path, listen: ListenAddress | None, bound: socket.socket | None) -> HubLocation:
        location = HubLocation(str(self.directory), str(scratch / "hub"), str(scratch), str(staging), secrets.token_hex(8))
        if listen is None or bound is None:
            return location
        token_file = listen.token_file or str(scratch / "token")
        if not listen.token_file:
            write_token(scratch / "token")
        self._authenticator = Authenticator(read_token(token_file))
        self.address = tcp_address(listen.host, bound.getsockname()[1])
        return replace(location, host=listen.host, token_file=token_file)

    async def _open(self, bound: socket.socket | None) -> None:
        self._servers.append(await listen_unix(Path(self.location.socket), self._on_frame, self._on_disconnect))
        if bound is not None and self._authenticator is not None:
            self._servers.append(await listen_tcp(bound, self._authenticator, self._on_frame, self._on_disconnect))
        self._metrics.open()
        self._reporter = self._loop.create_task(self._report_periodically())

    def release_after_fork(self) -> None:
        """In a fork of this process, which is not the hub."""
        self._lock.close()

    def close(self) -> None:
        """Answer waiting requests, store the newest weights and write the last report. Idempotent."""
        if not self._closing and os.getpid() == self._pid:
            self._closing = True
            self._undo.close()

    def _run_on_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(work(), self._loop).result(_CLOSE_S)

    async def _stop_serving(self) -> None:
        for server in self._servers:
            server.close()
        if self._reporter is not None:
            self._reporter.cancel()
        self._buffers.cancel_waiting()

    def _write_final_state(self) -> None:
        """Runs in the closing thread: at interpreter exit other threads are not reliable."""
        self._disk.close()
        try:
            self._models.registry.close()
        finally:
            self._metrics.write(self._next_report())
            self._metrics.close()

    async def _close_connections(self) -> None:
        for peer in list(self._peers):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.drain(), 1.0)
            peer.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._loop.is_running():
            self._loop.close()

    # -- frames

    def _on_frame(self, peer: Peer, header: Header, body: bytes) -> None:
        self._peers.add(peer)
        operation = self._operations.get(str(header.get("op")))
        if operation is None:
            raise Damaged(f"there is no operation {header.get('op')!r}")
        try:
            if self._closing:  # the final state must not change
                if header["op"] != "buffer.take":
                    raise WorkerFailed("The run is ending.", "Its hub was closed.")
                reply: Header | None = {"closed": True}
            else:
                reply = operation(peer, header, body)
        except (LudusError, OSError) as error:
            if isinstance(error, Damaged):
                raise
            if "id" in header:
                peer.send({"id": header["id"], **error_fields(error)})
            elif not isinstance(error, WorkerFailed):
                log.error("%s: %s", header["op"], error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"the operation {header['op']} is malformed: {error!r}") from error
        else:
            if reply is not None:
                _reply((peer, header["id"]), reply)

    def _on_disconnect(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._models.on_disconnect(peer)
        self._buffers.on_disconnect(peer)

    def _hello(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._models.set_node(peer, str(header.get("node", "")))
        return {"pid": self._pid, "place": vars(self.location), "run": self.run_id}

    # -- metrics and names

    def _add_metrics(self, peer: Peer, header: Header, body: bytes) -> Header | None:
        self._metrics.add(header["entries"])
        return {} if "id" in header else None

    def _report_now(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._submit_report()
        return {}

    def _add_component(self, peer: Peer, header: Header, body: bytes) -> Header:
        kind, name = str(header["kind"]), str(header["name"])
        self._components[f"{kind}/{name}"] = {"kind": kind, "name": name, "details": dict(header["details"])}
        return {}

    def _list_names(self, peer: Peer, header: Header, body: bytes) -> Header:
        return {
            "models": self._models.registry.names(),
            "buffers": self._buffers.names(),
            "components": list(self._components.values()),
        }

    async def _report_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._report_s)
            self._submit_report()

    def _submit_report(self) -> None:
        numbers = self._next_report()
        self._disk.submit(lambda: self._metrics.write(numbers))

    def _next_report(self) -> Numbers:
        gauges: dict[str, float] = {}
        if self._authenticator is not None and self._authenticator.refused:
            gauges["hub/refused"] = self._authenticator.refused
        versions = self._models.registry.versions()
        gauges |= {f"model/{name}/version": version for name, version in versions.items()}
        return self._metrics.take(gauges | self._buffers.gauges(), versions)


def _reply(request: Any, header: Mapping[str, Any], *parts: bytes | memoryview) -> None:
    peer, number = request
    peer.send({**header, "id": number}, *parts)
