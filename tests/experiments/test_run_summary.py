"""The end of a training in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from ludus.experiments.result import Result
from ludus.experiments.runs.run_summary import longer_stop, stop_reason, summary_lines

METRICS = {"timesteps": 60_611.0, "time_s": 61.2, "episode_return_mean": -56.87, "iterations": 15.0}


def result(stopped_by: str = "time_s", env: str = "CartPole-v1", metrics: Mapping[str, float] = {}) -> Result:
    run = Path("/somewhere/a run")
    return Result(run, run / "checkpoints" / "000015", stopped_by, {**METRICS, **metrics}, cast(Any, None), env)


@pytest.mark.parametrize(
    ("stopped_by", "text"),
    [
        ("time_s", "Stopped: time limit reached"),
        ("timesteps", "Stopped: step limit reached"),
        ("iterations", "Stopped: iteration limit reached"),
        ("episodes", "Stopped: episode limit reached"),
        ("episode_return_mean", "Stopped: target return reached"),
        ("interrupted (SIGINT)", "Interrupted by Ctrl-C"),
        ("interrupted (SIGTERM)", "Interrupted by SIGTERM"),
        ("interrupted", "Interrupted"),
        ("a callback asked for it", "Stopped: a callback asked for it"),
    ],
)
def test_why_it_stopped_is_said_in_words(stopped_by: str, text: str) -> None:
    assert stop_reason(stopped_by) == text


def test_the_summary_has_the_evaluation_beside_the_training_return_and_what_to_do_next() -> None:
    evaluated = {
        "evaluation/return_mean": 293.7,
        "evaluation/return_low": 237.9,
        "evaluation/return_high": 402.6,
        "evaluation/episodes": 10.0,
    }
    assert list(summary_lines(result(metrics=evaluated))) == [
        "Stopped: time limit reached. Mean return −56.9 in training.",
        "Evaluation: mean return 293.7 [237.9 to 402.6] over 10 episodes.",
        "60,611 steps in 61 s (990 steps/s).",
        "run         /somewhere/a run",
        "checkpoint  /somewhere/a run/checkpoints/000015",
        "watch it    ludus rollout '/somewhere/a run' --video",
        "look at it  ludus runs show '/somewhere/a run'",
        "train on    ludus train --resume '/somewhere/a run' --stop time_s=120",
    ]


def win_rates(kind: str, **rates: tuple[float, float, float]) -> dict[str, float]:
    return {
        f"{kind}/win/{who}{which}": rate
        for who, all_ in rates.items()
        for which, rate in zip(("", "_low", "_high"), all_, strict=True)
    }


def test_where_matches_are_won_and_lost_the_win_rate_comes_first() -> None:
    numbers = win_rates("match", easy=(0.93, 0.86, 0.97), hard=(0.25, 0.2, 0.3))
    numbers |= win_rates("evaluation", medium=(0.5, 0.34, 0.66)) | {"evaluation/loss/medium": 0.25}
    numbers |= {"evaluation/return_mean": 0.25, "evaluation/episodes": 32.0}
    assert list(summary_lines(result(metrics=numbers)))[:2] == [
        "Stopped: time limit reached. Win rate in training 93 % [86–97] against easy; 25 % [20–30] against hard. Mean return −56.9 in training.",
        "Evaluation: win rate 50 % [34–66] against medium, 25 % lost; mean return 0.250 over 32 episodes.",
    ]


def test_a_zero_sum_game_without_an_evaluation_shows_no_empty_number() -> None:
    first = next(iter(summary_lines(result(metrics={"zero_sum": 1.0}))))
    assert first == "Stopped: time limit reached. The win rate was not evaluated."


def test_a_run_without_episodes_and_one_that_was_interrupted_say_so() -> None:
    lines = list(summary_lines(result("interrupted (SIGINT)", metrics={"episode_return_mean": math.nan})))
    assert lines[0] == "Interrupted by Ctrl-C. No episode ended during training."
    assert "continue    ludus train --resume '/somewhere/a run'" in lines
    assert not any(line.startswith("train on") for line in lines)


def test_a_policy_of_games_that_call_us_is_served() -> None:
    assert "serve it    ludus serve '/somewhere/a run'" in list(summary_lines(result(env="external")))


@pytest.mark.parametrize(
    ("stopped_by", "text"),
    [("timesteps", "timesteps=120000"), ("time_s", "time_s=120"), ("iterations", "iterations=30"), ("episode_return_mean", "")],
)
def test_going_on_means_about_twice_as_long(stopped_by: str, text: str) -> None:
    assert longer_stop(result(stopped_by)) == text
