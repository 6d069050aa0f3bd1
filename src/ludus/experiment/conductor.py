"""The conductor: after every update it reports, evaluates, checkpoints, and decides whether the run is over."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.actor.evaluate import Score
from ludus.actor.sampler import Sampler
from ludus.config import ExperimentConfig, StopConfig
from ludus.experiment import checkpoint
from ludus.metrics import Sink
from ludus.model.pool import LocalPool
from ludus.store.store import Store
from ludus.training.trainer import Progress, Trainer

log = logging.getLogger(__name__)

Evaluate = Callable[[int], Score]
"""Plays the evaluation episodes of one iteration."""


@dataclass(frozen=True)
class Schedule:
    """When things happen, in iterations; 0 = not by count."""

    stop: StopConfig
    checkpoint_freq: int
    keep: int | None
    evaluation_interval: int
    report_every_s: float = 0.0


def reached(stop: StopConfig, progress: Progress) -> str | None:
    """The key of the first stop condition that holds."""
    mean = progress.episode_return_mean
    if stop.episode_return_mean is not None and not math.isnan(mean) and mean >= stop.episode_return_mean:
        return "episode_return_mean"
    if stop.timesteps is not None and progress.timesteps >= stop.timesteps:
        return "timesteps"
    if stop.iterations is not None and progress.iterations >= stop.iterations:
        return "iterations"
    if stop.time_s is not None and progress.time_s >= stop.time_s:
        return "time_s"
    return None


class Conductor:
    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        pool: LocalPool,
        store: Store,
        schedule: Schedule,
        sinks: Sequence[Sink],
        config: ExperimentConfig,
        evaluate: Evaluate | None,
    ) -> None:
        self._trainer, self._sampler, self._pool, self._store = trainer, sampler, pool, store
        self._schedule, self._sinks, self._evaluate = schedule, sinks, evaluate
        self._config = config
        self._seen = trainer.progress.iterations
        self._reported_at = -math.inf
        self._evaluated: tuple[int, float] | None = None  # (iteration, score)
        self.stopped_by: str | None = None
        self.last_checkpoint: str | None = None
        self._checkpointed = -1

    def step(self) -> bool:
        progress = self._trainer.progress
        if progress.iterations == self._seen:
            return False
        self._seen = progress.iterations
        self.stopped_by = self.stopped_by or reached(self._schedule.stop, progress)
        at_end = self.stopped_by is not None and self._config.checkpoint_at_end
        freq, every = self._schedule.checkpoint_freq, self._schedule.evaluation_interval
        due = at_end or bool(freq and progress.iterations % freq == 0)
        if progress.iterations % every == 0 if every else due:
            self._score()
        if self.stopped_by or progress.time_s - self._reported_at >= self._schedule.report_every_s:
            self._reported_at = progress.time_s
            for sink in self._sinks:
                sink.write(self._trainer.metrics)
        if due:  # after the report: whatever a checkpoint holds has been reported, even if we are killed in between
            self.checkpoint()
        return True

    def checkpoint(self) -> str:
        """Evaluate if that belongs to it, store everything, keep the best, drop what is too old."""
        progress = self._trainer.progress
        if self._checkpointed == progress.iterations and self.last_checkpoint:
            return self.last_checkpoint
        if self._schedule.evaluation_interval == 0:
            self._score()
        versions = {name: self._pool.keep(name) for name in self._trainer.algorithms}
        score = self._evaluated[1] if self._evaluated and self._evaluated[0] == progress.iterations else None
        state = {"progress": progress.to_json(), "config": _plain(self._config), "evaluation": score}
        name = checkpoint.write(
            self._store, progress.iterations, self._trainer.algorithms, versions, self._sampler.state(), state
        )
        self.last_checkpoint, self._checkpointed = name, progress.iterations
        self._judge(name, score)
        for gone in checkpoint.retain(self._store, self._schedule.keep, name).values():
            for model, version in gone.items():
                self._pool.forget(model, version)
        log.info("checkpoint %s at %d timesteps", name, progress.timesteps)
        return name

    def _judge(self, name: str, evaluated: float | None) -> None:
        score, by = evaluated, "evaluation"
        if self._evaluate is None:
            score, by = self._trainer.progress.episode_return_mean, "training"
        if score is not None and not math.isnan(score) and score >= checkpoint.best_score(self._store):
            checkpoint.mark_best(self._store, name, score, by)

    def _score(self) -> None:
        if self._evaluate is None or (self._evaluated and self._evaluated[0] == self._trainer.progress.iterations):
            return
        score = self._evaluate(self._trainer.progress.iterations)
        if score.returns:
            self._evaluated = (self._trainer.progress.iterations, score.mean)
            self._trainer.metrics |= {
                "evaluation/return_mean": score.mean,
                "evaluation/return_min": min(score.returns),
                "evaluation/return_max": max(score.returns),
                "evaluation/length_mean": sum(score.lengths) / len(score.lengths),
                "evaluation/episodes": len(score.returns),
            }

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _plain(config: ExperimentConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=False, exclude_none=False)
