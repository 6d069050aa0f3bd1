"""A release: one set of weights that can be served, tried out before anybody plays against it.

It travels from the process that found it to the workers as a directory: release.json, and for every model its description and
its weights (safetensors), or the ONNX model that was made of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ludus.errors import Damaged, IncompatibleCheckpoint
from ludus.models.export.parity import random_observations
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.models.policy import Policy
from ludus.models.weights import serialization

Backend = Literal["torch", "onnx", "onnx-int8"]
BACKENDS: tuple[Backend, ...] = ("torch", "onnx", "onnx-int8")
_TRIED = 64  # observations
_WARM = (1, 8, 64)  # rows


@dataclass(frozen=True)
class Part:
    """One model of a release."""

    description: bytes
    weights: bytes = field(repr=False)
    version: int


@dataclass(frozen=True)
class Release:
    version: int
    """What a game asks for it by: the version of the model; where there are several, the number of the checkpoint."""
    seats: Mapping[str, str]
    """Seat → model."""
    parts: Mapping[str, Part]
    origin: str = ""
    """The checkpoint that it comes from, for people."""

    def policies(self) -> dict[str, Policy]:
        """Built, with their weights. Raises Damaged, IncompatibleCheckpoint."""
        built = {}
        for name, part in self.parts.items():
            policy = serialization.policy_from(part.description)
            policy.load_weights(serialization.decode_weights(part.weights, name)[0])
            policy.network.freeze()  # it never learns again
            built[name] = policy
        return built


def tried(release: Release, serving: Release | None = None) -> dict[str, Policy]:
    """The policies of a release that may be offered: whole, of the spaces that are `serving`, and answering with numbers.

    Raises Damaged or IncompatibleCheckpoint.
    """
    policies = release.policies()
    if serving is not None:
        _check_spaces(release, serving)
    for name, policy in policies.items():
        for key, array in policy.weights().items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise Damaged(f"The weights {key} of {name!r} hold what is not a number.")
        _try(name, policy)
    return policies


def _check_spaces(release: Release, serving: Release) -> None:
    if set(release.seats) != set(serving.seats):
        raise IncompatibleCheckpoint(f"Its seats are {sorted(release.seats)}, those that are played are {sorted(serving.seats)}.")
    for seat, name in release.seats.items():
        new = json.loads(release.parts[name].description)
        old = json.loads(serving.parts[serving.seats[seat]].description)
        for what in ("observation_space", "action_space"):
            if new[what] != old[what]:
                shown = f" of seat {seat!r}" if seat else ""
                raise IncompatibleCheckpoint(
                    f"Its {what.replace('_', ' ')}{shown} is {new[what]}, the games play with {old[what]}.",
                    "Serve it as a model of its own.",
                )


def _try(name: str, policy: ActingPolicy) -> None:
    state = tuple(np.stack([spec.zeros()] * _TRIED) for spec in policy.state_spec()) if policy.recurrent else ()
    observations = random_observations(policy.observation_space, _TRIED, np.random.default_rng(0))
    for _ in range(2):  # the second time from a state that it has made itself
        acted = policy.act(observations, state)
        state = acted.state
        for what, array in (("values", acted.value), ("log-probabilities", acted.log_prob), *(("states", s) for s in state)):
            if not np.isfinite(array).all():
                raise Damaged(f"{name!r} answers with {what} that are not numbers.")


def warm(player: ActingPolicy) -> None:
    """Batches of the usual sizes, so that no game waits for what a runtime sets up when it first sees one."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for rows in _WARM:
        state = tuple(spec.zeros(rows) for spec in player.state_spec()) if player.recurrent else ()
        observations = random_observations(player.observation_space, rows, rng)
        player.act(observations, state, None, player.draw_noise(rows, generator))


# -- as files -----------------------------------------------------------------------------------------------------------


def write(release: Release, directory: Path, artefacts: Mapping[str, bytes] | None = None) -> None:
    """Complete or not at all. `artefacts`: the ONNX models that are to be run instead of the networks."""
    aside = directory.with_name(f"{directory.name}.aside-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True, mode=0o700)
        listed = []
        for number, (name, part) in enumerate(release.parts.items()):  # model names need not be file names
            (aside / f"{number}.json").write_bytes(part.description)
            if artefacts is None:
                (aside / f"{number}.safetensors").write_bytes(part.weights)
            else:
                (aside / f"{number}.onnx").write_bytes(artefacts[name])
            listed.append({"name": name, "version": part.version})
        facts = {"version": release.version, "seats": dict(release.seats), "models": listed}
        (aside / "release.json").write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class Loaded:
    """A release as a worker has it."""

    version: int
    seats: Mapping[str, str]
    players: Mapping[str, ActingPolicy]
    versions: Mapping[str, int]
    descriptions: Mapping[str, bytes]


def read(directory: Path, *, values: bool = True) -> Loaded:
    """Players that have made their first decisions already. Without `values` they do not say what an observation is worth,
    which is quicker. Raises Damaged, IncompatibleCheckpoint, NotFound or OSError.
    """
    facts = json.loads((directory / "release.json").read_text(encoding="utf-8"))
    players: dict[str, ActingPolicy] = {}
    versions, descriptions = {}, {}
    for number, model in enumerate(facts["models"]):
        name, description = model["name"], (directory / f"{number}.json").read_bytes()
        players[name] = _player(directory, number, description, name, values)
        warm(players[name])
        versions[name], descriptions[name] = model["version"], description
    return Loaded(facts["version"], facts["seats"], players, versions, descriptions)


def _player(directory: Path, number: int, description: bytes, name: str, values: bool) -> ActingPolicy:
    exported = directory / f"{number}.onnx"
    if exported.exists():
        from ludus.models.inference.onnx_policy import OnnxPolicy

        return OnnxPolicy(exported, value=values)
    policy = serialization.policy_from(description)
    policy.load_weights(serialization.decode_weights((directory / f"{number}.safetensors").read_bytes(), name)[0])
    policy.network.freeze(values=values)
    return policy
