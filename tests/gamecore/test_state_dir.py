"""The state directory: records, leftovers of a killed server, saved states, task results."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import Refused, UsageError
from ludus.gamecore.server.catalogue import StatePolicy
from ludus.gamecore.server.game_status import GameStatus
from ludus.gamecore.server.request import GameRequest
from ludus.gamecore.server.state_dir import StateDir, default_directory, last_lines, read_result
from ludus.gamecore.server.task_results import TaskResults
from ludus.process import identity


def test_the_state_directory_is_locked_by_one_server(tmp_path: Path) -> None:
    with StateDir(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        StateDir(tmp_path)
    with StateDir(tmp_path):
        pass


def test_an_unusable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot use"):
        StateDir(tmp_path / "file" / "x")


def test_the_default_directory_depends_on_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_STATE_DIR", "/s")
    assert default_directory(23432) == Path("/s/gamecore/23432")
    monkeypatch.delenv("LUDUS_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_directory(1) == Path("/x/ludus/gamecore/1")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert default_directory(1) == Path("/h/.local/state/ludus/gamecore/1")


def test_the_game_config_is_private(tmp_path: Path) -> None:
    with StateDir(tmp_path / "s") as state_dir:
        game_dir = state_dir.game_dir("a")
        state_dir.create(game_dir, {"seed": 1})
        (game_dir.path / "old").write_text("")
        state_dir.create(game_dir, {"seed": 2})
        assert [path.name for path in game_dir.path.iterdir()] == ["config.json"]
        assert json.loads(game_dir.config.read_text()) == {"seed": 2}
        assert game_dir.config.stat().st_mode & 0o777 == 0o600
        assert game_dir.path.stat().st_mode & 0o777 == 0o700
        state_dir.empty_trash()
        assert list((tmp_path / "s" / "trash").iterdir()) == []


def test_a_complete_wine_prefix_is_kept_for_the_next_game(tmp_path: Path) -> None:
    def left_behind(*names: str) -> None:
        game_dir.prefix.mkdir(exist_ok=True)
        for name in names:
            (game_dir.prefix / name).write_text("")

    with StateDir(tmp_path) as state_dir:
        game_dir = state_dir.game_dir("a")
        state_dir.create(game_dir, {}, with_prefix=True)
        left_behind("drive_c", "system.reg")
        state_dir.create(game_dir, {}, with_prefix=True)
        assert sorted(path.name for path in game_dir.prefix.iterdir()) == ["drive_c", "system.reg"]
        state_dir.create(game_dir, {})  # a game that does not need it
        assert not game_dir.prefix.exists()
        left_behind("drive_c")  # Wine was killed before it wrote its registry
        state_dir.create(game_dir, {}, with_prefix=True)
        assert not game_dir.prefix.exists()
    (tmp_path / "kept" / "a").mkdir()  # by a server that was killed meanwhile
    with StateDir(tmp_path) as state_dir:
        state_dir.create(state_dir.game_dir("a"), {}, with_prefix=True)
        assert not state_dir.game_dir("a").prefix.exists()


def test_games_of_a_killed_server_are_lost_and_killed(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state_dir:
        for name, state in (("ended", "finished"), ("ran", "running"), ("began", "starting")):
            state_dir.create(state_dir.game_dir(name), {})
            state_dir.save(GameStatus(name, "g", state=state, finished=1.0 if state == "finished" else None))  # type: ignore[arg-type]
        state_dir.game_dir("ran").log.write_text("last words\n")
        by_record = subprocess.Popen(["sleep", "1000"])
        marked = {"LUDUS_GAME_CONFIG": str(state_dir.game_dir("began").config)}
        by_mark = subprocess.Popen(["sleep", "1000"], env={**os.environ, **marked})
        other = subprocess.Popen(["sleep", "1000"], env={**os.environ, "LUDUS_GAME_CONFIG": "/elsewhere/games/began/config.json"})
        since = identity.start_time(by_record.pid)
        assert since is not None
        state_dir.save(
            GameStatus("ran", "g", state="running"), {by_record.pid: since, other.pid: "another process had this number"}
        )
        try:
            found = {status.runtime_id: status for status, _ in state_dir.load()}
            assert {name: status.state for name, status in found.items()} == {"ended": "finished", "ran": "lost", "began": "lost"}
            assert found["ran"].last_lines == ["last words"]
            assert (by_record.wait(5), by_mark.wait(5)) == (-9, -9)
            assert other.poll() is None
        finally:
            for process in (by_record, by_mark, other):
                process.kill()
                process.wait()
        assert {status.runtime_id: (status.state, size > 0) for status, size in state_dir.load()} == {
            "ended": ("finished", False),
            "ran": ("lost", True),
            "began": ("lost", True),
        }


def test_invalid_records_are_removed(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state_dir:
        for name, text in (
            ("half", '{"status": {'),
            ("empty", ""),
            ("other", json.dumps({"status": GameStatus("x", "g").to_json(), "processes": {}, "bytes": 0})),
        ):
            state_dir.create(state_dir.game_dir(name), {})
            state_dir.game_dir(name).record.write_text(text)
        state_dir.create(state_dir.game_dir("none"), {})
        assert state_dir.load() == []
        assert list(state_dir.games.iterdir()) == []


def test_saved_states_are_bounded_by_number_and_size(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state_dir:
        directory = state_dir.states_dir("g", "1v1")
        for age, name in enumerate(("e", "d", "c", "b", "a")):  # a is the oldest
            (directory / name).write_bytes(b"x" * 1000)
            os.utime(directory / name, (1000 - age, 1000 - age))
        (directory / ".unfinished").write_text("")
        (directory / "link").symlink_to("/etc/hostname")
        assert [path.name for path in state_dir.list_states("g")] == ["a", "b", "c", "d", "e"]
        state_dir.prune_states("g", StatePolicy(keep=4))
        assert [path.name for path in state_dir.list_states("g")] == ["b", "c", "d", "e"]
        state_dir.prune_states("g", StatePolicy(keep_mb=0.0025))
        assert [path.name for path in state_dir.list_states("g")] == ["d", "e"]
        assert (directory / ".unfinished").exists()
        assert state_dir.choose_state(asked("g", "d")) == directory / "d"
        assert state_dir.choose_state(asked("g", "any")) in (directory / "d", directory / "e")
        for name in ("a", "link", ".unfinished"):
            with pytest.raises(Refused):
                state_dir.choose_state(asked("g", name))
        assert state_dir.choose_state(asked("other", "any")) is None
        with pytest.raises(Refused, match=r"no saved state of other \(1v1\)"):
            state_dir.choose_state(asked("other", "any", must_resume=True))


def test_a_match_starts_only_from_a_state_of_its_kind(tmp_path: Path) -> None:
    heroes: list[list[dict[str, Any]]] = [[{"hero_id": 1}] * 3] * 2
    with StateDir(tmp_path) as state_dir:
        (state_dir.states_dir("g", "1v1") / "small").write_text("")
        assert state_dir.choose_state(asked("g", "any", "3v3")) is None
        assert state_dir.choose_state(asked("g", "any", None, heroes=heroes)) is None
        with pytest.raises(Refused, match=r"g \(3v3\) has no saved state 'small'"):
            state_dir.choose_state(asked("g", "small", "3v3"))
        (state_dir.states_dir("g", "3v3") / "large").write_text("")
        for mode in ("3v3", None):
            assert state_dir.choose_state(asked("g", "any", mode, heroes=heroes)) == tmp_path / "states" / "g" / "3v3" / "large"
        assert state_dir.choose_state(asked("g", "any", None)) is None
        assert [path.name for path in state_dir.list_states("g")] == ["small", "large"]
        state_dir.prune_states("g", StatePolicy(keep=1))  # of all kinds together
        assert [path.name for path in state_dir.list_states("g")] == ["large"]


def asked(game: str, start_from: str, mode: str | None = "1v1", **more: Any) -> GameRequest:
    return GameRequest("r", game, mode, more.pop("heroes", []), (None, None), {}, start_from=start_from, **more)


def test_a_result_is_a_small_json_object_in_a_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert read_result(path) == (None, "")
    for text, said in (
        ("{", "Cannot read"),
        ("[]", "not a JSON object"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "1e999"),
        ("[" * 9000, "Cannot read"),
        (" " * 17_000, "larger than"),
    ):
        path.write_text(text)
        result, wrong = read_result(path)
        assert result is None
        assert said in wrong
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in read_result(path)[1]
    path.unlink()
    path.write_bytes(b'{"winner": 0}')
    assert read_result(path) == ({"winner": 0}, "")


def test_the_last_lines_include_the_rotated_log(tmp_path: Path) -> None:
    path = tmp_path / "game.log"
    assert last_lines(path, 5) == []
    (tmp_path / "game.log.1").write_text("1\n2\n3\n")
    path.write_text("4\n5\n")
    assert last_lines(path, 4) == ["2", "3", "4", "5"]
    assert last_lines(path, 0) == []
    path.write_bytes(b"x" * 3_000_000)
    assert len(last_lines(path, 10)[0]) == 1_000_000


def test_results_of_tasks_outlive_the_server_and_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    tasks = TaskResults(path, keep=4)
    for number in range(10):
        result = {"winner": 0, "lost": {"1": "gone"}, "long": "x" * 5000}
        tasks.add(GameStatus(f"r{number}", "g", state="finished", task_id=f"t{number % 2}", result=result))
        tasks.write()
    assert len(path.read_text().splitlines()) <= 8
    with path.open("a") as file:
        file.write('{"half')
    again = TaskResults(path, keep=4)
    again.load()
    assert [game["runtime_id"] for game in again.games_of("t1")] == ["r7", "r9"]
    assert again.games_of("t1")[0]["result"] == {"winner": 0, "lost": {"1": "gone"}}
    assert again.ids() == ["t0", "t1"]
    again.add(GameStatus("r10", "g", state="finished", task_id="t0"))
    again.write()
    assert all(json.loads(line) for line in path.read_text().splitlines())
    again.remove("t1")
    again.write()
    last = TaskResults(path, keep=4)
    last.load()
    assert last.ids() == ["t0"]
