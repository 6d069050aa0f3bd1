"""What a training leaves in the caller's hands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.actor.trained import TrainedAgent


@dataclass(frozen=True)
class Result:
    """What a finished (or interrupted) training leaves in your hands."""

    run_dir: Path
    checkpoint: Path | None
    stopped_by: str
    metrics: dict[str, float]
    agent: TrainedAgent
    env: str = ""

    @property
    def episode_return_mean(self) -> float:
        return self.metrics.get("episode_return_mean", math.nan)

    def to_json(self) -> dict[str, Any]:
        mean = self.episode_return_mean
        return {
            "run_dir": str(self.run_dir),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "stopped_by": self.stopped_by,
            "timesteps": int(self.metrics.get("timesteps", 0)),
            "iterations": int(self.metrics.get("iterations", 0)),
            "episode_return_mean": None if math.isnan(mean) else mean,
            "time_s": round(self.metrics.get("time_s", 0.0), 3),
            "fps": round(self.metrics.get("fps", 0.0), 1),
        }
