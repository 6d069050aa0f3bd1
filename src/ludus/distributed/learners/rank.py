"""Ranks 1 … N-1 of several learners: each does what rank 0 does, with its own part of every minibatch."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import mmap
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ludus.algorithms.base import Algorithm, algorithm_class
from ludus.algorithms.optim.flat_adam import FlatAdam, GradientAllReduce
from ludus.algorithms.optim.gradient_allreduce import SharedMemoryAllReduce, TorchAllReduce
from ludus.config.schema import AlgorithmConfig
from ludus.core import tree, trust
from ludus.core.types import SegmentSpec
from ludus.distributed.frames import FrameSocket, Header
from ludus.distributed.learners.listener import connect
from ludus.errors import TrainingDiverged, WorkerFailed
from ludus.io.addresses import host_and_port, is_tcp, local_address
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.process.host import keep_freed_memory
from ludus.transport.segment_codec import spec_from_plain
from ludus.transport.shared_memory import BlockLayout

log = logging.getLogger(__name__)

START_S = 120.0
"""Time limit for a learner to import, build its model and join."""

_POLL_S = 1.0


# -- messages -----------------------------------------------------------------------------------------------------------

HELLO, WELCOME, READY, JOIN, STATE, SPEC, LEARN, DONE = "hello", "welcome", "ready", "join", "state", "spec", "learn", "done"
"""Operations of the frames between rank 0 and another rank, in the order in which they first appear.

welcome: `rank`, `welcome`. state: the body is `pack_state`. spec: `spec` of the following batches. learn: `timestep`, `version` of the
weights that learn or None, `rows`, `file` (number of the batch file; 0: the body is the batch), `check`. done: `fingerprint` if `check`.
"""


@dataclass(frozen=True)
class Recipe:
    """How a rank builds the same algorithm as rank 0. Plain data."""

    algorithm: str
    policy: Mapping[str, Any]
    config: Mapping[str, Any]
    seed: int

    @classmethod
    def of(cls, algorithm: Algorithm, config: AlgorithmConfig) -> Recipe:
        kind = type(algorithm)
        name = f"{kind.__module__}:{kind.__qualname__}"
        return cls(name, algorithm.policy.description(), config.model_dump(mode="json", by_alias=True), config.seed)

    def build(self, device: torch.device, kind: type[Algorithm] | None = None) -> Algorithm:
        trust.allow(self.algorithm, self.policy)  # rank 0 has imported them and has proved that it knows the token
        kind = kind or algorithm_class(self.algorithm)
        config = kind.Config.model_validate(self.config)
        torch.set_num_threads(max(1, config.torch_threads))
        return kind(serialization.policy_from(self.policy).to(device), config, self.seed)


@dataclass(frozen=True)
class Welcome:
    """Configuration of a rank, sent by rank 0."""

    recipe: Recipe
    size: int
    transport: str
    group: str
    """Rendezvous for all-reduce: a file in shared memory, a file for torch's FileStore, or tcp://host:port of its TCPStore."""
    directory: str
    device: str
    timeout_s: float

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Welcome:
        """Inverse of `asdict`."""
        return cls(**{**plain, "recipe": Recipe(**plain["recipe"])})


def fingerprint(optimizer: FlatAdam[Policy]) -> tuple[float, ...]:
    """Norm and sum of the weights, and differences between the sums of alternate weights and of the two halves.

    Random differences change all but the norm by about their own norm. One of these values rarely stays within a thousandth of
    the norm; that all three do has not been seen.
    """
    flat = optimizer.flat.double()
    total, half = flat.sum(), flat.numel() // 2
    return float(flat.norm()), float(total), float(total - 2 * flat[1::2].sum()), float(total - 2 * flat[half:].sum())


def pack_state(algorithm: Algorithm) -> bytes:
    """Weights and everything else that a rank must have in common with rank 0."""
    arrays, plain = algorithm.state()
    return tree.encode({"weights": algorithm.policy.weights(), "arrays": arrays}, {"plain": json.dumps(plain)})


def load_packed_state(algorithm: Algorithm, data: bytes | bytearray) -> None:
    whole, meta = tree.decode(memoryview(data))
    algorithm.policy.load_weights(whole["weights"])
    algorithm.load_state({name: array.copy() for name, array in whole["arrays"].items()}, json.loads(meta["plain"]))


def batch_path(directory: Path, number: int) -> Path:
    """File in shared memory to which rank 0 writes a batch."""
    return directory / f"batch-{number}"


def join_group(welcome: Welcome, rank: int, device: torch.device, check: Callable[[], None] = lambda: None) -> GradientAllReduce:
    """Join the all-reduce group; all ranks do so at about the same time. Raises WorkerFailed."""
    rendezvous, size, timeout_s = welcome.group, welcome.size, welcome.timeout_s
    if welcome.transport == "shared":
        return SharedMemoryAllReduce(Path(rendezvous), rank, size, timeout_s=timeout_s, check=check)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    stores: Any = torch.distributed  # missing if torch is built without it
    if not is_tcp(rendezvous):
        return TorchAllReduce(
            stores.FileStore(rendezvous, size), rank, size, backend=welcome.transport, timeout_s=timeout_s, check=check
        )
    store = stores.TCPStore(*host_and_port(rendezvous), size, False, datetime.timedelta(seconds=timeout_s))
    options: Any = {
        "backend": welcome.transport,
        "address": local_address(*host_and_port(rendezvous), socket.AF_INET),
        "timeout_s": timeout_s,
    }
    return TorchAllReduce(store, rank, size, check=check, **options)


# -- the rank -----------------------------------------------------------------------------------------------------------


class Rank:
    """One of the ranks 1 … N-1."""

    def __init__(
        self, channel: FrameSocket, rank: int, welcome: Welcome, kind: type[Algorithm] | None, device: str | None
    ) -> None:
        self._channel, self._rank, self._welcome = channel, rank, welcome
        self._device = torch.device(device or welcome.device)
        self._algorithm = welcome.recipe.build(self._device, kind)
        self._spec: SegmentSpec | None = None
        self._layout: BlockLayout | None = None
        self._map: tuple[int, mmap.mmap] | None = None

    def join(self) -> None:
        self._algorithm.optimizer.group = join_group(self._welcome, self._rank, self._device, self._check)

    def _check(self) -> None:
        if self._channel.is_closed:
            raise WorkerFailed("Learner 0 is gone.", "See its log.")

    def serve(self, beat: Callable[[], None]) -> None:
        """Serve until rank 0 closes the channel."""
        while True:
            beat()
            if not self._channel.has_data(_POLL_S):
                continue
            try:
                header, body = self._channel.receive()
            except WorkerFailed:
                log.info("learner 0 has closed the channel; this learner ends")
                return
            if header["op"] == STATE:
                load_packed_state(self._algorithm, body)
            elif header["op"] == SPEC:
                self._spec, self._layout = spec_from_plain(header["spec"]), None
            elif header["op"] == LEARN:
                self._learn(header, memoryview(body))

    def _learn(self, header: Header, body: memoryview) -> None:
        assert self._spec is not None
        if self._layout is None or self._layout.rows != header["rows"]:
            self._layout = BlockLayout(self._spec, header["rows"])
        buffer = self._map_batch(header["file"]) if header["file"] else body
        segments = self._layout.load(buffer[: self._layout.nbytes])
        if hasattr(self._algorithm, "version"):
            self._algorithm.version = header["version"]
        optimizer = self._algorithm.optimizer
        try:
            self._algorithm.learn(segments, header["timestep"])
        except TrainingDiverged as error:  # rank 0 raises it too, and decides
            log.error("%s", error)
        except WorkerFailed as error:  # another learner was lost; this one must not look like the cause
            log.error("%s", error)
            optimizer.group.close()
            return
        self._channel.send({"op": DONE, "fingerprint": fingerprint(optimizer) if header["check"] else None})

    def _map_batch(self, number: int) -> memoryview:
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
    channel: FrameSocket,
    *,
    kind: type[Algorithm] | None = None,
    device: str | None = None,
    beat: Callable[[], None] = lambda: None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Run a rank; rank 0 sends its configuration. `kind`: class of the algorithm, if its name is not enough."""
    keep_freed_memory()
    channel.send({"op": HELLO})
    header, _ = channel.receive(WELCOME, START_S)
    with contextlib.closing(Rank(channel, header["rank"], Welcome.from_plain(header["welcome"]), kind, device)) as rank:
        channel.send({"op": READY})
        channel.receive(JOIN, START_S)
        rank.join()
        ready()
        rank.serve(beat)


def serve_remote_rank(address: str, token: bytes, *, device: str | None = None, beat: Callable[[], None] = lambda: None) -> None:
    """Run a rank for the rank 0 that listens at `address` on another node. Returns when that closes the channel.

    `device`: device of this node, if it differs from that of rank 0.
    """
    with contextlib.closing(connect(address, token)) as channel:
        serve(channel, device=device, beat=beat)
