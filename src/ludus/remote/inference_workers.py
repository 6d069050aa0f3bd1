"""Inference in separate processes: callers collect rows into batches, and a worker joins the batches of several callers.

One frame per batch and direction. A batch goes to the least busy worker; if that dies, it is sent once more to another one,
and then fails. The supervisor replaces a dead worker at the same address: a unix socket for callers on its machine,
and a TCP port for those on other machines of the run.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.tree import Array, Tree, decode, encode, map_tree
from ludus.distributed.frames import Header
from ludus.distributed.gateway_workers import bind
from ludus.distributed.hub.rpc import Peer, Reply, RpcConnection, error_fields, listen_tcp, listen_unix
from ludus.errors import Damaged, LudusError, UsageError, WorkerFailed
from ludus.io.addresses import tcp_address
from ludus.models.inference.engine import InferenceEngine, Inputs, WeightsSource, split_rows, stack_rows
from ludus.models.inference.micro_batcher import MicroBatcher
from ludus.models.weights.serialization import model_from
from ludus.process.auth import Authenticator, read_token
from ludus.process.workers.supervisor import ALWAYS, Context
from ludus.remote.context import JoinTicket, RunContext, adopt

if TYPE_CHECKING:
    from ludus.process.workers.supervisor import Process

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
"""Batches of one caller in flight per worker: one is computed while the next one waits there."""
UNREACHABLE_S = 30.0
"""How long a request waits for a reachable worker."""
RETRY_S = 0.05
HANDSHAKE_S = 5.0
_BEAT_S = 1.0
_HANG_S = 60.0


# -- the worker ---------------------------------------------------------------------------------------------------------


class InferenceWorkers:
    """The inference workers of one model, started here; `gpus` has the CUDA_VISIBLE_DEVICES of each."""

    def __init__(self, run: RunContext, name: str, gpus: Sequence[str]) -> None:
        number, location = run.number("crew"), run.location
        self.paths = [str(Path(location.scratch) / f"i{number}-{index}-{os.getpid()}") for index in range(len(gpus))]
        # Bound here, so that the replacement of a worker has the same address.
        self._tcp_sockets = [bind(location.host, 0) for _ in gpus] if location.host else []
        for bound in self._tcp_sockets:
            run.on_close(bound.close)
        safe = name.replace("/", "-")
        self.processes: list[Process] = [
            run.supervisor.start(
                f"inference-{safe}-{index}",
                run_worker,
                run.ticket(threads=1),
                name,
                path,
                gpus[index],
                restart=ALWAYS,
                fds=tuple(bound.fileno() for bound in self._tcp_sockets[index : index + 1]),
                hang_s=_HANG_S,
            )
            for index, path in enumerate(self.paths)
        ]
        addresses = [tcp_address(location.host, bound.getsockname()[1]) for bound in self._tcp_sockets]
        run.client.call({"op": "model.workers", "name": name, "workers": self.paths, "addresses": addresses})


def gpus_of_workers(workers: int, each: float) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each worker; empty without GPUs. Raises UsageError."""
    valid = isinstance(each, (int, float)) and 0 <= each < math.inf and (each <= 1 or each == int(each))
    if not valid or (each and not workers):
        hint = "Use whole GPUs, or a fraction of one, together with num_workers=…."
        raise UsageError(f"gpus_per_worker={each} for {workers} workers is invalid.", hint)
    if not each:
        return [""] * workers
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]
    if not torch.cuda.is_available():
        found = []
    return assign_gpus(workers, each, found)


def assign_gpus(workers: int, each: float, gpus: Sequence[str]) -> list[str]:
    """Assign whole GPUs in order, or several workers to each one."""
    on_one, whole = (int(1 / each + 1e-9), 1) if each < 1 else (1, int(each))
    needed = -(-workers // on_one) * whole
    if needed > len(gpus):
        raise UsageError(
            f"{workers} workers with gpus_per_worker={each:g} need {needed} GPUs, and PyTorch finds {len(gpus)} here.",
            "Use fewer workers, share GPUs (gpus_per_worker=0.5), or leave gpus_per_worker out to compute on the CPU.",
        )
    return [",".join(gpus[index // on_one * whole : (index // on_one + 1) * whole]) for index in range(workers)]


def run_worker(context: Context, ticket: JoinTicket, name: str, path: str, gpus: str = "") -> None:
    """Program of an inference worker."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # before the first use of CUDA in this process
    run = adopt(ticket)
    torch.set_num_threads(ticket.threads or 1)
    info = run.client.call({"op": "model.find", "name": name})
    module = model_from(info["description"], run.classes.get(name.split("/")[0]))
    reader, graph = run.reader(info), info["settings"].get("graph")
    engine: InferenceEngine
    if graph:
        from ludus.models.inference.onnx_hot_reload import OnnxEngine, read_graph  # onnxruntime is an extra

        engine = OnnxEngine(module, reader, read_graph(run.graph(graph)))
    else:
        engine = DeviceEngine(torch.device("cuda"), module, reader) if gpus else InferenceEngine(module, reader)
    max_rows = int(info["settings"].get("max_batch_size") or 256)
    asyncio.run(_serve(context, engine, Path(path), max_rows, ticket.location.token_file))


class DeviceEngine(InferenceEngine):
    """An engine whose module computes on another device; inputs are copied there with every batch."""

    def __init__(self, device: torch.device, module: nn.Module, versions: WeightsSource) -> None:
        super().__init__(module.to(device), versions)
        compute = self._function

        def compute_on_device(*args: Any, **kwargs: Any) -> Any:
            return compute(*map_tree(move, args), **map_tree(move, kwargs))

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or device.type != "cuda":
                return tensor if tensor is None else tensor.to(device)
            return tensor.pin_memory().to(device, non_blocking=True)

        self._function = compute_on_device


async def _serve(context: Context, engine: InferenceEngine, path: Path, max_rows: int, token_file: str) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    worker = _BatchServer(engine, max_rows)
    servers = [await listen_unix(path, worker.on_frame)]
    for fd in context.fds:
        bound = socket.socket(fileno=os.dup(fd))
        servers.append(await listen_tcp(bound, Authenticator(read_token(token_file)), worker.on_frame))
    context.on_stop(lambda: loop.call_soon_threadsafe(stopped.set))
    context.ready()
    while not stopped.is_set():
        context.beat()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), _BEAT_S)
    for server in servers:
        server.close()


class _BatchServer:
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
            answers += self._run_batch(structure, frames[start:end])
            start = end
        return answers

    def _run_batch(self, structure: Hashable, frames: list[list[Array]]) -> list[tuple[Any, int]]:
        # Also copies a single frame: modules may write to their inputs, and received arrays are read-only.
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
            split_rows(outputs, count)  # raises the error
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
    except Exception as error:  # user code: any error of the model, or of encoding its output, is sent to the callers
        peer.send({"id": number, **error_fields(error)})


# -- structures as JSON -------------------------------------------------------------------------------------------------


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
    """`forward` and `call` of a model whose workers listen at `paths`. Each event loop has its own connections."""

    def __init__(self, run: RunContext, paths: Sequence[str], inputs: Mapping[str, Any] | None, max_batch_size: int) -> None:
        self._run, self._paths, self._max = run, list(paths), max_batch_size
        self._inputs = Inputs(inputs)
        self._batchers: dict[asyncio.AbstractEventLoop, _LoopBatcher] = {}

    def forward(self, *args: Tree, **kwargs: Tree) -> Awaitable[Any]:
        return self._forward(args, kwargs, False)

    def forward_versioned(self, *args: Tree, **kwargs: Tree) -> Awaitable[tuple[Any, int]]:
        return self._forward(args, kwargs, True)

    def call(self, *args: Tree, **kwargs: Tree) -> Any:
        """Raises WorkerFailed when no worker replies."""
        return self._run.client.wait(self._forward_later(args, kwargs, False), 3 * UNREACHABLE_S)

    def _forward(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree], versioned: bool) -> Awaitable[Any]:
        loop = asyncio._get_running_loop()
        if loop is None:
            return self._forward_later(args, kwargs, versioned)
        try:
            structure, leaves = self._inputs.flatten(args, kwargs)
        except UsageError as error:  # concerns this caller only
            future: asyncio.Future[Any] = loop.create_future()
            future.set_exception(error)
            return future
        batcher = self._batchers.get(loop)
        if batcher is None:
            for other in [other for other in self._batchers if other.is_closed()]:
                self._batchers.pop(other, None)
            batcher = self._batchers[loop] = _LoopBatcher(loop, self._paths, self._max, self._run)
        return batcher.submit(structure, leaves, versioned)

    async def _forward_later(self, args: tuple[Tree, ...], kwargs: Mapping[str, Tree], versioned: bool) -> Any:
        return await self._forward(args, kwargs, versioned)


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch: rows of one structure, and the futures of their callers."""

    structure: Hashable
    queued_at: float
    attempts: int = 0
    rows: list[list[Array]] = field(default_factory=list)
    waiting: list[tuple[asyncio.Future[Any], bool]] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        for future, _ in self.waiting:
            if not future.done():
                future.set_exception(error)

    def answer(self, outputs: Tree, version: int) -> None:
        for (future, versioned), result in zip(self.waiting, split_rows(outputs, len(self.rows)), strict=True):
            if not future.done():
                future.set_result((result, version) if versioned else result)


@dataclass(eq=False)
class _WorkerConnection:
    """Connection of one event loop to one worker."""

    path: str
    connection: RpcConnection | None = None
    opening: asyncio.Task[None] | None = None
    batches: int = 0
    rows: int = 0

    @property
    def open(self) -> bool:
        return self.connection is not None and self.connection.lost is None


async def _open_connection(path: str, token_file: str) -> RpcConnection:
    """Open a connection and wait for a reply: the socket of a dying process may still accept connections."""
    connection = await RpcConnection.open(path, "An inference worker", token_file=token_file)
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(connection.close)
        await connection.request({"op": "hello"}, timeout_s=HANDSHAKE_S)
        undo.pop_all()
    return connection


class _LoopBatcher:
    """The batches of one event loop. All methods run on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, paths: Sequence[str], max_rows: int, run: RunContext) -> None:
        self._loop, self._max, self._run = loop, max_rows, run
        self._workers = [_WorkerConnection(path) for path in paths]
        self._queue: deque[_Batch] = deque()
        self._filling: dict[Hashable, _Batch] = {}
        self._scheduled = False

    def submit(self, structure: Hashable, leaves: list[Array], versioned: bool) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        batch = self._filling.get(structure)
        if batch is None or len(batch.rows) >= self._max:
            batch = self._filling[structure] = _Batch(structure, time.monotonic())
            self._queue.append(batch)
            self._schedule()
        batch.rows.append(leaves)
        batch.waiting.append((future, versioned))
        return future

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what can be sent; the other batches grow until a worker has room."""
        self._scheduled = False
        while self._queue:
            for worker in self._workers:
                if not worker.open and worker.opening is None:
                    worker.opening = self._loop.create_task(self._open_worker(worker))
            ready = [worker for worker in self._workers if worker.open and worker.batches < MAX_IN_FLIGHT]
            if not ready:
                return
            self._send(min(ready, key=lambda worker: worker.rows), self._pop_batch())

    def _pop_batch(self) -> _Batch:
        batch = self._queue.popleft()
        if self._filling.get(batch.structure) is batch:
            del self._filling[batch.structure]
        return batch

    def _send(self, worker: _WorkerConnection, batch: _Batch) -> None:
        assert worker.connection is not None
        try:
            leaves = tuple(stack_rows(column) for column in zip(*batch.rows, strict=True))
            reply = worker.connection.start({"structure": to_wire(batch.structure)}, encode(leaves))
        except WorkerFailed:
            self._retry(batch)
            return
        except (LudusError, TypeError, ValueError, AttributeError, MemoryError) as error:  # of the inputs: raised by the callers
            batch.fail(error)
            return
        batch.attempts += 1
        worker.batches += 1
        worker.rows += len(batch.rows)
        reply.add_done_callback(functools.partial(self._on_reply, worker, batch))

    def _on_reply(self, worker: _WorkerConnection, batch: _Batch, reply: asyncio.Future[Reply]) -> None:
        worker.batches -= 1
        worker.rows -= len(batch.rows)
        self._schedule()
        if reply.cancelled():
            batch.fail(WorkerFailed("The request for inference was cancelled."))
        elif error := reply.exception():
            if not worker.open and isinstance(error, WorkerFailed):
                self._retry(batch)
            else:
                batch.fail(error)
        else:
            try:
                header, body = reply.result()[-1]
                batch.answer(decode(body)[0], int(header["version"]))
            except (LudusError, ValueError, KeyError, TypeError) as malformed:
                batch.fail(malformed)

    def _retry(self, batch: _Batch) -> None:
        """Send the batch of a dead worker once more."""
        if batch.attempts < 2:
            batch.queued_at = time.monotonic()
            self._queue.appendleft(batch)
            self._schedule()
        else:
            batch.fail(WorkerFailed("Two inference workers died during this request.", "See their logs."))

    async def _open_worker(self, worker: _WorkerConnection) -> None:
        try:
            while self._queue and not worker.open:
                try:
                    worker.connection = await _open_connection(worker.path, self._run.location.token_file)
                except (LudusError, TimeoutError):
                    self._give_up()
                    await asyncio.sleep(RETRY_S)
        finally:
            worker.opening = None
        self._schedule()

    def _give_up(self) -> None:
        """Fail batches that have waited too long while no worker could be reached."""
        if any(worker.open for worker in self._workers):
            return
        lost = self._run.lost  # without the hub no worker is replaced
        while self._queue and (lost or time.monotonic() - self._queue[0].queued_at > UNREACHABLE_S):
            message = f"No inference worker could be reached within {UNREACHABLE_S:g} s."
            self._pop_batch().fail(lost or WorkerFailed(message, "See their logs."))
