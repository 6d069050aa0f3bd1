"""Evaluations: every row plays its share, and nothing but whole episodes counts."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ludus.actor.evaluate import Score, play
from ludus.game.environment import Environments, LoopEnvironments, VectorEnvironments
from ludus.model.networks import NetworkConfig
from ludus.model.policy import Policy
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
        return play(policy, environments, episodes, 0, **options)


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_short_episodes_are_not_counted_more_often_than_long_ones(mode: AutoresetMode | None) -> None:
    score = played(rows(mode, 2, 50, 3), 5)
    assert sorted(score.lengths) == [2, 2, 3, 50, 50] or sorted(score.lengths) == [2, 2, 3, 3, 50]
    assert sorted(score.lengths).count(50) >= 1
    assert list(score.returns) == [float(n) for n in score.lengths]
    assert score.complete


@pytest.mark.parametrize("mode", [None, AutoresetMode.SAME_STEP])
def test_recurrent_state_begins_anew_with_every_episode(mode: AutoresetMode | None) -> None:
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
        play(policy, environments, 3, 0)
    after_first = {state for t, state in states if t == 0.0}
    assert len(after_first) == 1


def test_an_environment_that_never_ends_is_given_up() -> None:
    score = played(rows(None, 10**9), 2, max_steps=30)
    assert (score.returns, score.complete) == ((), False)


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
        score = play(policy, environments, 2, 0)
    assert score.complete
    assert sorted(zip(score.lengths, score.returns, strict=True)) == [(4, 4.0), (5, 5.0)]
    assert began[:5] == [(0.0, True), (1.0, False), (2.0, False), (0.0, True), (1.0, False)]
