"""One training in this process: prepare its run, choose its training mode and assemble it, advance it, and conclude it with a result.

A training mode is imported only when it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ludus.config.schema import EMBEDDED
from ludus.config.validation import parse_external_config
from ludus.core.metrics import Sink
from ludus.errors import EnvironmentFault, Interrupted, LudusError
from ludus.experiments.assembly.components import ComponentStack, PreparedRun, RunHooks, TrainingComponents
from ludus.experiments.assembly.learners import without_remote_learners
from ludus.experiments.control.callbacks import find_stop_request
from ludus.experiments.evaluation.gap_warning import gap_sinks
from ludus.experiments.resolve import Announce, ResolvedExperiment
from ludus.experiments.result import Result
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.remote_runs import fetch, is_remote
from ludus.experiments.runs.run_agent import RunAgent
from ludus.experiments.runs.run_dir import Run
from ludus.experiments.runs.run_status import StatusWriter, status_fields
from ludus.process import screen_choice
from ludus.process.host import keep_freed_memory
from ludus.process.signals import stop_on_signals

if TYPE_CHECKING:
    from ludus.experiments.runs.run_sync import RunSync

log = logging.getLogger(__name__)

_ANNOUNCE_EVERY_S = 10.0

Assemble = Callable[[PreparedRun, RunHooks, ComponentStack], TrainingComponents]


def prepare_new_run(resolved: ResolvedExperiment, directory: Path, before: Checkpoint | None = None) -> PreparedRun:
    """A new run. `before`: weights and optimizer state to start with; counters start at 0."""
    return PreparedRun(resolved, functools.partial(Run.create, directory, resolved.to_dict()), before, resolved.config.seed)


def prepare_resumed_run(resolved: ResolvedExperiment, run: Run, before: Checkpoint | None) -> PreparedRun:
    """An existing run that continues from its checkpoint `before`; without one it starts again."""
    seed = resolved.config.seed
    if before is not None:  # environments are made anew: they must not repeat the episodes that they have played
        seed = (seed + 1_000_003 * (1 + int(before.state["progress"]["iterations"]))) % (1 << 30)
    return PreparedRun(resolved, functools.partial(reopen_run, run, resolved), before, seed, counting_on=before is not None)


def reopen_run(run: Run, resolved: ResolvedExperiment) -> Run:
    fetch(run.directory, logs=True)
    run.prepare_resume(resolved.to_dict(), {"status": "running", "resumed": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
    return run


def train_in_process(prepared: PreparedRun, sinks: Sequence[Sink], announce: Announce | None = None) -> Result:
    """Train to the end of the run, a signal, or the stop request of a sink.

    Raises KeyboardInterrupt when it was interrupted before there was anything to keep.
    """
    try:
        with (
            stop_on_signals() as stop,
            open_training(prepared, RunHooks(sinks, announce, stop), with_remote_learners=True) as training,
        ):
            waiting = None
            if training.address is not None and announce is not None:
                waiting = _GameWaitNotice(training.components, announce)

            def until() -> bool:
                if stop() or find_stop_request(sinks) is not None:
                    return True
                if waiting is not None:
                    waiting.update()
                return False

            training.advance(until)
            reason, in_order = (None if stop() else find_stop_request(sinks)) or (f"interrupted ({stop.name})", False)
            return training.conclude(reason, finished=in_order)
    except Interrupted:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def open_training(
    prepared: PreparedRun, hooks: RunHooks | None = None, *, with_remote_learners: bool = False
) -> Iterator[Training]:
    """A training in this process, which the caller advances step by step. Closes everything at the end.

    `with_remote_learners`: the learners of other nodes of this process's job take part. Not for one of many, such as a trial.
    """
    hooks = hooks or RunHooks()
    resolved, before = prepared.resolved, prepared.before
    with (
        contextlib.nullcontext() if with_remote_learners else without_remote_learners(),
        contextlib.ExitStack() as last,  # closed after the components: uploads what they log while they close
        assemble_run(prepared, hooks) as parts,
    ):
        run, controller = parts.run, parts.controller
        sync = None
        if is_remote(run.directory):
            from ludus.experiments.runs.run_sync import RunSync

            sync = last.enter_context(RunSync(run.directory, guard=run.guard, mark=lambda: controller.last_checkpoint))
        status = functools.partial(run_status, parts, resolved, sync)
        with StatusWriter(run.directory, status, guard=parts.pool.check_recently) as writer:
            if before is not None:
                log.info("continuing from checkpoint %s; environments start from their reset", before.name)
            if run.meta().get("learner_restarts"):
                controller.hurry_checkpoints()
            training = Training(parts, resolved, writer)
            if training.address is not None:
                url = f"http://{training.address[0]}:{training.address[1]}/step"
                log.info("games connect to %s", url)
                if hooks.announce is not None:
                    hooks.announce(f"games connect to {url}")
            with _own_games(resolved, run, training.address):
                yield training


def _own_games(
    resolved: ResolvedExperiment, run: Run, address: tuple[str, int] | None
) -> contextlib.AbstractContextManager[object]:
    """The games that this run starts itself."""
    external = parse_external_config(resolved.config.env_config) if resolved.is_external else None
    if external is None or external.game_command is None or address is None:
        return contextlib.nullcontext()
    from ludus.experiments.game_processes import GameProcesses

    host = "127.0.0.1" if address[0] in ("0.0.0.0", "::") else address[0]  # noqa: S104 - an address that was bound
    url = f"http://[{host}]:{address[1]}" if ":" in host else f"http://{host}:{address[1]}"
    return GameProcesses(external.game_command, external.games, url, run.directory / "logs" / "games")


@contextlib.contextmanager
def assemble_run(prepared: PreparedRun, hooks: RunHooks | None = None) -> Iterator[TrainingComponents]:
    """Make the components of a run in this process, restored from its checkpoint; close all of them at the end."""
    hooks = hooks or RunHooks()
    resolved = prepared.resolved
    screen_choice.configure(resolved.config.display)
    keep_freed_memory()
    threads = torch.get_num_threads()
    warnings = gap_sinks(resolved.experiment.env, resolved.config, hooks.announce)
    hooks = dataclasses.replace(hooks, sinks=[*hooks.sinks, *warnings])
    try:
        with ComponentStack() as stack:
            components = assemble_of(resolved)(prepared, hooks, stack)
            try:
                yield components
            except LudusError as error:
                log.error("%s", error)
                raise
    finally:
        torch.set_num_threads(threads)  # the process may belong to a caller


def assemble_of(resolved: ResolvedExperiment) -> Assemble:
    """The function that assembles runs of this training mode."""
    if resolved.is_external:
        from ludus.experiments.assembly.http_training import assemble_http

        return assemble_http
    if resolved.config.multiagent is not None and resolved.experiment.memory != EMBEDDED:
        from ludus.experiments.assembly.match_fleet_training import assemble_match_fleet

        return assemble_match_fleet
    if resolved.config.multiagent is not None and resolved.config.workers:
        from ludus.experiments.assembly.match_worker_training import assemble_match_workers

        return assemble_match_workers
    if resolved.config.multiagent is not None:
        from ludus.experiments.assembly.multi_agent_training import assemble_multi_agent

        return assemble_multi_agent
    if resolved.experiment.memory != EMBEDDED:
        from ludus.experiments.assembly.fleet_training import assemble_fleet

        return assemble_fleet
    if resolved.config.workers:
        from ludus.experiments.assembly.worker_training import assemble_workers

        return assemble_workers
    from ludus.experiments.assembly.local_training import assemble_local

    return assemble_local


def run_status(parts: TrainingComponents, resolved: ResolvedExperiment, sync: RunSync | None = None) -> dict[str, Any]:
    """The contents of `status.json`. Called in the thread of the status writer: reads only."""
    sampling = getattr(parts.source, "status", None)
    e = resolved.experiment
    names = {"env": e.env, "algorithm": e.run, "checkpoint": parts.controller.last_checkpoint}
    numbers = status_fields(parts.controller.numbers(), sampling() if sampling is not None else None)
    return {"state": "running", **names, **numbers, **(sync.stats() if sync is not None else {})}


class Training:
    """A training in progress; made by `open_training`."""

    def __init__(self, components: TrainingComponents, resolved: ResolvedExperiment, status: StatusWriter) -> None:
        self.components, self._resolved, self._status = components, resolved, status
        self.address: tuple[str, int] | None = getattr(components.source, "address", None)
        """Host and port for games; None where none connect."""

    def advance(self, until: Callable[[], bool]) -> bool:
        """Train until a stop condition holds (True) or `until()`."""
        controller = self.components.controller
        try:
            controller.run(until)
        except EnvironmentFault:
            with contextlib.suppress(LudusError):  # keep what was learned before the fault
                controller.checkpoint()
            raise
        return controller.stopped_by is not None

    def conclude(self, otherwise: str, *, finished: bool = False) -> Result:
        """Write the last checkpoint and status. `otherwise`: the reason, if no stop condition holds; `finished`: that is no interruption."""
        parts, controller, run = self.components, self.components.controller, self.components.run
        stopped_by = controller.stopped_by or otherwise
        if not controller.stopped_by:
            controller.stop_early()
        run.status = "finished" if controller.stopped_by or finished else "interrupted"
        self._status.final = {"state": run.status, "stopped_by": stopped_by}
        metrics, name = controller.numbers(), controller.last_checkpoint
        model = parts.pool.names()[0]
        policy, version = parts.pool.newest(model)
        if policy.config.central:
            from ludus.models.centralized_critic import actor_policy

            policy = actor_policy(policy)
        where = run.directory / checkpoint.FOLDER / name if name else None
        log.info("%s: %s after %s timesteps", run.status, stopped_by, metrics.get("timesteps"))
        agent = RunAgent(policy, self._resolved.config.seed, version, run_dir=run.directory, model=model)
        return Result(run.directory, where, stopped_by, metrics, agent, self._resolved.experiment.env)


class _GameWaitNotice:
    """Announces what is missing until the first update: a game whose requests are all refused looks like no game."""

    def __init__(self, parts: TrainingComponents, announce: Announce) -> None:
        self._parts, self._announce = parts, announce
        self._iterations, self._announced_at = parts.trainer.progress.iterations, time.monotonic()

    def update(self) -> None:
        waits = self._parts.trainer.progress.iterations == self._iterations
        if waits and time.monotonic() - self._announced_at >= _ANNOUNCE_EVERY_S:
            self._announced_at = time.monotonic()
            numbers = self._parts.source.metrics()
            counts = {word: int(numbers.get(f"games/{word}", 0)) for word in ("sessions", "requests", "refused", "failed")}
            self._announce("waiting for games: " + ", ".join(f"{number} {word}" for word, number in counts.items()))
