"""docs/gamecore.md is what the server does: its game is played, its snippets are run, its catalogues are read."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.game import GamecoreClient
from ludus.gamecore.server import catalogue
from ludus.gamecore.server.http.app import RunningServer, running
from ludus.gamecore.server.settings import Settings
from ludus.remote.fake_peers import FakeActor
from tests.local_servers import gateway
from tests.process.toy_game import save

PAGE = (Path(__file__).parents[1] / "docs" / "gamecore.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(language: str, begins: str) -> str:
    (found,) = [text for word, text in BLOCKS if word == language and begins in text]
    return str(found)


NIM = block("python", '"""Nim')
SNIPPET = block("python", "GamecoreClient(server_addr")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The game of the page and its catalogue, as its reader would save them."""
    place = tmp_path_factory.mktemp("page")
    (place / "nim.py").write_text(NIM)
    (place / "games.yaml").write_text(block("yaml", "nim.py"))
    with running(Settings(port=0, games=place / "games.yaml", state_dir=place / "state")) as started:
        yield started


def test_the_game_of_the_page_is_played_by_its_rule_agent(server: RunningServer) -> None:
    with GamecoreClient(server.url) as client:
        client.start_game("match-17", camp_config={"mode": "1v1"}, options={"stones": 30})
        ended = client.wait_game("match-17", 30)
        log = client.logs("match-17")
    assert (ended.state, ended.game) == ("finished", "nim")
    assert ended.result["winner"] == 0, "30 is no multiple of 4: who begins wins"
    assert log.startswith("camp 0 takes 2, 28 are left\n")
    assert len(log.splitlines()) == ended.result["turns"]


def test_an_agent_plays_the_first_camp_and_is_asked_for_its_moves(server: RunningServer) -> None:
    with gateway(lambda: FakeActor(b'{"action": 2}')) as actor, GamecoreClient(server.url) as client:
        client.start_game("match-18", [actor.url, None], {"mode": "1v1"})
        ended = client.wait_game("match-18", 30)
        log = client.logs("match-18")
    assert ended.result["winner"] == 1, "who always takes three loses against one who can count"
    assert log.startswith("camp 0 takes 3, 18 are left\ncamp 1 takes 2, 16 are left\n")


def test_the_configuration_on_the_page_is_what_a_game_receives(server: RunningServer, tmp_path: Path) -> None:
    shown = json.loads(block("json", '"runtime_id"'))
    (tmp_path / "tell.py").write_text(
        "import json, os, pathlib\n"
        "config = json.loads(pathlib.Path(os.environ['LUDUS_GAME_CONFIG']).read_text())\n"
        "pathlib.Path(os.environ['LUDUS_GAME_RESULT']).write_text(json.dumps(config))\n"
    )
    (tmp_path / "games.yaml").write_text(block("yaml", "nim.py").replace("nim.py", "tell.py"))
    settings = Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")
    with running(settings) as telling, GamecoreClient(telling.url) as client:
        client.start_game("match-17", ["10.0.0.5:8000", None], {"mode": "1v1", "heroes": shown["heroes"]}, seed=4711)
        told = client.wait_game("match-17", 30).result
    assert told == shown


def test_every_catalogue_on_the_page_is_one() -> None:
    found = [text for word, text in BLOCKS if word == "yaml" and text.lstrip().startswith("games:")]
    assert len(found) >= 2
    for text in found:
        assert catalogue.parse(text, "the page", Path()).games


def test_every_command_on_the_page_exists() -> None:
    from typer.main import get_command

    from ludus.cli.games.gamecore import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"ludus gamecore ([a-z]+)", PAGE)) | set(re.findall(r"^\| `([a-z]+)[^|]*` \|", _shell(), re.MULTILINE))
    assert named == known


def _shell() -> str:
    return PAGE.partition("## From the shell")[2].partition("\n## ")[0]


# -- the snippet ----------------------------------------------------------------------------------------------------------------


def run_snippet(server: RunningServer) -> str:
    """The very words of the page, but for where the server is; what they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(SNIPPET.replace("node1:23432", f"{server.host}:{server.port}"), "gamecore.md", "exec"), {})
    return printed.getvalue()


def test_the_snippet_runs_as_it_stands(tmp_path: Path) -> None:
    with running(Settings(port=0, games=save(tmp_path), state_dir=tmp_path / "state")) as server:
        assert run_snippet(server).startswith("{'winner': 1, ")


def test_the_snippet_plays_the_arena(tmp_path: Path) -> None:
    """A whole match of the game that a server has without a catalogue."""
    pytest.importorskip("numba")
    with running(Settings(port=0, state_dir=tmp_path / "state")) as server:
        assert "'winner': " in run_snippet(server)
