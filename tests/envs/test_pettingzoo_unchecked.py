"""Environments without PettingZoo's checks behave as PettingZoo's own."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from pettingzoo.utils import AssertOutOfBoundsWrapper, BaseParallelWrapper, OrderEnforcingWrapper, TerminateIllegalWrapper

from ludus.envs.matches.unchecked_pettingzoo import SimultaneousEnv, without_checks
from ludus.envs.pettingzoo import make_match


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, tuple):
        for part, counterpart in zip(one, other, strict=True):
            assert_same(part, counterpart)
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("module", "config"),
    [
        ("mpe2.simple_spread_v3", {"max_cycles": 5}),
        ("mpe2.simple_world_comm_v3", {"max_cycles": 5, "continuous_actions": True}),
        ("pettingzoo.butterfly.pistonball_v6", {"n_pistons": 3, "max_cycles": 4, "continuous": False}),
        ("pettingzoo.butterfly.knights_archers_zombies_v11", {"max_cycles": 40}),
        ("pettingzoo.sisl.multiwalker_v9", {"max_cycles": 30}),
    ],
)
def test_simultaneous_steps_are_those_of_pettingzoo(module: str, config: dict[str, Any]) -> None:
    make = importlib.import_module(module).parallel_env
    theirs, ours = make(**config), without_checks(make(**config))
    assert isinstance(ours, SimultaneousEnv)
    for seed in (1, 2):  # two episodes of the same object
        assert_same(theirs.reset(seed=seed), ours.reset(seed=seed))
        random = np.random.default_rng(seed)
        while theirs.agents:
            actions: dict[str, Any] = {}
            for agent in theirs.agents:
                space = theirs.action_space(agent)
                space.seed(int(random.integers(1 << 30)))
                actions[agent] = space.sample()
            assert_same(theirs.step(dict(actions)), ours.step(dict(actions)))
            assert theirs.agents == ours.agents
    theirs.close()
    ours.close()


def test_checks_are_removed_and_rules_are_kept() -> None:
    from pettingzoo.classic import connect_four_v3

    env = without_checks(connect_four_v3.env())
    assert type(env) is TerminateIllegalWrapper  # an illegal move loses: a rule of the game
    layers = []
    while hasattr(env, "env"):
        layers.append(type(env))
        env = env.env
    assert not {OrderEnforcingWrapper, AssertOutOfBoundsWrapper} & set(layers)


def test_environments_of_users_keep_their_checks() -> None:
    from tests.matches import make_turns

    env = OrderEnforcingWrapper(make_turns())
    assert without_checks(env) is env


class Halved(BaseParallelWrapper):  # type: ignore[misc]
    """A wrapper of a user: halves all rewards."""

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, *rest = super().step(actions)
        return observations, {agent: reward / 2 for agent, reward in rewards.items()}, *rest


def test_wrappers_of_the_config_are_applied_to_it() -> None:
    gained = []
    for wrappers in ([], [f"{__name__}:Halved"]):
        match = make_match("mpe2/simple_spread_v3", wrappers=wrappers)
        match.reset(1)
        gained.append([turn.reward for turn in match.step(dict.fromkeys(match.agents, 1)).turns])
        match.close()
    assert all(gained[0])
    assert gained[1] == [reward / 2 for reward in gained[0]]
