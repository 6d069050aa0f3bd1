"""Sampling in worker processes, on this node and on others.

    learner ──weights──▶ board of each node ──▶ workers ──blocks──▶ one ring per worker ──▶ batches ──▶ learner

Each worker numbers its blocks 0, 1, 2 …. It begins block k when the weights for it are available; with `ahead` 0 that is after k
updates, so that sampling and learning alternate and a run is bit-reproducible.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.distributed.placement import place
from ludus.distributed.sampling_plan import COUNTERS, MATCH_COUNTERS, WEIGHTS, SamplingPlan, ring_path
from ludus.distributed.sampling_worker import sample
from ludus.errors import EnvironmentFault, WorkerFailed
from ludus.models.weights.shared_weights import SharedWeights
from ludus.process.host import usable_cores
from ludus.process.temp_dirs import TempDir, shared_memory_dir
from ludus.process.workers.supervisor import Process, Supervisor
from ludus.transport.ring_buffer import Wakeup, create_ring
from ludus.transport.shared_memory import SharedReader, ring_capacity

log = logging.getLogger(__name__)

_SHARES = {"env": "environment_s", "policy": "policy_s", "blocked": "blocked_s", "weights_wait": "weights_wait_s"}
WAKEUP = "wakeup"
_UPDATE_S = 0.1
_WINDOW_S = 1.0
_START_S = 120.0
_GRACE_S = 2.0
_FAILURES_IN_A_ROW = 5  # of one worker, without a block in between, before the run fails


@dataclass(frozen=True)
class WorkerReport:
    """State of a worker."""

    state: str
    pid: int | None
    restarts: int
    error: str
    counters: tuple[float, ...]

    def counter(self, name: str) -> float:
        return self.counters[COUNTERS.index(name)]


class SamplingNode(Protocol):
    """A machine on which workers run."""

    name: str
    cores: int
    lost: str
    """Why it was given up; empty while it is usable."""

    def start(self, index: int, begin: int) -> None:
        """Start worker `index`; its next block is number `begin`."""
        ...

    def stop(self, index: int) -> None: ...

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        """Send new weights to all workers of the node. Does not wait for them."""
        ...

    def take(self, index: int) -> Segments | None:
        """The next block of that worker, in order. Never blocks."""
        ...

    def release(self, index: int, block: Segments) -> None: ...

    def workers(self) -> Mapping[int, WorkerReport]: ...

    def close(self) -> None: ...


class SamplingNodes(Protocol):
    """The machines that are currently available."""

    def current(self) -> list[SamplingNode]:
        """Usable nodes. Cheap; called ten times a second. Raises WorkerFailed when the cluster itself is lost."""
        ...

    def close(self) -> None: ...


# -- on a node ----------------------------------------------------------------------------------------------------------


class LocalNode:
    """Workers on this machine: supervised processes, a ring for each, and a board with the newest weights."""

    def __init__(
        self,
        plan: SamplingPlan,
        wakeup: Path | None = None,
        *,
        log_dir: Path | None = None,
        name: str = "here",
        worker_name: Callable[[int], str] = "sampler-{}".format,
    ) -> None:
        """`worker_name`: name of a worker's process and log."""
        self.name, self.cores, self.lost = name, usable_cores(), ""
        self._plan, self._worker_name = plan, worker_name
        self._scratch = TempDir(shared_memory_dir())
        self._supervisor = Supervisor(log_dir=log_dir, preload=_PRELOAD)
        self._processes: dict[int, Process] = {}
        self._readers: dict[int, SharedReader] = {}
        self._issued: dict[int, SharedReader] = {}
        """Ring of each block that is taken and not released; its worker may have a new ring by now."""
        self._begins: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._started: dict[int, float] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.wakeup = wakeup or self._scratch.path / WAKEUP
            """Notified when a worker has made a block."""
            if wakeup is None:
                Wakeup.create(self.wakeup).close()
            self._weights = SharedWeights(self._scratch.path / WEIGHTS)
            undo.pop_all()

    def start(self, index: int, begin: int) -> None:
        ring = ring_path(self._scratch.path, index)
        create_ring(ring, ring_capacity(self._plan.layouts, self._plan.slots * self._plan.blocks_per_update))
        self._readers[index] = SharedReader(ring, self._plan.layouts)
        self._begins[index] = begin
        self._run(index)
        self._first[index] = self._processes[index].incarnation

    def _run(self, index: int) -> None:
        self._processes[index] = self._supervisor.start(
            self._worker_name(index),
            sample,
            self._plan,
            index,
            self._begins[index],
            self._scratch.path,
            self.wakeup,
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
            for path in self._scratch.path.glob(f"{ring_path(self._scratch.path, index).name}*"):  # includes its wake-ups
                path.unlink(missing_ok=True)

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        self._weights.publish(version, weights)

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
                log.error("%s has not started for %.0f s and is killed", process.name, _START_S)
                self._started[index] = now
                process.kill()
            if process.state == "done":  # the environment has called sys.exit(0)
                log.warning("%s ended by itself and is started again", process.name)
                self._run(index)
            counters = tuple(self._readers[index].ring.notes[: len(COUNTERS)])
            reports[index] = WorkerReport(
                process.state, process.pid, process.incarnation - self._first[index], process.error, counters
            )
        return reports

    def close(self) -> None:
        self._supervisor.close(_GRACE_S)
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._scratch.close()


_PRELOAD = ("numpy", "torch", "gymnasium", "ludus.distributed.sampling_worker")


class SingleNode:
    """The only node of a run without a cluster."""

    def __init__(self, node: SamplingNode) -> None:
        self._node = node

    def current(self) -> list[SamplingNode]:
        return [self._node]

    def close(self) -> None:
        self._node.close()


# -- in the learner's process -------------------------------------------------------------------------------------------

Latest = Callable[[], tuple[int, Mapping[str, Array]]]
"""The newest version and its weights."""


class PooledBatches(Protocol):
    """Batches that are made of the blocks of a pool."""

    @property
    def waiting(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    def ready(self) -> bool: ...


@dataclass(frozen=True)
class BlockAccounting:
    """How a pool counts the steps of its blocks, and what it reports besides."""

    count_steps: Callable[[Segments], int] = lambda block: block.rows * block.spec.steps
    """Steps of a block, as its worker counts them. By default those of all rows, also where an environment only resets."""
    more_metrics: Callable[[], dict[str, float]] = dict


class SamplingPool:
    """All workers of a run. `step` waits for a batch, or for _UPDATE_S, and replaces lost workers and nodes."""

    def __init__(
        self,
        make_nodes: Callable[[Path], SamplingNodes],
        workers: int,
        latest: Latest,
        *,
        accounting: BlockAccounting = BlockAccounting(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._latest, self._clock = workers, latest, clock
        self._accounting = accounting
        self._node_of: dict[int, SamplingNode] = {}
        self._nodes_in_use: dict[str, SamplingNode] = {}
        self._expected = [0] * workers
        self._issued: dict[int, SamplingNode] = {}
        self._reports: dict[int, WorkerReport] = {}
        self._past_counters: dict[int, tuple[float, ...]] = {}
        self._past_restarts = dict.fromkeys(range(workers), 0)
        self._failures: dict[int, tuple[int, int]] = {}
        self._updated_at = -_UPDATE_S
        self._waited_s = 0.0
        self._window = RateWindow()
        self._taken_there = [0] * workers
        self._taken_steps = self._block_steps = 0
        self.lost_nodes = self.lost_blocks = 0
        self._status: dict[str, Any] = {"nodes": [], "workers": []}
        self.batches: PooledBatches | None = None
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(contextlib.closing(TempDir(shared_memory_dir())))
            self._wakeup = stack.enter_context(Wakeup.create(scratch.path / WAKEUP))
            self._nodes = stack.enter_context(contextlib.closing(make_nodes(self._wakeup.path)))
            self._update()
            self._resources = stack.pop_all()

    # -- called by the training loop

    def step(self) -> bool:
        began = self._clock()
        if self.batches is not None and not self.batches.ready():
            self._wakeup.wait(_UPDATE_S)
            self._waited_s += self._clock() - began
        if self._clock() - self._updated_at >= _UPDATE_S:
            self._update()
        return True

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        for node in self._nodes_in_use.values():
            if not node.lost:
                node.publish(version, weights)

    def take_block(self, worker: int) -> Segments | None:
        node = self._node_of.get(worker)
        block = None if node is None else node.take(worker)
        if block is not None and node is not None:
            self._issued[id(block)] = node
            self._expected[worker] += 1
            self._taken_there[worker] += 1
            self._block_steps = self._accounting.count_steps(block)
            self._taken_steps += self._block_steps
        return block

    def release_block(self, worker: int, block: Segments) -> None:
        node = self._issued.pop(id(block), None)
        if node is not None:
            node.release(worker, block)

    # -- workers and nodes

    def _update(self) -> None:
        self._updated_at = self._clock()
        usable = {node.name: node for node in self._nodes.current() if not node.lost}
        for name, node in list(self._nodes_in_use.items()):
            if usable.get(name) is not node:
                self._give_up(name, node)
        if not usable:
            raise WorkerFailed("No node is left to sample on.", "Continue with --resume once there is one.")
        for name, node in usable.items():
            if name not in self._nodes_in_use:
                version, weights = self._latest()
                node.publish(version, weights)
                self._nodes_in_use[name] = node
        self._place(usable)
        for node in usable.values():
            self._reports.update(node.workers())
        self._check_failures()
        self._status = self._collect_status()

    def _give_up(self, name: str, node: SamplingNode) -> None:
        log.warning("the node %s is lost (%s); its workers start on other nodes", name, node.lost or "it left")
        self.lost_nodes += 1
        del self._nodes_in_use[name]
        for worker in [worker for worker, at in self._node_of.items() if at is node]:
            self._detach(worker)

    def _place(self, usable: Mapping[str, SamplingNode]) -> None:
        """Decide where each worker runs, and start or move it."""
        now = {worker: node.name for worker, node in self._node_of.items()}
        then = place(self._workers, {name: node.cores for name, node in usable.items()}, now)
        for worker, name in then.items():
            if now.get(worker) == name:
                continue
            if worker in now:
                log.info("worker %d moves from %s to %s", worker, now[worker], name)
                self._node_of[worker].stop(worker)
                self._detach(worker)
            usable[name].start(worker, self._expected[worker])
            self._taken_there[worker] = 0
            self._node_of[worker] = usable[name]

    def _detach(self, worker: int) -> None:
        self._node_of.pop(worker)
        self._failures.pop(worker, None)
        report = self._reports.pop(worker, None)
        if report is not None:  # the counters of the next one begin at 0
            before = self._past_counters.get(worker, (0.0,) * len(COUNTERS))
            self._past_counters[worker] = tuple(a + b for a, b in zip(before, report.counters, strict=True))
            self._past_restarts[worker] += report.restarts
            self.lost_blocks += max(0, int(report.counter("blocks")) - self._taken_there[worker])

    def _check_failures(self) -> None:
        """Raise if a worker has failed for good, or keeps dying without making a block."""
        for worker, report in self._reports.items():
            if report.state == "failed":
                raise self._worker_error(worker, report)
            blocks, restarts = self._failures.get(worker, (-1, 0))
            if report.counter("blocks") > blocks:
                self._failures[worker] = (int(report.counter("blocks")), report.restarts)
            elif report.restarts - restarts >= _FAILURES_IN_A_ROW:
                raise self._worker_error(worker, report)

    def _worker_error(self, worker: int, report: WorkerReport) -> WorkerFailed | EnvironmentFault:
        last = _last_line(report.error) or "it died"
        kind, _, what = last.partition(": ")
        if kind.endswith("EnvironmentFault"):
            return EnvironmentFault(what)
        return WorkerFailed(f"Worker {worker} fails repeatedly: {last.rstrip('.')}.", "Its log is in the run's logs/sampler.")

    # -- status

    def _totals(self) -> dict[str, float]:
        totals = dict.fromkeys(COUNTERS, 0.0)
        for source in (self._past_counters, {worker: report.counters for worker, report in self._reports.items()}):
            for counters in source.values():
                for name, value in zip(COUNTERS, counters, strict=True):
                    totals[name] += value
        return totals

    @property
    def restarts(self) -> int:
        return sum(report.restarts for report in self._reports.values()) + sum(self._past_restarts.values())

    def metrics(self) -> dict[str, float]:
        """Rates and shares of the last second, or of the time since the last call if that is longer."""
        numbers = {
            "sampler/workers": float(sum(report.state == "ready" for report in self._reports.values())),
            "sampler/nodes": float(len(self._nodes_in_use)),
            **self._window.metrics(self._clock(), self._totals() | {"waited_s": self._waited_s}, self._workers),
            "sampler/restarts": float(self.restarts),
            "sampler/lost_nodes": float(self.lost_nodes),
            "sampler/lost_blocks": float(self.lost_blocks),
        }
        totals = self._totals()
        if totals["matches"]:
            numbers |= {name: totals[name] for name in MATCH_COUNTERS}
        if self.batches is not None:
            dropped = float(self.batches.dropped)
            numbers |= {"memory/waiting": float(self.batches.waiting), "learner/dropped_lag": dropped}
        return numbers | self._accounting.more_metrics()

    def has_sampled(self) -> bool:
        return self._totals()["steps"] > 0

    def waiting_for(self) -> str:
        states = ", ".join(
            f"worker {worker} is {report.state}" + (f" ({_last_line(report.error)})" if report.error.strip() else "")
            for worker, report in sorted(self._reports.items())
        )
        return f"the first step of {self._workers} workers: {states or 'none was started'}"

    def unlearned_steps(self) -> int:
        waiting = 0 if self.batches is None else self.batches.waiting
        return max(0, int(self._totals()["steps"]) - self._taken_steps + waiting * self._block_steps)

    def status(self) -> dict[str, Any]:
        """Nodes and workers as last seen, as plain values. Thread-safe."""
        return self._status

    def _collect_status(self) -> dict[str, Any]:
        workers = [
            {
                "worker": worker,
                "node": self._node_of[worker].name,
                "state": report.state,
                "pid": report.pid,
                "restarts": report.restarts + self._past_restarts[worker],
                "error": _last_line(report.error),
                **dict(zip(COUNTERS, report.counters, strict=True)),
            }
            for worker, report in sorted(self._reports.items())
            if worker in self._node_of
        ]
        # A new object each time: another thread may be writing the previous one to a file.
        return {"nodes": [{"name": n.name, "cores": n.cores} for n in self._nodes_in_use.values()], "workers": workers}

    def state(self) -> dict[str, Array]:
        return {}  # environments and their random numbers start anew with the workers

    def load_state(self, state: dict[str, Array]) -> None:
        pass

    def close(self) -> None:
        self._resources.close()


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


class RateWindow:
    """Metrics of workers during the last interval of a second or more, from the totals of their COUNTERS."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before: dict[str, float] = {}
        self._latest: tuple[float, dict[str, float]] | None = None

    def metrics(self, now: float, totals: dict[str, float], workers: int) -> dict[str, float]:
        """`totals`: of the COUNTERS, and of the seconds that the learner waited (`waited_s`)."""
        seconds, new = self._increase(now, totals)
        seconds = max(seconds, 1e-9)
        # Counters arrive with whole segments: the sum of shares is limited to 1.
        available_s = max(seconds * workers, sum(new[counter] for counter in _SHARES.values()))
        return {
            "sampler/fps": new["steps"] / seconds,
            **{f"sampler/{name}_share": new[counter] / available_s for name, counter in _SHARES.items()},
            "sampler/env_restarts": totals["env_restarts"],
            "learner/wait_share": min(1.0, new["waited_s"] / seconds),
        }

    def _increase(self, now: float, totals: dict[str, float]) -> tuple[float, dict[str, float]]:
        if self._since is None:
            self._since, self._before = now, totals
            return 0.0, dict.fromkeys(totals, 0.0)
        seconds = now - self._since
        new = {name: value - self._before[name] for name, value in totals.items()}
        if seconds < _WINDOW_S:
            return self._latest or (seconds, new)
        self._since, self._before, self._latest = now, totals, (seconds, new)
        return self._latest
