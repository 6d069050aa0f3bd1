"""Transfer of weights between the hub and other machines, and a cache per machine: each version is fetched once and shared there.

    caches = WeightCaches(cache_dir.path, client)
    reader = caches.reader(info)            # a SharedWeightsReader on memory of this machine

Of the processes that read a model, the one that holds a lock file polls the hub for newer versions and writes each one to a `SharedWeights`
of this machine. The kernel releases the lock when that process ends, and another one takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from ludus.distributed.hub.rpc import Body, Header, Peer, RpcConnection, SendReply, error_fields
from ludus.errors import Damaged, LudusError, NotFound, StoreFull, UsageError, WorkerFailed
from ludus.io.atomic_file import create_once, open_for_replace
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeights, SharedWeightsReader

log = logging.getLogger(__name__)

PART = 1 << 22
"""Bytes of weights per frame: small enough that other requests are not delayed."""
AHEAD = 4
"""Number of parts that are requested ahead."""
POLL_S = 20.0
"""How long a request for a newer version waits at the hub."""
REPLY_TIMEOUT_S = 60.0
FIRST_WEIGHTS_S = 120.0
"""How long a process waits for the first weights of a model."""
TAKE_OVER_S = 0.2
RETRY_S = 1.0
_POLL_INTERVAL_S = 0.01
_LOCK_TIMEOUT_S = 10.0
_MAX_UPLOADS = 16
_KEY = re.compile(r"\d{4,}")
_STAGED = re.compile(r"aside-[0-9a-f]{32}")
_GRAPH = re.compile(r"graph-[0-9a-f]{32}")


# -- sending, in the hub ------------------------------------------------------------------------------------------------


class _EncodedVersion:
    """One encoded version."""

    def __init__(self, version: int, data: bytes) -> None:
        self.version, self.data = version, memoryview(data)
        self.sum = hashlib.sha256(data).hexdigest()

    @classmethod
    def of(cls, reader: SharedWeightsReader) -> _EncodedVersion:
        version, weights = reader.read()
        return cls(version, serialization.encode_weights(weights))


@dataclass(eq=False)
class _PendingRequest:
    request_id: tuple[Peer, Any]
    reader: SharedWeightsReader
    version: int
    timer: asyncio.TimerHandle | None = None


class WeightSender:
    """Sends versions to machines that follow a model, in parts that they request. Runs on the hub's event loop.

    A version stays in memory while a machine fetches it, even after it was replaced: otherwise a machine that is slower than the
    publisher would never get a complete one. It is encoded once for all machines.
    """

    def __init__(self, reply: SendReply) -> None:
        self._reply = reply
        self._pending: dict[str, list[_PendingRequest]] = {}
        self._being_sent: dict[tuple[Peer, str], _EncodedVersion] = {}
        self._newest: weakref.WeakValueDictionary[str, _EncodedVersion] = weakref.WeakValueDictionary()
        self._encoding: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        """Number of versions sent, counted once per machine."""

    def wait_for_newer(self, request_id: tuple[Peer, Any], name: str, version: int, wait_s: float, board: Path) -> None:
        """Reply when there is a version above `version`, or after `wait_s` without one."""
        pending = _PendingRequest(request_id, SharedWeightsReader(board), version)
        if pending.reader.version > version:
            self._start(name, pending)
            return
        self._pending.setdefault(name, []).append(pending)
        pending.timer = asyncio.get_running_loop().call_later(min(wait_s, POLL_S), self._reply_nothing_new, name, pending)

    def _reply_nothing_new(self, name: str, pending: _PendingRequest) -> None:
        self._pending[name].remove(pending)
        self._reply(pending.request_id, {"version": pending.version, "size": 0})

    def on_publish(self, name: str) -> None:
        """Answer pending requests for the model that have an older version."""
        for pending in [one for one in self._pending.get(name, []) if one.reader.version > one.version]:
            self._pending[name].remove(pending)
            if pending.timer is not None:
                pending.timer.cancel()
            self._start(name, pending)

    def _start(self, name: str, pending: _PendingRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._send(name, pending))
        self._tasks.add(task)  # the event loop holds only weak references
        task.add_done_callback(self._tasks.discard)

    async def _send(self, name: str, pending: _PendingRequest) -> None:
        peer, number = pending.request_id
        try:
            encoded = await self._encode(name, pending.reader)
        except Exception as error:  # any error is sent to the requesting machine
            peer.send({"id": number, **error_fields(error)})
            return
        if not peer.is_closed:
            self._being_sent[peer, name] = encoded
            self.sent += 1
            self._reply(pending.request_id, {"version": encoded.version, "size": len(encoded.data), "sum": encoded.sum})

    async def _encode(self, name: str, reader: SharedWeightsReader) -> _EncodedVersion:
        async with self._encoding.setdefault(name, asyncio.Lock()):
            known = self._newest.get(name)
            if known is None or known.version != reader.version:
                # In a thread: 100 MB take 0.1 s, which would block all other requests.
                known = self._newest[name] = await asyncio.to_thread(_EncodedVersion.of, reader)
            return known

    def part(self, peer: Peer, name: str, version: int, offset: int, size: int) -> memoryview:
        """Raises NotFound when this version is not being sent to this peer."""
        encoded = self._being_sent.get((peer, name))
        if encoded is None or encoded.version != version:
            raise NotFound(f"Version {version} of {name!r} is not being sent to this peer.", "Request a newer version first.")
        if offset + size == len(encoded.data):
            del self._being_sent[peer, name]
        return encoded.data[offset : offset + min(size, PART)]

    def on_disconnect(self, peer: Peer) -> None:
        for key in [key for key in self._being_sent if key[0] is peer]:
            del self._being_sent[key]
        for pending in self._pending.values():
            for one in [one for one in pending if one.request_id[0] is peer]:
                pending.remove(one)
                if one.timer is not None:
                    one.timer.cancel()


class WeightReceiver:
    """Receives uploaded weights in the hub: parts are appended to files in `staging`."""

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._sizes: dict[str, tuple[Peer, int]] = {}

    def write_part(self, peer: Peer, file: str, offset: int, body: Body) -> None:
        """Append a part. Raises StoreFull; Damaged when it does not follow the one before."""
        if not _STAGED.fullmatch(file):
            raise Damaged(f"{file!r} is not the name of a staged file.")
        _, size = self._sizes.get(file, (peer, 0))
        if offset != size or sum(owner is peer for owner, _ in self._sizes.values()) > _MAX_UPLOADS:
            raise Damaged(f"a part of a staged file begins at {offset}, not at {size}, or there are too many such files")
        path = self._staging / file
        self._sizes[file] = peer, size + len(body)
        flags = os.O_WRONLY | (os.O_APPEND if offset else os.O_CREAT | os.O_EXCL)
        try:
            with open(os.open(path, flags, 0o600), "ab") as out:
                out.write(body)
        except OSError as error:
            self.drop(file)
            raise StoreFull(
                f"Cannot write weights to {self._staging}: {error.strerror}.", "Enlarge shared memory, or set LUDUS_SHM."
            ) from error

    def keep_graph(self, file: str) -> Path:
        """Move an uploaded traced model to where readers look for it."""
        if file not in self._sizes:
            raise NotFound(f"No upload is called {file!r}.")
        self.forget(file)
        kept = self._staging.parent / f"graph-{uuid.uuid4().hex}"
        os.replace(self._staging / file, kept)
        return kept

    def graph_part(self, file: str, offset: int) -> tuple[int, bytes]:
        """Return the size of the file and the bytes from `offset`."""
        if not _GRAPH.fullmatch(file):
            raise Damaged(f"{file!r} is not the name of a traced model.")
        try:
            with open(self._staging.parent / file, "rb") as source:
                source.seek(offset)
                return os.fstat(source.fileno()).st_size, source.read(PART)
        except OSError as error:
            raise NotFound(f"The traced model {file} is gone: {error.strerror}.") from error

    def forget(self, file: str) -> None:
        self._sizes.pop(file, None)

    def drop(self, file: str) -> None:
        if self._sizes.pop(file, None) is not None:
            (self._staging / file).unlink(missing_ok=True)

    def on_disconnect(self, peer: Peer) -> None:
        for file in [file for file, (owner, _) in self._sizes.items() if owner is peer]:
            self.drop(file)


# -- directory of a run on another machine ------------------------------------------------------------------------------


class NodeCacheDir:
    """Directory that all processes of this user and run share on this machine.

    Each process holds a shared lock on it; the last one to leave removes the directory. Directories of dead processes are removed by
    later ones.
    """

    def __init__(self, base: Path, run: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise Damaged(f"{run!r} is not the id of a run.")
        for path in base.glob(f"ludus-away-{os.getuid()}-*"):
            if path.name.removeprefix(f"ludus-away-{os.getuid()}-") != run:
                _sweep(path)
        self.path = base / f"ludus-away-{os.getuid()}-{run}"
        self._users = self._enter()
        self.node = self._read_node_id()

    def _enter(self) -> IO[bytes]:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                self.path.mkdir(mode=0o700, exist_ok=True)
                status = self.path.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                    raise UsageError(f"{self.path} is not a private directory of this user.", "Remove it, or set LUDUS_SHM.")
                users = _open_private(self.path / "users")
            except FileNotFoundError:  # removed meanwhile by the last process that used it
                continue
            except OSError as error:
                raise StoreFull(f"Cannot make {self.path}: {error.strerror}.", "Set LUDUS_SHM to another directory.") from error
            if _try_lock(users, exclusive=False) and _is_same_file(users, self.path / "users"):
                return users
            users.close()
            if time.monotonic() > deadline:
                raise WorkerFailed(f"{self.path} is locked by a process that does not release it.")
            time.sleep(_POLL_INTERVAL_S)

    def _read_node_id(self) -> str:
        """Id of this machine: random, and the same for all processes here."""
        name = self.path / "node"
        with contextlib.suppress(FileExistsError):
            create_once(name, secrets.token_hex(8).encode())
        return name.read_text()

    def release_after_fork(self) -> None:
        """In a fork of this process."""
        self._users.close()

    def close(self) -> None:
        if self._users.closed:
            return
        if _try_lock(self._users) and _is_same_file(self._users, self.path / "users"):
            shutil.rmtree(self.path, ignore_errors=True)
        self._users.close()


def _open_private(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")


def _try_lock(file: IO[bytes], exclusive: bool = True) -> bool:
    """Try to lock the file, exclusively or shared; the kernel releases the lock when the process ends."""
    import fcntl  # not available on all systems, and needed only on other machines than the hub's

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    """Return whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _sweep(path: Path) -> None:
    try:
        with _open_private(path / "users") as users:
            if _try_lock(users) and _is_same_file(users, path / "users"):
                shutil.rmtree(path, ignore_errors=True)
    except OSError:  # being created or removed, or owned by another user
        pass


# -- the cache ----------------------------------------------------------------------------------------------------------


class HubClient(Protocol):
    """This process's connection to the hub."""

    def connect(self) -> Coroutine[Any, Any, RpcConnection]: ...
    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]: ...
    def check(self) -> None: ...


class WeightCaches:
    """Cached models that this process reads. Thread-safe."""

    def __init__(self, directory: Path, client: HubClient) -> None:
        self._directory, self._client = directory, client
        self._lock = threading.Lock()
        self._caches: dict[str, WeightCache] = {}

    def reader(self, info: Mapping[str, Any], timeout_s: float = FIRST_WEIGHTS_S) -> SharedWeightsReader:
        """Reader of the weights of a model; returns when the first version is there. Raises WorkerFailed."""
        key = Path(str(info["board"])).name
        if not _KEY.fullmatch(key):
            raise Damaged(f"{key!r} does not name the weights of a model.")
        with self._lock:
            cache = self._caches.get(key)
            if cache is None:
                cache = self._caches[key] = WeightCache(
                    self._directory, key, str(info["name"]), bool(info["frozen"]), self._client
                )
                cache.start()
        return cache.reader(time.monotonic() + timeout_s)

    def graph(self, path: str) -> str:
        """Local copy of the traced model that is at `path` on the hub's machine."""
        name = Path(path).name
        if not _GRAPH.fullmatch(name):
            raise Damaged(f"{name!r} is not the name of a traced model.")
        here = self._directory / name
        if not here.exists():
            self._client.submit(_download_graph(self._client, here)).result(FIRST_WEIGHTS_S)
        return str(here)

    def release_after_fork(self) -> None:
        """In a fork of this process: release the locks."""
        for cache in self._caches.values():
            cache.release_after_fork()


class WeightCache:
    """Cache of one model. Runs on the client's event loop until that ends."""

    def __init__(self, share: Path, key: str, name: str, frozen: bool, client: HubClient) -> None:
        self._directory, self._name, self._frozen, self._client = share / key, name, frozen, client
        self._lock = _open_private(share / f"{key}.lock")
        self._error: Exception | None = None
        self.is_fetching = False
        """This process fetches the versions."""

    def start(self) -> None:
        self._client.submit(self._run()).add_done_callback(lambda _: self.release_after_fork())

    def release_after_fork(self) -> None:
        self._lock.close()

    def reader(self, deadline: float) -> SharedWeightsReader:
        while True:
            with contextlib.suppress(NotFound):
                reader = SharedWeightsReader(self._directory)
                if reader.version > 0:
                    return reader
            self._client.check()
            if time.monotonic() > deadline or isinstance(self._error, (UsageError, NotFound)):
                why = f" {self._error}" if self._error else ""
                raise WorkerFailed(f"The weights of {self._name!r} did not arrive on this machine.{why}")
            time.sleep(_POLL_INTERVAL_S)

    async def _run(self) -> None:
        while True:
            if not (self.is_fetching or _try_lock(self._lock)):
                await asyncio.sleep(TAKE_OVER_S)
                continue
            self.is_fetching = True
            try:
                await self._fetch_versions()
                return
            except (LudusError, OSError) as error:  # the hub is gone (`check` raises), or the failure is temporary
                self._error = error
                self._client.check()
                log.warning("fetching the weights of %s failed: %s; trying again", self._name, error)
                await asyncio.sleep(RETRY_S)

    async def _fetch_versions(self) -> None:
        """Fetch version after version; returns after the first one of a frozen model."""
        board = SharedWeights(self._directory)
        for left in self._directory.glob("aside-*"):  # of a process that was killed
            left.unlink(missing_ok=True)
        connection = await self._client.connect()
        try:
            while not (self._frozen and board.version):
                request = {"op": "model.newer", "name": self._name, "version": board.version, "wait_s": POLL_S}
                head = (await connection.request(request, timeout_s=POLL_S + REPLY_TIMEOUT_S))[-1][0]
                if head["size"]:
                    await self._fetch(connection, board, int(head["version"]), int(head["size"]), str(head["sum"]))
                    self._error = None
        finally:
            await connection.close()

    async def _fetch(self, connection: RpcConnection, board: SharedWeights, version: int, size: int, checksum: str) -> None:
        path = self._directory / f"aside-{uuid.uuid4().hex}"
        request = {"op": "model.part", "name": self._name, "version": version}
        try:
            await _download(connection, request, path, size, checksum)
            board.publish(version, path)
        finally:
            path.unlink(missing_ok=True)


async def _download(connection: RpcConnection, request: Header, path: Path, size: int, checksum: str) -> None:
    """Download a version to `path`. Raises StoreFull before anything is sent, Damaged when the checksum differs."""
    checksum_so_far = hashlib.sha256()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as out:
        _make_room(out, size, path)
        offsets = iter(range(0, size, PART))
        in_flight: deque[asyncio.Future[Any]] = deque()
        try:
            for _ in range(0, size, PART):
                for offset in itertools.islice(offsets, AHEAD - len(in_flight)):
                    in_flight.append(connection.start({**request, "offset": offset, "size": min(PART, size - offset)}))
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    body = (await in_flight.popleft())[-1][1]
                checksum_so_far.update(body)
                out.write(body)
        finally:
            for future in in_flight:
                future.cancel()
    if checksum_so_far.hexdigest() != checksum:
        raise Damaged(f"Version {request['version']} of {request['name']!r} arrived damaged.")


def _make_room(out: Any, size: int, path: Path) -> None:
    """Allocate the file in advance: with a full file system, processes that map the file would crash instead."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(out.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return
        raise StoreFull(
            f"There is no room for {size} bytes of weights in {path.parent}: {error.strerror}.",
            "Enlarge shared memory, or set LUDUS_SHM.",
        ) from error


async def _download_graph(client: HubClient, here: Path) -> None:
    connection = await client.connect()
    try:
        size = 1
        with open_for_replace(here, mode=0o600) as out:
            while out.tell() < size:
                request = {"op": "graph.part", "file": here.name, "offset": out.tell()}
                header, body = (await connection.request(request, timeout_s=REPLY_TIMEOUT_S))[-1]
                size = int(header["size"])
                if not body:
                    raise Damaged(f"The traced model {here.name} ends at {out.tell()} of {size} bytes.")
                out.write(body)
    finally:
        await connection.close()


# -- uploading ----------------------------------------------------------------------------------------------------------


async def upload(request: Callable[..., Coroutine[Any, Any, Header]], data: bytes) -> str:
    """Stage bytes at the hub from another machine; returns the name of the file. `request(header, body)` calls the hub."""
    name, view = f"aside-{uuid.uuid4().hex}", memoryview(data)
    in_flight: set[asyncio.Task[Header]] = set()
    loop = asyncio.get_running_loop()
    try:
        for offset in range(0, max(1, len(view)), PART):
            header = {"op": "stage.part", "file": name, "offset": offset}
            in_flight.add(loop.create_task(request(header, view[offset : offset + PART])))
            if len(in_flight) >= AHEAD:
                done, in_flight = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        await asyncio.gather(*in_flight)
    except BaseException:
        for task in in_flight:
            task.cancel()
        raise
    return name
