"""Writes the skeleton of a project: an environment, a model, an experiment and a passing test."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

import gymnasium as gym

from ludus.core import spaces, trust
from ludus.envs.vector_env import make_one
from ludus.errors import AlreadyExists, StoreFull, UsageError

OWN_ENV = "environment:Catch"
_FILES = {
    "environment.py": "environment.py.txt",
    "model/customnet.py": "customnet.py.txt",
    "experiment.yaml": "experiment.yaml.txt",
    "test_project.py": "test_project.py.txt",
    "README.md": "README.md.txt",
}
_ROW = "| `environment.py` | the world: a Gymnasium environment of this project |\n"


def scaffold(directory: Path, env: str | None = None) -> list[Path]:
    """Write a project that trains on `env`, or on its own environment; returns its files. Never overwrites a file.

    Raises AlreadyExists, StoreFull; UsageError if the environment does not exist or does not fit.
    """
    if env is not None:
        _check_env(env)
    wanted = [name for name in _FILES if env is None or name != "environment.py"]
    there = [name for name in wanted if (directory / name).exists()]
    if there:
        raise AlreadyExists(f"{directory} has {', '.join(there)} already.", "Name a new directory; nothing was written.")
    words = {
        "name": re.sub(r"[^\w.+-]", "-", directory.resolve().name, flags=re.ASCII).strip("._+-") or "project",
        "env": env or OWN_ENV,
        "timesteps": "1000000" if env else "50000",
        "environment_row": "" if env else _ROW,
    }
    templates = resources.files("ludus.experiments") / "templates"
    written = []
    try:
        for name in wanted:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / _FILES[name]).read_text(encoding="utf-8")
            with path.open("x", encoding="utf-8") as file:
                file.write(Template(text).substitute(words))
            written.append(path)
    except OSError as error:
        raise StoreFull(f"Cannot write {path}: {error.strerror}.", "Name a directory that can be written.") from error
    return written


def _check_env(env: str) -> None:
    """Raises UsageError unless the observations are a Box, which the model of the project takes."""
    trust.allow(env)
    made = make_one(env)
    try:
        seen, _ = spaces.split_mask(made.observation_space)
    finally:
        made.close()
    if not isinstance(seen, gym.spaces.Box):
        raise UsageError(
            f"The observations of {env} are a {type(seen).__name__}, but the model of the project takes a Box.",
            "Leave --env out, then name the environment in experiment.yaml and write a model for it.",
        )
