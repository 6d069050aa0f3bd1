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
import logging
import mmap
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from ludus.algorithms.base import Algorithm
from ludus.algorithms.optim.gradient_allreduce import COLLECTIVE_S, SINGLE_LEARNER, SharedMemoryAllReduce
from ludus.config.schema import AlgorithmConfig
from ludus.core import tree
from ludus.core.tree import Array
from ludus.core.types import Segments, SegmentSpec
from ludus.distributed.code_bundle import Luggage
from ludus.distributed.hub.server import shared_memory
from ludus.distributed.learners.channel import DONE, HELLO, JOIN, LEARN, READY, SPEC, STATE, WELCOME, Entrance, Frame, Link
from ludus.distributed.learners.rank import (
    FINGERPRINT,
    START_S,
    Order,
    Recipe,
    Welcome,
    batch_path,
    fingerprint,
    joined,
    pack_state,
    serve,
    spec_json,
)
from ludus.errors import StoreFull, WorkerFailed
from ludus.io.addresses import tcp_address
from ludus.process.temp_dirs import Scratch
from ludus.process.workers.supervisor import NEVER, OVER, Context, Process, Supervisor
from ludus.transport.shared_memory import BlockLayout

log = logging.getLogger(__name__)

Transport = Literal["shared", "gloo", "nccl"]
"""How gradients are summed: over shared memory (one node, CPUs), or by torch.distributed."""

_GRACE_S = 1.0
_VERDICT_S = 2.0
_CHECK_EVERY = 50
_DRIFT = 1e-3
"""Of the norm of all weights: rounding errors of a sum in another order are far below."""


class BatchFile:
    """Where rank 0 leaves the batch of an update for the ranks of its node; a larger batch gets a new file."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.number = directory, 0
        self._map: mmap.mmap | None = None
        self._layout: BlockLayout | None = None

    def put(self, segments: Segments) -> memoryview:
        """Copy the segments; returns their bytes. Nobody may be reading. Raises StoreFull."""
        layout = self._layout
        if layout is None or layout.spec != segments.spec or layout.rows != segments.rows:
            layout = self._layout = BlockLayout(segments.spec, segments.rows)
        if self._map is None or len(self._map) < layout.nbytes:
            self._map = self._larger(layout.nbytes)  # the former one goes when nothing looks at it any more
        buffer = memoryview(self._map)[: layout.nbytes]
        for name, whole in layout.views(buffer).arrays().items():
            if not name.startswith("episode_"):
                tree.copy_into(whole, getattr(segments, name))
        layout.seal(segments, buffer)
        return buffer

    def _larger(self, size: int) -> mmap.mmap:
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
            batch_path(self._directory, self.number - 1).unlink(missing_ok=True)
            return mmap.mmap(file.fileno(), size)


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
        away: int = 0,
        entrance: Entrance | None = None,
    ) -> None:
        """`config`: with which the algorithm was made. `supervisor`: to start them under, whose logs are in `log_dir`.

        So many of them as `away` says are on other nodes: they call `learn_for` with the address of the entrance.
        """
        self.size, self._log_dir = size, log_dir
        self._algorithm, self._timeout_s = algorithm, timeout_s
        self._processes: dict[int, Process] = {}
        self._links: dict[int, Link] = {}
        self._spec: SegmentSpec | None = None
        self._updates = 0
        self._busy = self._checked = False
        self._expected: tuple[float, ...] | None = None
        self._store: Any = None
        self._transport = transport or _transport_for(algorithm.optimizer.device, size - away, away)
        with contextlib.ExitStack() as undo:
            self._scratch = Scratch(shared_memory())
            undo.callback(self._scratch.close)
            self._batch = BatchFile(self._scratch.path)
            if supervisor is None:
                supervisor = Supervisor(log_dir=log_dir, preload=("numpy", "torch", __name__))
                undo.callback(supervisor.close, _GRACE_S)
            undo.callback(self._stop)
            deadline = time.monotonic() + start_s
            self._start(supervisor, away)
            if entrance is not None:
                self._await_far(entrance, away, deadline)
            self._gather(Recipe.of(algorithm, config), entrance, deadline)
            self.send_state()
            self._undo = undo.pop_all()

    # -- starting

    def _start(self, supervisor: Supervisor, away: int) -> None:
        for rank in range(1, self.size - away):
            ours, theirs = socket.socketpair()
            self._links[rank] = Link(ours, f"Learner {rank}")
            with theirs:
                fds, kind = [theirs.fileno()], type(self._algorithm)
                luggage = Luggage.of(models=[self._algorithm.policy.config.custom_model])
                self._processes[rank] = supervisor.start(f"learner-{rank}", _local_rank, kind, luggage, fds=fds, restart=NEVER)

    def _await_far(self, entrance: Entrance, away: int, deadline: float) -> None:
        for rank in range(self.size - away, self.size):
            link = entrance.admit(deadline - time.monotonic())
            if link is None:
                raise WorkerFailed(
                    f"Learner {rank} of {self.size} did not come to {entrance.address} in time.",
                    "Is it started on its node, with the token of this run?",
                )
            self._links[rank] = link

    def _gather(self, recipe: Recipe, entrance: Entrance | None, deadline: float) -> None:
        """Tell all ranks what they are, and join them."""
        place, device = str(self._scratch.path / "group"), self._algorithm.optimizer.device
        if self._transport == "shared":
            SharedMemoryAllReduce.create(Path(place), self.size, self._algorithm.optimizer.allreduce_buffer.numel())
        elif entrance is not None:
            place = self._open_store(entrance.host)
        welcome = Welcome(recipe, self.size, self._transport, place, str(self._scratch.path), "cpu", self._timeout_s)
        for rank, link in self._links.items():
            self._hear(rank, HELLO, deadline)
            mine = Welcome(**{**vars(welcome), "device": _device_of(rank, device)})
            link.send(WELCOME, rank, self.size, mine.to_json())
        for rank in self._links:
            self._hear(rank, READY, deadline)
        for link in self._links.values():
            link.send(JOIN)
        self._algorithm.optimizer.group = joined(welcome, 0, device, self.check)

    def _open_store(self, host: str) -> str:
        stores: Any = torch.distributed
        limit = datetime.timedelta(seconds=self._timeout_s)
        self._store = stores.TCPStore(host, 0, self.size, True, limit, wait_for_workers=False)
        return tcp_address(host, self._store.port)

    def _hear(self, rank: int, kind: int, deadline: float) -> Frame:
        """A frame from that rank, or the reason why there will be none."""
        link = self._links[rank]
        while not link.waiting(0.05):
            self.check()
            if time.monotonic() >= deadline:
                raise WorkerFailed(f"Learner {rank} of {self.size} did not answer in time.", self._hint(rank))
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
        self._updates, self._expected = self._updates + 1, None
        self._checked = self._updates == 1 or self._updates % _CHECK_EVERY == 0
        spec = spec_json(segments.spec) if segments.spec != self._spec else None
        self._spec = segments.spec
        with self._batch.put(segments) as data:
            for link in self._links.values():
                if spec is not None:
                    link.send(SPEC, 0, 0, spec)
                file = 0 if link.far else self._batch.number
                order = Order(timestep, -1 if version is None else version, segments.rows, file, int(self._checked))
                link.send(LEARN, 0, 0, order.packed(), *([data] if link.far else []))
        self._busy = True

    def end(self) -> None:
        """Rank 0 has learned. That the others have is awaited when it matters: before the next batch."""
        self._expected = fingerprint(self._algorithm.optimizer) if self._checked else None

    def settle(self) -> None:
        """All ranks are done with the batch. Raises WorkerFailed when they are not, or are no longer alike."""
        if not self._busy:
            return
        self._busy = False
        deadline = time.monotonic() + self._timeout_s
        for rank in self._links:
            frame = self._hear(rank, DONE, deadline)
            if self._expected is not None and frame.body:
                self._compare(rank, FINGERPRINT.unpack(frame.body), self._expected)

    @staticmethod
    def _compare(rank: int, found: Sequence[float], expected: Sequence[float]) -> None:
        apart = [abs(a - b) for a, b in zip(found, expected, strict=True)]
        if not all(gap <= _DRIFT * max(1.0, expected[0]) for gap in apart):  # so written, NaN is a difference
            raise WorkerFailed(
                f"Learner {rank} has other weights than learner 0 (norm {found[0]:.6g} and {expected[0]:.6g}, apart by {max(apart):.3g}).",
                "An algorithm that learners share must be a function of its state(), the batch and its seed; "
                "use num_learners: 1, or correct it.",
            )

    # -- failures

    def check(self) -> None:
        """Raises WorkerFailed when a rank is known to be lost."""
        lost = self._lost()
        if lost is not None:
            raise lost

    def verdict(self, error: WorkerFailed) -> WorkerFailed:
        """The reason behind a failed collective or link: which rank was lost, if that comes out in a moment."""
        deadline = time.monotonic() + _VERDICT_S
        while time.monotonic() < deadline:
            lost = self._lost()
            if lost is not None:
                return lost
            time.sleep(0.02)
        return error

    def _lost(self) -> WorkerFailed | None:
        for rank, link in self._links.items():
            process = self._processes.get(rank)
            if process is not None and process.state in OVER:
                why = process.error.rstrip().rpartition("\n")[2] or "it ended"
            elif process is None and link.gone:
                why = "its connection is broken"
            else:
                continue
            return WorkerFailed(f"Learner {rank} of {self.size} is lost: {why.rstrip('.')}.", self._hint(rank))
        return None

    def _hint(self, rank: int) -> str:
        path = self._log_dir / f"learner-{rank}.log" if self._log_dir and rank in self._processes else None
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
        self._algorithm.optimizer.group = SINGLE_LEARNER
        self._store = None


def _local_rank(context: Context, kind: type[Algorithm], luggage: Luggage) -> None:
    luggage.unpack()
    with contextlib.closing(Link(socket.socket(fileno=context.fds[0]), "Learner 0")) as link:
        serve(link, kind=kind, beat=context.beat, ready=context.ready)


def _transport_for(device: torch.device, here: int, away: int) -> Transport:
    if device.type == "cpu":
        return "gloo" if away else "shared"
    enough = torch.cuda.device_count() >= here  # nccl refuses two learners on one accelerator
    return "nccl" if enough and torch.distributed.is_nccl_available() else "gloo"


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
    """The same algorithm on so many learners, this process among them. `config`: with which it was made.

    Options are those of Learners.
    """
    if learners <= 1:
        return algorithm
    shared: Algorithm = SharedAlgorithm(algorithm, Learners(algorithm, config, learners, log_dir, **options))
    return shared
