"""From a checkpoint to a service: which seats the game has, and which model plays each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ludus import config as configs
from ludus.experiment import checkpoint, external
from ludus.experiment.external import GameSeats
from ludus.model import saved
from ludus.serve.service import Served


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


def _seats(found: checkpoint.Checkpoint) -> GameSeats:
    """As the games were told in training; an agent trained in environments plays the only seat."""
    config = found.state["config"]
    if config["env"] == configs.EXTERNAL:
        return external.seats_of(configs.external_config(config["config"]["env_config"]))
    (name,) = found.weights
    policy = found.policy(name)
    return GameSeats({name: (policy.observation_space, policy.action_space)}, {"": name})
