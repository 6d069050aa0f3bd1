"""Bundles of an agent, without a network: complete blocks, many at a time, in order for each worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from ludus.core.spaces import ArraySpec
from ludus.core.tree import Array, leaves
from ludus.core.types import Segments, SegmentSpec
from ludus.distributed import node_agent
from ludus.distributed.node_agent import Bytes, NodeAgent, WakeupNode, pack, unpack
from ludus.distributed.sampling_plan import COUNTERS, SamplingPlan
from ludus.distributed.sampling_pool import WorkerReport
from ludus.errors import Damaged
from ludus.transport.ring_buffer import Wakeup, create_ring
from ludus.transport.shared_memory import BlockLayout, BlockLayouts, SharedReader, SharedWriter, ring_capacity
from tests.algorithms.sampled import Sampled, made

SPEC = SegmentSpec(steps=8, observation=ArraySpec((3,), np.dtype(np.float32)), action=ArraySpec((), np.dtype(np.int64)), finals=4)
ROWS = 2


def plan(ahead: int | None = None, slots: int = 4) -> SamplingPlan:
    return SamplingPlan("none", {}, ROWS, {}, SPEC, seed=0, first_version=1, ahead=ahead, slots=slots)


class Scripted:
    """A node whose workers are this test: it writes their blocks itself, into real rings."""

    def __init__(self, directory: Path, plan: SamplingPlan) -> None:
        self.name, self.cores, self.lost = "scripted", 2, ""
        self.wakeup = directory / "wakeup"
        self._directory, self._plan = directory, plan
        Wakeup.create(self.wakeup).close()
        self.writers: dict[int, SharedWriter] = {}
        self._readers: dict[int, SharedReader] = {}
        self.published: list[int] = []
        self.restarts = 0

    def start(self, index: int, begin: int) -> None:
        ring = self._directory / f"{index}.ring"
        create_ring(ring, ring_capacity(self._plan.layouts, self._plan.slots))
        self._readers[index] = SharedReader(ring, self._plan.layouts)
        self.writers[index] = SharedWriter(ring, self._plan.layouts, self.wakeup)

    def stop(self, index: int) -> None:
        self.writers.pop(index).close()
        self._readers.pop(index).close()

    def publish(self, version: int, weights: Mapping[str, Array]) -> None:
        self.published.append(version)

    def take(self, index: int) -> Segments | None:
        return self._readers[index].take()

    def release(self, index: int, block: Segments) -> None:
        self._readers[index].release(block)

    def workers(self) -> dict[int, WorkerReport]:
        return {index: WorkerReport("ready", 1, self.restarts, "", (0.0,) * len(COUNTERS)) for index in self.writers}

    def close(self) -> None:
        for index in list(self.writers):
            self.stop(index)

    def write(self, index: int, *values: float) -> None:
        for value in values:
            block = self.writers[index].reserve(0.0)
            assert block is not None
            block.reward.fill(value)
            self.writers[index].commit(block)


class Bench:
    """An agent with a scripted node."""

    def __init__(self, directory: Path, plan: SamplingPlan) -> None:
        self.node = Scripted(directory, plan)
        self.agent = NodeAgent("scripted")
        self.layout = plan.layouts

        def make(plan: SamplingPlan, log_dir: Path | None, name: str) -> WakeupNode:
            self.logs = log_dir
            return self.node

        self.agent.open(plan, make, str(directory), "mark")

    def bundle(self, most: int = 100, timeout_s: float = 5.0) -> list[tuple[int, int, float]]:
        """(worker, life, what was written) of each block."""
        bundle, data = self.agent.next_bundle(most, timeout_s)
        blocks = unpack(self.layout, len(bundle.blocks), data)
        return [(index, life, float(block.reward[0, 0])) for (index, life), block in zip(bundle.blocks, blocks, strict=True)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, plan())
    yield bench
    bench.agent.close()


def filled(layouts: BlockLayouts) -> Segments:
    rng = np.random.default_rng(0)
    block = Segments.empty(SPEC, ROWS)
    for _, array in leaves(block.arrays()):
        array[...] = (rng.random(array.shape) * 100).astype(array.dtype)
    block.finals = 3
    block.episode_return, block.episode_length = np.array([1.5, 2.5], np.float32), np.array([7, 9], np.int64)
    return block


def test_a_block_is_the_same_on_the_other_side_and_not_to_be_written() -> None:
    layout = BlockLayouts([BlockLayout(SPEC, ROWS)])
    data: Bytes = np.empty(2 * layout.nbytes, np.uint8)
    block = filled(layout)
    for i in range(2):
        pack(layout, block, data.data[i * layout.nbytes : (i + 1) * layout.nbytes])
    data.flags.writeable = False
    for there in unpack(layout, 2, data):
        assert there.finals == 3
        for (path, sent), (_, came) in zip(leaves(block.arrays()), leaves(there.arrays()), strict=True):
            assert np.array_equal(sent, came), path
        assert not there.reward.flags.writeable
        assert np.shares_memory(there.reward, data)


def test_bytes_of_another_shape_are_not_taken_for_blocks() -> None:
    layout = BlockLayouts([BlockLayout(SPEC, ROWS)])
    with pytest.raises(Damaged):
        unpack(layout, 1, np.zeros(layout.nbytes, np.uint8))


def test_blocks_come_together_and_each_workers_in_order(bench: Bench) -> None:
    for index in (0, 1):
        bench.agent.start(index, 0, life=10 + index)
    bench.node.write(0, 1.0, 2.0, 3.0)
    bench.node.write(1, 4.0, 5.0)
    came = bench.bundle()
    assert [value for index, life, value in came if (index, life) == (0, 10)] == [1.0, 2.0, 3.0]
    assert [value for index, life, value in came if (index, life) == (1, 11)] == [4.0, 5.0]


def test_a_small_portion_is_shared_between_the_workers(bench: Bench) -> None:
    for index in (0, 1):
        bench.agent.start(index, 0, life=1)
    bench.node.write(0, 1.0, 2.0)
    bench.node.write(1, 3.0, 4.0)
    assert {index for index, _, _ in bench.bundle(most=2)} == {0, 1}
    assert {index for index, _, _ in bench.bundle(most=2)} == {0, 1}


def test_room_in_the_ring_is_free_as_soon_as_the_bundle_is_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan(slots=2))
    bench.agent.start(0, 0, life=1)
    bench.node.write(0, 1.0, 2.0)
    assert bench.node.writers[0].reserve(0.0) is None
    assert len(bench.bundle()) == 2
    bench.node.write(0, 3.0)
    assert bench.bundle() == [(0, 1, 3.0)]
    bench.agent.close()


def test_a_large_bundle_does_not_wait_for_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "LINGER_S", 60.0)
    bench.agent.start(0, 0, life=1)
    bench.node.write(0, 1.0, 2.0)
    assert len(bench.bundle(most=2, timeout_s=60.0)) == 2


def test_a_bundle_has_an_upper_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "MAX_BUNDLE_BYTES", 2 * BlockLayout(SPEC, ROWS).nbytes)
    bench = Bench(tmp_path, plan())
    bench.agent.start(0, 0, life=1)
    bench.node.write(0, 1.0, 2.0, 3.0)
    assert [value for _, _, value in bench.bundle()] == [1.0, 2.0]
    assert [value for _, _, value in bench.bundle()] == [3.0]
    bench.agent.close()


def test_when_all_have_taken_their_turn_there_is_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "LINGER_S", 60.0)
    bench = Bench(tmp_path, plan(ahead=0))
    for index in (0, 1):
        bench.agent.start(index, 0, life=1)
        bench.node.write(index, 1.0)
    assert len(bench.bundle(timeout_s=60.0)) == 2
    bench.agent.close()


def test_without_blocks_there_is_an_answer_all_the_same(bench: Bench) -> None:
    bench.agent.start(0, 0, life=7)
    bundle, data = bench.agent.next_bundle(10, 0.01)
    assert bundle.blocks == ()
    assert len(data) == 0
    assert bundle.reports is not None
    assert bundle.reports[0][0] == 7
    assert bundle.reports[0][1].state == "ready"


def test_a_learner_without_room_gets_a_sign_of_life_and_no_blocks(bench: Bench) -> None:
    bench.agent.start(0, 0, life=1)
    bench.node.write(0, 1.0)
    assert bench.bundle(most=0, timeout_s=0.0) == []
    assert bench.bundle(most=1) == [(0, 1, 1.0)]


def test_a_worker_that_starts_again_has_another_life(bench: Bench) -> None:
    bench.agent.start(0, 0, life=1)
    bench.node.write(0, 1.0)
    bench.agent.stop(0)
    (bench.node.wakeup.parent / "0.ring").unlink()
    (bench.node.wakeup.parent / "0.ring.room").unlink()
    (bench.node.wakeup.parent / "0.ring.room.flag").unlink()
    bench.agent.start(0, 5, life=2)
    bench.node.write(0, 2.0)
    assert bench.bundle() == [(0, 2, 2.0)]


def test_logs_that_the_learner_cannot_see_are_sent_when_a_worker_has_failed(bench: Bench) -> None:
    assert bench.logs is not None
    assert not bench.logs.is_relative_to(bench.node.wakeup.parent), "the mark is not there: it is another file system"
    bench.agent.start(0, 0, life=1)
    (bench.logs / "sampler-0.log").write_text("the last words")
    assert bench.agent.next_bundle(0, 0.0)[0].tails == ()
    bench.node.restarts = 1
    bundle, _ = bench.agent.next_bundle(1, 0.05)
    while bundle.reports is None:
        bundle, _ = bench.agent.next_bundle(1, 0.05)
    assert bundle.tails == ((0, "the last words"),)


def test_a_node_with_a_directory_for_logs_has_them_there_under_the_names_of_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs" / "actor"
    monkeypatch.setenv("LUDUS_NODE_LOG_DIR", str(logs))
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "mark").touch()
    bench = Bench(shared, plan())
    assert bench.logs == logs, "also where the run's directory is seen"
    bench.agent.start(3, 0, life=1)
    assert node_agent.worker_name(3) == "actor_3"
    (logs / "actor_3.log").write_text("the last words")
    bench.agent.next_bundle(0, 0.0)
    bench.node.restarts = 1
    bundle, _ = bench.agent.next_bundle(1, 0.05)
    while bundle.reports is None:
        bundle, _ = bench.agent.next_bundle(1, 0.05)
    assert bundle.tails == ((3, "the last words"),)
    bench.agent.close()


def test_an_agent_that_is_closed_does_not_end_its_process_later(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    bench = Bench(tmp_path, plan())
    (watch,) = [thread for thread in threading.enumerate() if thread not in before and thread.name == "orphan-watch"]
    bench.agent.close()
    watch.join(10)
    assert not watch.is_alive()


@pytest.mark.parametrize("run", ["PPO", "IMPALA", "APPO"])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_blocks_that_cannot_be_written_teach_the_same(run: str) -> None:
    """A batch that is one block reaches the algorithm as it came from another machine."""
    source = Sampled("CartPole-v1", ROWS, 8)
    block = source.block()
    layout = BlockLayouts([BlockLayout(block.spec, block.rows)])
    data: Bytes = np.zeros(layout.nbytes, np.uint8)
    pack(layout, block, data.data)
    data.flags.writeable = False
    (received,) = unpack(layout, 1, data)
    before = source.policy.weights()
    learned = []
    for one in (block, received):
        source.policy.load_weights(before)
        made(run, source.policy).learn(one, 0)
        learned.append(source.policy.weights())
    source.close()
    assert any((learned[0][name] != before[name]).any() for name in before)
    for name, value in learned[0].items():
        np.testing.assert_array_equal(learned[1][name], value, name)


def test_logs_go_below_the_run_where_it_is_seen(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    bench = Bench(tmp_path, plan())
    assert bench.logs == tmp_path / "scripted"
    bench.agent.close()
