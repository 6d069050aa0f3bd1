"""The warning about deterministic evaluations that score far below training."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.experiments.evaluation.gap_warning import EvaluationGapWarning, gap_sinks
from ludus.experiments.resolve import resolve
from tests.experiments import small


def warnings(training: list[float], *evaluations: float, episodes: int = 10) -> list[str]:
    said: list[str] = []
    sink = EvaluationGapWarning(said.append)
    for value in training:
        sink.write({"timesteps": 1, "episode_return_mean": value})
    for value in evaluations:
        sink.write({"evaluation/return_mean": value, "evaluation/return_high": value + 0.05, "evaluation/episodes": episodes})
    return said


RISING = [0.0, 0.2, 0.5, 0.7, 0.9]


def test_an_evaluation_that_gets_stuck_is_warned_of_once() -> None:
    (said,) = warnings(RISING, 0.0, 0.0)
    assert "a return of 0 against 0.9" in said
    assert "explore: true" in said


@pytest.mark.parametrize(
    ("training", "evaluation"),
    [(RISING, 0.85), (RISING, 0.6), (RISING[:3], 0.0), ([-200.0, -180.0, -150.0, -120.0, -110.0], -115.0), ([20.0] * 5, 19.0)],
)
def test_other_evaluations_are_not(training: list[float], evaluation: float) -> None:
    assert warnings(training, evaluation) == []


def test_a_few_episodes_say_nothing() -> None:
    assert warnings(RISING, 0.0, episodes=2) == []


@pytest.mark.parametrize(
    ("settings", "watched"),
    [
        ({}, True),
        ({"evaluation_config": {"explore": True}}, False),
        ({"evaluation_config": {"env_config": {}}}, False),
        ({"preprocess": {"clip_reward": True}}, False),
    ],
)
def test_only_evaluations_of_the_same_game_are_compared(settings: dict[str, Any], watched: bool) -> None:
    resolved = resolve(small.data(1, **settings))
    assert bool(gap_sinks(resolved.experiment.env, resolved.config, None)) is watched
