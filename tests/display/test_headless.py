"""Screens: whether one answers, a private one where none does, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.display import headless, opengl_probe, private_screen, x11
from ludus.display.opengl_probe import OpenGL
from ludus.display.private_screen import PrivateScreen
from ludus.errors import ConfigError, MissingExtra
from ludus.process import temp_dirs
from tests.tools import need
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="X servers of Linux")

NOWHERE = {"DISPLAY": ":4321", "PATH": os.environ.get("PATH", "")}
_GONE_S = 10.0


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, str]]:
    """The environment of a process with a private screen."""
    need("Xvfb")
    with headless.screen("xvfb") as variables:
        yield {**os.environ, **variables}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (":0", x11.DisplayAddress("", 0)),
        (":10.1", x11.DisplayAddress("", 10)),
        ("unix:3", x11.DisplayAddress("", 3)),
        ("localhost:10.0", x11.DisplayAddress("localhost", 10)),
        ("[::1]:2", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_the_name_of_a_display_is_taken_apart(text: str, place: x11.DisplayAddress | None) -> None:
    assert x11.parse_display(text) == place


def test_an_authority_file_is_read_as_it_was_written_and_up_to_where_it_is_whole() -> None:
    entries = [
        x11.AuthorityEntry(256, b"host", b"0", x11.COOKIE, b"secret"),
        x11.AuthorityEntry(65535, b"", b"", x11.COOKIE, b"other"),
    ]
    data = b"".join(map(x11.encode_entry, entries))
    assert list(x11.entries(data)) == entries
    assert list(x11.entries(data[:-1])) == entries[:1]
    assert list(x11.entries(b"\xff" * 7)) == []


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "DISPLAY is not set"),
        ({"DISPLAY": "nonsense"}, "is not a display name"),
        (NOWHERE, "no X server answers at DISPLAY=:4321: No such file"),
        ({"DISPLAY": "127.0.0.1:4321"}, "no X server answers at DISPLAY=127.0.0.1:4321: Connection refused"),
    ],
)
def test_a_display_that_leads_nowhere_is_no_screen(environ: dict[str, str], why: str) -> None:
    assert why in x11.connection_error(environ)
    assert headless.is_headless(environ)


def test_a_private_screen_accepts_only_clients_with_its_cookie(shown: dict[str, str]) -> None:
    assert x11.connection_error(shown) == ""
    assert not headless.is_headless(shown)
    assert "refuses the connection" in x11.connection_error({**shown, "XAUTHORITY": "/nowhere"})
    authority = Path(shown["XAUTHORITY"])
    assert authority.stat().st_mode & 0o777 == 0o600
    assert authority.parent.stat().st_mode & 0o777 == 0o700


def test_a_private_screen_has_an_opengl_of_today(shown: dict[str, str]) -> None:
    found = opengl_probe.probe_backend("glx", shown)
    assert found.works, found.why
    assert found.number >= (3, 2)
    said = subprocess.run([need("glxinfo"), "-B"], env=shown, capture_output=True, text=True, timeout=30)
    assert f"OpenGL version string: {found.version}" in said.stdout


def test_pygame_opens_a_window_on_a_private_screen_where_display_led_nowhere() -> None:
    need("Xvfb")
    script = "import pygame; pygame.display.init(); pygame.display.set_mode((64, 48)); print(pygame.display.get_driver())"
    broken = {name: value for name, value in os.environ.items() if name != "SDL_VIDEODRIVER"} | {
        "DISPLAY": ":4321",
        "SDL_VIDEODRIVER": "x11",
    }
    with headless.screen(environ=broken) as variables:
        assert variables["DISPLAY"] != ":4321"
        done = subprocess.run(
            [sys.executable, "-c", script], env={**broken, **variables}, capture_output=True, text=True, timeout=60
        )
    assert done.stdout.split()[-1] == "x11", done.stderr


def test_where_a_screen_answers_no_other_is_made(shown: dict[str, str]) -> None:
    with headless.screen(environ=shown) as variables:
        assert variables == {}
    with headless.screen("none", environ=NOWHERE) as variables:
        assert variables == {}


def test_two_screens_at_once_are_two() -> None:
    need("Xvfb")
    with headless.screen("xvfb") as one, headless.screen("xvfb") as other:
        assert one["DISPLAY"] != other["DISPLAY"]
        assert x11.connection_error({**os.environ, **one}) == x11.connection_error({**os.environ, **other}) == ""
        assert "refuses the connection" in x11.connection_error({**one, "XAUTHORITY": other["XAUTHORITY"]})
    assert x11.connection_error(one)
    assert x11.connection_error(other)


_OWNER = """
import os, sys, time
from ludus.display import private_screen
screen = private_screen.PrivateScreen()
print(screen.display, screen.authority, screen._command.guard.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_no_screen_outlives_its_owner(number: signal.Signals | None) -> None:
    """Neither its processes nor its files, also when the owner is killed, or just ends without a word."""
    need("Xvfb")
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        where, authority, keeper = owner.stdout.readline().split()
        server = int(_children(int(keeper))[0])
        assert x11.connection_error({"DISPLAY": where, "XAUTHORITY": authority}) == ""
        socket = x11.socket_path(int(where[1:]))
        first = private_screen.file_id(socket)
        if number is not None:
            owner.send_signal(number)
        owner.communicate(timeout=30)
    _until_gone(int(keeper), server)
    assert not Path(authority).parent.exists()
    assert private_screen.file_id(socket) != first, "another X server may have taken the number"
    assert not Path(f"/tmp/.X{where[1:]}-lock").exists()


def test_a_screen_whose_keeper_is_killed_ends_too() -> None:
    need("Xvfb")
    with PrivateScreen() as screen:
        server = int(_children(screen._command.guard.pid)[0])
        os.kill(screen._command.guard.pid, signal.SIGKILL)
        screen._command.guard.wait(_GONE_S)
        _until_gone(server)
    assert x11.connection_error(screen.variables())
    assert not screen.authority.parent.exists()


def test_what_a_killed_keeper_and_a_killed_owner_leave_is_swept_by_the_next_run(tmp_path: Path) -> None:
    need("Xvfb")
    words, environ = [sys.executable, "-c", _OWNER], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as owner:
        assert owner.stdout is not None
        _, authority, keeper = owner.stdout.readline().split()
        server = int(_children(int(keeper))[0])
        assert temp_dirs.sweep(tmp_path) == 0, "in use"
        os.kill(int(keeper), signal.SIGKILL)
        owner.kill()
        owner.communicate(timeout=30)
    _until_gone(int(keeper), server)
    assert Path(authority).exists()
    assert temp_dirs.sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_forked_copy_of_the_owner_does_not_end_the_screen() -> None:
    need("Xvfb")
    with PrivateScreen() as screen:
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                screen.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert x11.connection_error({**os.environ, **screen.variables()}) == ""


def test_without_xvfb_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_screen, "find_xvfb", lambda: None)
    with pytest.raises(MissingExtra, match="apt-get install xvfb"), headless.screen(environ=NOWHERE):
        pass


def test_a_choice_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LUDUS_SCREEN='always'.*auto, xvfb, egl, none"), headless.screen("always"):
        pass


_KEPT = """
import os
os.environ.update(DISPLAY=":4321", LUDUS_SCREEN="{choice}", MUJOCO_GL="{gl}")
from ludus.display import headless, x11
headless.prepare_rendering("gymnasium.envs.{engine}.hopper_v5:HopperEnv")
first = os.environ["DISPLAY"]
headless.prepare_rendering("gymnasium.envs.{engine}.hopper_v5:HopperEnv")
print(first, os.environ["DISPLAY"], os.environ["MUJOCO_GL"] or "-", os.environ.get("SDL_VIDEODRIVER", "-"), repr(x11.connection_error(os.environ)))
"""


@pytest.mark.parametrize(
    ("choice", "gl", "engine", "private", "drawer", "driver"),
    [
        ("xvfb", "", "toy", True, "-", "-"),
        ("auto", "glfw", "mujoco", True, "glfw", "-"),
        ("none", "glfw", "mujoco", False, "glfw", "dummy"),
        ("auto", "", "mujoco", False, "egl", "dummy"),
    ],
)
def test_an_environment_gets_a_screen_when_it_needs_one(
    choice: str, gl: str, engine: str, private: bool, drawer: str, driver: str
) -> None:
    """DISPLAY leads nowhere in all of them. Preparing twice makes one screen, and it ends with the process."""
    need("Xvfb")
    script = _KEPT.format(choice=choice, gl=gl, engine=engine)
    environ = {name: value for name, value in os.environ.items() if name != "SDL_VIDEODRIVER"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=True)
    first, second, chosen, sdl, silence = done.stdout.strip().split(" ", 4)
    assert first == second
    assert (first != ":4321") == private == (silence == "''")
    assert (chosen, sdl) == (drawer, driver)
    if private:
        assert x11.connection_error({"DISPLAY": first, "XAUTHORITY": "/nowhere"})


@pytest.mark.parametrize("way", ["egl", "osmesa"])
def test_a_way_to_draw_without_a_screen_is_really_tried(way: str) -> None:
    need("Xvfb")  # with which the libraries come
    found = opengl_probe.probe_backend(way)
    assert found.works, found
    assert found.number >= (3, 2)
    assert found.renderer


def test_a_driver_that_hangs_crashes_or_is_not_there_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did not answer within 0.001 s" in opengl_probe.probe_backend("egl", timeout_s=0.001).why
    broken = tmp_path / "libOSMesa.so.8"
    broken.write_bytes(b"\x7fELFbroken")
    found = opengl_probe.probe_backend("osmesa", {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert not found.works
    assert not found.missing
    assert "libOSMesa.so.8" in found.why
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    assert opengl_probe.probe_backend("egl").why == "the probe ended with signal 11"


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("4.5 (Compatibility Profile) Mesa 22.3.6", (4, 5)),
        ("OpenGL ES 3.2 Mesa", (3, 2)),
        ("1.4 (2.1 Mesa)", (1, 4)),
        ("", (0, 0)),
    ],
)
def test_the_number_of_a_version_is_found(version: str, number: tuple[int, int]) -> None:
    assert OpenGL("egl", version).number == number


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _until_gone(*pids: int) -> None:
    """Nobody tells us when a process that is not our child has ended."""
    wait_until(lambda: not any(map(_runs, pids)), _GONE_S, what=lambda: f"the end of {list(filter(_runs, pids))}")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_an_environment_that_is_trained_on_gets_the_screen_that_was_asked_for() -> None:
    need("Xvfb")
    script = (
        "import os, pygame\n"
        "from ludus.envs import registry, vector_env\n"
        "import gymnasium as gym\n"
        "def windowed(config):\n"
        "    pygame.display.init(); pygame.display.set_mode((64, 64)); print(pygame.display.get_driver())\n"
        "    return gym.make('CartPole-v1')\n"
        "registry.register_env('windowed', windowed)\n"
        "vector_env.make_environments('windowed', 1).close()\n"
    )
    environ = {**os.environ, "LUDUS_SCREEN": "xvfb", "DISPLAY": ":4321"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "x11", done.stderr
