"""`ludus gamecore`: options, output and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.gamecore.server.http.app import RunningServer, running
from ludus.gamecore.server.settings import Settings
from ludus.protocol.gamecore_client import ADDRESS_VARIABLE, GamecoreClient
from tests.cli.calling import Call, lines, one_line
from tests.process.toy_game import CATALOGUE, LINEUP, save
from tests.test_command_lines import typed

REPOSITORY = Path(__file__).parents[2]
GO_ON = ("-o", "behave=go on")


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gamecore"))


@pytest.fixture(scope="module")
def server(games: Path) -> Iterator[RunningServer]:
    with running(Settings(port=0, games=games, state_dir=games.parent / "state")) as started:
        yield started


@pytest.fixture(autouse=True)
def _address(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, f"{server.host}:{server.port}")


def test_a_complete_match_shows_that_the_server_works(call: Call, server: RunningServer) -> None:
    output = call("gamecore", "test", "--server", server.url)
    assert output.code == 0, output.err
    assert "has finished" in output.out
    assert "winner 1" in output.out
    assert "190,173,117 against 141,111,107" in output.err
    assert "the server works" in output.err
    result = call("gamecore", "test", "--json", "--heroes", "190/141", "--seed", "3").json
    assert (result["state"], result["mode"], result["eval_mode"], result["seed"]) == ("finished", "1v1", True, 3)


def test_a_test_that_takes_too_long_leaves_no_game_behind(call: Call, tmp_path: Path) -> None:
    slow = save(tmp_path, CATALOGUE.replace("default: end", "default: go on"))
    with running(Settings(port=0, games=slow, state_dir=tmp_path / "state")) as other:
        result = call("gamecore", "test", "--server", other.url, "--timeout", "0.2")
        assert result.code == 124
        assert "was not over after 0.2 s" in result.err
        assert [game.state for game in GamecoreClient(other.url).list()] == ["stopped"]


def test_a_game_is_started_listed_inspected_and_stopped(call: Call) -> None:
    started = call("gamecore", "start", "cli-1", "--mode", "3v3", "--seed", "9", "--task", "cup", *GO_ON, "--json")
    assert started.code == 0, started.err
    assert started.json["runtime_id"] == "cli-1"
    assert call("gamecore", "start", "cli-1", "--mode", "3v3", "--seed", "9", "--task", "cup", *GO_ON).code == 0
    other = call("gamecore", "start", "cli-1", "--mode", "1v1", *GO_ON)
    assert other.code == 1
    assert "cli-1" in one_line(other)
    table = call("gamecore", "list").out
    assert "cli-1" in table
    assert "toy" in table
    states = {game["runtime_id"]: game["state"] for game in call("gamecore", "list", "--json").json}
    assert states["cli-1"] in ("starting", "running")
    assert call("gamecore", "list", "--json", "--state", "crashed").json == []
    page = call("gamecore", "status", "cli-1").out
    assert "cli-1 (toy, 3v3)" in page
    assert "cup" in page
    assert call("gamecore", "status", "cli-1", "--json").json["seed"] == 9
    late = call("gamecore", "wait", "cli-1", "--timeout", "0")
    assert late.code == 124
    assert "is still" in one_line(late)
    stopped = call("gamecore", "stop", "cli-1", "--grace", "1")
    assert (stopped.code, "was stopped" in stopped.out) == (0, True)
    assert call("gamecore", "wait", "cli-1").code == 1, "it did not come to its end"


def test_a_wait_ends_with_the_result_or_with_why_there_is_none(call: Call) -> None:
    ended = call(
        "gamecore", "start", "cli-2", "--heroes", "190/141", "--camp", "10.0.0.5:8000", "--camp", "rule", "--wait", "--json"
    )
    assert ended.code == 0, ended.err
    assert ended.json["result"]["config"]["camps"] == [{"url": "http://10.0.0.5:8000", "timeout_s": 30.0}, None]
    crashed = call("gamecore", "start", "cli-3", "--mode", "1v1", "-o", "behave=crash", "--wait")
    assert crashed.code == 1
    assert "has crashed" in lines(crashed)[0]
    assert "exit code 1" in lines(crashed)[0]
    assert "  the map is missing" in crashed.err
    again = call("gamecore", "wait", "cli-3", "--json")
    assert (again.code, again.json["state"]) == (1, "crashed")
    assert call("gamecore", "logs", "cli-3").out == "the toy plays 1v1\nthe map is missing\n"
    assert call("gamecore", "logs", "cli-3", "-n", "1").out == "the map is missing\n"


def test_a_match_with_an_unreachable_actor_fails(call: Call) -> None:
    words = ("gamecore", "start", "cli-8", "--mode", "1v1", "--camp", "127.0.0.1:9", "-o", "behave=lose camp", "--wait")
    lost = call(*words)
    assert lost.code == 1
    assert lost.out.startswith(
        "Lost camp 0: Nothing listens on 127.0.0.1:9. The game's own AI played instead. Game 'cli-8' has finished"
    )
    assert "--allow-stand-in" in one_line(lost)
    assert call(*words, "--allow-stand-in").code == 0
    assert call("gamecore", "wait", "cli-8").code == 1
    as_json = call("gamecore", "wait", "cli-8", "--json")
    assert (as_json.code, as_json.json["result"]["lost"]) == (1, {"0": "Nothing listens on 127.0.0.1:9."})
    assert call("gamecore", "wait", "cli-8", "--allow-stand-in").code == 0
    assert "lost camp 0; winner 1" in call("gamecore", "list").out
    assert "lost camp 0" in call("gamecore", "status", "cli-8").out


@pytest.mark.system
def test_the_example_of_the_guide_works_as_printed(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    printed = [
        words for words in typed(REPOSITORY / "docs" / "guides" / "game_programmer.md") if words[:2] == ["gamecore", "start"]
    ]
    assert printed
    with running(Settings(port=0, state_dir=tmp_path / "state")) as arena:
        for words in printed:
            played = call(*words, "--server", arena.url)
            assert played.code == 0, played.err
            assert played.out.startswith(f"Game '{words[2]}' has finished")


def test_the_recording_of_a_game_is_downloaded(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call("gamecore", "start", "cli-7", "--mode", "1v1", "--wait")
    brought = call("gamecore", "fetch", "cli-7")
    assert (brought.code, brought.out) == (0, "cli-7-moves.txt\n")
    assert (tmp_path / "cli-7-moves.txt").read_text() == "none at all"
    assert call("gamecore", "fetch", "cli-7", "--out", tmp_path / "x").out.strip() == str(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "none at all"
    none = call("gamecore", "fetch", "cli-7", "--video")
    assert none.code == 2
    assert "names no video in its result" in one_line(none)
    assert "cannot be written" in one_line(call("gamecore", "fetch", "cli-7", "--out", tmp_path / "no" / "x"))


def test_actors_get_their_token_from_a_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    words = ("--mode", "1v1", "--wait", "--json", "--actor-token-file", tmp_path / "token")
    ended = call("gamecore", "start", "cli-4", "--camp", "rule", "--camp", "http://10.0.0.5:8000", *words)
    assert ended.json["result"]["tokens"] == [None, "s3cret"]
    wrong = call("gamecore", "start", "cli-5", *words)
    assert (wrong.code, "--actor-token-file" in one_line(wrong)) == (2, True)


def test_the_server_and_its_catalogue_are_shown_and_finished_games_are_cleared(call: Call) -> None:
    call("gamecore", "start", "cli-6", "--mode", "1v1", "--wait")
    health = call("gamecore", "status")
    assert (health.code, "is up; games: " in health.out) == (0, True)
    assert call("gamecore", "status", "--json").json["games"]["finished"] >= 1
    assert "behave" in call("gamecore", "catalogue").out
    assert call("gamecore", "catalogue", "--json").json["games"]["toy"]["modes"] == ["1v1", "3v3"]
    cleared = call("gamecore", "clear", "--tasks")
    assert "games and all tasks" in one_line(cleared)
    assert "no games" in one_line(call("gamecore", "list"))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("start", "../x", "--mode", "1v1"), 2, "runtime_id is '../x'"),
        (("start", "x", "--heroes", "a/b"), 2, "--heroes 'a/b' is not valid"),
        (("start", "x", "--mode", "1v1", "-o", "speed"), 2, "--option 'speed' is not valid"),
        (("start", "x", "--mode", "1v1", "--camp", "rule", "--camp", "nowhere"), 2, "server_config[1]"),
        (("start", "x", "--mode", "1v1", "--game", "tyo"), 2, "'toy'"),
        (("start", "x", "--mode", "1v1", "-o", "behave=$(id)"), 2, "options.behave"),
        (("status", "nobody"), 2, "nobody"),
        (("logs", "nobody"), 2, "nobody"),
        (("wait", "nobody"), 2, "nobody"),
        (("stop", "nobody"), 2, "There is no game 'nobody'"),
        (("list", "--state", "runing"), 2, "Did you mean 'running'?"),
        (("list", "--server", "a b"), 2, "does not name a server"),
        (("list", "--token-file", "none"), 2, "token file none"),
    ],
)
def test_invalid_commands_are_reported_in_one_line(call: Call, words: tuple[str, ...], code: int, message: str) -> None:
    wrong = call("gamecore", *words)
    assert wrong.code == code, wrong.err
    assert message in one_line(wrong)


def test_without_a_server_every_command_explains_how_to_start_one(call: Call) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
        for words in (["test"], ["list"], ["stop", "x"]):
            missing = call("gamecore", *words, "--server", where)
            assert missing.code == 1
            assert f"No gamecore server listens on {where}. Start one there: `ludus gamecore serve" in one_line(missing)


def test_the_command_serves_until_it_is_terminated(games: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ludus.cli.main", "gamecore", "serve", "--port", "0", "--json"]
    command += ["--games", str(games), "--state-dir", str(tmp_path / "state"), "--max-games", "1"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as serving:
        try:
            assert serving.stdout is not None
            where = json.loads(serving.stdout.readline())
            with GamecoreClient(f"{where['host']}:{where['port']}") as client:
                state = client.start_game("served", None, LINEUP, options={"behave": "go on"})
                assert state.pid is not None
                serving.send_signal(signal.SIGTERM)
                assert serving.wait(30) == 0, serving.stderr and serving.stderr.read()
            assert not Path(f"/proc/{state.pid}").exists(), "its games end with it"
        finally:
            serving.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "token"),
        (["--games", "none.yaml"], "none.yaml"),
        (["--token-file", "none"], "none"),
    ],
)
def test_an_insecure_server_is_refused_before_it_listens(call: Call, tmp_path: Path, words: list[str], message: str) -> None:
    refused = call("gamecore", "serve", "--port", "0", "--state-dir", tmp_path / "state", *words)
    assert refused.code == 2, refused.err
    assert message in one_line(refused)


def test_help_brings_nothing_heavy() -> None:
    program = """
import sys
from ludus.cli.main import main

for words in (["gamecore", "--help"], ["gamecore", "serve", "--help"], ["games", "--help"]):
    sys.argv = ["ludus", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
print()
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "numba", "starlette", "uvicorn", "yaml", "gymnasium"}
