"""Games of a real server that draw: each has a private screen, which ends with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ludus.display import x11
from ludus.display.private_screen import file_id
from ludus.errors import LudusError
from ludus.gamecore.server.http.app import running
from ludus.gamecore.server.settings import Settings
from ludus.protocol.gamecore_client import GamecoreClient
from tests.tools import need
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="X servers of Linux")

CATALOGUE = r"""
games:
  window: {command: [sh, -c, 'echo "draws on <$DISPLAY> <$EGL_PLATFORM>"; exec sleep 1000'], display: auto}
  plain: {command: [sh, -c, 'echo "draws on <$DISPLAY> <$EGL_PLATFORM>"; exec sleep 1000']}
  offscreen: {command: [sh, -c, 'echo "draws on <$DISPLAY> <$EGL_PLATFORM>"; exec sleep 1000'], display: egl}
"""


def says(client: GamecoreClient, name: str, game: str) -> str:
    client.start_game(name, [None, None], [[1], [2]], game=game)
    return wait_until(lambda: next((line for line in client.logs(name).splitlines() if "draws on" in line), None), 30.0)


def test_games_have_the_screens_of_their_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("Xvfb")
    for variable in ("LUDUS_SCREEN", "EGL_PLATFORM", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DISPLAY", ":4321")  # nothing answers there
    (tmp_path / "games.yaml").write_text(CATALOGUE)
    settings = Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")
    with running(settings) as server, GamecoreClient(f"{server.host}:{server.port}") as client:
        displays = []
        for name in ("a", "b"):
            said = says(client, name, "window")
            displays.append(said.split("<")[1].split(">")[0])
        assert len({*displays, ":4321", ""}) == 4
        assert "draws on <> <>" in says(client, "c", "plain")
        assert "draws on <> <surfaceless>" in says(client, "d", "offscreen")
        sockets = [x11.socket_path(int(display[1:])) for display in displays]
        first = [file_id(socket) for socket in sockets]
        assert None not in first
        client.stop_game("a")
        wait_until(lambda: file_id(sockets[0]) != first[0])
        assert file_id(sockets[1]) == first[1], "that game still runs"
    assert file_id(sockets[1]) != first[1]


def test_a_game_without_its_screen_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.display.private_screen.find_xvfb", lambda: None)
    monkeypatch.setenv("LUDUS_SCREEN", "xvfb")
    (tmp_path / "games.yaml").write_text(CATALOGUE)
    settings = Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")
    with (
        running(settings) as server,
        GamecoreClient(f"{server.host}:{server.port}") as client,
        pytest.raises(LudusError, match=r"window gets no screen.*Xvfb is not installed"),
    ):
        client.start_game("a", [None, None], [[1], [2]], game="window")
