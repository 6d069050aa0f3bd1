"""Evaluations: every row plays its share, and nothing but whole episodes counts."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ludus.envs.vector_env import Environments, LoopEnvironments, VectorEnvironments
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.episode_runner import (
    EPISODE_STEPS,
    EpisodePlan,
    Score,
    episode_quota,
    episode_step_limit,
    play,
    preserve_random_state,
)
from tests.games import RememberAndAim


class Steps(gym.Env[Any, Any]):
    """Ends after `length` steps, each worth 1; the observation counts the steps of the episode."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length, self.t = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t >= self.length, False, {}


def rows(mode: AutoresetMode | None, *lengths: int) -> Environments:
    if mode is None:
        return LoopEnvironments("steps", [Steps(n) for n in lengths])
    return VectorEnvironments("steps", SyncVectorEnv([lambda n=n: Steps(n) for n in lengths], autoreset_mode=mode))  # type: ignore[misc]


def played(environments: Environments, episodes: int, **options: Any) -> Score:
    policy = Policy(environments.observation_space, environments.action_space, options.pop("network", None))
    with policy.acting():
        plan = {name: options.pop(name) for name in ("by_steps", "max_steps", "group") if name in options}
        return play(policy, environments, EpisodePlan(episodes, **plan), 0, **options)


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_short_episodes_are_not_counted_more_often_than_long_ones(mode: AutoresetMode | None) -> None:
    score = played(rows(mode, 2, 50, 3), 5)
    assert sorted(score.lengths) == [2, 2, 3, 50, 50] or sorted(score.lengths) == [2, 2, 3, 3, 50]
    assert sorted(score.lengths).count(50) >= 1
    assert list(score.returns) == [float(n) for n in score.lengths]
    assert score.complete


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_side_is_as_good_as_its_heroes_together(mode: AutoresetMode | None) -> None:
    score = played(rows(mode, 2, 4, 10, 20), 8, group=2)
    assert score.returns == (2.0, 2.0, 4.0, 4.0, 10.0, 10.0, 20.0, 20.0)
    assert score.sides == (3.0, 3.0, 15.0, 15.0), "matches, of which each is one piece of news"
    assert score.interval == replace(score, sides=(), returns=score.sides).interval
    assert score.interval != replace(score, sides=()).interval


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_by_steps_every_row_plays_whole_episodes_until_it_has_made_its_share(mode: AutoresetMode | None) -> None:
    score = played(rows(mode, 2, 50, 3), 21, by_steps=True)  # 7 steps for each
    assert sorted(score.lengths) == [2, 2, 2, 2, 3, 3, 3, 50]
    assert sum(score.lengths) >= 21
    assert score.complete


@pytest.mark.parametrize("mode", [None, AutoresetMode.SAME_STEP])
def test_recurrent_state_is_reset_with_every_episode(mode: AutoresetMode | None) -> None:
    """Deterministic episodes of one row are alike only if nothing of the former one is remembered."""
    environments = rows(mode, 4)
    policy = Policy(environments.observation_space, environments.action_space, NetworkConfig(core="lstm", cell_size=8))
    states: list[tuple[float, bytes]] = []
    original = policy.step

    def watched(observation: Any, state: Any, first: Any, *rest: Any) -> Any:
        result = original(observation, state, first, *rest)
        states.append((float(observation[0, 0]), result[3][0].numpy().tobytes()))
        return result

    policy.step = watched  # type: ignore[method-assign, assignment]
    with torch.inference_mode():
        play(policy, environments, EpisodePlan(3), 0)
    after_first = {state for t, state in states if t == 0.0}
    assert len(after_first) == 1


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_episode_that_never_ends_is_cut_and_counts_as_it_is(mode: AutoresetMode | None) -> None:
    score = played(rows(mode, 10**9, 4), 5, max_steps=30)
    assert (score.returns, score.lengths) == ((30.0, 4.0, 4.0), (30, 4, 4)), "its row plays no further one"
    assert (score.cut, score.complete) == (1, True)


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_environment_that_ends_at_once_is_scored(mode: AutoresetMode | None) -> None:
    score = played(rows(mode, 1, 1), 7)
    assert (score.lengths, score.returns, score.cut) == ((1,) * 7, (1.0,) * 7, 0)
    assert score.interval == (1.0, 1.0)


def test_the_bound_on_an_episode_gives_way_to_what_the_environment_allows() -> None:
    assert episode_step_limit("CartPole-v1") == EPISODE_STEPS
    gym.register("VeryLong-v0", entry_point="tests.games:remember_and_aim", max_episode_steps=10**6)
    try:
        assert episode_step_limit("VeryLong-v0") == 10**6
    finally:
        del gym.registry["VeryLong-v0"]
    assert episode_step_limit("tests.games:remember_and_aim") == EPISODE_STEPS


class Shown(Steps):
    """Pays what it is told to do, for eight steps; its seed is what it shows."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(1, (seed or 0) % 7, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, _, *rest = super().step(action)
        return seen, float(action) * 2.0**self.t, *rest


def test_a_row_plays_the_same_independent_of_other_rows() -> None:
    """So that any number of processes may share an evaluation."""
    torch.manual_seed(0)
    policy = Policy(Shown(8).observation_space, Shown(8).action_space)

    def score(first: int, count: int) -> Score:
        with policy.acting():
            quota = episode_quota(13, 4)[first : first + count]
            return play(
                policy,
                LoopEnvironments("shown", [Shown(8) for _ in range(count)]),
                EpisodePlan(quota),
                50 + first,
                deterministic=False,
            )

    together, apart = score(0, 4), [score(0, 1), score(1, 2), score(3, 1)]
    assert len(together.returns) == 13
    assert together.returns == sum((part.returns for part in apart), ())
    assert len(set(together.returns)) > 3, "the noise is not the same for all"


def test_an_evaluation_does_not_change_the_global_random_state() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    expected = [draw(), draw()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    before = draw()
    with contextlib.suppress(ValueError), preserve_random_state():
        draw()
        raise ValueError("the environment failed")
    assert [before, draw()] == expected


def test_an_evaluation_can_be_interrupted() -> None:
    asked = iter(range(100))
    score = played(rows(None, 5), 50, interrupted=lambda: next(asked) > 12)
    assert not score.complete
    assert len(score.returns) == 2


def test_masked_and_hybrid_actions_are_legal_in_an_evaluation() -> None:
    """The game itself asserts that the forbidden door is never chosen."""
    score = played(LoopEnvironments("doors", [RememberAndAim() for _ in range(3)]), 30, deterministic=False)
    assert len(score.returns) == 30


class Fails(Steps):
    """Raises at its third step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == 2:
            raise RuntimeError("the game crashed")
        return super().step(action)


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_what_an_environment_did_before_it_failed_is_not_scored(mode: AutoresetMode | None) -> None:
    environments: Environments
    if mode is None:
        environments = LoopEnvironments("fails", [Fails(5), Steps(4)], lambda: Steps(5))
    else:
        made = SyncVectorEnv([lambda: Fails(5), lambda: Steps(4)], autoreset_mode=mode)
        again = SyncVectorEnv([lambda: Steps(5), lambda: Steps(4)], autoreset_mode=mode)
        environments = VectorEnvironments("fails", made, lambda: again)
    policy = Policy(environments.observation_space, environments.action_space, NetworkConfig(core="lstm", cell_size=8))
    began: list[tuple[float, bool]] = []
    original = policy.step

    def watched(observation: Any, state: Any, first: Any, *rest: Any) -> Any:
        began.append((float(observation[0, 0]), bool(first[0])))
        return original(observation, state, first, *rest)

    policy.step = watched  # type: ignore[method-assign, assignment]
    with policy.acting():
        score = play(policy, environments, EpisodePlan(2), 0)
    assert score.complete
    assert sorted(zip(score.lengths, score.returns, strict=True)) == [(4, 4.0), (5, 5.0)]
    assert began[:5] == [(0.0, True), (1.0, False), (2.0, False), (0.0, True), (1.0, False)]
