"""Models of players on disk: the newest one of a training player, and copies of it that are complete or absent.

    <league>/players/main/g0/       run of a training player; g1 after its first reset
    <league>/players/main.3/        copy of one checkpoint: config.yaml, meta.json, checkpoints/000120, models/model/000121.safetensors

A copy has the layout of a run, so that all commands that take a run or checkpoint take it as well.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.core.types import DEFAULT_MODEL
from ludus.errors import Damaged, IncompatibleCheckpoint, NotFound, UsageError
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import store_of
from ludus.experiments.runs.run_dir import CONFIG, META
from ludus.io.atomic_file import sync_directory, temporary_path
from ludus.league.players import name_problem
from ludus.league.runtime.league_file import PLAYERS
from ludus.league.runtime.player_models import load_stored_model
from ludus.models.policy import Weights
from ludus.models.weights import serialization
from ludus.storage.local import LocalStore
from ludus.storage.safe_read import parse_json


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint of a player."""

    run: Path
    checkpoint: str
    timesteps: int
    """Of the run."""
    version: int


def player_directory(league: Path, player: str) -> Path:
    """Raises UsageError for a name that would lead out of the directory of the players."""
    if problem := name_problem(player):
        raise UsageError(problem)
    return league / PLAYERS / player


def run_directory(league: Path, player: str, generation: int) -> Path:
    return player_directory(league, player) / f"g{generation}"


def model_name(league: Path, stored: StoredModel) -> str:
    """The model as players and matchmaking name it: `players/main/g0@131`."""
    return f"{stored.run.relative_to(league).as_posix()}@{stored.version}"


def find_newest(run: Path) -> StoredModel | None:
    """The newest checkpoint of a run; None: there is none, or it cannot be read."""
    store = LocalStore(run)
    name = checkpoint.newest_name(store) if run.is_dir() else None
    if name is None:
        return None
    try:
        state = parse_json(store.get_file(f"{checkpoint.FOLDER}/{name}", "state.json"), "state.json")
        (version,) = [int(entry["version"]) for entry in state["models"].values()]
        return StoredModel(run, name, int(state["progress"]["timesteps"]), version)
    except (NotFound, Damaged, ValueError, KeyError, TypeError, AttributeError):
        return None


def copy_checkpoint(league: Path, player: str, where: str | Path) -> str:
    """Copy a checkpoint into the league as the model of a player; returns the name of the model.

    Replaces a copy that was made before and is not used yet. Raises NotFound, Damaged, UsageError, IncompatibleCheckpoint, OSError.
    """
    run, name = checkpoint.locate(where)
    source = store_of(run)
    loaded = checkpoint.read(source, name)  # verifies everything
    if len(loaded.weights) != 1:
        raise IncompatibleCheckpoint(
            f"{where} has the models {', '.join(loaded.weights)}; a player of a league has one that plays all agents."
        )
    ((model, weights),) = loaded.weights.items()
    entry = loaded.state["models"][model]
    with _copy(league, player) as copy:
        for file in (CONFIG, META):
            with contextlib.suppress(NotFound):
                copy.put(file, source.get(file))
        copy.put_bundle(f"{checkpoint.FOLDER}/{name}", source.get_bundle(f"{checkpoint.FOLDER}/{name}"))
        _put_version(copy, model, int(entry["version"]), entry["description"], weights)
    return f"{PLAYERS}/{player}@{int(entry['version'])}"


def import_model(league: Path, player: str, model: str) -> str:
    """Copy the model of a fixed player into the league: a run, RUN/best, RUN@VERSION or a checkpoint. Raises like `copy_checkpoint`."""
    found, policy = load_stored_model(model)
    if not found.where.endswith(".safetensors"):
        return copy_checkpoint(league, player, found.where)
    with _copy(league, player) as copy:  # a version without a checkpoint
        _put_version(copy, DEFAULT_MODEL, found.version, policy.description(), policy.weights())
    return f"{PLAYERS}/{player}@{found.version}"


def _put_version(copy: LocalStore, model: str, version: int, description: Mapping[str, Any], weights: Weights) -> None:
    copy.put(f"models/{model}/model.json", json.dumps(description, indent=1).encode())
    data = serialization.encode_weights(weights, {"model": model, "version": str(version)})
    copy.put(f"models/{model}/{version:06d}.safetensors", data)


@contextlib.contextmanager
def _copy(league: Path, player: str) -> Iterator[LocalStore]:
    """A directory that replaces that of the player when the block ends; an exception discards it. Raises UsageError."""
    target = player_directory(league, player)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = temporary_path(target)
    try:
        yield LocalStore(aside)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # it does not exist after the rename
