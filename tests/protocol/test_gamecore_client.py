"""GamecoreClient: requests, replies and errors."""

from __future__ import annotations

import contextlib
import http.client
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ludus
from ludus.errors import DeadlineMissed, Refused, Unreachable, UsageError, WorkerFailed
from ludus.game import GamecoreClient
from ludus.gamecore.server.http.app import RunningServer, running
from ludus.gamecore.server.settings import Settings
from ludus.protocol.gamecore_client import ADDRESS_VARIABLE, TOKEN_VARIABLE, Camp, GameState
from tests.process.toy_game import HEROES, LINEUP, save
from tests.protocol.old_server import OldServer, old_server


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalogue with one scriptable game."""
    return save(tmp_path_factory.mktemp("gamecore"))


@pytest.fixture(scope="module")
def server(games: Path) -> Iterator[RunningServer]:
    with running(Settings(port=0, games=games, state_dir=games.parent / "state")) as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[GamecoreClient]:
    with GamecoreClient(f"{server.host}:{server.port}") as made:
        yield made


@pytest.fixture
def old() -> Iterator[OldServer]:
    with old_server() as started:
        yield started


# -- a game, from its start to its end -------------------------------------------------------------------------------------


def test_a_game_gets_its_config_and_its_result_is_returned(server: RunningServer) -> None:
    with GamecoreClient(server.url, gamecore_req_timeout=1500, max_frame_num=900) as client:
        actors: list[Camp] = [{"address": "10.0.0.5:8000", "token": "s3cret"}, ("10.0.0.6", 8001)]
        started = client.start_game("whole", actors, LINEUP, True, "task-1", seed=5)
        assert started.runtime_id == "whole"
        ended = client.wait_game("whole", 20)
    assert (ended.state, ended.game, ended.mode, ended.exit_code) == ("finished", "toy", "3v3", 0)
    assert (ended.eval_mode, ended.task_id, ended.seed) == (True, "task-1", 5)
    assert ended.over
    assert not ended.broken
    told = ended.result["config"]
    assert told["heroes"] == HEROES
    assert [camp["url"] for camp in told["camps"]] == ["http://10.0.0.5:8000", "http://10.0.0.6:8001"]
    assert [camp["timeout_s"] for camp in told["camps"]] == [1.5, 1.5]
    assert (told["eval_mode"], told["seed"], told["max_frames"]) == (True, 5, 900)
    assert ended.result["tokens"] == ["s3cret", None]


@pytest.mark.parametrize("camps", [[[190], [141]], {"heroes": [[{"hero_id": 190}], [141]]}])
def test_heroes_may_be_numbers_and_the_mode_is_counted(client: GamecoreClient, camps: Any) -> None:
    client.start_game("counted", None, camps)
    told = client.wait_game("counted", 20).result["config"]
    assert told["mode"] == "1v1"
    assert told["heroes"] == [[{"hero_id": 190}], [{"hero_id": 141}]]
    assert told["camps"] == [None, None]


def test_hero_defaults_apply_unless_overridden(server: RunningServer) -> None:
    kinds: dict[Any, dict[str, Any]] = {190: {"skill_id": 80115, "symbol": [1, 2]}, "141": {"skill_id": 80107}}
    with GamecoreClient(server.url, default_hero_config=kinds) as client:
        client.start_game("kinds", None, [[{"hero_id": 190, "skill_id": 7}], [141]])
        told = client.wait_game("kinds", 20).result["config"]
    assert told["heroes"] == [[{"hero_id": 190, "skill_id": 7, "symbol": [1, 2]}], [{"hero_id": 141, "skill_id": 80107}]]


def test_the_old_argument_order_of_task_and_eval_mode_works(client: GamecoreClient) -> None:
    client.start_game("judged-7", [None, None], LINEUP, "7", True)
    ended = client.wait_game("judged-7", 20)
    assert (ended.task_id, ended.eval_mode) == ("7", True)


def test_the_same_start_again_finds_the_game_and_another_one_is_refused(client: GamecoreClient) -> None:
    first = client.start_game("twice", None, LINEUP, options={"behave": "go on"})
    again = client.start_game("twice", None, LINEUP, options={"behave": "go on"})
    assert again.started == first.started
    with pytest.raises(Refused) as refused:
        client.start_game("twice", None, [[190], [141]], options={"behave": "go on"})
    assert (refused.value.status, refused.value.error) == (409, "conflict")
    assert client.exists("twice")
    stopped = client.stop_game("twice", grace_s=1)
    assert stopped is not None
    assert stopped.state == "stopped"
    assert not client.exists("twice")


def test_a_crash_is_raised_with_its_exit_code_and_last_lines(client: GamecoreClient) -> None:
    client.start_game("crash", None, LINEUP, options={"behave": "crash"})
    with pytest.raises(WorkerFailed) as failed:
        client.wait_game("crash", 20)
    assert "Game 'crash' has crashed" in str(failed.value)
    assert "exit code 1" in str(failed.value)
    assert "Its last lines:\n  the toy plays 3v3\n  the map is missing\n" in str(failed.value)
    assert "ludus gamecore logs crash" in failed.value.hint
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
    assert client.state("crash").state == "crashed"


def test_a_short_wait_reports_that_the_game_continues(client: GamecoreClient) -> None:
    client.start_game("long", None, LINEUP, options={"behave": "go on"})
    with pytest.raises(DeadlineMissed, match=r"Game 'long' is still (running|starting) after 0.2 s. It is still running"):
        client.wait_game("long", 0.2)
    assert client.exists("long")
    client.stop_game("long", grace_s=1)
    assert client.wait_game("long").state == "stopped", "whoever waits learns that somebody stopped it"


def test_a_game_that_hits_its_time_limit_is_reported(client: GamecoreClient) -> None:
    client.start_game("limited", None, LINEUP, options={"behave": "go on"}, timeout_s=0.3)
    with pytest.raises(WorkerFailed, match="ended at its time limit"):
        client.wait_game("limited", 20)


def test_one_client_waits_for_several_games_at_once(client: GamecoreClient) -> None:
    names = [f"many-{number}" for number in range(6)]
    for name in names:
        client.start_game(name, None, LINEUP, options={"behave": "go on"}, task_id="many")
    with ThreadPoolExecutor(len(names)) as pool:
        waits = [pool.submit(client.wait_game, name, 30) for name in names]
        for name in names:
            client.stop_game(name, grace_s=0.5)
        assert [wait.result(30).runtime_id for wait in waits] == names


def test_a_large_file_comes_whole_and_only_when_the_game_is_over(
    games: Path, server: RunningServer, client: GamecoreClient
) -> None:
    client.start_game("kept-1", camp_config={"mode": "1v1"}, options={"behave": "go on"})
    with pytest.raises(Refused, match="is still running and has no recording yet"):
        client.download("kept-1", "recording")
    client.stop_game("kept-1", grace_s=0)
    client.start_game("kept-2", camp_config={"mode": "1v1"})
    client.wait_game("kept-2", 30)
    assert client.download("kept-2", "recording") == b"none at all"
    data = np.random.default_rng(0).bytes(3_000_001)
    (game,) = [path for path in games.parent.rglob("moves.txt") if path.parent.name == "kept-2"]
    game.write_bytes(data)
    assert client.download("kept-2", "recording") == data
    game.write_bytes(b"")
    assert client.download("kept-2", "recording") == b""
    head = http.client.HTTPConnection(server.host, server.port, timeout=20)
    game.write_bytes(data)
    head.request("HEAD", "/v1/games/kept-2/recording")
    assert int(head.getresponse().headers["Content-Length"]) == len(data)
    head.close()


def test_games_are_listed_inspected_and_removed(client: GamecoreClient) -> None:
    client.start_game("listed", None, LINEUP, task_id="seven")
    client.wait_game("listed", 20)
    client.start_game("runs", None, LINEUP, options={"behave": "go on"})
    listed = {game.runtime_id: game.state for game in client.list()}
    assert listed["listed"] == "finished"
    assert [game.runtime_id for game in client.list("finished") if game.runtime_id == "runs"] == []
    assert client.logs("listed") == "the toy plays 3v3\n"
    assert client.catalogue()["games"]["toy"]["modes"] == ["1v1", "3v3"]
    assert client.health()
    client.forget("listed")
    with pytest.raises(Refused) as refused:
        client.state("listed")
    assert refused.value.status == 404
    assert not client.exists("listed")
    assert client.stop_game("listed") is None
    assert client.clear()["forgotten"] >= 0
    client.stop_game("runs", grace_s=0.5)


def test_games_of_a_task_are_found_together(client: GamecoreClient) -> None:
    client.start_game("of-a-task", None, LINEUP, task_id="cup")
    client.wait_game("of-a-task", 20)
    assert "cup" in client.task_list()
    (found,) = client.task_detail("cup")["game_states"]
    assert found["runtime_id"] == "of-a-task"
    client.task_remove("cup")
    assert "cup" not in client.task_list()
    client.task_clear()
    assert client.task_list() == []


def test_repeat_only_requires_a_saved_state(server: RunningServer) -> None:
    with GamecoreClient(server.url, simulator_type="repeat_only") as client:
        with pytest.raises(Refused) as refused:
            client.start_game("from-nothing", None, LINEUP)
        assert refused.value.error == "unknown_state"
        assert client.start_game("judged", None, LINEUP, eval_mode=True).runtime_id == "judged", "an evaluation is always new"
    with GamecoreClient(server.url, simulator_type="repeat") as client:
        client.start_game("or-anew", None, LINEUP)
        assert client.wait_game("or-anew", 20).start_from is None


def test_a_refusal_keeps_the_message_of_the_server(client: GamecoreClient) -> None:
    with pytest.raises(Refused) as refused:
        client.start_game("x", None, LINEUP, game="tyo")
    assert (refused.value.status, refused.value.error) == (404, "unknown_game")
    assert "'toy'" in refused.value.hint
    with pytest.raises(Refused, match=r"options\.behave"):
        client.start_game("x", None, LINEUP, options={"behave": "; rm -rf"})


def test_a_server_that_is_restarted_is_waited_for(games: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Settings(port=port, games=games, state_dir=games.parent / "restarted")
    with ThreadPoolExecutor(1) as pool, GamecoreClient(f"127.0.0.1:{port}") as client:
        with running(settings):
            client.start_game("survivor", None, LINEUP, options={"behave": "go on"})
        with pytest.raises(Unreachable):
            client.state("survivor")
        waiting = pool.submit(client.wait_game, "survivor", 30)
        with running(settings):
            assert waiting.result(30).state == "stopped", "it was ended with its server, and the next one knows"
        with GamecoreClient(f"127.0.0.1:{port}") as stranger, pytest.raises(Unreachable):
            stranger.wait_game("survivor")  # a server that never was there is not waited for


# -- who may ask -------------------------------------------------------------------------------------------------------------


def test_the_token_comes_from_a_file_or_a_variable(games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with running(Settings(port=0, games=games, token_file=token, state_dir=tmp_path / "state")) as server:
        with pytest.raises(Refused) as refused:
            GamecoreClient(server.url).list()
        assert refused.value.status == 401
        assert "token" in str(refused.value)
        with pytest.raises(Refused, match="token"):
            GamecoreClient(server.url, token="guess").start_game("x", None, LINEUP)
        assert GamecoreClient(server.url, token="s3cret").list() == []
        assert GamecoreClient(server.url, token_file=token).task_list() == []
        monkeypatch.setenv(TOKEN_VARIABLE, str(token))
        monkeypatch.setenv(ADDRESS_VARIABLE, f"{server.host}:{server.port}")
        assert GamecoreClient().list() == []
    with pytest.raises(UsageError, match="token file"):
        GamecoreClient(token_file=tmp_path / "none")


# -- no server, or another one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0.5, 10.0, 300.0, 1e6])
def test_a_lost_host_is_detected_during_a_long_wait(server: RunningServer, timeout_s: float) -> None:
    with GamecoreClient(f"{server.host}:{server.port}", timeout_s=timeout_s) as client:
        client.catalogue()
        (connection,) = client._http._idle
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 61_000


def test_a_refused_connection_hints_at_starting_a_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(Unreachable) as missing, GamecoreClient(f"127.0.0.1:{port}") as client:
            client.start_game("x", None, LINEUP)
    assert f"No gamecore server listens on 127.0.0.1:{port}" in missing.value.message
    assert f"ludus gamecore serve --port {port}" in missing.value.hint
    assert ADDRESS_VARIABLE in missing.value.hint


@contextlib.contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A listener that is not a gamecore server."""
    with socket.create_server(("127.0.0.1", 0)) as bound:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connected, _ = bound.accept()
                    threading.Thread(target=serve, args=(connected,), daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        yield f"127.0.0.1:{bound.getsockname()[1]}"
        bound.shutdown(socket.SHUT_RDWR)


def _drips(connected: socket.socket) -> None:
    with contextlib.suppress(OSError), connected:
        connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            connected.sendall(b" ")
            time.sleep(0.02)


def _keeps_silent(connected: socket.socket) -> None:
    with connected:
        connected.settimeout(30)
        while connected.recv(1000):
            pass


def _says(data: bytes) -> Callable[[socket.socket], None]:
    def serve(connected: socket.socket) -> None:
        with connected:
            connected.recv(65536)
            connected.sendall(data)

    return serve


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (_keeps_silent, "did not answer within 0.3 s. .*or correct the address .*GAMECORE_SERVER_ADDR"),
        (_drips, "did not answer within 0.3 s"),
        (_says(b"SSH-2.0-OpenSSH_9.2\r\n"), "broke"),
        (_says(b""), "broke"),
    ],
    ids=["silent", "drips", "another protocol", "closes"],
)
def test_a_port_without_a_gamecore_server_is_recognised(serve: Callable[[socket.socket], None], said: str) -> None:
    with listener(serve) as address, GamecoreClient(address, timeout_s=0.3) as client, pytest.raises(Unreachable, match=said):
        client.list()


def test_an_html_page_is_not_a_gamecore_server() -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>"
    with (
        listener(_says(page)) as address,
        GamecoreClient(address) as client,
        pytest.raises(Refused, match="Check that it is a game"),
    ):
        client.start_game("x", None, LINEUP)


# -- servers of the older kind ---------------------------------------------------------------------------------------------------


def test_an_older_server_gets_v2_requests(old: OldServer) -> None:
    with GamecoreClient(old.address, gamecore_req_timeout=2000, max_frame_num=20000) as client:
        info = {"who": "me"}
        client.start_game("old-1", [None, ("10.0.0.5", 35401)], LINEUP, task_id="7", extra_abs_key_info=info)
        actor = {"ip": "10.0.0.5", "port": 35401, "timeout": 2000}
        conf = [
            *({"hero_id": hero, "request_info": {}} for hero in (190, 173, 117)),
            {"hero_id": 141, "request_info": actor},
            *({"hero_id": hero, "request_info": {"request_id": 3}} for hero in (111, 107)),
        ]
        assert old.asked == [
            (
                "newGame",
                {
                    "simulator_type": "remote",
                    "runtime_id": "old-1",
                    "simulator_config": {
                        "game_mode": "3v3",
                        "hero_conf": conf,
                        "max_frame_num": 20000,
                        "task_id": "7",
                        "extra_abs_key_info": info,
                    },
                },
            )
        ]
        assert client.exists("old-1")
        assert client.wait_game("old-1", 20).state == "over"
        client.stop_game("old-1")
        assert old.asked[-1] == ("stopGame", {"runtime_id": "old-1"})
        assert client.task_list() == ["7", "8"]
        assert client.task_detail("7") == {"game_states": [{"task": "7"}]}
        client.task_remove("7")
        client.task_clear()
        assert [verb for verb, _ in old.asked[-2:]] == ["taskRemove", "taskClear"]


def test_a_wait_at_an_older_server_has_an_end_too(old: OldServer) -> None:
    old.looks["forever"] = 1_000_000
    with GamecoreClient(old.address) as client, pytest.raises(DeadlineMissed, match="still running"):
        client.wait_game("forever", 0.2)


def test_evaluations_start_new_matches_and_saved_states_use_the_old_names(old: OldServer) -> None:
    with GamecoreClient(old.address, simulator_type="remote_repeat") as client:
        client.start_game("a", None, LINEUP)
        assert old.last["simulator_type"] == "remote_repeat"
        client.start_game("a", None, LINEUP, eval_mode=True)
        assert old.last["simulator_type"] == "remote"
    with GamecoreClient(old.address) as client:
        client.start_game("a", None, LINEUP, start_from="any")
        assert old.last["simulator_type"] == "repeat"


@pytest.mark.parametrize(
    "more",
    [
        {"game": "arena"},
        {"seed": 3},
        {"options": {"speed": 1}},
        {"timeout_s": 3.0},
        {"start_from": "state-1"},
        {"server_config": [None, "https://actors.example:443"]},
        {"server_config": [None, {"address": "10.0.0.5:8000", "token": "s3cret"}]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_options_that_v2_does_not_support_are_an_error(old: OldServer, more: dict[str, Any]) -> None:
    with GamecoreClient(old.address) as client, pytest.raises(UsageError, match="supports only /v2") as wrong:
        client.start_game("x", **{"camp_config": LINEUP} | more)
    assert old.asked == []
    assert "s3cret" not in str(wrong.value)


def test_methods_that_v2_does_not_support_are_an_error(old: OldServer) -> None:
    with GamecoreClient(old.address) as client:
        for ask in (client.list, client.catalogue, client.clear, lambda: client.state("x"), lambda: client.logs("x")):
            with pytest.raises(Refused, match="supports only /v2"):
                ask()


def test_connections_are_kept_and_one_that_was_closed_meanwhile_is_replaced(old: OldServer) -> None:
    with GamecoreClient(old.address) as client:
        for _ in range(5):
            client.exists("x")
        assert old.connections == 1
        client.task_clear()  # after which this server hangs up
        assert client.task_list() == ["7", "8"]
        assert old.connections == 2


# -- what makes no sense -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("camps", "heroes", "said"),
    [
        ([None], LINEUP, "1 entries, but camp_config has 2 camps"),
        ("10.0.0.5:8000", LINEUP, "server_config is '10.0.0.5:8000'"),
        ([None, ("10.0.0.5", 0)], LINEUP, r"server_config\[1\] is"),
        ([None, ("10.0.0.5", 70000)], LINEUP, r"server_config\[1\] is"),
        ([None, "ftp://10.0.0.5:80"], LINEUP, r"server_config\[1\] is"),
        ([None, "10.0.0.5"], LINEUP, r"server_config\[1\] is"),
        ([None, "http://user:word@10.0.0.5:80"], LINEUP, r"server_config\[1\] is"),
        ([None, {"address": "a:1", "tokn": "s3cret"}], LINEUP, "has 'tokn'"),
        ([None, {"address": "a:1", "token": "two\nlines"}], LINEUP, "token of"),
        ([None, {"address": "a:1", "timeout_s": 0}], LINEUP, "timeout_s of"),
        (None, {"mode": "3v3", "heros": HEROES}, "has 'heros'"),
        (None, {"mode": 3, "heroes": HEROES}, "mode of camp_config is 3"),
        (None, {"mode": "3v3", "heroes": "190"}, "heroes of camp_config are '190'"),
        (None, [["Ahri"], [141]], "hero of camp_config is 'Ahri'"),
    ],
)
def test_an_invalid_request_is_refused_before_it_is_sent(camps: Any, heroes: Any, said: str) -> None:
    with GamecoreClient("127.0.0.1:1") as client, pytest.raises(UsageError, match=said) as wrong:
        client.start_game("x", camps, heroes)
    assert "s3cret" not in str(wrong.value)


@pytest.mark.parametrize("runtime_id", ["", ".", "../x", "a/b", "a b", "-x", "é", "a\n", "x" * 129])
def test_an_id_cannot_be_a_path_or_an_option(runtime_id: str) -> None:
    with GamecoreClient("127.0.0.1:1") as client:
        for ask in (client.start_game, client.wait_game, client.stop_game, client.state, client.exists, client.logs):
            with pytest.raises(UsageError, match="The runtime_id is"):
                ask(runtime_id)


@pytest.mark.parametrize(
    "address", ["", "http://", "ftp://node1", "node1:port", "a b:1", "node1:0", "http://me@node1:1", "node1/x"]
)
def test_an_address_that_names_no_server_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, address or "/")
    with pytest.raises(UsageError, match="does not name a server"):
        GamecoreClient(address or None)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("node1", "http://node1:23432"),
        ("node1:8000", "http://node1:8000"),
        ("http://node1:8000/games/", "http://node1:8000/games"),
        ("https://node1", "https://node1"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_read_as_people_write_them(given: str, url: str) -> None:
    assert GamecoreClient(given).server == url


def test_settings_that_make_no_sense_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [
        {"timeout_s": 0},
        {"gamecore_req_timeout": 0},
        {"simulator_type": "remoet"},
        {"token": "a\nb"},
    ]
    for wrong in wrongs:
        with pytest.raises(UsageError):
            GamecoreClient("node1", **wrong)
    with pytest.raises(UsageError, match="Did you mean 'remote'"):
        GamecoreClient("node1", simulator_type="remoet")


def test_the_state_of_a_newer_server_is_understood() -> None:
    said = {"runtime_id": "a", "state": "running", "colour": "green", "last_lines": ["x"], "result": None}
    assert GameState.from_json(said) == GameState("a", "running", last_lines=("x",))
    assert GameState.from_json(GameState("a", "lost", exit_code=-9).to_json()) == GameState("a", "lost", exit_code=-9)
    odd = said | {"seconds": "long", "last_lines": 3, "pid": [], "reason": {}}
    assert GameState.from_json(odd) == GameState("a", "running")
    nonsensical: list[Any] = [None, [], {}, {"runtime_id": 3, "state": "running"}]
    for nonsense in nonsensical:
        with pytest.raises(Refused):
            GameState.from_json(nonsense)


def test_the_client_is_exported_by_the_package() -> None:
    assert ludus.GamecoreClient is GamecoreClient
