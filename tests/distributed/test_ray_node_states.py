"""The learner's side of a Ray cluster, with agents in this process: failures of nodes and head, and limits on waiting blocks."""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from ludus.distributed import gcs_thread, ray_nodes
from ludus.distributed.gcs_thread import StallAwareClock
from ludus.distributed.node_agent import BUNDLE_BYTES, NodeAgent, WakeupNode
from ludus.distributed.ray_nodes import RayNodes, RayTimeouts, max_blocks_ahead
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import SamplingNode
from ludus.errors import Unreachable, WorkerFailed
from ludus.launch.doctor.checks import graphics
from ludus.ray_cluster.cluster import Cluster
from ludus.ray_cluster.membership import Member
from ludus.transport.ring_buffer import Wakeup
from tests.distributed.test_node_agent import Scripted, plan
from tests.waiting import wait_until

WAIT_S = 20.0
_asking = threading.local()
"""The machine whose agent runs in this thread."""


class Call:
    """A method of an agent, called as Ray does: each group has a thread, and errors come wrapped."""

    def __init__(self, host: Host, method: str, group: str = "") -> None:
        self._host, self._method, self._group = host, method, group

    def options(self, concurrency_group: str) -> Call:
        return Call(self._host, self._method, concurrency_group)

    def remote(self, *args: Any) -> Call:
        self._future: Future[Any] = self._host.threads[self._group].submit(self._run, *args)
        return self

    def future(self) -> Future[Any]:
        return self._future

    def _run(self, *args: Any) -> Any:
        try:
            return self._host.answer(self._method, *args)
        except Exception as error:
            failed: Any = RayTaskError
            raise failed(self._method, "", error) from error


class Host:
    """A machine: its agent, its scripted workers, and what is wrong with it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self._directory = name, directory / name
        self._directory.mkdir()
        self.threads = {group: ThreadPoolExecutor(1) for group in ("", ray_nodes.DATA, ray_nodes.CONTROL)}
        self.answers = threading.Event()
        self.answers.set()
        self.refused: set[int] = set()
        self.nonsense = self.closed_to_us = False
        self.agent: NodeAgent | None = None

    def remote(self, name: str) -> Host:
        if self.closed_to_us:
            raise RuntimeError("no agents here")
        if self.agent is not None:
            self.agent.close()
        self.agent = NodeAgent(name)
        return self

    def __getattr__(self, method: str) -> Call:
        return Call(self, method)

    def answer(self, method: str, *args: Any) -> Any:
        assert self.answers.wait(WAIT_S)
        _asking.name = self.name
        if method == "open":
            args = (args[0], self._make, *args[2:])
        if method == "start" and args[0] in self.refused:
            raise WorkerFailed(f"no room for worker {args[0]}")
        answer = getattr(self.agent, method)(*args)
        return "nonsense" if self.nonsense and method == "next_bundle" else answer

    def _make(self, plan: SamplingPlan, log_dir: Path | None, name: str) -> WakeupNode:
        self.workers = Scripted(Path(tempfile.mkdtemp(dir=self._directory)), plan)
        return self.workers

    def close(self) -> None:
        self.answers.set()
        for threads in self.threads.values():
            threads.shutdown(cancel_futures=True)
        if self.agent is not None:
            self.agent.close()


class Rig:
    """A cluster of such machines, of which the first is this one; `ask` is how its head answers."""

    address, returns = "head:1", False

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        self.here = names[0]
        self.hosts = {name: Host(name, directory) for name in names}
        self.wakeup = Wakeup.create(directory / "wakeup")
        self.ask: Callable[[], None] = lambda: None
        self.there: list[Member] = []
        """Who is part of it, if not the machines above with 2 cores each."""

    def members(self, timeout_s: float = 3.0) -> list[Member]:
        self.ask()
        return self.there or [Member(name, name, "127.0.0.1", 2, alive=True, head=name == self.here) for name in self.hosts]

    @contextlib.contextmanager
    def nodes(self, plan: SamplingPlan, **settings: Any) -> Iterator[RayNodes]:
        nodes = RayNodes(cast(Cluster, self), plan, self.wakeup.path, **{"agent_here": True, **settings})
        try:
            yield nodes
        finally:
            nodes.close()

    def until(self, found: Callable[[], object]) -> None:
        wait_until(found, WAIT_S, pause=self.wakeup.wait)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(("a", "b"), tmp_path)
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)  # as a real cluster would have done
    monkeypatch.setattr(ray_nodes, "_agents", lambda: lambda member: rig.hosts[member])
    monkeypatch.setattr(gcs_thread, "_MEMBERS_S", 0.05)
    monkeypatch.setattr(ray_nodes, "_CLOSE_S", 1.0)
    yield rig
    for host in rig.hosts.values():
        host.close()
    rig.wakeup.close()


def named(nodes: RayNodes) -> dict[str, SamplingNode]:
    return {node.name: node for node in nodes.current()}


# -- workers


def test_a_worker_that_could_not_be_started_is_not_forgotten(rig: Rig) -> None:
    host = rig.hosts["a"]
    host.refused = {9}
    with rig.nodes(plan()) as nodes:
        node = named(nodes)["a"]
        node.start(0, 0)
        node.start(9, 0)
        rig.until(lambda: 9 in node.workers())
        host.workers.restarts = 3
        rig.until(lambda: 0 in node.workers() and node.workers()[0].restarts == 3)  # the agent has reported since
        assert (node.workers()[9].state, "no room for worker 9" in node.workers()[9].error) == ("failed", True)

        host.refused = set()
        node.start(9, 0)
        assert 9 not in node.workers(), "that was another life"
        rig.until(lambda: 9 in node.workers() and node.workers()[9].state == "ready")


@pytest.mark.parametrize(
    ("workers", "slots", "block_bytes", "room"),
    [(3, 2, BUNDLE_BYTES, 6), (3, 2, 100, 12), (1, 3, BUNDLE_BYTES // 4, 4), (40, 2, 100, 160), (0, 2, 100, 0)],
)
def test_a_node_has_room_for_its_workers_and_for_a_bundle_of_tiny_blocks(
    workers: int, slots: int, block_bytes: int, room: int
) -> None:
    assert max_blocks_ahead(workers, slots, block_bytes) == room


def test_a_learner_that_takes_nothing_stops_the_workers(rig: Rig) -> None:
    with rig.nodes(plan(slots=2)) as nodes:
        node = named(nodes)["a"]
        node.start(0, 0)
        rig.until(lambda: 0 in node.workers())
        writer = rig.hosts["a"].workers.writers[0]

        def write_all(first: int) -> int:
            while (block := writer.reserve(1.0)) is not None:
                block.reward.fill(first)
                writer.commit(block)
                first += 1
            return first

        written = write_all(0)
        assert written == 2 * 2 + 2, "here, where blocks are tiny, and in the ring"
        taken = [node.take(0) for _ in range(4)]
        assert [block and float(block.reward[0, 0]) for block in taken] == [0, 1, 2, 3]
        assert node.take(0) is None
        assert write_all(written) == written + 4


# -- whose fault it is


def test_a_mistake_about_one_node_is_no_reason_to_end(rig: Rig) -> None:
    with rig.nodes(plan()) as nodes:
        node = named(nodes)["b"]
        rig.hosts["b"].nonsense = True
        rig.until(lambda: node.lost)
        assert node.lost.startswith("ValueError")
        assert "a" in named(nodes)
        rig.hosts["b"].nonsense = False
        rig.until(lambda: "b" in named(nodes))


def test_an_agent_that_cannot_be_placed_is_no_reason_not_to_begin(rig: Rig) -> None:
    rig.hosts["b"].closed_to_us = True
    with rig.nodes(plan()) as nodes:
        assert list(named(nodes)) == ["a"]
        rig.hosts["b"].closed_to_us = False
        rig.until(lambda: "b" in named(nodes))


def test_a_node_without_a_working_screen_is_named_and_left_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_SCREEN", raising=False)
    problems = {"b": "Xvfb is not installed"}
    monkeypatch.setattr(graphics, "find_screen_problem", lambda choice, *, window: problems.get(_asking.name, ""))
    told: list[str] = []
    made = replace(plan(), display="xvfb")
    with rig.nodes(made, announce=told.append) as nodes:
        assert list(named(nodes)) == ["a"]
        assert [line for line in told if line.startswith("left out")] == [
            "left out: b: display: xvfb does not work there: Xvfb is not installed. See there: ludus doctor --display xvfb"
        ]
        assert nodes._retry_at["b"][0] == math.inf
    problems["b"] = "Xvfb is not installed"
    few = r"Only a of the nodes .* can be used \(min_nodes is 2\): b: display: xvfb does not work there"
    with pytest.raises(WorkerFailed, match=few), rig.nodes(replace(made, min_nodes=2)):
        pass
    problems["a"] = "on a private X server the X server has no GLX"
    none = r"No node .* a: display: xvfb .*no GLX.*; b: .*Xvfb is not installed"
    with pytest.raises(WorkerFailed, match=none) as failed, rig.nodes(made):
        pass
    assert failed.value.final


def test_one_that_does_not_answer_joins_later(rig: Rig) -> None:
    rig.hosts["b"].answers.clear()
    began = time.monotonic()
    with rig.nodes(plan(), timeouts=RayTimeouts(start_s=60.0, others_s=0.1)) as nodes:
        assert time.monotonic() - began < 30
        assert list(named(nodes)) == ["a"]
        rig.hosts["b"].answers.set()
        rig.until(lambda: "b" in named(nodes))


def test_our_own_mistake_is_not_taken_for_the_heads(rig: Rig) -> None:
    def wrong() -> None:
        raise TypeError("of ours")

    with rig.nodes(plan(), timeouts=RayTimeouts(head_s=0.0)) as nodes:
        rig.ask = wrong
        with pytest.raises(WorkerFailed, match=r"learner's side of the cluster failed: TypeError: of ours"):
            rig.until(lambda: not nodes.current())


def test_a_head_is_gone_when_it_has_not_answered_several_times(rig: Rig) -> None:
    asked: list[float] = []

    def gone() -> None:
        asked.append(time.monotonic())
        raise Unreachable("no answer")

    with rig.nodes(plan(), timeouts=RayTimeouts(head_s=0.0)) as nodes:
        assert named(nodes), "it has always replied, so the time-out alone does not count"
        rig.ask = gone
        with pytest.raises(WorkerFailed, match="The head of the cluster is gone: head:1 has not answered") as failed:
            rig.until(lambda: not nodes.current())
        assert failed.value.final
        assert len(asked) >= 2


def test_a_head_that_blocks_the_gcs_thread_is_gone_and_that_of_a_job_may_return(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.returns = True
    monkeypatch.setattr(gcs_thread, "_STUCK_S", 0.3)
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(rig.nodes(plan(), timeouts=RayTimeouts(head_s=0.5)))
        stack.callback(over.set)
        rig.ask = lambda: cast(None, over.wait(WAIT_S))
        with pytest.raises(WorkerFailed, match="The head of the cluster is gone") as gone:
            rig.until(lambda: not nodes.current())
        assert not gone.value.final


def test_time_in_which_we_stood_still_does_not_count() -> None:
    now = 100.0
    patience = StallAwareClock(lambda: now)
    began = patience.now()
    for step in (0.1, 0.9, 30.0, 0.5):
        now += step
        patience.now()
    assert patience.now() - began == pytest.approx(0.1 + 0.9 + 0.5)


# -- nodes of Ray that share the learner's weights


def member(name: str, cores: int, address: str = "10.0.0.1", *, shares: bool = False) -> Member:
    return Member(name, name, address, cores, alive=True, head=name == "a", shares=shares)


def cores(nodes: RayNodes) -> dict[str, int]:
    return {node.name: node.cores for node in nodes.current()}


def test_a_node_that_shares_the_weights_adds_its_cores_to_the_learners_own_and_takes_them_along(rig: Rig) -> None:
    alone = [member("a", 1)]
    sharer, another = member("b", 3, shares=True), member("c", 2, shares=True)
    rig.there = [*alone, sharer]
    with rig.nodes(plan(), agent_here=False) as nodes:
        assert cores(nodes) == {"a": 4}
        own = nodes.current()[0]
        rig.there = [*alone, sharer, another]
        rig.until(lambda: cores(nodes) == {"a": 6})
        rig.there = [*alone, replace(sharer, alive=False), another]
        rig.until(lambda: cores(nodes) == {"a": 3})
        assert nodes.current() == [own], "one copy of the weights while nodes come and go"
        assert rig.hosts["b"].agent is None


def test_if_only_sharing_nodes_have_cores_workers_run_on_the_learners_machine_while_there_are_any(rig: Rig) -> None:
    learner, sharer = member("a", 0), member("b", 2, shares=True)
    rig.there = [learner, sharer]
    with rig.nodes(plan(), agent_here=False) as nodes:
        assert cores(nodes) == {"a": 2}
        (own,) = nodes.current()
        rig.there = [learner]
        rig.until(lambda: cores(nodes) == {})
        assert own.lost
        rig.there = [learner, replace(sharer, id="b2")]
        rig.until(lambda: cores(nodes) == {"a": 2})
        assert nodes.current() != [own]


def test_a_node_on_another_machine_has_its_own_weights_whatever_its_label(rig: Rig) -> None:
    rig.there = [member("a", 1), member("b", 3, "10.0.0.2", shares=True)]
    with rig.nodes(plan(), agent_here=False) as nodes:
        rig.until(lambda: cores(nodes) == {"a": 1, "b": 3})
        assert rig.hosts["b"].agent is not None
