"""A game of two camps for tests, in the form of PettingZoo's parallel environments, with all kinds of misbehaviour."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from ludus.core.tree import Array

CARDS = 4
OBSERVATION = gym.spaces.Box(0.0, 1.0, (CARDS,), np.float32)


class Cards:
    """A card is shown to everybody in every round; who names it gets a point.

    `kind`: "paid" gives everybody 0.1 a round; "late" tells those who have left that they have lost; "empty" is over at once; "blind" has
    no pictures; "away": the reds leave after the second round and are back for the fourth; "other": no two matches are the same, whatever
    the seed. In matches with an odd seed round `breaks` raises (0: the beginning), and of `made` ones that follow none can be made.
    Whoever says 0 in round `leaves` is out.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "cards", "render_modes": ["rgb_array"], "render_fps": 5}
    left: ClassVar[int] = 1 << 30
    """How many can still be made."""

    def __init__(
        self,
        rounds: int = 5,
        kind: str = "plain",
        breaks: int = -1,
        leaves: int = -1,
        endless: bool = False,
        reds: int = 2,
        blues: int = 2,
        render_mode: str | None = None,
    ) -> None:
        if Cards.left <= 0:
            raise RuntimeError("no cards left")
        Cards.left -= 1
        self.possible_agents = [f"red_{i}" for i in range(reds)] + [f"blue_{i}" for i in range(blues)]
        self.agents: list[str] = []
        self._rounds, self._kind, self._breaks, self._leaves, self._endless = rounds, kind, breaks, leaves, endless

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return OBSERVATION

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(CARDS)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Array], dict[str, Any]]:
        if self._breaks == 0 and seed is not None and seed % 2:
            raise RuntimeError("no cards")
        self._random = np.random.default_rng(None if self._kind == "other" else seed)
        self._seed, self._round = seed or 0, 0
        self.agents = [] if self._kind == "empty" else list(self.possible_agents)
        return self._shown(self.agents), {agent: {} for agent in self.agents}

    def _shown(self, agents: list[str]) -> dict[str, Array]:
        self._card = int(self._random.integers(CARDS))
        return {agent: np.eye(CARDS, dtype=np.float32)[self._card] for agent in agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        assert set(actions) == set(self.agents)
        self._round += 1
        if self._round == self._breaks and self._seed % 2:
            raise RuntimeError("a card is torn")
        rewards = {agent: 0.1 if self._kind == "paid" else float(actions[agent] == self._card) for agent in self.agents}
        over = self._round >= self._rounds and not self._endless
        out = {agent: over or self._goes(agent, actions[agent]) for agent in self.agents}
        if over and self._kind == "late":
            rewards |= {agent: -100.0 for agent in self.possible_agents if agent not in self.agents}
        self.agents = [agent for agent in self._present() if not out.get(agent, False)]
        return self._shown([*out, *self.agents]), rewards, out, dict.fromkeys(out, False), {agent: {} for agent in out}

    def _goes(self, agent: str, action: int) -> bool:
        late = self._kind == "late" and agent.startswith("blue")
        return (
            late
            or (self._kind == "away" and self._round == 2 and agent.startswith("red"))
            or (self._round == self._leaves and action == 0)
        )

    def _present(self) -> list[str]:
        return list(self.possible_agents) if self._kind == "away" and self._round >= 3 else self.agents

    def close(self) -> None:
        """Nothing is open."""

    def render(self) -> Array | None:
        if self._kind == "blind":
            return None
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[:, 8 * self._card : 8 * self._card + 8] = 200
        return picture


def make_cards(**options: Any) -> Cards:
    return Cards(**options)


class Parcels:
    """Two agents with nested spaces and masks in their infos: a parcel may be thrown to 0 or 2, never to 1."""

    metadata: ClassVar[dict[str, Any]] = {"name": "parcels"}
    MASK: ClassVar[dict[str, Any]] = {"to": [1, 0, 1], "with": [1, 1, 1, 0, 1]}

    def __init__(self) -> None:
        self.possible_agents = ["left", "right"]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Dict({"card": OBSERVATION, "round": gym.spaces.Discrete(4)})

    def action_space(self, agent: str) -> gym.Space[Any]:
        force = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        return gym.spaces.Dict({"to": gym.spaces.Discrete(3), "force": force, "with": gym.spaces.MultiDiscrete([2, 3])})

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents, self._round = list(self.possible_agents), 0
        return self._shown(self.agents), {agent: {"action_mask": self.MASK} for agent in self.agents}

    def _shown(self, agents: list[str]) -> dict[str, Any]:
        return {agent: {"card": np.zeros(CARDS, np.float32), "round": self._round} for agent in agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, ...]:
        self._round += 1
        assert all(isinstance(action["to"], int) and action["to"] != 1 for action in actions.values())
        assert all(action["force"].shape == (2,) and action["with"][1] != 1 for action in actions.values())
        rewards = {agent: float(action["to"]) for agent, action in actions.items()}
        here, over = list(actions), self._round >= 3
        self.agents = [] if over else here
        infos = {agent: {"action_mask": self.MASK} for agent in here}
        return self._shown(here), rewards, dict.fromkeys(here, over), dict.fromkeys(here, False), infos

    def close(self) -> None:
        """Nothing is open."""


def make_parcels() -> Parcels:
    return Parcels()


def make_turns(moves: int = 5) -> Any:
    """Two agents in turns: whoever moves gets a point, and the other one loses one."""
    from pettingzoo import AECEnv

    class Turns(AECEnv):  # type: ignore[misc]  # PettingZoo has no types
        metadata: ClassVar[dict[str, Any]] = {"name": "turns"}

        def __init__(self) -> None:
            self.possible_agents = ["first", "second"]

        def observation_space(self, agent: str) -> gym.Space[Any]:
            return OBSERVATION

        def action_space(self, agent: str) -> gym.Space[Any]:
            return gym.spaces.Discrete(CARDS)

        def observe(self, agent: str) -> Array:
            return np.zeros(CARDS, np.float32)

        def reset(self, seed: int | None = None, options: Any = None) -> None:
            self.agents, self.agent_selection, self._moves = list(self.possible_agents), "first", 0
            self.rewards = dict.fromkeys(self.agents, 0.0)
            self._cumulative_rewards = dict(self.rewards)
            self.terminations = dict.fromkeys(self.agents, False)
            self.truncations = dict(self.terminations)
            self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

        def step(self, action: Any) -> None:
            mover = self.agent_selection
            if self.terminations[mover]:
                self._was_dead_step(action)
                return
            other = "second" if mover == "first" else "first"
            self._cumulative_rewards[mover] = 0.0
            self.rewards = {mover: 1.0, other: -1.0}
            self._moves += 1
            if self._moves >= moves:
                self.terminations = dict.fromkeys(self.agents, True)
            self._accumulate_rewards()
            self.agent_selection = other

    return Turns()
