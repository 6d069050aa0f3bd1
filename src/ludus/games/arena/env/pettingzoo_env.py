"""PettingZoo parallel environment of the Arena: one agent per hero.

env = parallel_env("3v3")  # blue_0 … blue_2 against red_0 … red_2
env = parallel_env("3v3", opponent="hard")  # blue_0 … blue_2 against a bot
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ludus.core.types import Floats
from ludus.envs.opponents.opponent_mix import RULE, SELF
from ludus.errors import ConfigError, MissingExtra
from ludus.games.arena.engine.layout import CAMP_NAMES
from ludus.games.arena.env.gym_env import RENDER_WIDTH, Actions, LazyRenderer, metadata
from ludus.games.arena.env.seats import ArenaOptions, Observation, Seats, action_space, observation_space, row_of, state_space

try:
    from pettingzoo import ParallelEnv
except ModuleNotFoundError as error:
    raise MissingExtra(
        "The Arena for teams needs pettingzoo, which is not installed.", "pip install 'ludus[pettingzoo]'"
    ) from error


class ArenaParallel(ParallelEnv):  # type: ignore[misc]  # PettingZoo has no types
    """One match. All agents play until its end; a dead one can only do nothing.

    `opponent`: a bot for the whole other camp, or `self` (default): agents play both camps.
    `side`: the camp of the agents if they play only one; `lineup` names it first.
    """

    def __init__(
        self, mode: str | int = "3v3", *, render_mode: str | None = None, render_width: int = RENDER_WIDTH, **keywords: Any
    ) -> None:
        """Keywords: `ArenaOptions`. Raises ConfigError."""
        options = ArenaOptions(mode=mode, **{"opponent": SELF, "side": 0, **keywords})
        size, camp = options.size, options.camp()
        if options.whole or (not options.against_self and not all(kind.startswith(RULE) for kind in options.shares)):
            raise ConfigError(
                f"A single match has the opponent {options.opponent!r}{' and whole' if options.whole else ''}.",
                "A script, several, or self. Shares of `self` and `past`, and `whole`, are for vectors: ludus.games.arena.env.gym_env:ArenaVectorEnv.",
            )
        if camp is None:
            raise ConfigError(
                f"side is {options.side!r}.", "Give 0 or 1: the names of agents contain their camp, so it cannot be random."
            )
        self.renderer, self.render_mode = LazyRenderer(size, render_mode, render_width), render_mode
        self.metadata = metadata(options) | {"name": f"arena_{size}v{size}_v0", "is_parallelizable": True}
        self.seats = Seats(options, [range(2 * size if options.against_self else size)])
        played = (camp, 1 - camp) if options.against_self else (camp,)
        self._order = [f"{CAMP_NAMES[c]}_{i}" for c in played for i in range(size)]
        """Agents in the order of the rows."""
        self.possible_agents = [f"{CAMP_NAMES[c]}_{i}" for c in sorted(played) for i in range(size)]
        self.agents: list[str] = []
        self._observation_spaces = {agent: observation_space(size) for agent in self.possible_agents}
        self._action_spaces = {agent: action_space(size) for agent in self.possible_agents}
        self.state_space = state_space(size)

    def observation_space(self, agent: str) -> Any:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        self.seats.seed([seed])
        self.seats.begin()
        self.agents = list(self.possible_agents)
        return self._observe(), self._infos()

    def step(
        self, actions: Mapping[str, Actions]
    ) -> tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Agents without an action do nothing."""
        if not self.agents:
            return {}, {}, {}, {}, {}
        taken = np.zeros((len(self._order), 4), np.int32)
        for row, agent in enumerate(self._order):
            if agent in actions:
                taken[row] = actions[agent]
        reward, terminated, truncated = self.seats.step(taken)
        observation, infos = self._observe(), self._infos()
        rewards = self._by_agent([float(value) for value in reward])
        terminations = self._by_agent([bool(value) for value in terminated])
        truncations = self._by_agent([bool(value) for value in truncated])
        if terminated.any() or truncated.any():
            self.agents = []
        return observation, rewards, terminations, truncations, infos

    def state(self) -> Floats:
        """Return the state without fog of war, for a centralised value function."""
        return self.seats.state()

    def render(self) -> Any:
        arena = self.seats.arena
        return None if self.render_mode is None else self.renderer.rgb(arena.units[0], arena.match[0])

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""

    def _observe(self) -> dict[str, Observation]:
        observation = self.seats.observe()
        return self._by_agent([row_of(observation, row) for row in range(self.seats.rows)])

    def _infos(self) -> dict[str, dict[str, Any]]:
        result = self.seats.result()
        return self._by_agent([{name: int(values[row]) for name, values in result.items()} for row in range(self.seats.rows)])

    def _by_agent(self, of_rows: Sequence[Any]) -> dict[str, Any]:
        found = dict(zip(self._order, of_rows, strict=True))
        return {agent: found[agent] for agent in self.possible_agents}


def parallel_env(mode: str | int = "3v3", **keywords: Any) -> ArenaParallel:
    """Create an `ArenaParallel` with these keywords."""
    return ArenaParallel(mode, **keywords)


def arena_3v3(render_mode: str | None = None, **keywords: Any) -> ArenaParallel:
    return ArenaParallel("3v3", render_mode=render_mode, **keywords)


def arena_5v5(render_mode: str | None = None, **keywords: Any) -> ArenaParallel:
    return ArenaParallel("5v5", render_mode=render_mode, **keywords)
