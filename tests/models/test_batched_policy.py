from __future__ import annotations

import asyncio
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import spaces
from ludus.core.spaces import SpaceParser
from ludus.core.tree import Tree, leaves, map_tree
from ludus.models.inference.batched_policy import BatchedPolicy, Decision
from ludus.models.policy import Policy
from tests.gateway.scripted import Versions, run, tiny_policy

Space = gym.Space[Any]

NESTED = gs.Dict({"near": gs.Box(-1, 1, (2,)), "far": gs.Tuple([gs.Discrete(3), gs.Box(0, 255, (8, 8, 1), np.uint8)])})
ACTIONS: list[Space] = [
    gs.Discrete(4),
    gs.Discrete(3, start=-5),
    gs.MultiDiscrete([2, 3]),
    gs.MultiBinary(3),
    gs.Box(-2.0, 3.0, (2,)),
    gs.Box(-np.inf, np.inf, (1, 2)),
    gs.Dict({"door": gs.Discrete(3), "aim": gs.Box(-1, 1, (1,)), "keys": gs.Tuple([gs.MultiBinary(2), gs.Discrete(2, start=1)])}),
]


def observations(policy: Policy, count: int) -> list[Tree]:
    """As `SpaceParser` hands them on."""
    policy.observation_space.seed(0)
    fit = SpaceParser(policy.observation_space)
    return [fit(policy.observation_space.sample()) for _ in range(count)]


async def together(deciding: BatchedPolicy[Any], rows: list[tuple[Any, ...]]) -> list[Decision]:
    return list(await asyncio.gather(*(deciding.decide(*row) for row in rows)))


def by_hand(policy: Policy, observation: Tree, state: Any = None, mask: Any = None) -> tuple[Tree, float, float, Any]:
    """One row, one call."""
    row = map_tree(lambda x: torch.from_numpy(np.asarray(x)[None]), observation)
    before = policy.initial_state(1) if state is None else tuple(torch.from_numpy(s[None].copy()) for s in state)
    allowed = None if mask is None else torch.from_numpy(mask[None])
    with torch.no_grad():
        action, log_prob, value, after = policy.step(row, before, None, allowed, None)
    chosen = policy.distribution.to_environment(map_tree(torch.Tensor.numpy, action))
    return map_tree(lambda x: x[0], chosen), float(log_prob[0]), float(value[0]), tuple(s[0].numpy() for s in after)


@pytest.mark.parametrize("core", [None, "lstm"])
@pytest.mark.parametrize("action", ACTIONS, ids=repr)
def test_rows_that_are_decided_together_are_decided_as_if_alone(action: Space, core: str | None) -> None:
    policy = tiny_policy(NESTED, action, core=core)
    deciding, seen, random = (
        BatchedPolicy(Versions(policy), deterministic=True),
        observations(policy, 12),
        np.random.default_rng(0),
    )
    size = spaces.mask_size(action)
    masks = [None if i % 3 == 0 else np.ones(size, np.bool_) for i in range(12)]
    states = [None if i % 2 else tuple(s.zeros() + random.normal() for s in policy.state_spec()) for i in range(12)]
    states = [None if s is None else tuple(np.asarray(part, np.float32) for part in s) for s in states]

    decisions = run(together(deciding, list(zip(seen, states, masks, strict=True))))
    for decision, observation, state, mask in zip(decisions, seen, states, masks, strict=True):
        expected, log_prob, value, after = by_hand(policy, observation, state, mask)
        for (path, got), (_, wanted) in zip(leaves(decision.action), leaves(expected), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=path)
        assert policy.action_space.contains(map_tree(lambda x: x if np.ndim(x) else x[()], decision.action))
        assert decision.log_prob == pytest.approx(log_prob, abs=1e-4)
        assert decision.value == pytest.approx(value, abs=1e-4)
        assert decision.version == 1
        for got, wanted in zip(decision.state, after, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_state_that_a_session_keeps_does_not_keep_the_batch() -> None:
    policy = tiny_policy(core="gru")
    decisions = run(together(BatchedPolicy(Versions(policy)), [(seen,) for seen in observations(policy, 8)]))
    for decision in decisions:
        assert all(part.base is None for part in decision.state)


def test_a_state_handed_back_is_not_written_to() -> None:
    policy = tiny_policy(core="lstm")

    async def twice() -> None:
        deciding, (seen,) = BatchedPolicy(Versions(policy), deterministic=True), observations(policy, 1)
        first = await deciding.decide(seen)
        kept = [part.copy() for part in first.state]
        again = [await deciding.decide(seen, first.state) for _ in range(2)]
        np.testing.assert_array_equal(first.state[0], kept[0])
        np.testing.assert_array_equal(again[0].state[0], again[1].state[0])
        assert not np.array_equal(again[0].state[0], kept[0]), "the state must count"

    run(twice())


@given(st.data())
def test_what_a_mask_forbids_is_never_chosen(data: st.DataObject) -> None:
    action = data.draw(st.sampled_from([ACTIONS[0], ACTIONS[1], ACTIONS[2], ACTIONS[3], ACTIONS[6]]))
    policy = tiny_policy(action=action, seed=data.draw(st.integers(0, 3)))
    size = spaces.mask_size(action)
    masks = []
    for _ in range(data.draw(st.integers(1, 6))):
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
        for part in spaces.choices(action):
            if not mask[part].any():
                mask[data.draw(st.integers(part.start, part.stop - 1))] = True
        masks.append(mask)
    deciding = BatchedPolicy(Versions(policy), seed=data.draw(st.integers(0, 99)))
    rows: list[tuple[Any, ...]] = [(seen, None, mask) for seen, mask in zip(observations(policy, len(masks)), masks, strict=True)]
    rows.append((rows[0][0], None, None))  # a row without a mask beside those with one
    for decision, mask in zip(run(together(deciding, rows)), masks, strict=False):
        assert allowed(decision.chosen, mask, action)
        assert np.isfinite(decision.log_prob)


def allowed(chosen: Tree, mask: Any, action: Space) -> bool:
    """Actions as the policy keeps them count from 0."""
    at, fine = 0, True
    for (_, space), (_, value) in zip(spaces.space_leaves(action), leaves(chosen), strict=True):
        if isinstance(space, gs.Discrete):
            fine &= bool(mask[at + int(value)])
            at += int(space.n)
        elif isinstance(space, gs.MultiDiscrete):
            for n, option in zip(space.nvec, value, strict=True):
                fine &= bool(mask[at + int(option)])
                at += int(n)
        elif isinstance(space, gs.MultiBinary):
            fine &= not (np.asarray(value).astype(bool) & ~mask[at : at + value.size]).any()
            at += value.size
    return fine


def test_exploration_follows_the_probabilities_and_the_seed() -> None:
    policy = tiny_policy()
    (seen,) = observations(policy, 1)

    def drawn(seed: int | None) -> list[int]:
        deciding = BatchedPolicy(Versions(policy), seed=seed)
        return [int(d.action) for d in run(together(deciding, [(seen,)] * 2000))]

    one, same, other = drawn(5), drawn(5), drawn(6)
    assert one == same
    assert one != other
    assert drawn(None) != drawn(None)
    with torch.no_grad():
        outputs, _, _ = policy.network(torch.from_numpy(seen[None]), (), None)
    expected = torch.softmax(outputs[0], -1).numpy()
    found = np.bincount(one, minlength=4) / len(one)
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_new_weights_are_taken_up_between_two_batches() -> None:
    versions = Versions(tiny_policy())

    async def play() -> list[list[int]]:
        deciding, (seen,) = BatchedPolicy(versions, deterministic=True, max_batch_size=2), observations(versions.known[1], 1)
        waiting = [deciding.decide(seen) for _ in range(3)]  # two batches: two rows, then one
        waiting[1].add_done_callback(lambda _: versions.renew())
        first = await asyncio.gather(*waiting)
        for decision in first:
            assert decision.value == pytest.approx(by_hand(versions.known[decision.version], seen)[2], abs=1e-5)
        second = await asyncio.gather(*[deciding.decide(seen) for _ in range(2)])
        return [[d.version for d in part] for part in (first, second)]

    first, second = run(play())
    assert first[:2] == [1, 1]
    assert second == [2, 2]


def test_a_failed_batch_fails_all_its_callers_and_not_the_next() -> None:
    policy = tiny_policy()

    async def play() -> None:
        deciding, (good,) = BatchedPolicy(Versions(policy), deterministic=True), observations(policy, 1)
        answers = await asyncio.gather(deciding.decide(good), deciding.decide(np.zeros(7, np.float32)), return_exceptions=True)
        assert all(isinstance(answer, ValueError | RuntimeError) for answer in answers)
        assert (await deciding.decide(good)).value == pytest.approx(by_hand(policy, good)[2], abs=1e-5)

    run(play())
