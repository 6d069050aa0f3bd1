"""The agent of a machine: runs workers there for a learner on another machine and sends it their blocks in bundles.

Independent of Ray: `ray_nodes.py` places an agent on each machine and calls it. The learner must keep calling: an agent without
calls for `ORPHAN_S` ends its workers and itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

import ludus
from ludus.core.tree import Array, copy_into
from ludus.core.types import Segments
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import LocalNode, SamplingNode, WorkerReport
from ludus.launch.doctor.checks.graphics import require_screen
from ludus.process.temp_dirs import TempDir
from ludus.ray_cluster.cluster import NODE_LOG_DIR
from ludus.transport.ring_buffer import Wakeup
from ludus.transport.shared_memory import BlockLayouts

log = logging.getLogger(__name__)

BUNDLE_BYTES = 1 << 20
"""A bundle is sent when it has this many bytes: the overhead of Ray per object is then small."""

MAX_BUNDLE_BYTES = 16 << 20
"""Maximum size of a bundle, unless a single block is larger: object stores are small, and the network is shared."""

LINGER_S = 0.02
"""A smaller bundle is sent this long after its first block."""

ORPHAN_S = 30.0
_REPORT_S = 0.25
_TAIL_BYTES = 4000
_EPISODES = ("episode_return", "episode_length")

Bytes = npt.NDArray[np.uint8]


class WakeupNode(SamplingNode, Protocol):
    """A node whose workers notify `wakeup` when they have made a block."""

    wakeup: Path


NodeFactory = Callable[[SamplingPlan, Path | None, str], WakeupNode]
"""(plan, log directory, name) → the node that an agent runs."""


def local_node(plan: SamplingPlan, log_dir: Path | None, name: str) -> WakeupNode:
    return LocalNode(plan, log_dir=log_dir, name=name, worker_name=worker_name)


def worker_name(index: int) -> str:
    """Name of a worker's process and log on this machine."""
    return f"actor_{index}" if os.environ.get(NODE_LOG_DIR) else f"sampler-{index}"


@dataclass(frozen=True)
class Bundle:
    """Description of the blocks in a bundle, in order, and the state of the workers."""

    blocks: tuple[tuple[int, int], ...] = ()
    """(worker, life) of each block: a life begins with each `start` of that worker."""
    reports: Mapping[int, tuple[int, WorkerReport]] | None = None
    tails: tuple[tuple[int, str], ...] = ()
    """Last log lines of failed workers, if the learner cannot read the logs themselves."""


class _Failures:
    """Failures of workers that were reported before."""

    def __init__(self) -> None:
        self._reported: dict[int, tuple[int, int, bool]] = {}

    def new(self, reports: Mapping[int, tuple[int, WorkerReport]]) -> list[int]:
        """Workers that failed since the last call. (The restart count of a worker that was started again may not begin at 0.)"""
        now = {i: (life, report.restarts, report.state == "failed") for i, (life, report) in reports.items()}
        failed = []
        for index, (life, restarts, over) in now.items():
            known = self._reported.get(index)
            if known is None or known[0] != life:
                known = (life, restarts, False)
            if restarts > known[1] or over > known[2]:
                failed.append(index)
        self._reported = now
        return failed


class NodeAgent:
    """One thread at a time calls `next_bundle`; another one calls everything else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._node: WakeupNode | None = None
        self._lives: dict[int, int] = {}
        self._turn = 0
        self._called_at = time.monotonic()
        self._closed = threading.Event()
        self._reported_at = 0.0
        self._failures = _Failures()
        self._readable_logs: Path | None = None
        self._private_logs: TempDir | None = None
        threading.Thread(target=self._exit_when_orphaned, name="orphan-watch", daemon=True).start()

    def hello(self) -> dict[str, str]:
        """Versions of this process; the learner compares them before it sends objects that need the same code."""
        return {"ludus": ludus.__version__, "python": platform.python_version(), "pid": str(os.getpid())}

    def open(self, plan: SamplingPlan, make: NodeFactory, log_dir: str | None, mark: str) -> None:
        """Prepare to start workers. Logs go below `log_dir` if its file `mark` is visible from here.

        Raises WorkerFailed if the environments would find no working screen here.
        """
        self._called_at = time.monotonic()
        require_screen(plan.display, plan.env, plan.env_config)
        self._layouts = plan.layouts
        self._alternates = plan.ahead is not None
        self._min_blocks = max(1, -(-BUNDLE_BYTES // self._layouts.nbytes))
        self._max_blocks = max(1, MAX_BUNDLE_BYTES // self._layouts.nbytes)
        node = make(plan, self._log_dir(log_dir, mark), self._name)
        self._wakeup = Wakeup(node.wakeup)
        self._node = node

    def _log_dir(self, log_dir: str | None, mark: str) -> Path:
        own = os.environ.get(NODE_LOG_DIR)
        if own:
            with contextlib.suppress(OSError):  # as below
                Path(own).mkdir(parents=True, exist_ok=True)
                self._readable_logs = Path(own)
                return self._readable_logs
        if log_dir is not None and (Path(log_dir) / mark).exists():
            shared = Path(log_dir) / self._name
            with contextlib.suppress(OSError):  # visible, but not writable
                shared.mkdir(exist_ok=True)
                return shared
        self._private_logs = TempDir(Path(tempfile.gettempdir()))
        self._readable_logs = self._private_logs.path
        return self._readable_logs

    # -- control

    def start(self, index: int, begin: int, life: int) -> None:
        with self._lock:
            assert self._node is not None
            self._node.start(index, begin)
            self._lives[index] = life

    def stop(self, index: int) -> None:
        with self._lock:
            assert self._node is not None
            self._lives.pop(index, None)
            self._node.stop(index)

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        with self._lock:
            assert self._node is not None
            self._node.publish(version, weights)

    def close(self) -> None:
        """End the workers."""
        self._closed.set()
        with self._lock:
            node, self._node = self._node, None
        if node is not None:
            node.close()
        if self._private_logs is not None:
            self._private_logs.close()

    # -- data

    def next_bundle(self, most: int, timeout_s: float) -> tuple[Bundle, Bytes]:
        """Return up to `most` blocks as soon as there are enough of them or the first has waited LINGER_S.

        After `timeout_s` it returns what there is, even nothing: a reply shows that the agent is alive.
        """
        self._called_at = now = time.monotonic()
        deadline, due = now + timeout_s, now + timeout_s
        size, most = self._layouts.nbytes, min(most, self._max_blocks)
        room: Bytes = np.empty(most * size, np.uint8)  # pages that are never written take no memory
        blocks: list[tuple[int, int]] = []
        while True:
            had = len(blocks)
            if self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):  # not available while a worker is stopped
                try:
                    self._take_blocks(room, blocks, most)
                    workers = set(self._lives)
                finally:
                    self._lock.release()
                if blocks and not had:
                    due = min(deadline, time.monotonic() + LINGER_S)
                # Workers that alternate with the learner make one block and wait: once all have, waiting for more is useless.
                all_waiting = self._alternates and workers and {index for index, _ in blocks} >= workers
                if all_waiting or len(blocks) >= min(most, self._min_blocks):
                    break
            now = time.monotonic()
            if now >= due:
                break
            self._wakeup.wait(due - now)
        return self._bundle(blocks), room[: len(blocks) * size]

    def _take_blocks(self, room: Bytes, blocks: list[tuple[int, int]], most: int) -> None:
        """Take one block of each worker in turn, so that a fast one does not fill the bundle alone."""
        if self._node is None:
            return
        size, workers = self._layouts.nbytes, list(self._lives)
        idle = 0
        while workers and len(blocks) < most and idle < len(workers):
            index = workers[self._turn % len(workers)]
            self._turn += 1
            block = self._node.take(index)
            if block is None:
                idle += 1
                continue
            idle = 0
            at = len(blocks) * size
            pack(self._layouts, block, room.data[at : at + size])
            self._node.release(index, block)
            blocks.append((index, self._lives[index]))

    def _bundle(self, blocks: list[tuple[int, int]]) -> Bundle:
        now = time.monotonic()
        if now < self._reported_at + _REPORT_S or not self._lock.acquire(timeout=_REPORT_S):
            return Bundle(tuple(blocks))
        try:
            self._reported_at = now
            reports = dict(self._node.workers()) if self._node is not None else {}
            lives = dict(self._lives)
        finally:
            self._lock.release()
        current = {i: (lives[i], report) for i, report in reports.items() if i in lives}
        failed = self._failures.new(current)
        tails = tuple((index, self._tail(index)) for index in failed) if self._readable_logs is not None else ()
        return Bundle(tuple(blocks), current, tails)

    def _tail(self, index: int) -> str:
        assert self._readable_logs is not None
        try:
            with open(self._readable_logs / f"{worker_name(index)}.log", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    # -- orphaned agents

    def _exit_when_orphaned(self) -> None:
        while time.monotonic() < self._called_at + ORPHAN_S:
            if self._closed.wait(1.0):
                return
        log.error("no learner has called for %.0f s: the agent of %s ends", ORPHAN_S, self._name)
        try:
            self.close()
        finally:
            os._exit(1)  # the workers die with this process


def pack(layouts: BlockLayouts, block: Segments, buffer: memoryview) -> None:
    """Copy a block into a record."""
    layout = layouts.of(block.model)
    target = layout.views(buffer).arrays()
    for name, tree in block.arrays().items():
        if name not in _EPISODES:
            copy_into(target[name], tree)
    layout.seal(block, buffer)


def unpack(layouts: BlockLayouts, count: int, data: Bytes) -> list[Segments]:
    """Blocks of a bundle: read-only views of its bytes, which they keep alive. Raises Damaged."""
    size = layouts.nbytes
    records = [data.data[i * size : (i + 1) * size] for i in range(count)]
    return [layouts.written_in(record).load(record) for record in records]
