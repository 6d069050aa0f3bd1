"""Atari games as they are usually trained on: through the vector implementation of `ale-py`, or one that can be filmed.

Unless `preprocess:` says otherwise: 84×84 grey, four frames stacked, every fourth frame acted on (of the last two the brighter
pixels), up to 30 no-ops and FIRE at the start, rewards clipped to −1 … 1. All names of a game show the same, those without
frame skip too (PongNoFrameskip-v4); they differ in how often an action is ignored (`repeat_action_probability`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from ludus.config.schema import PreprocessConfig
from ludus.core import plugins
from ludus.core.tree import Array
from ludus.envs.preprocessing import Clip, ClippedReward, EpisodicLife, clipping
from ludus.errors import ConfigError, UsageError

_DEFAULTS: dict[str, Any] = {
    "repeat_action_probability": 0.0,
    "full_action_space": False,
    "max_num_frames_per_episode": 108_000,
    "frameskip": 4,
    "stack_num": 4,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "noop_max": 30,
    "life_loss_info": False,
    "reward_clipping": True,
    "use_fire_reset": True,
}
_OF_THE_GAME = ("repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
_WITHOUT_EFFECT = {"num_threads", "thread_affinity_offset", "batch_size", "maxpool"}
"""Keywords of the vector implementation that change nothing of what one game shows, or hardly anything."""


def is_atari(spec: EnvSpec, env_config: Mapping[str, Any], preprocess: PreprocessConfig) -> bool:
    """Whether the standard preprocessing applies: to pictures of an Atari game, unless it is switched off."""
    ours = preprocess.standard is not False and str(spec.entry_point).startswith("ale_py")
    return ours and (spec.kwargs | dict(env_config)).get("obs_type", "rgb") == "rgb"


def make_vector(spec: EnvSpec, num: int, env_config: Mapping[str, Any], preprocess: PreprocessConfig) -> Any:
    """A vector environment of `ale-py`. Raises MissingExtra, ConfigError."""
    plugins.require("ale_py", "atari", spec.id)
    from ale_py.vector_env import AtariVectorEnv

    keywords = _keywords(spec, env_config, preprocess)
    clip = _unusual_clip(preprocess)
    env: Any = AtariVectorEnv(game=spec.kwargs["game"], num_envs=num, **keywords | ({"reward_clipping": False} if clip else {}))
    if not keywords["grayscale"]:
        env = _ColoursLast(env)
    return env if clip is None else _Clipped(env, clip)


def make_single(
    spec: EnvSpec, env_config: Mapping[str, Any], preprocess: PreprocessConfig, render_mode: str | None = None
) -> gym.Env[Any, Any]:
    """One game that shows the same, and can be filmed. Raises MissingExtra, ConfigError, UsageError."""
    plugins.require("ale_py", "atari", spec.id)
    plugins.require("cv2", "atari", f"A single game of {spec.id}")
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    c = _keywords(spec, env_config, preprocess)
    unknown = c.keys() - _DEFAULTS.keys() - _WITHOUT_EFFECT
    if unknown:
        raise UsageError(
            f"{spec.id} cannot be filmed with {', '.join(sorted(unknown))} in env_config.",
            "Roll out without --video, and leave out wrappers of single environments.",
        )
    env: gym.Env[Any, Any] = gym.make(spec, frameskip=1, render_mode=render_mode, **{key: c[key] for key in _OF_THE_GAME})
    size = (c["img_width"], c["img_height"])
    env = AtariPreprocessing(
        env, noop_max=c["noop_max"], frame_skip=c["frameskip"], screen_size=size, grayscale_obs=c["grayscale"]
    )
    if c["use_fire_reset"] and "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
        env = FireAtStart(env)
    if c["life_loss_info"]:
        env = EpisodicLife(env, spec.id)
    clip = _unusual_clip(preprocess) or (np.sign if c["reward_clipping"] else None)
    if clip is not None:
        env = ClippedReward(env, clip)
    env = FrameStackObservation(env, c["stack_num"])
    return env if c["grayscale"] else _ColoursLastOfOne(env)


def _keywords(spec: EnvSpec, env_config: Mapping[str, Any], preprocess: PreprocessConfig) -> dict[str, Any]:
    """What the vector implementation calls them. Raises ConfigError for what it does not have, or what is said twice."""
    for key in ("scale", "flatten", "drop"):
        if getattr(preprocess, key):
            raise ConfigError(f"preprocess.{key} is not for the pictures of {spec.id}.", "Leave it out.")
    skip = preprocess.frame_skip or env_config.get("frameskip", _DEFAULTS["frameskip"])
    clips = None if preprocess.clip_reward is None else preprocess.clip_reward is not False and _unusual_clip(preprocess) is None
    height, width = preprocess.resize or (None, None)
    limit = preprocess.max_episode_steps * skip if preprocess.max_episode_steps else None
    asked = {
        "frameskip": ("frame_skip", preprocess.frame_skip),
        "grayscale": ("grey", preprocess.grey),
        "img_height": ("resize", height),
        "img_width": ("resize", width),
        "stack_num": ("stack", preprocess.stack),
        "noop_max": ("noop_max", preprocess.noop_max),
        # `episodic_life` of ale-py begins a new game at every lost life; this one goes on, as in the papers.
        "life_loss_info": ("episodic_life", preprocess.episodic_life),
        "reward_clipping": ("clip_reward", clips),
        "max_num_frames_per_episode": ("max_episode_steps", limit),
    }
    given = {key: value for key, (_, value) in asked.items() if value is not None}
    twice = [key for key in given if key in env_config and env_config[key] != given[key] and not _evaluates(key, given[key])]
    if twice:
        ours = asked[twice[0]][0]
        raise ConfigError(
            f"{spec.id}: env_config sets {twice[0]} to {env_config[twice[0]]!r}, and preprocess sets {ours} otherwise.",
            "Keep one.",
        )
    if "episodic_life" in env_config:
        raise ConfigError("env_config.episodic_life would begin a new game at every lost life.", "Set preprocess.episodic_life.")
    own = {key: spec.kwargs[key] for key in _OF_THE_GAME if key in spec.kwargs}
    return _DEFAULTS | own | dict(env_config) | given


def _evaluates(key: str, value: Any) -> bool:
    """These are switched off for evaluations, whoever switched them on."""
    return key in ("reward_clipping", "life_loss_info") and value is False


def _unusual_clip(preprocess: PreprocessConfig) -> Clip | None:
    return clipping(preprocess) if isinstance(preprocess.clip_reward, tuple) and preprocess.clip_reward != (-1, 1) else None


class FireAtStart(gym.Wrapper[Any, Any, Any, Any]):
    """Some games do not begin before FIRE is pressed."""

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**keywords)
        fire = self.env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]
        observation, _, terminated, truncated, info = self.env.step(fire)
        return self.env.reset(**keywords) if terminated or truncated else (observation, info)


# -- colour: [stack, H, W, 3] becomes a picture [H, W, stack · 3] -------------------------------------------------------


def _picture_space(space: gym.Space[Any]) -> gym.spaces.Box:
    stack, h, w, c = space.shape  # type: ignore[misc]
    return gym.spaces.Box(0, 255, (h, w, stack * c), np.uint8)


def _picture(seen: Array) -> Array:
    moved = np.moveaxis(seen, -4, -2)  # […, H, W, stack, 3]
    return np.ascontiguousarray(moved).reshape(*moved.shape[:-2], -1)


class _ColoursLast(gym.vector.VectorWrapper):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.single_observation_space = _picture_space(env.single_observation_space)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, env.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, infos = self.env.reset(seed=seed, options=options)
        return _picture(observation), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            infos = infos | {"final_obs": _picture(infos["final_obs"])}
        return _picture(observation), reward, terminated, truncated, infos


class _ColoursLastOfOne(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = _picture_space(env.observation_space)

    def observation(self, observation: Any) -> Any:
        return _picture(observation)


class _Clipped(gym.vector.VectorWrapper):
    def __init__(self, env: Any, clip: Clip) -> None:
        super().__init__(env)
        self._clip = clip

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        return observation, self._clip(reward), terminated, truncated, infos
