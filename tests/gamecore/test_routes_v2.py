"""The /v2 routes, as used by existing clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ludus.errors import Refused
from ludus.gamecore.server.http.app import Settings, running
from ludus.gamecore.server.http.routes_v2 import to_game_request
from tests.gamecore.callers import Answer, Caller, catalogue_file

REMOTE = {"ip": "127.0.0.1", "port": 35400, "timeout": 30000}


def order(runtime_id: str, infos: list[Any], kind: str = "remote", mode: str = "3v3", **more: Any) -> dict[str, Any]:
    heroes = [
        {"hero_id": 100 + index, "skill_id": None, "symbol": [1, 2], "request_info": info} for index, info in enumerate(infos)
    ]
    return {
        "simulator_type": kind,
        "runtime_id": runtime_id,
        "simulator_config": {"game_mode": mode, "hero_conf": heroes, **more},
    }


def test_a_v2_request_is_translated() -> None:
    told = to_game_request(
        order("r", [REMOTE, {"request_id": 0}, {}, {}], max_frame_num=20000, task_id="t_swap", extra_abs_key_info={"a": 1})
    )
    assert told == {
        "runtime_id": "r",
        "mode": "3v3",
        "heroes": [
            [{"hero_id": 100, "symbol": [1, 2]}, {"hero_id": 101, "symbol": [1, 2]}],
            [{"hero_id": 102, "symbol": [1, 2]}, {"hero_id": 103, "symbol": [1, 2]}],
        ],
        "camps": [{"address": "127.0.0.1:35400", "timeout_s": 30.0}, None],
        "eval_mode": False,
        "max_frames": 20000,
        "start_from": None,
        "must_resume": False,
        "task_id": "t_swap",
    }
    for kind in ("repeat", "remote_repeat", "repeat_only"):
        told = to_game_request(order("r", [{}, REMOTE], kind, max_frame_num=-1))
        assert (told["start_from"], told["must_resume"]) == ("any", kind == "repeat_only")
    assert to_game_request(order("r", [{}, REMOTE], max_frame_num=-1))["max_frames"] is None
    assert to_game_request(order("r", [{"ip": "", "port": 0}, REMOTE]))["camps"][0] is None
    assert to_game_request(order("r", [{"ip": "::1", "port": 5}, {}]))["camps"][0]["address"] == "[::1]:5"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"simulator_config": []},
        {"simulator_type": "rm -rf", "simulator_config": {}},
        order("r", []),
        order("r", [{}]),
        order("r", [{}, {}, {}]),
        order("r", ["x", {}]),
        order("r", [{"ip": "h", "port": "80"}, {}]),
        order("r", [{"ip": "h", "port": 70000}, {}]),
        order("r", [{"ip": "h", "port": 80, "timeout": -1}, {}]),
        order("r", [{"ip": "h", "port": 80, "command": "x"}, {}]),
        order("r", [{"ip": ["h"], "port": 80}, {}]),
        order("r", [REMOTE, {"request_id": 1}, {}, {}]),
        order("r", [{}, REMOTE, {}, {}]),
    ],
    ids=str,
)
def test_invalid_v2_requests_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        to_game_request(wrong)
    assert caught.value.status == 400


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    home = tmp_path_factory.mktemp("v2")
    with running(Settings(port=0, games=catalogue_file(home), state_dir=home / "state")) as server:
        yield Caller(server.host, server.port)


def said(call: Caller, verb: str, data: dict[str, Any]) -> Answer:
    answer = call("POST", f"/v2/{verb}", data)
    assert "x-request-id" in answer.headers
    return answer


@pytest.mark.system
def test_a_game_is_started_queried_and_stopped(call: Caller) -> None:
    assert said(call, "stopGame", {"runtime_id": "one"}).status == 200  # clients stop first, to be sure
    assert said(call, "exists", {"runtime_id": "one"}).json["exists"] is False
    started = said(call, "newGame", order("one", [{}, {}], mode="1v1"))
    assert (started.status, started.json["code"], started.json["data"]["state"]) == (200, 0, "running")
    assert said(call, "exists", {"runtime_id": "one"}).json["exists"] is True
    assert said(call, "stopGame", {"runtime_id": "one"}).json["data"]["state"] == "stopped"
    assert said(call, "exists", {"runtime_id": "one"}).json["exists"] is False


@pytest.mark.system
def test_results_of_a_task_are_kept_although_its_games_share_an_id(call: Caller) -> None:
    for _ in range(3):
        assert said(call, "newGame", order("arena-1", [{}, {}], task_id="cup")).status == 200
        call.wait("arena-1")
    assert said(call, "taskList", {}).json["data"]["task_ids"] == ["cup"]
    states = said(call, "taskDetail", {"task_id": "cup"}).json["data"]["game_states"]
    assert len(states) == 3
    assert sum(state["Camp"][1]["Score"] for state in states) == 3
    assert sum(state["Camp"][0]["Score"] for state in states) == 0
    assert said(call, "taskDetail", {"task_id": "none"}).json["data"]["game_states"] == []
    said(call, "taskRemove", {"task_id": "cup"})
    assert said(call, "taskList", {}).json["data"]["task_ids"] == []
    said(call, "taskClear", {})


@pytest.mark.system
def test_must_resume_is_refused_without_a_state_and_others_start_a_new_match(call: Caller) -> None:
    refused = said(call, "newGame", order("two", [{}, {}], "repeat_only"))
    assert (refused.status, refused.json["code"], refused.json["error"]) == (404, 404, "unknown_state")
    assert refused.json["msg"]
    for kind in ("repeat", "remote_repeat"):
        assert said(call, "newGame", order("three", [{}, {}], kind)).json["data"]["start_from"] is None
        call.wait("three")


@pytest.mark.system
def test_unknown_verbs_and_methods_are_refused(call: Caller) -> None:
    assert call("POST", "/v2/nothing", {}).status == 404
    assert call("GET", "/v2/exists").status == 405
    assert said(call, "taskDetail", {}).status == 400
