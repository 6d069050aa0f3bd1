"""The components of a run, and the steps of their assembly that all training modes share."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ludus.algorithms.trainer import Trainer
from ludus.config.schema import AlgorithmConfig
from ludus.core.metrics import Sink
from ludus.experiments.assembly.policies import threads_of
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
from ludus.experiments.runs import checkpoint, tracking
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.transport.base import SegmentReader
from ludus.transport.message_stream import EMBEDDED

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
    def resumed(self) -> Checkpoint | None:
        """The checkpoint of this run that it continues from."""
        return self.before if self.counting_on else None

    @property
    def timesteps(self) -> int:
        """Timesteps of earlier parts of the run."""
        return 0 if self.resumed is None else int(self.resumed.state["progress"]["timesteps"])


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
        close = getattr(component, "close", None)
        if close is not None:
            self.callback(_close, close, type(component).__name__)
        return component


def _close(close: Callable[[], None], name: str) -> None:
    try:
        close()
    except Exception:  # may be code of the user's environment; the other components must be closed all the same
        log.exception("closing %s failed", name)


@dataclass(frozen=True)
class TrainingComponents:
    """A run that is assembled: `controller.run` trains it."""

    run: Run
    pool: LocalVersionStore
    source: ExperienceSource
    trainer: Trainer
    controller: RunController


def open_run(prepared: PreparedRun, policy: Policy) -> Run:
    run = prepared.open_run()
    run.start_log()
    run.write_meta(threads_of(policy, prepared.resolved.config))
    return run


def make_pool(run: Run, policies: Mapping[str, Policy], prepared: PreparedRun, stack: ComponentStack) -> LocalVersionStore:
    """Claim the models of the run: from here on it is written only while this process owns it."""
    began = checkpoint.resume_origin(run.store, prepared.resumed)
    pool = LocalVersionStore(
        run.store, {checkpoint.BEGUN_FROM: began}, functools.partial(checkpoint.check_newest, run.store, began)
    )
    run.guard = pool.check
    stack.own(pool)
    before = prepared.before
    for name, policy in policies.items():
        pool.add(name, policy, above=before.state["models"][name]["version"] if before else 0)
    return pool


def whole_episodes(blocks: SegmentReader, config: AlgorithmConfig) -> SegmentReader:
    """The blocks, or complete episodes made of them, as `batch_mode` sets."""
    if config.batch_mode == "truncate_episodes":
        return blocks
    from ludus.buffers.complete_episodes import CompleteEpisodes

    return CompleteEpisodes(blocks, config.train_batch_size)


def restore_counters(prepared: PreparedRun, trainer: Trainer, source: ExperienceSource) -> None:
    """Continue the counters and random numbers of a resumed run."""
    if prepared.resumed is not None:
        trainer.load_progress(prepared.resumed.state["progress"])
        source.load_state(prepared.resumed.sampler)


def make_controller(
    prepared: PreparedRun,
    run: Run,
    pool: LocalVersionStore,
    source: ExperienceSource,
    trainer: Trainer,
    evaluate: Evaluate | BackgroundEvaluation | None,
    sinks: Sequence[Sink],
) -> RunController:
    """Make what follows every update. Confirms that this process owns the run, and only then writes to its directory."""
    resolved = prepared.resolved
    e, config = resolved.experiment, resolved.config
    incarnation = pool.incarnation(pool.names()[0])
    if incarnation > 1:
        pool.confirm()  # another trainer may have been writing until now
        run.sweep()
    run.commit_resume()
    all_sinks = [*tracking.sinks_of(run, e, incarnation), *sinks]
    restarts = run.meta().get("learner_restarts")
    reporter = MetricsReporter(
        all_sinks, config.report_every_s, {} if restarts is None else {"learner/restarts": float(restarts)}
    )
    checkpointer = Checkpointer(
        trainer,
        source,
        pool,
        run.store,
        CheckpointSchedule(e.checkpoint_freq, e.checkpoint_time_s, e.checkpoint_at_end, e.keep_checkpoints_num),
        e.model_dump(mode="json", by_alias=False, exclude_none=False),
        on_written=functools.partial(notify_checkpoint, all_sinks),
        judge_by_training=evaluate is None,
    )
    every = 0 if config.evaluation_interval == "checkpoint" else config.evaluation_interval
    interval = EvaluationInterval(every, config.evaluation_interval_unit)
    return RunController(
        trainer,
        source,
        pool,
        reporter,
        checkpointer,
        EvaluationSchedule(evaluate, interval, trainer, checkpointer, reporter),
        StopConditions(e.stop, config.least_iteration, start_timeout(resolved)),
    )


def start_timeout(resolved: ResolvedExperiment) -> float | None:
    """Seconds within which the first step has to be sampled; None: no limit.

    Games and workers of a fleet start on their own, possibly much later: unless it is set, their limit is `time_s`.
    """
    config, e = resolved.config, resolved.experiment
    if config.start_timeout_s is not None:
        return config.start_timeout_s or None
    return e.stop.time_s if resolved.is_external or e.memory != EMBEDDED else START_TIMEOUT_S
