"""Tiny environments for the tests, importable as `tests.environments:make_…`: good ones, and each wrong in one way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv

from ludus.core.tree import Array


class Count(gym.Env[Any, Any]):
    """Shows (episode, step); pays 1 a step; an episode ends after `length` steps, by itself or cut."""

    def __init__(self, length: int = 5, truncates: bool = False, render_mode: str | None = None) -> None:
        self.observation_space: gym.Space[Any] = Box(-1e6, 1e6, (2,), np.float32)
        self.action_space: gym.Space[Any] = Discrete(2)
        self.render_mode, self.metadata = render_mode, {"render_modes": ["rgb_array"], "render_fps": 20}
        self.length, self.truncates = length, truncates
        self.episode = self.steps = 0
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []
        self.closed = False

    def seen(self) -> Any:
        return np.array([self.episode, self.steps], np.float32)

    def info(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.steps = self.episode + 1, 0
        return self.seen(), self.info()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not an action"
        self.actions.append(action)
        self.steps += 1
        over = self.steps >= self.length
        return self.seen(), 1.0, over and not self.truncates, over and self.truncates, self.info()

    def render(self) -> Any:
        picture = np.zeros((33, 48, 3), np.uint8)
        picture[:, : 4 * (1 + self.steps), self.episode % 3] = 200
        return picture

    def close(self) -> None:
        self.closed = True


class Faulty(Count):
    """A Count that does something wrong from step `at` on."""

    def __init__(self, fault: str = "none", at: int = 3, length: int = 1000) -> None:
        super().__init__(length)
        self.fault, self.at = fault, at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.fault == "raises in reset":
            raise RuntimeError("no game server")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.steps < self.at:
            return observation, reward, terminated, truncated, info
        if self.fault == "raises in step":
            raise RuntimeError("the game crashed")
        if self.fault == "old interface":
            return observation, reward, terminated, info  # type: ignore[return-value]
        if self.fault in REWARDS:
            return observation, REWARDS[self.fault], terminated, truncated, info
        return OBSERVATIONS[self.fault](observation), reward, terminated, truncated, info


OBSERVATIONS: dict[str, Callable[[Array], Any]] = {
    "none": lambda x: x,
    "nan": lambda x: x * np.nan,
    "infinite": lambda x: np.array([1, np.inf], np.float32),
    "too long": lambda x: np.zeros(3, np.float32),
    "too short": lambda x: np.zeros(1, np.float32),
    "a scalar": lambda x: np.float32(0),
    "one dimension more": lambda x: x[None],
    "complex": lambda x: x.astype(np.complex64),
    "words": lambda x: np.array(["a", "b"]),
    "nothing": lambda x: None,
    "a dict": lambda x: {"x": x},
}
REWARDS: dict[str, Any] = {
    "reward nan": float("nan"),
    "reward infinite": float("inf"),
    "reward none": None,
    "reward vector": np.ones(2),
}


class Rooms(Count):
    """A nested observation: a vector, a whole number and a picture."""

    def __init__(self, lacks: str | None = None, wrong: str | None = None, at: int = 3) -> None:
        super().__init__(1000)
        inner = Dict({"map": Box(0, 255, (3, 3, 1), np.uint8), "room": Discrete(4)})
        self.observation_space = Dict({"place": inner, "vector": Box(-1, 1, (2,), np.float32)})
        self.lacks, self.wrong, self.at = lacks, wrong, at

    def seen(self) -> Any:
        place: dict[str, Any] = {"map": np.full((3, 3, 1), self.steps, np.uint8), "room": self.steps % 4}
        seen: dict[str, Any] = {"place": place, "vector": np.zeros(2, np.float32)}
        if self.steps >= self.at:
            seen.pop(self.lacks or "", None)
            place.pop((self.lacks or "").removeprefix("place."), None)
            if self.wrong == "place.map":
                place["map"] = place["map"].astype(np.float32) / 255
            if self.wrong == "place.room":
                place["room"] = 1.5
            if self.wrong == "vector":
                seen["vector"] = np.array([0.5, np.nan])
        return seen


class Masked(Count):
    """Only action `steps % 3` is allowed; from step `closed_at` on, none is. The mask is in the observation or the infos."""

    def __init__(self, where: str = "observation", closed_at: int = 1000, fault: str = "none", length: int = 5) -> None:
        super().__init__(length)
        self.action_space = Discrete(3)
        self.where, self.closed_at, self.fault = where, closed_at, fault
        if where == "observation":
            self.observation_space = Dict({"observation": Box(-1e6, 1e6, (2,), np.float32), "action_mask": MultiBinary(3)})

    def mask(self) -> Any:
        mask = np.zeros(5 if self.fault == "size" and self.steps else 3, np.int8)
        mask[self.steps % 3] = self.steps < self.closed_at
        return mask

    def seen(self) -> Any:
        seen = super().seen()
        if self.where != "observation":
            return seen
        return {"observation": seen} | ({} if self.fault == "missing" and self.steps else {"action_mask": self.mask()})

    def info(self) -> dict[str, Any]:
        return {"action_mask": self.mask()} if self.where == "infos" else {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.mask()[action] or self.closed_at < 1000, f"{action} was forbidden at step {self.steps}"
        return super().step(action)


class Dark(Count):
    """Takes a render mode, and renders something else than a picture."""

    def __init__(self, render_mode: str | None = None, shows: str = "depth") -> None:
        super().__init__(render_mode=render_mode)
        self.shows = shows

    def render(self) -> Any:
        return {"depth": np.zeros((8, 8), np.float32), "nothing": None}[self.shows]


class SameStep(VectorEnv[Any, Any, Any]):
    """A vector of Counts that resets a row in the very step in which its episode ends."""

    def __init__(self, num_envs: int = 3, stacked: bool = True, tells: bool = True, masks: str = "never") -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs, self._stacked, self._tells, self._masks = num_envs, stacked, tells, masks
        self._envs = [Count(length=2 + i, truncates=i % 2 == 1) for i in range(num_envs)]
        self.single_observation_space = self._envs[0].observation_space
        self.single_action_space = self._envs[0].action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | list[int | None] | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        infos = {} if self._masks == "never" else {"action_mask": np.array([[1, 0]] * self.num_envs)}
        return np.stack([env.reset()[0] for env in self._envs]), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        outcomes = [env.step(action) for env, action in zip(self._envs, actions, strict=True)]
        over = np.array([o[2] or o[3] for o in outcomes])
        seen = np.stack([env.reset()[0] if done else o[0] for env, o, done in zip(self._envs, outcomes, over, strict=True)])
        infos: dict[str, Any] = {}
        if over.any() and self._tells:
            finals = np.zeros((self.num_envs, 2), np.float32) if self._stacked else np.full(self.num_envs, None, object)
            for i in np.flatnonzero(over):
                finals[i] = outcomes[i][0]
            infos = {"final_obs": finals, "_final_obs": over}
        if self._masks in ("always", "too long"):
            infos["action_mask"] = np.array([[0, 1, *([1] if self._masks == "too long" else [])]] * self.num_envs)
        return seen, np.ones(self.num_envs), np.array([o[2] for o in outcomes]), np.array([o[3] for o in outcomes]), infos


def make_count(**settings: Any) -> Count:
    return Count(**settings)


def make_faulty(**settings: Any) -> Faulty:
    return Faulty(**settings)


def make_rooms(**settings: Any) -> Rooms:
    return Rooms(**settings)


def make_masked(**settings: Any) -> Masked:
    return Masked(**settings)


def make_dark(**settings: Any) -> Dark:
    return Dark(**settings)


def make_without_pictures(length: int = 5) -> Count:
    """Knows nothing of render modes."""
    env = Count(length)
    env.metadata = {"render_modes": ["human"]}
    return env


def make_like_cartpole() -> Count:
    """The observations of CartPole, and one action more."""
    env = Count()
    env.observation_space, env.action_space = Box(-10, 10, (4,), np.float32), Discrete(3)
    env.seen = lambda: np.zeros(4, np.float32)  # type: ignore[method-assign]
    return env


def make_hybrid() -> Count:
    """Moves by a direction and a strength."""
    env = Count()
    env.action_space = Dict({"direction": MultiDiscrete([3, 2]), "strength": Box(-2, 2, (1,), np.float32)})
    return env


def make_nothing() -> str:
    return "not an environment"


def make_crash() -> Count:
    raise OSError("port 5005 is taken")


def make_needs_package() -> Count:
    import a_package_that_nobody_has  # type: ignore[import-not-found]

    return Count(a_package_that_nobody_has.length)


class Fragile(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that crashes and stalls now and then, each with its own probability per step."""

    def __init__(self, crash: float, stall: float, stall_s: tuple[float, float]) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._crash, self._stall, self._stall_s = crash, stall, stall_s
        self._random = np.random.default_rng()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._random.random() < self._crash:
            raise RuntimeError("the game crashed")
        if self._random.random() < self._stall:
            time.sleep(self._random.uniform(*self._stall_s))
        return self.env.step(action)


class Leaves(Count):
    """Ends the whole process after a few steps, as a game engine may, and calls that a success."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.steps == 20:
            os._exit(0)
        return super().step(action)


def make_leaving() -> gym.Env[Any, Any]:
    return Leaves(length=1000)


def make_fragile(crash: float = 0.0, stall: float = 0.0, stall_s: tuple[float, float] = (2.0, 5.0)) -> gym.Env[Any, Any]:
    return Fragile(crash, stall, stall_s)
