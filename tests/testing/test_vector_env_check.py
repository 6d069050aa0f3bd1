"""The check of games of arrays accepts good ones and names what is wrong with others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ludus.core.types import Bools, Ints
from ludus.envs.matches.connect_four import ConnectFourEnv
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentStep
from ludus.errors import EnvironmentFault
from ludus.testing import check_vector_multi_agent_env
from tests.vector_matches import VectorCount, VectorHunt


def test_good_games_pass() -> None:
    check_vector_multi_agent_env(ConnectFourEnv)
    check_vector_multi_agent_env(VectorCount)
    check_vector_multi_agent_env(lambda num_envs: VectorHunt(num_envs, returning=True), matches=3)
    check_vector_multi_agent_env(lambda num_envs: VectorHunt(num_envs, masked=False), steps=50)


class Shared(VectorCount):
    """All matches use one stream of random numbers."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self._random = np.random.default_rng(0)

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        return super().reset(self._random.integers(100, size=len(matches)), matches)


class Restless(VectorCount):
    """Steps matches that are not playing."""

    def step(self, actions: Any, playing: Bools) -> VectorMultiAgentStep:
        return super().step(actions, np.ones_like(playing))


class Thorough(VectorCount):
    """Resets all matches when one is reset."""

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        return super().reset(np.full(self.num_envs, seeds[0]), np.arange(self.num_envs))


class Envious(VectorCount):
    """Pays a match for what happens in another one."""

    def step(self, actions: Any, playing: Bools) -> VectorMultiAgentStep:
        result = super().step(actions, playing)
        result.reward += result.terminated.any()
        return result


@pytest.mark.parametrize(
    ("game", "what"),
    [
        (Shared, "(acting agents|observations)"),
        (Restless, "(acting agents|terminated or truncated agents|observations|rewards)"),
        (Thorough, "(acting agents|observations)"),
        (Envious, "rewards"),
    ],
)
def test_matches_that_influence_each_other_are_faults(game: type[VectorCount], what: str) -> None:
    with pytest.raises(
        EnvironmentFault, match=f"Match [0-4] of 5 has other {what} after .* than the same match in an environment"
    ):
        check_vector_multi_agent_env(game)
