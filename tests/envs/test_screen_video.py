"""Videos of games whose pictures come from their private screens: players, and environments that open a window."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.display import headless, x11
from ludus.envs.godot_rl.match import GodotMatch
from ludus.envs.player_process import PlayerProcess, open_screen
from ludus.envs.unity.match import UnityMatch
from ludus.errors import ConfigError, EnvironmentFault, MissingExtra, UsageError
from ludus.experiments.evaluation.screen_video import make_recorded
from ludus.experiments.evaluation.video import check_rgb
from ludus.process import screen_choice
from tests.envs.godot_rl.stand_in import game_at
from tests.tools import need
from tests.unity_player.executable import write_player
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="X servers of Linux")

WINDOW = Path(__file__).parents[1] / "display" / "window.py"
RED = (200, 30, 10)
FIRST_PORT = 25_400 + 200 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LUDUS_SCREEN", raising=False)
    for name in ("DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(headless, "_process_screen", [])
    yield
    headless.end_screen()
    screen_choice.configure("auto")


def with_window(game: Path) -> Path:
    """The same game, with a red window of 96 × 64 pixels while it runs; it is written beside it."""
    path = game.with_name(f"drawing-{game.name}")
    window = shlex.join([sys.executable, str(WINDOW), "96", "64", *map(str, RED)])
    path.write_text(f'#!/bin/sh\nsleep 1000 | {window} &\nexec {game} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def is_red(frame: Any) -> bool:
    return np.shape(frame) == (64, 96, 3) and tuple(frame[40, 40]) == RED


# -- players ------------------------------------------------------------------------------------------------------------------


def test_the_window_of_a_godot_game_is_recorded(tmp_path: Path) -> None:
    need("Xvfb")
    config = {"env_path": str(with_window(game_at(tmp_path))), "port": FIRST_PORT, "timeout": 20}
    with contextlib.closing(GodotMatch("godot_rl", config, "rgb_array")) as match:
        match.reset(0)
        wait_until(lambda: is_red(check_rgb(match.render(), "godot_rl")))


def test_the_window_of_a_unity_player_is_recorded_although_training_has_no_graphics(tmp_path: Path) -> None:
    need("Xvfb")
    config = {"file_name": str(with_window(write_player(tmp_path))), "base_port": FIRST_PORT + 100, "no_graphics": True}
    with contextlib.closing(UnityMatch("unity", config, "rgb_array")) as match:
        match.reset(0)
        wait_until(lambda: is_red(check_rgb(match.render(), "unity")))


def test_a_player_without_graphics_has_no_pictures(tmp_path: Path) -> None:
    config = {"file_name": str(write_player(tmp_path)), "base_port": FIRST_PORT + 110, "no_graphics": True}
    with contextlib.closing(UnityMatch("unity", config)) as match, pytest.raises(UsageError, match="no screen of Ludus"):
        match.render()
    screen_choice.configure("none")
    with pytest.raises(ConfigError, match="display is none, and a game is recorded"):
        UnityMatch("unity", config, "rgb_array").render()


def test_a_player_on_whose_screen_opengl_is_too_old_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("Xvfb")
    monkeypatch.setattr("ludus.display.game_screen._probed", {})
    monkeypatch.setenv("MESA_GL_VERSION_OVERRIDE", "3.0")
    screen_choice.configure("xvfb")
    player = write_player(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"{player.name} cannot draw on this machine: it has OpenGL 3\.0 .* core profile of 3\.2"
    ):
        UnityMatch("unity", {"file_name": str(player), "base_port": FIRST_PORT + 120})


def test_a_player_that_ends_with_its_screen_says_so() -> None:
    need("Xvfb")
    screen = open_screen("Game")
    assert screen.private is not None
    with PlayerProcess([sys.executable, str(WINDOW), "64", "48", "1", "2", "3"], screen=screen) as player:
        # Its standard input is empty, so that it ends by itself too: what counts is the screen.
        screen.private._command.close()
        wait_until(lambda: player.exit)
        with pytest.raises(EnvironmentFault, match=r"Its screen: the private X server :\d+ has ended"):
            player.check()
    assert x11.connection_error(screen.private.variables())


# -- environments -------------------------------------------------------------------------------------------------------------


class GameEnv(gym.Env[Any, Any]):
    """Starts a game with a window when it is stepped for the first time; no rendering of its own."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, *, draws: bool = True) -> None:
        self._draws = draws
        self._game: subprocess.Popen[bytes] | None = None

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self._game is None and self._draws:
            command = [sys.executable, str(WINDOW), "96", "64", *map(str, RED)]
            self._game = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        if self._game is not None:
            self._game.communicate()


class DepthEnv(GameEnv):
    metadata: dict[str, Any] = {"render_modes": ["depth_array"]}  # noqa: RUF012


def test_an_environment_that_opens_a_window_is_recorded() -> None:
    need("Xvfb")
    made: list[str | None] = []

    def make(render_mode: str | None) -> GameEnv:
        made.append(render_mode)
        return GameEnv()

    env = make_recorded(make, "game")
    assert made == ["rgb_array", None]
    assert env.render_mode == "rgb_array"
    env.reset(seed=1)
    wait_until(lambda: is_red(env.render()))
    env.close()


def test_an_environment_that_draws_nothing_is_refused_and_leaves_no_screen() -> None:
    need("Xvfb")
    with pytest.raises(
        UsageError, match=r"game cannot render RGB frames: its render modes are none, and it has opened no window"
    ):
        make_recorded(lambda _: GameEnv(draws=False), "game")
    assert headless._process_screen == []
    assert "DISPLAY" not in os.environ


@pytest.mark.parametrize(
    ("env", "choice", "error", "message"),
    [
        (DepthEnv, "xvfb", UsageError, "A depth map is not a video of the game"),
        (GameEnv, "none", UsageError, "its render modes are none, and display is none"),
        (GameEnv, "egl", UsageError, "its render modes are none, and display is egl"),
        (GameEnv, "auto", MissingExtra, "Xvfb, on which its window would be recorded, is not installed"),
    ],
)
def test_what_cannot_be_recorded_is_named(
    env: type[GameEnv], choice: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.experiments.evaluation.screen_video.find_xvfb", lambda: None)
    screen_choice.configure(choice)
    with pytest.raises(error, match=message):
        make_recorded(lambda _: env(), "game")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (np.zeros((4, 4), np.float32), "not an RGB image: one number per pixel is a depth map"),
        (np.zeros((4, 4, 1), np.uint8), "not an RGB image: one number per pixel is a depth map"),
        (np.zeros((4, 4, 3), np.float32), "not an RGB image"),
    ],
)
def test_depth_is_never_a_video(frame: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_rgb(frame, "game")
