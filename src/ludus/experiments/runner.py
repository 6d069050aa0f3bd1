"""Starts and resumes runs: resolve the experiment, prepare its run, and train it, here or in a supervised learner process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludus.algorithms.trainer import Progress
from ludus.config.problem import ConfigErrors
from ludus.config.search_values import has_search
from ludus.config.validation import parse_external_config
from ludus.core import renamed
from ludus.core.metrics import Sink, read_jsonl
from ludus.envs.wrappers import wrapper_names
from ludus.errors import Damaged, IncompatibleCheckpoint, NotFound, StoreUnavailable, UsageError
from ludus.experiments.assembly.components import PreparedRun
from ludus.experiments.assembly.learners import has_remote_learners
from ludus.experiments.control.callbacks import announce_stop
from ludus.experiments.control.stopping import reached_condition
from ludus.experiments.resolve import (
    Announce,
    ClusterOptions,
    ResolvedExperiment,
    iteration_keys,
    iteration_notice,
    job_nodes,
    resolve,
    resolve_parsed,
)
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint, tracking
from ludus.experiments.runs.checkpoint import Checkpoint, Overtaken
from ludus.experiments.runs.remote_runs import directory_of, display_path
from ludus.experiments.runs.run_agent import RunAgent
from ludus.experiments.runs.run_dir import Run, holds_run, run_directory
from ludus.experiments.training import prepare_new_run, prepare_resumed_run, train_in_process
from ludus.experiments.validation import validate
from ludus.experiments.validation.validate import ParsedExperiment

if TYPE_CHECKING:
    from ludus.distributed.code_bundle import CodeBundle

log = logging.getLogger(__name__)

_OVERTAKEN_AT_MOST = 3


def train(
    data: Mapping[str, Any],
    *,
    local_dir: str | Path = "runs",
    project: str | Path | None = None,
    trial: str | None = None,
    place: str | Path | None = None,
    restore: str | Path | None = None,
    sinks: Sequence[Sink] = (),
    announce: Announce | None = None,
    supervised: bool | None = None,
    cluster: ClusterOptions | None = None,
    on_directory: Callable[[Path], None] | None = None,
) -> Result:
    """Train a new run. `restore`: a checkpoint whose weights and optimizer state it starts with, counting from 0.

    Directories may be paths or URLs of a store. `place`: the directory of the run itself, in place of one below `local_dir`.
    `supervised`: train in a learner process that is restarted when it dies; None: if the run has other processes anyway.
    `on_directory` is called with the directory of the run before it is created. Raises UsageError before anything starts.
    """
    parsed = ParsedExperiment(data)
    notices = validate.find_notices(data) if has_search(data) else validate.find_parsed_notices(parsed)
    if idle := validate.keys_without_effect(parsed):
        raise ConfigErrors(idle)
    if parsed.wants_auto_workers:
        from ludus.experiments.assembly.auto_workers import choose_num_workers

        parsed = choose_num_workers(parsed, announce, cluster)
    resolved = resolve_parsed(parsed, cluster)
    e = resolved.experiment
    for notice in notices:
        log.warning("%s", notice) if announce is None else announce(notice)
    _check_tracking(resolved, announce)
    if announce is not None:
        _announce_iterations(resolved, announce)
        _announce_idle_nodes(resolved, announce)
    announce_stop(sinks, e.stop)
    before = _load_restored(restore, resolved)
    directory = run_directory(e.name, e.run, e.env, local_dir, project, trial) if place is None else directory_of(place)
    Run.check_free(directory)
    if on_directory is not None:
        on_directory(directory)
    if needs_supervisor(resolved) if supervised is None else supervised:
        return _supervise(resolved, LearnerTask(directory, dict(parsed.data), restore, None, cluster), sinks, announce)
    return train_in_process(prepare_new_run(resolved, directory, before), sinks, announce)


def resume(
    where: str | Path,
    *,
    stop: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    sinks: Sequence[Sink] = (),
    announce: Announce | None = None,
    supervised: bool | None = None,
    cluster: ClusterOptions | None = None,
    restore: str | Path | None = None,
    again: bool = False,
) -> Result:
    """Continue a run that was stopped or killed, in its own directory (a path or URL), from its newest complete checkpoint.

    A run without a checkpoint starts again, from the weights of `restore` if it was to start with them. `changes`: keys of the
    experiment that get new values; `stop` is one of them. `supervised` as in `train`. `again`: a run that has reached its end is
    returned as it is; otherwise that is an error.
    """
    directory = directory_of(where)
    changes = {**(changes or {}), **({"stop": dict(stop)} if stop else {})}
    run = Run.open(directory)
    resolved = _resolve_run(run, changes, cluster)
    _check_tracking(resolved, announce)
    announce_stop(sinks, resolved.experiment.stop)
    if again and (result := _finished_result(run, resolved)) is not None:
        return result
    if needs_supervisor(resolved) if supervised is None else supervised:
        return _supervise(resolved, LearnerTask(directory, None, restore, changes, cluster), sinks, announce)
    return resume_in_process(directory, changes, restore, sinks, announce, cluster)


def is_over(directory: Path, changes: Mapping[str, Any], cluster: ClusterOptions | None = None) -> bool:
    """Whether a run, with these keys changed, has already reached a stop condition."""
    run = Run.open(directory)
    before = _newest_checkpoint(run)
    return before is not None and _reached_by(before, _resolve_run(run, changes, cluster)) is not None


# -- announcements ------------------------------------------------------------------------------------------------------


def _check_tracking(resolved: ResolvedExperiment, announce: Announce | None) -> None:
    """Raises MissingExtra, ConfigError: in the caller's process, before any other starts."""
    tracking.check_tracking(resolved.experiment.track)
    if announce is not None:
        for notice in tracking.tracking_notices(resolved.experiment.track):
            announce(notice)


def _announce_iterations(resolved: ResolvedExperiment, announce: Announce) -> None:
    e = resolved.experiment
    keys = iteration_keys(e.model_dump(include={"stop", "checkpoint_freq"}), e.config)
    notice = iteration_notice(e.run, resolved.config, keys)
    if notice is not None:
        announce(notice)


def _announce_idle_nodes(resolved: ResolvedExperiment, announce: Announce) -> None:
    nodes = job_nodes()
    if nodes > 1 and not resolved.config.workers:
        announce(
            f"this run has no workers: the other {nodes - 1} of the job's {nodes} nodes have nothing to sample; set --num-workers"
        )


# -- resuming -----------------------------------------------------------------------------------------------------------


def resume_in_process(
    directory: Path,
    changes: Mapping[str, Any] | None,
    restore: str | Path | None,
    sinks: Sequence[Sink],
    announce: Announce | None,
    cluster: ClusterOptions | None,
    *,
    again: bool = False,
) -> Result:
    """As `resume`, in this process. Starts over when another trainer stores a newer checkpoint meanwhile."""
    for left in range(_OVERTAKEN_AT_MOST, -1, -1):
        run = Run.open(directory)
        resolved = _resolve_run(run, changes, cluster)
        checkpoint.refresh_listing(run.store)
        before = _newest_checkpoint(run)
        condition = None if before is None else _reached_by(before, resolved)
        if before is not None and condition is not None:
            if again:
                return _result_of(run, resolved, before, condition)
            raise UsageError(
                f"This run has already reached its stop ({condition}) at {int(before.state['progress']['timesteps']):,} timesteps.",
                "Give it another one: --resume DIR --stop timesteps=…",
            )
        if before is None:
            prepared = _prepare_restart(run, resolved, restore)
        else:
            log.warning("resuming %s from checkpoint %s; environments start anew", display_path(directory), before.name)
            prepared = prepare_resumed_run(resolved, run, before)
        try:
            return train_in_process(prepared, sinks, announce)
        except Overtaken as error:
            if not left:
                raise
            log.warning("%s It is resumed from there.", error.message)
    raise AssertionError("the last attempt returns or raises")


def _prepare_restart(run: Run, resolved: ResolvedExperiment, restore: str | Path | None) -> PreparedRun:
    """A run that was killed before its first checkpoint starts again. Raises Damaged if its checkpoints cannot be read."""
    if checkpoint.active_names(run.store):
        raise Damaged(
            f"{display_path(run.directory)} has checkpoints, and none of them can be read.",
            "Starting again would bury them: look at them first.",
        )
    log.warning("%s has no checkpoint yet; it starts again", display_path(run.directory))
    return replace(prepare_resumed_run(resolved, run, None), before=_load_restored(restore, resolved))


def _newest_checkpoint(run: Run) -> Checkpoint | None:
    try:
        return checkpoint.newest(run.store)
    except NotFound:
        return None


def _resolve_run(run: Run, changes: Mapping[str, Any] | None, cluster: ClusterOptions | None) -> ResolvedExperiment:
    return resolve({**run.config(), **(changes or {})}, cluster)


def _load_restored(restore: str | Path | None, resolved: ResolvedExperiment) -> Checkpoint | None:
    """Return the checkpoint to start from. Raises IncompatibleCheckpoint if its environment differs."""
    if not restore:
        return None
    before = checkpoint.open_checkpoint(restore)[1]
    env = renamed.current_name(before.state["config"]["env"])
    if env != resolved.experiment.env:
        raise IncompatibleCheckpoint(
            f"Checkpoint {before.name} was trained on {env}, not on {resolved.experiment.env}.", "Name the same environment."
        )
    return before


def _reached_by(before: Checkpoint, resolved: ResolvedExperiment) -> str | None:
    """The stop condition that held when the checkpoint was written."""
    models = list(before.state["progress"].get("returns_of") or ())
    progress = Progress.with_window(resolved.config.metrics_num_episodes_for_smoothing, models)
    progress.load_json(before.state["progress"])
    return reached_condition(resolved.experiment.stop, progress)


def _finished_result(run: Run, resolved: ResolvedExperiment) -> Result | None:
    """The result of a run whose newest checkpoint is its last; None: it is not finished."""
    before = _newest_checkpoint(run)
    condition = None if before is None else _reached_by(before, resolved)
    return None if before is None or condition is None else _result_of(run, resolved, before, condition)


def _result_of(run: Run, resolved: ResolvedExperiment, before: Checkpoint, stopped_by: str) -> Result:
    """The result of a run whose last learner died after the last checkpoint, before it could report."""
    model = next(iter(before.weights))
    rows = read_jsonl(run.metrics_path)
    metrics = {name: float(value) for name, value in (rows[-1] if rows else {}).items() if isinstance(value, (int, float))}
    run.status = "finished"
    run.close()
    version = int(before.state["models"][model]["version"])
    agent = RunAgent(before.policy(model), resolved.config.seed, version, run_dir=run.directory, model=model)
    where = run.directory / checkpoint.FOLDER / before.name
    return Result(run.directory, where, stopped_by, metrics, agent, resolved.experiment.env)


# -- in a learner process -----------------------------------------------------------------------------------------------


def needs_supervisor(resolved: ResolvedExperiment) -> bool:
    """Whether the run has other processes, so that its learner may as well be one that is restarted when it dies."""
    config = resolved.config
    if resolved.is_external and not parse_external_config(config.env_config).port:
        return False  # any free port: games would not find the next learner
    return config.workers > 0 or config.learners > 1 or has_remote_learners()


def code_bundle_of(resolved: ResolvedExperiment) -> CodeBundle:
    """What another process needs so that the names of this experiment mean the same there."""
    from ludus.distributed.code_bundle import CodeBundle

    return CodeBundle.of(*code_names(resolved), models=[resolved.config.model.custom_model])


def code_names(resolved: ResolvedExperiment) -> tuple[str, ...]:
    """Names in an experiment that may name code, without its custom model."""
    return resolved.experiment.env, resolved.experiment.run, *wrapper_names(resolved.config.wrappers)


@dataclass(frozen=True)
class LearnerTask:
    """The training of one run as a learner process does it: from the start, or from where the last learner left the run."""

    directory: Path
    data: dict[str, Any] | None
    """The experiment; None: that of the existing run."""
    restore: str | Path | None
    changes: Mapping[str, Any] | None
    cluster: ClusterOptions | None

    def __call__(self, *, sinks: Sequence[Sink], announce: Announce | None, again: bool, set_up: bool) -> Result:
        """`again`: this is not the first learner. `set_up`: the run directory has been created."""
        exists = again and holds_run(self.directory)
        if again and set_up and not exists:  # starting anew below an empty mount point would make another run of that name
            raise StoreUnavailable(
                f"{display_path(self.directory)} does not hold the run any more.",
                "Check that the file system is mounted and the run was not deleted.",
            )
        if self.data is None or exists:
            given = (self.directory, self.changes, self.restore, sinks, announce, self.cluster)
            return resume_in_process(*given, again=again)
        resolved = resolve(self.data, self.cluster)
        before = _load_restored(self.restore, resolved)
        return train_in_process(prepare_new_run(resolved, self.directory, before), sinks, announce)


def _supervise(resolved: ResolvedExperiment, task: LearnerTask, sinks: Sequence[Sink], announce: Announce | None) -> Result:
    from ludus.experiments.control.learner_supervisor import LearnerSupervisor

    bundle = code_bundle_of(resolved)
    bundle.check_can_be_sent()
    supervisor = LearnerSupervisor(
        task.directory, task, bundle,
        max_failures=resolved.experiment.max_failures, seed=resolved.config.seed, sinks=sinks, announce=announce,
    )  # fmt: skip
    return supervisor.run()
