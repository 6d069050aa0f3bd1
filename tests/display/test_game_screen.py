"""Screens of games: which one a game gets, pictures of it, and the OpenGL that its player finds."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from ludus.config.schema import AlgorithmConfig
from ludus.display import game_screen, headless, private_screen, x11
from ludus.display.game_screen import GameScreen, describe_player, player_problem
from ludus.display.opengl_probe import OpenGL
from ludus.display.private_screen import PrivateScreen
from ludus.display.screen_grab import ScreenGrab
from ludus.errors import ConfigError, MissingExtra, UsageError, WorkerFailed
from ludus.process import procfs, screen_choice
from tests.tools import need
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="X servers of Linux")

NOWHERE = {"DISPLAY": ":4321", "WAYLAND_DISPLAY": "wayland-77", "PATH": os.environ.get("PATH", "")}
OLD_OPENGL = {"MESA_GL_VERSION_OVERRIDE": "2.1"}
_WINDOW = Path(__file__).with_name("window.py")


@contextlib.contextmanager
def window(environment: Mapping[str, str], *arguments: int) -> Iterator[None]:
    command = [sys.executable, str(_WINDOW), *map(str, arguments)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as game:
        assert game.stdout is not None
        assert any(line == "drawn\n" for line in game.stdout)
        yield
        game.communicate()


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("LUDUS_SCREEN", raising=False)
    yield
    screen_choice.configure("auto")


# -- the choice ---------------------------------------------------------------------------------------------------------------


def test_the_config_has_the_choices_of_a_process() -> None:
    assert get_args(AlgorithmConfig.model_fields["display"].annotation) == screen_choice.CHOICES


def test_the_variable_overrides_the_config() -> None:
    screen_choice.configure("egl")
    assert screen_choice.screen_choice({}) == "egl"
    assert screen_choice.screen_choice({"LUDUS_SCREEN": "none"}) == "none"
    with pytest.raises(ConfigError, match=r"config\.display='window' is not valid.*auto, xvfb, egl, none"):
        screen_choice.configure("window")
    assert screen_choice.screen_choice({}) == "egl"


@pytest.mark.parametrize("choice", ["none", "egl"])
def test_without_a_screen_a_game_gets_no_display(choice: str) -> None:
    with GameScreen(choice=choice, environ=NOWHERE) as screen:
        environment = screen.environment({**NOWHERE, "XAUTHORITY": "/x"})
        with pytest.raises(UsageError, match="no private screen"):
            screen.frame()
    assert not environment.keys() & {"DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY"}
    assert (environment.get("EGL_PLATFORM") == "surfaceless") == (choice == "egl")
    with pytest.raises(ConfigError, match=f"display is {choice}, and a game is recorded"):
        GameScreen(choice=choice, environ=NOWHERE, recorded=True)


def test_a_game_with_a_window_cannot_use_egl() -> None:
    with pytest.raises(ConfigError, match="display is egl, and a game with graphics opens a window"):
        GameScreen(choice="egl", environ=NOWHERE, window=True)
    with GameScreen(choice="none", environ=NOWHERE, window=True) as screen:
        assert screen.check_opengl("Server.x86_64") is None


def test_a_game_uses_the_display_that_answers_unless_it_is_recorded() -> None:
    need("Xvfb")
    with PrivateScreen() as desktop:
        with GameScreen(window=True, environ=desktop.variables()) as screen:
            assert screen.private is None
            assert screen.environment(desktop.variables()) == desktop.variables()
            with pytest.raises(UsageError, match="other screens are not recorded"):
                screen.frame()
        with GameScreen(recorded=True, environ=desktop.variables()) as screen:
            assert screen.environment(desktop.variables())["DISPLAY"] != desktop.display


def test_a_display_that_leads_nowhere_is_replaced() -> None:
    need("Xvfb")
    with GameScreen(environ=NOWHERE) as screen:
        environment = screen.environment(NOWHERE)
        assert environment["DISPLAY"] != ":4321"
        assert "WAYLAND_DISPLAY" not in environment
        assert x11.connection_error(environment) == ""


def test_a_missing_xvfb_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_screen, "find_xvfb", lambda: None)
    with pytest.raises(MissingExtra, match="apt-get install xvfb"):
        GameScreen(choice="xvfb")
    with GameScreen(environ=NOWHERE) as screen:  # a server build needs no screen
        assert not screen.is_there


# -- pictures -----------------------------------------------------------------------------------------------------------------


def test_the_pictures_are_those_of_the_window() -> None:
    need("Xvfb")
    with GameScreen(recorded=True, environ=NOWHERE) as screen, window(screen.environment(os.environ), 321, 123, 200, 30, 10):
        frame = screen.frame()
        wait_until(lambda: (screen.frame()[60, 60] == (200, 30, 10)).all(), what="the window is painted")
        frame = screen.frame()
    assert frame.shape == (123, 321, 3)
    assert frame.dtype == np.uint8
    white = (frame == 255).all(axis=2)
    assert white[:20, :10].all()
    assert white.sum() == 200
    assert (frame[~white] == (200, 30, 10)).all()


def test_events_that_every_client_gets_do_not_disturb_the_pictures() -> None:
    need("Xvfb")
    with GameScreen(recorded=True, environ=NOWHERE) as screen, window(screen.environment(os.environ), 64, 48, 200, 30, 10):
        first = screen.frame()
        connection, _ = x11.open_connection(screen.environment(os.environ))
        with connection:  # ChangeKeyboardMapping of one key, and GetInputFocus, whose reply shows that it has been processed
            connection.sendall(struct.pack("<BBHBBxxI", 100, 1, 3, 38, 1, 0x61) + struct.pack("<BBH", 43, 0, 1))
            assert x11.receive(connection, 64)
        assert screen.frame().shape == first.shape


@pytest.mark.parametrize("depth", ["16", "8"])
def test_a_screen_without_a_byte_per_colour_is_refused(depth: str) -> None:
    need("Xvfb")
    with PrivateScreen(f"64x48x{depth}") as private, ScreenGrab(private) as grab, pytest.raises(UsageError, match="not RGB"):
        grab.frame()


def test_a_screen_on_which_nothing_is_drawn_has_no_picture() -> None:
    need("Xvfb")
    with (
        PrivateScreen() as private,
        ScreenGrab(private, window_s=0.2) as grab,
        pytest.raises(UsageError, match="no window opened"),
    ):
        grab.frame()


def test_a_screen_that_ends_in_between_is_named() -> None:
    need("Xvfb")
    with GameScreen(choice="xvfb") as screen:
        assert screen.private is not None
        socket = x11.socket_path(int(screen.private.display[1:]))
        first = private_screen.file_id(socket)
        with window(screen.environment(os.environ), 64, 48, 1, 2, 3):
            assert screen.frame().shape == (48, 64, 3)
            assert screen.problem() == ""
            os.kill(_server(screen.private), signal.SIGKILL)
            wait_until(screen.problem)
            for _ in range(2):
                with pytest.raises(WorkerFailed, match=rf"The private X server {screen.private.display} has ended"):
                    screen.frame()
    assert private_screen.file_id(socket) != first, "another X server may have taken the number"


def test_the_screen_of_a_process_is_replaced_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    need("Xvfb")
    monkeypatch.setattr(headless, "_process_screen", [])
    for name in ("DISPLAY", "XAUTHORITY"):
        monkeypatch.setenv(name, "")
    first = headless.keep_screen()
    assert headless.keep_screen() is first
    os.kill(_server(first), signal.SIGKILL)
    wait_until(first.problem)
    second = headless.keep_screen()
    assert second is not first
    assert x11.connection_error(os.environ) == ""
    headless.end_screen()


def test_twenty_screens_start_at_once_and_leave_nothing() -> None:
    need("Xvfb")
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(20) as pool:
            screens = [stack.enter_context(each) for each in pool.map(lambda _: PrivateScreen("64x48x24"), range(20))]
        assert len({screen.display for screen in screens}) == 20
        assert [screen.problem() for screen in screens] == [""] * 20
        with ThreadPoolExecutor(20) as pool:
            list(pool.map(lambda screen: screen.close(), screens))
    for screen in screens:
        assert not Path(f"/tmp/.X{screen.display[1:]}-lock").exists()
        assert not screen.authority.parent.exists()


def _server(private: PrivateScreen) -> int:
    return next(iter(procfs.list_descendants(private._command.guard.pid)))


# -- OpenGL -------------------------------------------------------------------------------------------------------------------


def test_a_player_finds_a_core_profile_on_a_private_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    need("Xvfb")
    monkeypatch.setattr(game_screen, "_probed", {})
    with GameScreen(choice="xvfb", window=True) as screen:
        found = screen.check_opengl("Game.x86_64")
        assert screen.check_opengl("Game.x86_64") is found
    assert found is not None
    assert found.number >= (3, 3)
    assert "llvmpipe" in describe_player(found)


def test_a_player_is_not_started_where_opengl_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    need("Xvfb")
    monkeypatch.setattr(game_screen, "_probed", {})
    monkeypatch.setenv("MESA_GL_VERSION_OVERRIDE", "2.1")
    with GameScreen(choice="xvfb", window=True) as screen, pytest.raises(ConfigError) as raised:
        screen.check_opengl("Game.x86_64")
    assert "Game.x86_64 cannot draw on this machine: it has OpenGL 2.1" in raised.value.message
    assert "core profile of 3.2" in raised.value.message
    assert "no_graphics: true" in raised.value.hint
    with GameScreen(environ=NOWHERE, window=True) as screen:  # it may be a build that never draws
        found = screen.check_opengl("Game.x86_64")
    assert found is not None
    assert found.number == (2, 1)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (OpenGL("glx", "3.0 Mesa", "Intel", core="4.5 (Core Profile) Mesa"), ""),
        (OpenGL("glx", "3.1 Mesa", "Intel"), "OpenGL 3.1 Mesa (Intel)"),
        (OpenGL("glx", "1.4 (2.1 Mesa 10.5.4)", "indirect"), "OpenGL 1.4"),
        (OpenGL("glx", missing=True), "libGL is not installed"),
        (OpenGL("glx", why="the X server has no GLX"), "the X server has no GLX"),
    ],
)
def test_the_version_that_counts_is_that_of_the_core_profile(found: OpenGL, problem: str) -> None:
    said = player_problem(found)
    assert problem in said
    assert bool(said) == bool(problem)
