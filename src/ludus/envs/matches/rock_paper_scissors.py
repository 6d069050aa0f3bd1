"""Rock-paper-scissors with different stakes: the smallest game in which naive self-play moves in circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from ludus.errors import ConfigError

ENV_NAME: Final = "ludus/RockPaperScissors-v0"
ROCK, PAPER, SCISSORS = 0, 1, 2
DEFAULT_STAKES: Final = (1.0, 2.0, 3.0)


def payoff_matrix(stakes: Sequence[float]) -> npt.NDArray[np.float64]:
    """[own action, other's action] return. `stakes`: what paper wins against rock, scissors against paper, rock against scissors."""
    payoffs = np.zeros((3, 3))
    for winner, loser, stake in ((PAPER, ROCK, stakes[0]), (SCISSORS, PAPER, stakes[1]), (ROCK, SCISSORS, stakes[2])):
        payoffs[winner, loser], payoffs[loser, winner] = stake, -stake
    return payoffs


def read_stakes(env_config: Mapping[str, Any] | None) -> tuple[float, float, float]:
    """The stakes in `env_config`. Raises ConfigError."""
    stakes = tuple((env_config or {}).get("stakes", DEFAULT_STAKES))
    if len(stakes) != 3 or not all(isinstance(stake, int | float) and 0 < stake < 1e6 for stake in stakes):
        raise ConfigError(
            f"The stakes {list(stakes)} are not three positive numbers.", "Example: env_config: {stakes: [1, 2, 3]}."
        )
    return float(stakes[0]), float(stakes[1]), float(stakes[2])


class RockPaperScissorsEnv:
    """A parallel environment of PettingZoo. One throw per match: 0 rock, 1 paper, 2 scissors. The observation is always 0.

    With the stakes a (paper against rock), b (scissors against paper) and c (rock against scissors) the only Nash equilibrium plays
    rock : paper : scissors = b : c : a.
    """

    metadata: Mapping[str, Any] = {"name": ENV_NAME}
    possible_agents = ("player_0", "player_1")

    def __init__(self, stakes: Sequence[float] = DEFAULT_STAKES) -> None:
        self._payoffs = payoff_matrix(read_stakes({"stakes": stakes}))
        self.agents: list[str] = []
        self._observation = np.zeros(1, np.float32)

    def close(self) -> None:
        pass

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, self._observation), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        won = float(self._payoffs[int(actions["player_0"]), int(actions["player_1"])])
        agents, self.agents = self.agents, []
        rewards = {"player_0": won, "player_1": -won}
        ended, cut = dict.fromkeys(agents, True), dict.fromkeys(agents, False)
        return dict.fromkeys(agents, self._observation), rewards, ended, cut, {agent: {} for agent in agents}
