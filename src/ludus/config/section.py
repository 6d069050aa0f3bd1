"""Base class of all config sections, and the value types that several of them share."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ludus.errors import ConfigError


def _check_points(points: Any) -> Any:
    if isinstance(points, list):
        times = [time for time, _ in points]
        if not points or times != sorted(set(times)):
            raise ValueError("the points of a schedule are [timestep, value] pairs with rising timesteps")
    if not all(0 <= value < math.inf for value in ([v for _, v in points] if isinstance(points, list) else [points])):
        raise ValueError("a scheduled value is a finite number from 0 upwards")
    return points


Schedule = Annotated[float | list[tuple[int, float]], AfterValidator(_check_points)]
"""A number, or [[timestep, value], …] joined by straight lines."""


class ConfigSection(BaseModel):
    """A section of the config: immutable; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())


SectionT = TypeVar("SectionT", bound=ConfigSection)
PositiveInt = Annotated[int, Field(ge=1)]


def class_path(value: Any) -> Any:
    """Return the `module:Class` path of a class, by which other processes import it; other values unchanged."""
    if not isinstance(value, type):
        return value
    if "<" in value.__qualname__ or "." in value.__qualname__:
        raise ValueError(
            "a class inside another class or a function cannot be imported by name; move it to the top level of a file"
        )
    return f"{value.__module__}:{value.__qualname__}"


def to_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy as JSON reads it back (tuples become lists)."""
    try:
        return dict(json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"it cannot be saved as JSON ({error}); use numbers, strings, booleans, lists and dicts") from error


def _check_experiment_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise ValueError("an experiment's name is made of letters, digits and _ . + -")
    return name


def _check_model_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w+-]*", name) or name == "sampler":  # a checkpoint has a file of that name
        raise ValueError("a model's name is made of letters, digits and _ + -, and is not 'sampler'")
    return name


ExperimentName = Annotated[str, AfterValidator(_check_experiment_name)]
ModelName = Annotated[str, AfterValidator(_check_model_name)]


def check_model_name(name: str, where: str) -> None:
    """Raise ConfigError unless `name` is valid; `where` is the key or option that holds it."""
    try:
        _check_model_name(name)
    except ValueError as error:
        raise ConfigError(f"{where} names {name!r}: {error}.") from error
