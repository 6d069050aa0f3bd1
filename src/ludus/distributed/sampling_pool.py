"""Sampling in other processes: workers that step environments, on this node and on others, and the one who looks after them.

    learner ──weights──▶ board of each node ──▶ workers ──blocks──▶ one ring per worker ──▶ batches ──▶ learner

A worker writes block 0, 1, 2 … of its own. It begins block k when the weights that block may be made with are there; with
`ahead` 0 that is after k updates, so that sampling and learning take turns and a run can be repeated bit by bit.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ludus.buffers.block_batches import BlockBatches
from ludus.config.schema import PreprocessConfig, SelfPlayConfig
from ludus.core.backoff import Backoff
from ludus.core.tree import Array
from ludus.core.types import Segments, SegmentSpec
from ludus.distributed.code_bundle import Luggage
from ludus.distributed.hub.server import shared_memory
from ludus.distributed.placement import place
from ludus.envs.vector_env import make_environments
from ludus.envs.wrappers import WrapperList
from ludus.errors import EnvironmentFault, WorkerFailed
from ludus.models.devices import copy_for_acting
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeights, SharedWeightsReader
from ludus.process.host import keep_freed_memory, usable_cores
from ludus.process.temp_dirs import Scratch
from ludus.process.workers.supervisor import Context, Process, Restart, Supervisor
from ludus.sampling.sampler import Interruption, Sampler, VersionClock
from ludus.sampling.self_play import with_past_opponents
from ludus.transport.ring_buffer import Wakeup, create_ring
from ludus.transport.shared_memory import BlockLayout, SharedReader, SharedWriter, ring_capacity

log = logging.getLogger(__name__)

NOTES = ("steps", "blocks", "environment_s", "policy_s", "blocked_s", "weights_wait_s", "env_restarts")
"""What a worker counts, in this order, where its node can read it at any time."""

BOARD, BELL = "board", "bell"
_LOOK_S = 0.1
_WINDOW_S = 1.0
_ROOM_S = 0.2
_START_S = 120.0
_GRACE_S = 2.0
_FAILURES_IN_A_ROW = 5  # of one worker, without a block between them, before we believe that it will not work


@dataclass(frozen=True)
class Plan:
    """What a worker does. Plain data: it travels to workers, and to the agents of other nodes."""

    env: str
    env_config: Mapping[str, Any]
    num_envs: int
    description: Mapping[str, Any]
    """Of the policy, as `model.json` says it."""
    spec: SegmentSpec
    seed: int
    first_version: int
    ahead: int | None
    """How many updates early a block may be made; None: any time, with whatever is newest."""
    slots: int
    """Blocks that a worker may have waiting."""
    hang_s: float = 60.0
    restart: Restart = field(default_factory=lambda: Restart(limit=None))
    forgiving: bool = False
    explore: bool = True
    device: str = "cpu"
    self_play: SelfPlayConfig = field(default_factory=SelfPlayConfig)
    run: str = ""
    """Its directory, which is not on every machine; empty: nobody needs it."""
    clock: VersionClock | None = None
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    wrappers: WrapperList = ()
    luggage: Luggage = field(default_factory=Luggage)
    """What `env` means, if that is a function of the user's script."""

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.spec, self.num_envs)


@dataclass(frozen=True)
class WorkerReport:
    """How a worker is doing."""

    state: str
    pid: int | None
    restarts: int
    error: str
    notes: tuple[float, ...]

    def note(self, name: str) -> float:
        return self.notes[NOTES.index(name)]


class Node(Protocol):
    """A machine on which workers run."""

    name: str
    cores: int
    lost: str
    """Why it was given up; empty while it lives."""

    def start(self, index: int, begin: int) -> None:
        """Start worker `index`; its next block is number `begin`."""
        ...

    def stop(self, index: int) -> None: ...

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        """New weights for all workers of the node. Does not wait for them."""
        ...

    def take(self, index: int) -> Segments | None:
        """The next block of that worker, in order. Never waits."""
        ...

    def release(self, index: int, block: Segments) -> None: ...

    def workers(self) -> Mapping[int, WorkerReport]: ...

    def close(self) -> None: ...


class Nodes(Protocol):
    """The machines there are at the moment."""

    def current(self) -> list[Node]:
        """Those that live. Cheap; called ten times a second. Raises WorkerFailed when the cluster itself is gone."""
        ...

    def close(self) -> None: ...


# -- in a worker --------------------------------------------------------------------------------------------------------


class BoardSource:
    """The newest weights of a board, in a policy of this process."""

    def __init__(self, policy: Policy, reader: SharedWeightsReader) -> None:
        self._policy, self._reader = policy, reader
        self._version = 0

    @property
    def published(self) -> int:
        """The newest version there is, loaded or not. One memory read."""
        return self._reader.version

    def newest(self) -> tuple[Policy, int]:
        if self._reader.version != self._version:
            self._version = self._reader.load_into(self._policy)
        return self._policy, self._version


def _sample(context: Context, plan: Plan, index: int, begin: int, directory: Path, bell: Path) -> None:
    """A worker's life. Ends by SIGTERM, which raises SystemExit wherever it is."""
    torch.set_num_threads(1)
    keep_freed_memory()
    plan.luggage.unpack()
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(contextlib.closing(SharedWriter(_ring(directory, index), plan.layout, bell)))
        reader = SharedWeightsReader(directory / BOARD)
        source = BoardSource(
            copy_for_acting(serialization.policy_from(dict(plan.description)), torch.device(plan.device)), reader
        )
        environments = make_environments(
            plan.env, plan.num_envs, plan.env_config,
            preprocess=plan.preprocess, wrappers=plan.wrappers, forgiving=plan.forgiving,
        )  # fmt: skip
        stack.callback(environments.close)
        environments.beat = context.beat
        seed = _seed(plan, index, begin + memory.committed, context.incarnation)
        first_row = index * plan.num_envs
        facing = with_past_opponents(environments, source, plan.self_play, seed, Path(plan.run) if plan.run else None)
        notes, before = memory.notes, list(memory.notes)
        blocked_s = weights_s = 0.0
        made = 0

        def write_notes() -> None:
            times = sampler.times
            spent = (times.environment_s, times.policy_s, blocked_s, weights_s)
            for i, value in enumerate((times.steps, made, *spent, environments.restarts)):
                notes[i] = before[i] + value

        def beat() -> None:
            context.beat()
            write_notes()  # a segment may take minutes: the node must see the steps before it is whole

        sampler = Sampler(
            environments, facing, memory, seed,
            first_row=first_row, interruption=Interruption(beat), explore=plan.explore,
            timesteps=None if plan.clock is None else plan.clock.timesteps,
        )  # fmt: skip
        context.ready()
        while True:
            block = begin + memory.committed
            weights_s += _wait_for_weights(context, source, plan, block)
            asked = time.perf_counter()
            spent = sampler.times.environment_s + sampler.times.policy_s
            context.beat()
            made += sampler.step(_ROOM_S)
            spent = sampler.times.environment_s + sampler.times.policy_s - spent
            blocked_s += max(0.0, time.perf_counter() - asked - spent)
            write_notes()


def _seed(plan: Plan, index: int, block: int, incarnation: int) -> int:
    """Environments of different workers have seeds of their own; whoever comes later does not repeat what was sampled before."""
    if block == 0 and incarnation == 1:
        return (plan.seed + index * plan.num_envs) % (1 << 30)
    return int(np.random.SeedSequence((plan.seed, index, block, incarnation)).generate_state(1)[0]) % (1 << 30)


def _wait_for_weights(context: Context, source: BoardSource, plan: Plan, block: int) -> float:
    """Until the weights for that block are there; returns the seconds."""
    needed = plan.first_version + block - plan.ahead if plan.ahead is not None else plan.first_version
    if source.published >= needed:
        return 0.0
    began, polls = time.perf_counter(), Backoff(0.0001, 0.001, factor=1.5)
    while source.published < needed:
        context.beat()
        time.sleep(polls.next_delay())
    return time.perf_counter() - began


def _ring(directory: Path, index: int) -> Path:
    return directory / f"worker-{index}.ring"


# -- on a node ----------------------------------------------------------------------------------------------------------


class LocalNode:
    """Workers on this machine: supervised processes, a ring for each, and a board with the newest weights."""

    def __init__(
        self,
        plan: Plan,
        bell: Path | None = None,
        *,
        log_dir: Path | None = None,
        name: str = "here",
        worker_name: Callable[[int], str] = "sampler-{}".format,
    ) -> None:
        """`worker_name`: of its process, and of its log."""
        self.name, self.cores, self.lost = name, usable_cores(), ""
        self._plan, self._worker_name = plan, worker_name
        self._scratch = Scratch(shared_memory())
        self._supervisor = Supervisor(log_dir=log_dir, preload=_PRELOAD)
        self._processes: dict[int, Process] = {}
        self._readers: dict[int, SharedReader] = {}
        self._issued: dict[int, SharedReader] = {}
        """Which ring a block came from, as long as it is held: its worker may have another one by then."""
        self._begins: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._started: dict[int, float] = {}
        try:
            self.bell = bell or self._scratch.path / BELL
            """Rung when a worker has made a block."""
            if bell is None:
                Wakeup.create(self.bell).close()
            self._board = SharedWeights(self._scratch.path / BOARD)
        except BaseException:
            self.close()
            raise

    def start(self, index: int, begin: int) -> None:
        ring = _ring(self._scratch.path, index)
        create_ring(ring, ring_capacity(self._plan.layout, self._plan.slots))
        self._readers[index] = SharedReader(ring, self._plan.layout)
        self._begins[index] = begin
        self._run(index)
        self._first[index] = self._processes[index].incarnation

    def _run(self, index: int) -> None:
        self._processes[index] = self._supervisor.start(
            self._worker_name(index),
            _sample,
            self._plan,
            index,
            self._begins[index],
            self._scratch.path,
            self.bell,
            restart=self._plan.restart,
            hang_s=self._plan.hang_s,
        )
        self._started[index] = time.monotonic()

    def stop(self, index: int) -> None:
        process = self._processes.pop(index, None)
        if process is not None:
            process.stop(_GRACE_S)
        reader = self._readers.pop(index, None)
        if reader is not None:
            self._issued = {block: own for block, own in self._issued.items() if own is not reader}
            reader.close()
            for path in self._scratch.path.glob(f"{_ring(self._scratch.path, index).name}*"):  # its bells, too
                path.unlink(missing_ok=True)

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        self._board.publish(version, weights)

    def take(self, index: int) -> Segments | None:
        reader = self._readers.get(index)
        block = None if reader is None else reader.take()
        if block is not None and reader is not None:
            self._issued[id(block)] = reader
        return block

    def release(self, index: int, block: Segments) -> None:
        reader = self._issued.pop(id(block), None)
        if reader is not None:
            reader.release(block)

    def workers(self) -> dict[int, WorkerReport]:
        now = time.monotonic()
        reports = {}
        for index, process in list(self._processes.items()):
            if process.state != "starting":
                self._started[index] = now
            elif now - self._started[index] > _START_S:
                log.error("%s has not started for %.0f s: it is killed", process.name, _START_S)
                self._started[index] = now
                process.kill()
            if process.state == "done":  # the environment has ended the process, and said that all was well
                log.warning("%s ended by itself; it is started again", process.name)
                self._run(index)
            notes = tuple(self._readers[index].ring.notes[: len(NOTES)])
            reports[index] = WorkerReport(
                process.state, process.pid, process.incarnation - self._first[index], process.error, notes
            )
        return reports

    def close(self) -> None:
        self._supervisor.close(_GRACE_S)
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._scratch.close()


_PRELOAD = ("numpy", "torch", "gymnasium", "ludus.distributed.sampling_pool")


class ThisNode:
    """The nodes of a run that was not pointed at a cluster."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def current(self) -> list[Node]:
        return [self._node]

    def close(self) -> None:
        self._node.close()


# -- where the learner is -----------------------------------------------------------------------------------------------

Latest = Callable[[], tuple[int, Mapping[str, Array]]]
"""The newest version and its weights."""


class Sampling:
    """All workers of a run. `step()` waits until there is a batch, or a moment has passed, and sees to whoever is missing."""

    def __init__(
        self, make_nodes: Callable[[Path], Nodes], workers: int, latest: Latest, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._workers, self._latest, self._clock = workers, latest, clock
        self._at: dict[int, Node] = {}
        self._known: dict[str, Node] = {}
        self._expected = [0] * workers
        self._issued: dict[int, Node] = {}
        self._reports: dict[int, WorkerReport] = {}
        self._past: dict[int, tuple[float, ...]] = {}
        self._past_restarts = dict.fromkeys(range(workers), 0)
        self._failures: dict[int, tuple[int, int]] = {}
        self._looked_at = -_LOOK_S
        self._waited_s = 0.0
        self._window = Window()
        self._taken_there = [0] * workers
        self._taken_steps = self._block_steps = 0
        self.lost_nodes = self.lost_blocks = 0
        self._status: dict[str, Any] = {"nodes": [], "workers": []}
        self.batches: BlockBatches | None = None
        self._scratch = Scratch(shared_memory())
        try:
            bell = self._scratch.path / BELL
            self._bell = Wakeup.create(bell)
            self._nodes = make_nodes(bell)
            self._look()
        except BaseException:
            self.close()
            raise

    # -- for the program

    def step(self) -> bool:
        began = self._clock()
        if self.batches is not None and not self.batches.ready():
            self._bell.wait(_LOOK_S)
            self._waited_s += self._clock() - began
        if self._clock() - self._looked_at >= _LOOK_S:
            self._look()
        return True

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        for node in self._known.values():
            if not node.lost:
                node.publish(version, weights)

    def take_block(self, worker: int) -> Segments | None:
        node = self._at.get(worker)
        block = None if node is None else node.take(worker)
        if block is not None and node is not None:
            self._issued[id(block)] = node
            self._expected[worker] += 1
            self._taken_there[worker] += 1
            self._block_steps = block.rows * block.spec.steps
            self._taken_steps += self._block_steps
        return block

    def release_block(self, worker: int, block: Segments) -> None:
        node = self._issued.pop(id(block), None)
        if node is not None:
            node.release(worker, block)

    # -- looking after workers and nodes

    def _look(self) -> None:
        self._looked_at = self._clock()
        living = {node.name: node for node in self._nodes.current() if not node.lost}
        for name, node in list(self._known.items()):
            if living.get(name) is not node:
                self._give_up(name, node)
        if not living:
            raise WorkerFailed("No node is left to sample on.", "Continue with --resume once there is one.")
        for name, node in living.items():
            if name not in self._known:
                version, weights = self._latest()
                node.publish(version, weights)
                self._known[name] = node
        self._place(living)
        for node in living.values():
            self._reports.update(node.workers())
        self._judge()
        self._status = self._seen_now()

    def _give_up(self, name: str, node: Node) -> None:
        log.warning("the node %s is lost (%s); its workers start elsewhere", name, node.lost or "it left")
        self.lost_nodes += 1
        del self._known[name]
        for worker in [worker for worker, at in self._at.items() if at is node]:
            self._move_out(worker)

    def _place(self, living: Mapping[str, Node]) -> None:
        """Decide where every worker should be, and bring it there."""
        now = {worker: node.name for worker, node in self._at.items()}
        then = place(self._workers, {name: node.cores for name, node in living.items()}, now)
        for worker, name in then.items():
            if now.get(worker) == name:
                continue
            if worker in now:
                log.info("worker %d moves from %s to %s", worker, now[worker], name)
                self._at[worker].stop(worker)
                self._move_out(worker)
            living[name].start(worker, self._expected[worker])
            self._taken_there[worker] = 0
            self._at[worker] = living[name]

    def _move_out(self, worker: int) -> None:
        self._at.pop(worker)
        self._failures.pop(worker, None)
        report = self._reports.pop(worker, None)
        if report is not None:  # the next one counts from 0
            before = self._past.get(worker, (0.0,) * len(NOTES))
            self._past[worker] = tuple(a + b for a, b in zip(before, report.notes, strict=True))
            self._past_restarts[worker] += report.restarts
            self.lost_blocks += max(0, int(report.note("blocks")) - self._taken_there[worker])

    def _judge(self) -> None:
        """A worker that dies again and again without having made anything will never work: say why, and end."""
        for worker, report in self._reports.items():
            if report.state == "failed":
                raise self._failed(worker, report)
            blocks, restarts = self._failures.get(worker, (-1, 0))
            if report.note("blocks") > blocks:
                self._failures[worker] = (int(report.note("blocks")), report.restarts)
            elif report.restarts - restarts >= _FAILURES_IN_A_ROW:
                raise self._failed(worker, report)

    def _failed(self, worker: int, report: WorkerReport) -> WorkerFailed | EnvironmentFault:
        last = _last_line(report.error) or "it died"
        kind, _, what = last.partition(": ")
        if kind.endswith("EnvironmentFault"):
            return EnvironmentFault(what)
        return WorkerFailed(
            f"Worker {worker} fails again and again: {last.rstrip('.')}.", "Its log is in the run's logs/sampler."
        )

    # -- what there is to say

    def _totals(self) -> dict[str, float]:
        totals = dict.fromkeys(NOTES, 0.0)
        for source in (self._past, {worker: report.notes for worker, report in self._reports.items()}):
            for notes in source.values():
                for name, value in zip(NOTES, notes, strict=True):
                    totals[name] += value
        return totals

    @property
    def restarts(self) -> int:
        return sum(report.restarts for report in self._reports.values()) + sum(self._past_restarts.values())

    def metrics(self) -> dict[str, float]:
        """Rates and shares are those of the last second, or of what has passed since the last call if that is more."""
        seconds, new = self._window.since(self._clock(), self._totals() | {"waited_s": self._waited_s})
        spent = sum(new[name] for name in ("environment_s", "policy_s", "blocked_s", "weights_wait_s"))
        everyone = max(max(seconds, 1e-9) * self._workers, spent)  # counters come with whole segments: shares add up to 1 at most
        ready = sum(report.state == "ready" for report in self._reports.values())
        numbers = {
            "sampler/workers": float(ready),
            "sampler/nodes": float(len(self._known)),
            "sampler/fps": new["steps"] / max(seconds, 1e-9),
            "sampler/env_share": new["environment_s"] / everyone,
            "sampler/policy_share": new["policy_s"] / everyone,
            "sampler/blocked_share": new["blocked_s"] / everyone,
            "sampler/weights_wait_share": new["weights_wait_s"] / everyone,
            "sampler/restarts": float(self.restarts),
            "sampler/env_restarts": self._totals()["env_restarts"],
            "sampler/lost_nodes": float(self.lost_nodes),
            "sampler/lost_blocks": float(self.lost_blocks),
            "learner/wait_share": min(1.0, new["waited_s"] / max(seconds, 1e-9)),
        }
        if self.batches is not None:
            dropped = float(self.batches.dropped)
            numbers |= {"memory/waiting": float(self.batches.waiting), "learner/dropped_lag": dropped}
        return numbers

    def has_sampled(self) -> bool:
        return self._totals()["steps"] > 0

    def awaited(self) -> str:
        states = ", ".join(
            f"worker {worker} is {report.state}" + (f" ({_last_line(report.error)})" if report.error.strip() else "")
            for worker, report in sorted(self._reports.items())
        )
        return f"the first step of {self._workers} workers: {states or 'none was started'}"

    def unlearned_steps(self) -> int:
        waiting = 0 if self.batches is None else self.batches.waiting
        return max(0, int(self._totals()["steps"]) - self._taken_steps + waiting * self._block_steps)

    def status(self) -> dict[str, Any]:
        """Who runs where and how, as plain values. May be called by any thread: it is what was last seen."""
        return self._status

    def _seen_now(self) -> dict[str, Any]:
        workers = [
            {
                "worker": worker,
                "node": self._at[worker].name,
                "state": report.state,
                "pid": report.pid,
                "restarts": report.restarts + self._past_restarts[worker],
                "error": _last_line(report.error),
                **dict(zip(NOTES, report.notes, strict=True)),
            }
            for worker, report in sorted(self._reports.items())
            if worker in self._at
        ]
        # Made anew each time and never changed: another thread may be writing it to a file.
        return {"nodes": [{"name": n.name, "cores": n.cores} for n in self._known.values()], "workers": workers}

    def state(self) -> dict[str, Array]:
        return {}  # environments and their random numbers start anew with the workers

    def load_state(self, state: dict[str, Array]) -> None:
        pass

    def close(self) -> None:
        nodes, bell = getattr(self, "_nodes", None), getattr(self, "_bell", None)
        for part in (nodes, bell, self._scratch):
            if part is not None:
                part.close()


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


class Window:
    """What was added to totals in the latest stretch of a second or more."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._before: dict[str, float] = {}
        self._latest: tuple[float, dict[str, float]] | None = None

    def since(self, now: float, totals: dict[str, float]) -> tuple[float, dict[str, float]]:
        if self._at is None:
            self._at, self._before = now, totals
            return 0.0, dict.fromkeys(totals, 0.0)
        seconds = now - self._at
        new = {name: value - self._before[name] for name, value in totals.items()}
        if seconds < _WINDOW_S:
            return self._latest or (seconds, new)
        self._at, self._before, self._latest = now, totals, (seconds, new)
        return self._latest
