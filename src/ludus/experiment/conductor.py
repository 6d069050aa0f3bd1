"""The conductor: after every update it reports, evaluates, checkpoints, and decides whether the run is over."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ludus.actor.evaluate import Score
from ludus.config import ExperimentConfig, StopConfig
from ludus.errors import LudusError
from ludus.experiment import checkpoint
from ludus.metrics import Numbers, Sink
from ludus.model.pool import LocalPool
from ludus.store.store import Store
from ludus.training.trainer import Progress, Trainer
from ludus.tree import Array

log = logging.getLogger(__name__)

SOON_S = 30.0
"""A learner that replaces a dead one checkpoints after this time, then after twice as much, up to the time of the schedule."""

Evaluate = Callable[[int], Score]
"""Plays the evaluation episodes of one iteration."""


class Experience(Protocol):
    """Whoever plays: a sampler of environments, or games that call us."""

    def state(self) -> dict[str, Array]:
        """What a resumed run needs of it."""
        ...

    def load_state(self, state: dict[str, Array]) -> None: ...

    def metrics(self) -> Numbers: ...


@dataclass(frozen=True)
class Schedule:
    """When things happen, in iterations; 0 = not by count."""

    stop: StopConfig
    checkpoint_freq: int
    keep: int | None
    evaluation_interval: int
    report_every_s: float = 0.0
    checkpoint_time_s: float = 0.0


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
        source: Experience,
        pool: LocalPool,
        store: Store,
        schedule: Schedule,
        sinks: Sequence[Sink],
        config: ExperimentConfig,
        evaluate: Evaluate | None,
        always: Numbers | None = None,
    ) -> None:
        """`always`: numbers that are part of every report."""
        self._always = dict(always or {})
        self._trainer, self._source, self._pool, self._store = trainer, source, pool, store
        self._schedule, self._sinks, self._evaluate = schedule, sinks, evaluate
        self._config = config
        self._seen = trainer.progress.iterations
        self._reported_at = -math.inf
        self._checkpointed = -1
        self._checkpointed_at = trainer.progress.time_s
        self._soon_s = math.inf
        self._reported: dict[str, float] = {}
        self.stopped_by: str | None = None
        self.last_checkpoint: str | None = None

    def hurry(self) -> None:
        """Deaths may come more often than checkpoints by time: let the first ones come soon, or the run never gets on."""
        self._soon_s = SOON_S

    def numbers(self) -> dict[str, float]:
        """The newest of every number: those of the last update, and what else was in the last report. From any thread."""
        return {**self._reported, **self._trainer.metrics}

    def step(self) -> bool:
        """Report, then checkpoint, then evaluate: a kill in between loses neither what was learned nor what was said of it."""
        progress = self._trainer.progress
        if progress.iterations == self._seen:
            return self._out_of_time()
        self._seen = progress.iterations
        self.stopped_by = self.stopped_by or reached(self._schedule.stop, progress)
        if self.stopped_by or progress.time_s - self._reported_at >= self._schedule.report_every_s:
            self._reported_at = progress.time_s
            self._trainer.metrics |= {**self._source.metrics(), **self._always}
            self._reported = dict(self._trainer.metrics)
            self._report(self._reported)
        due = self._checkpoint_is_due(progress)
        if due:
            self.checkpoint()
        every = self._schedule.evaluation_interval
        if due or (every and progress.iterations % every == 0):
            self._score()
        return True

    def _out_of_time(self) -> bool:
        """Games may stay away; the clock does not."""
        limit = self._schedule.stop.time_s
        if self.stopped_by is not None or limit is None or self._trainer.elapsed_s < limit:
            return False
        self.stopped_by = "time_s"
        if self._config.checkpoint_at_end:
            self.checkpoint()
        return True

    def _checkpoint_is_due(self, progress: Progress) -> bool:
        if self.stopped_by is not None:
            return self._config.checkpoint_at_end
        freq, seconds = self._schedule.checkpoint_freq, self._schedule.checkpoint_time_s
        by_time = bool(seconds) and progress.time_s - self._checkpointed_at >= min(seconds, self._soon_s)
        return by_time or bool(freq and progress.iterations % freq == 0)

    def _report(self, numbers: Numbers) -> None:
        for sink in self._sinks:
            sink.write(numbers)

    def checkpoint(self) -> str:
        """Store everything as it is now (once per iteration), and drop what is too old."""
        progress = self._trainer.progress
        if self._checkpointed == progress.iterations and self.last_checkpoint:
            return self.last_checkpoint
        versions = {name: self._pool.keep(name) for name in self._trainer.algorithms}
        state = {"progress": progress.to_json(), "config": _plain(self._config)}
        name = checkpoint.write(self._store, progress.iterations, self._trainer.algorithms, versions, self._source.state(), state)
        self.last_checkpoint, self._checkpointed = name, progress.iterations
        self._checkpointed_at = progress.time_s
        self._soon_s *= 2
        if self._evaluate is None:
            self._judge(progress.episode_return_mean, "training")
        for gone in checkpoint.retain(self._store, self._schedule.keep, name).values():
            for model, version in gone.items():
                self._pool.forget(model, version)
        log.info("checkpoint %s at %d timesteps", name, progress.timesteps)
        return name

    def _judge(self, score: float, by: str) -> None:
        """The best so far is kept, whether a checkpoint was due or not."""
        if not math.isnan(score) and score >= checkpoint.best_score(self._store):
            checkpoint.mark_best(self._store, self.checkpoint(), score, by)

    def _score(self) -> None:
        if self._evaluate is None:
            return
        progress = self._trainer.progress
        score = self._evaluate(progress.iterations)
        if not score.complete or not score.returns:
            log.warning("an evaluation was not finished: %d episodes ended", len(score.returns))
            return
        numbers = {
            "evaluation/return_mean": score.mean,
            "evaluation/return_min": min(score.returns),
            "evaluation/return_max": max(score.returns),
            "evaluation/length_mean": sum(score.lengths) / len(score.lengths),
            "evaluation/episodes": len(score.returns),
        }
        self._trainer.metrics |= numbers
        self._report({"timesteps": progress.timesteps, "iterations": progress.iterations, **numbers})
        self._judge(score.mean, "evaluation")

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except LudusError:  # a full disk; the other sinks are closed all the same
                log.exception("closing %s failed", type(sink).__name__)


def _plain(config: ExperimentConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=False, exclude_none=False)
