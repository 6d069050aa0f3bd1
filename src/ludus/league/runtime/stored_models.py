"""Models of players on disk: the newest one of a training player, and copies of it that are complete or absent.

    <league>/players/main/g0/       run of a training player; g1 after its first reset
    <league>/players/main.3/        copy of one checkpoint: config.yaml, meta.json, checkpoints/000120, models/model/000121.safetensors

A copy has the layout of a run, so that all commands that take a run or checkpoint take it as well.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import Damaged, IncompatibleCheckpoint, NotFound
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import store_of
from ludus.experiments.runs.run_dir import CONFIG, META
from ludus.io.atomic_file import sync_directory, temporary_path
from ludus.league.runtime.league_file import PLAYERS
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


def run_directory(league: Path, player: str, generation: int) -> Path:
    return league / PLAYERS / player / f"g{generation}"


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


def copy_model(league: Path, player: str, where: str | Path) -> str:
    """Copy a run's newest checkpoint, or the named one, into the league as the model of a player; returns the name of the model.

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
    version = int(entry["version"])
    target = league / PLAYERS / player
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = temporary_path(target)
    try:
        copy = LocalStore(aside)
        for file in (CONFIG, META):
            with contextlib.suppress(NotFound):
                copy.put(file, source.get(file))
        copy.put_bundle(f"{checkpoint.FOLDER}/{name}", source.get_bundle(f"{checkpoint.FOLDER}/{name}"))
        copy.put(f"models/{model}/model.json", json.dumps(entry["description"], indent=1).encode())
        data = serialization.encode_weights(weights, {"model": model, "version": str(version)})
        copy.put(f"models/{model}/{version:06d}.safetensors", data)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        sync_directory(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # it does not exist after the rename
    return f"{PLAYERS}/{player}@{version}"
