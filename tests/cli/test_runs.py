"""`--track`, and the output of `ludus runs`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ludus.cli.main import app
from ludus.core.metrics import JsonLinesSink
from ludus.errors import ConfigError
from tests.experiments.test_compare import flat_run


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_an_option_switches_tracking_on(tmp_path: Path) -> None:
    small = ["--set", "train_batch_size=256", "--set", "evaluation_duration=0", "--num-envs", "8", "--stop", "iterations=2"]
    result = call("train", "CartPole-v1", "--track", "csv", *small, "--local-dir", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    (table,) = tmp_path.rglob("metrics.csv")
    with table.open() as file:
        assert [row["iterations"] for row in csv.DictReader(file)] == ["1", "2"]


def test_an_unknown_tracker_is_an_error(tmp_path: Path) -> None:
    result = call("train", "CartPole-v1", "--track", "wanb", "--local-dir", tmp_path / "runs")
    assert isinstance(result.exception, ConfigError)
    assert "'track.wanb'" in str(result.exception)
    assert "'wandb'" in str(result.exception)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Two experiments of five seeds, and the trial of a script."""
    runs = tmp_path / "runs"
    for lr, values in ((1e-3, [480, 490, 500, 470, 495]), (1e-4, [300, 310, 290, 305, 320])):
        for seed, value in enumerate(values):
            flat_run(runs / "sweep" / f"{lr}-{seed}", float(value), name="sweep", lr=lr, seed=seed)
    trial = runs / "atari" / "ppo-v0"
    trial.mkdir(parents=True)
    (trial / "meta.json").write_text(json.dumps({"kind": "session", "started": "2026-01-01T00:00:00+0000"}))
    sink = JsonLinesSink(trial / "metrics.jsonl")
    sink.write({"iterations": 1, "timesteps": 7, "wins": 3.0})
    sink.close()
    return runs


def test_trials_of_scripts_are_listed_and_shown(several: Path) -> None:
    rows = json.loads(call("runs", "list", several, "--json").output)
    assert len(rows) == 11
    (script,) = [row for row in rows if row["algorithm"] == "script"]
    assert (script["run"], script["timesteps"], script["return"]) == (str(several / "atari" / "ppo-v0"), 7, None)
    result = call("runs", "show", several / "atari" / "ppo-v0", "--full")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Trial of a script\n")
    assert '"wins": 3' in result.output


def test_a_comparison_prints_and_plots_whether_groups_differ(several: Path, tmp_path: Path) -> None:
    out = tmp_path / "compare.png"
    result = call("runs", "compare", several / "sweep", "--out", out)
    assert result.exit_code == 0, result.output
    assert "lr=0.001 is 182 higher than lr=0.0001" in result.output
    assert "n = 5 and 5): significant" in result.output
    assert out.read_bytes().startswith(b"\x89PNG")
    found = json.loads(call("runs", "compare", several / "sweep", several / "sweep", "--out", out, "--json").output)
    assert [(group["label"], group["n"], group["mean"]) for group in found["groups"]] == [
        ("lr=0.001", 5, 487.0),
        ("lr=0.0001", 5, 305.0),
    ], "a run that is named twice is one run"
    (verdict,) = found["differences"]
    assert verdict["significant"]
    assert verdict["p_value"] == pytest.approx(2 / 252)
    assert len(found["runs"]) == 10
    assert found["runs"][0]["lr"] == 1e-3


def test_a_comparison_shows_only_the_compared_return(several: Path, tmp_path: Path) -> None:
    result = call("runs", "compare", several / "sweep", "--out", tmp_path / "c.png").output
    assert result.startswith("Compared: training return (episode_return_mean: ")
    (titles,) = [line for line in result.splitlines() if line.startswith("env ")]
    assert titles.count("return") == 1
    assert "training return (last)" in titles
    assert f"written: {tmp_path / 'c.png'}" in result
    listed = call("runs", "list", several / "sweep").output
    assert "training return  best training return  evaluation return" in listed.splitlines()[0]


def test_of_a_metric_that_is_better_when_it_is_low_the_lowest_is_first(several: Path, tmp_path: Path) -> None:
    words: list[str | Path] = ["runs", "compare", several / "sweep", "--out", tmp_path / "x.png", "--json", "--at", "best"]
    high, low = (json.loads(call(*words, *more).output) for more in ([], ["--lower-is-better"]))
    assert [group["label"] for group in high["groups"]] == ["lr=0.001", "lr=0.0001"]
    assert [group["label"] for group in low["groups"]] == ["lr=0.0001", "lr=0.001"]
    column = "episode_return_mean (best)"
    assert [row[column] for row in high["runs"]] == sorted((row[column] for row in high["runs"]), reverse=True)
    assert [row[column] for row in low["runs"]] == sorted(row[column] for row in low["runs"])
    assert low["differences"][0]["said"].startswith("lr=0.0001 is 182 lower than lr=0.001")


def test_a_comparison_without_values_lists_the_runs_with_the_reason(several: Path, tmp_path: Path) -> None:
    result = call("runs", "compare", several, "--metric", "happiness", "--out", tmp_path / "x.png")
    assert result.exit_code == 0, result.output
    assert "None of the 11 runs has values of 'happiness'" in result.output
    assert not (tmp_path / "x.png").exists()


def test_curves_of_seeds_may_be_drawn_together(several: Path, tmp_path: Path) -> None:
    pictures = {}
    for name, words in {"each": [], "together": ["--group-by", "auto"], "smooth": ["--smoothing", "0.9"]}.items():
        result = call("runs", "plot", several / "sweep", "--out", tmp_path / f"{name}.png", *words)
        assert result.exit_code == 0, result.output
        pictures[name] = (tmp_path / f"{name}.png").read_bytes()
    assert pictures["each"] != pictures["together"]
