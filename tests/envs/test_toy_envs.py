"""Our own small environments, and pictures of every family without a screen."""

from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from ludus.display import headless
from ludus.envs import toy_envs
from ludus.envs.vector_env import make_one
from ludus.errors import MissingExtra


def test_golf_keeps_the_rules_of_gymnasium() -> None:
    check_env(toy_envs.golf(render_mode="rgb_array"), skip_render_check=True)


def test_cartpole_without_velocities_shows_positions_and_angles_alone() -> None:
    shown, whole = toy_envs.cartpole_without_velocities(), gym.make("CartPole-v1")
    np.testing.assert_array_equal(shown.reset(seed=3)[0], whole.reset(seed=3)[0][[0, 2]])
    for action in (0, 1, 1):
        np.testing.assert_array_equal(shown.step(action)[0], whole.step(action)[0][[0, 2]])


def play(env: toy_envs.Golf, seed: int, *, wind: bool) -> float:
    """Somebody who knows the rules: the shortest club that reaches, aimed against the wind."""
    env.reset(seed=seed)
    gained, over = 0.0, False
    while not over:
        distance = env._distance
        club = 2 if distance <= 6 else 1 if distance <= 25 else 0
        power = min(1.0, 2 * distance / env.REACH[club] - 1)
        angle = -env._wind / 0.5 if wind and env.FLIES[club] else 0.0
        _, reward, holed, cut, _ = env.step({"club": club, "swing": [angle, power]})
        gained, over = gained + reward, holed or cut
    return gained


def test_golf_is_won_by_choosing_the_club_and_minding_the_wind() -> None:
    env = toy_envs.Golf()
    knows = np.mean([play(env, seed, wind=True) for seed in range(200)])
    careless = np.mean([play(env, seed, wind=False) for seed in range(200)])
    env.action_space.seed(0)
    chance = np.mean([_at_random(env, seed) for seed in range(200)])
    assert chance < -11 < -5 < careless < knows - 0.4
    assert knows > -3.3


def _at_random(env: toy_envs.Golf, seed: int) -> float:
    env.reset(seed=seed)
    gained, over = 0.0, False
    while not over:
        _, reward, holed, cut, _ = env.step(env.action_space.sample())
        gained, over = gained + reward, holed or cut
    return gained


@pytest.mark.parametrize(
    ("name", "module", "config"),
    [
        ("ludus.envs.toy_envs:golf", "gymnasium", {}),
        ("Acrobot-v1", "pygame", {}),
        ("LunarLander-v3", "Box2D", {}),
        ("Hopper-v5", "mujoco", {"width": 64, "height": 48}),
        ("ALE/Pong-v5", "ale_py", {}),
    ],
)
def test_every_family_is_filmed_in_colour_without_a_screen(name: str, module: str, config: dict[str, Any]) -> None:
    pytest.importorskip(module)
    env = make_one(name, config, "rgb_array")
    env.reset(seed=1)
    env.step(env.action_space.sample())
    picture: Any = env.render()
    env.close()
    assert picture.dtype == np.uint8
    assert picture.shape[-1] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 2
    assert not np.array_equal(picture[..., 0], picture[..., 2]), "grey"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have a screen")
def test_without_anything_to_draw_with_the_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(MissingExtra, match=r"neither libEGL nor libOSMesa.*apt-get install libegl1"):
        headless.prepare_rendering("gymnasium.envs.mujoco.hopper_v5:HopperEnv")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libOSMesa.so.8" if name == "OSMesa" else None)
    monkeypatch.setenv("MUJOCO_GL", "")
    headless.prepare_rendering("gymnasium.envs.mujoco.hopper_v5:HopperEnv")
    assert os.environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "egl")  # whoever chose is left alone
    headless.prepare_rendering("gymnasium.envs.mujoco.hopper_v5:HopperEnv")
    assert os.environ["MUJOCO_GL"] == "egl"
