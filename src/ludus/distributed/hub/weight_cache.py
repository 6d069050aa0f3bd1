"""A cache of weights per machine: each version is fetched from the hub once and shared there.

    caches = WeightCaches(cache_dir.path, client)
    reader = caches.reader(info)            # a SharedWeightsReader on memory of this machine

Of the processes that read a model, the one that holds a lock file polls the hub for newer versions and writes each one to a `SharedWeights`
of this machine. The kernel releases the lock when that process ends, and another one takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Protocol

from ludus.distributed.frames import REPLY_TIMEOUT_S
from ludus.distributed.hub.rpc import RpcConnection
from ludus.distributed.hub.weight_transfer import POLL_S, download, download_graph
from ludus.errors import Damaged, LudusError, NotFound, StoreFull, UsageError, WorkerFailed
from ludus.io.atomic_file import create_once
from ludus.models.weights.shared_weights import SharedWeights, SharedWeightsReader

log = logging.getLogger(__name__)

FIRST_WEIGHTS_S = 120.0
"""How long a process waits for the first weights of a model."""
TAKE_OVER_S = 0.2
RETRY_S = 1.0
_POLL_INTERVAL_S = 0.01
_LOCK_TIMEOUT_S = 10.0
_KEY = re.compile(r"\d{4,}")


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
        with contextlib.suppress(FileExistsError):
            create_once(self.path / "node", secrets.token_hex(8).encode())
        self.node = (self.path / "node").read_text()
        """Id of this machine: random, and the same for all processes here."""

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


@contextlib.asynccontextmanager
async def _connect(client: HubClient) -> AsyncIterator[RpcConnection]:
    connection = await client.connect()
    try:
        yield connection
    finally:
        await connection.close()


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
        here = self._directory / Path(path).name
        if not here.exists():
            self._client.submit(self._fetch_graph(here)).result(FIRST_WEIGHTS_S)
        return str(here)

    async def _fetch_graph(self, here: Path) -> None:
        async with _connect(self._client) as connection:
            await download_graph(connection, here)

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
        async with _connect(self._client) as connection:
            while not (self._frozen and board.version):
                request = {"op": "model.newer", "name": self._name, "version": board.version, "wait_s": POLL_S}
                head = (await connection.request(request, timeout_s=POLL_S + REPLY_TIMEOUT_S))[-1][0]
                if head["size"]:
                    await self._fetch(connection, board, int(head["version"]), int(head["size"]), str(head["sum"]))
                    self._error = None

    async def _fetch(self, connection: RpcConnection, board: SharedWeights, version: int, size: int, checksum: str) -> None:
        path = self._directory / f"aside-{uuid.uuid4().hex}"
        request = {"op": "model.part", "name": self._name, "version": version}
        try:
            await download(connection, request, path, size, checksum)
            board.publish(version, path)
        finally:
            path.unlink(missing_ok=True)
