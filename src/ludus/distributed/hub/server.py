"""The hub of a run: where its processes find models, buffers and each other by name, and leave their metrics.

It is a thread in the process that opened the run, behind a unix socket that only this user can reach. Whoever holds the lock
in the run's directory is the hub's process; the kernel gives it back however that process ends, so a run has one hub at most.
With a `Door` it also listens on TCP, for processes on other machines that have the token of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import platform
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from ludus.buffers.bounded_queue import BoundedQueue
from ludus.core import trust
from ludus.core.metrics import JsonLinesSink, Numbers, Sink, TensorBoardSink, read_jsonl
from ludus.core.plugins import did_you_mean
from ludus.distributed.gateway_workers import bind
from ludus.distributed.hub.rpc import (
    MAX_BODY,
    Header,
    Peer,
    check_socket_path,
    error_fields,
    listen,
    listen_beyond,
    split,
)
from ludus.distributed.hub.shared_queues import Rings, Shared, release
from ludus.distributed.hub.weight_cache import PART, Landing, Source
from ludus.errors import Damaged, LudusError, UnknownName, UsageError, WorkerFailed
from ludus.io.addresses import tcp_address
from ludus.io.atomic_file import replace_json
from ludus.models.weights.model_registry import ModelRegistry, check_name
from ludus.process.auth import Guard, read_token, write_token
from ludus.process.temp_dirs import Scratch
from ludus.storage.local import LocalStore

log = logging.getLogger(__name__)

RECORD, LOCK = "hub.json", ".hub.lock"
REPORT_S = 10.0
BUFFER_SIZE = 512
CLAIM_S = 15.0
_CHUNK = MAX_BODY // 4
_MAX_NAMES = 10_000
_MAX_WRITES = 8
_SHM, _SHM_FREE = Path("/dev/shm"), 1 << 28  # noqa: S108 - a private directory is made below it


# -- who is the hub -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a run's hub is, seen from one machine, and the directories that the run's processes share there."""

    directory: str
    """The run: what is left behind."""
    socket: str
    """The path of the hub's unix socket; from another machine its `tcp://host:port`."""
    scratch: str
    """Sockets and rendezvous files; gone with the hub, or with the process that joined it from another machine."""
    staging: str
    """Where weights are written before they are published; empty away from the hub, where they travel."""
    node: str = ""
    """Which machine this is, among those of the run."""
    host: str = ""
    """The address at which other machines reach this one; empty when the run is on one machine alone."""
    token_file: str = ""
    """Holds the token of a run that other machines may join."""
    mirror: str = ""
    """Where this machine keeps its copies of the weights; empty where the hub is."""

    @property
    def home(self) -> bool:
        """Whether the hub is on this machine: memory and files can be shared with it."""
        return not self.mirror


@dataclass(frozen=True)
class Door:
    """Where a hub listens for other machines."""

    host: str
    port: int = 0
    token_file: str = ""
    """Holds the token to ask for; without one the hub makes a token of its own."""


def find_or_start(directory: Path, report_s: float = REPORT_S, door: Door | None = None) -> tuple[Place, Hub | None]:
    """Become the hub of a run, or find the process that is. Two that come at once get one hub. Raises WorkerFailed."""
    deadline = time.monotonic() + CLAIM_S
    while True:
        lock = _claimed(directory)
        if lock is not None:
            try:
                hub = Hub(directory, lock, report_s, door)
            except BaseException:
                lock.close()
                raise
            return hub.place, hub
        record = _record(directory)
        if record is not None and record.get("host") not in (None, platform.node()):
            raise UsageError(
                f"The run {directory} is open in process {record.get('pid')} on {record['host']}.",
                "Stop it, work there, or let several machines take part: ludus.init(…, address=…) on each of them.",
            )
        place = _reachable(record)
        if place is not None:
            return place, None  # its door, if it has one, is its own
        if time.monotonic() > deadline:
            raise WorkerFailed(
                f"The run {directory} is held by process {(record or {}).get('pid', '?')}, which does not answer.",
                "Stop that process, or open another trial.",
            )
        time.sleep(0.02)  # its owner is starting, or leaving


def found_here(directory: Path) -> Place | None:
    """The hub of a run, if it is on this machine."""
    return _reachable(_record(directory))


def _claimed(directory: Path) -> IO[str] | None:
    """The run's lock, or None while another process has it."""
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


def _record(directory: Path) -> dict[str, Any] | None:
    try:
        data = json.loads((directory / RECORD).read_bytes())
    except (OSError, ValueError):  # absent, or of a process that was killed while writing
        return None
    return data if isinstance(data, dict) else None


def _reachable(record: Mapping[str, Any] | None) -> Place | None:
    if record is None:
        return None
    try:
        place = Place(**record["place"])
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(place.socket)
    except (OSError, KeyError, TypeError):
        return None
    return place


def shared_memory() -> Path:
    """Shared memory where there is some; else the temporary directory."""
    if "LUDUS_SHM" in os.environ:
        return Path(os.environ["LUDUS_SHM"])
    with contextlib.suppress(OSError):
        stat = os.statvfs(_SHM)
        if os.access(_SHM, os.W_OK) and stat.f_bavail * stat.f_frsize >= _SHM_FREE:
            return _SHM
    return Path(tempfile.gettempdir())


# -- what is reported ---------------------------------------------------------------------------------------------------


class Tally:
    """Means of numbers between two reports. `timesteps` is no mean: the highest counts."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self.timesteps: float | None = None
        self.lost = 0

    def add(self, name: str, total: float, count: int) -> None:
        if name == "timesteps":
            self.timesteps = max(self.timesteps or 0.0, total / count)
            return
        if name not in self._sums and len(self._sums) >= _MAX_NAMES:
            self.lost += count
            return
        before = self._sums.get(name, (0.0, 0))
        self._sums[name] = before[0] + total, before[1] + count

    def take(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        if self.lost:
            means["metrics/lost"] = self.lost
        self._sums, self.lost = {}, 0
        return means


class Disk:
    """One thread that touches the disk, so that the hub's loop need not. What fails is logged; the next one may succeed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ludus-disk", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._work.qsize()

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self, timeout_s: float = 60.0) -> None:
        """Returns when everything is done that was asked for."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # a full disk, a run that was taken over: of that a hub does not die
                log.error("the run's directory could not be written: %s", error)


Item = bytes | memoryview | Shared


@dataclass
class _Buffer:
    fifo: BoundedQueue[Item]
    lost: int = 0
    """Items that producers dropped before they got here."""
    shared: int = 0
    """Items that came through shared memory."""


@dataclass
class _Component:
    kind: str
    name: str
    details: dict[str, Any] = field(default_factory=dict)


# -- the hub ------------------------------------------------------------------------------------------------------------


class Hub:
    """Serves until `close`. Everything in it happens on its own event loop; the disk is touched in another thread."""

    def __init__(self, directory: Path, lock: IO[str], report_s: float = REPORT_S, door: Door | None = None) -> None:
        self.directory, self._lock, self._report_s = directory, lock, report_s
        self._pid = os.getpid()
        self._bound = None if door is None else bind(door.host, door.port)  # first: it is what fails most
        self._scratch = Scratch(short_temp())
        self._shm = Scratch(shared_memory())
        self._registry = ModelRegistry(LocalStore(directory), self._shm.path)
        self.run_id = secrets.token_hex(8)
        """Of this life of the run: what other machines call their copies of it."""
        self._guard: Guard | None = None
        self.address = ""
        """`tcp://host:port` for other machines, if it has a door."""
        self.place = self._placed(door)
        self._source, self._landing = Source(self._answer), Landing(self._registry.staging)
        self._nodes: dict[Peer, str] = {}
        self._doors: dict[str, tuple[str, str]] = {}
        """The path of an inference worker's socket → (machine on which it is, address for the other machines)."""
        self._buffers: dict[str, _Buffer] = {}
        self._rings = Rings(self._shm.path / "rings")
        self._mapping: set[Peer] = set()
        """Consumers that see the rings."""
        self._lent: dict[Hashable, list[Shared]] = {}
        """What consumers are copying from the rings, by whom it was given to."""
        self._components: dict[str, _Component] = {}
        self._tally = Tally()
        self._sinks: list[Sink] = []
        self._iterations = 0
        self._began = time.monotonic()
        self._closing = False
        self._peers: set[Peer] = set()
        self._employers: dict[str, Peer] = {}
        """Who started the inference workers of a model; when it is gone, so are they."""
        self._disk = Disk()
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._run, name="ludus-hub", daemon=True)
        self._ops: dict[str, Callable[[Peer, Header, bytes], Any]] = {
            "hello": self._hello,
            "model.find": self._model_find,
            "model.create": self._model_create,
            "model.publish": self._model_publish,
            "model.clone": self._model_clone,
            "model.workers": self._model_workers,
            "model.newer": self._model_newer,
            "model.part": self._model_part,
            "stage.part": self._stage_part,
            "stage.drop": self._stage_drop,
            "graph.keep": self._graph_keep,
            "graph.part": self._graph_part,
            "buffer.open": self._buffer_open,
            "buffer.ring": self._buffer_ring,
            "buffer.push": self._buffer_push,
            "buffer.offer": self._buffer_offer,
            "buffer.take": self._buffer_take,
            "buffer.release": self._buffer_release,
            "buffer.stats": self._buffer_stats,
            "metric": self._metric,
            "report": self._report_now,
            "component": self._component,
            "names": self._names,
        }
        self._start()

    def _placed(self, door: Door | None) -> Place:
        scratch = self._scratch.path
        place = Place(str(self.directory), str(scratch / "hub"), str(scratch), str(self._registry.staging), secrets.token_hex(8))
        if door is None or self._bound is None:
            return place
        token_file = door.token_file or str(scratch / "token")
        if not door.token_file:
            write_token(scratch / "token")
        self._guard = Guard(read_token(token_file))
        self.address = tcp_address(door.host, self._bound.getsockname()[1])
        return replace(place, host=door.host, token_file=token_file)

    def _start(self) -> None:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(CLAIM_S)
            record = {"pid": self._pid, "host": platform.node(), "address": self.address, "place": vars(self.place)}
            replace_json(self.directory / RECORD, record, mode=0o600, indent=1)
        except BaseException:
            self.close()
            raise

    async def _open(self) -> None:
        check_socket_path(Path(self.place.socket))
        self._servers.append(await listen(Path(self.place.socket), self._on_frame, self._on_gone))
        if self._bound is not None and self._guard is not None:
            self._servers.append(await listen_beyond(self._bound, self._guard, self._on_frame, self._on_gone))
        before = read_jsonl(self.directory / "metrics.jsonl")
        self._iterations = int(before[-1]["iterations"]) if before else 0
        incarnation = int(before[-1].get("incarnation", 1)) + 1 if before else 1
        self._sinks = [JsonLinesSink(self.directory / "metrics.jsonl", incarnation), TensorBoardSink(self.directory)]
        self._reporter = self._loop.create_task(self._report_for_ever())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def forget(self) -> None:
        """In a copy of this process made by fork(): it is not the hub."""
        self._lock.close()

    def close(self, timeout_s: float = 30.0) -> None:
        """Tell whoever waits that the run has ended, keep the newest weights, write the last report. Again: no effect."""
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        problem: BaseException | None = None
        steps: list[Callable[[], None]] = [
            lambda: self._on_loop(self._hush(), timeout_s),
            self._last_words,
            lambda: self._on_loop(self._shut(), timeout_s),
        ]
        for step in steps:
            try:
                step()
            except Exception as error:  # a full disk among them; the rest must be closed all the same
                problem = problem or error
        for path in (self.directory / RECORD, Path(self.place.socket)):
            path.unlink(missing_ok=True)
        if self._bound is not None:
            self._bound.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._loop.is_running():
            self._loop.close()
        self._rings.close()
        self._scratch.close()
        self._shm.close()
        self._lock.close()
        if problem is not None:
            raise problem

    def _on_loop(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def _hush(self) -> None:
        """Nothing new begins; whoever waits is told."""
        for server in self._servers:
            server.close()
        if self._servers:
            self._reporter.cancel()
        for buffer in self._buffers.values():
            for who in buffer.fifo.waiting():
                self._answer(who, {"closed": True})
                buffer.fifo.cancel(who)

    def _last_words(self) -> None:
        """In the thread that closes: at the end of a process no other thread can be relied upon."""
        self._disk.close()
        try:
            self._registry.close()
        finally:
            self._write(self._numbers())
            for sink in self._sinks:
                sink.close()

    async def _shut(self) -> None:
        for peer in list(self._peers):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.flushed(), 1.0)
            peer.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # -- frames

    def _on_frame(self, peer: Peer, header: Header, body: bytes) -> None:
        self._peers.add(peer)
        op = self._ops.get(str(header.get("op")))
        if op is None:
            raise Damaged(f"there is no operation {header.get('op')!r}")
        try:
            # Once it closes, what is written at the end must not change any more.
            reply = self._too_late(header) if self._closing else op(peer, header, body)
        except (LudusError, OSError) as error:
            if isinstance(error, Damaged):
                raise
            self._fail(peer, header, error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"the operation {header['op']} is malformed: {error!r}") from error
        else:
            if reply is not None:
                self._answer((peer, header["id"]), reply)

    @staticmethod
    def _too_late(header: Header) -> Header | None:
        if header["op"] == "buffer.take":
            return {"closed": True}
        raise WorkerFailed("The run is ending.", "Its hub was closed.")

    def _on_gone(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._nodes.pop(peer, None)
        self._source.gone(peer)
        self._landing.gone(peer)
        for name in [name for name, employer in self._employers.items() if employer is peer]:
            for path in self._registry.info(name)["workers"]:
                self._doors.pop(path, None)
            self._registry.set_workers(name, [])
            del self._employers[name]
        for buffer in self._buffers.values():
            for who in buffer.fifo.waiting():
                if who[0] is peer:
                    buffer.fifo.cancel(who)
            self._settle(buffer)
        self._buffer_gone(peer)

    @staticmethod
    def _answer(who: Any, header: Mapping[str, Any], *parts: bytes | memoryview) -> None:
        peer, number = who
        peer.send({**header, "id": number}, *parts)

    @staticmethod
    def _fail(peer: Peer, header: Header, error: Exception) -> None:
        if "id" in header:
            peer.send({"id": header["id"], **error_fields(error)})
        elif not isinstance(error, WorkerFailed):
            log.error("%s: %s", header.get("op"), error)

    def _hello(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._nodes[peer] = str(header.get("node", ""))
        return {"pid": self._pid, "place": vars(self.place), "run": self.run_id}

    # -- models

    def _model_find(self, peer: Peer, header: Header, body: bytes) -> Header:
        found = self._registry.find(header["name"], time.monotonic())
        if found is None:
            raise UnknownName(
                f"There is no model {header['name']!r} in this run.", did_you_mean(header["name"], self._registry.names())
            )
        return self._seen_from(peer, found)

    def _seen_from(self, peer: Peer, found: Header) -> Header:
        """The inference workers of a model by the addresses that this peer can reach."""
        here = self._nodes.get(peer) or self.place.node
        ways = [(path, *self._doors.get(path, (here, ""))) for path in found["workers"]]
        return {**found, "workers": [path if node == here else address for path, node, address in ways]}

    def _model_create(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._landing.taken(header["file"])
        trust.allow(header["description"])  # a process of the user's has an object of that class
        found = self._registry.create(
            header["name"],
            header["description"],
            header["file"],
            time.monotonic(),
            bool(header["override"]),
            header["interval"],
            header["keep"],
            header["settings"],
        )
        self._source.published(header["name"])
        return self._seen_from(peer, found)

    def _model_publish(self, peer: Peer, header: Header, body: bytes) -> Header:
        now = time.monotonic()
        self._landing.taken(header["file"])
        version = self._registry.publish(header["name"], header["file"], int(header["step"]), now)
        self._source.published(header["name"])
        if self._registry.due(header["name"], now):
            keep = self._registry.make_keep_task(header["name"], now)
            if self._disk.waiting < _MAX_WRITES:
                self._disk.do(keep)
            else:
                keep()  # the publisher is faster than the disk, and has to wait for it
        return {"version": version}

    def _model_clone(self, peer: Peer, header: Header, body: bytes) -> Header:
        return self._seen_from(peer, self._registry.clone(header["name"], int(header["step"]), time.monotonic()))

    def _model_workers(self, peer: Peer, header: Header, body: bytes) -> Header:
        paths, node = [str(path) for path in header["workers"]], self._nodes.get(peer) or self.place.node
        for path, address in zip(paths, header.get("doors") or [""] * len(paths), strict=True):
            self._doors[path] = node, str(address)
        self._registry.set_workers(header["name"], paths)
        self._employers[header["name"]] = peer
        return {}

    # -- weights that travel to and from other machines

    def _model_newer(self, peer: Peer, header: Header, body: bytes) -> None:
        board = Path(self._model_find(peer, header, body)["board"])
        self._source.want((peer, header["id"]), header["name"], int(header["version"]), float(header["wait_s"]), board)

    def _model_part(self, peer: Peer, header: Header, body: bytes) -> None:
        what = str(header["name"]), int(header["version"]), max(0, int(header["offset"])), max(0, min(PART, int(header["size"])))
        self._answer((peer, header["id"]), {}, self._source.part(peer, *what))

    def _stage_part(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._landing.part(peer, header["file"], int(header["offset"]), body)
        return {}

    def _stage_drop(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._landing.drop(header["file"])
        return {}

    def _graph_keep(self, peer: Peer, header: Header, body: bytes) -> Header:
        return {"path": str(self._landing.keep_graph(header["file"]))}

    def _graph_part(self, peer: Peer, header: Header, body: bytes) -> None:
        size, part = self._landing.graph_part(header["file"], max(0, int(header["offset"])))
        self._answer((peer, header["id"]), {"size": size}, part)

    # -- buffers

    def _buffer_open(self, peer: Peer, header: Header, body: bytes) -> Header:
        name, size = check_name(header["name"]), header["size"]
        buffer = self._buffers.get(name)
        if buffer is None:
            if size is not None and size < 1:
                raise UsageError(f"A buffer of size {size} holds nothing.", "Give size=1 or more.")
            buffer = self._buffers[name] = _Buffer(BoundedQueue(BUFFER_SIZE if size is None else int(size)))
        elif size is not None and size != buffer.fifo.size:
            raise UsageError(
                f"The buffer {name!r} exists with size {buffer.fifo.size}, not {size}.", "Give its size in one place only."
            )
        return {"size": buffer.fifo.size}

    def _buffer_ring(self, peer: Peer, header: Header, body: bytes) -> Header:
        """A place in shared memory for the items of one producer, or none: then they come through the socket."""
        ring = self._rings.grant(peer, int(header["bytes"]))
        return {"path": ""} if ring is None else {"path": str(ring.path), "bytes": ring.size}

    def _items(self, peer: Peer, buffer: _Buffer, header: Header, body: bytes) -> list[Item]:
        """`records` says for each item its number in the producer's ring, or -1: it is in the body, as all are without it."""
        sizes, records = header["sizes"], header.get("records")
        if len(sizes) == 1 and sizes[0] == len(body):
            inline: list[Item] = [body]
        else:  # copies: a dropped item must not be held by its neighbours
            inline = [bytes(part) for part in split(body, sizes)]
        if records is None:
            return inline
        numbers = [number for number in records if number >= 0]
        if len(inline) + len(numbers) != len(records):  # before anything is taken, which would have to be given back
            raise ValueError(f"{len(inline)} items, and not {len(records) - len(numbers)}")
        shared = self._rings.taken(peer, numbers, int(header["upto"]))
        buffer.shared += len(shared)
        here, there = iter(inline), iter(shared)
        return [next(here) if number < 0 else next(there) for number in records]

    def _buffer_push(self, peer: Peer, header: Header, body: bytes) -> None:
        buffer = self._buffers[header["name"]]
        buffer.lost += int(header.get("lost", 0))
        buffer.fifo.push(self._items(peer, buffer, header, body))
        self._settle(buffer)

    def _buffer_offer(self, peer: Peer, header: Header, body: bytes) -> None:
        buffer = self._buffers[header["name"]]
        buffer.fifo.offer((peer, header["id"]), self._items(peer, buffer, header, body))
        self._settle(buffer)

    def _buffer_take(self, peer: Peer, header: Header, body: bytes) -> None:
        buffer = self._buffers[header["name"]]
        if header["count"] > buffer.fifo.size:
            raise UsageError(
                f"A batch of {header['count']} does not fit into the buffer {header['name']!r} of size {buffer.fifo.size}.",
                "Make the buffer larger, or the batch smaller.",
            )
        if header.get("maps"):
            self._mapping.add(peer)
        buffer.fifo.request((peer, header["id"]), int(header["count"]))
        self._settle(buffer)

    def _settle(self, buffer: _Buffer) -> None:
        settled = buffer.fifo.deliver()
        for who in settled.accepted:
            self._answer(who, {})
        for who, items in settled.deliveries:
            self._give(who, items)

    def _give(self, who: Any, items: list[Item]) -> None:
        """In frames of bounded size; the last one is not marked `more`. Who sees the rings is told where in them to look."""
        shared = [item for item in items if isinstance(item, Shared)]
        if shared and who[0] in self._mapping:
            self._lent[who] = shared
        elif shared:
            items = [item.copy() if isinstance(item, Shared) else item for item in items]
            release(shared)
        part: list[Item] = []
        size = 0
        for item in items:
            inside = 0 if isinstance(item, Shared) else len(item)
            if part and size + inside > _CHUNK:
                self._give_part(who, part, {"more": True})
                part, size = [], 0
            part.append(item)
            size += inside
        self._give_part(who, part, {})

    def _give_part(self, who: Any, items: list[Item], header: Header) -> None:
        inline = [item for item in items if not isinstance(item, Shared)]
        header["sizes"] = [len(item) for item in inline]
        if len(inline) < len(items):
            header["places"] = [[str(item.ring.path), item.at, len(item)] if isinstance(item, Shared) else None for item in items]
        self._answer(who, header, *inline)

    def _buffer_release(self, peer: Peer, header: Header, body: bytes) -> None:
        release(self._lent.pop((peer, header["take"]), []))

    def _buffer_gone(self, peer: Peer) -> None:
        self._mapping.discard(peer)
        for who in [who for who in self._lent if isinstance(who, tuple) and who[0] is peer]:
            release(self._lent.pop(who))
        self._rings.gone(peer)

    def _buffer_stats(self, peer: Peer, header: Header, body: bytes) -> Header:
        return self._stats_of(self._buffers[header["name"]])

    @staticmethod
    def _stats_of(buffer: _Buffer) -> dict[str, int]:
        fifo = buffer.fifo
        return {
            "size": fifo.size,
            "waiting": len(fifo),
            "pushed": fifo.pushed + buffer.lost,
            "taken": fifo.taken,
            "dropped": fifo.dropped + buffer.lost,
            "shared": buffer.shared,
        }

    # -- metrics and names

    def _metric(self, peer: Peer, header: Header, body: bytes) -> Header | None:
        for name, total, count in header["entries"]:
            if not isinstance(name, str) or count < 1:
                raise ValueError(f"{name!r} × {count}")
            self._tally.add(name, float(total), int(count))
        return {} if "id" in header else None

    def _report_now(self, peer: Peer, header: Header, body: bytes) -> Header:
        self._disk.do(self._writing())
        return {}

    def _component(self, peer: Peer, header: Header, body: bytes) -> Header:
        entry = _Component(str(header["kind"]), str(header["name"]), dict(header["details"]))
        self._components[f"{entry.kind}/{entry.name}"] = entry
        return {}

    def _names(self, peer: Peer, header: Header, body: bytes) -> Header:
        return {
            "models": self._registry.names(),
            "buffers": sorted(self._buffers),
            "components": [vars(component) for component in self._components.values()],
        }

    async def _report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._report_s)
            self._disk.do(self._writing())

    def _writing(self) -> Callable[[], None]:
        numbers = self._numbers()
        return lambda: self._write(numbers)

    def _numbers(self) -> Numbers:
        """One report; empty when there is nothing to say."""
        numbers = self._tally.take()
        if self._guard is not None and self._guard.refused:
            numbers["hub/refused"] = self._guard.refused
        versions = self._registry.versions()
        numbers |= {f"model/{name}/version": version for name, version in versions.items()}
        for name, buffer in self._buffers.items():
            numbers |= {f"buffer/{name}/{what}": value for what, value in self._stats_of(buffer).items() if what != "size"}
        if not numbers:
            return {}
        self._iterations += 1
        steps = self._tally.timesteps
        if steps is None or not math.isfinite(steps):
            steps = max(versions.values(), default=self._iterations)
        head = {"iterations": self._iterations, "timesteps": steps, "time_s": time.monotonic() - self._began}
        return head | numbers

    def _write(self, numbers: Numbers) -> None:
        if not numbers:
            return
        log.info("%s", "  ".join(f"{name} {value:.5g}" for name, value in numbers.items()))
        for sink in self._sinks:
            sink.write(numbers)


def short_temp() -> Path:
    """The temporary directory, unless its path would be too long for a socket."""
    temp = Path(tempfile.gettempdir())
    return temp if len(os.fsencode(str(temp))) <= 32 or not Path("/tmp").is_dir() else Path("/tmp")  # noqa: S108
