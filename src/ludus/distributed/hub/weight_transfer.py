"""Transfer of weights and traced models between the hub and other machines, in parts that do not delay other requests.

In the hub: `WeightSender`, `WeightReceiver`. On the other machines: `download`, `download_graph`, `upload`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ludus.distributed.frames import REPLY_TIMEOUT_S, Body, Header
from ludus.distributed.hub.rpc import Peer, RpcConnection, SendReply, error_fields
from ludus.errors import Damaged, LudusError, NotFound, StoreFull
from ludus.io.atomic_file import open_for_replace
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeightsReader
from ludus.transport.ring_buffer import create_file

PART = 1 << 22
"""Bytes of weights per frame: small enough that other requests are not delayed."""
AHEAD = 4
"""Number of parts that are requested ahead."""
POLL_S = 20.0
"""How long a request for a newer version waits at the hub."""
_MAX_UPLOADS = 16
_STAGED = re.compile(r"aside-[0-9a-f]{32}")
_GRAPH = re.compile(r"graph-[0-9a-f]{32}")


# -- in the hub ---------------------------------------------------------------------------------------------------------


class _EncodedVersion:
    def __init__(self, reader: SharedWeightsReader) -> None:
        self.version, weights = reader.read()
        data = serialization.encode_weights(weights)
        self.data, self.sum = memoryview(data), hashlib.sha256(data).hexdigest()


class WeightSender:
    """Sends versions to machines that follow a model, in parts that they request. Runs on the hub's event loop.

    A version stays in memory while a machine fetches it, even after it was replaced: otherwise a machine that is slower than the
    publisher would never get a complete one. It is encoded once for all machines.
    """

    def __init__(self, reply: SendReply) -> None:
        self._reply = reply
        self._published: dict[str, asyncio.Event] = {}
        """Model → set with its next version."""
        self._being_sent: dict[tuple[Peer, str], _EncodedVersion] = {}
        self._newest: weakref.WeakValueDictionary[str, _EncodedVersion] = weakref.WeakValueDictionary()
        self._encoding: dict[str, asyncio.Lock] = {}
        self._tasks: dict[asyncio.Task[None], Peer] = {}
        self.sent = 0
        """Number of versions sent, counted once per machine."""

    def wait_for_newer(self, request_id: tuple[Peer, Any], name: str, version: int, wait_s: float, board: Path) -> None:
        """Reply when there is a version above `version`, or after `wait_s` without one."""
        work = self._send_newer(request_id, name, version, min(wait_s, POLL_S), SharedWeightsReader(board))
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = request_id[0]
        task.add_done_callback(self._tasks.pop)

    def on_publish(self, name: str) -> None:
        """Wake the requests that wait for this model."""
        if name in self._published:
            self._published.pop(name).set()

    async def _send_newer(
        self, request_id: tuple[Peer, Any], name: str, version: int, wait_s: float, reader: SharedWeightsReader
    ) -> None:
        peer, number = request_id
        try:
            async with asyncio.timeout(wait_s):
                while reader.version <= version:
                    await self._published.setdefault(name, asyncio.Event()).wait()
        except TimeoutError:
            self._reply(request_id, {"version": version, "size": 0})
            return
        try:
            encoded = await self._encode(name, reader)
        except (LudusError, OSError, ValueError, MemoryError) as error:
            peer.send({"id": number, **error_fields(error)})
            return
        self._being_sent[peer, name] = encoded
        self.sent += 1
        self._reply(request_id, {"version": encoded.version, "size": len(encoded.data), "sum": encoded.sum})

    async def _encode(self, name: str, reader: SharedWeightsReader) -> _EncodedVersion:
        async with self._encoding.setdefault(name, asyncio.Lock()):
            known = self._newest.get(name)
            if known is None or known.version != reader.version:
                # In a thread: 100 MB take 0.1 s, which would block all other requests.
                known = self._newest[name] = await asyncio.to_thread(_EncodedVersion, reader)
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
        for task in [task for task, owner in self._tasks.items() if owner is peer]:
            task.cancel()
        for key in [key for key in self._being_sent if key[0] is peer]:
            del self._being_sent[key]


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


# -- on other machines --------------------------------------------------------------------------------------------------


async def download(connection: RpcConnection, request: Header, path: Path, size: int, checksum: str) -> None:
    """Download a version to `path`. Raises StoreFull before anything is sent, Damaged when the checksum differs."""
    create_file(path, size)  # allocated: with a full file system, processes that map it would crash instead
    checksum_so_far = hashlib.sha256()
    offsets = iter(range(0, size, PART))
    in_flight: deque[asyncio.Future[Any]] = deque()
    with open(path, "r+b", buffering=0) as out:
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


async def download_graph(connection: RpcConnection, here: Path) -> None:
    """Download the traced model of this name. Raises Damaged."""
    if not _GRAPH.fullmatch(here.name):
        raise Damaged(f"{here.name!r} is not the name of a traced model.")
    size = 1
    with open_for_replace(here, mode=0o600) as out:
        while out.tell() < size:
            request = {"op": "graph.part", "file": here.name, "offset": out.tell()}
            header, body = (await connection.request(request, timeout_s=REPLY_TIMEOUT_S))[-1]
            size = int(header["size"])
            if not body:
                raise Damaged(f"The traced model {here.name} ends at {out.tell()} of {size} bytes.")
            out.write(body)


async def upload(request: Callable[..., Coroutine[Any, Any, Header]], data: bytes) -> str:
    """Stage bytes at the hub; returns the name of the file. `request(header, body)` calls the hub."""
    name, view = f"aside-{uuid.uuid4().hex}", memoryview(data)
    in_flight: deque[asyncio.Task[Header]] = deque()
    try:
        for offset in range(0, max(1, len(view)), PART):
            if len(in_flight) == AHEAD:
                await in_flight.popleft()
            header = {"op": "stage.part", "file": name, "offset": offset}
            in_flight.append(asyncio.create_task(request(header, view[offset : offset + PART])))
        await asyncio.gather(*in_flight)
    finally:
        for task in in_flight:
            task.cancel()
    return name
