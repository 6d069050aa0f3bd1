"""Wrappers named in a config: around every copy, around all of them together, and what is wrong with one that cannot be."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.core import trust
from ludus.envs.vector_env import LoopEnvironments, SingleRow, VectorEnvironments, make_environments, make_one
from ludus.errors import ConfigError, EnvironmentFault, UsageError


class Doubled(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 2 * reward


class AllPlus(gym.vector.VectorRewardWrapper):
    def __init__(self, env: Any, by: float = 1.0) -> None:
        super().__init__(env)
        self._by = by

    def rewards(self, rewards: Any) -> Any:
        return rewards + self._by


def halved(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return gym.wrappers.TransformReward(env, lambda reward: float(reward) / 2)


def together(envs: gym.vector.VectorEnv[Any, Any, Any], by: float) -> Any:
    return AllPlus(envs, by)


def nothing(env: gym.Env[Any, Any]) -> str:
    return "nothing"


def broken(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    raise RuntimeError("no licence")


def mistyped(env: gym.Env[Any, Any]) -> Any:
    return len(3)  # type: ignore[arg-type]


HERE = "tests.envs.test_wrappers"


def rewards(env: str, *wrappers: Any) -> tuple[type, list[float]]:
    environments = make_environments(env, 2, wrappers=wrappers)
    environments.reset(0)
    outcome = environments.step(np.array([0, 1]))
    environments.close()
    return type(environments), outcome.reward.tolist()


def test_wrappers_of_single_environments_go_around_every_copy_from_the_inside_out() -> None:
    assert rewards("tests.environments:make_count", f"{HERE}:Doubled") == (LoopEnvironments, [2.0, 2.0])
    shifted = {"gymnasium.wrappers:TransformReward": {"func": abs}}
    kind, given = rewards("CartPole-v1", f"{HERE}:Doubled", f"{HERE}:halved", shifted)
    assert (kind, given) == (LoopEnvironments, [1.0, 1.0])  # the native vector environment gives way


def test_wrappers_of_vector_environments_go_around_all_of_them() -> None:
    assert rewards("CartPole-v1", {f"{HERE}:AllPlus": {"by": 4}}) == (VectorEnvironments, [5.0, 5.0])
    assert rewards("Acrobot-v1", {f"{HERE}:together": {"by": 4}}) == (VectorEnvironments, [3.0, 3.0])
    assert rewards("Acrobot-v1", f"{HERE}:Doubled", {f"{HERE}:AllPlus": {"by": 4}}) == (VectorEnvironments, [2.0, 2.0])


def test_a_time_limit_of_gymnasium_limits() -> None:
    limit = {"gymnasium.wrappers:TimeLimit": {"max_episode_steps": 2}}
    environments = make_environments("Acrobot-v1", 1, wrappers=[limit])
    environments.reset(0)
    assert [bool(environments.step(np.array([0])).truncated[0]) for _ in range(2)] == [False, True]
    environments.close()


def test_what_is_watched_and_filmed_is_wrapped_too() -> None:
    one = make_one("CartPole-v1", render_mode="rgb_array", wrappers=[f"{HERE}:Doubled", f"{HERE}:AllPlus"])
    assert isinstance(one, SingleRow)
    one.reset(seed=0)
    assert one.step(0)[1] == 3.0
    picture: Any = one.render()
    assert picture.shape == (400, 600, 3)
    one.close()


@pytest.mark.parametrize(
    ("wrapper", "error", "said"),
    [
        (f"{HERE}:Doubeld", UsageError, "has no 'Doubeld'.*Doubled"),
        ("no.such:Thing", UsageError, "no module 'no.such'"),
        (
            "gymnasium.wrappers:TimeLimit",
            ConfigError,
            "TimeLimit could not be constructed.*max_episode_steps.*Check its keywords",
        ),
        ({f"{HERE}:Doubled": 3}, ConfigError, "keywords of tests.envs.test_wrappers:Doubled are 3"),
        ({f"{HERE}:Doubled": None, f"{HERE}:halved": None}, ConfigError, "names 2 wrappers"),
        (f"{HERE}:nothing", ConfigError, "made a str, not a gymnasium Env"),
        (f"{HERE}:HERE", ConfigError, "is a str, not a wrapper"),
        (
            f"{HERE}:broken",
            EnvironmentFault,
            r"broken raised RuntimeError in its constructor: no licence \(\S*test_wrappers\.py:\d+, in broken\)",
        ),
        (f"{HERE}:mistyped", ConfigError, r"mistyped could not be constructed: .* \(\S*test_wrappers\.py:\d+, in mistyped\)"),
    ],
)
def test_a_wrapper_that_cannot_be_is_named(wrapper: Any, error: type[Exception], said: str) -> None:
    trust.allow(wrapper)
    with pytest.raises(error, match=said):
        make_environments("tests.environments:make_count", 1, wrappers=[wrapper])


def test_wrappers_in_an_order_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="Doubled wraps single environments but follows a wrapper of vector environments"):
        make_environments("CartPole-v1", 1, wrappers=[f"{HERE}:AllPlus", f"{HERE}:Doubled"])
    with pytest.raises(ConfigError, match=r"makes whole vector environments; .*Doubled applies to single ones"):
        make_environments("tests.environments:SameStep", 1, wrappers=[f"{HERE}:Doubled"])
