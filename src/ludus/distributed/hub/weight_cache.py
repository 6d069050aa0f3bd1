"""The weights of a run on a machine away from its hub: fetched once for each version, then shared by all processes there.

    mirrors = Mirrors(share.path, client)
    reader = mirrors.reader(info)            # a SharedWeightsReader like any other, on memory of this machine

Of the processes that need a model, the one that gets hold of a lock file follows the hub ("is there anything newer?") and writes
every version to a `SharedWeights` of this machine. The kernel gives the lock back however that process ends, and another goes on.
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

from ludus.distributed.hub.rpc import Body, Connection, Header, Peer, error_fields
from ludus.errors import Damaged, LudusError, NotFound, StoreFull, UsageError, WorkerFailed
from ludus.io.atomic_file import create_once, open_for_replace
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeights, SharedWeightsReader

log = logging.getLogger(__name__)

PART = 1 << 22
"""Bytes of weights in one frame: other requests find their way between two of them."""
AHEAD = 4
"""Parts that are asked for before the first has come."""
POLL_S = 20.0
"""How long one question for a newer version waits at the hub."""
ANSWER_S = 60.0
ARRIVE_S = 120.0
"""How long a process waits for the first weights of a model."""
TAKE_OVER_S = 0.2
RETRY_S = 1.0
_LOOK_S = 0.01
_ENTER_S = 10.0
_UNFINISHED = 16
_KEY = re.compile(r"\d{4,}")
_STAGED = re.compile(r"aside-[0-9a-f]{32}")
_GRAPH = re.compile(r"graph-[0-9a-f]{32}")

Answer = Callable[..., None]


# -- the hub's side: weights that go out --------------------------------------------------------------------------------


class _Parcel:
    """One version as it travels."""

    def __init__(self, version: int, data: bytes) -> None:
        self.version, self.data = version, memoryview(data)
        self.sum = hashlib.sha256(data).hexdigest()

    @classmethod
    def of(cls, reader: SharedWeightsReader) -> _Parcel:
        version, weights = reader.read()
        return cls(version, serialization.encode_weights(weights))


@dataclass(eq=False)
class _Waiting:
    who: tuple[Peer, Any]
    reader: SharedWeightsReader
    version: int
    timer: asyncio.TimerHandle | None = None


class Source:
    """Hands versions to the machines that follow a model, in parts that they ask for. On the hub's event loop alone.

    A version stays in memory while somebody fetches it, also when it has been replaced meanwhile: else a follower that is slower
    than the publisher would never get a whole one. It is encoded once for all of them.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._waiting: dict[str, list[_Waiting]] = {}
        self._held: dict[tuple[Peer, str], _Parcel] = {}
        self._newest: weakref.WeakValueDictionary[str, _Parcel] = weakref.WeakValueDictionary()
        self._packing: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.sent = 0
        """Versions that were handed out, once for every machine that follows a model."""

    def want(self, who: tuple[Peer, Any], name: str, version: int, wait_s: float, board: Path) -> None:
        """Answer as soon as there is a version above `version`, or after `wait_s` without one."""
        waiting = _Waiting(who, SharedWeightsReader(board), version)
        if waiting.reader.version > version:
            self._start(name, waiting)
            return
        self._waiting.setdefault(name, []).append(waiting)
        waiting.timer = asyncio.get_running_loop().call_later(min(wait_s, POLL_S), self._nothing, name, waiting)

    def _nothing(self, name: str, waiting: _Waiting) -> None:
        self._waiting[name].remove(waiting)
        self._answer(waiting.who, {"version": waiting.version, "size": 0})

    def published(self, name: str) -> None:
        """The model may have a new version: those that have an older one are answered."""
        for waiting in [one for one in self._waiting.get(name, []) if one.reader.version > one.version]:
            self._waiting[name].remove(waiting)
            if waiting.timer is not None:
                waiting.timer.cancel()
            self._start(name, waiting)

    def _start(self, name: str, waiting: _Waiting) -> None:
        task = asyncio.get_running_loop().create_task(self._send(name, waiting))
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)

    async def _send(self, name: str, waiting: _Waiting) -> None:
        peer, number = waiting.who
        try:
            parcel = await self._packed(name, waiting.reader)
        except Exception as error:  # whoever asked is told, whatever it is
            peer.send({"id": number, **error_fields(error)})
            return
        if not peer.gone:
            self._held[peer, name] = parcel
            self.sent += 1
            self._answer(waiting.who, {"version": parcel.version, "size": len(parcel.data), "sum": parcel.sum})

    async def _packed(self, name: str, reader: SharedWeightsReader) -> _Parcel:
        async with self._packing.setdefault(name, asyncio.Lock()):
            known = self._newest.get(name)
            if known is None or known.version != reader.version:
                # Aside: a hundred megabytes take a tenth of a second, for which nobody else should wait.
                known = self._newest[name] = await asyncio.to_thread(_Parcel.of, reader)
            return known

    def part(self, peer: Peer, name: str, version: int, offset: int, size: int) -> memoryview:
        """Raises NotFound when this peer was not given that version."""
        parcel = self._held.get((peer, name))
        if parcel is None or parcel.version != version:
            raise NotFound(f"Version {version} of {name!r} is not being sent to you.", "Ask for a newer version first.")
        if offset + size == len(parcel.data):
            del self._held[peer, name]
        return parcel.data[offset : offset + min(size, PART)]

    def gone(self, peer: Peer) -> None:
        for key in [key for key in self._held if key[0] is peer]:
            del self._held[key]
        for waiting in self._waiting.values():
            for one in [one for one in waiting if one.who[0] is peer]:
                waiting.remove(one)
                if one.timer is not None:
                    one.timer.cancel()


class Landing:
    """The hub's side of weights that come in: parts become files in `staging`, as if they had been written there."""

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._sizes: dict[str, tuple[Peer, int]] = {}

    def part(self, peer: Peer, file: str, offset: int, body: Body) -> None:
        """Raises StoreFull; Damaged when a part does not follow the one before."""
        if not _STAGED.fullmatch(file):
            raise Damaged(f"{file!r} is not the name of a staged file.")
        _, size = self._sizes.get(file, (peer, 0))
        if offset != size or sum(owner is peer for owner, _ in self._sizes.values()) > _UNFINISHED:
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
                f"Cannot write weights to {self._staging}: {error.strerror}.", "Give shared memory more room, or set LUDUS_SHM."
            ) from error

    def keep_graph(self, file: str) -> Path:
        """A traced model that has arrived whole, where its readers look for it."""
        if file not in self._sizes:
            raise NotFound(f"Nothing called {file!r} has arrived.")
        self.taken(file)
        kept = self._staging.parent / f"graph-{uuid.uuid4().hex}"
        os.replace(self._staging / file, kept)
        return kept

    def graph_part(self, file: str, offset: int) -> tuple[int, bytes]:
        """(size of all, the bytes from `offset`)."""
        if not _GRAPH.fullmatch(file):
            raise Damaged(f"{file!r} is not the name of a traced model.")
        try:
            with open(self._staging.parent / file, "rb") as source:
                source.seek(offset)
                return os.fstat(source.fileno()).st_size, source.read(PART)
        except OSError as error:
            raise NotFound(f"The traced model {file} is gone: {error.strerror}.") from error

    def taken(self, file: str) -> None:
        self._sizes.pop(file, None)

    def drop(self, file: str) -> None:
        if self._sizes.pop(file, None) is not None:
            (self._staging / file).unlink(missing_ok=True)

    def gone(self, peer: Peer) -> None:
        for file in [file for file, (owner, _) in self._sizes.items() if owner is peer]:
            self.drop(file)


# -- the directory of a run on another machine ---------------------------------------------------------------------------


class Share:
    """The directory that all processes of this user and run have in common on this machine.

    Each of them holds a shared lock in it as long as it lives; the last to leave removes the directory, and whoever comes later
    sweeps those that nobody holds any more.
    """

    def __init__(self, base: Path, run: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise Damaged(f"{run!r} is not the id of a run.")
        for path in base.glob(f"ludus-away-{os.getuid()}-*"):
            if path.name.removeprefix(f"ludus-away-{os.getuid()}-") != run:
                _sweep(path)
        self.path = base / f"ludus-away-{os.getuid()}-{run}"
        self._users = self._entered()
        self.node = self._named()

    def _entered(self) -> IO[bytes]:
        deadline = time.monotonic() + _ENTER_S
        while True:
            try:
                self.path.mkdir(mode=0o700, exist_ok=True)
                status = self.path.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                    raise UsageError(f"{self.path} is not a private directory of ours.", "Remove it, or set LUDUS_SHM.")
                users = _opened(self.path / "users")
            except FileNotFoundError:  # it was swept under us
                continue
            except OSError as error:
                raise StoreFull(f"Cannot make {self.path}: {error.strerror}.", "Set LUDUS_SHM to another directory.") from error
            if _locked(users, alone=False) and _is(users, self.path / "users"):
                return users
            users.close()
            if time.monotonic() > deadline:
                raise WorkerFailed(f"{self.path} is held by a process that does not let it go.")
            time.sleep(_LOOK_S)

    def _named(self) -> str:
        """Which machine this is: a random name, the same for everybody here."""
        name = self.path / "node"
        with contextlib.suppress(FileExistsError):
            create_once(name, secrets.token_hex(8).encode())
        return name.read_text()

    def forget(self) -> None:
        """In a copy of this process made by fork()."""
        self._users.close()

    def close(self) -> None:
        if self._users.closed:
            return
        if _locked(self._users) and _is(self._users, self.path / "users"):
            shutil.rmtree(self.path, ignore_errors=True)
        self._users.close()


def _opened(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")


def _locked(file: IO[bytes], alone: bool = True) -> bool:
    """Whether this process has the lock now, alone or with others; the kernel gives it back when the process ends."""
    import fcntl  # not everywhere, and needed away from the hub only

    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _sweep(path: Path) -> None:
    try:
        with _opened(path / "users") as users:
            if _locked(users) and _is(users, path / "users"):
                shutil.rmtree(path, ignore_errors=True)
    except OSError:  # being made, being removed, or not ours
        pass


# -- the mirror ---------------------------------------------------------------------------------------------------------


class Line(Protocol):
    """This process's way to the hub."""

    def connect(self) -> Coroutine[Any, Any, Connection]: ...
    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]: ...
    def check(self) -> None: ...


class Mirrors:
    """The models of a run that this process reads away from the hub. Safe for threads."""

    def __init__(self, directory: Path, line: Line) -> None:
        self._directory, self._line = directory, line
        self._lock = threading.Lock()
        self._mirrors: dict[str, Mirror] = {}

    def reader(self, info: Mapping[str, Any], timeout_s: float = ARRIVE_S) -> SharedWeightsReader:
        """The weights of a model on this machine; returns when there are some. Raises WorkerFailed."""
        key = Path(str(info["board"])).name
        if not _KEY.fullmatch(key):
            raise Damaged(f"{key!r} does not name the weights of a model.")
        with self._lock:
            mirror = self._mirrors.get(key)
            if mirror is None:
                mirror = self._mirrors[key] = Mirror(self._directory, key, str(info["name"]), bool(info["frozen"]), self._line)
                mirror.start()
        return mirror.reader(time.monotonic() + timeout_s)

    def graph(self, path: str) -> str:
        """The traced model that lies at `path` where the hub is, here."""
        name = Path(path).name
        if not _GRAPH.fullmatch(name):
            raise Damaged(f"{name!r} is not the name of a traced model.")
        here = self._directory / name
        if not here.exists():
            self._line.submit(_fetched_graph(self._line, here)).result(ARRIVE_S)
        return str(here)

    def forget(self) -> None:
        """In a copy of this process made by fork(): what it copies, it copies itself."""
        for mirror in self._mirrors.values():
            mirror.forget()


class Mirror:
    """One model. Runs on the line's event loop until that ends."""

    def __init__(self, share: Path, key: str, name: str, frozen: bool, line: Line) -> None:
        self._directory, self._name, self._frozen, self._line = share / key, name, frozen, line
        self._lock = _opened(share / f"{key}.lock")
        self._error: Exception | None = None
        self.leads = False
        """This process is the one that copies."""

    def start(self) -> None:
        self._line.submit(self._run()).add_done_callback(lambda _: self.forget())

    def forget(self) -> None:
        self._lock.close()

    def reader(self, deadline: float) -> SharedWeightsReader:
        while True:
            with contextlib.suppress(NotFound):
                reader = SharedWeightsReader(self._directory)
                if reader.version > 0:
                    return reader
            self._line.check()
            if time.monotonic() > deadline or isinstance(self._error, (UsageError, NotFound)):
                why = f" {self._error}" if self._error else ""
                raise WorkerFailed(f"The weights of {self._name!r} did not arrive on this machine.{why}")
            time.sleep(_LOOK_S)

    async def _run(self) -> None:
        while True:
            if not (self.leads or _locked(self._lock)):
                await asyncio.sleep(TAKE_OVER_S)
                continue
            self.leads = True
            try:
                await self._copy()
                return
            except (LudusError, OSError) as error:  # the hub is gone for good, or there is no room for a moment
                self._error = error
                self._line.check()
                log.warning("the weights of %s could not be copied: %s; trying again", self._name, error)
                await asyncio.sleep(RETRY_S)

    async def _copy(self) -> None:
        """Version after version; returns after the first when there will be no other."""
        board = SharedWeights(self._directory)
        for left in self._directory.glob("aside-*"):  # of a mirror that was killed
            left.unlink(missing_ok=True)
        connection = await self._line.connect()
        try:
            while not (self._frozen and board.version):
                question = {"op": "model.newer", "name": self._name, "version": board.version, "wait_s": POLL_S}
                head = (await connection.request(question, timeout_s=POLL_S + ANSWER_S))[-1][0]
                if head["size"]:
                    await self._fetch(connection, board, int(head["version"]), int(head["size"]), str(head["sum"]))
                    self._error = None
        finally:
            await connection.close()

    async def _fetch(self, connection: Connection, board: SharedWeights, version: int, size: int, checksum: str) -> None:
        path = self._directory / f"aside-{uuid.uuid4().hex}"
        question = {"op": "model.part", "name": self._name, "version": version}
        try:
            await _fetched(connection, question, path, size, checksum)
            board.publish(version, path)
        finally:
            path.unlink(missing_ok=True)


async def _fetched(connection: Connection, question: Header, path: Path, size: int, checksum: str) -> None:
    """Write what the hub has to `path`. Raises StoreFull before a byte has travelled; Damaged when it is not what was sent."""
    seen = hashlib.sha256()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as out:
        _make_room(out, size, path)
        offsets = iter(range(0, size, PART))
        under_way: deque[asyncio.Future[Any]] = deque()
        try:
            for _ in range(0, size, PART):
                for offset in itertools.islice(offsets, AHEAD - len(under_way)):
                    under_way.append(connection.start({**question, "offset": offset, "size": min(PART, size - offset)}))
                async with asyncio.timeout(ANSWER_S):
                    body = (await under_way.popleft())[-1][1]
                seen.update(body)
                out.write(body)
        finally:
            for future in under_way:
                future.cancel()
    if seen.hexdigest() != checksum:
        raise Damaged(f"Version {question['version']} of {question['name']!r} arrived damaged.")


def _make_room(out: Any, size: int, path: Path) -> None:
    """Beforehand: a full file system is an error here, and never a fault of whoever maps the file."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(out.fileno(), 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return
        raise StoreFull(
            f"There is no room for {size} bytes of weights in {path.parent}: {error.strerror}.",
            "Give shared memory more room, or set LUDUS_SHM.",
        ) from error


async def _fetched_graph(line: Line, here: Path) -> None:
    connection = await line.connect()
    try:
        size = 1
        with open_for_replace(here, mode=0o600) as out:
            while out.tell() < size:
                question = {"op": "graph.part", "file": here.name, "offset": out.tell()}
                header, body = (await connection.request(question, timeout_s=ANSWER_S))[-1]
                size = int(header["size"])
                if not body:
                    raise Damaged(f"The traced model {here.name} ends at {out.tell()} of {size} bytes.")
                out.write(body)
    finally:
        await connection.close()


# -- the way in ---------------------------------------------------------------------------------------------------------


async def upload(request: Callable[..., Coroutine[Any, Any, Header]], data: bytes) -> str:
    """Stage bytes at the hub, from another machine; returns the name of the file. `request(header, body)` asks the hub."""
    name, view = f"aside-{uuid.uuid4().hex}", memoryview(data)
    under_way: set[asyncio.Task[Header]] = set()
    loop = asyncio.get_running_loop()
    try:
        for offset in range(0, max(1, len(view)), PART):
            question = {"op": "stage.part", "file": name, "offset": offset}
            under_way.add(loop.create_task(request(question, view[offset : offset + PART])))
            if len(under_way) >= AHEAD:
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        await asyncio.gather(*under_way)
    except BaseException:
        for task in under_way:
            task.cancel()
        raise
    return name
