"""The machines of a Ray cluster as nodes to sample on: an agent on each, watched, given up when silent, found when it returns.

One thread, the post, owns every change of state; other threads leave it notes: the learner its wishes, Ray the answers to
calls. A second one, the clerk, does all business with the head of the cluster (who is there? an agent for this machine, the
end of that one): whoever speaks to a head that is gone may not come back. So the learner never waits for the network.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ludus
from ludus.core.backoff import Backoff
from ludus.core.tree import Array
from ludus.core.types import Segments
from ludus.distributed.node_agent import BUNDLE_BYTES, Bundle, Bytes, Make, NodeAgent, local_node, unpack
from ludus.distributed.sampling_pool import NOTES, LocalNode, Node, Plan, WorkerReport
from ludus.errors import LudusError, Unreachable, UsageError, WorkerFailed
from ludus.ray_cluster.cluster import Cluster, Member
from ludus.transport.ring_buffer import Wakeup

log = logging.getLogger(__name__)

SILENT_S = 8.0
"""An agent that has not answered for so long is given up, whatever Ray says."""

HEAD_S = 10.0
START_S = 60.0
OTHERS_S = 5.0
"""Once there is a node to begin with, the others have so long to be there from the beginning; else they join later."""

_POLL_S = 0.5
_MEMBERS_S = 1.0
_ASK_S = 3.0
_TICK_S = 0.1
_CALLS = 2
_CLOSE_S = 5.0
_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 30.0
_UNANSWERED = 2
_STUCK_S = 2 * _ASK_S
_GAP_S = 1.0

DATA, CONTROL = "data", "control"


class Patience:
    """A clock that stands still while we do: what others have not done while this process was stopped is no fault of theirs.

    Somebody has to look at it several times per `_GAP_S`; for any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._looked_at = clock()
        self._missed_s = 0.0

    def now(self) -> float:
        with self._lock:
            now = self._clock()
            gap_s, self._looked_at = now - self._looked_at, now
            if gap_s > _GAP_S:
                log.warning("this process stood still for %.1f s: everybody gets that much longer to answer", gap_s)
                self._missed_s += gap_s
            return now - self._missed_s


class RayNode:
    """One machine of the cluster, seen by the learner. `start` … `close` are for one thread; see `Node` for what they mean."""

    def __init__(self, owner: RayNodes, member: Member, name: str) -> None:
        self.name, self.cores, self.lost = name, member.cores, ""
        self.id = member.id
        self.agent: Any = None
        self.ready = False
        self.born = owner.now()
        self.calls: deque[tuple[float, int]] = deque()
        """Of the bundles that are under way: when they were asked for, and how many blocks they may have."""
        self.asked_at = 0.0
        self.published = self.wanted = 0
        self.publishing = self.held_back = False
        self._owner = owner
        self._lives: dict[int, int] = {}
        self._waiting: dict[int, deque[Segments]] = {}
        self._count = 0
        self._reports: dict[int, tuple[int, WorkerReport]] = {}
        self._refused: dict[int, tuple[int, WorkerReport]] = {}
        """The agent knows nothing of workers that it could not start: its reports must not make them forgotten."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<RayNode {self.name} {self.lost or ('ready' if self.ready else 'starting')}>"

    def start(self, index: int, begin: int) -> None:
        with self._lock:
            life = self._lives[index] = self._owner.next_life()
            self._drop(index)
        self._owner.tell(lambda: self._owner.start(self, index, begin, life), self)

    def stop(self, index: int) -> None:
        with self._lock:
            self._lives.pop(index, None)
            self._drop(index)
        self._owner.tell(lambda: self._owner.call(self, CONTROL, "stop", index), self)

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        self._owner.offer(version, weights)
        self._owner.tell(lambda: self._owner.send_weights(self, version), self)

    def take(self, index: int) -> Segments | None:
        with self._lock:
            waiting = self._waiting.get(index)
            if not waiting:
                return None
            block = waiting.popleft()
            self._count -= 1
        if self.held_back:
            self.held_back = False
            self._owner.tell(lambda: self._owner.ask(self), self)
        return block

    def release(self, index: int, block: Segments) -> None:
        """Nothing to do: the bundle is freed with the last of its blocks that anybody holds."""

    def workers(self) -> dict[int, WorkerReport]:
        with self._lock:
            known = self._reports | self._refused
            return {i: report for i, (life, report) in known.items() if self._lives.get(i) == life}

    def close(self) -> None:
        self._owner.tell(lambda: self._owner.give_up(self, "it was closed"), self)

    # -- for the post

    def portion(self, slots: int, block_bytes: int) -> int:
        """How many blocks the next bundle may have: none before the learner has taken some of those that wait."""
        with self._lock:
            ahead = room_for(len(self._lives), slots, block_bytes)
            left = ahead - self._count - sum(most for _, most in self.calls)
            return min(left, -(-ahead // _CALLS))  # so that there is something to ask for while a bundle is under way

    def deliver(self, bundle: Bundle, blocks: list[Segments]) -> None:
        """Blocks of workers that were stopped, or started anew, since are dropped."""
        with self._lock:
            for (index, life), block in zip(bundle.blocks, blocks, strict=True):
                if self._lives.get(index) == life:
                    self._waiting.setdefault(index, deque()).append(block)
                    self._count += 1
            if bundle.reports is not None:
                self._reports = dict(bundle.reports)

    def refuse(self, index: int, life: int, why: str) -> None:
        """A worker that could not even be started."""
        with self._lock:
            self._refused[index] = life, WorkerReport("failed", None, 0, why, (0.0,) * len(NOTES))

    def _drop(self, index: int) -> None:
        self._refused.pop(index, None)
        self._count -= len(self._waiting.pop(index, ()))


def room_for(workers: int, slots: int, block_bytes: int) -> int:
    """How many blocks of a node may be here, or on their way. Tiny ones get twice the room if a bundle is not full otherwise."""
    return min(max(slots * workers, -(-BUNDLE_BYTES // block_bytes)), 2 * slots * workers)


class RayNodes:
    """The machines of a cluster; this one's workers need no agent. Raises WorkerFailed when none of them can be used.

    Nodes of Ray that share the weights of the learner on their machine are no machines of their own: they add cores to this one.
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        bell: Path,
        *,
        log_dir: Path | None = None,
        announce: Callable[[str], None] | None = None,
        make: Make = local_node,
        agent_here: bool = False,
        silent_s: float = SILENT_S,
        head_s: float = HEAD_S,
        start_s: float = START_S,
        others_s: float = OTHERS_S,
    ) -> None:
        """`agent_here`: an agent on this machine, too, as on the others (for tests, and to compare)."""
        self._cluster, self._plan, self._make = cluster, plan, make
        self._layout = plan.layout
        self._silent_s, self._head_s = silent_s, head_s
        self._agents = _agents()
        self._say = announce or (lambda sentence: None)
        self._agent_here = agent_here
        self.now = Patience().now
        self._notes: queue.SimpleQueue[tuple[Callable[[], None], RayNode | None]] = queue.SimpleQueue()
        self._errands: queue.SimpleQueue[tuple[Callable[[], None], RayNode]] = queue.SimpleQueue()
        self._nodes: dict[str, RayNode] = {}
        self._retry_at: dict[str, tuple[float, Backoff]] = {}
        """Of members whose agent failed: when to try again, and how long to wait after that."""
        self._unusable: dict[str, str] = {}
        self._failure: tuple[str, str] | None = None
        self._life = 0
        self._weights: tuple[int, Mapping[str, Array]] = (0, {})
        self._weights_lock = threading.Lock()
        self._reference: tuple[int, Any] = (0, None)
        self._closing, self._dismissed = threading.Event(), threading.Event()
        self._settled = threading.Condition()
        self._members: list[Member] = cluster.members()
        self._heard_at = self._attending_at = self.now()
        self._unanswered = self._own_cores = 0
        self._log_dir, self._mark = _marked(log_dir)
        self._bell = Wakeup(bell)
        self._bell_path = bell
        self._own: LocalNode | None = None
        self._threads = [
            threading.Thread(target=self._deliver, name="ray-post", daemon=True),
            threading.Thread(target=self._attend, name="ray-clerk", daemon=True),
        ]
        try:
            self._see_to_own()
            for thread in self._threads:
                thread.start()
            self._wait_for_agents(start_s, others_s)
        except BaseException:
            self.close()
            raise

    def _see_to_own(self) -> None:
        """Workers beside the learner: as many as this machine's nodes of Ray have cores. For the learner's thread, which starts them."""
        me = self._me()
        if self._agent_here or me is None:
            return
        cores = (me.cores if me.alive else 0) + sum(member.cores for member in self._members if self._shares(member))
        if self._own is None and cores:
            self._own = LocalNode(self._plan, self._bell_path, log_dir=self._log_dir, name=me.host)
        if self._own is None:
            return
        if self._own.cores != cores and self._own_cores:
            log.info("%s has %d cores for workers now", me.host, cores)
        self._own.cores = self._own_cores = cores
        if not cores:
            own, self._own = self._own, None
            own.lost = "nobody offers cores here any more"
            for worker in list(own.workers()):
                own.stop(worker)
            own.close()

    def _me(self) -> Member | None:
        return next((member for member in self._members if member.id == self._cluster.here), None)

    def _shares(self, member: Member) -> bool:
        me = self._me()
        return member.alive and member.shares and me is not None and member.id != me.id and member.address == me.address

    # -- for the learner

    def current(self) -> list[Node]:
        self._check_head()
        if self._failure is not None:
            raise WorkerFailed(*self._failure) if self._cluster.returns else _final(*self._failure)
        self._see_to_own()
        own: list[Node] = [] if self._own is None else [self._own]
        return own + [node for node in list(self._nodes.values()) if node.ready and not node.lost]

    def close(self) -> None:
        """End all agents and their workers. No effect when called again."""
        if not self._closing.is_set():
            self._closing.set()
            for thread in self._threads:  # the post first: it has errands for the clerk
                if thread.ident is not None:
                    thread.join(2 * _CLOSE_S)
                self._dismissed.set()
            self._bell.close()
            if self._log_dir is not None:
                (self._log_dir / self._mark).unlink(missing_ok=True)
        if self._own is not None:
            self._own.close()

    def _wait_for_agents(self, start_s: float, others_s: float) -> None:
        """Until every machine that is there has an agent, or has shown that it cannot have one; not long for the last ones."""
        wanted = {member.id for member in self._members if self._wants_agent(member)}
        deadline, begun = time.monotonic() + start_s, False
        if wanted:
            self._say(f"starting agents on {len(wanted)} {'machine' if len(wanted) == 1 else 'machines'} …")
        with self._settled:
            while time.monotonic() < deadline and self._failure is None:
                ready = {node.id for node in list(self._nodes.values()) if node.ready}
                if wanted <= ready | self._unusable.keys():
                    break
                if not begun and (ready or self._own is not None):
                    begun, deadline = True, min(deadline, time.monotonic() + others_s)
                self._settled.wait(_POLL_S)
        if not self.current():
            reasons = "; ".join(sorted(set(self._unusable.values()))) or f"no agent was ready within {start_s:.0f} s"
            raise WorkerFailed(f"No node of the Ray cluster at {self._cluster.address} can be used: {reasons}.")
        nodes = self.current()
        self._say(f"workers on {', '.join(f'{node.name} ({node.cores})' for node in nodes)}")

    def _wants_agent(self, member: Member) -> bool:
        here = member.id == self._cluster.here
        return member.alive and member.cores > 0 and (self._agent_here or not (here or self._shares(member)))

    # -- what the learner and the nodes leave for the post

    def tell(self, note: Callable[[], None], about: RayNode | None = None) -> None:
        """If it fails, the node that it is about is given up; else there is nothing to go on with."""
        self._notes.put((note, about))

    def next_life(self) -> int:
        self._life += 1
        return self._life

    def offer(self, version: int, weights: Mapping[str, Array]) -> None:
        """Copied here, once per version: the learner goes on changing them."""
        with self._weights_lock:
            if version > self._weights[0]:
                self._weights = version, {name: value.copy() for name, value in weights.items()}

    # -- the post

    def _deliver(self) -> None:
        with self._to_the_end("post"):
            while not self._closing.is_set():
                with contextlib.suppress(queue.Empty):
                    self._read(*self._notes.get(timeout=_TICK_S))
                    for _ in range(self._notes.qsize()):
                        self._read(*self._notes.get_nowait())
                self._tick(self.now())
        self._dismiss()

    def _read(self, note: Callable[[], None], about: RayNode | None) -> None:
        try:
            note()
        except Exception as error:  # whatever is wrong with one machine is no reason to end the training
            if about is None:
                raise
            self._failed(about, error)

    def _failed(self, node: RayNode, error: Exception) -> None:
        if not isinstance(error, LudusError):
            log.error("a mistake about %s", node.name, exc_info=error)
        self.give_up(node, _reason(error))

    @contextlib.contextmanager
    def _to_the_end(self, who: str) -> Iterator[None]:
        """Nobody else would notice that a thread has ended."""
        try:
            yield
        except BaseException as error:
            log.exception("the %s of the cluster failed", who)
            self._fail(f"The learner's side of the cluster failed: {type(error).__name__}: {error}.", "See the log.")

    def _tick(self, now: float) -> None:
        """What is due by the clock."""
        for node in list(self._nodes.values()):
            self._read(functools.partial(self._look_after, node, now), node)
        self._hire(now)

    def _look_after(self, node: RayNode, now: float) -> None:
        patience = self._silent_s + 2 * _POLL_S
        if node.ready and node.calls and now > node.calls[0][0] + patience:
            self.give_up(node, f"it has not answered for {now - node.calls[0][0]:.0f} s")
        elif not node.ready and now > node.born + START_S:
            self.give_up(node, f"its agent has not started within {START_S:.0f} s")
        elif node.held_back:
            self.ask(node)
            if not node.calls and now > node.asked_at + _POLL_S:  # the learner is busy: for the sign of life alone
                self._call_for_bundle(node, 0, 0.0)

    def _check_head(self) -> None:
        """Gone is who has let several questions pass, or keeps the clerk from asking."""
        now = self.now()
        silent_s = now - self._heard_at
        if silent_s > self._head_s and (self._unanswered >= _UNANSWERED or now - self._attending_at > _STUCK_S):
            self._fail(
                f"The head of the cluster is gone: {self._cluster.address} has not answered for {silent_s:.0f} s.",
                "Continue with --resume RUN once it is back.",
            )

    def _seen(self, members: list[Member]) -> None:
        """The head has said who is there."""
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

    def _hire(self, now: float) -> None:
        """An agent for everybody who has none."""
        if self._failure is not None:
            return
        for member in self._members:
            due, _ = self._retry_at.get(member.id, (0.0, None))
            if self._wants_agent(member) and member.id not in self._nodes and now >= due:
                self._nodes[member.id] = node = RayNode(self, member, self._name(member))
                self._errands.put((functools.partial(self._engage, node), node))

    def _engage(self, node: RayNode) -> None:
        """An errand: only when it is done is there an agent to call."""
        node.agent = self._agents(node.id).remote(node.name)
        self.tell(lambda: self.call(node, None, "hello", then=self._greeted), node)

    def _name(self, member: Member) -> str:
        taken = {node.name for node in self._nodes.values()} | ({self._own.name} if self._own else set())
        host = member.host or member.address
        return f"{host}-{member.id[:6]}" if host in taken else host

    def _greeted(self, node: RayNode, hello: Mapping[str, str]) -> None:
        if hello["ludus"] != ludus.__version__:
            raise UsageError(f"{node.name} has ludus {hello['ludus']}, and this machine {ludus.__version__}")
        log_dir = None if self._log_dir is None else str(self._log_dir)
        self.call(node, None, "open", self._plan, self._make, log_dir, self._mark, then=self._opened)

    def _opened(self, node: RayNode, _: None) -> None:
        with self._settled:
            node.ready = True
            self._unusable.pop(node.id, None)
            self._settled.notify_all()
        log.info("%s has an agent, with %d cores", node.name, node.cores)
        self.ask(node)
        self._bell.notify()

    # -- calls

    def call(
        self,
        node: RayNode,
        group: str | None,
        method: str,
        *args: Any,
        then: Callable[[RayNode, Any], None] = lambda node, answer: None,
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Call the agent; `then` gets the answer, in this thread. An error of the call gives the node up, unless `failed`."""
        if node.lost:
            return
        bound = getattr(node.agent, method)
        reference = (bound.options(concurrency_group=group) if group else bound).remote(*args)
        done = functools.partial(self._answered, node, then, failed)
        reference.future().add_done_callback(lambda future: self.tell(functools.partial(done, future), node))

    def _answered(
        self, node: RayNode, then: Callable[[RayNode, Any], None], failed: Callable[[str], None] | None, future: Future[Any]
    ) -> None:
        if node.lost:
            return
        error = future.exception()
        if error is not None and failed is not None and not _is_death(error):
            failed(_reason(error))
        elif error is not None:
            self.give_up(node, _reason(error))
        else:
            then(node, future.result())

    def ask(self, node: RayNode) -> None:
        """Keep bundles coming, as long as there is room for them."""
        while not node.lost and node.ready and len(node.calls) < _CALLS:
            most = node.portion(self._plan.slots, self._layout.nbytes)
            node.held_back = most <= 0
            if node.held_back:
                return
            self._call_for_bundle(node, most, _POLL_S)

    def _call_for_bundle(self, node: RayNode, most: int, timeout_s: float) -> None:
        node.asked_at = self.now()
        node.calls.append((node.asked_at, most))
        self.call(node, DATA, "next_bundle", most, timeout_s, then=self._bundle)

    def _bundle(self, node: RayNode, answer: tuple[Bundle, Bytes]) -> None:
        bundle, data = answer
        node.calls.popleft()
        if bundle.blocks or bundle.reports is not None:
            node.deliver(bundle, unpack(self._layout, len(bundle.blocks), data))
        if bundle.blocks:
            self._bell.notify()
        for worker, tail in bundle.tails:
            self._keep(node, worker, tail)
        self.ask(node)

    def start(self, node: RayNode, index: int, begin: int, life: int) -> None:
        self.call(node, CONTROL, "start", index, begin, life, failed=lambda why: node.refuse(index, life, why))
        self.ask(node)  # there is room for more than before

    def send_weights(self, node: RayNode, version: int) -> None:
        """The newest there are, one transfer at a time: whatever was published meanwhile goes next."""
        node.wanted = max(node.wanted, version)
        if node.publishing or node.lost or node.published >= node.wanted:
            return
        import ray

        with self._weights_lock:
            newest, weights = self._weights
        if self._reference[0] != newest:
            self._reference = newest, ray.put(weights)
        node.publishing = True
        self.call(node, CONTROL, "publish", *self._reference, then=functools.partial(self._published, newest))

    def _published(self, version: int, node: RayNode, _: None) -> None:
        node.publishing, node.published = False, version
        self.send_weights(node, version)

    def _keep(self, node: RayNode, worker: int, tail: str) -> None:
        """What a worker wrote before it failed, of a machine whose files we do not see."""
        log.warning("worker %d on %s failed; its last lines are in the run's logs", worker, node.name)
        if self._log_dir is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                (self._log_dir / node.name).mkdir(exist_ok=True)
                with open(self._log_dir / node.name / f"sampler-{worker}.log", "a") as file:
                    file.write(tail)

    # -- ends

    def give_up(self, node: RayNode, why: str) -> None:
        if node.lost:
            return
        node.lost = why
        log.warning("%s is given up: %s", node.name, why)
        self._nodes.pop(node.id, None)
        self._errands.put((lambda: _kill(node.agent), node))
        _, backoff = self._retry_at.get(node.id, (0.0, Backoff(_BACKOFF_S, _MAX_BACKOFF_S)))
        if node.ready:
            backoff.reset()
        self._retry_at[node.id] = self.now() + backoff.next_delay(), backoff
        with self._settled:
            if not node.ready:
                self._unusable[node.id] = f"{node.name}: {why}"
            self._settled.notify_all()
        self._bell.notify()

    def _fail(self, message: str, hint: str) -> None:
        if self._failure is None:
            log.error("%s", message)
            self._failure = message, hint
            with self._settled:
                self._settled.notify_all()
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                self._bell.notify()

    def _dismiss(self) -> None:
        """Agents end their workers, before they are ended themselves; those that cannot be reached end by themselves."""
        import ray

        asked = []
        if self._failure is None:
            for node in self._nodes.values():
                if node.ready:
                    with contextlib.suppress(Exception):  # Ray's, of an agent that has just died
                        asked.append(node.agent.close.options(concurrency_group=CONTROL).remote())
                self._errands.put((functools.partial(_kill, node.agent), node))
        if asked:
            with contextlib.suppress(Exception):
                ray.wait(asked, num_returns=len(asked), timeout=_CLOSE_S)

    # -- the clerk

    def _attend(self) -> None:
        due = 0.0
        with self._to_the_end("clerk"):
            while not self._dismissed.is_set():
                with contextlib.suppress(queue.Empty):
                    self._run(*self._errands.get(timeout=_TICK_S))
                if time.monotonic() >= due and not self._closing.is_set():
                    self._ask_head()
                    due = time.monotonic() + _MEMBERS_S
                self._attending_at = self.now()
            with contextlib.suppress(queue.Empty):
                while self._failure is None:
                    self._run(*self._errands.get_nowait())

    def _run(self, errand: Callable[[], None], node: RayNode) -> None:
        self._attending_at = self.now()
        try:
            errand()
        except Exception as error:
            self.tell(functools.partial(self._failed, node, error), node)

    def _ask_head(self) -> None:
        self._attending_at = self.now()
        try:
            members = self._cluster.members(_ASK_S)
        except Unreachable:  # how long that has been so is judged elsewhere
            self._unanswered += 1
        else:
            self._heard_at, self._unanswered = self.now(), 0
            self.tell(functools.partial(self._seen, members))


# -- Ray --------------------------------------------------------------------------------------------------------------


def _agents() -> Callable[[str], Any]:
    """Node id → what makes an agent there and nowhere else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote
    made = remote(num_cpus=0, max_restarts=0, concurrency_groups={DATA: 1, CONTROL: 1})(NodeAgent)
    return lambda member: made.options(scheduling_strategy=NodeAffinitySchedulingStrategy(member, soft=False))


def _kill(agent: Any) -> None:
    import ray

    if agent is None:
        return
    with contextlib.suppress(Exception):  # it is dead already, or its machine is out of reach
        ray.kill(agent)


def _is_death(error: BaseException) -> bool:
    from ray.exceptions import RayTaskError

    return not isinstance(error, RayTaskError)


def _reason(error: BaseException) -> str:
    """In a line, what somebody can do something about."""
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


def _final(message: str, hint: str) -> WorkerFailed:
    """An error that another attempt of the same learner would only meet again."""
    error = WorkerFailed(message, hint)
    error.final = True
    return error


def _marked(log_dir: Path | None) -> tuple[Path | None, str]:
    """A file by which another machine can tell that it sees the same directory, and not one of the same name."""
    mark = f".seen-{secrets.token_hex(8)}"
    if log_dir is not None:
        log_dir = log_dir.absolute()
        log_dir.mkdir(parents=True, exist_ok=True)
        for left in log_dir.glob(".seen-*"):  # by a learner that was killed
            left.unlink(missing_ok=True)
        (log_dir / mark).touch()
    return log_dir, mark
