"""The server with real games: start, list, wait, stop, restart, limits, records."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ludus.gamecore.server.http.app import Settings, running
from ludus.process import identity, procfs
from tests.gamecore.callers import Caller, catalogue_file
from tests.waiting import wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gamecore")


@pytest.fixture(scope="module")
def call(state_dir: Path) -> Iterator[Caller]:
    os.environ["LUDUS_TEST_SHARED"] = "shared"
    os.environ["LUDUS_TEST_SECRET"] = "secret"
    settings = Settings(port=0, games=catalogue_file(state_dir), state_dir=state_dir / "state", max_games=30)
    with running(settings) as server:
        yield Caller(server.host, server.port)
    for name in ("LUDUS_TEST_SHARED", "LUDUS_TEST_SECRET"):
        del os.environ[name]


def state(call: Caller, runtime_id: str) -> dict[str, Any]:
    found: dict[str, Any] = call("GET", f"/v1/games/{runtime_id}").json
    return found


def test_a_game_is_started_and_shown_and_stopped(call: Caller) -> None:
    started = call.start("one", "sleep", mode="1v1", task_id="t", eval_mode=True, seed=5)
    assert started.status == 201
    assert started.json["state"] == "running"
    assert {key: started.json[key] for key in ("runtime_id", "game", "mode", "seed", "eval_mode", "task_id", "restarts")} == {
        "runtime_id": "one", "game": "sleep", "mode": "1v1", "seed": 5, "eval_mode": True, "task_id": "t", "restarts": 0,
    }  # fmt: skip
    pid = started.json["pid"]
    assert identity.start_time(pid) is not None
    seen = wait_until(
        lambda: (now := state(call, "one"))["threads"] and now["last_lines"] and now, what="a count of threads and a line"
    )
    assert seen["last_lines"] == ["hello"]
    assert seen["memory_mb"] > 0
    assert seen["threads"] == 1
    assert "one" in [game["runtime_id"] for game in call("GET", "/v1/games?state=running").json["games"]]
    assert call("GET", "/v1/games?state=running&task_id=other").json["games"] == []
    stopped = call("DELETE", "/v1/games/one")
    assert stopped.status == 200
    assert stopped.json["state"] == "stopped"
    assert stopped.json["exit_code"] == -15
    assert stopped.json["last_lines"] == ["hello"]
    assert stopped.json["pid"] is None
    assert identity.start_time(pid) is None
    again = call("DELETE", "/v1/games/one")
    assert (again.status, again.json["state"]) == (200, "stopped")


def test_a_finished_game_shows_its_result_and_config(call: Caller) -> None:
    heroes = [[{"hero_id": 190}], [{"hero_id": 141, "symbol": [1, 2]}]]
    camps = [{"address": "10.0.0.5:8000", "timeout_s": 3, "token": "hush-hush"}, None]
    ended = call.play("two", "quick", heroes=heroes, camps=camps, max_frames=100, seed=9)
    assert ended["state"] == "finished"
    assert ended["exit_code"] == 0
    assert ended["result"] == {"winner": 1, "ticks": 7}
    config = call.log("two")
    assert '"seed": 9' in config
    assert '"url": "http://10.0.0.5:8000", "timeout_s": 3.0' in config
    assert '"hero_id": 141, "symbol": [1, 2]' in config
    assert "hush-hush" not in config


def test_the_first_game_with_the_mode_is_chosen(call: Caller) -> None:
    answer = call("POST", "/v1/games", {"runtime_id": "by-mode", "mode": "3v3"})
    assert (answer.status, answer.json["game"]) == (201, "quick")
    call.wait("by-mode")


def test_a_repeated_request_finds_the_same_game_and_a_different_one_is_refused(call: Caller) -> None:
    first = call.start("same", "sleep")
    assert first.status == 201
    second = call.start("same", "sleep")
    assert (second.status, second.json["pid"], second.json["seed"]) == (200, first.json["pid"], first.json["seed"])
    other = call.start("same", "sleep", seed=1)
    assert (other.status, other.json["error"]) == (409, "conflict")
    assert call("POST", "/v1/games/same/forget").status == 409
    call("DELETE", "/v1/games/same?grace_s=0")
    third = call.start("same", "sleep", seed=1)
    assert third.status == 201
    assert third.json["pid"] != first.json["pid"]
    call("DELETE", "/v1/games/same?grace_s=0")


def test_many_callers_at_once_start_one_game(call: Caller) -> None:
    answers: list[tuple[int, int]] = []

    def start() -> None:
        answer = call.start("race", "sleep")
        answers.append((answer.status, answer.json["pid"]))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(status for status, _ in answers) == [200] * 7 + [201]
    assert len({pid for _, pid in answers}) == 1
    call("DELETE", "/v1/games/race?grace_s=0")


def test_a_wait_ends_with_the_game_or_the_time_out(call: Caller) -> None:
    call.start("waited", "sleep")
    assert call("GET", "/v1/games/waited/wait?timeout_s=0.05").json["state"] == "running"
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(call.wait("waited")["state"]))
    waiting.start()
    call("DELETE", "/v1/games/waited")
    waiting.join(20)
    assert found == ["stopped"]


def test_a_crash_is_reported_with_exit_code_and_last_lines(call: Caller) -> None:
    ended = call.play("crashes", "crash")
    assert (ended["state"], ended["exit_code"], ended["last_lines"]) == ("crashed", 3, ["oh no"])
    assert ended["reason"] == "It ended with code 3."
    killed = call.play("faults", "segfault")
    assert (killed["state"], killed["exit_code"]) == ("crashed", -11)
    assert "SIGSEGV" in killed["reason"]


def test_a_crashed_game_is_restarted_according_to_its_entry(call: Caller) -> None:
    ended = call.play("flaky", "flaky")
    assert (ended["state"], ended["restarts"]) == ("finished", 1)
    assert call.log("flaky").split() == ["life", "life"]
    ended = call.play("hopeless", "hopeless")
    assert (ended["state"], ended["restarts"], ended["exit_code"]) == ("crashed", 2, 5)


def test_a_game_can_be_stopped_while_it_waits_for_its_restart(call: Caller) -> None:
    call.start("pausing", "slow-again")
    seen = wait_until(lambda: (now := state(call, "pausing"))["restarts"] and now, what="a restart")
    assert seen["state"] == "starting"
    assert "Restarting in 100 s." in seen["reason"]
    assert call("DELETE", "/v1/games/pausing").json["state"] == "stopped"


def test_a_game_that_takes_too_long_is_ended(call: Caller) -> None:
    assert call.play("short", "short")["state"] == "timed-out"
    ended = call.play("shorter", "sleep", timeout_s=0.1)
    assert (ended["state"], ended["reason"]) == ("timed-out", "It ran for longer than 0.1 s.")
    refused = call.start("longer", "short", timeout_s=5)
    assert (refused.status, refused.json["error"]) == (400, "bad_request")


def test_a_game_without_output_is_ended_at_its_start_limit(call: Caller) -> None:
    ended = call.play("mute", "mute")
    assert (ended["state"], ended["reason"]) == ("crashed", "It printed nothing within 0.2 s of its start.")
    call.start("speaks", "speaks")
    wait_until(lambda: state(call, "speaks")["state"] == "running", what="the first line")
    call("DELETE", "/v1/games/speaks?grace_s=0")


def test_a_game_that_ignores_sigterm_is_killed_with_all_that_it_started(call: Caller) -> None:
    call.start("stubborn", "stubborn")
    wait_until(lambda: "ready" in call.log("stubborn"), what="its trap")
    stopped = call("DELETE", "/v1/games/stubborn").json
    assert (stopped["state"], stopped["exit_code"]) == ("stopped", -9)


def test_nothing_of_a_game_that_forks_is_left(call: Caller) -> None:
    pid = call.start("forks", "forks").json["pid"]
    wait_until(lambda: state(call, "forks")["threads"] == 3, what="its children")
    guard = parent(pid)
    below = procfs.list_descendants(guard)
    call("DELETE", "/v1/games/forks?grace_s=0")
    assert [one for one in below if identity.start_time(one) is not None] == []
    assert call.play("leaves", "leaves")["state"] == "finished"


def test_a_flood_of_lines_leaves_a_small_log(call: Caller, state_dir: Path) -> None:
    call.start("flood", "flood")
    log = state_dir / "state" / "games" / "flood" / "game.log"
    wait_until(lambda: log.exists() and log.stat().st_size, what="a log")
    call("DELETE", "/v1/games/flood?grace_s=0")
    assert sum(path.stat().st_size for path in log.parent.glob("game.log*")) < 100_000
    assert "repeated" in call.log("flood")


def test_a_missing_program_is_reported_without_its_command(call: Caller) -> None:
    answer = call.start("missing", "missing")
    assert (answer.status, answer.json["error"]) == (500, "cannot_start")
    assert "no-such-program" in answer.json["message"]
    assert state(call, "missing")["state"] == "crashed"


def test_an_entry_bounds_its_games(call: Caller) -> None:
    for name in ("two-1", "two-2"):
        assert call.start(name, "two").status == 201
    refused = call.start("two-3", "two")
    assert (refused.status, refused.json["error"], refused.headers["retry-after"]) == (503, "full", "1")
    for name in ("two-1", "two-2"):
        call("DELETE", f"/v1/games/{name}?grace_s=0")


def test_a_game_that_takes_too_much_memory_is_ended(call: Caller) -> None:
    call.start("hungry", "hungry")
    ended = wait_until(lambda: (now := state(call, "hungry"))["state"] == "crashed" and now, what="its end")
    assert "the limit is 60" in ended["reason"]


def test_metrics_cover_every_game(call: Caller) -> None:
    call.start("threads", "threads")
    wait_until(lambda: state(call, "threads")["threads"] == 5, what="its threads")
    families = {family.name: family for family in text_string_to_metric_families(call("GET", "/metrics").body.decode())}
    labels = {"runtime_id": "threads", "game": "threads"}
    for name, least in (("game_threads", 5), ("game_memory_bytes", 1_000_000), ("game_cpu_seconds", 0)):
        values = [sample.value for sample in families[f"ludus_gamecore_{name}"].samples if sample.labels == labels]
        assert len(values) == 1, name
        assert values[0] >= least
    counted = {sample.labels["status"]: sample.value for sample in families["ludus_gamecore_requests"].samples}
    assert counted["201"] >= 1
    call("DELETE", "/v1/games/threads?grace_s=0")
    assert 'runtime_id="threads"' not in call("GET", "/metrics").body.decode()


def test_an_invalid_result_is_reported(call: Caller) -> None:
    ended = call.play("bad-result", "bad-result")
    assert (ended["state"], ended["result"]) == ("finished", None)
    assert "NaN" in ended["reason"]
    assert call.play("link-result", "link-result")["result"] is None


def test_a_game_gets_the_environment_of_its_entry_and_little_else(call: Caller) -> None:
    camps = [{"url": "http://h:1", "token": "tok0"}, {"url": "http://h:1", "token": "tok1"}]
    call.play("environment", "environment", options={"hue": "light"}, camps=camps)
    found = dict(line.split("=", 1) for line in call.log("environment").splitlines())
    assert found["COLOUR"] == "blue light"
    assert 0 < int(found["PORT"]) < 65536
    assert found["LUDUS_TEST_SHARED"] == "shared"
    assert "LUDUS_TEST_SECRET" not in found
    assert (found["LUDUS_GAME_TOKEN_0"], found["LUDUS_GAME_TOKEN_1"]) == ("tok0", "tok1")
    assert Path(found["LUDUS_GAME_CONFIG"]).parent == Path(found["LUDUS_GAME_RESULT"]).parent
    assert "LUDUS_GAME_STATES" not in found


def test_a_value_stays_inside_its_word(call: Caller) -> None:
    evil = "$(touch /tmp/x); 'a' \"b\" {python} -rf"
    call.play("words", "words", options={"hue": evil})
    assert call.log("words").splitlines() == ["<words>", f"<{evil}>", "<{}>"]


def test_saved_states_are_kept_chosen_and_bounded(call: Caller) -> None:
    assert call.start("fresh", "saver", start_from="nobody.state").json["error"] == "unknown_state"
    assert call.play("s1", "saver", start_from="any")["start_from"] is None
    for name in ("s2", "s3"):
        call.play(name, "saver")
    wait_until(lambda: call("GET", "/v1/catalogue").json["games"]["saver"]["states"] == 2, what="the oldest to be removed")
    assert call.start("old", "saver", start_from="s1.state").status == 404
    resumed = call.play("resumed", "saver", start_from="s3.state", eval_mode=True)
    assert (resumed["state"], resumed["start_from"]) == ("finished", "s3.state")
    assert call.play("anyone", "saver", start_from="any", eval_mode=True)["start_from"] in ("s2.state", "s3.state")
    assert call("GET", "/v1/catalogue").json["games"]["saver"]["states"] == 2  # evaluations save none


def test_the_catalogue_shows_games_and_options_but_no_commands(call: Caller) -> None:
    answer = call("GET", "/v1/catalogue")
    assert answer.json["games"]["sleep"]["modes"] == ["1v1"]
    assert answer.json["games"]["environment"]["options"]["speed"]["maximum"] == 10
    assert b"sleep 1000" not in answer.body


def test_finished_games_can_be_removed(call: Caller, state_dir: Path) -> None:
    call.play("gone", "quick")
    assert (state_dir / "state" / "games" / "gone").is_dir()
    assert call("POST", "/v1/games/gone/forget").json == {"forgotten": "gone"}
    assert call("GET", "/v1/games/gone").status == 404
    assert not (state_dir / "state" / "games" / "gone").exists()
    call.start("stays", "sleep")
    call.play("gone", "quick")
    assert call("POST", "/v1/clear").json["forgotten"] >= 1
    assert [game["runtime_id"] for game in call("GET", "/v1/games").json["games"]] == ["stays"]
    call("DELETE", "/v1/games/stays?grace_s=0")


def test_prefork_games_are_forked_and_others_start_as_commands(tmp_path: Path) -> None:
    (tmp_path / "warmed.py").write_text(
        "import json, os\nloaded = os.getpid()\n"
        "def main(argv):\n"
        "    print('forked from', loaded, os.environ['COLOUR'], flush=True)\n"
        "    open(os.environ['LUDUS_GAME_RESULT'], 'w').write(json.dumps(dict(loaded=loaded, own=os.getpid(), argv=argv)))\n"
        "    return 0 if json.load(open(os.environ['LUDUS_GAME_CONFIG']))['seed'] else 6\n"
    )
    (tmp_path / "games.yaml").write_text(
        f"games: {{warm: {{command: [echo, plain], warm: warmed, environment: {{PYTHONPATH: {tmp_path}, COLOUR: '{{runtime_id}}'}}}},\n"
        f"cold: {{command: [echo, plain], warm: no_such_module}}, wrapped: {{command: [echo, plain], warm: warmed, wrapper: nice}}}}"
    )
    with running(Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")) as server:
        call = Caller(server.host, server.port)
        first, second = (call.play(name, "warm", seed=1) for name in ("one", "two"))
        assert first["result"]["loaded"] == second["result"]["loaded"]
        assert first["result"]["own"] != second["result"]["own"]
        assert "forked from" in call.log("two")
        assert "two" in call.log("two")
        failed = call.play("three", "warm", seed=0)
        assert (failed["state"], failed["exit_code"]) == ("crashed", 6)
        for name in ("cold", "wrapped"):
            assert call.play(name, name)["state"] == "finished"
            assert call.log(name) == "plain\n"
    assert "cold: prefork failed" in (tmp_path / "state" / "gamecore-server.log").read_text()


def test_a_game_can_be_stopped_during_the_prefork_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    (tmp_path / "games.yaml").write_text(
        f"games: {{slow: {{command: [echo], warm: slow, environment: {{PYTHONPATH: {tmp_path}}}}}}}"
    )
    with running(Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")) as server:
        call = Caller(server.host, server.port)
        answers: list[Any] = []
        starting = [
            threading.Thread(target=lambda name=name: answers.append(call.start(name, "slow").json["state"]))
            for name in ("a", "b")
        ]
        for thread in starting:
            thread.start()
        wait_until(lambda: len(call("GET", "/v1/games?state=starting").json["games"]) == 2, what="both to be known")
        wait_until(lambda: "Waiting for the import" in state(call, "a")["reason"], what="a reason")
        assert call("DELETE", "/v1/games/a").json["state"] == "stopped"
        starting[0].join(20)
        server.close()  # the other one waits still
        starting[1].join(20)
        assert sorted(answers) == ["stopped", "stopped"]


def test_a_windows_game_runs_under_wine_with_a_prefix_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "bin" / "wine"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "wine in $WINEPREFIX"\nexec "$@"\n')
    stand_in.chmod(0o755)
    (tmp_path / "games.yaml").write_text(
        f"games: {{win: {{command: [echo, the game], windows: true, wrapper: nice, environment: {{PATH: '{stand_in.parent}:/usr/bin:/bin'}}}}}}"
    )
    monkeypatch.setenv("SIMULATOR_USE_WINE", "1")
    with running(Settings(port=0, games=tmp_path / "games.yaml", state_dir=tmp_path / "state")) as server:
        call = Caller(server.host, server.port)
        for name in ("a", "b"):
            call.play(name, "win")
            assert call.log(name).splitlines() == [f"wine in {tmp_path}/state/games/{name}/wine", "the game"]


def test_the_number_of_kept_games_is_bounded(tmp_path: Path) -> None:
    settings = Settings(port=0, games=catalogue_file(tmp_path), state_dir=tmp_path / "state", keep=2)
    with running(settings) as server:
        call = Caller(server.host, server.port)
        for number in range(4):
            call.play(f"r{number}", "quick")
        assert [game["runtime_id"] for game in call("GET", "/v1/games").json["games"]] == ["r2", "r3"]
        assert sorted(path.name for path in (tmp_path / "state" / "games").iterdir()) == ["r2", "r3"]
    with running(settings) as server:
        found = Caller(server.host, server.port)("GET", "/v1/games").json["games"]
        assert [(game["runtime_id"], game["state"], game["result"]["winner"]) for game in found] == [
            ("r2", "finished", 1),
            ("r3", "finished", 1),
        ]


def test_the_server_logs_its_actions(call: Caller, state_dir: Path) -> None:
    call.play("logged", "crash")
    text = (state_dir / "state" / "gamecore-server.log").read_text()
    assert "logged: started crash" in text
    assert "logged: crashed: It ended with code 3." in text
    call("GET", "/no%0aline")
    assert "refused: 404 for GET '/no\\nline' from 127.0.0.1" in (state_dir / "state" / "gamecore-server.log").read_text()


def parent(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text[text.rindex(")") + 2 :].split()[1])
