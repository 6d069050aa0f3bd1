"""Several learners for one model: each computes the gradient of its part of every minibatch, and all apply the same sum.

    rank 0 (the trainer's process) ──channel: state, batches──▶ rank 1 … N-1 (supervised processes, or other nodes)
           └────────────── all-reduce: the gradient of every minibatch, summed ──────────────┘

All ranks get the whole batch (on one node: a file in shared memory that rank 0 fills once) and prepare it in the same way,
including random numbers; except for rounding, one learner and several produce the same weights. A lost rank ends the training
with WorkerFailed; the supervisor of rank 0 restarts from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import mmap
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from ludus.algorithms.base import Algorithm
from ludus.algorithms.optim.flat_adam import SINGLE_LEARNER
from ludus.algorithms.optim.gradient_allreduce import COLLECTIVE_S, SharedMemoryAllReduce
from ludus.config.schema import AlgorithmConfig
from ludus.core import tree
from ludus.core.tree import Array
from ludus.core.types import Segments, SegmentSpec
from ludus.distributed.code_bundle import CodeBundle
from ludus.distributed.frames import FrameSocket, Header
from ludus.distributed.learners.listener import LearnerListener
from ludus.distributed.learners.rank import (
    DONE,
    HELLO,
    JOIN,
    LEARN,
    READY,
    SPEC,
    START_S,
    STATE,
    WELCOME,
    Recipe,
    Welcome,
    batch_path,
    fingerprint,
    join_group,
    pack_state,
    serve,
)
from ludus.errors import WorkerFailed
from ludus.io.addresses import tcp_address
from ludus.process.temp_dirs import TempDir, shared_memory_dir
from ludus.process.workers.supervisor import FINAL_STATES, NEVER, Context, Process, Supervisor
from ludus.transport.ring_buffer import create_file
from ludus.transport.segment_codec import spec_to_plain
from ludus.transport.shared_memory import BlockLayout

log = logging.getLogger(__name__)

Transport = Literal["shared", "gloo", "nccl"]
"""How gradients are summed: over shared memory (one node, CPUs), or by torch.distributed."""

_GRACE_S = 1.0
_CAUSE_S = 2.0
_CHECK_EVERY = 50
_DRIFT = 1e-3
"""Tolerance relative to the norm of all weights: rounding errors of a reordered sum are far below."""


@dataclass(frozen=True)
class GroupOptions:
    """`supervisor`: starts the processes of ranks on this node (default: a new one).

    `remote`: number of ranks on other nodes, which connect to `listener`.
    """

    transport: Transport | None = None
    timeout_s: float = COLLECTIVE_S
    start_s: float = START_S
    supervisor: Supervisor | None = None
    remote: int = 0
    listener: LearnerListener | None = None


class BatchFile:
    """File with the batch of an update for the ranks of this node; a larger batch gets a new file."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.number = directory, 0
        self._map: mmap.mmap | None = None
        self._layout: BlockLayout | None = None

    def write(self, segments: Segments) -> memoryview:
        """Copy the segments and return their bytes. No rank may be reading. Raises StoreFull."""
        layout = self._layout
        if layout is None or layout.spec != segments.spec or layout.rows != segments.rows:
            layout = self._layout = BlockLayout(segments.spec, segments.rows)
        if self._map is None or len(self._map) < layout.nbytes:
            self._map = self._allocate(layout.nbytes)  # the old map is freed with its last view
        buffer = memoryview(self._map)[: layout.nbytes]
        for name, whole in layout.views(buffer).arrays().items():
            if not name.startswith("episode_"):
                tree.copy_into(whole, getattr(segments, name))
        layout.seal(segments, buffer)
        return buffer

    def _allocate(self, size: int) -> mmap.mmap:
        self.number += 1
        path = batch_path(self._directory, self.number)
        create_file(path, size, hint="Use a smaller train_batch_size.")
        batch_path(self._directory, self.number - 1).unlink(missing_ok=True)
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), size)


class LearnerGroup:
    """Ranks 1 … N-1, seen from rank 0. They have the state of the given algorithm from the start."""

    def __init__(
        self, algorithm: Algorithm, config: AlgorithmConfig, size: int, log_dir: Path | None, options: GroupOptions
    ) -> None:
        """`config`: that of the algorithm. `log_dir`: where the supervisor writes its logs."""
        supervisor, remote, listener = options.supervisor, options.remote, options.listener
        self.size, self._log_dir = size, log_dir
        self._algorithm, self._timeout_s = algorithm, options.timeout_s
        self._processes: dict[int, Process] = {}
        self._channels: dict[int, FrameSocket] = {}
        self._spec: SegmentSpec | None = None
        self._updates = 0
        self._busy = self._checking = False
        self._expected: tuple[float, ...] | None = None
        self._store: Any = None
        self._transport = options.transport or _transport_for(algorithm.optimizer.device, size - remote, remote)
        with contextlib.ExitStack() as undo:
            self._scratch = TempDir(shared_memory_dir())
            undo.callback(self._scratch.close)
            self._batch = BatchFile(self._scratch.path)
            if supervisor is None:
                supervisor = Supervisor(log_dir=log_dir, preload=("numpy", "torch", __name__))
                undo.callback(supervisor.close, _GRACE_S)
            undo.callback(self._stop)
            deadline = time.monotonic() + options.start_s
            self._start(supervisor, remote)
            if listener is not None:
                self._accept_remote(listener, remote, deadline)
            self._join_ranks(Recipe.of(algorithm, config), listener, deadline)
            self.send_state()
            self._undo = undo.pop_all()

    # -- starting

    def _start(self, supervisor: Supervisor, remote: int) -> None:
        for rank in range(1, self.size - remote):
            ours, theirs = socket.socketpair()
            self._channels[rank] = FrameSocket(ours, f"Learner {rank}")
            with theirs:
                fds, kind = [theirs.fileno()], type(self._algorithm)
                code_bundle = CodeBundle.of(models=[self._algorithm.policy.config.custom_model])
                self._processes[rank] = supervisor.start(
                    f"learner-{rank}", _run_local_rank, kind, code_bundle, fds=fds, restart=NEVER
                )

    def _accept_remote(self, listener: LearnerListener, remote: int, deadline: float) -> None:
        for rank in range(self.size - remote, self.size):
            channel = listener.accept_rank(deadline - time.monotonic())
            if channel is None:
                raise WorkerFailed(
                    f"Learner {rank} of {self.size} did not come to {listener.address} in time.",
                    "Check that it is started on its node, with the token of this run.",
                )
            self._channels[rank] = channel

    def _join_ranks(self, recipe: Recipe, listener: LearnerListener | None, deadline: float) -> None:
        """Configure all ranks and join the group."""
        rendezvous, device = str(self._scratch.path / "group"), self._algorithm.optimizer.device
        if self._transport == "shared":
            SharedMemoryAllReduce.create(Path(rendezvous), self.size, self._algorithm.optimizer.allreduce_buffer.numel())
        elif listener is not None:
            rendezvous = self._open_store(listener.host)
        welcome = Welcome(recipe, self.size, self._transport, rendezvous, str(self._scratch.path), "cpu", self._timeout_s)
        for rank, channel in self._channels.items():
            self._receive(rank, HELLO, deadline)
            channel.send({"op": WELCOME, "rank": rank, "welcome": {**asdict(welcome), "device": _device_of(rank, device)}})
        for rank in self._channels:
            self._receive(rank, READY, deadline)
        for channel in self._channels.values():
            channel.send({"op": JOIN})
        self._algorithm.optimizer.group = join_group(welcome, 0, device, self.check)

    def _open_store(self, host: str) -> str:
        stores: Any = torch.distributed
        limit = datetime.timedelta(seconds=self._timeout_s)
        self._store = stores.TCPStore(host, 0, self.size, True, limit, wait_for_workers=False)
        return tcp_address(host, self._store.port)

    def _receive(self, rank: int, op: str, deadline: float) -> Header:
        """Receive the header of a frame from that rank. Raises WorkerFailed with the reason why there is none."""
        channel = self._channels[rank]
        while not channel.has_data(0.05):
            self.check()
            if time.monotonic() >= deadline:
                raise WorkerFailed(f"Learner {rank} of {self.size} did not answer in time.", self._hint(rank))
        try:
            return channel.receive(op)[0]
        except WorkerFailed as error:
            raise self.find_cause(error) from error

    # -- updates

    def send_state(self) -> None:
        """Send the state of rank 0 to all ranks."""
        self.wait_until_done()
        body = pack_state(self._algorithm)
        for channel in self._channels.values():
            channel.send({"op": STATE}, body)

    def begin(self, segments: Segments, timestep: int, version: int | None) -> None:
        """Let all ranks learn from these segments; rank 0 does so next."""
        self.wait_until_done()
        self.check()
        self._updates, self._expected = self._updates + 1, None
        self._checking = self._updates == 1 or self._updates % _CHECK_EVERY == 0
        if segments.spec != self._spec:
            self._spec = segments.spec
            for channel in self._channels.values():
                channel.send({"op": SPEC, "spec": spec_to_plain(segments.spec)})
        header = {"op": LEARN, "timestep": timestep, "version": version, "rows": segments.rows, "check": self._checking}
        with self._batch.write(segments) as data:
            for channel in self._channels.values():
                if channel.is_remote:
                    channel.send({**header, "file": 0}, data)
                else:
                    channel.send({**header, "file": self._batch.number})
        self._busy = True

    def end(self) -> None:
        """Record the result of rank 0. The other ranks are awaited before the next batch."""
        self._expected = fingerprint(self._algorithm.optimizer) if self._checking else None

    def wait_until_done(self) -> None:
        """Wait until all ranks are done with the batch. Raises WorkerFailed when they fail or their weights differ."""
        if not self._busy:
            return
        self._busy = False
        deadline = time.monotonic() + self._timeout_s
        for rank in self._channels:
            found = self._receive(rank, DONE, deadline)["fingerprint"]
            if self._expected is not None and found is not None:
                self._compare(rank, found, self._expected)

    @staticmethod
    def _compare(rank: int, found: Sequence[float], expected: Sequence[float]) -> None:
        differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
        if not all(gap <= _DRIFT * max(1.0, expected[0]) for gap in differences):  # in this form NaN counts as a difference
            raise WorkerFailed(
                f"Learner {rank} has other weights than learner 0 (norm {found[0]:.6g} and {expected[0]:.6g}, which differ by {max(differences):.3g}).",
                "An algorithm that learners share must be a function of its state(), the batch and its seed; "
                "use num_learners: 1, or correct it.",
            )

    # -- failures

    def check(self) -> None:
        """Raises WorkerFailed when a rank is known to be lost."""
        lost = self._find_lost_rank()
        if lost is not None:
            raise lost

    def find_cause(self, error: WorkerFailed) -> WorkerFailed:
        """Cause of a failed all-reduce or channel: the lost rank, if it becomes known within _CAUSE_S."""
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            lost = self._find_lost_rank()
            if lost is not None:
                return lost
            time.sleep(0.02)
        return error

    def _find_lost_rank(self) -> WorkerFailed | None:
        for rank, channel in self._channels.items():
            process = self._processes.get(rank)
            if process is not None and process.state in FINAL_STATES:
                why = process.error.rstrip().rpartition("\n")[2] or "it ended"
            elif process is None and channel.is_closed:
                why = "its connection is broken"
            else:
                continue
            return WorkerFailed(f"Learner {rank} of {self.size} is lost: {why.rstrip('.')}.", self._hint(rank))
        return None

    def _hint(self, rank: int) -> str:
        path = self._log_dir / f"learner-{rank}.log" if self._log_dir and rank in self._processes else None
        return "The run can be resumed from its newest checkpoint." + (f" The learner's log: {path}" if path else "")

    def close(self) -> None:
        """Idempotent."""
        self._undo.close()

    def _stop(self) -> None:
        """Close the channels, which ends the ranks; kill those that do not end."""
        for channel in self._channels.values():
            channel.close()
        for process in self._processes.values():
            process.ask_to_stop(_GRACE_S)
        for process in self._processes.values():
            process.stop(_GRACE_S)
        self._algorithm.optimizer.group.close()
        self._algorithm.optimizer.group = SINGLE_LEARNER
        self._store = None


def _run_local_rank(context: Context, kind: type[Algorithm], code_bundle: CodeBundle) -> None:
    code_bundle.unpack()
    with contextlib.closing(FrameSocket(socket.socket(fileno=context.fds[0]), "Learner 0")) as channel:
        serve(channel, kind=kind, beat=context.beat, ready=context.ready)


def _transport_for(device: torch.device, here: int, remote: int) -> Transport:
    if device.type == "cpu":
        return "gloo" if remote else "shared"
    enough = torch.cuda.device_count() >= here  # nccl does not allow two learners on one device
    return "nccl" if enough and torch.distributed.is_nccl_available() else "gloo"


def _device_of(rank: int, device: torch.device) -> str:
    """Each learner of a node has its own accelerator, as long as there are enough."""
    if device.type != "cuda":
        return str(device)
    return f"cuda:{((device.index or 0) + rank) % torch.cuda.device_count()}"


class SharedAlgorithm:
    """An algorithm whose gradients are computed by several learners, with the interface of an algorithm."""

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig

    def __init__(self, algorithm: Algorithm, learners: LearnerGroup) -> None:
        self._algorithm, self._learners = algorithm, learners
        self.policy, self.optimizer = algorithm.policy, algorithm.optimizer

    @property
    def version(self) -> int | None:
        """Version of the weights that learn; the trainer sets it for algorithms that use it."""
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
            raise self._learners.find_cause(error) from error
        self._learners.end()
        return numbers | {"learners": float(self._learners.size)}

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        return self._algorithm.state()

    def load_state(self, arrays: dict[str, Array], plain: dict[str, Any]) -> None:
        """Load the state and send it with the current weights to all learners: load the weights first."""
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
    """Run the algorithm on several learners, including this process. `config`: that of the algorithm.

    Options are those of `GroupOptions`.
    """
    if learners <= 1:
        return algorithm
    group = LearnerGroup(algorithm, config, learners, log_dir, GroupOptions(**options))
    shared: Algorithm = SharedAlgorithm(algorithm, group)
    return shared
