"""The Python API of training: the same experiments as `ludus train`, as function calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.actor.trained import TrainedAgent
from ludus.experiment import checkpoint, experiment
from ludus.experiment.experiment import Result
from ludus.types import DEFAULT_MODEL


def train(
    env: str,
    run: str = "PPO",
    stop: Mapping[str, float] | None = None,
    *,
    name: str = "default",
    local_dir: str | Path = "runs",
    project: str | Path | None = None,
    trial: str | None = None,
    restore: str | Path | None = None,
    checkpoint_freq: int = 0,
    checkpoint_at_end: bool = True,
    keep_checkpoints_num: int | None = None,
    address: str | None = None,
    **settings: Any,
) -> Result:
    """Train an agent and return it, with its run directory and last metrics.

    `settings` are the keys of `config:` (`lr=3e-4, num_envs=64, model={"use_lstm": True}, …`); an unknown one is an error. With
    `num_workers=N` environments are stepped by N other processes; with `address` these run on all machines of a Ray cluster.
    Raises UsageError for anything wrong with the arguments, before anything starts.
    """
    data: dict[str, Any] = {"name": name, "env": env, "run": run, "stop": dict(stop or {}), "config": settings}
    data |= {
        "checkpoint_freq": checkpoint_freq,
        "checkpoint_at_end": checkpoint_at_end,
        "keep_checkpoints_num": keep_checkpoints_num,
    }
    return experiment.start(
        data,
        local_dir=Path(local_dir),
        project=Path(project) if project is not None else None,
        trial=trial,
        restore=restore,
        cluster=experiment.cluster_of(address),
    )


def resume(directory: str | Path, stop: Mapping[str, float] | None = None, *, address: str | None = None) -> Result:
    """Continue a run that was stopped or killed, in its own directory; `stop` replaces its stop conditions."""
    return experiment.resume(Path(directory), stop=stop, cluster=experiment.cluster_of(address))


def load(where: str | Path, model: str = DEFAULT_MODEL, seed: int = 0) -> TrainedAgent:
    """The agent of a checkpoint, a run (its newest checkpoint), or `RUN/best`."""
    _, found = checkpoint.open_checkpoint(where)
    return TrainedAgent(found.policy(model), seed, int(found.state["models"][model]["version"]))
