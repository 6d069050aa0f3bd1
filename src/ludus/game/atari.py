"""One Atari game that can be filmed, preprocessed as the vector implementation of `ale-py` does it by default.

84×84 grey, four frames stacked, every fourth frame acted on, up to 30 no-ops and FIRE at the start. Rewards are not clipped.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from ludus import plugins
from ludus.errors import UsageError

_DEFAULTS: dict[str, Any] = {
    "repeat_action_probability": 0.25,
    "full_action_space": False,
    "frameskip": 4,
    "stack_num": 4,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "noop_max": 30,
    "episodic_life": False,
    "use_fire_reset": True,
    "render_mode": None,
}
_WITHOUT_EFFECT = {"reward_clipping", "num_threads", "thread_affinity_offset", "batch_size", "maxpool"}


def make_single(name: str, config: dict[str, Any]) -> gym.Env[Any, Any]:
    """Takes the keywords of the vector implementation. Raises UsageError for one that a single game does not have."""
    plugins.require("ale_py", "atari", name)
    plugins.require("cv2", "atari", f"Filming {name}")
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    unknown = config.keys() - _DEFAULTS.keys() - _WITHOUT_EFFECT
    if unknown:
        raise UsageError(f"{name} cannot be filmed with {', '.join(sorted(unknown))} in env_config.", "Roll out without --video.")
    c = _DEFAULTS | config
    env: gym.Env[Any, Any] = gym.make(
        name,
        frameskip=1,
        repeat_action_probability=c["repeat_action_probability"],
        full_action_space=c["full_action_space"],
        render_mode=c["render_mode"],
    )
    env = AtariPreprocessing(
        env,
        noop_max=c["noop_max"],
        frame_skip=c["frameskip"],
        screen_size=(c["img_width"], c["img_height"]),
        terminal_on_life_loss=c["episodic_life"],
        grayscale_obs=c["grayscale"],
    )
    if c["use_fire_reset"] and "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
        env = FireAtStart(env)
    return FrameStackObservation(env, c["stack_num"])


class FireAtStart(gym.Wrapper[Any, Any, Any, Any]):
    """Some games do not begin before FIRE is pressed."""

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**keywords)
        fire = self.env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]
        observation, _, terminated, truncated, info = self.env.step(fire)
        return self.env.reset(**keywords) if terminated or truncated else (observation, info)
