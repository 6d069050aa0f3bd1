"""The machines of a Ray cluster as nodes for sampling: an agent on each, given up when silent, found again when it returns.

All state changes happen in one thread, the state thread; other threads queue calls for it: the learner its requests, Ray the
replies of agents. Blocking calls to the head (GCS) of the cluster run in a second thread, `GcsThread`. The learner never waits for
the network.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ludus
from ludus.core.backoff import Backoff
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.distributed.gcs_thread import GcsThread, StallAwareClock
from ludus.distributed.node_agent import BUNDLE_BYTES, Bundle, Bytes, NodeAgent, NodeFactory, local_node, unpack
from ludus.distributed.sampling_plan import COUNTERS, SamplingPlan
from ludus.distributed.sampling_pool import LocalNode, SamplingNode, WorkerReport
from ludus.distributed.watched_thread import WatchedThread
from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.launch.doctor.checks.graphics import require_screen
from ludus.ray_cluster.cluster import Cluster
from ludus.ray_cluster.membership import Member
from ludus.transport.ring_buffer import Wakeup

log = logging.getLogger(__name__)

START_S = 60.0

_POLL_S = 0.5
_TICK_S = 0.1
_MAX_CALLS = 2
_CLOSE_S = 5.0
_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 30.0

DATA, CONTROL = "data", "control"


@dataclass(frozen=True)
class RayTimeouts:
    """Time limits in seconds."""

    silent_s: float = 8.0
    """An agent without a reply for this long is given up, whatever Ray reports."""
    head_s: float = 10.0
    """Silence of the head after which the cluster counts as lost."""
    start_s: float = START_S
    """For the first usable node."""
    others_s: float = 5.0
    """For the other nodes once there is a usable one; later ones join during training."""


class RaySamplingNode:
    """One machine of the cluster, seen by the learner. `start` … `close` are called by one thread; see `SamplingNode`."""

    def __init__(self, owner: RayNodes, member: Member, name: str) -> None:
        self.name, self.cores, self.lost = name, member.cores, ""
        self.id = member.id
        self.agent: Any = None
        self.ready = False
        self.created_at = owner.now()
        self.calls: deque[tuple[float, int]] = deque()
        """Pending requests for bundles: (time of the request, maximum number of blocks)."""
        self.requested_at = 0.0
        self.published = self.wanted = 0
        self.publishing = self.held_back = False
        self._owner = owner
        self._lives: dict[int, int] = {}
        self._waiting: dict[int, deque[Segments]] = {}
        self._count = 0
        self._reports: dict[int, tuple[int, WorkerReport]] = {}
        self._refused: dict[int, tuple[int, WorkerReport]] = {}
        """Workers that the agent could not start, which its reports do not contain."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<RaySamplingNode {self.name} {self.lost or ('ready' if self.ready else 'starting')}>"

    def start(self, index: int, begin: int) -> None:
        with self._lock:
            life = self._lives[index] = self._owner.next_life()
            self._drop(index)
        self._owner.submit(lambda: self._owner.start_worker(self, index, begin, life), self)

    def stop(self, index: int) -> None:
        with self._lock:
            self._lives.pop(index, None)
            self._drop(index)
        self._owner.submit(lambda: self._owner.call(self, CONTROL, "stop", index), self)

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        self._owner.offer_weights(version, weights)
        self._owner.submit(lambda: self._owner.send_weights(self, version), self)

    def take(self, index: int) -> Segments | None:
        with self._lock:
            waiting = self._waiting.get(index)
            if not waiting:
                return None
            block = waiting.popleft()
            self._count -= 1
        if self.held_back:
            self.held_back = False
            self._owner.submit(lambda: self._owner.request_bundles(self), self)
        return block

    def release(self, index: int, block: Segments) -> None:
        """Nothing to do: the memory of a bundle is freed with the last of its blocks."""

    def workers(self) -> dict[int, WorkerReport]:
        with self._lock:
            known = self._reports | self._refused
            return {i: report for i, (life, report) in known.items() if self._lives.get(i) == life}

    def close(self) -> None:
        self._owner.submit(lambda: self._owner.give_up(self, "it was closed"), self)

    # -- called by the state thread

    def next_bundle_blocks(self, slots: int, block_bytes: int) -> int:
        """Maximum number of blocks for the next bundle: 0 or less until the learner has taken some of those waiting."""
        with self._lock:
            limit = max_blocks_ahead(len(self._lives), slots, block_bytes)
            left = limit - self._count - sum(blocks for _, blocks in self.calls)
            return min(left, -(-limit // _MAX_CALLS))  # so that another bundle can be requested while one is in flight

    def deliver(self, bundle: Bundle, blocks: list[Segments]) -> None:
        """Queue the blocks; those of workers that were stopped or restarted meanwhile are dropped."""
        with self._lock:
            for (index, life), block in zip(bundle.blocks, blocks, strict=True):
                if self._lives.get(index) == life:
                    self._waiting.setdefault(index, deque()).append(block)
                    self._count += 1
            if bundle.reports is not None:
                self._reports = dict(bundle.reports)

    def set_refused(self, index: int, life: int, why: str) -> None:
        """Record a worker that could not be started."""
        with self._lock:
            self._refused[index] = life, WorkerReport("failed", None, 0, why, (0.0,) * len(COUNTERS))

    def _drop(self, index: int) -> None:
        self._refused.pop(index, None)
        self._count -= len(self._waiting.pop(index, ()))


def max_blocks_ahead(workers: int, slots: int, block_bytes: int) -> int:
    """Number of blocks of a node that may wait here or be in flight. Up to twice the slots if tiny blocks do not fill a bundle."""
    return min(max(slots * workers, -(-BUNDLE_BYTES // block_bytes)), 2 * slots * workers)


class _WeightsOutbox:
    """The newest weights, stored in Ray once per version for all nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[int, Mapping[str, Array]] = (0, {})
        self._reference: tuple[int, Any] = (0, None)

    def offer(self, version: int, weights: Mapping[str, Array]) -> None:
        """Copy the weights, once per version: the learner goes on changing them. From any thread."""
        with self._lock:
            if version > self._newest[0]:
                self._newest = version, {name: value.copy() for name, value in weights.items()}

    def reference(self) -> tuple[int, Any]:
        """(version, object reference). From the state thread."""
        import ray

        with self._lock:
            version, weights = self._newest
        if self._reference[0] != version:
            self._reference = version, ray.put(weights)
        return self._reference


class _SharedLogDir:
    """The log directory of the run, with a marker file by which an agent recognizes that it sees the same directory."""

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else path.absolute()
        self.mark = f".seen-{secrets.token_hex(8)}"
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(".seen-*"):  # of a learner that was killed
                left.unlink(missing_ok=True)
            (self.path / self.mark).touch()

    def append(self, node: str, worker: int, text: str) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                (self.path / node).mkdir(exist_ok=True)
                with open(self.path / node / f"sampler-{worker}.log", "a") as file:
                    file.write(text)

    def close(self) -> None:
        if self.path is not None:
            (self.path / self.mark).unlink(missing_ok=True)


class RayNodes:
    """The machines of a cluster; workers on this machine need no agent. Raises WorkerFailed when no machine can be used.

    Ray nodes that share the learner's weights on its machine are not separate machines: their cores are added to this one.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: SamplingPlan,
        wakeup: Path,
        *,
        log_dir: Path | None = None,
        announce: Callable[[str], None] | None = None,
        make: NodeFactory = local_node,
        agent_here: bool = False,
        timeouts: RayTimeouts = RayTimeouts(),  # noqa: B008 - frozen
    ) -> None:
        """`agent_here`: use an agent on this machine too (for tests and comparisons)."""
        self._cluster, self._plan, self._make, self._timeouts = cluster, plan, make, timeouts
        self._layouts = plan.layouts
        self._agents = _agents()
        self._announce = announce or (lambda sentence: None)
        self._agent_here = agent_here
        self.now = StallAwareClock().now
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], RaySamplingNode | None]] = queue.SimpleQueue()
        self._nodes: dict[str, RaySamplingNode] = {}
        self._retry_at: dict[str, tuple[float, Backoff]] = {}
        """Members whose agent failed: time of the next attempt and the back-off after it."""
        self._unusable: dict[str, str] = {}
        self._failure: tuple[str, str] | None = None
        self._lives = itertools.count(1)
        self._weights = _WeightsOutbox()
        self._closing = threading.Event()
        self._settled = threading.Condition()
        self._members: list[Member] = cluster.members()
        self._logs = _SharedLogDir(log_dir)
        self._wakeup, self._wakeup_path = Wakeup(wakeup), wakeup
        self._own: LocalNode | None = None
        self._own_problem = ""
        """Why no workers run on this machine."""
        self._thread = WatchedThread("ray-state", self._run, self._on_crash)
        self._gcs = GcsThread(
            cluster,
            self.now,
            self._closing,
            on_members=lambda members: self.submit(functools.partial(self._update_members, members)),
            on_crash=self._on_crash,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._check_own_screen()
            self._update_own_node()
            self._thread.start()
            self._gcs.start()
            self._wait_for_agents()
            undo.pop_all()

    def _check_own_screen(self) -> None:
        me = self._own_member()
        if self._agent_here or me is None:
            return
        try:
            require_screen(self._plan.display, self._plan.env, self._plan.env_config)
        except WorkerFailed as error:
            log.warning("no workers on %s: %s", me.host, error)
            self._own_problem = f"{me.host}: {error}"

    def _update_own_node(self) -> None:
        """Run workers on this machine, with the cores of its Ray nodes. Called by the learner's thread, which starts the workers."""
        me = self._own_member()
        if self._agent_here or me is None or self._own_problem:
            return
        cores = (me.cores if me.alive else 0) + sum(member.cores for member in self._members if self._shares_weights(member))
        if self._own is None:
            if cores:
                self._own = LocalNode(self._plan, self._wakeup_path, log_dir=self._logs.path, name=me.host)
                self._own.cores = cores
            return
        if self._own.cores != cores:
            log.info("%s has %d cores for workers now", me.host, cores)
        self._own.cores = cores
        if not cores:
            own, self._own = self._own, None
            own.lost = "no cores are offered on this machine any more"
            for worker in list(own.workers()):
                own.stop(worker)
            own.close()

    def _own_member(self) -> Member | None:
        return next((member for member in self._members if member.id == self._cluster.here), None)

    def _shares_weights(self, member: Member) -> bool:
        me = self._own_member()
        return member.alive and member.shares and me is not None and member.id != me.id and member.address == me.address

    # -- called by the learner

    def current(self) -> list[SamplingNode]:
        self._check_head()
        if self._failure is not None:
            error = WorkerFailed(*self._failure)
            error.final = not self._cluster.returns  # else restarting the learner is useless
            raise error
        self._update_own_node()
        own: list[SamplingNode] = [] if self._own is None else [self._own]
        return own + [node for node in list(self._nodes.values()) if node.ready and not node.lost]

    def close(self) -> None:
        """End all agents and their workers. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            if self._thread.ident is not None:
                self._thread.join(2 * _CLOSE_S)  # first: it submits calls to the GCS thread
            self._gcs.close(2 * _CLOSE_S)
            self._wakeup.close()
            self._logs.close()
        if self._own is not None:
            self._own.close()

    def _wait_for_agents(self) -> None:
        """Wait until each machine has an agent or has failed; with a usable one, not long for the others."""
        start_s = self._timeouts.start_s
        wanted = {member.id for member in self._members if self._needs_agent(member)}
        deadline, begun = time.monotonic() + start_s, False
        if wanted:
            self._announce(f"starting agents on {len(wanted)} {'machine' if len(wanted) == 1 else 'machines'} …")
        with self._settled:
            while time.monotonic() < deadline and self._failure is None:
                ready = {node.id for node in list(self._nodes.values()) if node.ready}
                if wanted <= ready | self._unusable.keys():
                    break
                if not begun and len(ready) + (self._own is not None) >= self._plan.min_nodes:
                    begun, deadline = True, min(deadline, time.monotonic() + self._timeouts.others_s)
                self._settled.wait(_POLL_S)
        nodes = self.current()
        left_out = sorted({*self._unusable.values(), *([self._own_problem] if self._own_problem else [])})
        if len(nodes) < self._plan.min_nodes:
            reasons = "; ".join(left_out) or f"no other agent was ready within {start_s:.0f} s"
            usable = ", ".join(node.name for node in nodes)
            count = f"Only {usable} of the nodes" if nodes else "No node"
            needed = f" (min_nodes is {self._plan.min_nodes})" if nodes else ""
            error = WorkerFailed(f"{count} of the Ray cluster at {self._cluster.address} can be used{needed}: {reasons}.")
            excluded = bool(self._own_problem) + sum(due == math.inf for due, _ in list(self._retry_at.values()))
            error.final = len(nodes) + excluded >= self._plan.min_nodes  # a restart would exclude the same machines
            raise error
        for why in left_out:
            self._announce(f"left out: {why}")
        self._announce(f"workers on {', '.join(f'{node.name} ({node.cores})' for node in nodes)}")

    def _needs_agent(self, member: Member) -> bool:
        here = member.id == self._cluster.here
        return member.alive and member.cores > 0 and (self._agent_here or not (here or self._shares_weights(member)))

    # -- called from any thread

    def submit(self, call: Callable[[], None], node: RaySamplingNode | None = None) -> None:
        """Run a call in the state thread. If it fails, `node` is given up; without one the failure is fatal."""
        self._calls.put((call, node))

    def next_life(self) -> int:
        return next(self._lives)

    def offer_weights(self, version: int, weights: Mapping[str, Array]) -> None:
        self._weights.offer(version, weights)

    # -- state thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                with contextlib.suppress(queue.Empty):
                    self._run_call(*self._calls.get(timeout=_TICK_S))
                    for _ in range(self._calls.qsize()):
                        self._run_call(*self._calls.get_nowait())
                now = self.now()
                for node in list(self._nodes.values()):
                    self._run_call(functools.partial(self._check_node, node, now), node)
                self._start_missing_agents(now)
        finally:
            self._close_agents()

    def _run_call(self, call: Callable[[], None], node: RaySamplingNode | None) -> None:
        try:
            call()
        except Exception as error:  # Ray raises many types; a problem of one machine must not end the training
            if node is None:
                raise
            self._on_node_error(node, error)

    def _on_node_error(self, node: RaySamplingNode, error: Exception) -> None:
        if not isinstance(error, LudusError):
            log.error("unexpected error about %s", node.name, exc_info=error)
        self.give_up(node, _reason(error))

    def _on_crash(self, error: LudusError) -> None:
        self._fail(f"The learner's side of the cluster failed: {error}.", "See the log.")

    def _submit_to_gcs(self, call: Callable[[], None], node: RaySamplingNode) -> None:
        self._gcs.submit(call, lambda error: self.submit(functools.partial(self._on_node_error, node, error), node))

    def _check_node(self, node: RaySamplingNode, now: float) -> None:
        limit_s = self._timeouts.silent_s + 2 * _POLL_S
        if node.ready and node.calls and now > node.calls[0][0] + limit_s:
            self.give_up(node, f"it has not answered for {now - node.calls[0][0]:.0f} s")
        elif not node.ready and now > node.created_at + START_S:
            self.give_up(node, f"its agent has not started within {START_S:.0f} s")
        elif node.held_back:
            self.request_bundles(node)
            if not node.calls and now > node.requested_at + _POLL_S:  # the learner is busy: an empty request as a heartbeat
                self._request_bundle(node, 0, 0.0)

    def _check_head(self) -> None:
        silent_s = self._gcs.head_lost_for_s(self._timeouts.head_s)
        if silent_s is not None:
            self._fail(
                f"The head of the cluster is gone: {self._cluster.address} has not answered for {silent_s:.0f} s.",
                "Continue with --resume RUN once it is back.",
            )

    def _update_members(self, members: list[Member]) -> None:
        self._members = members
        alive = {member.id for member in members if member.alive}
        if self._cluster.here not in alive:
            self._fail(
                "Ray on this machine is gone: the cluster has given it up.",
                f"Run `ray start --address={self._cluster.address}` here, then continue with --resume RUN.",
            )
        for node in list(self._nodes.values()):
            if node.id not in alive:
                self.give_up(node, "Ray has lost it")
        for gone in [member for member in self._retry_at if member not in alive]:
            del self._retry_at[gone]

    def _start_missing_agents(self, now: float) -> None:
        if self._failure is not None:
            return
        for member in self._members:
            due, _ = self._retry_at.get(member.id, (0.0, None))
            if self._needs_agent(member) and member.id not in self._nodes and now >= due:
                self._nodes[member.id] = node = RaySamplingNode(self, member, self._unique_name(member))
                self._submit_to_gcs(functools.partial(self._create_agent, node), node)

    def _create_agent(self, node: RaySamplingNode) -> None:
        """Runs in the GCS thread."""
        node.agent = self._agents(node.id).remote(node.name)
        self.submit(lambda: self.call(node, None, "hello", then=self._on_hello), node)

    def _unique_name(self, member: Member) -> str:
        taken = {node.name for node in self._nodes.values()} | ({self._own.name} if self._own else set())
        host = member.host or member.address
        return f"{host}-{member.id[:6]}" if host in taken else host

    def _on_hello(self, node: RaySamplingNode, hello: Mapping[str, str]) -> None:
        if hello["ludus"] != ludus.__version__:
            raise UsageError(f"{node.name} has ludus {hello['ludus']}, and this machine {ludus.__version__}")
        log_dir = None if self._logs.path is None else str(self._logs.path)
        self.call(node, None, "open", self._plan, self._make, log_dir, self._logs.mark, then=self._on_open)

    def _on_open(self, node: RaySamplingNode, _: None) -> None:
        with self._settled:
            node.ready = True
            self._unusable.pop(node.id, None)
            self._settled.notify_all()
        log.info("%s has an agent, with %d cores", node.name, node.cores)
        self.request_bundles(node)
        self._wakeup.notify()

    # -- calls of agents

    def call(
        self,
        node: RaySamplingNode,
        group: str | None,
        method: str,
        *args: Any,
        then: Callable[[RaySamplingNode, Any], None] = lambda node, answer: None,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Call the agent; `then` gets the reply in the state thread. An error gives up the node, or calls `failed` if set."""
        if node.lost:
            return
        bound = getattr(node.agent, method)
        reference = (bound.options(concurrency_group=group) if group else bound).remote(*args)
        done = functools.partial(self._on_reply, node, then, failed)
        reference.future().add_done_callback(lambda future: self.submit(functools.partial(done, future), node))

    def _on_reply(
        self,
        node: RaySamplingNode,
        then: Callable[[RaySamplingNode, Any], None],
        failed: Callable[[str], None] | None,
        future: Future[Any],
    ) -> None:
        if node.lost:
            return
        from ray.exceptions import RayTaskError

        error = future.exception()
        if error is None:
            then(node, future.result())
        elif failed is not None and isinstance(error, RayTaskError):  # other errors mean that the agent is gone
            failed(_reason(error))
        else:
            final = isinstance(error, RayTaskError) and bool(getattr(error.cause, "final", False))
            self.give_up(node, _reason(error), final=final)

    def request_bundles(self, node: RaySamplingNode) -> None:
        """Keep requests for bundles in flight while there is room for blocks."""
        while not node.lost and node.ready and len(node.calls) < _MAX_CALLS:
            blocks = node.next_bundle_blocks(self._plan.slots * self._plan.blocks_per_update, self._layouts.nbytes)
            node.held_back = blocks <= 0
            if node.held_back:
                return
            self._request_bundle(node, blocks, _POLL_S)

    def _request_bundle(self, node: RaySamplingNode, blocks: int, timeout_s: float) -> None:
        node.requested_at = self.now()
        node.calls.append((node.requested_at, blocks))
        self.call(node, DATA, "next_bundle", blocks, timeout_s, then=self._on_bundle)

    def _on_bundle(self, node: RaySamplingNode, reply: tuple[Bundle, Bytes]) -> None:
        bundle, data = reply
        node.calls.popleft()
        if bundle.blocks or bundle.reports is not None:
            node.deliver(bundle, unpack(self._layouts, len(bundle.blocks), data))
        if bundle.blocks:
            self._wakeup.notify()
        for worker, tail in bundle.tails:
            log.warning("worker %d on %s failed; its last lines are in the run's logs", worker, node.name)
            self._logs.append(node.name, worker, tail)
        self.request_bundles(node)

    def start_worker(self, node: RaySamplingNode, index: int, begin: int, life: int) -> None:
        self.call(node, CONTROL, "start", index, begin, life, failed=lambda why: node.set_refused(index, life, why))
        self.request_bundles(node)  # a worker more makes room for more blocks

    def send_weights(self, node: RaySamplingNode, version: int) -> None:
        """Send the newest weights, one transfer at a time: versions published meanwhile are sent next."""
        node.wanted = max(node.wanted, version)
        if node.publishing or node.lost or node.published >= node.wanted:
            return
        newest, reference = self._weights.reference()
        node.publishing = True
        self.call(node, CONTROL, "publish", newest, reference, then=functools.partial(self._on_published, newest))

    def _on_published(self, version: int, node: RaySamplingNode, _: None) -> None:
        node.publishing, node.published = False, version
        self.send_weights(node, version)

    # -- ends

    def give_up(self, node: RaySamplingNode, why: str, *, final: bool = False) -> None:
        """`final`: it gets no other agent while it is a member of the cluster."""
        if node.lost:
            return
        node.lost = why
        log.warning("%s is given up: %s", node.name, why)
        self._nodes.pop(node.id, None)
        self._submit_to_gcs(lambda: _kill(node.agent), node)
        _, backoff = self._retry_at.get(node.id, (0.0, Backoff(_BACKOFF_S, _MAX_BACKOFF_S)))
        if node.ready:
            backoff.reset()
        self._retry_at[node.id] = math.inf if final else self.now() + backoff.next_delay(), backoff
        with self._settled:
            if not node.ready:
                self._unusable[node.id] = f"{node.name}: {why}"
            self._settled.notify_all()
        self._wakeup.notify()

    def _fail(self, message: str, hint: str) -> None:
        if self._failure is None:
            log.error("%s", message)
            self._failure = message, hint
            self._gcs.discard_calls()
            with self._settled:
                self._settled.notify_all()
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._wakeup.notify()

    def _close_agents(self) -> None:
        """Let agents end their workers, then kill the agents; those that cannot be reached end by themselves."""
        import ray

        if self._failure is not None:
            return
        closing = []
        for node in self._nodes.values():
            with contextlib.suppress(ray.exceptions.RayError):  # it has just died
                if node.ready:
                    closing.append(node.agent.close.options(concurrency_group=CONTROL).remote())
        with contextlib.suppress(ray.exceptions.RayError):
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for node in self._nodes.values():
            self._submit_to_gcs(functools.partial(_kill, node.agent), node)


# -- Ray --------------------------------------------------------------------------------------------------------------


def _agents() -> Callable[[str], Any]:
    """Function from the id of a Ray node to the actor class pinned to that node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote
    made = remote(num_cpus=0, max_restarts=0, concurrency_groups={DATA: 1, CONTROL: 1})(NodeAgent)
    return lambda member: made.options(scheduling_strategy=NodeAffinitySchedulingStrategy(member, soft=False))


def _kill(agent: Any) -> None:
    import ray

    if agent is not None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it is dead or unreachable
            ray.kill(agent)


def _reason(error: BaseException) -> str:
    """Describe the error in one line."""
    from ray import exceptions

    text = str(error)
    if "No module named 'ludus" in text:
        return "ludus is not installed there, or not for the Python with which Ray was started"
    cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if isinstance(cause, LudusError):
        return str(cause)
    for kind, why in (
        (exceptions.ActorUnschedulableError, "it has left the cluster"),
        (exceptions.ActorUnavailableError, "its agent cannot be reached"),
        (exceptions.ActorDiedError, "its agent died"),
    ):
        if isinstance(cause, kind):
            raised = text.strip().splitlines()[-1] if "creation task" in text else ""
            return f"{why} ({raised})" if raised else why
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"
