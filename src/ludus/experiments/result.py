"""What a training leaves in the caller's hands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.experiments.runs.history import HistoryLike, read_history
from ludus.experiments.runs.remote_runs import display_path
from ludus.experiments.runs.run_agent import RunAgent
from ludus.experiments.runs.run_dir import Run


@dataclass(frozen=True)
class Result:
    """What a finished (or interrupted) training leaves in your hands."""

    run_dir: Path
    """Of a run on a store: where it is worked on here; whatever takes a run takes it as well. `place` says where the run is."""
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
        """The reports of the run, a row each: a pandas.DataFrame where pandas is installed. Read from metrics.jsonl every time."""
        return read_history(Run(self.run_dir).metrics_path)

    def remarks(self) -> list[str]:
        """What a reader of the summary should know beside the figures: sentences, possibly none."""
        said = []
        unlearned = int(self.metrics.get("unlearned_steps", 0))
        if not self.metrics.get("iterations"):
            said.append(f"No update was made: {unlearned:,} steps were sampled, less than a batch (train_batch_size).")
        elif unlearned:
            said.append(f"{unlearned:,} steps of an unfinished batch were discarded.")
        if self.metrics.get("evaluation/unfinished"):
            said.append("The last evaluation was not finished when the run stopped; its episodes are not counted.")
        return said

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
