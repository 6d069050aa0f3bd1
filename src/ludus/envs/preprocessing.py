"""What happens to an environment before anybody sees it: frames skipped, pictures made small, observations stacked …

Wrappers of single environments, in the order of the papers on Atari: what is done comes before what is seen. An action mask in
the observation is left alone. Atari and ViZDoom do most of it themselves (`envs/atari.py`, `envs/vizdoom.py`), and faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple

from ludus.config.schema import PreprocessConfig
from ludus.core.spaces import ACTION_MASK
from ludus.core.tree import Array
from ludus.errors import ConfigError, EnvironmentFault

Env = gym.Env[Any, Any]
Clip = Callable[[Any], Any]

GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Shares of red, green and blue in what the eye sees as bright (ITU-R BT.601)."""


def for_evaluation(config: PreprocessConfig) -> PreprocessConfig:
    """The same, but scores are those of the game, and of whole games: no reward is clipped, a lost life ends nothing."""
    return config.model_copy(update={"clip_reward": False, "episodic_life": False})


def preprocess_of(config: Mapping[str, Any]) -> PreprocessConfig:
    """The section of a saved `config:`, which an older run does not have."""
    return PreprocessConfig.model_validate(config.get("preprocess") or {})


def is_plain(config: PreprocessConfig) -> bool:
    """Whether nothing at all is to be done."""
    asked = config.model_dump(exclude={"standard", "scale"})
    return config.scale is not True and not any(asked.values())


def preprocessed(env: Env, config: PreprocessConfig, name: str) -> Env:
    """Raises ConfigError for what this environment does not have."""
    if not isinstance(env, gym.Env) or is_plain(config):
        return env
    if config.noop_max:
        env = IdleStart(env, config.noop_max, name)
    if config.frame_skip and config.frame_skip > 1:
        env = FrameSkip(env, config.frame_skip)
    if config.max_episode_steps:  # of a whole game: after it a new one begins, and not only a new life
        env = gym.wrappers.TimeLimit(env, config.max_episode_steps)
    if config.episodic_life:
        env = EpisodicLife(env, name)
    clip = clipping(config)
    if clip is not None:
        env = ClippedReward(env, clip)
    return _shown(env, config, name)


def _shown(env: Env, config: PreprocessConfig, name: str) -> Env:
    if config.drop:
        env = DropParts(env, config.drop, name)
    if config.grey or config.resize:
        env = Mapped(env, lambda space: _picture(space, bool(config.grey), config.resize))
        if not env.changed:
            wanted = " and ".join(key for key, given in (("grey", config.grey), ("resize", config.resize)) if given)
            raise ConfigError(
                f"preprocess.{wanted}: {name} shows no pictures; its observations are {env.env.observation_space}.",
                "Leave it out.",
            )
    if config.scale is True:
        env = Mapped(env, lambda space: _scaled(space, name))
    if config.flatten:
        env = Flat(env)
    return Stacked(env, config.stack) if config.stack and config.stack > 1 else env


# -- what is done -------------------------------------------------------------------------------------------------------


class IdleStart(gym.Wrapper[Any, Any, Any, Any]):
    """Begins with 0 to `most` actions that do nothing, so that not every game begins alike."""

    def __init__(self, env: Env, most: int, name: str) -> None:
        super().__init__(env)
        self._most, self._idle = most, _idle_action(env, name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        for _ in range(int(self.env.unwrapped.np_random.integers(self._most + 1))):
            observation, _, terminated, truncated, info = self.env.step(self._idle)
            if terminated or truncated:
                observation, info = self.env.reset(options=options)
        return observation, info


def _idle_action(env: Env, name: str) -> Any:
    meanings = getattr(env.unwrapped, "get_action_meanings", None)
    if meanings is not None and meanings()[0] != "NOOP":
        raise ConfigError(f"preprocess.noop_max: the first action of {name} is {meanings()[0]}, which does something.")
    space = env.action_space
    if isinstance(space, Discrete):
        return space.start
    if isinstance(space, Box) and space.contains(np.zeros(space.shape, space.dtype)):
        return np.zeros(space.shape, space.dtype)
    if isinstance(space, MultiBinary):
        return np.zeros(space.shape, space.dtype)
    raise ConfigError(f"preprocess.noop_max: which action of {name} ({space}) does nothing is not known.", "Leave it out.")


class FrameSkip(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats every action until the episode ends; the agent gets the sum of the rewards and sees the last observation."""

    def __init__(self, env: Env, times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total: Any = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total = total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class EpisodicLife(gym.Wrapper[Any, Any, Any, Any]):
    """A lost life ends the episode, but the next one goes on in the same game (Mnih et al. 2015): dying is worth nothing."""

    def __init__(self, env: Env, name: str) -> None:
        super().__init__(env)
        self._name, self._idle = name, _idle_action(env, name)
        self._lives, self._game_over = 0, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if not self._game_over and seed is None:
            observation, _, terminated, truncated, info = self.env.step(self._idle)
            if not (terminated or truncated):
                self._lives = self._count(info)
                return observation, info
        observation, info = self.env.reset(seed=seed, options=options)
        self._lives, self._game_over = self._count(info), False
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives, before = self._count(info), self._lives
        self._lives, self._game_over = lives, bool(terminated or truncated)
        return observation, reward, bool(terminated or lives < before), truncated, info

    def _count(self, info: Mapping[str, Any]) -> int:
        if "lives" not in info:
            raise EnvironmentFault(
                f"preprocess.episodic_life: {self._name} does not tell in infos['lives'] how many are left.", "Leave it out."
            )
        return int(info["lives"])


def clipping(config: PreprocessConfig) -> Clip | None:
    if config.clip_reward in (None, False):
        return None
    if isinstance(config.clip_reward, tuple):
        low, high = config.clip_reward
        return lambda reward: np.clip(reward, low, high)
    return np.sign


class ClippedReward(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Env, clip: Clip) -> None:
        super().__init__(env)
        self._clip = clip

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, self._clip(reward), terminated, truncated, info


# -- what is seen -------------------------------------------------------------------------------------------------------

Leaf = tuple[gym.Space[Any], Callable[[Any], Any]]
"""How a part of an observation looks afterwards, and what makes it so."""


class DropParts(gym.ObservationWrapper[Any, Any, Any]):
    """Leaves named parts of a Dict observation out. Raises ConfigError for a part that the observation does not have."""

    def __init__(self, env: Env, names: Sequence[str], name: str) -> None:
        super().__init__(env)
        whole = env.observation_space
        parts = _part_paths(whole)
        if isinstance(whole, Dict) and set(whole.spaces) == {"observation", ACTION_MASK}:  # messages leave this level out
            names = [part if part in parts else f"observation.{part}" for part in names]
        unknown = [part for part in names if part not in parts]
        if unknown:
            known = f"its parts are {', '.join(parts)}" if parts else f"it has no parts: {whole}"
            raise ConfigError(
                f"preprocess.drop: the observation of {name} has no part {unknown[0].removeprefix('observation.')!r}; {known}."
            )
        if ACTION_MASK in names:
            raise ConfigError(f"preprocess.drop: {ACTION_MASK} is not observed; it forbids actions.", "Leave it out.")
        kept = _without(whole, frozenset(names))
        if kept is None or (isinstance(kept[0], Dict) and set(kept[0].spaces) == {ACTION_MASK}):
            raise ConfigError(f"preprocess.drop: nothing of the observation of {name} is left.", "Keep at least one part.")
        self.observation_space, self._keep = kept

    def observation(self, observation: Any) -> Any:
        return self._keep(observation)


def _part_paths(space: gym.Space[Any], path: str = "") -> list[str]:
    """`outer`, `outer.inner`, … of all parts of a nested space, as error messages name them."""
    if isinstance(space, (Dict, Tuple)):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        named = [(f"{path}.{key}" if path else str(key), item) for key, item in items]
        return [found for inner, item in named for found in (inner, *_part_paths(item, inner))]
    return []


def _without(space: gym.Space[Any], names: frozenset[str], path: str = "") -> Leaf | None:
    """The space without the named parts, and what takes them out of an observation; None when nothing is left."""
    if path in names:
        return None
    prefix = f"{path}." if path else ""
    if isinstance(space, Dict):
        found = {key: _without(item, names, f"{prefix}{key}") for key, item in space.spaces.items()}
        parts = {key: part for key, part in found.items() if part is not None}
        made = Dict({key: item for key, (item, _) in parts.items()})
        return (made, lambda seen: {key: parts[key][1](item) for key, item in seen.items() if key in parts}) if parts else None
    if isinstance(space, Tuple):
        items = [(i, part) for i, item in enumerate(space.spaces) if (part := _without(item, names, f"{prefix}{i}")) is not None]
        left = Tuple([item for _, (item, _) in items])
        return (left, lambda seen: tuple(keep(seen[i]) for i, (_, keep) in items)) if items else None
    return space, lambda seen: seen


class Mapped(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose observations are changed part by part; `of` returns None for a part that stays as it is."""

    def __init__(self, env: Env, of: Callable[[gym.Space[Any]], Leaf | None]) -> None:
        super().__init__(env)
        self.changed = False
        self.observation_space, self._map = self._mapped(env.observation_space, of)

    def _mapped(self, space: gym.Space[Any], of: Callable[[gym.Space[Any]], Leaf | None]) -> Leaf:
        if isinstance(space, Dict):
            parts = {key: self._mapped(item, of) for key, item in space.spaces.items() if key != ACTION_MASK}
            rest = {key: item for key, item in space.spaces.items() if key == ACTION_MASK}
            return Dict({key: s for key, (s, _) in parts.items()} | rest), lambda seen: {
                key: parts[key][1](item) if key in parts else item for key, item in seen.items()
            }
        if isinstance(space, Tuple):
            items = [self._mapped(item, of) for item in space.spaces]
            return Tuple([s for s, _ in items]), lambda seen: tuple(m(x) for (_, m), x in zip(items, seen, strict=True))
        found = of(space)
        self.changed |= found is not None
        return (space, lambda seen: seen) if found is None else found

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._map(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._map(observation), reward, terminated, truncated, info


def _picture(space: gym.Space[Any], grey: bool, size: tuple[int, int] | None) -> Leaf | None:
    """[H, W], [H, W, C] or [C, H, W] of bytes → [h, w, c]."""
    if not isinstance(space, Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return None
    flat, first = (
        len(space.shape) == 2,
        len(space.shape) == 3 and space.shape[-1] not in (1, 3, 4) and space.shape[0] in (1, 3, 4),
    )
    h, w, c = (*space.shape, 1) if flat else (space.shape[1], space.shape[2], space.shape[0]) if first else space.shape
    without_colour = grey and c in (3, 4)
    resized = Resized((h, w), size) if size is not None and size != (h, w) else None

    def change(seen: Any) -> Array:
        picture: Array = np.asarray(seen)
        picture = picture[..., None] if flat else np.moveaxis(picture, 0, -1) if first else picture
        if without_colour:
            picture = np.rint(picture[..., :3] @ GREY).astype(np.uint8)[..., None]
        return picture if resized is None else resized(picture)

    return Box(0, 255, (*(size or (h, w)), 1 if without_colour else c), np.uint8), change


class Resized:
    """Pictures [H, W, C] of bytes → [h, w, C]: each pixel is the mean of the area that it covers, without OpenCV."""

    def __init__(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        self._rows, self._columns = shares(before[0], after[0]), shares(before[1], after[1])
        self._after = after

    def __call__(self, picture: Array) -> Array:
        h, w, c = picture.shape
        tall = self._rows @ picture.reshape(h, w * c).astype(np.float32)
        wide = np.matmul(self._columns, tall.reshape(self._after[0], w, c))
        made: Array = np.rint(wide).astype(np.uint8)
        return made


def shares(before: int, after: int) -> Array:
    """[after, before]: how much of every old pixel is in every new one; rows sum to 1."""
    edges = np.arange(after + 1) * (before / after)
    low, high = np.arange(before), np.arange(1, before + 1)
    covered = np.minimum(edges[1:, None], high) - np.maximum(edges[:-1, None], low)
    made: Array = (np.clip(covered, 0, None) * (after / before)).astype(np.float32)
    return made


def _scaled(space: gym.Space[Any], name: str) -> Leaf | None:
    if not isinstance(space, Box) or (space.dtype == np.uint8 and len(space.shape) in (2, 3)):
        return None
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ConfigError(
            f"preprocess.scale: {name} has observations without bounds ({space}).", "Use observation_filter: MeanStdFilter."
        )
    return Box(0, 1, space.shape, np.float32), lambda seen: ((np.asarray(seen) - low) / (high - low)).astype(np.float32)


class Flat(gym.Wrapper[Any, Any, Any, Any]):
    """All parts in one vector of float32; a mask stays beside it."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        whole = env.observation_space
        self._mask = isinstance(whole, Dict) and ACTION_MASK in whole.spaces
        self._space: gym.Space[Any] = whole
        if isinstance(whole, Dict) and self._mask:
            self._space = Dict({key: item for key, item in whole.spaces.items() if key != ACTION_MASK})
        size = int(np.prod(gym.spaces.flatten_space(self._space).shape or (0,)))
        if not size:
            raise ConfigError(f"preprocess.flatten: {self._space} cannot be flattened.", "Leave it out.")
        flat = Box(-np.inf, np.inf, (size,), np.float32)
        self.observation_space = Dict({"observation": flat, ACTION_MASK: whole[ACTION_MASK]}) if self._mask else flat  # type: ignore[index]

    def _flat(self, seen: Any) -> Any:
        rest = {key: item for key, item in seen.items() if key != ACTION_MASK} if self._mask else seen
        flat = np.asarray(gym.spaces.flatten(self._space, rest), np.float32)
        return {"observation": flat, ACTION_MASK: seen[ACTION_MASK]} if self._mask else flat

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._flat(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._flat(observation), reward, terminated, truncated, info


class Stacked(Mapped):
    """The last observations together, oldest first, along the last axis (the colours of a picture); an episode begins with
    its first one repeated. Only numbers are stacked; categories are shown as they are now."""

    def __init__(self, env: Env, times: int) -> None:
        self._times = times
        self._pasts: list[_Past] = []
        super().__init__(env, self._past)

    def _past(self, space: gym.Space[Any]) -> Leaf | None:
        if not isinstance(space, Box):
            return None
        past = _Past(self._times)
        self._pasts.append(past)
        low, high = (np.concatenate([np.atleast_1d(bound)] * self._times, axis=-1) for bound in (space.low, space.high))
        return Box(low, high, low.shape, space.dtype.type), past

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        for past in self._pasts:
            past.forget()
        return super().reset(seed=seed, options=options)


class _Past:
    def __init__(self, times: int) -> None:
        self._seen: deque[Array] = deque(maxlen=times)
        self._times = times

    def forget(self) -> None:
        self._seen.clear()

    def __call__(self, seen: Any) -> Array:
        now: Array = np.atleast_1d(np.array(seen))
        self._seen.extend([now] * (1 if self._seen else self._times))
        return np.concatenate(list(self._seen), axis=-1)
