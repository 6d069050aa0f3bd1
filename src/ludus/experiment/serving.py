"""From a checkpoint to a service: which seats the game has, and which model plays each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ludus import config as configs
from ludus.actor.http import HttpLimits
from ludus.actor.session import SessionLimits
from ludus.errors import NotFound
from ludus.experiment import checkpoint, external
from ludus.experiment.external import GameSeats
from ludus.experiment.run import find_runs
from ludus.model import saved
from ludus.serve.service import Served
from ludus.store.local import LocalStore


def served(where: str | Path, *, deterministic: bool = True) -> tuple[Served, dict[str, Any]]:
    """The service of a run or checkpoint, and what `GET /spec` says of it. Raises NotFound, Damaged."""
    _, found = checkpoint.open_checkpoint(where)
    seats = _seats(found)
    models = {
        name: (
            json.dumps(found.state["models"][name]["description"]).encode(),
            saved.encode_weights(found.weights[name]),
            int(found.state["models"][name]["version"]),
        )
        for name in seats.models
    }
    return Served(seats.seats, models, deterministic), seats.spec()


def limits_of(where: str | Path) -> tuple[HttpLimits, SessionLimits]:
    """What was accepted in training is accepted in service."""
    _, found = checkpoint.open_checkpoint(where)
    config = found.state["config"]
    if config["env"] != configs.EXTERNAL:
        return HttpLimits(), SessionLimits()
    outside = configs.external_config(config["config"]["env_config"])
    settings = external.settings_of(outside.model_copy(update={"token_file": None}), external.seats_of(outside))
    return settings.http, settings.sessions


def run_of(where: str, local_dir: Path) -> str:
    """The run that a YAML file of an experiment has led to last; anything else is a run or checkpoint already."""
    if not where.endswith((".yaml", ".yml")):
        return where
    names = list(configs.load_experiments(Path(where)))
    runs = [run for name in names for run in find_runs(local_dir / name) if checkpoint.names(LocalStore(run))]
    if not runs:
        raise NotFound(f"No run of {', '.join(names)} below {local_dir} has a checkpoint.", f"ludus train -f {where}")
    return str(max(runs, key=lambda run: run.stat().st_mtime))


def _seats(found: checkpoint.Checkpoint) -> GameSeats:
    """As the games were told in training; an agent trained in environments plays the only seat."""
    config = found.state["config"]
    if config["env"] == configs.EXTERNAL:
        return external.seats_of(configs.external_config(config["config"]["env_config"]))
    (name,) = found.weights
    policy = found.policy(name)
    return GameSeats({name: (policy.observation_space, policy.action_space)}, {"": name})
