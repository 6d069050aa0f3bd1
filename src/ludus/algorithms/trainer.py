"""The trainer: takes batches of segments from the memory, updates their model, publishes the new version."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ludus.algorithms.base import Algorithm
from ludus.algorithms.run_clock import RunClock
from ludus.core.statistics import ResultWindow, summarize_results
from ludus.core.types import Segments
from ludus.models.policy import Policy
from ludus.transport.base import SegmentReader


class Publisher(Protocol):
    def publish(self, name: str) -> int: ...
    def newest(self, name: str) -> tuple[Policy, int]: ...


@dataclass
class Progress:
    """Counters and recent returns of a run. All of it is saved in checkpoints."""

    timesteps: int = 0
    iterations: int = 0
    training_iteration: int = 0
    """Iterations as RLlib counts them: with a minimum number of steps and a minimum time."""
    iteration_began: tuple[int, float] = (0, 0.0)
    """Timesteps and time at the start of the current training iteration."""
    episodes: int = 0
    time_s: float = 0.0
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=100))
    returns_of: dict[str, deque[float]] = field(default_factory=dict)
    """By model, if there are several: in competitive games a mean over all models is meaningless."""
    results: dict[str, ResultWindow] = field(default_factory=dict)
    """Results of the last episodes, by name."""

    @classmethod
    def with_window(cls, episodes: int, models: Sequence[str] = ()) -> Progress:
        windows: dict[str, deque[float]] = {model: deque(maxlen=episodes) for model in models} if len(models) > 1 else {}
        return cls(recent_returns=deque(maxlen=episodes), recent_lengths=deque(maxlen=episodes), returns_of=windows)

    @property
    def episode_return_mean(self) -> float:
        """Mean return of the last episodes; NaN until the window is full. With several models: that of the worst one."""
        windows = list(self.returns_of.values()) or [self.recent_returns]
        full = all(len(window) == window.maxlen for window in windows)
        return min(float(np.mean(window)) for window in windows) if full else float("nan")

    def count_training_iteration(self, least_steps: int, least_s: float) -> None:
        """End the training iteration if it has had at least this many steps and seconds. Call after an update."""
        steps, began_s = self.iteration_began
        if self.timesteps - steps >= least_steps and self.time_s - began_s >= least_s:
            self.training_iteration += 1
            self.iteration_began = (self.timesteps, self.time_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "timesteps": self.timesteps,
            "iterations": self.iterations,
            "training_iteration": self.training_iteration,
            "iteration_began": list(self.iteration_began),
            "episodes": self.episodes,
            "time_s": self.time_s,
            "recent_returns": list(self.recent_returns),
            "recent_lengths": list(self.recent_lengths),
            "results": {name: [list(part) for part in window.parts] for name, window in self.results.items()},
            "returns_of": {model: list(window) for model, window in self.returns_of.items()},
        }

    def load_json(self, data: Mapping[str, Any]) -> None:
        self.timesteps, self.iterations = int(data["timesteps"]), int(data["iterations"])
        self.episodes, self.time_s = int(data["episodes"]), float(data["time_s"])
        self.training_iteration = int(data.get("training_iteration", 0))
        steps, began_s = data.get("iteration_began", (self.timesteps, self.time_s))
        self.iteration_began = int(steps), float(began_s)
        self.recent_returns.extend(map(float, data["recent_returns"]))
        self.recent_lengths.extend(map(int, data["recent_lengths"]))
        for model, window in self.returns_of.items():
            window.extend(map(float, data.get("returns_of", {}).get(model, [])))
        for name, parts in data.get("results", {}).items():
            for total, count in parts:
                self.add_result(name, float(total), float(count))

    def add_result(self, name: str, total: float, count: float) -> None:
        """Add the sum of a result over `count` episodes."""
        self.results.setdefault(name, ResultWindow(self.recent_returns.maxlen or 1)).add(total, count)


class Trainer:
    """Makes one update from one batch of segments per `step()`. Several models can be trained at the same time."""

    def __init__(
        self,
        algorithms: Mapping[str, Algorithm],
        memory: SegmentReader,
        pool: Publisher,
        *,
        smoothing: int = 100,
        by_model: bool = True,
        clock: RunClock | None = None,
    ) -> None:
        """`by_model`: attribute episodes to the model of their segment; otherwise to all models together (matches)."""
        self.algorithms = dict(algorithms)
        self._memory, self._pool = memory, pool
        self.clock = clock or RunClock()
        self.progress = Progress.with_window(smoothing, list(self.algorithms) if by_model else ())
        self.metrics: dict[str, float] = {}
        self._learn_s = 0.0

    def step(self) -> bool:
        """Learn from the oldest waiting batch; return False if there is none."""
        segments = self._memory.take(0)
        if segments is None:
            return False
        self.clock.start()
        started = self.clock.part_s
        algorithm = self.algorithms[segments.model]
        _, newest = self._pool.newest(segments.model)
        algorithm.version = newest
        metrics = algorithm.learn(segments, self.progress.timesteps) if segments.steps else {}  # its agents may have been absent
        self._count(segments)
        versions = segments.version[segments.valid]  # policy lag: age of the behaviour weights in updates
        lag = {"lag_mean": float(newest - versions.mean()), "lag_max": float(newest - versions.min())} if versions.size else {}
        self._memory.release(segments)
        version = self._pool.publish(segments.model)
        elapsed = self.clock.part_s
        self._learn_s += elapsed - started
        self.progress.time_s = self.clock.before_s + elapsed
        metrics |= {"lag_mean": 0.0, "lag_max": 0.0} | lag | {"version": float(version)}
        self.metrics = self._report(segments.model, metrics, elapsed)
        return True

    def load_progress(self, data: Mapping[str, Any]) -> None:
        """Continue the counters of a checkpoint."""
        self.progress.load_json(data)
        self.clock.before_s = self.progress.time_s

    def _count(self, segments: Segments) -> None:
        p = self.progress
        p.timesteps += segments.steps if segments.env_steps is None else segments.env_steps
        p.iterations += 1
        p.episodes += len(segments.episode_return)
        p.recent_returns.extend(segments.episode_return.tolist())
        p.recent_lengths.extend(segments.episode_length.tolist())
        if segments.model in p.returns_of:
            p.returns_of[segments.model].extend(segments.episode_return.tolist())
        for name, (total, count) in zip(segments.spec.results, segments.results.sum(axis=0).tolist(), strict=True):
            if count:
                p.add_result(name, total, count)

    def counts(self) -> dict[str, float]:
        """Counters of the run; available before the first update."""
        p = self.progress
        return {"timesteps": p.timesteps, "iterations": p.iterations, "episodes": p.episodes, "time_s": p.time_s}

    def _report(self, model: str, metrics: dict[str, float], elapsed: float) -> dict[str, float]:
        p = self.progress
        report = self.counts()
        if p.recent_returns:
            recent = np.fromiter(p.recent_returns, float)
            report |= {"episode_return_mean": float(recent.mean()), "episode_return_min": float(recent.min())}
            report |= {"episode_return_max": float(recent.max()), "episode_length_mean": float(np.mean(p.recent_lengths))}
        means = {name: float(np.mean(window)) for name, window in p.returns_of.items() if window}
        if means:
            report |= {f"{name}/episode_return_mean": mean for name, mean in means.items()}
            report["episode_return_mean"] = min(means.values())
        sums = {name: (window.total, window.count) for name, window in p.results.items()}
        report |= {f"match/{name}": value for name, value in summarize_results(sums).items()}
        report |= {
            "fps": p.timesteps / p.time_s if p.time_s else 0.0,
            "learner_share": self._learn_s / elapsed if elapsed else 0.0,
        }
        prefix = "" if len(self.algorithms) == 1 else f"{model}/"
        return report | {f"{prefix}learner/{name}": value for name, value in metrics.items()}
