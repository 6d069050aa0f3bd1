"""Zero-sum games: their return is always 0, so evaluations show a win rate against chance or a named opponent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.config.schema import StopConfig
from ludus.core.metrics import read_jsonl
from ludus.errors import ConfigError, NotFound
from ludus.experiments import runner
from ludus.experiments.assembly import match_evaluation
from ludus.experiments.control.training_display import RecentRates, progress_line, progress_rows
from ludus.experiments.result import Result
from ludus.experiments.runs.run_summary import summary_lines
from tests.experiments import small

PAIR = "tests.experiments.grids:pair"
SETTINGS: dict[str, Any] = {"train_batch_size": 64, "num_envs_per_worker": 4, "evaluation_duration": 8}


def start(where: Path, iterations: int = 1, **settings: Any) -> Result:
    data = small.data(iterations, env=PAIR, **{**SETTINGS, **settings})
    return runner.train(data, project=where.parent, trial=where.name)


def test_evaluations_of_a_zero_sum_game_report_a_win_rate_against_chance(tmp_path: Path) -> None:
    result = start(tmp_path / "run")
    numbers = result.metrics
    assert numbers["zero_sum"] == 1.0
    assert numbers["evaluation/win/random_low"] <= numbers["evaluation/win/random"] <= numbers["evaluation/win/random_high"]
    shares = [numbers[f"evaluation/{kind}/random"] for kind in ("win", "draw", "loss")]
    assert sum(shares) == pytest.approx(1.0)
    assert "against random" in next(iter(summary_lines(result)))


def test_whoever_wants_the_sum_of_all_agents_gets_it(tmp_path: Path) -> None:
    numbers = start(tmp_path / "run", multiagent={"evaluation_opponents": "policies"}).metrics
    assert "evaluation/win/random" not in numbers
    assert numbers["evaluation/return_mean"] == 0.0


def test_a_run_can_be_named_as_the_opponent(tmp_path: Path) -> None:
    start(tmp_path / "first")
    result = start(tmp_path / "second", seed=1, multiagent={"evaluation_opponents": str(tmp_path / "first")})
    assert "evaluation/win/first" in result.metrics


def test_an_opponent_that_is_not_there_costs_no_directory(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no run or checkpoint"):
        start(tmp_path / "run", multiagent={"evaluation_opponents": str(tmp_path / "nowhere")})
    assert not (tmp_path / "run").exists()


def test_an_opponent_of_another_game_is_refused(tmp_path: Path) -> None:
    small.train(tmp_path / "cart", 1)
    with pytest.raises(ConfigError, match="not trained with the agents red, blue"):
        start(tmp_path / "run", multiagent={"evaluation_opponents": str(tmp_path / "cart")})


def test_win_rates_are_shown_between_checkpoints_without_judging_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_evaluation, "_DISPLAY_EVERY_S", 0.0)
    monkeypatch.setattr("ludus.experiments.control.evaluation_schedule._DISPLAY_SHARE", 0.0)
    start(tmp_path / "run", 4)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert sum("evaluation/win/random" in row for row in rows) >= 3
    assert len(list((tmp_path / "run" / "checkpoints").glob("0*"))) == 1


def test_an_interval_of_the_config_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_evaluation, "_DISPLAY_EVERY_S", 0.0)
    start(tmp_path / "run", 4, evaluation_interval=4)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert sum("evaluation/win/random" in row for row in rows) == 1


# -- on the display -----------------------------------------------------------------------------------------------------

NUMBERS = {"timesteps": 100.0, "time_s": 1.0, "episode_return_mean": 0.0, "zero_sum": 1.0}
JUDGED = {
    "evaluation/win/random": 0.8,
    "evaluation/win/random_low": 0.6,
    "evaluation/win/random_high": 0.9,
    "evaluation/loss/random": 0.05,
}


def test_the_display_shows_the_win_rate_instead_of_the_return() -> None:
    line = progress_line({**NUMBERS, **JUDGED}, StopConfig(timesteps=200), RecentRates())
    assert "win rate 80 % [60–90] against random, 5 % lost" in line
    assert "return" not in line
    rows = dict(progress_rows({**NUMBERS, **JUDGED}, StopConfig(timesteps=200), RecentRates(), [0.0]))
    assert rows["win rate"].startswith("80 %")
    assert "return" not in rows


def test_before_the_first_evaluation_the_win_rate_is_not_known() -> None:
    assert "win rate not evaluated yet" in progress_line(NUMBERS, StopConfig(timesteps=200), RecentRates())
