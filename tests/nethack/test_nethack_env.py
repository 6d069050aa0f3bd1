"""NetHack by orders, played by the game itself."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.errors import EnvironmentFault

pytest.importorskip("nle", reason="NetHack needs `pip install ludus[nethack]`")

import ludus.envs.registry  # noqa: F401 - registers ludus/…
from ludus.games.nethack.adventure import Order
from ludus.games.nethack.env import NetHackOrders
from ludus.games.nethack.screen import draw_screen


def play(env: NetHackOrders, seed: int, script: str, orders: int) -> tuple[list[float], dict[str, Any]]:
    """Observations in a row, and the last infos."""
    observation, info = env.reset(seed=seed)
    seen = [*observation.tolist()]
    for _ in range(orders):
        observation, reward, terminated, truncated, info = env.step(env.script_action(script))
        seen += [*observation.tolist(), reward]
        if terminated or truncated:
            break
    return seen, info


def test_the_same_seed_and_orders_give_the_same_game() -> None:
    env, other = NetHackOrders(), NetHackOrders()
    try:
        first, _ = play(env, 3, "careful", 250)
        play(env, 4, "careful", 20)
        assert play(env, 3, "careful", 250)[0] == first
        assert play(other, 3, "careful", 250)[0] == first
        assert play(other, 4, "careful", 250)[0] != first
    finally:
        env.close()
        other.close()


def test_the_scripts_get_down_the_dungeon() -> None:
    env, depths, scores = NetHackOrders(max_orders=500), [], []
    for seed in range(8):
        _, info = play(env, seed, "descend", 500)
        depths.append(info["depth"])
        scores.append(info["score"])
    env.close()
    assert max(depths) >= 4
    assert np.mean(depths) >= 2.5
    assert np.mean(scores) >= 100


def test_the_rewards_add_up_to_the_score_and_the_limit_truncates() -> None:
    env = NetHackOrders(max_orders=120, reward_scale=0.5)
    env.reset(seed=11)
    total = 0.0
    for number in range(1, 121):
        observation, reward, terminated, truncated, info = env.step(env.script_action("thorough"))
        total += reward
        assert env.observation_space.contains(observation)
        assert info["action_mask"].any()
        if terminated:
            break
        assert truncated == (number == 120)
    assert info["score"] == 2 * total
    env.close()


def test_orders_that_are_not_possible_are_masked_and_become_a_rest() -> None:
    env = NetHackOrders()
    _, info = env.reset(seed=2)
    assert not info["action_mask"][Order.PRAY]
    assert not info["action_mask"][Order.ASCEND]
    before = env.situation
    env.step(int(Order.PRAY))
    assert env.situation.searched == before.searched + 8
    env.close()


def test_the_screen_is_drawn_in_the_colours_of_the_terminal() -> None:
    env = gym.make("ludus/NetHackOrders-v0", render_mode="rgb_array")
    env.reset(seed=1)
    frame = np.asarray(env.render())
    assert frame.shape == (384, 640, 3)
    assert frame.dtype == np.uint8
    assert (frame.max(axis=2) > 150).mean() > 0.005  # characters on a dark ground
    env.close()
    red = draw_screen(np.full((1, 2), ord("@"), np.uint8), np.array([[1, 10]], np.int8))
    assert red[:, :8, 0].max() > 2 * red[:, :8, 1].max()
    assert red[:, 8:, 1].max() > 2 * red[:, 8:, 0].max()


def test_a_character_that_does_not_exist_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="wizard"):
        NetHackOrders(character="wizard")
