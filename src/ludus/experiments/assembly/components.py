"""The components of a run, and the steps of their assembly that all training modes share."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ludus.algorithms.base import Algorithm
from ludus.algorithms.trainer import Trainer
from ludus.config.schema import EMBEDDED, AlgorithmConfig
from ludus.core.metrics import Sink
from ludus.experiments.control.callbacks import notify_checkpoint
from ludus.experiments.control.checkpointer import Checkpointer, CheckpointSchedule
from ludus.experiments.control.evaluation_schedule import (
    BackgroundEvaluation,
    Evaluate,
    EvaluationInterval,
    EvaluationSchedule,
)
from ludus.experiments.control.experience_source import ExperienceSource
from ludus.experiments.control.metrics_reporter import MetricsReporter
from ludus.experiments.control.run_controller import RunController
from ludus.experiments.control.stopping import StopConditions
from ludus.experiments.resolve import Announce, ResolvedExperiment
from ludus.experiments.runs import tracking
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.models.weights.version_store import LocalVersionStore
from ludus.transport.base import SegmentReader

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Default of `start_timeout_s` where the run starts its workers itself."""

Component = TypeVar("Component")


@dataclass(frozen=True)
class PreparedRun:
    """What a run is assembled from."""

    resolved: ResolvedExperiment
    open_run: Callable[[], Run]
    """Creates or reopens the run directory. Called after everything that may fail to fit together was made."""
    before: Checkpoint | None
    """Weights and optimizer state to start with."""
    environment_seed: int
    counting_on: bool = False
    """Counters and random numbers continue from `before` as well."""

    @property
    def resumed_checkpoint(self) -> Checkpoint | None:
        """The checkpoint of this run that it continues from."""
        return self.before if self.counting_on else None

    @property
    def timesteps(self) -> int:
        """Timesteps of earlier parts of the run."""
        return 0 if self.resumed_checkpoint is None else int(self.resumed_checkpoint.state["progress"]["timesteps"])


@dataclass(frozen=True)
class RunHooks:
    """How the caller follows and interrupts a run."""

    sinks: Sequence[Sink] = ()
    announce: Announce | None = None
    interrupted: Callable[[], bool] = lambda: False


class ComponentStack(contextlib.ExitStack):
    """Closes the components of a run in reverse order of their making."""

    def own(self, component: Component) -> Component:
        """Close the component with this stack, if it can be closed."""

        def close() -> None:
            try:
                component.close()  # type: ignore[attr-defined]
            except Exception:  # may be code of the user's environment; the other components must be closed all the same
                log.exception("closing %s failed", type(component).__name__)

        if hasattr(component, "close"):
            self.callback(close)
        return component


@dataclass(frozen=True)
class LearningRun:
    """An open run that this process owns, with the algorithms that learn its models: `learners.open_learning_run`."""

    run: Run
    algorithms: Mapping[str, Algorithm]
    pool: LocalVersionStore


@dataclass(frozen=True)
class TrainingComponents:
    """A run that is assembled: `controller.run` trains it."""

    run: Run
    pool: LocalVersionStore
    source: ExperienceSource
    trainer: Trainer
    controller: RunController


def whole_episodes(blocks: SegmentReader, config: AlgorithmConfig) -> SegmentReader:
    """The blocks, or complete episodes made of them, as `batch_mode` sets."""
    if config.batch_mode == "truncate_episodes":
        return blocks
    from ludus.buffers.complete_episodes import CompleteEpisodes

    return CompleteEpisodes(blocks, config.train_batch_size)


def add_controller(
    prepared: PreparedRun,
    hooks: RunHooks,
    stack: ComponentStack,
    learning: LearningRun,
    source: ExperienceSource,
    trainer: Trainer,
    evaluate: Evaluate | BackgroundEvaluation | None = None,
) -> TrainingComponents:
    """Continue the counters of a resumed run, and make what follows every update, the last components of a run.

    Confirms that this process owns the run, and only then writes to its directory.
    """
    stack.own(evaluate)
    resolved, run, pool = prepared.resolved, learning.run, learning.pool
    e, config = resolved.experiment, resolved.config
    if prepared.resumed_checkpoint is not None:
        trainer.load_progress(prepared.resumed_checkpoint.state["progress"])
        source.load_state(prepared.resumed_checkpoint.sampler)
    incarnation = pool.incarnation(pool.names()[0])
    if incarnation > 1:
        pool.confirm()  # another trainer may have been writing until now
        run.sweep()
    run.commit_resume()
    sinks = [*tracking.sinks_of(run, e, incarnation), *hooks.sinks]
    restarts = run.meta().get("learner_restarts")
    reporter = MetricsReporter(sinks, config.report_every_s, {} if restarts is None else {"learner/restarts": float(restarts)})
    checkpointer = Checkpointer(
        trainer,
        source,
        pool,
        run.store,
        CheckpointSchedule(e.checkpoint_freq, e.checkpoint_time_s, e.checkpoint_at_end, e.keep_checkpoints_num),
        e.model_dump(mode="json", by_alias=False, exclude_none=False),
        on_written=functools.partial(notify_checkpoint, sinks),
        judge_by_training=evaluate is None,
    )
    every = 0 if config.evaluation_interval == "checkpoint" else config.evaluation_interval
    interval = EvaluationInterval(every, config.evaluation_interval_unit)
    controller = RunController(
        trainer,
        source,
        pool,
        reporter,
        checkpointer,
        EvaluationSchedule(evaluate, interval, trainer, checkpointer, reporter),
        StopConditions(e.stop, config.least_iteration, start_timeout(resolved)),
    )
    return TrainingComponents(run, pool, source, trainer, stack.own(controller))


def start_timeout(resolved: ResolvedExperiment) -> float | None:
    """Seconds within which the first step has to be sampled; None: no limit.

    Games and workers of a fleet start on their own, possibly much later: unless it is set, their limit is `time_s`.
    """
    config, e = resolved.config, resolved.experiment
    if config.start_timeout_s is not None:
        return config.start_timeout_s or None
    return e.stop.time_s if resolved.is_external or e.memory != EMBEDDED else START_TIMEOUT_S
