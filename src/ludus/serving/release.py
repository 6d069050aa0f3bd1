"""A release: one set of models that can be served, validated before it is offered.

On disk it is a directory of release.json and, for every model, its description and its weights (safetensors) or its ONNX model.
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
_CHECK_ROWS = 64  # observations
_WARM_UP_ROWS = (1, 8, 64)  # rows


@dataclass(frozen=True)
class ReleasedModel:
    """One model of a release."""

    description: bytes
    weights: bytes = field(repr=False)
    version: int


@dataclass(frozen=True)
class Release:
    version: int
    """The number that games request: the version of the model, or with several models the number of the checkpoint."""
    seats: Mapping[str, str]
    """Seat name → model name."""
    parts: Mapping[str, ReleasedModel]
    origin: str = ""
    """The checkpoint, for log messages."""

    def policies(self) -> dict[str, Policy]:
        """Build the policies. Raises Damaged, IncompatibleCheckpoint."""
        built = {}
        for name, part in self.parts.items():
            policy = serialization.policy_from(part.description)
            policy.load_weights(serialization.decode_weights(part.weights, name)[0])
            policy.network.freeze()  # inference only
            built[name] = policy
        return built


def validate_release(release: Release, serving: Release | None = None) -> dict[str, Policy]:
    """Build the policies and check that spaces equal those of `serving` and that all outputs are finite.

    Raises Damaged or IncompatibleCheckpoint.
    """
    policies = release.policies()
    if serving is not None:
        _check_spaces(release, serving)
    for name, policy in policies.items():
        for key, array in policy.weights().items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise Damaged(f"The weights {key} of {name!r} contain values that are not finite.")
        _check_outputs(name, policy)
    return policies


def _check_spaces(release: Release, serving: Release) -> None:
    if set(release.seats) != set(serving.seats):
        raise IncompatibleCheckpoint(f"Its seats are {sorted(release.seats)}; the served ones are {sorted(serving.seats)}.")
    for seat, name in release.seats.items():
        new = json.loads(release.parts[name].description)
        old = json.loads(serving.parts[serving.seats[seat]].description)
        for what in ("observation_space", "action_space"):
            if new[what] != old[what]:
                seat_text = f" of seat {seat!r}" if seat else ""
                raise IncompatibleCheckpoint(
                    f"Its {what.replace('_', ' ')}{seat_text} is {new[what]}; the served one is {old[what]}.",
                    "Serve it as a separate model.",
                )


def _check_outputs(name: str, policy: ActingPolicy) -> None:
    state = tuple(np.stack([spec.zeros()] * _CHECK_ROWS) for spec in policy.state_spec()) if policy.recurrent else ()
    observations = random_observations(policy.observation_space, _CHECK_ROWS, np.random.default_rng(0))
    for _ in range(2):  # the second time from its own recurrent state
        acted = policy.act(observations, state)
        state = acted.state
        for what, array in (("values", acted.value), ("log-probabilities", acted.log_prob), *(("states", s) for s in state)):
            if not np.isfinite(array).all():
                raise Damaged(f"{name!r} returns {what} that are not finite.")


def warm_up(policy: ActingPolicy) -> None:
    """Run batches of typical sizes, so that no game waits for the one-time set-up of a runtime."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for rows in _WARM_UP_ROWS:
        state = tuple(spec.zeros(rows) for spec in policy.state_spec()) if policy.recurrent else ()
        observations = random_observations(policy.observation_space, rows, rng)
        policy.act(observations, state, None, policy.draw_noise(rows, generator))


# -- files -----------------------------------------------------------------------------------------------------------


def write(release: Release, directory: Path, artefacts: Mapping[str, bytes] | None = None) -> None:
    """Write the release atomically. `artefacts`: ONNX models by name, to be run instead of the networks."""
    temporary = directory.with_name(f"{directory.name}.temporary-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True, mode=0o700)
        models = []
        for number, (name, part) in enumerate(release.parts.items()):  # a model name may not be a valid file name
            (temporary / f"{number}.json").write_bytes(part.description)
            if artefacts is None:
                (temporary / f"{number}.safetensors").write_bytes(part.weights)
            else:
                (temporary / f"{number}.onnx").write_bytes(artefacts[name])
            models.append({"name": name, "version": part.version})
        facts = {"version": release.version, "seats": dict(release.seats), "models": models}
        (temporary / "release.json").write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class LoadedRelease:
    """A release that a worker has loaded."""

    version: int
    seats: Mapping[str, str]
    policies: Mapping[str, ActingPolicy]
    versions: Mapping[str, int]
    descriptions: Mapping[str, bytes]


def read(directory: Path, *, values: bool = True) -> LoadedRelease:
    """Load and warm up the policies of a release. Without `values` they compute no value estimates, which is faster.

    Raises Damaged, IncompatibleCheckpoint, NotFound or OSError.
    """
    facts = json.loads((directory / "release.json").read_text(encoding="utf-8"))
    policies: dict[str, ActingPolicy] = {}
    versions, descriptions = {}, {}
    for number, model in enumerate(facts["models"]):
        name, description = model["name"], (directory / f"{number}.json").read_bytes()
        policies[name] = _load_policy(directory, number, description, name, values)
        warm_up(policies[name])
        versions[name], descriptions[name] = model["version"], description
    return LoadedRelease(facts["version"], facts["seats"], policies, versions, descriptions)


def _load_policy(directory: Path, number: int, description: bytes, name: str, values: bool) -> ActingPolicy:
    exported = directory / f"{number}.onnx"
    if exported.exists():
        from ludus.models.inference.onnx_policy import OnnxPolicy

        return OnnxPolicy(exported, value=values)
    policy = serialization.policy_from(description)
    policy.load_weights(serialization.decode_weights((directory / f"{number}.safetensors").read_bytes(), name)[0])
    policy.network.freeze(values=values)
    return policy
