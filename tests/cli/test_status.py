"""`ludus status`: state of a run, and the description of its bottleneck."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import Fenced, NotFound
from ludus.experiments.control.training_display import TrainingDisplay
from ludus.experiments.runs import run_status
from ludus.experiments.runs.run_dir import Run
from ludus.experiments.runs.run_status import StatusWriter, WorkerRates, classify_run, summarize_load
from tests.cli.programs import program
from tests.experiments import small

WORKING = {
    "timesteps": 1000.0,
    "iterations": 2.0,
    "episodes": 3.0,
    "time_s": 1.0,
    "fps": 1000.0,
    "sampler/workers": 2.0,
    "sampler/nodes": 1.0,
    "sampler/env_share": 0.7,
    "sampler/policy_share": 0.22,
    "sampler/blocked_share": 0.0,
    "sampler/weights_wait_share": 0.05,
    "sampler/restarts": 1.0,
    "learner/wait_share": 0.03,
    "learner/lag_mean": 0.8,
    "learner/lag_max": 2.0,
}


# -- in words -----------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_run_are_shown_in_one_line() -> None:
    assert summarize_load(WORKING) == "sampler 92 % busy, learner waits 3 % · lag 0.8 (max 2) · 2 workers, 1 restart"
    more = WORKING | {"memory/dropped": 1.0, "learner/dropped_lag": 11.0, "sampler/nodes": 3.0, "learner/restarts": 2.0}
    assert summarize_load(more).endswith("· 12 dropped · 2 workers, 3 nodes, 1 restart, learner restarted 2×")
    assert summarize_load({"timesteps": 1.0, "learner_share": 0.5, "learner/lag_mean": 0.0}) == "", (
        "one process has no such parts"
    )


def test_the_display_shows_the_parts_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingDisplay() as display:
        display.write(WORKING)
    assert "sampler 92 % busy, learner waits 3 %" in capsys.readouterr().out
    with TrainingDisplay() as display:
        display.write({name: value for name, value in WORKING.items() if "/" not in name})
    assert "busy" not in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_bottleneck_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "200")
    with TrainingDisplay() as display:
        display.write(WORKING | {"learner/wait_share": 0.4})
    assert "sampler 92 % busy, learner waits 40 %" in screen.getvalue()
    assert "the environments: 70 % of the workers' time" in screen.getvalue()


def test_rates_of_a_worker_come_from_its_counters() -> None:
    rates = WorkerRates()
    first = {"worker": 0, "steps": 100.0, "environment_s": 1.0, "policy_s": 0.5}
    rates.add_to([first], 10.0)
    assert "fps" not in first
    second: dict[str, Any] = {"worker": 0, "steps": 300.0, "environment_s": 2.5, "policy_s": 0.75}
    rates.add_to([second], 12.0)
    assert (second["fps"], second["env_share"], second["policy_share"]) == (100.0, 0.75, 0.125)
    moved = {"worker": 0, "steps": 5.0, "environment_s": 0.1, "policy_s": 0.1}
    rates.add_to([moved], 13.0)
    assert "fps" not in moved, "it counts from 0 on another node"


# -- judging ------------------------------------------------------------------------------------------------------------

NOW = 1_000_000.0
SEEN = {"state": "running", "pid": 7, "host": "here", "since": "then", "written": NOW - 1}


@pytest.mark.parametrize(
    ("meta", "seen", "lives", "state", "message"),
    [
        ({"status": "running"}, SEEN, True, "running", "since then as process 7 on here"),
        ({"status": "running"}, SEEN, False, "dead", "process 7 on here is gone, last seen 1 s ago.*--resume"),
        ({"status": "running"}, SEEN, None, "running", "on here"),
        ({"status": "running"}, SEEN | {"written": NOW - 7200}, None, "silent", "not written for 2 hours"),
        ({"status": "running", "started": "then"}, {}, None, "unknown", "started then"),
        ({"status": "finished", "ended": "now"}, SEEN | {"state": "finished", "stopped_by": "timesteps"}, False, "finished", r"\(step limit reached\) at now"),
        ({"status": "interrupted", "ended": "now"}, {}, None, "interrupted", "at now"),
        ({"status": "failed", "ended": "now", "error": "It broke."}, SEEN, False, "failed", "at now: It broke"),
        ({"status": "failed"}, SEEN | {"state": "restarting", "why": "the learner died"}, True, "restarting", "the learner died"),
        ({"status": "running"}, SEEN | {"state": "restarting"}, False, "dead", "is gone"),
    ],
)  # fmt: skip
def test_the_state_of_a_run_follows_from_its_files_and_processes(
    meta: dict[str, Any], seen: dict[str, Any], lives: bool | None, state: str, message: str
) -> None:
    judged, sentence = classify_run(meta, seen, {}, NOW, lambda who: lives)
    assert judged == state
    assert re.search(message, sentence), sentence


@pytest.mark.parametrize(
    ("hub", "lives", "state"), [({}, None, "finished"), ({"pid": 7}, True, "running"), ({"pid": 7}, False, "dead")]
)
def test_the_state_of_a_script_trial_follows_from_its_server(hub: dict[str, Any], lives: bool | None, state: str) -> None:
    assert classify_run({"kind": "session"}, {}, hub, NOW, lambda who: lives)[0] == state


def test_a_process_is_distinguished_from_another_one_with_its_pid() -> None:
    me = run_status.identity()
    assert run_status.is_alive(me) is True
    assert run_status.is_alive(me | {"started": me["started"] + 1}) is False
    assert run_status.is_alive(me | {"host": "elsewhere"}) is None
    assert run_status.is_alive({"pid": os.getpid(), "host": platform.node()}) is True, "one that did not say when it started"


# -- the file -----------------------------------------------------------------------------------------------------------


def test_the_file_is_plain_json_and_never_half_written(tmp_path: Path) -> None:
    import numpy as np

    run_status.write(tmp_path, {"a": np.float32(0.5), "b": float("nan"), "c": (1, np.int64(2)), "d": None, "e": 1.5e9 + 0.25})
    assert json.loads((tmp_path / run_status.FILE).read_text()) == {
        "a": 0.5,
        "b": None,
        "c": [1, 2],
        "d": None,
        "e": 1.5e9 + 0.25,
    }
    assert [path.name for path in tmp_path.iterdir()] == [run_status.FILE]


def test_a_status_that_cannot_be_seen_does_not_disturb_the_run_and_the_next_one_is_written(tmp_path: Path) -> None:
    looks = [0]

    def look() -> dict[str, Any]:
        looks[0] += 1
        if looks[0] == 2:
            raise RuntimeError("dictionary changed size during iteration")
        return {"state": "running", "looks": looks[0]}

    with StatusWriter(tmp_path, look, every_s=0.005) as writer:
        end = time.monotonic() + 30
        while looks[0] < 4 and time.monotonic() < end:
            time.sleep(0.001)
        writer.final = {"state": "finished", "stopped_by": "iterations"}
    seen = json.loads((tmp_path / run_status.FILE).read_text())
    assert seen["looks"] >= 4
    assert (seen["state"], seen["stopped_by"], seen["pid"]) == ("finished", "iterations", os.getpid())


def test_a_trainer_that_lost_the_run_does_not_replace_the_status_of_the_next_owner(tmp_path: Path) -> None:
    owner = ["this trainer"]

    class Takeover:
        """A number in the status; while it is formatted, another trainer takes the run over."""

        def __float__(self) -> float:
            owner[0] = "another trainer"
            run_status.write(tmp_path, {"state": "finished"})
            return 1.0

    def guard() -> None:
        if owner[0] != "this trainer":
            raise Fenced("taken over", "")

    with StatusWriter(tmp_path, lambda: {"state": "running", "fps": Takeover()}, guard=guard):
        pass
    assert json.loads((tmp_path / run_status.FILE).read_text())["state"] == "finished"
    assert len(list(tmp_path.iterdir())) == 1


# -- the command --------------------------------------------------------------------------------------------------------


def shown(*words: str | Path) -> tuple[int, str, str]:
    with program("status", *words, listens=False) as asked:
        return asked.finish()


def test_the_end_of_a_run_is_shown_as_text_and_json(tmp_path: Path) -> None:
    small.train(tmp_path / "run", 2)
    code, out, err = shown(tmp_path / "run", "--watch")
    assert (code, err) == (0, "")
    assert "finished (iteration limit reached) at 2" in out
    assert "PPO on CartPole-v1" in out
    code, out, _ = shown(tmp_path / "run", "--json")
    data = json.loads(out)
    assert (data["state"], data["progress"]["iterations"], data["checkpoint"]) == ("finished", 2, "000002")


def test_something_that_is_not_a_run_is_an_error(tmp_path: Path) -> None:
    code, out, err = shown(tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert "not the directory of a run" in err
    assert "ludus runs list" in err
    assert err.count("\n") == 1


def test_a_run_without_a_status_file_is_shown_from_its_metrics(tmp_path: Path) -> None:
    small.train(tmp_path / "run", 2)
    (tmp_path / "run" / run_status.FILE).unlink()
    seen = run_status.read_status(tmp_path / "run")
    assert (seen.state, seen.status["progress"]["iterations"]) == ("finished", 2)
    with pytest.raises(NotFound):
        run_status.read_status(tmp_path)


def test_workers_stand_in_a_table_and_brackets_in_errors_are_no_markup(tmp_path: Path) -> None:
    from rich.console import Console

    from ludus.cli.evaluation.status import page

    Run.create(tmp_path / "run", {"name": {"env": "x"}})
    workers = [
        {"worker": 0, "node": "here", "state": "ready", "pid": 12, "fps": 1234.5, "env_share": 0.81, "restarts": 0, "error": ""},
        {"worker": 1, "node": "far", "state": "waiting", "pid": None, "restarts": 3, "error": "IndexError: [/bold] x[3]"},
        {"worker": "vm-12-9f01", "node": "vm", "state": "sampling", "pid": 8, "restarts": 0, "error": ""},  # of a fleet
    ]
    numbers = WORKING | {"memory/waiting": 4.0}
    seen = {**run_status.identity(), "state": "running", "written": time.time(), "sampling": {"workers": workers}}
    nodes = [{"name": "here", "cores": 2}, {"name": "far", "cores": 1}]
    run_status.write(tmp_path / "run", seen | run_status.status_fields(numbers, {"workers": workers, "nodes": nodes}))
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(page(run_status.read_status(tmp_path / "run")))
    text = console.export_text()
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "here", "ready", "12", "1,234", "81%", "–", "–", "–", "0"] in rows
    assert any(row[:4] == ["1", "far", "waiting", "–"] and row[-3:] == ["IndexError:", "[/bold]", "x[3]"] for row in rows)
    assert any(row[:4] == ["vm-12-9f01", "vm", "sampling", "8"] for row in rows)
    assert "sampler 92 % busy, learner waits 3 % · lag 0.8 (max 2) · 2 workers, 1 restart" in text
    assert "4 segments wait for the learner" in text
    assert "here (2 cores), far (1 core)" in text
    assert "limit" in text


def test_the_time_shares_of_a_worker_sum_to_at_most_one() -> None:
    rates = WorkerRates()

    def look(at: float, steps: float, environment_s: float, policy_s: float, blocked_s: float) -> dict[str, Any]:
        worker = {"worker": 0, "steps": steps, "environment_s": environment_s, "policy_s": policy_s, "blocked_s": blocked_s}
        rates.add_to([worker], at)
        return worker

    look(0.0, 0, 0.0, 0.0, 0.0)
    seen = look(1.0, 2000, 6.0, 3.0, 1.0)  # a segment of 10 s has just ended
    assert seen["env_share"] + seen["policy_share"] + seen["blocked_share"] == pytest.approx(1.0)
    assert (seen["env_share"], seen["fps"]) == (pytest.approx(0.6), pytest.approx(200))
    later = look(2.0, 2000, 6.0, 3.0, 1.0)  # the next one is under way
    assert (later["env_share"], later["fps"]) == (seen["env_share"], seen["fps"])
    ended = look(11.0, 4000, 12.0, 6.0, 2.0)
    assert ended["fps"] == pytest.approx(200)
