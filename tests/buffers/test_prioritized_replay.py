"""The replay of transitions against a slow account of what happened: games told step by step, cut into blocks, with losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.buffers.collate import join_segments
from ludus.buffers.prioritized_replay import Priorities, TransitionBatch, TransitionReplay
from ludus.core.spaces import ArraySpec
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import ConfigError

SEEN, ACTED = ArraySpec((2,), np.dtype(np.float32)), ArraySpec((), np.dtype(np.int64))
GAMMA = 0.9


@dataclass
class Row:
    """What one environment shows in one row of a block, and what comes of the step there."""

    seen: float
    valid: bool = True
    first: bool = False
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    final: float | None = None


@dataclass
class Step:
    """A step as it was: the account that the buffer is held against."""

    seen: float
    action: int
    reward: float
    over: bool
    """The game had an end."""
    led_to: float
    next: Step | None = None


@dataclass
class Lane:
    """One environment: its rows for the buffer, and its steps for the oracle."""

    number: int
    rng: np.random.Generator
    same_step: bool
    rows: list[Row] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    """By row."""
    _ids: Iterator[float] = field(default_factory=lambda: iter(()))

    def __post_init__(self) -> None:
        self._ids = (self.number * 10_000.0 + k for k in range(10_000))

    def play(self, rows: int) -> None:
        """Episodes of random length that end in every way there is."""
        while len(self.rows) < rows:
            self._episode()

    def _episode(self) -> None:
        seen, first = next(self._ids), True
        while True:
            action, reward = int(self.rng.integers(3)), float(self.rng.normal())
            how = self.rng.choice(["on", "terminated", "truncated", "lost"], p=[0.7, 0.12, 0.12, 0.06])
            row = Row(seen, True, first, action, reward, how == "terminated", how == "truncated")
            self.rows.append(row)
            if how == "lost":  # what came of it nobody knows
                row.valid = False
                return
            after = next(self._ids)
            step = self.steps[len(self.rows) - 1] = Step(seen, action, reward, how == "terminated", after)
            before = self.steps.get(len(self.rows) - 2)
            if before is not None and not first:
                before.next = step
            if how != "on":
                self._end(row, how, after)
                return
            seen, first = after, False

    def _end(self, row: Row, how: str, after: float) -> None:
        if not self.same_step:  # a row that only resets
            self.rows.append(Row(after, valid=False, action=9, reward=9.0))
        elif how == "truncated" and self.rng.random() < 0.2:  # no room for what it led to: it is left out
            row.valid = False
            del self.steps[len(self.rows) - 1]
            before = self.steps.get(len(self.rows) - 2)
            if before is not None:
                before.next = None
        elif how == "truncated":
            row.final = after


def cut(lanes: list[Lane], begin: int, steps: int, mask: bool = False) -> Segments:
    """One block [steps + 1] of these lanes, as a sampler writes it."""
    rows = [lane.rows[begin : begin + steps + 1] for lane in lanes]
    finals = [(t, b, row.final) for b, column in enumerate(rows) for t, row in enumerate(column[:steps]) if row.final is not None]
    spec = SegmentSpec(steps=steps, observation=SEEN, action=ACTED, finals=len(finals) + 1, mask_size=3 if mask else 0)
    block = Segments.empty(spec, len(lanes))
    for b, column in enumerate(rows):
        block.origin[b] = lanes[b].number
        for t, row in enumerate(column):
            block.observation[t, b] = row.seen, -row.seen
            block.first[t, b] = row.first
            if mask:
                block.action_mask[t, b] = allowed_at(row.seen)
            if t < steps:
                block.valid[t, b], block.action[t, b], block.reward[t, b] = row.valid, row.action, row.reward
                block.terminated[t, b], block.truncated[t, b] = row.terminated, row.truncated
    for k, (t, b, seen) in enumerate(finals):
        block.final_at[k] = t, b
        block.final_observation[k] = seen, -seen
    block.finals = len(finals)
    return block


def allowed_at(seen: float) -> list[bool]:
    return [int(seen) % 3 != k for k in range(3)]


def n_steps(step: Step, n: int) -> tuple[float, float, float, bool]:
    """(sum of rewards, discount, what follows, whether more steps could still come): by a plain loop."""
    total, discount = 0.0, 1.0
    for k in range(n):
        total += discount * step.reward
        discount *= GAMMA
        if step.over:
            return total, 0.0, step.seen, False
        if k == n - 1 or step.next is None:
            return total, discount, step.led_to, k < n - 1
        step = step.next
    raise AssertionError


def everything(buffer: TransitionReplay) -> dict[float, tuple[int, float, float, float]]:
    """What can be drawn: observation → (action, reward, discount, following)."""
    slots = np.flatnonzero(buffer.ready)
    drawn = buffer.gather(slots, np.ones(len(slots), np.float32))
    assert len(buffer) == len(slots)
    found = {}
    for i in range(len(slots)):
        assert drawn.observation[i, 1] == -drawn.observation[i, 0]
        assert drawn.observation[i, 0] not in found, "kept twice"
        found[float(drawn.observation[i, 0])] = (
            int(drawn.action[i]),
            float(drawn.reward[i]),
            float(drawn.discount[i]),
            float(drawn.next_observation[i, 0]),
        )
    return found


def assert_as_told(found: dict[float, tuple[int, float, float, float]], lanes: list[Lane], n: int) -> None:
    steps = {step.seen: step for lane in lanes for step in lane.steps.values()}
    for seen, (action, reward, discount, following) in found.items():
        step = steps[seen]
        total, expected, led_to, _ = n_steps(step, n)
        assert action == step.action
        assert reward == pytest.approx(total, abs=1e-5)
        assert discount == pytest.approx(expected, abs=1e-6)
        if discount:
            assert following == led_to


def forget_links(lane: Lane, row: int) -> None:
    """The chain of steps is cut before this row."""
    before = lane.steps.get(row - 1)
    if before is not None:
        before.next = None


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    same_step=st.booleans(),
    steps=st.sampled_from([1, 2, 3, 7]),
    count=st.integers(1, 4),
    n=st.sampled_from([1, 2, 3, 5]),
    losses=st.sampled_from([0.0, 0.3]),
)
def test_what_can_be_drawn_is_what_happened(seed: int, same_step: bool, steps: int, count: int, n: int, losses: float) -> None:
    """Every step of every episode, once, over its own n steps, across the borders of blocks and around lost ones."""
    rng = np.random.default_rng(seed)
    lanes = [Lane(k, np.random.default_rng([seed, k]), same_step) for k in range(count)]
    blocks = 6
    for lane in lanes:
        lane.play(blocks * steps + 1)
    buffer = TransitionReplay(SEEN, ACTED, 1000, n_step=n, gamma=GAMMA)
    arrived: dict[int, int] = {}  # row until which all of a lane is known
    for k in range(blocks):
        here = [lane for lane in lanes if rng.random() >= losses]
        for lane in lanes:
            if lane not in here:
                for t in range(k * steps, (k + 1) * steps):
                    lane.steps.pop(t, None)
                forget_links(lane, k * steps)
            else:
                arrived[lane.number] = (k + 1) * steps
        if here:
            buffer.add(cut(here, k * steps, steps))
    for lane in lanes:
        end = arrived.get(lane.number, 0)
        lane.steps = {t: step for t, step in lane.steps.items() if t < end}
        forget_links(lane, end)
    found = everything(buffer)
    assert_as_told(found, lanes, n)
    told = {step.seen for lane in lanes for step in lane.steps.values()}
    waiting = {step.seen for lane in lanes for step in lane.steps.values() if n_steps(step, n)[3]}
    assert told - waiting <= set(found) <= told  # those that wait for more steps may come later
    if losses == 0.0:  # whoever is still waiting is at the end of what is known
        open_ends = {
            step.seen
            for lane in lanes
            for step in lane.steps.values()
            if n_steps(step, n)[3] and _reaches(step, lane, (blocks - 1) * steps)
        }
        assert set(found) == told - open_ends


def _reaches(step: Step, lane: Lane, newest: int) -> bool:
    """Whether its chain goes to the last step of the newest block, and may go on from there."""
    while step.next is not None:
        step = step.next
    last = max(lane.steps)
    return step is lane.steps[last] and last >= newest and not lane.rows[last].truncated


@pytest.mark.parametrize("n", [1, 3])
def test_the_oldest_make_room_and_nothing_of_them_shows_again(n: int) -> None:
    lanes = [Lane(k, np.random.default_rng(k), same_step=bool(k % 2)) for k in range(3)]
    for lane in lanes:
        lane.play(601)
    buffer = TransitionReplay(SEEN, ACTED, 100, n_step=n, gamma=GAMMA, priorities=Priorities())
    for k in range(150):
        buffer.add(cut(lanes, 4 * k, 4))
        if k % 10 == 9:
            found = everything(buffer)
            assert_as_told(found, lanes, n)
            newest = {lane.rows[t].seen for lane in lanes for t in range(4 * k - 16, 4 * k) if t in lane.steps}
            assert newest - set(found) == set() if n == 1 else len(newest - set(found)) <= 3 * (n - 1)
            drawn = buffer.sample(200, np.random.default_rng(k).random, 0.4)
            assert set(drawn.slot) <= set(np.flatnonzero(buffer.ready).tolist())
            buffer.update_priorities(drawn.slot, np.random.default_rng(k).normal(size=200).astype(np.float32))
    assert len(buffer) <= 100
    assert buffer.added == sum(len([t for t in lane.steps if t < 600]) for lane in lanes)


def test_segments_of_one_origin_in_one_block_follow_each_other() -> None:
    """As games that call us hand them in: one row each, collated."""
    lane = Lane(7, np.random.default_rng(5), same_step=False)
    lane.play(41)
    buffer = TransitionReplay(SEEN, ACTED, 1000, n_step=3, gamma=GAMMA)
    buffer.add(join_segments([cut([lane], begin, 4) for begin in range(0, 20, 4)]))
    buffer.add(join_segments([cut([lane], 20, 7), cut([lane], 27, 3)]))  # of different lengths
    lane.steps = {t: step for t, step in lane.steps.items() if t < 30}
    forget_links(lane, 30)
    found = everything(buffer)
    assert_as_told(found, [lane], 3)
    assert len(found) >= len(lane.steps) - 2


def test_another_episode_is_not_taken_for_the_next_part_of_one() -> None:
    """A worker that is started anew begins an episode, though its first observation is the one that was last seen."""
    lane = Lane(0, np.random.default_rng(0), same_step=False)
    lane.rows = [Row(1.0, first=True, reward=1.0), Row(2.0, reward=2.0), Row(3.0)]
    again = Lane(0, np.random.default_rng(0), same_step=False)
    again.rows = [Row(3.0, first=True, reward=10.0), Row(4.0, reward=20.0), Row(5.0)]
    buffer = TransitionReplay(SEEN, ACTED, 100, n_step=3, gamma=GAMMA)
    buffer.add(cut([lane], 0, 2))
    assert len(buffer) == 0  # more steps may come
    buffer.add(cut([again], 0, 2))
    found = everything(buffer)
    assert set(found) == {1.0, 2.0}
    assert list(found[1.0]) == pytest.approx([0, 1 + 0.9 * 2, 0.81, 3.0])
    assert list(found[2.0]) == pytest.approx([0, 2.0, 0.9, 3.0])


def test_the_mask_is_that_of_what_follows() -> None:
    lanes = [Lane(k, np.random.default_rng(k), same_step=False) for k in range(3)]
    for lane in lanes:
        lane.play(41)
    buffer = TransitionReplay(SEEN, ACTED, 1000, gamma=GAMMA)
    for k in range(10):
        buffer.add(cut(lanes, 4 * k, 4, mask=True))
    slots = np.flatnonzero(buffer.ready)
    drawn = buffer.gather(slots, np.ones(len(slots), np.float32))
    assert drawn.next_mask is not None
    for i in np.flatnonzero(drawn.discount):
        assert drawn.next_mask[i].tolist() == allowed_at(float(drawn.next_observation[i, 0]))


# -- drawing


def filled(priorities: Priorities | None, steps: int = 60, **settings: Any) -> TransitionReplay:
    lanes = [Lane(k, np.random.default_rng(k), same_step=False) for k in range(4)]
    for lane in lanes:
        lane.play(steps + 1)
    buffer = TransitionReplay(SEEN, ACTED, 2000, gamma=GAMMA, priorities=priorities, **settings)
    for k in range(steps // 4):
        buffer.add(cut(lanes, 4 * k, 4))
    return buffer


def test_without_priorities_every_transition_is_as_likely() -> None:
    buffer, rng = filled(None), np.random.default_rng(0)
    draws = 20_000
    seen = np.bincount(buffer.sample(draws, rng.random).slot, minlength=2000)
    slots = np.flatnonzero(buffer.ready)
    assert seen.sum() == seen[slots].sum()
    expected = draws / len(slots)
    chi2 = float(((seen[slots] - expected) ** 2 / expected).sum())
    assert chi2 < len(slots) + 6 * np.sqrt(2 * len(slots))


def test_priorities_and_weights_are_those_of_the_paper() -> None:
    """P(i) = p_i^α / Σ p^α, one from each of N equal parts; w_i = (M · P(i))^−β, over the largest (Schaul et al., 3.3 and 3.4)."""
    buffer, rng = filled(Priorities(alpha=0.7, eps=0.01)), np.random.default_rng(0)
    slots = np.flatnonzero(buffer.ready)
    error = rng.normal(size=len(slots)).astype(np.float32) * 3
    buffer.update_priorities(slots, error)
    priority = (np.abs(error.astype(np.float64)) + 0.01) ** 0.7
    uniforms = rng.random(50)
    drawn: TransitionBatch = buffer.sample(50, lambda count: uniforms[:count], beta=0.5)
    sums = np.cumsum(priority)
    expected = [int(np.argmax(sums > (i + u) / 50 * sums[-1])) for i, u in enumerate(uniforms)]
    assert drawn.slot.tolist() == slots[expected].tolist()
    probability = priority[expected] / priority.sum()
    raw = (len(slots) * probability) ** -0.5
    assert drawn.weight == pytest.approx(raw / raw.max(), rel=1e-5)
    assert buffer.priority_max == pytest.approx(max(1.0, priority.max()))


def test_what_is_new_has_the_greatest_priority() -> None:
    buffer = filled(Priorities(alpha=1.0))
    old = np.flatnonzero(buffer.ready)
    buffer.update_priorities(old, np.where(np.arange(len(old)) == 0, 8.0, 1e-6).astype(np.float32))
    lane = Lane(50, np.random.default_rng(50), same_step=False)
    lane.rows = [Row(1.0, first=True), Row(2.0), Row(3.0), Row(4.0), Row(5.0)]
    buffer.add(cut([lane], 0, 4))
    drawn = buffer.sample(400, np.random.default_rng(0).random, 0.4)
    new = set(np.flatnonzero(buffer.ready).tolist()) - set(old.tolist())
    share = {slot: float((drawn.slot == slot).mean()) for slot in (*new, int(old[0]))}
    assert len(new) == 4
    assert all(value == pytest.approx(0.2, abs=0.02) for value in share.values()), share


# -- bounds, and what a resumed run goes on with


def test_a_too_large_buffer_reports_the_bytes_needed() -> None:
    frames = ArraySpec((4, 84, 84), np.dtype(np.uint8))
    with pytest.raises(ConfigError, match=r"capacity is 1,000,000.* would need 28,2\d\d,\d\d\d,\d\d\d bytes"):
        TransitionReplay(frames, ACTED, 1_000_000, max_bytes=4 << 30)
    kept = TransitionReplay(
        frames, ACTED, 100_000, max_bytes=3 << 30
    )  # not twice: what a step led to is where the next one begins
    assert kept.nbytes == 0


def test_a_block_that_would_fill_the_buffer_alone_is_refused() -> None:
    lane = Lane(0, np.random.default_rng(0), same_step=False)
    lane.play(41)
    with pytest.raises(ConfigError, match="a single block has"):
        TransitionReplay(SEEN, ACTED, 100).add(cut([lane], 0, 40))


@pytest.mark.parametrize("priorities", [None, Priorities()])
def test_a_stored_buffer_draws_the_same(priorities: Priorities | None) -> None:
    buffer = filled(priorities, n_step=3)
    slots = np.flatnonzero(buffer.ready)
    buffer.update_priorities(slots, np.random.default_rng(1).normal(size=len(slots)).astype(np.float32))
    other = TransitionReplay(SEEN, ACTED, 2000, n_step=3, gamma=GAMMA, priorities=priorities)
    other.load_state({name: array.copy() for name, array in buffer.state().items()})
    one, two = (each.sample(64, np.random.default_rng(2).random, 0.4) for each in (buffer, other))
    for name in ("slot", "observation", "action", "reward", "discount", "next_observation", "weight"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
    smaller = TransitionReplay(SEEN, ACTED, 100, n_step=3, gamma=GAMMA, priorities=priorities)
    with pytest.raises(ConfigError, match="does not fit"):
        smaller.load_state(buffer.state())
