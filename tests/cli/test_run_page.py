"""The page of `ludus runs show`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli.evaluation.run_page import RunFacts, changed_settings, collect, page_lines
from ludus.cli.main import app
from ludus.core.metrics import JsonLinesSink
from ludus.experiments.runs.checkpoint import BestRecord
from tests.experiments.test_compare import made

NOW = 1_767_225_600.0 + 7200
META = {
    "started": "2026-01-01T00:00:00+00:00",
    "host": "here",
    "tags": ["good", "first"],
    "command": ["/opt/bin/ludus", "train", "a b"],
}
ROWS = [
    {"timesteps": 100, "iterations": 1, "time_s": 1.0, "fps": 100.0, "episodes": 2, "episode_return_mean": -0.5},
    {"timesteps": 200, "iterations": 2, "time_s": 2.0, "fps": 100.0, "episodes": 4, "episode_return_mean": 0.75},
    {"timesteps": 300, "iterations": 3, "time_s": 3.0, "fps": 100.0, "episodes": 6, "episode_return_mean": 0.25},
    {"timesteps": 300, "iterations": 3, "evaluation/return_mean": 1, "evaluation/return_low": 0.5, "evaluation/return_high": 1.5},
]
CONFIG = {"name": "mine", "env": "CartPole-v1", "run": "PPO", "stop": {"timesteps": 300, "time_s": None}, "config": {"seed": 3}}


def test_a_page_shows_facts_times_returns_and_settings() -> None:
    facts = RunFacts(
        place="runs/mine/PPO_CartPole-v1_x-abcde",
        short="abcde",
        config=CONFIG,
        meta=META,
        state="finished (step limit reached)",
        rows=ROWS,
        checkpoints=["000001", "000003"],
        best=BestRecord("000003", 1.0, "evaluation"),
        changed={"lr": 0.1, "model.core": "lstm"},
        files=[f"videos/{i}.mp4" for i in range(5)],
    )
    assert list(page_lines(facts, NOW)) == [
        "PPO on CartPole-v1",
        "run          runs/mine/PPO_CartPole-v1_x-abcde  (abcde)",
        "experiment   mine, seed 3",
        "tags         good, first",
        "state        finished (step limit reached)",
        "time         started 2026-01-01 00:00 on here, 2 h ago, 3.0 s of training",
        "progress     300 steps, 6 episodes, 100 steps/s",
        "training     return 0.250 at the end, best 0.750 at 200 steps",
        "             ▁█▅",
        "evaluation   return 1.00 [0.500 to 1.50] at the end, best 1.00 at 300 steps",
        "checkpoints  2, 000001 to 000003; best: 000003 (evaluation return 1.00)",
        "changed      lr: 0.1",
        "             model.core: lstm",
        "stop         timesteps = 300",
        "files        videos/0.mp4",
        "             videos/1.mp4",
        "             videos/2.mp4",
        "             … and 2 more",
        "command      ludus train 'a b'",
    ]


def test_the_page_of_a_game_with_winners_shows_win_rates() -> None:
    rate = {"match/win/hard": 0.25, "match/win/hard_low": 0.2, "match/win/hard_high": 0.3}
    evaluated = {name.replace("match", "evaluation").replace("hard", "medium"): 2 * value for name, value in rate.items()}
    rows = [ROWS[0] | rate, ROWS[3] | evaluated | {"evaluation/loss/medium": 0.5}]
    lines = list(page_lines(RunFacts("runs/x/y", "y", CONFIG, META, "running", rows), NOW))
    at = lines.index("win rate     50 % [40–60] against medium, 50 % lost (evaluation)")
    assert lines[at + 1] == "             25 % [20–30] against hard (training)"
    assert any(line.startswith("training     return") for line in lines)
    zero_sum = [ROWS[0] | {"zero_sum": 1.0}, *rows[1:]]
    lines = list(page_lines(RunFacts("runs/x/y", "y", CONFIG, META, "running", zero_sum), NOW))
    assert not any(line.startswith("training") for line in lines)
    assert any(line.startswith("evaluation   return 1.00") for line in lines)


def test_a_run_without_reports_has_a_page() -> None:
    lines = list(page_lines(RunFacts("runs/x/y", "y", CONFIG, {}, "running"), NOW))
    assert "progress     no report yet" in lines
    assert "checkpoints  none" in lines
    assert "time         started at an unknown time" in lines


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_curve_fits_into_the_terminal(width: int) -> None:
    rows = [{"timesteps": i, "iterations": i, "time_s": i, "episode_return_mean": math.sin(i / 9)} for i in range(500)]
    lines = list(page_lines(RunFacts("runs/x/y", "y", CONFIG, META, "running", rows), NOW, width))
    assert all(len(line) <= width for line in lines if "▁" in line)


def test_only_settings_that_differ_from_the_defaults_are_changed() -> None:
    from ludus.algorithms.base import algorithm_class
    from ludus.config.validation import dump_config, parse_algorithm_config

    schema = algorithm_class("PPO").Config
    assert changed_settings({"run": "PPO", "config": dump_config(parse_algorithm_config(schema, {}))}) == {}
    own = dump_config(parse_algorithm_config(schema, {"lr": 0.125, "seed": 5, "model": {"core": "lstm"}}))
    assert changed_settings({"run": "PPO", "config": own}) == {"lr": 0.125, "model.core": "lstm"}
    assert changed_settings({"run": "os:system", "config": {"gamma": 0.5}}) == {"gamma": 0.5}, "nothing of a run is imported"


def test_show_prints_the_page_and_the_dump_behind_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = made(Path("runs/mine/PPO_x-abcde"), {100: 1.0, 200: 3.0}, lr=0.125)
    sink = JsonLinesSink(run / "metrics.jsonl")
    sink.write({"iterations": 3, "timesteps": 300, "time_s": 1.5, "episodes": 2, "episode_return_mean": 2.0})
    sink.close()
    result = CliRunner().invoke(app, ["runs", "show", "last"])
    assert result.exit_code == 0, result.output
    assert "training     return 2.00 at the end, best 3.00 at 200 steps" in result.output
    assert "changed      lr: 0.125" in result.output
    assert "{" not in result.output
    full = CliRunner().invoke(app, ["runs", "show", "abcde", "--full"])
    assert full.output.startswith("PPO on CartPole-v1\n")
    assert '"meta": {' in full.output
    found = json.loads(CliRunner().invoke(app, ["runs", "show", "mine", "--json"]).output)
    assert found["run"] == "runs/mine/PPO_x-abcde"
    assert found["last"]["timesteps"] == 300
    assert collect(run).short == "abcde"
