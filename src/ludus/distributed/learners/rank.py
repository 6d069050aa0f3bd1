"""One of several learners: it does what rank 0 does, with its own part of every minibatch."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import mmap
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ludus.algorithms.base import Algorithm, algorithm_class
from ludus.algorithms.optim.flat_adam import FlatAdam
from ludus.algorithms.optim.gradient_allreduce import GradientAllReduce, SharedMemoryAllReduce, TorchAllReduce
from ludus.config.schema import AlgorithmConfig
from ludus.core import tree, trust
from ludus.core.spaces import ArraySpec
from ludus.core.tree import Tree
from ludus.core.types import SegmentSpec
from ludus.distributed.learners.channel import (
    DONE,
    HELLO,
    JOIN,
    LEARN,
    READY,
    SPEC,
    STATE,
    WELCOME,
    Frame,
    Link,
    enter,
)
from ludus.errors import TrainingDiverged, WorkerFailed
from ludus.io.addresses import host_and_port, is_tcp, local_address
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.process.host import keep_freed_memory
from ludus.transport.shared_memory import BlockLayout

log = logging.getLogger(__name__)

START_S = 120.0
"""How long a learner may take to import, build its model and join."""

_LOOK_S = 1.0


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

    def build(self, device: torch.device, kind: type[Algorithm] | None = None) -> Algorithm:
        trust.allow(self.algorithm, self.policy)  # rank 0 of the same run has imported them, and proved that it knows the token
        kind = kind or algorithm_class(self.algorithm)
        config = kind.Config.model_validate(self.config)
        torch.set_num_threads(max(1, config.torch_threads))
        return kind(serialization.policy_from(self.policy).to(device), config, self.seed)


@dataclass(frozen=True)
class Welcome:
    """What rank 0 tells a rank about its place."""

    recipe: Recipe
    size: int
    transport: str
    group: str
    """Where they meet to sum: a file in shared memory, a file for torch's FileStore, or tcp://host:port of its TCPStore."""
    directory: str
    device: str
    timeout_s: float

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes | bytearray) -> Welcome:
        plain = json.loads(data)
        return cls(**{**plain, "recipe": Recipe(**plain["recipe"])})


_ORDER = struct.Struct("<qqqqq")


@dataclass(frozen=True)
class Order:
    """What a rank is told with every batch."""

    timestep: int
    version: int
    """Of the weights that learn; -1: not known."""
    rows: int
    file: int
    """Number of the batch file; 0: the bytes of the batch follow."""
    checked: int
    """Whether it is to show its fingerprint afterwards."""

    def packed(self) -> bytes:
        return _ORDER.pack(self.timestep, self.version, self.rows, self.file, self.checked)

    @classmethod
    def unpacked(cls, data: bytes | bytearray) -> tuple[Order, memoryview]:
        """And what follows it."""
        return cls(*_ORDER.unpack_from(data)), memoryview(data)[_ORDER.size :]


FINGERPRINT = struct.Struct("<4d")


def fingerprint(optimizer: FlatAdam[Policy]) -> tuple[float, ...]:
    """Norm and sum, and what every second weight, and one half of them, has more than the rest.

    Random differences change all but the norm by about as much as the difference is long; that one of them stays within a
    thousandth of the norm is rare, that all three do is not seen.
    """
    flat = optimizer.flat.double()
    total, half = flat.sum(), flat.numel() // 2
    return float(flat.norm()), float(total), float(total - 2 * flat[1::2].sum()), float(total - 2 * flat[half:].sum())


def pack_state(algorithm: Algorithm) -> bytes:
    """Weights and everything else that a rank must have in common with rank 0."""
    arrays, plain = algorithm.state()
    return tree.encode({"weights": algorithm.policy.weights(), "arrays": arrays}, {"plain": json.dumps(plain)})


def load_packed(algorithm: Algorithm, data: bytes | bytearray) -> None:
    whole, meta = tree.decode(memoryview(data))
    algorithm.policy.load_weights(whole["weights"])
    algorithm.load_state({name: array.copy() for name, array in whole["arrays"].items()}, json.loads(meta["plain"]))


_TREES = ("observation", "action", "state")


def spec_json(spec: SegmentSpec) -> bytes:
    plain = {**vars(spec), **{name: _plain(getattr(spec, name)) for name in _TREES}}
    return json.dumps(plain).encode()


def spec_from_json(data: bytes | bytearray) -> SegmentSpec:
    plain = json.loads(data)
    trees = {name: _specs(plain[name]) for name in _TREES}
    return SegmentSpec(**{**plain, **trees, "results": tuple(plain["results"])})


def _plain(specs: Tree) -> Any:
    """JSON has no tuples: {"d": dict}, {"t": list}, {"a": leaf}."""
    if isinstance(specs, Mapping):
        return {"d": {key: _plain(item) for key, item in specs.items()}}
    if isinstance(specs, tuple):
        return {"t": [_plain(item) for item in specs]}
    return {"a": [list(specs.shape), specs.dtype.str]}


def _specs(plain: Any) -> Tree:
    if "d" in plain:
        return {key: _specs(item) for key, item in plain["d"].items()}
    if "t" in plain:
        return tuple(_specs(item) for item in plain["t"])
    shape, dtype = plain["a"]
    return ArraySpec(tuple(shape), np.dtype(dtype))


def batch_path(directory: Path, number: int) -> Path:
    """The file in shared memory in which rank 0 leaves a batch."""
    return directory / f"batch-{number}"


def joined(welcome: Welcome, rank: int, device: torch.device, check: Callable[[], None] = lambda: None) -> GradientAllReduce:
    """Join the others; all ranks do so at about the same time. Raises WorkerFailed."""
    place, size, timeout_s = welcome.group, welcome.size, welcome.timeout_s
    if welcome.transport == "shared":
        return SharedMemoryAllReduce(Path(place), rank, size, timeout_s=timeout_s, check=check)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stores: Any = torch.distributed  # absent where torch is built without it
    if not is_tcp(place):
        return TorchAllReduce(
            stores.FileStore(place, size), rank, size, backend=welcome.transport, timeout_s=timeout_s, check=check
        )
    store = stores.TCPStore(*host_and_port(place), size, False, datetime.timedelta(seconds=timeout_s))
    options: Any = {
        "backend": welcome.transport,
        "address": local_address(*host_and_port(place), socket.AF_INET),
        "timeout_s": timeout_s,
    }
    return TorchAllReduce(store, rank, size, check=check, **options)


# -- its life -----------------------------------------------------------------------------------------------------------


class Rank:
    """Ranks 1 … N-1."""

    def __init__(self, link: Link, rank: int, welcome: Welcome, kind: type[Algorithm] | None, device: str | None) -> None:
        self._link, self._rank, self._welcome = link, rank, welcome
        self._device = torch.device(device or welcome.device)
        self._algorithm = welcome.recipe.build(self._device, kind)
        self._spec: SegmentSpec | None = None
        self._layout: BlockLayout | None = None
        self._map: tuple[int, mmap.mmap] | None = None

    def join(self) -> None:
        self._algorithm.optimizer.group = joined(self._welcome, self._rank, self._device, self._check)

    def _check(self) -> None:
        if self._link.gone:
            raise WorkerFailed("Learner 0 is gone.", "See its log.")

    def serve(self, beat: Callable[[], None]) -> None:
        """Until rank 0 hangs up."""
        while True:
            beat()
            if not self._link.waiting(_LOOK_S):
                continue
            try:
                frame = self._link.receive()
            except WorkerFailed:
                log.info("learner 0 has hung up; this one ends")
                return
            if frame.kind == STATE:
                load_packed(self._algorithm, frame.body)
            elif frame.kind == SPEC:
                self._spec, self._layout = spec_from_json(frame.body), None
            elif frame.kind == LEARN:
                self._learn(frame)

    def _learn(self, frame: Frame) -> None:
        order, rest = Order.unpacked(frame.body)
        assert self._spec is not None
        if self._layout is None or self._layout.rows != order.rows:
            self._layout = BlockLayout(self._spec, order.rows)
        buffer = self._mapped(order.file) if order.file else rest
        segments = self._layout.load(buffer[: self._layout.nbytes])
        if hasattr(self._algorithm, "version"):
            self._algorithm.version = None if order.version < 0 else order.version
        optimizer = self._algorithm.optimizer
        try:
            self._algorithm.learn(segments, order.timestep)
        except TrainingDiverged as error:  # rank 0 says it, too, and decides
            log.error("%s", error)
        except WorkerFailed as error:  # another learner was lost; this one must not be taken for the cause
            log.error("%s", error)
            optimizer.group.close()
            return
        self._link.send(DONE, optimizer.updates, 0, FINGERPRINT.pack(*fingerprint(optimizer)) if order.checked else b"")

    def _mapped(self, number: int) -> memoryview:
        if self._map is None or self._map[0] != number:
            with batch_path(Path(self._welcome.directory), number).open("r+b") as file:
                self._map = number, mmap.mmap(file.fileno(), 0)
        return memoryview(self._map[1])

    def close(self) -> None:
        self._algorithm.optimizer.group.close()
        close = getattr(self._algorithm, "close", None)
        if close is not None:
            close()


def serve(
    link: Link,
    *,
    kind: type[Algorithm] | None = None,
    device: str | None = None,
    beat: Callable[[], None] = lambda: None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """A rank's life: rank 0 tells it over the link what it is. `kind`: the algorithm, where its name is not enough."""
    keep_freed_memory()
    link.send(HELLO, os.getpid())
    frame = link.receive(WELCOME, START_S)
    with contextlib.closing(Rank(link, frame.first, Welcome.from_json(frame.body), kind, device)) as rank:
        link.send(READY)
        link.receive(JOIN, START_S)
        rank.join()
        ready()
        rank.serve(beat)


def learn_for(address: str, token: bytes, *, device: str | None = None, beat: Callable[[], None] = lambda: None) -> None:
    """A rank of a rank 0 on another node, which waits for it at `address`. Returns when that one hangs up.

    `device`: what this node computes on, where it is not what rank 0 thinks.
    """
    with contextlib.closing(enter(address, token)) as link:
        serve(link, device=device, beat=beat)
