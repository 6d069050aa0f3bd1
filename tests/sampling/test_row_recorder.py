"""A RowRecorder is compared with one SegmentRecorder for every row, on random courses of events."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.core.tree import map_tree
from ludus.core.types import Bools, Segments
from ludus.models.inference.batched_policy import Decision
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import BatchDecision, Policy
from ludus.sampling.multi_agent.row_recorder import RowRecorder
from ludus.sampling.segment_recorder import RecorderStats, SegmentRecorder, session_spec
from ludus.transport.local import LocalMemory

ROWS = 4
SEEN = gym.spaces.Dict({"a": gym.spaces.Box(-9, 9, (2,), np.float32), "b": gym.spaces.Discrete(5)})
ACTIONS = gym.spaces.MultiDiscrete([3, 2])


class Kept(LocalMemory):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Segments] = []

    def commit(self, segments: Segments) -> None:
        self.seen.append(copy.deepcopy(segments))
        super().commit(segments)


class Course:
    """The same random events for both."""

    def __init__(self, seed: int, **network: Any) -> None:
        spec = session_spec(Policy(SEEN, ACTIONS, NetworkConfig(fcnet_hiddens=(4,), **network)), 5)
        self.random, self.version = np.random.default_rng(seed), 1
        self.memories, self.stats = [Kept(spec, 1, 1000), Kept(spec, 1, 1000)], [RecorderStats(), RecorderStats()]
        self.rows = RowRecorder(self.memories[0], spec, np.arange(ROWS) + 10, self.stats[0])
        self.single = [SegmentRecorder(self.memories[1], row + 10, self.stats[1]) for row in range(ROWS)]
        self.spec = spec

    def draw(self, count: int) -> tuple[Any, Bools | None]:
        seen = {
            "a": self.random.normal(size=(count, 2)).astype(np.float32),
            "b": self.random.integers(5, size=count, dtype=np.int64),
        }
        return seen, None if self.random.random() < 0.3 else self.random.random((count, self.spec.mask_size)) < 0.7

    def step(self, rows: Any) -> None:
        n = len(rows)
        seen, mask = self.draw(n)
        state = tuple(self.random.normal(size=(n, *part.shape)).astype(np.float32) for part in self.spec.state)
        chosen = self.random.integers([3, 2], size=(n, 2))
        log_prob, value = self.random.normal(size=(2, n)).astype(np.float32)
        reward = self.random.normal(size=n)
        self.rows.step(rows, seen, mask, BatchDecision(chosen, chosen, log_prob, value, state), self.version, reward, state)
        for i, row in enumerate(rows):
            decision = Decision(chosen[i], chosen[i], float(log_prob[i]), float(value[i]), (), self.version)
            own = map_tree(lambda part, i=i: part[i], seen)
            self.single[row].step(
                own, None if mask is None else mask[i], decision, float(reward[i]), tuple(part[i] for part in state)
            )

    def cut(self, rows: Any) -> None:
        seen, mask = self.draw(len(rows))
        value, reward = self.random.normal(size=len(rows)).astype(np.float32), self.random.normal(size=len(rows))
        self.rows.cut(rows, reward, seen, mask, value)
        for i, row in enumerate(rows):
            own = map_tree(lambda part, i=i: part[i], seen)
            self.single[row].cut(float(reward[i]), own, None if mask is None else mask[i], float(value[i]))

    def cut_before_pending(self, rows: Any) -> None:
        self.rows.cut_before_pending(rows)
        for row in rows:
            self.single[row].cut_before_pending()

    def finish(self, rows: Any) -> None:
        reward, terminated = self.random.normal(size=len(rows)), self.random.random(len(rows)) < 0.5
        valued = np.flatnonzero(~terminated & (self.random.random(len(rows)) < 0.7))
        seen, _ = self.draw(len(valued))
        value = self.random.normal(size=len(valued)).astype(np.float32)
        self.rows.finish(rows, reward, terminated, valued, seen, value if len(valued) else None)
        for i, row in enumerate(rows):
            at = valued.tolist().index(i) if i in valued else None
            own = None if at is None else map_tree(lambda part, at=at: part[at], seen)
            self.single[row].finish(
                float(reward[i]), terminated=bool(terminated[i]), truncated=not terminated[i], observation=own,
                value=None if at is None else float(value[at]),
            )  # fmt: skip

    def discard_pending(self, rows: Any) -> None:
        self.rows.discard_pending(rows)
        for row in rows:
            self.single[row].discard_pending()


@pytest.mark.parametrize("network", [{}, {"core": "lstm", "cell_size": 3, "max_seq_len": 2}])
@pytest.mark.parametrize("seed", range(6))
def test_rows_are_recorded_as_if_each_had_its_own_recorder(seed: int, network: dict[str, Any]) -> None:
    course = Course(seed, **network)
    events = ("cut", "cut_before_pending", "finish", "discard_pending")
    for _ in range(150):
        rows = np.flatnonzero(course.random.random(ROWS) < 0.7)
        if len(rows):
            course.step(rows)
        course.version += course.random.random() < 0.1
        some = np.flatnonzero(course.rows.open & (course.random.random(ROWS) < 0.5))
        if course.random.random() < 0.4 and len(some):
            getattr(course, events[course.random.integers(len(events))])(some)
        assert course.rows.open.tolist() == [recorder.open for recorder in course.single]
    mine, theirs = (memory.seen for memory in course.memories)
    assert len(mine) > 50
    assert course.stats[0] == course.stats[1]
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other)


def assert_same(one: Segments, other: Segments) -> None:
    used = one.used_steps
    assert used > 0
    for name in ("valid", "reward", "terminated", "truncated", "log_prob", "version", "first", "value", "origin"):
        rows = slice(None) if name == "origin" else slice(used + (name == "value"))
        assert getattr(one, name)[rows].tobytes() == getattr(other, name)[rows].tobytes(), name
    after = used + (not one.terminated[used - 1, 0])
    for name, rows in (("action", slice(used)), ("observation", slice(after)), ("action_mask", slice(after))):
        map_tree(
            lambda mine, theirs, rows=rows: np.testing.assert_array_equal(mine[rows], theirs[rows]),
            getattr(one, name),
            getattr(other, name),
        )
    for mine, theirs in zip(one.state, other.state, strict=True):
        states = -(-used // one.spec.state_every)
        np.testing.assert_array_equal(mine[:states], theirs[:states])
