"""The presets: experiments that come with the package, each with the return that it is known to reach within its budget."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ludus import config as configs
from ludus.config import TargetConfig
from ludus.errors import UnknownName
from ludus.plugins import did_you_mean

_FOLDER = "presets"


@dataclass(frozen=True)
class Preset:
    name: str
    description: str
    env: str
    run: str
    target: TargetConfig


def names() -> list[str]:
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def preset(name: str) -> Path:
    """The file of a preset. Raises UnknownName."""
    if name not in names():
        raise UnknownName(f"There is no preset {name!r}.", did_you_mean(name, names()))
    return _folder() / f"{name}.yaml"


def summary(name: str) -> Preset:
    """What the file says of itself. Raises UnknownName, ConfigError."""
    ((_, data),) = configs.load_experiments(preset(name)).items()
    checked = configs.experiment({"name": name, **data})
    assert checked.target is not None, f"the preset {name} has no target"
    return Preset(name, checked.description or "", checked.env, checked.run, checked.target)


def _folder() -> Path:
    """On disk: the package is never run from an archive, as its networks and clients could not be either."""
    return Path(str(resources.files("ludus.experiment") / _FOLDER))
