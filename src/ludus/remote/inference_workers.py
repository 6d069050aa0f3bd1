"""Inference in processes of its own: callers gather their rows, a worker joins the batches of several callers.

One frame per batch and direction. A batch goes to the least busy worker; one whose worker dies is sent once more to another,
and then fails. A dead worker is replaced by the supervisor, at the same address: a unix socket for callers on its own machine,
and a TCP port for those on the others, if the run has any.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.tree import Array, Tree, decode, encode, map_tree
from ludus.distributed.gateway_workers import bind
from ludus.distributed.hub.rpc import Header, Peer, Reply, RpcConnection, error_fields, listen_tcp, listen_unix
from ludus.errors import Damaged, LudusError, UsageError, WorkerFailed
from ludus.io.addresses import tcp_address
from ludus.models.inference.engine import InferenceEngine, Inputs, WeightsSource, split_rows, stack_rows
from ludus.models.inference.micro_batcher import MicroBatcher
from ludus.models.weights.serialization import model_from
from ludus.models.weights.shared_weights import SharedWeightsReader
from ludus.process.auth import Authenticator, read_token
from ludus.process.workers.supervisor import ALWAYS, Context
from ludus.remote.context import Session, Ticket, adopt

if TYPE_CHECKING:
    from ludus.process.workers.supervisor import Process

log = logging.getLogger(__name__)

UNDER_WAY = 2
"""Batches that one caller sends to one worker before it waits: one runs, one is there when that is done."""
PATIENCE_S = 30.0
"""How long a request waits for a worker that can be reached."""
RETRY_S = 0.05
HANDSHAKE_S = 5.0
_BEAT_S = 1.0
_HANG_S = 60.0


# -- the worker ---------------------------------------------------------------------------------------------------------


class Crew:
    """The inference workers of one model, started here; one for each entry of `gpus`, which says which of them it has."""

    def __init__(self, session: Session, name: str, gpus: Sequence[str]) -> None:
        number, location = session.number("crew"), session.location
        self.paths = [str(Path(location.scratch) / f"i{number}-{index}-{os.getpid()}") for index in range(len(gpus))]
        # Bound here, once, so that a worker's replacement is found where the worker was.
        self._doors = [bind(location.host, 0) for _ in gpus] if location.host else []
        session.on_close(self._close)
        safe = name.replace("/", "-")
        self.processes: list[Process] = [
            session.supervisor.start(
                f"inference-{safe}-{index}",
                work,
                session.ticket(threads=1),
                name,
                path,
                gpus[index],
                restart=ALWAYS,
                fds=tuple(door.fileno() for door in self._doors[index : index + 1]),
                hang_s=_HANG_S,
            )
            for index, path in enumerate(self.paths)
        ]
        doors = [tcp_address(location.host, door.getsockname()[1]) for door in self._doors]
        session.client.call({"op": "model.workers", "name": name, "workers": self.paths, "doors": doors})

    def _close(self) -> None:
        for door in self._doors:
            door.close()


def gpus_of_workers(workers: int, each: float) -> list[str]:
    """For every worker the GPUs that it has, as in CUDA_VISIBLE_DEVICES; empty without any. Raises UsageError."""
    if (
        not isinstance(each, (int, float))
        or not 0 <= each < math.inf
        or (each > 1 and each != int(each))
        or (each and not workers)
    ):
        raise UsageError(
            f"gpus_per_worker={each} for {workers} workers makes no sense.",
            "Give whole GPUs, or a part of one, to num_workers=….",
        )
    if not each:
        return [""] * workers
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]
    if not torch.cuda.is_available():
        found = []
    return shared_out(workers, each, found)


def shared_out(workers: int, each: float, gpus: Sequence[str]) -> list[str]:
    """Whole GPUs one after the other, or as many workers on each as have room there."""
    on_one, whole = (int(1 / each + 1e-9), 1) if each < 1 else (1, int(each))
    needed = -(-workers // on_one) * whole
    if needed > len(gpus):
        raise UsageError(
            f"{workers} workers with gpus_per_worker={each:g} need {needed} GPUs, and PyTorch finds {len(gpus)} here.",
            "Use fewer workers, share GPUs (gpus_per_worker=0.5), or leave gpus_per_worker out to compute on the CPU.",
        )
    return [",".join(gpus[index // on_one * whole : (index // on_one + 1) * whole]) for index in range(workers)]


def work(context: Context, ticket: Ticket, name: str, path: str, gpus: str = "") -> None:
    """The life of an inference worker."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # before CUDA is first used in this process
    session = adopt(ticket)
    torch.set_num_threads(ticket.threads or 1)
    info = session.client.call({"op": "model.find", "name": name})
    module = model_from(info["description"], session.classes.get(name.split("/")[0]))
    reader, graph = session.reader(info), info["settings"].get("graph")
    engine = _onnx_engine(module, reader, session.graph(graph)) if graph else InferenceEngine(module, reader)
    if gpus and not graph:
        engine = EngineOn(torch.device("cuda"), module, reader)
    asyncio.run(
        _serve(context, engine, Path(path), int(info["settings"].get("max_batch_size") or 256), ticket.location.token_file)
    )


class EngineOn(InferenceEngine):
    """An engine whose module computes on another device; inputs go there with every batch."""

    def __init__(self, device: torch.device, module: nn.Module, versions: WeightsSource) -> None:
        super().__init__(module.to(device), versions)
        compute = self._function

        def there(*args: Any, **kwargs: Any) -> Any:
            return compute(*map_tree(move, args), **map_tree(move, kwargs))

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or device.type != "cuda":
                return tensor if tensor is None else tensor.to(device)
            return tensor.pin_memory().to(device, non_blocking=True)

        self._function = there


def _onnx_engine(module: nn.Module, reader: SharedWeightsReader, graph: str) -> InferenceEngine:
    from ludus.models.inference.onnx_hot_reload import OnnxEngine, read_graph  # onnxruntime is an extra

    return OnnxEngine(module, reader, read_graph(graph))


async def _serve(context: Context, engine: InferenceEngine, path: Path, max_rows: int, token_file: str) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    worker = _Worker(engine, max_rows)
    servers = [await listen_unix(path, worker.on_frame)]
    for door in context.fds:
        bound = socket.socket(fileno=os.dup(door))
        servers.append(await listen_tcp(bound, Authenticator(read_token(token_file)), worker.on_frame))
    context.on_stop(lambda: _set(loop, stopped))
    context.ready()
    while not stopped.is_set():
        context.beat()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _BEAT_S)
    for server in servers:
        server.close()


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


class _Worker:
    """Joins frames of one structure into forward passes of at most `max_rows` rows."""

    def __init__(self, engine: InferenceEngine, max_rows: int) -> None:
        self._engine, self._max = engine, max_rows
        self._batchers: dict[Hashable, MicroBatcher[list[Array], tuple[Any, int]]] = {}

    def on_frame(self, peer: Peer, header: Header, body: bytes) -> None:
        if header.get("op") == "hello":
            peer.send({"id": header.get("id")})
            return
        try:
            structure = from_wire(header["structure"])
            leaves, _ = decode(body)
            number = int(header["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"a request for inference is malformed: {error!r}") from error
        batcher = self._batchers.get(structure)
        if batcher is None:
            if len(self._batchers) > 64:
                self._batchers.clear()
            batcher = self._batchers[structure] = MicroBatcher(functools.partial(self._run, structure))
        batcher.submit(list(leaves)).add_done_callback(functools.partial(_reply, peer, number))

    def _run(self, structure: Hashable, frames: list[list[Array]]) -> list[tuple[Any, int]]:
        answers: list[tuple[Any, int]] = []
        start = 0
        while start < len(frames):
            end, rows = start, 0
            while end < len(frames) and (end == start or rows + len(frames[end][0]) <= self._max):
                rows += len(frames[end][0])
                end += 1
            answers += self._together(structure, frames[start:end])
            start = end
        return answers

    def _together(self, structure: Hashable, frames: list[list[Array]]) -> list[tuple[Any, int]]:
        # Copies also a lone frame: what a module may write into is its own, and never read-only.
        leaves = [np.concatenate(column) for column in zip(*frames, strict=True)]
        counts = [len(frame[0]) for frame in frames]
        outputs, version = self._engine.run(structure, leaves, sum(counts))
        arrays = _arrays(outputs, sum(counts))
        answers, at = [], 0
        for count in counts:
            answers.append((map_tree(lambda array, a=at, n=count: array[a : a + n], arrays), version))
            at += count
        return answers


def _arrays(outputs: Any, count: int) -> Tree:
    if isinstance(outputs, (Tensor, np.ndarray)):
        if outputs.ndim == 0 or outputs.shape[0] != count:
            split_rows(outputs, count)  # says what is wrong
        return outputs.detach().cpu().numpy() if isinstance(outputs, Tensor) else outputs
    if isinstance(outputs, Mapping):
        return {str(key): _arrays(item, count) for key, item in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return tuple(_arrays(item, count) for item in outputs)
    return split_rows(outputs, count)


def _reply(peer: Peer, number: int, done: asyncio.Future[tuple[Any, int]]) -> None:
    try:
        outputs, version = done.result()
        peer.send({"id": number, "version": version}, encode(outputs))
    except Exception as error:  # the model's own, or an output that cannot travel: the callers get it
        peer.send({"id": number, **error_fields(error)})


# -- structures on the wire ---------------------------------------------------------------------------------------------


def to_wire(structure: Any) -> Any:
    if structure[0] == "dict":
        return ["d", [[key, to_wire(item)] for key, item in structure[1]]]
    if structure[0] == "tuple":
        return ["t", [to_wire(item) for item in structure[1]]]
    if structure[0] == "none":
        return ["n"]
    return ["a", structure[0].str, list(structure[1])]


def from_wire(data: Any) -> Hashable:
    kind = data[0]
    if kind == "d":
        return "dict", tuple((str(key), from_wire(item)) for key, item in data[1])
    if kind == "t":
        return "tuple", tuple(from_wire(item) for item in data[1])
    if kind == "n":
        return ("none",)
    return np.dtype(data[1]), tuple(int(n) for n in data[2])


# -- the caller ---------------------------------------------------------------------------------------------------------


class RemoteInference:
    """`forward` and `call` of a model whose workers listen_unix at `paths`. Each event loop has connections of its own."""

    def __init__(self, session: Session, paths: Sequence[str], inputs: Mapping[str, Any] | None, max_batch_size: int) -> None:
        self._session, self._paths, self._max = session, list(paths), max_batch_size
        self._inputs = Inputs(inputs)
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}

    def forward(self, *args: Tree, **kwargs: Tree) -> Awaitable[Any]:
        return self._forward(args, kwargs, False)

    def forward_versioned(self, *args: Tree, **kwargs: Tree) -> Awaitable[tuple[Any, int]]:
        return self._forward(args, kwargs, True)

    def call(self, *args: Tree, **kwargs: Tree) -> Any:
        """Raises WorkerFailed when no worker answers."""
        return self._session.client.wait(self._later(args, kwargs, False), 3 * PATIENCE_S)

    def _forward(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree], versioned: bool) -> Awaitable[Any]:
        loop = asyncio._get_running_loop()
        if loop is None:
            return self._later(args, kwargs, versioned)
        try:
            structure, leaves = self._inputs.flatten(args, kwargs)
        except UsageError as error:  # for this caller alone
            future: asyncio.Future[Any] = loop.create_future()
            future.set_exception(error)
            return future
        lane = self._lanes.get(loop)
        if lane is None:
            for other in [other for other in self._lanes if other.is_closed()]:
                self._lanes.pop(other, None)
            lane = self._lanes[loop] = _Lane(loop, self._paths, self._max, self._session)
        return lane.submit(structure, leaves, versioned)

    async def _later(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree], versioned: bool) -> Any:
        return await self._forward(args, kwargs, versioned)


class _Job:
    """A batch on its way: rows of one structure, and who waits for them."""

    __slots__ = ("rows", "since", "structure", "tries", "waiting")

    def __init__(self, structure: Hashable, now: float) -> None:
        self.structure, self.since, self.tries = structure, now, 0
        self.rows: list[list[Array]] = []
        self.waiting: list[tuple[asyncio.Future[Any], bool]] = []

    def fail(self, error: Exception) -> None:
        for future, _ in self.waiting:
            if not future.done():
                future.set_exception(error)

    def answer(self, outputs: Tree, version: int) -> None:
        for (future, versioned), result in zip(self.waiting, split_rows(outputs, len(self.rows)), strict=True):
            if not future.done():
                future.set_result((result, version) if versioned else result)


class _Link:
    """One worker, seen from one event loop."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.connection: RpcConnection | None = None
        self.opening: asyncio.Task[None] | None = None
        self.jobs = self.rows = 0

    @property
    def open(self) -> bool:
        return self.connection is not None and self.connection.lost is None


async def _greeted(path: str, token_file: str) -> RpcConnection:
    """A connection that was answered: the socket of a process that is just dying may still take connections."""
    connection = await RpcConnection.open(path, "An inference worker", token_file=token_file)
    try:
        await connection.request({"op": "hello"}, timeout_s=HANDSHAKE_S)
    except BaseException:
        await connection.close()
        raise
    return connection


class _Lane:
    """The batches of one event loop. Everything here happens on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, paths: Sequence[str], max_rows: int, session: Session) -> None:
        self._loop, self._max, self._session = loop, max_rows, session
        self._links = [_Link(path) for path in paths]
        self._queue: deque[_Job] = deque()
        self._filling: dict[Hashable, _Job] = {}
        self._scheduled = False

    def submit(self, structure: Hashable, leaves: list[Array], versioned: bool) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        job = self._filling.get(structure)
        if job is None or len(job.rows) >= self._max:
            job = self._filling[structure] = _Job(structure, time.monotonic())
            self._queue.append(job)
            self._schedule()
        job.rows.append(leaves)
        job.waiting.append((future, versioned))
        return future

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what can be sent; the rest goes on filling up until a worker has room."""
        self._scheduled = False
        while self._queue:
            for link in self._links:
                if not link.open:
                    self._reopen(link)
            ready = [link for link in self._links if link.open and link.jobs < UNDER_WAY]
            if not ready:
                return
            job = self._queue.popleft()
            if self._filling.get(job.structure) is job:
                del self._filling[job.structure]
            self._send(min(ready, key=lambda link: link.rows), job)

    def _send(self, link: _Link, job: _Job) -> None:
        assert link.connection is not None
        try:
            leaves = tuple(stack_rows(column) for column in zip(*job.rows, strict=True))
            reply = link.connection.start({"structure": to_wire(job.structure)}, encode(leaves))
        except WorkerFailed:
            self._again(job)
            return
        except Exception as error:  # inputs that cannot travel: for those who gave them
            job.fail(error)
            return
        job.tries += 1
        link.jobs += 1
        link.rows += len(job.rows)
        reply.add_done_callback(functools.partial(self._done, link, job))

    def _done(self, link: _Link, job: _Job, reply: asyncio.Future[Reply]) -> None:
        link.jobs -= 1
        link.rows -= len(job.rows)
        self._schedule()
        try:
            header, body = reply.result()[-1]
            outputs, _ = decode(body)
            job.answer(outputs, int(header["version"]))
        except asyncio.CancelledError:
            job.fail(WorkerFailed("The request for inference was cancelled."))
        except Exception as error:
            if not link.open and isinstance(error, WorkerFailed):
                self._again(job)
            else:
                job.fail(error)

    def _again(self, job: _Job) -> None:
        """Its worker died: once more elsewhere."""
        if job.tries < 2:
            job.since = time.monotonic()
            self._queue.appendleft(job)
            self._schedule()
        else:
            job.fail(WorkerFailed("Two inference workers died while they had this request.", "Their logs say why."))

    def _reopen(self, link: _Link) -> None:
        if link.opening is None:
            link.opening = self._loop.create_task(self._opened(link))

    async def _opened(self, link: _Link) -> None:
        try:
            while self._queue and not link.open:
                try:
                    link.connection = await _greeted(link.path, self._session.location.token_file)
                except (LudusError, TimeoutError):
                    self._give_up()
                    await asyncio.sleep(RETRY_S)
        finally:
            link.opening = None
        self._schedule()

    def _give_up(self) -> None:
        """Nothing waits for ever: fail what has waited too long while no worker could be reached."""
        if any(link.open for link in self._links):
            return
        lost = self._session.lost  # without the hub nobody replaces them
        while self._queue and (lost or time.monotonic() - self._queue[0].since > PATIENCE_S):
            job = self._queue.popleft()
            if self._filling.get(job.structure) is job:
                del self._filling[job.structure]
            job.fail(
                lost or WorkerFailed(f"No inference worker could be reached within {PATIENCE_S:g} s.", "Their logs say why.")
            )
