"""Keys of Coach's schedules: `heatup_steps`, `evaluation_steps` …, whose values are counts such as `EnvironmentSteps(1000)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ludus.config.aliases.rllib_values import Section, ValueTranslator

_COUNT = re.compile(r"\s*(EnvironmentSteps|EnvironmentEpisodes|TrainingSteps)\s*\(\s*([0-9][0-9_]{0,18})\s*\)\s*")
"""Coach's form of a count."""


def parse_count(value: Any) -> tuple[str, int] | None:
    """Parse `EnvironmentEpisodes(50)`, or a plain number of steps, to ('timesteps' | 'episodes' | 'iterations', number)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return "timesteps", value
    found = _COUNT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    units = {"EnvironmentSteps": "timesteps", "EnvironmentEpisodes": "episodes", "TrainingSteps": "iterations"}
    return units[found[1]], int(found[2].replace("_", ""))


def _count(value: Any, *allowed: str) -> tuple[str, int]:
    names = {"timesteps": "EnvironmentSteps(…)", "episodes": "EnvironmentEpisodes(…)", "iterations": "TrainingSteps(…)"}
    found = parse_count(value)
    if found is None or found[0] not in allowed:
        raise ValueError(f"is a number of steps, or {' or '.join(names[unit] for unit in allowed)}")
    return found


def _heatup(value: Any, _: Section) -> Section:
    unit, number = _count(value, "timesteps", "episodes")
    if unit == "episodes":
        return {"num_steps_sampled_before_learning_starts": 0, "heatup_episodes": number}
    return {"num_steps_sampled_before_learning_starts": number, "heatup_episodes": 0}


def _between_evaluations(value: Any, _: Section) -> Section:
    unit, number = _count(value, "timesteps", "episodes", "iterations")
    return {"evaluation_interval": number, "evaluation_interval_unit": unit} if number else {"evaluation_duration": 0}


def _evaluation_steps(value: Any, _: Section) -> Section:
    unit, number = _count(value, "timesteps", "episodes")
    return {"evaluation_duration": number} | ({"evaluation_duration_unit": unit} if number else {})


def translate_improve_steps(value: Any, _: Section) -> Section:
    """Translate `improve_steps`, the length of the training."""
    unit, number = _count(value, "timesteps", "episodes", "iterations")
    if not number:
        raise ValueError("is the length of the training, above 0")
    return {f"stop.{unit}": number}


COACH_SCHEDULE: Mapping[str, ValueTranslator] = {
    "heatup_steps": _heatup,
    "steps_between_evaluation_periods": _between_evaluations,
    "evaluation_steps": _evaluation_steps,
}
"""Keys of Coach's schedules except `improve_steps`."""
