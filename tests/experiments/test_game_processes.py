"""Games that a run with `env: external` starts itself."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path

import pytest

import ludus
from ludus.display import x11
from ludus.display.private_screen import file_id
from ludus.experiments.game_processes import MAX_DELAY_S, GameProcesses, fill_command, next_delay
from tests.tools import need
from tests.waiting import wait_until

GAME = Path(__file__).parents[2] / "examples" / "cartpole_http" / "game.py"
URL = "http://127.0.0.1:8123"


def test_placeholders_are_replaced_in_every_word() -> None:
    command = ["game", "--url={url}", "{port}", "--name={number}", "--seed={seed}", "{other}"]
    assert fill_command(command, URL, 3, 7) == ["game", f"--url={URL}", "8123", "--name=3", "--seed=7", "{other}"]


def test_pauses_grow_up_to_a_limit() -> None:
    assert [next_delay(failures) for failures in range(3)] == [0.5, 1.0, 2.0]
    assert next_delay(1000) == MAX_DELAY_S


def test_a_game_that_ends_is_started_again(tmp_path: Path) -> None:
    played = tmp_path / "played"
    with GameProcesses(["/bin/sh", "-c", f"echo {{number}} >> {played}"], 2, URL, tmp_path / "logs"):
        wait_until(lambda: played.exists() and len(played.read_text().split()) >= 5)
    assert set(played.read_text().split()) == {"0", "1"}
    assert (tmp_path / "logs" / "game-1.log").exists()


def test_every_start_has_a_seed_of_its_own(tmp_path: Path) -> None:
    played = tmp_path / "played"
    with GameProcesses(["/bin/sh", "-c", f"echo {{seed}} >> {played}"], 2, URL, tmp_path / "logs"):
        wait_until(lambda: played.exists() and len(played.read_text().split()) >= 4)
    seeds = [int(seed) for seed in played.read_text().split()]
    assert len(set(seeds)) == len(seeds)
    assert {0, 1} <= set(seeds)


def test_a_game_that_fails_is_reported_with_its_last_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "ludus.experiments.game_processes"),
        GameProcesses(["/bin/sh", "-c", "echo the map is missing; exit 3"], 1, URL, tmp_path),
    ):
        wait_until(lambda: len(caplog.records) >= 2)
    assert "ended with code 3" in caplog.text
    assert "the map is missing" in caplog.text
    assert [record.args[2] for record in caplog.records[:2] if isinstance(record.args, tuple)] == [0.5, 1.0]


def test_a_program_that_does_not_exist_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with GameProcesses(["/nowhere/game"], 1, URL, tmp_path):
        wait_until(lambda: "/nowhere/game" in caplog.text)
    assert "cannot be started" in caplog.text


def test_games_end_with_the_run(tmp_path: Path) -> None:
    with GameProcesses(["/bin/sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"], 1, URL, tmp_path):
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
        process = Path("/proc") / (tmp_path / "pid").read_text().strip()
        assert process.exists()
    with contextlib.suppress(FileNotFoundError):  # a process that has ended may wait for its parent
        assert "(zombie)" in (process / "status").read_text()


def test_each_game_has_a_screen_of_its_own_if_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("Xvfb")
    monkeypatch.setenv("LUDUS_SCREEN", "xvfb")
    monkeypatch.setenv("DISPLAY", ":4321")
    found = tmp_path / "displays"
    with GameProcesses(["/bin/sh", "-c", f"echo $DISPLAY >> {found}; exec sleep 600"], 2, URL, tmp_path / "logs"):
        wait_until(lambda: found.exists() and len(found.read_text().split()) == 2)
        displays = found.read_text().split()
        sockets = [x11.socket_path(int(display[1:])) for display in displays]
        first = [file_id(socket) for socket in sockets]
        assert len({*displays, ":4321"}) == 3
        assert None not in first
    assert not {file_id(socket) for socket in sockets} & set(first)


def test_a_training_starts_its_games(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(GAME), "--port", "{port}", "--games", "4", "--seed", "{number}"]
    result = ludus.train(
        "external",
        run="PPO",
        stop={"timesteps": 1000},
        local_dir=str(tmp_path),
        train_batch_size=500,
        env_config={
            "port": 0,
            "observation_space": {"type": "Box", "shape": [4]},
            "action_space": {"type": "Discrete", "n": 2},
            "game_command": command,
            "games": 2,
        },
    )
    assert result.metrics["timesteps"] >= 1000
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["games/failed"] == 0
    assert len(list(metrics.parent.glob("logs/games/game-*.log"))) == 2
