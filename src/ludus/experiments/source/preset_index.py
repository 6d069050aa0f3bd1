"""The presets of the package: experiments with a measured return. Names of Coach presets are accepted as aliases."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ludus.compat.coach import preset_names
from ludus.compat.coach.preset_names import UnsupportedPreset
from ludus.config.experiment_file import load_experiments
from ludus.config.schema import TargetConfig
from ludus.config.validation import parse_experiment
from ludus.core.plugins import did_you_mean
from ludus.errors import UnknownName

_FOLDER = "presets"


@dataclass(frozen=True)
class Preset:
    name: str
    description: str
    env: str
    run: str
    target: TargetConfig


@dataclass(frozen=True)
class CoachPresetSummary:
    """A name of Coach."""

    name: str
    preset: str
    """Name of the corresponding preset."""
    run: str
    levels: tuple[str, ...]
    target: TargetConfig | None
    """None: not measured, or dependent on the level."""


def names() -> list[str]:
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def preset(name: str) -> Path:
    """The file of a preset. Raises UnknownName."""
    if name in names():
        return _folder() / f"{name}.yaml"
    if preset_names.canonical_name(name) is not None:
        raise UnknownName(f"{name} is a preset name of Coach; there is no file for it.", f"ludus presets show {name} writes one.")
    near = did_you_mean(name, [*names(), *sorted(preset_names.COACH_PRESETS)])
    raise UnknownName(f"There is no preset {name!r}.", near if near.startswith("Did") else did_you_mean(name, names()))


def experiments(name: str, level: str | None = None) -> dict[str, dict[str, Any]]:
    """What is trained under this name, ours or Coach's, by its name; unchecked. `level`: which environment.

    Raises UnknownName with the reason and the nearest, UsageError when the level is missing or not one of its levels.
    """
    called = None if name in names() else preset_names.canonical_name(name)
    if called is None:
        found = load_experiments(preset(name))
        if level is not None:
            for data in found.values():
                data["env"] = level
                data.pop("target", None)
        return found
    entry = preset_names.find_preset(called)
    if not isinstance(entry, preset_names.CoachPreset):
        assert isinstance(entry, UnsupportedPreset)
        raise UnknownName(f"{called} is not supported: {entry.why}.", f"Nearest is {entry.instead}.")
    needed = {each: _experiment(each) for each in (entry.preset, *entry.own.values())}
    return {called: preset_names.make_experiment(called, entry, level, needed)}


def read_summary(name: str) -> Preset:
    """What a preset with a target says of itself. Raises UnknownName, ConfigError."""
    ((_, data),) = experiments(name).items()
    checked = parse_experiment({"name": name, **data})
    if checked.target is None:
        raise UnknownName(f"No result has been measured for {name}.")
    return Preset(name, checked.description or "", checked.env, checked.run, checked.target)


def coach_presets() -> list[CoachPresetSummary]:
    """The names of Coach under which something is trained."""
    return [_coach_preset(name) for name in sorted(preset_names.COACH_PRESETS)]


def _coach_preset(name: str) -> CoachPresetSummary:
    entry = preset_names.COACH_PRESETS[name]
    data = experiments(name, next(iter(entry.levels), None))[name]
    target = None if entry.levels or "target" not in data else TargetConfig.model_validate(data["target"])
    return CoachPresetSummary(name, entry.preset, data["run"], tuple(entry.levels), target)


def unsupported_coach_presets() -> dict[str, UnsupportedPreset]:
    """The names of Coach under which nothing can be trained."""
    return dict(preset_names.unsupported_presets())


def _experiment(name: str) -> dict[str, Any]:
    ((_, data),) = load_experiments(preset(name)).items()
    return data


def _folder() -> Path:
    """On disk: the package is never run from an archive, as its networks and clients could not be either."""
    return Path(str(resources.files("ludus.experiments") / _FOLDER))
