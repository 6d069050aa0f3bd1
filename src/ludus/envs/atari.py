"""Atari games with the standard preprocessing, through the vector implementation of `ale-py` or as single environments.

Unless `preprocess:` overrides it: 84×84 grey, four frames stacked, frame skip 4 (maximum over the last two frames), up to 30 no-ops
and FIRE at the start, rewards clipped to −1 … 1. All ids of a game get the same, including those without frame skip
(PongNoFrameskip-v4); they differ in the probability that an action is ignored (`repeat_action_probability`).
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
from ludus.envs.preprocessing import Clip, EpisodicLife, reward_clip
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
_GAME_KEYWORDS = ("repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
_WITHOUT_EFFECT = {"num_threads", "thread_affinity_offset", "batch_size", "maxpool"}
"""Keywords of the vector implementation that do not change the observations of a game."""


def is_atari(spec: EnvSpec, env_config: Mapping[str, Any], preprocess: PreprocessConfig) -> bool:
    """Return whether the standard preprocessing applies: to image observations of an Atari game, unless switched off."""
    ours = preprocess.standard is not False and str(spec.entry_point).startswith("ale_py")
    return ours and (spec.kwargs | dict(env_config)).get("obs_type", "rgb") == "rgb"


def make_vector(spec: EnvSpec, num: int, env_config: Mapping[str, Any], preprocess: PreprocessConfig) -> Any:
    """Return a vector environment of `ale-py`. Raises MissingExtra, ConfigError."""
    plugins.require("ale_py", "atari", spec.id)
    from ale_py.vector_env import AtariVectorEnv

    keywords = _keywords(spec, env_config, preprocess)
    clip = _custom_clip(preprocess)
    env: Any = AtariVectorEnv(game=spec.kwargs["game"], num_envs=num, **keywords | ({"reward_clipping": False} if clip else {}))
    if not keywords["grayscale"]:
        env = _ChannelsLastVector(env)
    return env if clip is None else gym.wrappers.vector.TransformReward(env, clip)


def make_single(
    spec: EnvSpec, env_config: Mapping[str, Any], preprocess: PreprocessConfig, render_mode: str | None = None
) -> gym.Env[Any, Any]:
    """Return one game with the same observations, which can be rendered. Raises MissingExtra, ConfigError, UsageError."""
    plugins.require("ale_py", "atari", spec.id)
    plugins.require("cv2", "atari", f"A single game of {spec.id}")
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    c = _keywords(spec, env_config, preprocess)
    unknown = c.keys() - _DEFAULTS.keys() - _WITHOUT_EFFECT
    if unknown:
        raise UsageError(
            f"{spec.id} cannot be rendered with {', '.join(sorted(unknown))} in env_config.",
            "Roll out without --video, and leave out wrappers of single environments.",
        )
    env: gym.Env[Any, Any] = gym.make(spec, frameskip=1, render_mode=render_mode, **{key: c[key] for key in _GAME_KEYWORDS})
    size = (c["img_width"], c["img_height"])
    env = AtariPreprocessing(
        env, noop_max=c["noop_max"], frame_skip=c["frameskip"], screen_size=size, grayscale_obs=c["grayscale"]
    )
    if c["use_fire_reset"] and "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
        env = FireReset(env)
    if c["life_loss_info"]:
        env = EpisodicLife(env, spec.id)
    clip: Clip | None = _custom_clip(preprocess) or (np.sign if c["reward_clipping"] else None)
    if clip is not None:
        env = gym.wrappers.TransformReward(env, clip)
    env = FrameStackObservation(env, c["stack_num"])
    return (
        env
        if c["grayscale"]
        else gym.wrappers.TransformObservation(env, _channels_last, _channels_last_space(env.observation_space))
    )


def _keywords(spec: EnvSpec, env_config: Mapping[str, Any], preprocess: PreprocessConfig) -> dict[str, Any]:
    """Return the keywords of the vector implementation. Raises ConfigError for unsupported or conflicting settings."""
    for key in ("scale", "flatten", "drop"):
        if getattr(preprocess, key):
            raise ConfigError(f"preprocess.{key} does not apply to the images of {spec.id}.", "Leave it out.")
    skip = preprocess.frame_skip or env_config.get("frameskip", _DEFAULTS["frameskip"])
    clip_enabled = (
        None if preprocess.clip_reward is None else preprocess.clip_reward is not False and _custom_clip(preprocess) is None
    )
    height, width = preprocess.resize or (None, None)
    limit = preprocess.max_episode_steps * skip if preprocess.max_episode_steps else None
    translated = {
        "frameskip": ("frame_skip", preprocess.frame_skip),
        "grayscale": ("grey", preprocess.grey),
        "img_height": ("resize", height),
        "img_width": ("resize", width),
        "stack_num": ("stack", preprocess.stack),
        "noop_max": ("noop_max", preprocess.noop_max),
        # `episodic_life` of ale-py starts a new game after every lost life; `life_loss_info` continues it, as in the papers.
        "life_loss_info": ("episodic_life", preprocess.episodic_life),
        "reward_clipping": ("clip_reward", clip_enabled),
        "max_num_frames_per_episode": ("max_episode_steps", limit),
    }
    given = {key: value for key, (_, value) in translated.items() if value is not None}
    # Evaluations switch these off regardless of env_config.
    switched_off = {key for key in ("reward_clipping", "life_loss_info") if given.get(key) is False}
    twice = [key for key in given if key in env_config and env_config[key] != given[key] and key not in switched_off]
    if twice:
        ours = translated[twice[0]][0]
        raise ConfigError(
            f"{spec.id}: env_config sets {twice[0]} to {env_config[twice[0]]!r}, but preprocess sets {ours} otherwise.",
            "Keep one.",
        )
    if "episodic_life" in env_config:
        raise ConfigError(
            "env_config.episodic_life would start a new game after every lost life.", "Set preprocess.episodic_life."
        )
    own = {key: spec.kwargs[key] for key in _GAME_KEYWORDS if key in spec.kwargs}
    return _DEFAULTS | own | dict(env_config) | given


def _custom_clip(preprocess: PreprocessConfig) -> Clip | None:
    return reward_clip(preprocess) if isinstance(preprocess.clip_reward, tuple) and preprocess.clip_reward != (-1, 1) else None


class FireReset(gym.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE after a reset; some games do not start before."""

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**keywords)
        fire = self.env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]
        observation, _, terminated, truncated, info = self.env.step(fire)
        return self.env.reset(**keywords) if terminated or truncated else (observation, info)


# -- colour: [stack, H, W, 3] becomes an image [H, W, stack · 3] -------------------------------------------------------


def _channels_last_space(space: gym.Space[Any]) -> gym.spaces.Box:
    stack, h, w, c = space.shape  # type: ignore[misc]
    return gym.spaces.Box(0, 255, (h, w, stack * c), np.uint8)


def _channels_last(stacked: Array) -> Array:
    transposed = np.moveaxis(stacked, -4, -2)  # […, H, W, stack, 3]
    return np.ascontiguousarray(transposed).reshape(*transposed.shape[:-2], -1)


class _ChannelsLastVector(gym.vector.VectorWrapper):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.single_observation_space = _channels_last_space(env.single_observation_space)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, env.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, infos = self.env.reset(seed=seed, options=options)
        return _channels_last(observation), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            infos = infos | {"final_obs": _channels_last(infos["final_obs"])}
        return _channels_last(observation), reward, terminated, truncated, infos
