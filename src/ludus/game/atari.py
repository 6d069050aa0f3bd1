"""One Atari game as the vector implementation shows it: 84×84 grey, four frames stacked, every fourth frame acted on."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from ludus import plugins


def make_single(name: str, config: dict[str, Any]) -> gym.Env[Any, Any]:
    plugins.require("ale_py", "atari", name)
    plugins.require("cv2", "atari", f"Watching {name}")
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    sticky = config.pop("repeat_action_probability", 0.25)
    env: gym.Env[Any, Any] = gym.make(name, frameskip=1, repeat_action_probability=sticky, render_mode=config.get("render_mode"))
    env = AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, grayscale_obs=True)
    return FrameStackObservation(env, 4)
