"""Programs that need something around them, started by a real gamecore server: real Wine on a real private screen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.gamecore.server.http.app import running
from ludus.gamecore.server.settings import Settings
from ludus.process import procfs
from ludus.protocol.gamecore_client import GamecoreClient
from tests.tools import need
from tests.waiting import wait_until

CATALOGUE = r"""
games:
  window: {command: [cmd, /c, "echo up & notepad & echo closed"], windows: true, wrapper: [xvfb-run, nice]}
  screen: {command: [sh, -c, 'echo "on $DISPLAY, as nice as $(nice)"; exec sleep 1000'], wrapper: [xvfb-run, nice]}
"""
LIMIT_S = 90.0
MADE = "created the configuration directory"

pytestmark = pytest.mark.system


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GamecoreClient]:
    need("xvfb-run")
    monkeypatch.setenv("SIMULATOR_USE_WINE", "1")
    (tmp_path / "games.yaml").write_text(CATALOGUE)
    settings = Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")
    with running(settings) as server, GamecoreClient(f"{server.host}:{server.port}") as client:
        yield client
    assert those_of(tmp_path) == []
    shutil.rmtree(tmp_path / "state")  # a prefix has hundreds of megabytes


def those_of(place: Path) -> list[int]:
    """Processes that were started as games of the server whose state is there."""
    everyone = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in everyone if any(str(place / "state") in variable for variable in procfs.read_environment(pid))]


def says(client: GamecoreClient, name: str, word: str) -> str:
    wait_until(lambda: word in client.logs(name), LIMIT_S, what=f"{word!r}")
    return client.logs(name)


def begun(client: GamecoreClient, name: str, game: str) -> None:
    client.start_game(name, [None, None], [[1], [2]], game=game)


def test_games_have_a_screen_of_their_own_which_goes_with_them(client: GamecoreClient, tmp_path: Path) -> None:
    for name in ("a", "b"):
        begun(client, name, "screen")
    said = [says(client, name, "as nice as").split(",")[0] for name in ("a", "b")]
    assert len(set(said)) == 2
    for name in ("a", "b"):
        stopped = client.stop_game(name)
        assert stopped is not None
        assert stopped.state == "stopped"
    assert f"as nice as {min(19, os.nice(0) + 10)}" in client.logs("a")
    wait_until(lambda: len(those_of(tmp_path)) <= 1, what="only the keeper to be left")


def test_a_program_for_windows_runs_in_a_prefix_that_the_next_game_of_its_id_takes_over(
    client: GamecoreClient, tmp_path: Path
) -> None:
    need("wine")
    prefix = tmp_path / "state" / "games" / "a" / "wine"
    for life in ("first", "second"):
        begun(client, "a", "window")
        said = says(client, "a", "up")
        assert (MADE in said) == (life == "first"), said
        assert len(those_of(tmp_path)) > 3, "a screen, Wine's server, the program"
        stopped = client.stop_game("a", grace_s=30)
        assert stopped is not None
        assert stopped.state == "stopped"
        wait_until(lambda: len(those_of(tmp_path)) <= 1, what="only the keeper to be left")
        assert (prefix / "system.reg").is_file()
