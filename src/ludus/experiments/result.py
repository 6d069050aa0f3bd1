"""The result of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.experiments.runs.remote_runs import display_path
from ludus.experiments.runs.run_agent import RunAgent
from ludus.experiments.runs.run_dir import Run

if TYPE_CHECKING:
    from ludus.experiments.runs.history import HistoryLike


@dataclass(frozen=True)
class Result:
    """The result of a finished or interrupted training."""

    run_dir: Path
    """For a run on a store: its local working directory, which is accepted wherever a run is. `place` is its URL."""
    checkpoint: Path | None
    stopped_by: str
    metrics: dict[str, float]
    agent: RunAgent
    env: str = ""

    @property
    def place(self) -> str:
        """The URL of the run, or the path of its directory."""
        return display_path(self.run_dir)

    @property
    def episode_return_mean(self) -> float:
        return self.metrics.get("episode_return_mean", math.nan)

    @property
    def history(self) -> HistoryLike:
        """The reports of the run, a row each: a pandas.DataFrame where pandas is installed. Read from metrics.jsonl on each access."""
        from ludus.experiments.runs.history import read_history

        return read_history(Run(self.run_dir).metrics_path)

    def remarks(self) -> list[str]:
        """Remarks for the summary of the run, possibly none."""
        remarks = []
        unlearned = int(self.metrics.get("unlearned_steps", 0))
        if not self.metrics.get("iterations"):
            remarks.append(f"No update was made: {unlearned:,} steps were sampled, less than a batch (train_batch_size).")
        elif unlearned:
            remarks.append(f"{unlearned:,} steps of an unfinished batch were discarded.")
        if self.metrics.get("evaluation/unfinished"):
            remarks.append("The last evaluation was not finished when the run stopped; its episodes are not counted.")
        return remarks

    def to_json(self) -> dict[str, Any]:
        mean = self.episode_return_mean
        return {
            "run_dir": display_path(self.run_dir),
            "checkpoint": display_path(self.checkpoint) if self.checkpoint else None,
            "stopped_by": self.stopped_by,
            "timesteps": int(self.metrics.get("timesteps", 0)),
            "iterations": int(self.metrics.get("iterations", 0)),
            "episode_return_mean": None if math.isnan(mean) else mean,
            "time_s": round(self.metrics.get("time_s", 0.0), 3),
            "fps": round(self.metrics.get("fps", 0.0), 1),
        }
