from __future__ import annotations

import threading
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.buffers.collate import CollatedBatches, join_segments
from ludus.core.spaces import ArraySpec
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Segments, SegmentSpec
from ludus.errors import MemoryClosed
from ludus.gateway.agent import SeatAgent
from ludus.models.policy import Policy
from ludus.transport.local import LocalMemory
from tests.gateway.scripted import RecordedSeat, run, tiny_policy

FLOAT = np.dtype(np.float32)


def spec(model: str = "model", steps: int = 4) -> SegmentSpec:
    seen = {"a": ArraySpec((2,), FLOAT), "b": (ArraySpec((), np.dtype(np.int64)),)}
    return SegmentSpec(
        steps, seen, ArraySpec((), FLOAT), mask_size=3, state=(ArraySpec((2,), FLOAT),), state_every=2, model=model
    )


def write(memory: LocalMemory, first: int, steps: int, *, ended: bool = False) -> None:
    """A segment whose every number says which step it is."""
    block = memory.reserve(0)
    assert block is not None
    total = block.spec.steps
    numbers = first + np.arange(total + 1)
    block.observation["a"][:, 0] = numbers[:, None]
    block.observation["b"][0][:, 0] = numbers
    block.reward[:, 0] = block.action[:, 0] = block.version[:, 0] = numbers[:-1]
    block.value[:, 0] = numbers
    block.state[0][:, 0] = numbers[:-1:2, None]
    block.valid[:, 0] = np.arange(total) < steps
    block.action_mask[:, 0] = numbers[:, None] % 2 == 0
    block.origin[:] = first
    block.episode_return = np.array([first] if ended else [], np.float32)
    block.episode_length = np.array([steps] if ended else [], np.int64)
    memory.commit(block)


def check_row(batch: Segments, row: int) -> list[int]:
    """All arrays of a row say the same, up to the observation after its last step; the steps that it holds."""
    first, used = int(batch.origin[row]), int(np.count_nonzero(batch.valid[:, row]))
    numbers = first + np.arange(used + 1)
    assert batch.observation["a"][: used + 1, row].tolist() == [[n, n] for n in numbers]
    assert batch.observation["b"][0][: used + 1, row].tolist() == numbers.tolist()
    for name in ("reward", "action", "version"):
        assert getattr(batch, name)[:used, row].tolist() == numbers[:-1].tolist()
    assert batch.value[: used + 1, row].tolist() == numbers.tolist()
    assert batch.state[0][: -(-used // 2), row].tolist() == [[n, n] for n in numbers[:-1:2]]
    assert batch.action_mask[: used + 1, row].tolist() == [[n % 2 == 0] * 3 for n in numbers]
    assert not batch.valid[used:, row].any()
    return [int(number) for number in numbers[:-1]]


@given(st.data())
def test_batches_hold_enough_steps_of_one_model_and_every_step_once(data: st.DataObject) -> None:
    least = data.draw(st.integers(1, 12))
    memories = {name: LocalMemory(spec(name), 1, 100) for name in ("blue", "red")}
    collated = CollatedBatches(list(memories.values()), least)
    expected: dict[str, list[int]] = {"blue": [], "red": []}
    got: dict[str, list[int]] = {"blue": [], "red": []}
    number = 0

    def take_all() -> None:
        while collated.ready():
            batch = collated.take(0)
            assert batch is not None
            rows = [check_row(batch, row) for row in range(batch.rows)]
            assert batch.steps == sum(map(len, rows)) >= least
            assert batch.steps - len(rows[-1]) < least, "it waited longer than it had to"
            got[batch.model] += [step for row in rows for step in row]
            assert batch.spec == spec(batch.model, max(map(len, rows))), "no longer than its longest row"
            collated.release(batch)
        assert collated.take(0) is None

    for _ in range(data.draw(st.integers(1, 30))):
        model, steps = data.draw(st.sampled_from(["blue", "red"])), data.draw(st.integers(1, 4))
        write(memories[model], number, steps)
        expected[model] += range(number, number + steps)
        number += 10
        if data.draw(st.booleans()):
            take_all()
    take_all()
    for model, steps_of in got.items():
        assert steps_of == expected[model][: len(steps_of)], "in the order in which they came"
        assert len(expected[model]) - len(steps_of) < least
    released = sum(memory.stats().released for memory in memories.values())
    assert collated.stats().released == released


def test_what_a_batch_was_made_of_is_given_back_at_once_and_may_be_overwritten() -> None:
    memory = LocalMemory(spec(), 1, 2)  # two blocks: the third segment is written where the first was
    collated = CollatedBatches([memory], 6)
    write(memory, 0, 4)
    write(memory, 100, 4)
    assert memory.reserve(0) is None
    batch = collated.take(0)
    assert batch is not None
    write(memory, 200, 4)
    write(memory, 300, 4)
    assert [check_row(batch, row) for row in range(2)] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    following = collated.take(0)
    assert following is not None
    assert [check_row(following, row)[0] for row in range(2)] == [200, 300]


def test_a_batch_of_one_segment_is_a_copy_too() -> None:
    memory = LocalMemory(spec(), 1, 1)
    write(memory, 5, 3)
    block = memory.take(0)
    assert block is not None
    batch = join_segments([block])
    block.observation["a"][:], block.reward[:], block.valid[:], block.state[0][:] = -1, -1, False, -1
    assert check_row(batch, 0) == [5, 6, 7]


def test_episodes_that_ended_are_reported_once() -> None:
    memory = LocalMemory(spec(), 1, 10)
    collated = CollatedBatches([memory], 8)
    for number, ended in ((0, True), (10, False), (20, True)):
        write(memory, number, 3, ended=ended)
    batch = collated.take(0)
    assert batch is not None
    assert batch.episode_return.tolist() == [0, 20]
    assert batch.episode_length.tolist() == [3, 3]


def test_waiting_for_a_batch_ends_when_it_is_complete_or_the_time_is_up() -> None:
    memory = LocalMemory(spec(), 1, 10)
    collated = CollatedBatches([memory], 4)
    write(memory, 0, 2)
    assert collated.take(0.01) is None
    writer = threading.Timer(0.02, write, (memory, 10, 2))
    writer.start()
    batch = collated.take(20)
    writer.join()
    assert batch is not None
    assert batch.steps == 4


def test_a_batch_is_released_once() -> None:
    memory = LocalMemory(spec(), 1, 10)
    collated = CollatedBatches([memory], 1)
    write(memory, 0, 1)
    batch = collated.take(0)
    assert batch is not None
    collated.release(batch)
    with pytest.raises(ValueError, match="without having been taken"):
        collated.release(batch)


def test_closing_closes_every_memory() -> None:
    memories = [LocalMemory(spec(), 1, 1), LocalMemory(spec("other"), 1, 1)]
    CollatedBatches(memories, 1).close()
    for memory in memories:
        with pytest.raises(MemoryClosed):
            memory.take(0)


# -- learning from it ---------------------------------------------------------------------------------------------------

EPISODES = [3, 1, 8, 5, 2, 8, 6, 1, 7]


def recorded(policy: Policy, steps: int, lengths: list[int] = EPISODES) -> tuple[Segments, list[list[float]]]:
    """The same terminated episodes in segments of any length, and the rewards of each."""
    recorded_seat, rewards = RecordedSeat(policy, steps), []

    async def play() -> None:
        random = np.random.default_rng(3)
        distinct = iter(random.permutation(np.linspace(-1, 1, sum(lengths))).tolist())  # a step is known by its reward
        for length in lengths:
            agent, earned = SeatAgent(recorded_seat.seat), []
            for _ in range(length):
                await agent.act(random.normal(size=3), random.random(4) < [0.5, 0.5, 0.5, 1.1])
                earned.append(next(distinct))
                agent.reward(earned[-1])
            await agent.finish(terminated=True)
            rewards.append(earned)

    run(play())
    return join_segments(recorded_seat.segments()), rewards


def learner(policy: Policy, **settings: Any) -> PPO:
    return PPO(policy, PPOConfig.model_validate({"gamma": 0.9, "lambda": 0.8, "normalize_advantage": False} | settings), 0)


def by_hand(segments: Segments, rewards: list[list[float]], gamma: float, lambda_: float) -> dict[float, float]:
    """Reward → advantage of its step, from the formula and a list of episodes (here a segment holds a whole one)."""
    advantages = {}
    for row, earned in enumerate(rewards):
        carry = 0.0
        for t in reversed(range(len(earned))):
            following = float(segments.value[t + 1, row]) if t + 1 < len(earned) else 0.0
            delta = earned[t] + gamma * following - float(segments.value[t, row])
            carry = delta + gamma * lambda_ * carry
            advantages[round(earned[t], 4)] = carry
    return advantages


def advantages_of(algorithm: PPO, segments: Segments) -> dict[float, float]:
    """The same from a prepared batch."""
    batch, _ = algorithm.prepare(segments)
    valid = torch.ones_like(batch.advantage, dtype=torch.bool) if batch.valid is None else batch.valid
    observation_of = {tuple(np.round(o, 5)): r for o, r in _steps(segments)}
    pairs = zip(batch.observation[valid].numpy(), batch.advantage[valid].tolist(), strict=True)
    return {observation_of[tuple(np.round(seen, 5))]: advantage for seen, advantage in pairs}


def _steps(segments: Segments) -> list[tuple[Any, float]]:
    where = np.argwhere(segments.valid)
    return [(segments.observation[t, b], round(float(segments.reward[t, b]), 4)) for t, b in where]


def widened(segments: Segments, steps: int) -> Segments:
    """The same with more padding, which may hold anything."""
    wide = Segments.empty(replace(segments.spec, steps=steps), segments.rows)
    wide.observation[:], wide.value[:] = 1e6, 1e6
    wide.reward[:], wide.log_prob[:] = np.nan, np.nan
    wide.terminated[:], wide.truncated[:], wide.first[:], wide.action_mask[:] = True, True, True, False
    for name, array in segments.arrays().items():
        if name in (*OVER_STEPS, *OVER_STEPS_AND_AFTER):
            getattr(wide, name)[: len(array)] = array
    for whole, part in zip(wide.state, segments.state, strict=True):
        whole[:] = 1e6
        whole[: len(part)] = part
    wide.origin[:] = segments.origin
    return wide


@pytest.mark.parametrize("core", [None, "lstm"])
def test_advantages_are_those_of_the_formula_however_long_the_padding(core: str | None) -> None:
    policy = tiny_policy(core=core, max_seq_len=3)
    algorithm = learner(policy)
    segments, rewards = recorded(policy, 20)
    assert segments.spec.steps == 8
    expected = by_hand(segments, rewards, 0.9, 0.8)
    for steps in (8, 9, 20, 64):
        found = advantages_of(algorithm, widened(segments, steps))
        assert found.keys() == expected.keys()
        assert len(found) == sum(EPISODES)
        for reward, advantage in expected.items():
            assert found[reward] == pytest.approx(advantage, abs=1e-4)


@pytest.mark.parametrize("core", [None, "lstm"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_short_segments_equal_long_ones_if_boundaries_do_not_matter(steps: int, core: str | None) -> None:
    """With lambda 0 an advantage looks one step ahead, which the bootstrap row of every segment shows."""
    policy = tiny_policy(core=core, max_seq_len=16)
    algorithm = learner(policy, **{"lambda": 0.0})
    short, long = recorded(policy, steps)[0], recorded(policy, 64)[0]
    found, expected = advantages_of(algorithm, short), advantages_of(algorithm, long)
    assert found.keys() == expected.keys()
    for reward, advantage in expected.items():
        assert found[reward] == pytest.approx(advantage, abs=1e-4)
    # A recurrent state was made by the weights that acted, and gradients stop there: compared is what does not depend on it.
    moved = 1.0 if core else 1.1
    one, other = loss_of(algorithm, short, moved), loss_of(algorithm, long, moved)
    for name in one.keys() - ({"gradient"} if core else set()):
        assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("core", [None, "lstm", "gru"])
def test_padding_changes_neither_the_loss_nor_its_gradient(core: str | None) -> None:
    policy = tiny_policy(core=core, max_seq_len=3)
    algorithm = learner(policy)
    tight, _ = recorded(policy, 8)
    one = loss_of(algorithm, tight)
    assert one["gradient"] > 0
    for steps in (9, 33):
        other = loss_of(algorithm, widened(tight, steps))
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


def loss_of(algorithm: PPO, segments: Segments, moved: float = 1.1) -> dict[str, float]:
    """On a policy that has moved since, so that the ratios are not all 1."""
    policy = deepcopy(algorithm.policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(moved)
            parameter.grad = None
    loss, numbers = algorithm.loss(policy, algorithm.prepare(segments)[0], 0.01, True)
    loss.backward()
    gradient = sum(float(p.grad.square().sum()) for p in policy.parameters() if p.grad is not None)
    return {name: float(value) for name, value in numbers.items()} | {"gradient": gradient}


def test_no_model_is_starved_by_another() -> None:
    memories = {name: LocalMemory(spec(name), 1, 100) for name in ("blue", "red")}
    collated = CollatedBatches(list(memories.values()), 4)
    for number in range(12):
        for memory in memories.values():
            write(memory, 10 * number, 4)
    taken = []
    for _ in range(6):
        batch = collated.take(0)
        assert batch is not None
        taken.append(batch.model)
        collated.release(batch)
    assert taken == ["blue", "red"] * 3
