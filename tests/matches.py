"""Environments with several agents that keep their own books: what every agent saw, did and was given, as the game knows it.

Importable as `tests.matches:make_…`; agents come, wait, leave and return at random, all of it from the seed of the reset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from pettingzoo import AECEnv, ParallelEnv

from ludus.core.tree import Array

OBSERVATION = gym.spaces.Box(-100, 1000, (3,), np.float32)
ACTION = gym.spaces.Discrete(4)
MASKED = gym.spaces.Dict({"observation": OBSERVATION, "action_mask": gym.spaces.MultiBinary(4)})
NAMES = ("red_0", "red_1", "blue_0")


@dataclass
class Did:
    seen: Array
    mask: Array | None
    action: int
    reward: float = 0.0

    @property
    def allowed(self) -> list[bool] | None:
        return None if self.mask is None else [bool(x) for x in self.mask]


@dataclass
class Life:
    """From when an agent comes to when it leaves."""

    agent: str
    steps: list[Did] = field(default_factory=list)
    end: str = ""
    last_seen: Array | None = None


@dataclass
class Books:
    lives: list[Life] = field(default_factory=list)
    open: dict[str, Life] = field(default_factory=dict)
    late: int = 0
    paid: float = 0.0

    def begins(self, agent: str) -> None:
        self.open[agent] = Life(agent)
        self.lives.append(self.open[agent])

    def pays(self, agent: str, reward: float) -> None:
        if agent not in self.open:
            self.late += bool(reward)
            return
        self.paid += reward
        if self.open[agent].steps:  # else it has done nothing yet that this could be for
            self.open[agent].steps[-1].reward += reward

    def ends(self, agent: str, end: str, last_seen: Array | None) -> None:
        life = self.open.pop(agent)
        life.end, life.last_seen = end, last_seen


class _Script:
    """What both kinds share: random observations, masks and rewards, and the books."""

    metadata: ClassVar[dict[str, Any]] = {"name": "script", "render_modes": []}
    render_mode = None

    def __init__(self, masked: str = "", length: int = 12) -> None:
        self.possible_agents = list(NAMES)
        self.agents: list[str] = []
        self.history: list[Books] = []
        self._masked, self._length = masked, length
        self._random = np.random.default_rng(0)
        self._shown: dict[str, tuple[Array, Array | None]] = {}

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return MASKED if self._masked == "observation" else OBSERVATION

    def action_space(self, agent: str) -> gym.Space[Any]:
        return ACTION

    @property
    def books(self) -> Books:
        return self.history[-1]

    def _view(self, agent: str) -> tuple[Any, dict[str, Any]]:
        seen = np.array([NAMES.index(agent), len(self.history), self._random.normal()], np.float32)
        mask = None
        if self._masked:
            mask = (self._random.random(4) < 0.5).astype(np.int8)
            mask[self._random.integers(4)] = 1
        self._shown[agent] = seen, mask
        if self._masked == "observation":
            return {"observation": seen, "action_mask": mask}, {}
        return seen, {} if mask is None else {"action_mask": mask}

    def _does(self, agent: str, action: int) -> None:
        seen, mask = self._shown[agent]
        assert mask is None or mask[action], f"{agent} did what was forbidden"
        self.books.open[agent].steps.append(Did(seen, mask, int(action)))

    def _reward(self) -> float:
        return float(np.float32(self._random.normal())) if self._random.random() < 0.7 else 0.0


class ScriptParallel(_Script, ParallelEnv):  # type: ignore[misc] # PettingZoo has no types
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._random = np.random.default_rng(seed)
        self.history.append(Books())
        self._t = 0
        self.agents = [agent for agent in NAMES if self._random.random() < 0.6] or [NAMES[0]]
        for agent in self.agents:
            self.books.begins(agent)
        views = {agent: self._view(agent) for agent in self.agents}
        return {a: v[0] for a, v in views.items()}, {a: v[1] for a, v in views.items()}

    def step(self, actions: dict[str, Any]) -> Any:
        for agent, action in actions.items():
            self._does(agent, action)
        self._t += 1
        rewards = {agent: self._reward() for agent in NAMES if self._random.random() < 0.8}
        for agent, reward in rewards.items():
            self.books.pays(agent, reward)
        ended: dict[str, str] = {}
        for agent in list(self.agents):
            if self._t >= self._length or self._random.random() < 0.1:
                ended[agent] = "terminated" if self._random.random() < 0.5 else "truncated"
        views = {a: self._view(a) for a in self.agents if a in ended or self._random.random() < 0.8}
        for agent, end in ended.items():
            self.books.ends(agent, end, views[agent][0] if self._masked != "observation" else views[agent][0]["observation"])
            self.agents.remove(agent)
        for agent in NAMES:  # somebody comes, or comes back
            if self.agents and agent not in self.agents and agent not in ended and self._random.random() < 0.2:
                self.agents.append(agent)
                self.books.begins(agent)
                views[agent] = self._view(agent)
        terminated = {a: ended.get(a) == "terminated" for a in views}
        truncated = {a: ended.get(a) == "truncated" for a in views}
        return {a: v[0] for a, v in views.items()}, rewards, terminated, truncated, {a: v[1] for a, v in views.items()}


class ScriptTurns(_Script, AECEnv):  # type: ignore[misc]
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._random = np.random.default_rng(seed)
        self.history.append(Books())
        self._t = 0
        self._skip_agent_selection = None
        self.agents = list(NAMES)
        self.rewards = dict.fromkeys(NAMES, 0.0)
        self._cumulative_rewards = dict.fromkeys(NAMES, 0.0)
        self.terminations, self.truncations = dict.fromkeys(NAMES, False), dict.fromkeys(NAMES, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in NAMES}
        for agent in NAMES:
            self.books.begins(agent)
        self.agent_selection = NAMES[int(self._random.integers(3))]
        self._views: dict[str, Any] = {}

    def observe(self, agent: str) -> Any:
        if agent not in self._views:
            self._views[agent], self.infos[agent] = self._view(agent)
        return self._views[agent]

    def last(self, observe: bool = True) -> Any:
        self.observe(self.agent_selection)  # its info, too
        return super().last(observe)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            seen = self.observe(agent)
            end = "terminated" if self.terminations[agent] else "truncated"
            self.books.ends(agent, end, seen["observation"] if isinstance(seen, dict) else seen)
            self._was_dead_step(action)
            return
        self._does(agent, action)
        self._views.clear()
        self._t += 1
        self._cumulative_rewards[agent] = 0.0
        for other in self.agents:
            self.rewards[other] = self._reward()
            self.books.pays(other, self.rewards[other])
        alive = [a for a in self.agents if not (self.terminations[a] or self.truncations[a])]
        for other in alive:
            if self._t >= 3 * self._length or self._random.random() < 0.03:
                (self.terminations if self._random.random() < 0.5 else self.truncations)[other] = True
        living = [a for a in self.agents if not (self.terminations[a] or self.truncations[a])]
        if living:
            self.agent_selection = living[int(self._random.integers(len(living)))]
        self._accumulate_rewards()
        self._deads_step_first()


def make_parallel(**settings: Any) -> ScriptParallel:
    return ScriptParallel(**settings)


def make_turns(**settings: Any) -> ScriptTurns:
    return ScriptTurns(**settings)


# -- games with known answers and faults --------------------------------------------------------------------------------


class Simple(ParallelEnv):  # type: ignore[misc]
    """Two agents, five steps; whoever chooses 1 earns 1 for both. What goes wrong is said by `fault`, at step `at`."""

    metadata: ClassVar[dict[str, Any]] = {"name": "simple", "render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, fault: str = "", at: int = 3, length: int = 5, render_mode: str | None = None) -> None:
        self.possible_agents = ["a", "b"]
        self.agents: list[str] = []
        if fault == "late":
            self.possible_agents = ["a", "b", "late"]
        self.fault, self.at, self.length, self.render_mode = fault, at, length, render_mode
        self.first_seen: dict[str, int] = {}

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.t, self.random = 0, np.random.default_rng(seed)
        self.agents = [] if self.fault == "at once" else ["a", "b"]
        return {agent: self._see(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def _see(self, agent: str) -> Any:
        self.first_seen.setdefault(agent, self.t)
        return np.array([self.t / self.length, ["a", "b", "late", "stranger"].index(agent) / 4], np.float32)

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        now = self.t == self.at
        reward = float(sum(int(action) for action in actions.values()))
        rewards: dict[str, Any] = dict.fromkeys(self.agents, reward)
        over = self.t >= self.length
        if self.fault in ("late", "stranger") and now:
            self.agents = [*self.agents, self.fault]
        seen: dict[str, Any] = {agent: self._see(agent) for agent in self.agents}
        if now and self.fault == "nan":
            seen["b"] = np.array([np.nan, 0.0], np.float32)
        if now and self.fault == "reward":
            rewards["a"] = float("inf")
        if now and self.fault == "shape":
            seen["b"] = np.zeros(3, np.float32)
        if now and self.fault == "raises":
            raise RuntimeError("the game fell over")
        if now and self.fault == "vanish":
            self.agents = []
            return {}, rewards, {}, {}, {}
        if now and self.fault == "gone":
            self.agents = ["a"]
            return seen, rewards, {"b": True}, {}, {}
        if self.fault == "gone" and self.t > self.at:
            rewards["b"] = 5.0
        truncated = dict.fromkeys(seen, over)
        if over:
            self.agents = []
        return seen, rewards, dict.fromkeys(seen, False), truncated, {agent: {} for agent in seen}

    def render(self) -> Any:
        return np.full((16, 16, 3), 10 * self.t, np.uint8)


def make_simple(**settings: Any) -> Simple:
    return Simple(**settings)


class Roles(Simple):
    """A speaker that sees a number, and a listener that must name it; their spaces differ. The whole is in `state()`."""

    state_space = gym.spaces.Box(0, 10, (2,), np.float32)

    def __init__(self, length: int = 5) -> None:
        super().__init__(length=length)
        self.possible_agents = ["speaker", "listener"]

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3) if agent == "speaker" else gym.spaces.Box(0, 3, (1,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return gym.spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.t, self.random, self.said = 0, np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        self.number = int(self.random.integers(3))
        return self._seen(), {agent: {} for agent in self.agents}

    def _seen(self) -> dict[str, Any]:
        return {"speaker": self.number, "listener": np.array([self.said], np.float32)}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        reward = float(actions["listener"] == self.number)
        self.said = int(actions["speaker"])
        over = self.t >= self.length
        seen, agents = self._seen(), list(self.agents)
        self.agents = [] if over else self.agents
        shared = dict.fromkeys(agents, reward)
        return seen, shared, dict.fromkeys(agents, False), dict.fromkeys(agents, over), {agent: {} for agent in agents}

    def state(self) -> Any:
        return np.array([self.number, self.t], np.float32)


def make_roles(**settings: Any) -> Roles:
    return Roles(**settings)


def undeclared(**settings: Any):  # type: ignore[no-untyped-def] # as users write it
    return Simple(**settings)
