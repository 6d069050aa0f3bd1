"""ViZDoom as it is trained on: what is seen and done, how episodes end, and that no engine outlives its player."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.envs.vector_env import LoopEnvironments, make_environments, make_one
from ludus.errors import MissingExtra, UsageError

BASIC = "VizdoomBasic-v1"
IDLE, LEFT, RIGHT, ATTACK = range(4)


def test_without_vizdoom_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "vizdoom"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "vizdoom", None)  # as if it could not be found
    monkeypatch.setitem(sys.modules, "vizdoom.gymnasium_wrapper", None)
    for name in [name for name in gym.registry if name.startswith("Vizdoom")]:
        monkeypatch.delitem(gym.registry, name)
    with pytest.raises(MissingExtra, match=r"ludus\[doom\]"):
        make_one(BASIC)


@pytest.fixture
def game() -> Iterator[gym.Env[Any, Any]]:
    pytest.importorskip("vizdoom", reason="pip install 'ludus[doom]'")
    env = make_one(BASIC, render_mode="rgb_array")
    yield env
    env.close()


def test_a_scenario_shows_a_small_colour_picture_and_takes_one_button(game: gym.Env[Any, Any]) -> None:
    assert game.observation_space == gym.spaces.Box(0, 255, (72, 128, 3), np.uint8)
    assert game.action_space == gym.spaces.Discrete(4)
    observation, _ = game.reset(seed=1)
    assert game.observation_space.contains(observation)
    assert observation.mean() > 20, "a black picture"
    assert len(np.unique(observation)) > 20
    before = observation
    for _ in range(3):
        observation, *_ = game.step(LEFT)
    assert (observation != before).mean() > 0.2, "walking sideways changes the view"


def test_the_observation_is_made_of_the_nearest_pixels_of_the_screen_that_is_filmed(game: gym.Env[Any, Any]) -> None:
    game.reset(seed=1)
    observation, *_ = game.step(RIGHT)
    screen: Any = game.render()
    assert screen.shape == (120, 160, 3)
    rows, columns = np.arange(72) * 120 // 72, np.arange(128) * 160 // 128
    np.testing.assert_array_equal(observation, screen[rows[:, None], columns])


def test_an_episode_that_runs_out_of_time_is_truncated_and_the_next_begins(game: gym.Env[Any, Any]) -> None:
    game.reset(seed=1)
    rewards, steps, truncated = 0.0, 0, False
    while not truncated:
        observation, reward, terminated, truncated, _ = game.step(IDLE)
        rewards, steps = rewards + float(reward), steps + 1
        assert not terminated
        assert steps < 100
    assert steps == 75  # 300 frames, every fourth acted on, the first of which pass before the start
    assert rewards == pytest.approx(-3.0, abs=0.2)  # −1 a frame, in hundredths
    assert observation.mean() > 20, "the last picture is shown once more, not a black one"
    observation, _ = game.reset()
    assert observation.mean() > 20


def test_the_same_seed_is_the_same_game() -> None:
    pytest.importorskip("vizdoom", reason="pip install 'ludus[doom]'")
    seen = []
    for _ in range(2):
        env = make_one(BASIC)
        env.reset(seed=7)
        for action in (LEFT, LEFT, ATTACK, RIGHT):
            observation, *_ = env.step(action)
        env.reset()  # the second episode follows from the seed, too
        second, *_ = env.step(LEFT)
        seen.append((observation, second))
        env.close()
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    np.testing.assert_array_equal(seen[0][1], seen[1][1])


def test_copies_are_stepped_together_and_a_bad_setting_is_named() -> None:
    pytest.importorskip("vizdoom", reason="pip install 'ludus[doom]'")
    environments = make_environments(BASIC, 2, {"grayscale": True, "frame_skip": 2})
    assert isinstance(environments, LoopEnvironments)
    environments.reset(3)
    outcome = environments.step(np.array([LEFT, RIGHT]))
    assert outcome.observations.observation.shape == (2, 72, 128, 1)
    assert outcome.reward == pytest.approx([-0.02, -0.02])
    environments.close()
    with pytest.raises(UsageError, match="no_such_setting=3"):
        make_one(BASIC, {"no_such_setting": 3})
    with pytest.raises(UsageError, match="400×300"):
        make_one(BASIC, {"width": 400, "height": 300})


_PLAY = """
import sys, time
from ludus.envs.vector_env import make_one
env = make_one("VizdoomBasic-v1")
env.reset(seed=1)
print("playing", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_engine_ends_with_the_process_that_plays_even_when_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("vizdoom", reason="pip install 'ludus[doom]'")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    player = subprocess.Popen(
        [sys.executable, "-c", _PLAY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    with player:
        assert player.stdout is not None
        assert player.stdout.readline() == "playing\n"
        engines = _children(player.pid)
        assert len(engines) == 1
        instance = Path(f"/proc/{engines[0]}/cmdline").read_text().split("+viz_instance_id\0")[1].split("\0")[0]
        assert not list(Path("/dev/shm").glob(f"*{instance}")), "shared memory that would be left behind"
        player.send_signal(signal.SIGKILL)
        player.wait(timeout=10)
    deadline = time.monotonic() + 10
    while _alive(engines[0]) and time.monotonic() < deadline:
        os.sched_yield()
    assert not _alive(engines[0])
    assert not (tmp_path / "_vizdoom.ini").exists()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
