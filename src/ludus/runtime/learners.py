"""Several learners for one model: each computes the gradient of its part of every minibatch, all apply the same sum.

    rank 0 (the trainer's process) ──link: state, batches as they come──▶ rank 1 … N-1 (supervised processes, or other nodes)
           └────────────── group: the gradient of every minibatch, summed ──────────────┘

Ranks are given the whole batch (on one node: a file in shared memory that rank 0 fills once) and prepare it all alike, random
numbers included; so the same batches give the same weights on one learner and on several, but for rounding. A rank that is
lost ends the learning with WorkerFailed: whoever started rank 0 starts again from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from ludus import tree
from ludus.config import AlgorithmConfig
from ludus.errors import Damaged, StoreFull, TrainingDiverged, WorkerFailed
from ludus.memory.shared import Layout
from ludus.model import saved
from ludus.model.policy import Policy
from ludus.runtime.hub import shared_memory
from ludus.runtime.machine import keep_freed_memory
from ludus.runtime.processes import NEVER, OVER, Context, Process, Supervisor
from ludus.runtime.scratch import Scratch
from ludus.spaces import ArraySpec
from ludus.training.algorithm import Algorithm, algorithm_class
from ludus.training.group import ALONE, COLLECTIVE_S, Group, SharedGroup, TorchGroup
from ludus.training.optimizer import Optimizer
from ludus.tree import Array, Tree
from ludus.types import Segments, SegmentSpec

log = logging.getLogger(__name__)

Transport = Literal["shared", "torch"]
"""How gradients are summed: over shared memory (one node, CPUs), or by torch.distributed (gloo, nccl)."""

START_S = 120.0
"""How long a learner may take to import, build its model and join."""

_GRACE_S = 1.0
_LOOK_S = 1.0
_VERDICT_S = 2.0
_MAX_BODY = 1 << 36
_TCP = "tcp://"
_CHECK_EVERY = 50
_DRIFT = 1e-3


# -- the link -----------------------------------------------------------------------------------------------------------

_FRAME = struct.Struct("<Bqqq")
"""Kind, two numbers, bytes that follow."""
_FINGERPRINT = struct.Struct("<dd")

HELLO, WELCOME, READY, JOIN, STATE, SPEC, LEARN, DONE = range(1, 9)

Body = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Frame:
    kind: int
    first: int
    second: int
    body: bytearray


class Link:
    """One end of the conversation between rank 0 and another rank, over any connected stream socket. Nothing in it is code."""

    def __init__(self, connection: socket.socket, other: str, far: bool = False) -> None:
        self._connection, self.other, self.far = connection, other, far
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def send(self, kind: int, first: int = 0, second: int = 0, body: Body = b"", timeout_s: float = COLLECTIVE_S) -> None:
        """Raises WorkerFailed when the other end is gone, or does not read."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(_FRAME.pack(kind, first, second, len(body)))
            if body:
                self._connection.sendall(body)
        except OSError as error:
            raise WorkerFailed(f"{self.other} does not listen any more: {error or 'no answer'}.", "See its log.") from error

    def waiting(self, timeout_s: float = 0.0) -> bool:
        """Whether there is something to receive, if only the end."""
        return bool(self._poll.poll(timeout_s * 1000))

    def receive(self, kind: int | None = None, timeout_s: float = COLLECTIVE_S) -> Frame:
        """The next frame, which must be of this kind if one is given. Raises WorkerFailed."""
        self._connection.settimeout(timeout_s)
        try:
            found, first, second, size = _FRAME.unpack(self._exactly(_FRAME.size))
            if size < 0 or size > _MAX_BODY or kind not in (None, found):
                raise Damaged(f"{self.other} sent a frame of kind {found} and {size} bytes, where {kind} was expected.")
            return Frame(found, first, second, self._exactly(size))
        except OSError as error:
            raise WorkerFailed(f"{self.other} did not answer: {error}.", "See its log.") from error
        except EOFError as error:
            raise WorkerFailed(f"{self.other} is gone.", "It was stopped or it died; see its log.") from error

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data

    def close(self) -> None:
        self._connection.close()


# -- what travels -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How a rank builds the algorithm that rank 0 has: plain data."""

    algorithm: str
    policy: Mapping[str, Any]
    config: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, algorithm: Algorithm, config: AlgorithmConfig) -> Recipe:
        kind = type(algorithm)
        named = f"{kind.__module__}:{kind.__qualname__}"
        return cls(named, algorithm.policy.description(), config.model_dump(mode="json", by_alias=True), config.seed)

    def build(self, device: torch.device) -> Algorithm:
        kind = algorithm_class(self.algorithm)
        config = kind.Config.model_validate(self.config)
        torch.set_num_threads(max(1, config.torch_threads))
        return kind(saved.policy_from(self.policy).to(device), config, self.seed)


def pack_state(algorithm: Algorithm) -> bytes:
    """Weights and everything else that a rank must have in common with rank 0."""
    arrays, plain = algorithm.state()
    whole = {"weights": algorithm.policy.weights(), "arrays": arrays}
    return tree.encode(whole, {"plain": json.dumps(plain), "updates": algorithm.optimizer.updates})


def load_packed(algorithm: Algorithm, data: bytes | bytearray) -> None:
    whole, meta = tree.decode(memoryview(data))
    algorithm.policy.load_weights(whole["weights"])
    algorithm.load_state({name: array.copy() for name, array in whole["arrays"].items()}, json.loads(meta["plain"]))


def spec_json(spec: SegmentSpec) -> bytes:
    plain = asdict(spec) | {name: tree.map_tree(_spec_leaf, getattr(spec, name)) for name in ("observation", "action", "state")}
    return json.dumps({**plain, **{name: _tagged(plain[name]) for name in ("observation", "action", "state")}}).encode()


def spec_from_json(data: bytes | bytearray) -> SegmentSpec:
    plain = json.loads(data)
    return SegmentSpec(**{**plain, **{name: _untagged(plain[name]) for name in ("observation", "action", "state")}})


def _spec_leaf(spec: ArraySpec) -> list[Any]:
    return [list(spec.shape), spec.dtype.str]


def _tagged(value: Tree) -> Any:
    """JSON has no tuples: {"d": dict}, {"t": list}, {"a": leaf}."""
    if isinstance(value, Mapping):
        return {"d": {key: _tagged(item) for key, item in value.items()}}
    if isinstance(value, tuple):
        return {"t": [_tagged(item) for item in value]}
    return {"a": value}


def _untagged(value: Any) -> Tree:
    if "d" in value:
        return {key: _untagged(item) for key, item in value["d"].items()}
    if "t" in value:
        return tuple(_untagged(item) for item in value["t"])
    shape, dtype = value["a"]
    return ArraySpec(tuple(shape), np.dtype(dtype))


class BatchFile:
    """Where rank 0 leaves the batch of an update for the ranks of its node; a larger batch gets a new file."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.number = directory, 0
        self._map: mmap.mmap | None = None
        self._layout: Layout | None = None

    def put(self, segments: Segments) -> memoryview:
        """Copy the segments; returns their bytes. Nobody may be reading. Raises StoreFull."""
        layout = self._layout
        if layout is None or layout.spec != segments.spec or layout.rows != segments.rows:
            layout = self._layout = Layout(segments.spec, segments.rows)
        if self._map is None or len(self._map) < layout.nbytes:
            self._grow(layout.nbytes)
        assert self._map is not None
        buffer = memoryview(self._map)[: layout.nbytes]
        mine = layout.views(buffer)
        for name, whole in mine.arrays().items():
            if not name.startswith("episode_"):
                tree.copy_into(whole, getattr(segments, name))
        layout.seal(segments, buffer)
        return buffer

    def _grow(self, size: int) -> None:
        self.number += 1
        path = batch_path(self._directory, self.number)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise StoreFull(
                    f"{self._directory.parent} has no room for a batch of {size:,} bytes: {error}.",
                    "Use a smaller train_batch_size.",
                ) from error
            self._map = mmap.mmap(file.fileno(), size)  # the former one goes when nothing looks at it any more
        batch_path(self._directory, self.number - 1).unlink(missing_ok=True)


def batch_path(directory: Path, number: int) -> Path:
    return directory / f"batch-{number}"


def fingerprint(optimizer: Optimizer[Policy]) -> tuple[float, float]:
    """Two numbers that differ when weights do."""
    return float(optimizer.flat.double().sum()), float(optimizer.flat.norm())


# -- rank 1 … N-1 -------------------------------------------------------------------------------------------------------


class Rank:
    """A learner that does what rank 0 does, with its own part of every minibatch."""

    def __init__(self, link: Link, rank: int, welcome: Mapping[str, Any]) -> None:
        self._link, self._rank, self._welcome = link, rank, welcome
        self._device = torch.device(welcome["device"])
        self._algorithm = Recipe(**welcome["recipe"]).build(self._device)
        self._layout: Layout | None = None
        self._spec: SegmentSpec | None = None
        self._maps: dict[int, mmap.mmap] = {}

    def join(self, check: Callable[[], None]) -> None:
        w = self._welcome
        group: Group
        if w["transport"] == "shared":
            group = SharedGroup(Path(w["group"]), self._rank, w["size"], timeout_s=w["timeout_s"], check=check)
        else:
            store = _store(w["group"], w["size"], w["timeout_s"])
            group = TorchGroup(
                store, self._rank, w["size"], device=self._device, address=_own_address(w["group"]), timeout_s=w["timeout_s"]
            )
        self._algorithm.optimizer.group = group

    def serve(self, beat: Callable[[], None]) -> None:
        """Until rank 0 hangs up."""
        while True:
            beat()
            if not self._link.waiting(_LOOK_S):
                continue
            try:
                frame = self._link.receive()
            except WorkerFailed:
                log.info("rank 0 is gone; so is this learner")
                return
            if frame.kind == STATE:
                load_packed(self._algorithm, frame.body)
            elif frame.kind == SPEC:
                self._spec, self._layout = spec_from_json(frame.body), None
            elif frame.kind == LEARN:
                self._learn(frame)

    def _learn(self, frame: Frame) -> None:
        order = _Order(*_ORDER.unpack_from(frame.body))
        assert self._spec is not None
        if self._layout is None or self._layout.rows != order.rows:
            self._layout = Layout(self._spec, order.rows)
        buffer = self._mapped(order.file) if order.file else memoryview(frame.body)[_ORDER.size :]
        segments = self._layout.load(buffer[: self._layout.nbytes])
        if hasattr(self._algorithm, "version"):
            self._algorithm.version = None if order.version < 0 else order.version
        try:
            self._algorithm.learn(segments, order.timestep)
        except TrainingDiverged as error:  # rank 0 says it, too, and decides
            log.error("%s", error)
        except WorkerFailed as error:  # another learner was lost; this one must not be taken for the cause
            log.error("%s", error)
            self._algorithm.optimizer.group.close()
            return
        shown = _FINGERPRINT.pack(*fingerprint(self._algorithm.optimizer)) if order.checked else b""
        self._link.send(DONE, self._algorithm.optimizer.updates, 0, shown)

    def _mapped(self, number: int) -> memoryview:
        if number not in self._maps:
            self._maps.clear()
            with batch_path(Path(self._welcome["directory"]), number).open("r+b") as file:
                self._maps[number] = mmap.mmap(file.fileno(), 0)
        return memoryview(self._maps[number])

    def close(self) -> None:
        self._algorithm.optimizer.group.close()
        close = getattr(self._algorithm, "close", None)
        if close is not None:
            close()


_ORDER = struct.Struct("<qqqqq")


@dataclass(frozen=True)
class _Order:
    """What a rank is told with every batch."""

    timestep: int
    version: int
    rows: int
    file: int
    """Number of the batch file; 0: the bytes of the batch follow."""
    checked: int
    """Whether it is to show its fingerprint afterwards."""

    def packed(self) -> bytes:
        return _ORDER.pack(self.timestep, self.version, self.rows, self.file, self.checked)


def _store(place: str, size: int, timeout_s: float) -> Any:
    """`tcp://host:port`, or a path that all of them see."""
    stores: Any = torch.distributed  # absent where torch is built without it
    if not place.startswith(_TCP):
        return stores.FileStore(place, size)
    host, port = _host_and_port(place)
    return stores.TCPStore(host, port, size, False, datetime.timedelta(seconds=timeout_s))


def _host_and_port(place: str) -> tuple[str, int]:
    host, _, port = place.removeprefix(_TCP).rpartition(":")
    return host, int(port)


def _own_address(place: str) -> str:
    """The address of this machine towards the store."""
    if not place.startswith(_TCP):
        return "127.0.0.1"
    host, port = _host_and_port(place)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def serve(link: Link, *, beat: Callable[[], None] = lambda: None, ready: Callable[[], None] = lambda: None) -> None:
    """A rank's life, on this node or another: told by rank 0 over the link what it is."""
    keep_freed_memory()
    link.send(HELLO, os.getpid())
    frame = link.receive(WELCOME, START_S)
    with contextlib.closing(Rank(link, frame.first, json.loads(frame.body))) as rank:
        link.send(READY)
        link.receive(JOIN, START_S)
        rank.join(lambda: None)
        ready()
        rank.serve(beat)


def _local_rank(context: Context) -> None:
    connection = socket.socket(fileno=context.fds[0])
    with contextlib.closing(Link(connection, "rank 0")) as link:
        serve(link, beat=context.beat, ready=context.ready)


# -- rank 0 -------------------------------------------------------------------------------------------------------------


class Learners:
    """Ranks 1 … N-1, seen from rank 0. They hold what the given algorithm holds, from the moment this is made."""

    def __init__(
        self,
        algorithm: Algorithm,
        config: AlgorithmConfig,
        size: int,
        log_dir: Path | None,
        *,
        transport: Transport | None = None,
        timeout_s: float = COLLECTIVE_S,
        start_s: float = START_S,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`config`: with which the algorithm was made. `supervisor`: to start them under, whose logs are in `log_dir`."""
        self.size = size
        self._algorithm, self._timeout_s = algorithm, timeout_s
        device = algorithm.optimizer.device
        self._transport = transport or ("shared" if device.type == "cpu" else "torch")
        self._log_dir = log_dir
        self._processes: dict[int, Process] = {}
        self._links: dict[int, Link] = {}
        self._spec: SegmentSpec | None = None
        self._updates = 0
        self._busy = False
        self._expected: tuple[float, float] | None = None
        with contextlib.ExitStack() as undo:
            self._scratch = Scratch(shared_memory())
            undo.callback(self._scratch.close)
            self._batch = BatchFile(self._scratch.path)
            if supervisor is None:
                supervisor = Supervisor(log_dir=log_dir, preload=("numpy", "torch", __name__))
                undo.callback(supervisor.close, _GRACE_S)
            undo.callback(self._stop)
            self._start(supervisor, Recipe.of(algorithm, config), start_s)
            self.send_state()
            self._undo = undo.pop_all()

    # -- starting

    def _start(self, supervisor: Supervisor, recipe: Recipe, start_s: float) -> None:
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                name = f"learner-{rank}"
                self._processes[rank] = supervisor.start(name, _local_rank, fds=[theirs.fileno()], restart=NEVER)
            self._links[rank] = Link(ours, f"Learner {rank}")
        deadline = time.monotonic() + start_s
        place = self._scratch.path / "group"
        if self._transport == "shared":
            SharedGroup.create(place, self.size, self._algorithm.optimizer.wire.numel())
        welcome = {
            "recipe": asdict(recipe),
            "size": self.size,
            "transport": self._transport,
            "group": str(place),
            "directory": str(self._scratch.path),
            "timeout_s": self._timeout_s,
        }
        for rank, link in self._links.items():
            body = json.dumps(welcome | {"device": _device_of(rank, self._algorithm.optimizer.device)}).encode()
            self._hear(rank, HELLO, deadline)
            link.send(WELCOME, rank, self.size, body)
        for rank in self._links:
            self._hear(rank, READY, deadline)
        for link in self._links.values():
            link.send(JOIN)
        group: Group
        if self._transport == "shared":
            group = SharedGroup(place, 0, self.size, timeout_s=self._timeout_s, check=self.check)
        else:
            store = _store(str(place), self.size, self._timeout_s)
            group = TorchGroup(
                store, 0, self.size, device=self._algorithm.optimizer.device, timeout_s=self._timeout_s, check=self.check
            )
        self._algorithm.optimizer.group = group

    def _hear(self, rank: int, kind: int, deadline: float) -> Frame:
        """A frame from that rank, or the reason why there will be none."""
        link = self._links[rank]
        while not link.waiting(0.05):
            self.check()
            if time.monotonic() >= deadline:
                raise WorkerFailed(f"Learner {rank} was not ready in time.", self._log_hint(rank))
        try:
            return link.receive(kind)
        except WorkerFailed as error:
            raise self.verdict(error) from error

    # -- every update

    def send_state(self) -> None:
        """Make all ranks what rank 0 is."""
        self.settle()
        body = pack_state(self._algorithm)
        for link in self._links.values():
            link.send(STATE, 0, 0, body)

    def begin(self, segments: Segments, timestep: int, version: int | None) -> None:
        """Have all ranks learn from these segments; rank 0 does so next."""
        self.settle()
        self.check()
        data = self._batch.put(segments)
        if segments.spec != self._spec:
            self._spec = segments.spec
            for link in self._links.values():
                link.send(SPEC, 0, 0, spec_json(segments.spec))
        self._updates += 1
        checked = self._updates == 1 or self._updates % _CHECK_EVERY == 0
        order = _Order(timestep, -1 if version is None else version, segments.rows, self._batch.number, int(checked))
        for link in self._links.values():
            link.send(LEARN, 0, 0, order.packed())
        self._busy, self._checked = True, checked
        data.release()

    def end(self) -> None:
        """Rank 0 has learned. That the others have is awaited when it matters: before the next batch."""
        self._expected = fingerprint(self._algorithm.optimizer) if self._checked else None

    _checked = False

    def settle(self) -> None:
        """All ranks are done with the batch. Raises WorkerFailed when they are not, or are no longer alike."""
        if not self._busy:
            return
        self._busy = False
        deadline = time.monotonic() + self._timeout_s
        for rank in self._links:
            frame = self._hear(rank, DONE, deadline)
            if self._expected is not None and frame.body:
                self._compare(rank, _FINGERPRINT.unpack(frame.body))

    def _compare(self, rank: int, found: Sequence[float]) -> None:
        assert self._expected is not None
        if not all(math.isclose(a, b, rel_tol=_DRIFT, abs_tol=_DRIFT) for a, b in zip(found, self._expected, strict=True)):
            raise WorkerFailed(
                f"Learner {rank} has other weights than learner 0 (sum {found[0]:.6g} instead of {self._expected[0]:.6g}).",
                "An algorithm that learners share must be a function of its state(), the batch and its seed; "
                "use num_learners: 1, or correct it.",
            )

    # -- failures

    def check(self) -> None:
        """Raises WorkerFailed when a rank is known to be lost."""
        for rank, process in self._processes.items():
            if process.state in OVER:
                raise self._lost(rank, process)

    def verdict(self, error: WorkerFailed) -> WorkerFailed:
        """The reason behind a failed collective or link: which rank was lost, if that comes out in a moment."""
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline:
            for rank, process in self._processes.items():
                if process.wait(0.05):
                    return self._lost(rank, process)
        return error

    def _lost(self, rank: int, process: Process) -> WorkerFailed:
        why = process.error.rstrip().rpartition("\n")[2] or "it ended"
        return WorkerFailed(f"Learner {rank} of {self.size} is lost: {why}", self._log_hint(rank))

    def _log_hint(self, rank: int) -> str:
        path = self._log_dir / f"learner-{rank}.log" if self._log_dir else None
        return "The run can go on from its newest checkpoint." + (f" The learner's log: {path}" if path else "")

    def close(self) -> None:
        """Again: no effect."""
        self._undo.close()

    def _stop(self) -> None:
        """Hang up, which ends the ranks; those that do not notice are killed."""
        for link in self._links.values():
            link.close()
        for process in self._processes.values():
            process.ask_to_stop(_GRACE_S)
        for process in self._processes.values():
            process.stop(_GRACE_S)
        self._algorithm.optimizer.group.close()
        self._algorithm.optimizer.group = ALONE


def _device_of(rank: int, device: torch.device) -> str:
    """The learners of a node have an accelerator each, as long as there are enough."""
    if device.type != "cuda":
        return str(device)
    return f"cuda:{((device.index or 0) + rank) % torch.cuda.device_count()}"


class SharedAlgorithm:
    """An algorithm whose gradients are computed by several learners; to the trainer, an algorithm like any other."""

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    def __init__(self, algorithm: Algorithm, learners: Learners) -> None:
        self._algorithm, self._learners = algorithm, learners
        self.policy, self.optimizer = algorithm.policy, algorithm.optimizer

    @property
    def version(self) -> int | None:
        """Of the weights that learn now; the trainer sets it for algorithms that look at it."""
        return getattr(self._algorithm, "version", None)

    @version.setter
    def version(self, number: int | None) -> None:
        if hasattr(self._algorithm, "version"):
            self._algorithm.version = number

    def learn(self, segments: Segments, timestep: int) -> dict[str, float]:
        self._learners.begin(segments, timestep, self.version)
        try:
            numbers = self._algorithm.learn(segments, timestep)
        except WorkerFailed as error:
            raise self._learners.verdict(error) from error
        self._learners.end()
        return numbers | {"learners": float(self._learners.size)}

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        return self._algorithm.state()

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        """Also sends the weights as they are now to all learners: load those first."""
        self._algorithm.load_state(arrays, plain)
        self._learners.send_state()

    def close(self) -> None:
        self._learners.close()
        close = getattr(self._algorithm, "close", None)
        if close is not None:
            close()


def share_learning(
    algorithm: Algorithm, config: AlgorithmConfig, learners: int, log_dir: Path | None, **options: Any
) -> Algorithm:
    """The same algorithm on so many learners, this process among them. `config`: with which it was made."""
    if learners <= 1:
        return algorithm
    shared: Algorithm = SharedAlgorithm(algorithm, Learners(algorithm, config, learners, log_dir, **options))
    return shared
