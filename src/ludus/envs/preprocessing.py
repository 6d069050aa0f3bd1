"""Preprocessing wrappers of single environments: frame skip, resizing, frame stacking and others.

Applied in the order of the Atari papers: actions first, then observations. An action mask in the observation is not changed.
Atari and ViZDoom do most of it natively and faster (`envs/atari.py`, `envs/vizdoom.py`).
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
"""Weights of red, green and blue in luma (ITU-R BT.601)."""


def for_evaluation(config: PreprocessConfig) -> PreprocessConfig:
    """Return the settings for evaluation: rewards are not clipped, and a lost life does not end the episode."""
    return config.model_copy(update={"clip_reward": False, "episodic_life": False})


def preprocess_of(config: Mapping[str, Any]) -> PreprocessConfig:
    """Return the section of a saved `config:`; older runs have none."""
    return PreprocessConfig.model_validate(config.get("preprocess") or {})


def is_plain(config: PreprocessConfig) -> bool:
    """Return whether no preprocessing is configured."""
    settings = config.model_dump(exclude={"standard", "scale"})
    return config.scale is not True and not any(settings.values())


def preprocess_env(env: Env, config: PreprocessConfig, name: str) -> Env:
    """Wrap the environment. Raises ConfigError for settings that do not apply to it."""
    if not isinstance(env, gym.Env) or is_plain(config):
        return env
    if config.noop_max:
        env = NoopStart(env, config.noop_max, name)
    if config.frame_skip and config.frame_skip > 1:
        env = FrameSkip(env, config.frame_skip)
    if config.max_episode_steps:  # before EpisodicLife: the limit applies to whole games, not lives
        env = gym.wrappers.TimeLimit(env, config.max_episode_steps)
    if config.episodic_life:
        env = EpisodicLife(env, name)
    clip = reward_clip(config)
    if clip is not None:
        env = gym.wrappers.TransformReward(env, clip)
    return preprocess_observations(env, config, name)


def preprocess_observations(env: Env, config: PreprocessConfig, name: str) -> Env:
    """Wrap the environment as far as `config` is about observations. Raises ConfigError for settings that do not apply to them."""
    if config.drop:
        env = DropParts(env, config.drop, name)
    if config.grey or config.resize:
        env = MapObservations(env, lambda space: _map_image(space, bool(config.grey), config.resize))
        if not env.changed:
            wanted = " and ".join(key for key, given in (("grey", config.grey), ("resize", config.resize)) if given)
            raise ConfigError(
                f"preprocess.{wanted}: {name} has no image observations, but {env.env.observation_space}.",
                "Leave it out.",
            )
    if config.scale is True:
        env = MapObservations(env, lambda space: _map_scaled(space, name))
    if config.flatten:
        env = FlattenObservation(env)
    return StackObservations(env, config.stack) if config.stack and config.stack > 1 else env


# -- actions and rewards----------------------------------------------------------------------------------------------------


class NoopStart(gym.Wrapper[Any, Any, Any, Any]):
    """Starts an episode with 0 to `most` no-op actions, to vary the initial state."""

    def __init__(self, env: Env, most: int, name: str) -> None:
        super().__init__(env)
        self._most, self._idle = most, _noop_action(env, name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        for _ in range(int(self.env.unwrapped.np_random.integers(self._most + 1))):
            observation, _, terminated, truncated, info = self.env.step(self._idle)
            if terminated or truncated:
                observation, info = self.env.reset(options=options)
        return observation, info


def _noop_action(env: Env, name: str) -> Any:
    meanings = getattr(env.unwrapped, "get_action_meanings", None)
    if meanings is not None and meanings()[0] != "NOOP":
        raise ConfigError(f"preprocess.noop_max: the first action of {name} is {meanings()[0]}, not a no-op.")
    return noop_action(env.action_space, name)


def noop_action(space: gym.Space[Any], name: str) -> Any:
    """The action of a space that does nothing, by convention. Raises ConfigError if there is none."""
    if isinstance(space, Discrete):
        return space.start
    if isinstance(space, Box) and space.contains(np.zeros(space.shape, space.dtype)):
        return np.zeros(space.shape, space.dtype)
    if isinstance(space, MultiBinary):
        return np.zeros(space.shape, space.dtype)
    raise ConfigError(f"preprocess.noop_max: {name} ({space}) has no known no-op action.", "Leave it out.")


class FrameSkip(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats every action; returns the sum of the rewards and the last observation."""

    def __init__(self, env: Env, times: int) -> None:
        super().__init__(env)
        self._times = times
        self.metadata = skip_frames_of_video(env.metadata, times)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total: Any = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total = total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def skip_frames_of_video(metadata: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Metadata of an environment that shows every n-th frame only: videos have the speed of the game."""
    rate = metadata.get("render_fps")
    return dict(metadata) | ({"render_fps": rate / times} if rate else {})


class EpisodicLife(gym.Wrapper[Any, Any, Any, Any]):
    """Ends the episode at a lost life; the next episode continues the same game (Mnih et al. 2015)."""

    def __init__(self, env: Env, name: str) -> None:
        super().__init__(env)
        self._name, self._idle = name, _noop_action(env, name)
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
            raise EnvironmentFault(f"preprocess.episodic_life: {self._name} does not report infos['lives'].", "Leave it out.")
        return int(info["lives"])


def reward_clip(config: PreprocessConfig) -> Clip | None:
    if config.clip_reward in (None, False):
        return None
    if isinstance(config.clip_reward, tuple):
        low, high = config.clip_reward
        return lambda reward: np.clip(reward, low, high)
    return np.sign


# -- observations -------------------------------------------------------------------------------------------------------

Leaf = tuple[gym.Space[Any], Callable[[Any], Any]]
"""The mapped space of a leaf, and the function that maps its values."""


class DropParts(gym.ObservationWrapper[Any, Any, Any]):
    """Removes named parts of a Dict observation. Raises ConfigError for an unknown part."""

    def __init__(self, env: Env, names: Sequence[str], name: str) -> None:
        super().__init__(env)
        whole = env.observation_space
        parts = known_parts(whole)
        if isinstance(whole, Dict) and set(whole.spaces) == {"observation", ACTION_MASK}:  # error messages omit this level
            names = [part if part in parts else f"observation.{part}" for part in names]
        unknown = [part for part in names if part not in parts]
        if unknown:
            known = f"its parts are {', '.join(parts)}" if parts else f"it has no parts: {whole}"
            raise ConfigError(
                f"preprocess.drop: the observation of {name} has no part {unknown[0].removeprefix('observation.')!r}; {known}."
            )
        if ACTION_MASK in names:
            raise ConfigError(f"preprocess.drop: {ACTION_MASK} is not part of the observation.", "Leave it out.")
        self.observation_space, self._keep = drop_parts(whole, names, name)

    def observation(self, observation: Any) -> Any:
        return self._keep(observation)


def known_parts(space: gym.Space[Any], path: str = "") -> list[str]:
    """Return `outer`, `outer.inner`, … of all parts of a nested space, as `preprocess.drop` names them."""
    if isinstance(space, (Dict, Tuple)):
        items = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        named = [(f"{path}.{key}" if path else str(key), item) for key, item in items]
        return [found for inner, item in named for found in (inner, *known_parts(item, inner))]
    return []


def _drop_parts(space: gym.Space[Any], names: frozenset[str], path: str = "") -> Leaf | None:
    """Return the space without the named parts and the function that removes them; None if nothing is left."""
    if path in names:
        return None
    prefix = f"{path}." if path else ""
    if isinstance(space, Dict):
        found = {key: _drop_parts(item, names, f"{prefix}{key}") for key, item in space.spaces.items()}
        parts = {key: part for key, part in found.items() if part is not None}
        result = Dict({key: item for key, (item, _) in parts.items()})
        return (
            (result, lambda value: {key: parts[key][1](item) for key, item in value.items() if key in parts}) if parts else None
        )
    if isinstance(space, Tuple):
        items = [
            (i, part) for i, item in enumerate(space.spaces) if (part := _drop_parts(item, names, f"{prefix}{i}")) is not None
        ]
        left = Tuple([item for _, (item, _) in items])
        return (left, lambda value: tuple(keep(value[i]) for i, (_, keep) in items)) if items else None
    return space, lambda value: value


def drop_parts(space: gym.Space[Any], names: Sequence[str], name: str) -> Leaf:
    """Return the space without the named parts, and the function that removes them. Raises ConfigError if nothing is left."""
    kept = _drop_parts(space, frozenset(names))
    if kept is None or (isinstance(kept[0], Dict) and set(kept[0].spaces) == {ACTION_MASK}):
        raise ConfigError(f"preprocess.drop: nothing of the observation of {name} is left.", "Keep at least one part.")
    return kept


def has_images(space: gym.Space[Any]) -> bool:
    """Return whether `preprocess.grey` and `resize` apply to observations of this space."""
    return any(_map_image(leaf, False, None) is not None for leaf in _leaf_spaces(space))


def _leaf_spaces(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    if isinstance(space, (Dict, Tuple)):
        items = space.spaces.values() if isinstance(space, Dict) else space.spaces
        return [leaf for item in items for leaf in _leaf_spaces(item)]
    return [space]


class MapObservations(gym.ObservationWrapper[Any, Any, Any]):
    """Maps observations leaf by leaf; `of` returns None for a leaf that is not changed."""

    def __init__(self, env: Env, of: Callable[[gym.Space[Any]], Leaf | None]) -> None:
        super().__init__(env)
        self.changed = False
        self.observation_space, self._map = self._map_space(env.observation_space, of)

    def _map_space(self, space: gym.Space[Any], of: Callable[[gym.Space[Any]], Leaf | None]) -> Leaf:
        if isinstance(space, Dict):
            parts = {key: self._map_space(item, of) for key, item in space.spaces.items() if key != ACTION_MASK}
            rest = {key: item for key, item in space.spaces.items() if key == ACTION_MASK}
            return Dict({key: s for key, (s, _) in parts.items()} | rest), lambda value: {
                key: parts[key][1](item) if key in parts else item for key, item in value.items()
            }
        if isinstance(space, Tuple):
            items = [self._map_space(item, of) for item in space.spaces]
            return Tuple([s for s, _ in items]), lambda value: tuple(m(x) for (_, m), x in zip(items, value, strict=True))
        found = of(space)
        self.changed |= found is not None
        return (space, lambda value: value) if found is None else found

    def observation(self, observation: Any) -> Any:
        return self._map(observation)


def _map_image(space: gym.Space[Any], grey: bool, size: tuple[int, int] | None) -> Leaf | None:
    """[H, W], [H, W, C] or [C, H, W] of bytes → [h, w, c]."""
    if not isinstance(space, Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return None
    flat = len(space.shape) == 2
    first = not flat and space.shape[-1] not in (1, 3, 4) and space.shape[0] in (1, 3, 4)
    h, w, c = (*space.shape, 1) if flat else (space.shape[1], space.shape[2], space.shape[0]) if first else space.shape
    to_grey = grey and c in (3, 4)
    resized = AreaResize((h, w), size) if size is not None and size != (h, w) else None

    def convert(value: Any) -> Array:
        image: Array = np.asarray(value)
        image = image[..., None] if flat else np.moveaxis(image, 0, -1) if first else image
        if to_grey:
            image = np.rint(image[..., :3] @ GREY).astype(np.uint8)[..., None]
        return image if resized is None else resized(image)

    return Box(0, 255, (*(size or (h, w)), 1 if to_grey else c), np.uint8), convert


class AreaResize:
    """Resizes uint8 images [H, W, C] → [h, w, C] by area averaging, without OpenCV."""

    def __init__(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        self._rows, self._columns = area_weights(before[0], after[0]), area_weights(before[1], after[1])
        self._after = after

    def __call__(self, image: Array) -> Array:
        h, w, c = image.shape
        tall = self._rows @ image.reshape(h, w * c).astype(np.float32)
        wide = np.matmul(self._columns, tall.reshape(self._after[0], w, c))
        result: Array = np.rint(wide).astype(np.uint8)
        return result


def area_weights(before: int, after: int) -> Array:
    """[after, before]: fraction of every old pixel in every new one; rows sum to 1."""
    edges = np.arange(after + 1) * (before / after)
    low, high = np.arange(before), np.arange(1, before + 1)
    covered = np.minimum(edges[1:, None], high) - np.maximum(edges[:-1, None], low)
    result: Array = (np.clip(covered, 0, None) * (after / before)).astype(np.float32)
    return result


def _map_scaled(space: gym.Space[Any], name: str) -> Leaf | None:
    if not isinstance(space, Box) or (space.dtype == np.uint8 and len(space.shape) in (2, 3)):
        return None
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ConfigError(
            f"preprocess.scale: {name} has observations without bounds ({space}).", "Use observation_filter: MeanStdFilter."
        )
    return Box(0, 1, space.shape, np.float32), lambda value: ((np.asarray(value) - low) / (high - low)).astype(np.float32)


class FlattenObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Flattens all parts into one float32 vector; an action mask is kept separately."""

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

    def observation(self, observation: Any) -> Any:
        rest = {key: item for key, item in observation.items() if key != ACTION_MASK} if self._mask else observation
        flat = np.asarray(gym.spaces.flatten(self._space, rest), np.float32)
        return {"observation": flat, ACTION_MASK: observation[ACTION_MASK]} if self._mask else flat


class StackObservations(MapObservations):
    """Concatenates the last observations, oldest first, along the last axis (image channels). An episode starts with its first
    observation repeated. Only Box leaves are stacked; others show the current value.
    """

    def __init__(self, env: Env, times: int) -> None:
        self._times = times
        self._histories: list[_FrameHistory] = []
        super().__init__(env, self._make_history)

    def _make_history(self, space: gym.Space[Any]) -> Leaf | None:
        if not isinstance(space, Box):
            return None
        history = _FrameHistory(self._times)
        self._histories.append(history)
        low, high = (np.concatenate([np.atleast_1d(bound)] * self._times, axis=-1) for bound in (space.low, space.high))
        return Box(low, high, low.shape, space.dtype.type), history

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        for history in self._histories:
            history.clear()
        return super().reset(seed=seed, options=options)


class _FrameHistory:
    def __init__(self, times: int) -> None:
        self._seen: deque[Array] = deque(maxlen=times)
        self._times = times

    def clear(self) -> None:
        self._seen.clear()

    def __call__(self, value: Any) -> Array:
        now: Array = np.atleast_1d(np.array(value))
        self._seen.extend([now] * (1 if self._seen else self._times))
        return np.concatenate(list(self._seen), axis=-1)
