"""From a config to a running program: the one place where a run's components are chosen and joined."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ludus.algorithms.base import Algorithm
from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Progress, Trainer
from ludus.config.problem import ConfigErrors
from ludus.config.schema import EXTERNAL, AlgorithmConfig, StopConfig
from ludus.config.translation import canonical_config, translate_config, translate_experiment
from ludus.config.validation import dump_config, parse_algorithm_config, parse_experiment, parse_external_config
from ludus.core.metrics import Sink, read_jsonl
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.code_bundle import Luggage
from ludus.envs.legacy_names import current_name
from ludus.envs.vector_env import Environments, check_exists, make_environments, reward_threshold
from ludus.envs.wrappers import names_of
from ludus.errors import (
    ConfigError,
    Damaged,
    EnvironmentFault,
    IncompatibleCheckpoint,
    Interrupted,
    LudusError,
    NotFound,
    StoreUnavailable,
    UsageError,
)
from ludus.experiments.assembly import byte_scales, http_training, multi_agent_training, worker_training
from ludus.experiments.assembly.auto_workers import choose_workers
from ludus.experiments.assembly.byte_scales import Scales
from ludus.experiments.assembly.components import (
    ClusterOptions,
    Resolved,
    count_on,
    embedding_bound,
    has_far_learners,
    make_algorithm,
    make_conductor,
    make_policy,
    make_pool,
    opened,
    share,
    timesteps_of,
    whole_episodes,
    without_far_learners,
)
from ludus.experiments.assembly.in_process import InProcess
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.program import Handle, Program
from ludus.experiments.control.callbacks import find_stop_request
from ludus.experiments.control.learner_supervisor import Driver
from ludus.experiments.control.run_controller import Conductor, Experience, reached
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.control.training_display import announce_stop
from ludus.experiments.evaluation.evaluation import make_evaluation
from ludus.experiments.evaluation.gap_warning import gap_sinks
from ludus.experiments.result import Result as Result
from ludus.experiments.runs import checkpoint, tracking
from ludus.experiments.runs.checkpoint import Checkpoint, Overtaken
from ludus.experiments.runs.remote_runs import directory_of, fetch
from ludus.experiments.runs.remote_runs import shown as place_of
from ludus.experiments.runs.run_agent import RunAgent
from ludus.experiments.runs.run_dir import Run, holds_run, run_directory
from ludus.experiments.runs.run_status import StatusWriter, described
from ludus.experiments.runs.run_sync import Carrier
from ludus.experiments.validation import iteration_units, validate
from ludus.models.centralized_critic import actor_of
from ludus.models.devices import acting_on, learner_device, named_device
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalPool, PolicySource
from ludus.process.host import keep_freed_memory, stop_on_signals, usable_cores
from ludus.process.job_env import Surroundings
from ludus.ray_cluster.cluster import address_of
from ludus.sampling.sampler import Clock, Sampler, segment_spec
from ludus.sampling.self_play import with_past
from ludus.transport.base import Batches, Memory, make_memory
from ludus.transport.message_stream import EMBEDDED, check_url

log = logging.getLogger(__name__)

DEFAULT_TIMESTEPS = 1_000_000

Announce = Callable[[str], None]
"""Takes a sentence that whoever started the run wants to read."""

Noted = Callable[[Path], None]
"""Takes the directory of a run that is about to begin."""

_SAY_EVERY_S = 10.0
_OVERTAKEN_AT_MOST = 3


def resolve(data: Mapping[str, Any], cluster: ClusterOptions | None = None) -> Resolved:
    """Check everything that can be checked before anything starts. Raises UsageError of some kind, with all that is wrong."""
    try:
        return _resolved(data, cluster)
    except (UsageError, EnvironmentFault) as error:
        found = validate.of_experiment(data)
        if len(found) < 2:
            raise
        raise ConfigError("\n".join(found)) from error


def _resolved(data: Mapping[str, Any], cluster: ClusterOptions | None) -> Resolved:
    experiment = parse_experiment(data)
    experiment = experiment.model_copy(update={"env": current_name(experiment.env).name})
    called = experiment.env == EXTERNAL
    algorithm = validate.algorithm_of(experiment.run)
    several = not called and multi_agent_training.is_meant(experiment.env, experiment.config)
    if not called and not several:
        check_exists(experiment.env)
    elsewhere = experiment.memory != EMBEDDED
    keys = _with_a_worker(experiment.config, algorithm.Config) if elsewhere else experiment.config
    config = parse_algorithm_config(
        algorithm.Config, keys, collated=called or several, run=experiment.run, owners=validate.owners
    )
    if elsewhere:
        _refuse_in_a_fleet(experiment.memory, config, called, several, cluster)
    if called:
        http_training.seats_of(parse_external_config(config.env_config))
    _refuse_what_needs_more(config, called, cluster)
    if several:
        config = multi_agent_training.resolved_config(experiment.env, algorithm.Config, config)
    elif config.multiagent is not None:
        raise ConfigError(
            f"config.multiagent is for environments with several agents; {experiment.env} has one.", "Leave it out."
        )
    stop, config = iteration_units.resolved(experiment.stop, config)
    if not stop.model_dump(exclude_none=True):
        solved = None if called or several else reward_threshold(experiment.env)
        stop = StopConfig(timesteps=DEFAULT_TIMESTEPS, episode_return_mean=solved)
    resolved = dump_config(config)
    return Resolved(experiment.model_copy(update={"stop": stop, "config": resolved}), algorithm, config, cluster)


def _with_a_worker(data: Mapping[str, Any], schema: type[AlgorithmConfig]) -> Mapping[str, Any]:
    """In a fleet num_workers is how many segments of equal size make up a batch, whoever brings them: at least one."""
    inner = translate_config(data, schema).data
    return data if inner.get("num_workers") not in (None, 0, "auto") else {**inner, "num_workers": 1}


def _refuse_in_a_fleet(memory: str, config: AlgorithmConfig, called: bool, several: bool, cluster: ClusterOptions | None) -> None:
    check_url(memory)
    for wrong, why in (
        (called, "games call the learner itself"),
        (several, "several agents are sampled by the learner itself"),
        (cluster is not None and cluster.asked_for, "an address of a Ray cluster is given, whose workers bring it"),
        (
            config.batch_mode == "complete_episodes",
            "config.batch_mode is complete_episodes, which workers of a fleet do not make",
        ),
        (
            config.sampling == "pipelined",
            "config.sampling is pipelined; workers of a fleet sample in turn (sync) or freely (async)",
        ),
    ):
        if wrong:
            raise ConfigError(f"memory is {memory}, and {why}.", "Leave one of them out.")


def cluster_of(option: str | None, num_cpus: int | None = None, object_store_memory: int | None = None) -> ClusterOptions | None:
    """The cluster that an option, RAY_ADDRESS or ip_head names; None: no cluster. Raises UsageError."""
    address = address_of(option, os.environ)
    if address is None:
        if num_cpus is not None or object_store_memory is not None:
            raise UsageError("--ray-num-cpus and --ray-object-store-memory are for a Ray.", "Add --address local.")
        return None
    return ClusterOptions(address, num_cpus, object_store_memory, asked_for=bool(option))


def _with_workers_chosen(data: Mapping[str, Any], announce: Announce | None, cluster: ClusterOptions | None) -> Mapping[str, Any]:
    """`num_workers: auto` becomes a number, once and for all: it is saved with the run."""
    given = translate_experiment(data).data
    if not isinstance(given.get("config", {}), Mapping) or not isinstance(run := given.get("run", "PPO"), str):
        return data  # what is wrong with it is said by whoever resolves it
    inner = translate_config(given.get("config", {})).data
    if inner.get("num_workers") != "auto":
        return data
    inner = canonical_config(given["config"], validate.algorithm_of(run).Config)
    if cluster is not None and cluster.asked_for:
        raise ConfigError(
            "config.num_workers is auto, which looks at this machine alone, and a cluster is named.",
            "Give a number: one worker for every core of the cluster is a good start.",
        )
    cores = usable_cores()
    if given.get("memory", EMBEDDED) != EMBEDDED:
        chosen, why = 1, "workers of a fleet come by themselves"
    elif multi_agent_training.is_meant(str(data.get("env")), inner):
        chosen, why = 0, "several agents are sampled by this process"
    elif data.get("env") == EXTERNAL:
        chosen, why = max(0, cores - 1), f"one for every core but that of the learner, of {cores}"
    else:
        any_batch = {key: value for key, value in inner.items() if key != "train_batch_size"}
        alone = resolve({**data, "config": any_batch | {"num_workers": 0, "sampling": "sync"}})
        config = parse_algorithm_config(alone.algorithm.Config, any_batch)
        if announce is not None:
            announce("measuring the environment …")
        chosen, why = choose_workers(alone.experiment.env, alone.algorithm, config, inner, cores * _nodes_of_job())
    if chosen == 0 and inner.get("sampling") == "pipelined":
        chosen = 1
    said = f"num_workers: {chosen} ({why})"
    log.info("%s", said)
    if announce is not None:
        announce(said)
    return {**data, "config": {**inner, "num_workers": chosen}}


def _nodes_of_job() -> int:
    """Machines that the Ray of the job will have, if this process belongs to one; they are taken to be alike."""
    job = Surroundings.of(os.environ)
    return len(job.nodes) if job is not None and job.ray else 1


def _announce_idle_nodes(resolved: Resolved, announce: Announce | None) -> None:
    nodes = _nodes_of_job()
    if nodes > 1 and not resolved.config.workers and announce is not None:
        announce(
            f"this run has no workers: the other {nodes - 1} of the job's {nodes} nodes have nothing to sample; set --num-workers"
        )


def _refuse_what_needs_more(config: AlgorithmConfig, called: bool, cluster: ClusterOptions | None) -> None:
    if cluster is not None and cluster.asked_for and (called or not config.workers):
        raise ConfigError(
            f"A cluster ({cluster.address}) is where workers sample, and this run has none.",
            "Set num_workers, or leave the address out.",
        )
    if config.sampling == "pipelined" and not config.workers:
        raise ConfigError("config.sampling is pipelined, and num_workers is 0.", "Set num_workers: sampling goes on elsewhere.")
    if config.batch_mode == "complete_episodes" and (called or (config.workers and config.sampling != "async")):
        raise ConfigError(
            "config.batch_mode is complete_episodes, and "
            + ("games call us." if called else "workers take turns with the learner, a block for every update."),
            "Use truncate_episodes: an unfinished episode is valued by what the model thinks of its last observation."
            if called
            else "Set num_workers: 0, or sampling: async with IMPALA or APPO, or use truncate_episodes.",
        )
    if called and (config.wrappers or config.preprocess.changes_environment):
        key = "wrappers" if config.wrappers else "preprocess"
        raise ConfigError(f"config.{key} is for environments that we call, and here games call us.", "Do it in the game.")
    learner_device(config.learner_device, config.num_gpus)
    if cluster is None or called or not config.workers:  # else decisions are made on other machines, which have other devices
        named_device(config.inference_device, "inference_device")


# -- starting, resuming -------------------------------------------------------------------------------------------------


def start(
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
    noted: Noted | None = None,
) -> Result:
    """Train a new run; with `restore`, from the weights and the optimizer of a checkpoint, counting from 0.

    Places may be paths or URLs of a store. `place`: the run is exactly there, whatever `local_dir` and the others say. `supervised`: in a learner process that is started again when it dies; None: if the run has other processes anyway. `noted`: is told where the
    run will be, before it is there.
    """
    notices = validate.notices_of(data)
    idle = validate.without_effect(data)
    if idle:
        raise ConfigErrors(idle)
    data = _with_workers_chosen(data, announce, cluster)
    resolved = resolve(data, cluster)
    e = resolved.experiment
    for sentence in notices:
        log.warning("%s", sentence) if announce is None else announce(sentence)
    _check_tracking(resolved, announce)
    _announce_iterations(resolved, announce)
    _announce_idle_nodes(resolved, announce)
    announce_stop(sinks, e.stop)
    before = _begins_with(restore, resolved)
    directory = run_directory(e.name, e.run, e.env, local_dir, project, trial) if place is None else directory_of(place)
    Run.check_free(directory)
    if noted is not None:
        noted(directory)
    if _has_processes(resolved) if supervised is None else supervised:
        return _driven(
            resolved, directory, functools.partial(_learn, directory, dict(data), restore, None, cluster), sinks, announce
        )
    return _start(resolved, directory, before, sinks, announce)


def _start(
    resolved: Resolved,
    directory: Path,
    before: Checkpoint | None,
    sinks: Sequence[Sink],
    announce: Announce | None,
) -> Result:
    return _train(begun(resolved, directory, before), sinks, announce)


def begun(resolved: Resolved, directory: Path, before: Checkpoint | None = None) -> Prepared:
    """A new run, with the weights and the optimizer of `before` if there is one, counting from 0."""
    return Prepared(resolved, functools.partial(Run.create, directory, resolved.saved()), before, resolved.config.seed)


def _begins_with(restore: str | Path | None, resolved: Resolved) -> Checkpoint | None:
    before = checkpoint.open_checkpoint(restore)[1] if restore else None
    _check_same_environment(before, resolved)
    return before


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
    """Continue a run that was stopped or killed, in its own place (a path or URL), from its newest whole checkpoint.

    A run that was killed before its first checkpoint starts again, from the weights of `restore` if it was to begin with them.
    `changes`: keys of the experiment that are others from now on; `stop` is one of them. `supervised` as in `start`. `again`: who
    trained it before may have come to the end; then nothing is left to do, and that is no error.
    """
    directory = directory_of(where)
    changes = {**(changes or {}), **({"stop": dict(stop)} if stop else {})}
    run = Run.open(directory)
    resolved = _resolved_again(run, changes, cluster)
    _check_tracking(resolved, announce)
    announce_stop(sinks, resolved.experiment.stop)
    if again and (ended := _ended(run, resolved)) is not None:
        return ended
    if _has_processes(resolved) if supervised is None else supervised:
        return _driven(
            resolved, directory, functools.partial(_learn, directory, None, restore, changes, cluster), sinks, announce
        )
    return _resume(directory, changes, restore, sinks, announce, cluster)


def _ended(run: Run, resolved: Resolved) -> Result | None:
    """What a run has come to whose newest checkpoint is its last."""
    try:
        before = checkpoint.newest(run.store)
    except NotFound:
        return None
    over = _over(before, resolved)
    return None if over is None else _concluded(run, resolved, before, over)


def _check_tracking(resolved: Resolved, announce: Announce | None) -> None:
    """Raises MissingExtra, ConfigError: in the caller's process, before any other has begun."""
    tracking.check(resolved.experiment.track)
    if announce is not None:
        for sentence in tracking.notices(resolved.experiment.track):
            announce(sentence)


def _announce_iterations(resolved: Resolved, announce: Announce | None) -> None:
    e = resolved.experiment
    keys = iteration_units.counted(e.model_dump(include={"stop", "checkpoint_freq"}), e.config)
    sentence = iteration_units.notice(e.run, resolved.config, keys)
    if sentence is not None and announce is not None:
        announce(sentence)


def _resolved_again(run: Run, changes: Mapping[str, Any] | None, cluster: ClusterOptions | None) -> Resolved:
    return resolve({**run.config(), **(changes or {})}, cluster)


def is_over(directory: Path, changes: Mapping[str, Any], cluster: ClusterOptions | None = None) -> bool:
    """Whether a run, with these keys changed, has come to its end already."""
    run = Run.open(directory)
    try:
        before = checkpoint.newest(run.store)
    except NotFound:
        return False
    return _over(before, _resolved_again(run, changes, cluster)) is not None


def _resume(
    directory: Path,
    changes: Mapping[str, Any] | None,
    restore: str | Path | None,
    sinks: Sequence[Sink],
    announce: Announce | None,
    cluster: ClusterOptions | None,
    again: bool = False,
) -> Result:
    """`restore`: what a run without a checkpoint of its own begins with. `again`: a learner was here before, and may have come to the end."""
    for left in range(_OVERTAKEN_AT_MOST, -1, -1):
        try:
            return _resume_once(directory, changes, restore, sinks, announce, cluster, again)
        except Overtaken as error:
            if not left:
                raise
            log.warning("%s It is taken up from there.", error.message)
    raise AssertionError("the last attempt returns or raises")


def _resume_once(
    directory: Path,
    changes: Mapping[str, Any] | None,
    restore: str | Path | None,
    sinks: Sequence[Sink],
    announce: Announce | None,
    cluster: ClusterOptions | None,
    again: bool,
) -> Result:
    """Raises Overtaken."""
    run = Run.open(directory)
    resolved = _resolved_again(run, changes, cluster)
    before: Checkpoint | None
    checkpoint.look_anew(run.store)
    try:
        before, own = checkpoint.newest(run.store), True
    except NotFound:
        if checkpoint.in_line(run.store):
            raise Damaged(
                f"{place_of(directory)} has checkpoints, and none of them can be read.",
                "Starting again would bury them: look at them first.",
            ) from None
        log.warning("%s has no checkpoint yet; it starts again", place_of(directory))
        before, own = _begins_with(restore, resolved), False
    seed = resolved.config.seed
    if before is not None and own:
        over = _over(before, resolved)
        if over and again:
            return _concluded(run, resolved, before, over)
        _check_not_over(over, before)
        log.warning("resuming %s from checkpoint %s; environments start anew", place_of(directory), before.name)
        seed = _later_seed(seed, before)

    return _train(Prepared(resolved, functools.partial(_taken_up, run, resolved), before, seed, counting_on=own), sinks, announce)


def continued(resolved: Resolved, run: Run, before: Checkpoint | None) -> Prepared:
    """A run that goes on counting where `before` has come to; without one it starts again."""
    seed = resolved.config.seed if before is None else _later_seed(resolved.config.seed, before)
    return Prepared(resolved, functools.partial(_taken_up, run, resolved), before, seed, counting_on=before is not None)


def _later_seed(seed: int, before: Checkpoint) -> int:
    """Environments start anew: not with the episodes that they have had."""
    return (seed + 1_000_003 * (1 + int(before.state["progress"]["iterations"]))) % (1 << 30)


def _taken_up(run: Run, resolved: Resolved) -> Run:
    fetch(run.directory, logs=True)
    run.take_up(resolved.saved(), {"status": "running", "resumed": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
    return run


# -- in a process of its own --------------------------------------------------------------------------------------------


def _has_processes(resolved: Resolved) -> bool:
    config = resolved.config
    if resolved.experiment.env == EXTERNAL and not parse_external_config(config.env_config).port:
        return False  # any free port: games would not find the next learner
    return config.workers > 0 or config.learners > 1 or has_far_learners()


def luggage_of(resolved: Resolved) -> Luggage:
    """What another process needs so that the names of this experiment mean there what they mean here."""
    e, config = resolved.experiment, resolved.config
    return Luggage.of(e.env, e.run, *names_of(config.wrappers), models=[config.model.custom_model])


def _driven(
    resolved: Resolved, directory: Path, learn: Callable[..., Result], sinks: Sequence[Sink], announce: Announce | None
) -> Result:
    e, seed = resolved.experiment, resolved.config.seed
    luggage = luggage_of(resolved)
    luggage.check_can_be_sent()
    return Driver(directory, learn, luggage, max_failures=e.max_failures, seed=seed, sinks=sinks, announce=announce).run()


def _learn(
    directory: Path,
    data: dict[str, Any] | None,
    restore: str | Path | None,
    changes: Mapping[str, Any] | None,
    cluster: ClusterOptions | None,
    *,
    sinks: Sequence[Sink],
    announce: Announce | None,
    again: bool,
    set_up: bool,
) -> Result:
    """What the learner's process does: begin the run, or take it up where the last learner left it."""
    there = again and holds_run(directory)
    if again and set_up and not there:  # to begin anew, below a mount point, would be another run of that name
        raise StoreUnavailable(
            f"{place_of(directory)} does not hold the run any more.",
            "Check that the file system is mounted and the run was not deleted.",
        )
    if data is None or there:
        return _resume(directory, changes, restore, sinks, announce, cluster, again)
    resolved = resolve(data, cluster)
    return _start(resolved, directory, _begins_with(restore, resolved), sinks, announce)


def _concluded(run: Run, resolved: Resolved, before: Checkpoint, over: str) -> Result:
    """The last learner had come to the end, and died before it could say so."""
    model = next(iter(before.weights))
    rows = read_jsonl(run.metrics_path)
    metrics = {name: float(value) for name, value in (rows[-1] if rows else {}).items() if isinstance(value, (int, float))}
    run.status = "finished"
    run.close()
    version = int(before.state["models"][model]["version"])
    agent = RunAgent(before.policy(model), resolved.config.seed, version, run_dir=run.directory, model=model)
    where = run.directory / checkpoint.FOLDER / before.name
    return Result(run.directory, where, over, metrics, agent, resolved.experiment.env)


def _check_same_environment(before: Checkpoint | None, resolved: Resolved) -> None:
    made_with = before.state["config"]["env"] if before else resolved.experiment.env
    if before and made_with != resolved.experiment.env:
        raise IncompatibleCheckpoint(
            f"Checkpoint {before.name} was trained on {made_with}, not on {resolved.experiment.env}.",
            "Name the same environment.",
        )


def _over(before: Checkpoint, resolved: Resolved) -> str | None:
    models = list(before.state["progress"].get("returns_of") or ())
    progress = Progress.with_window(resolved.config.metrics_num_episodes_for_smoothing, models)
    progress.load_json(before.state["progress"])
    return reached(resolved.experiment.stop, progress)


def _check_not_over(over: str | None, before: Checkpoint) -> None:
    if over:
        raise UsageError(
            f"This run has already reached its stop ({over}) at {int(before.state['progress']['timesteps']):,} timesteps.",
            "Give it another one: --resume DIR --stop timesteps=…",
        )


@dataclass(frozen=True)
class Prepared:
    """A training that can begin: what is trained, in which run, from where."""

    resolved: Resolved
    open_run: Callable[[], Run]
    before: Checkpoint | None
    environment_seed: int
    counting_on: bool = False


def _train(prepared: Prepared, sinks: Sequence[Sink], announce: Announce | None = None) -> Result:
    """Raises KeyboardInterrupt when it was interrupted before there was anything to keep."""
    try:
        with stop_on_signals() as stop, training(prepared, sinks, stop, announce, alone=False) as ours:
            waiting = _Waiting(ours.parts, announce) if ours.address is not None and announce is not None else None
            ours.advance(lambda: stop() or find_stop_request(sinks) is not None or (waiting is not None and waiting()))
            reason, in_order = (None if stop() else find_stop_request(sinks)) or (f"interrupted ({stop.name})", False)
            return ours.conclude(reason, finished=in_order)
    except Interrupted:
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def training(
    prepared: Prepared,
    sinks: Sequence[Sink] = (),
    interrupted: Callable[[], bool] = lambda: False,
    announce: Announce | None = None,
    *,
    alone: bool = True,
) -> Iterator[Training]:
    """A training in this process, to be advanced as far as one likes. Everything is closed at the end.

    `alone`: one of many, such as a trial of a sweep; learners of other machines that this process knows of are not for it.
    """
    resolved, before = prepared.resolved, prepared.before
    given = (resolved, prepared.open_run, before, sinks, prepared.environment_seed, prepared.counting_on, interrupted, announce)
    with (
        without_far_learners() if alone else contextlib.nullcontext(),
        contextlib.ExitStack() as last,  # what the others say while they end is carried too
        assembled(*given) as parts,
        StatusWriter(
            parts.run.directory, functools.partial(_shown, parts, resolved, _carrier(last, parts)), guard=parts.pool.look
        ) as shown,
    ):
        if before is not None:
            log.info("continuing from checkpoint %s; environments start from their reset", before.name)
        if parts.run.meta().get("learner_restarts"):
            parts.conductor.hurry()
        ours = Training(parts, resolved, shown)
        if ours.address is not None:
            log.info("games connect to http://%s:%d/step", *ours.address)
            if announce is not None:
                announce(f"games connect to http://{ours.address[0]}:{ours.address[1]}/step")
        yield ours


def _carrier(last: contextlib.ExitStack, parts: Parts) -> Carrier:
    conductor = parts.conductor
    return last.enter_context(Carrier(parts.run.directory, guard=parts.run.guard, mark=lambda: conductor.last_checkpoint))


class Training:
    """A training under way; made by `training`."""

    def __init__(self, parts: Parts, resolved: Resolved, shown: StatusWriter) -> None:
        self.parts, self._resolved, self._shown = parts, resolved, shown
        self.address: tuple[str, int] | None = getattr(parts.sampler, "address", None)
        """Where games find it."""

    def advance(self, until: Callable[[], bool]) -> bool:
        """Train until one of the run's stop conditions holds (True), or `until()`."""
        conductor = self.parts.conductor
        try:
            self.parts.runtime.run(lambda: conductor.stopped_by is not None or until())
        except EnvironmentFault:
            with contextlib.suppress(LudusError):  # what was learned before is whole, and worth keeping
                conductor.checkpoint()
            raise
        return conductor.stopped_by is not None

    def conclude(self, otherwise: str, *, finished: bool = False) -> Result:
        """The last word. `otherwise`: why it ends, when it has not come to its end; `finished`: that is no interruption."""
        parts, resolved = self.parts, self._resolved
        stopped_by = parts.conductor.stopped_by or otherwise
        if not parts.conductor.stopped_by:
            parts.conductor.settle()
            parts.conductor.checkpoint_at_last()
        parts.run.status = "finished" if parts.conductor.stopped_by or finished else "interrupted"
        self._shown.final = {"state": parts.run.status, "stopped_by": stopped_by}
        metrics, name = parts.conductor.numbers(), parts.conductor.last_checkpoint
        model = parts.pool.names()[0]
        policy, version = parts.pool.newest(model)
        where = parts.run.directory / checkpoint.FOLDER / name if name else None
        log.info("%s: %s after %s timesteps", parts.run.status, stopped_by, metrics.get("timesteps"))
        agent = RunAgent(actor_of(policy), resolved.config.seed, version, run_dir=parts.run.directory, model=model)
        return Result(parts.run.directory, where, stopped_by, metrics, agent, resolved.experiment.env)


def _shown(parts: Parts, resolved: Resolved, carrier: Carrier | None = None) -> dict[str, Any]:
    """What `status.json` says of a training. Called in a thread of its own: it looks, and touches nothing."""
    sampling = getattr(parts.sampler, "status", None)
    named = {"env": resolved.experiment.env, "algorithm": resolved.experiment.run, "checkpoint": parts.conductor.last_checkpoint}
    seen = described(parts.conductor.numbers(), sampling() if sampling is not None else None)
    return {"state": "running", **named, **seen, **(carrier.stats() if carrier is not None else {})}


class _Waiting:
    """Says now and then what is missing, until the first update: a game that is refused each time looks like no game."""

    def __init__(self, parts: Parts, announce: Announce) -> None:
        self._parts, self._announce = parts, announce
        self._before, self._said_at = parts.trainer.progress.iterations, time.monotonic()

    def __call__(self) -> bool:
        if self._parts.trainer.progress.iterations == self._before and time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            seen = self._parts.sampler.metrics()
            said = {word: int(seen.get(f"games/{word}", 0)) for word in ("sessions", "requests", "refused", "failed")}
            self._announce("waiting for games: " + ", ".join(f"{number} {word}" for word, number in said.items()))
        return False


# -- the program --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """What a caller of `assembled` drives and looks at."""

    run: Run
    runtime: InProcess
    sampler: Experience
    trainer: Trainer
    conductor: Conductor
    pool: LocalPool


@contextlib.contextmanager
def assembled(
    resolved: Resolved,
    open_run: Callable[[], Run],
    before: Checkpoint | None = None,
    sinks: Sequence[Sink] = (),
    environment_seed: int = 0,
    counting_on: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    announce: Announce | None = None,
) -> Iterator[Parts]:
    """The program of a run, built in this process, restored from `before`; everything is closed at the end."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    called = resolved.experiment.env == EXTERNAL
    sinks = [*sinks, *gap_sinks(resolved.experiment.env, resolved.config, announce)]
    if called:
        program, handles = http_training.program_of(resolved, open_run, before, sinks, counting_on, announce)
    else:
        given = (resolved, open_run, before, sinks, environment_seed, counting_on, interrupted)
        if resolved.config.multiagent is not None:
            program, handles = multi_agent_training.program_of(*given, announce)
        else:
            program, handles = (worker_training.program_of if resolved.config.workers else program_of)(*given, announce)
    try:
        with InProcess(program) as runtime:
            run, *parts = (runtime[handle] for handle in handles)
            try:
                yield Parts(run, runtime, *parts)
            except LudusError as error:
                log.error("%s", error)
                raise
    finally:
        torch.set_num_threads(threads)  # the caller's process is not ours


def program_of(
    resolved: Resolved,
    open_run: Callable[[], Run],
    before: Checkpoint | None,
    sinks: Sequence[Sink],
    environment_seed: int,
    counting_on: bool,
    interrupted: Callable[[], bool],
    announce: Announce | None = None,
) -> tuple[Program, tuple[Handle, ...]]:
    """The one wiring: which components a run has and how they are joined. Nothing is made before a runtime does it.

    The run's directory comes after what may not fit together: environments, networks and checkpoint.
    """
    e, config = resolved.experiment, resolved.config
    program = Program()
    clock = program.add("clock", RunClock, e.stop.time_s)
    stop = program.add("stop", StopCheck, interrupted, clock)
    environments = program.add("environments", _environments, e.env, config, environment_seed, stop)
    scales = program.add("scales", _scales, environments, e.env, config, before, announce)
    policy = program.add("policy", _policy, environments, config, scales, before)
    program.add("memory check", check_memory, resolved, policy)
    algorithm = program.add("algorithm", make_algorithm, resolved.algorithm, policy, config, before)
    run = program.add("run", opened, open_run, policy, config)
    learning = program.add("learning", share, algorithm, policy, config, run)
    pool = program.add("pool", make_pool, run, before if counting_on else None)
    memory = program.add("memory", _memory, policy, environments, config.steps)
    source = program.add("source", _source, pool, policy, before)
    begun = timesteps_of(before if counting_on else None)
    sampler = program.add_worker("sampler", _sampler, environments, source, memory, environment_seed, config, begun, run, stop)
    batches = program.add("batches", whole_episodes, memory, config)
    smoothing = config.metrics_num_episodes_for_smoothing
    trainer = program.add_worker("trainer", _trainer, learning, batches, pool, smoothing, clock)
    program.add("counters", count_on, before if counting_on else None, trainer, sampler)
    evaluation = program.add("evaluation", make_evaluation, resolved, policy, run, stop, announce)
    conductor = program.add_worker("conductor", make_conductor, trainer, sampler, pool, run, resolved, evaluation, sinks)
    return program, (run, sampler, trainer, conductor, pool)


def _environments(env: str, config: AlgorithmConfig, seed: int, stop: StopCheck) -> Environments:
    """Raises Interrupted."""
    with stop.interruptible():
        environments = make_environments(
            env, config.num_envs_per_worker, config.env_config,
            preprocess=config.preprocess, wrappers=config.wrappers, forgiving=config.restart_failed_sub_environments,
            beat=stop.raise_if_due,
        )  # fmt: skip
        try:
            environments.reset(seed)  # an environment shows whether it masks actions only when it is reset
        except BaseException:
            environments.close()
            raise
    return environments


def _scales(
    environments: Environments, env: str, config: AlgorithmConfig, before: Checkpoint | None, announce: Announce | None
) -> Scales:
    look = functools.partial(byte_scales.largest_seen, env, config)
    return byte_scales.choose(environments.observation_space, config, look, before, announce)


def _policy(environments: Environments, config: AlgorithmConfig, scales: Scales, before: Checkpoint | None) -> Policy:
    policy = make_policy(
        environments.observation_space, environments.action_space, config, scales, embed_above=embedding_bound(before)
    )
    return acting_on(policy, named_device(config.inference_device, "inference_device"))


def _memory(policy: Policy, environments: Environments, steps: int) -> Memory:
    """One block: sampling and learning alternate, which is what an on-policy algorithm needs."""
    return make_memory("local", segment_spec(policy, environments, steps), environments.num, 1)


def _source(pool: LocalPool, policy: Policy, before: Checkpoint | None) -> PolicySource:
    pool.add(DEFAULT_MODEL, policy, above=before.state["models"][DEFAULT_MODEL]["version"] if before else 0)
    return pool.source(DEFAULT_MODEL)


def _sampler(
    environments: Environments,
    source: PolicySource,
    memory: Memory,
    seed: int,
    config: AlgorithmConfig,
    begun: int,
    run: Run,
    stop: StopCheck,
) -> Sampler:
    facing = with_past(environments, source, config.self_play, seed, run.directory)
    clock = Clock(source.newest()[1], begun, environments.num * config.steps)
    return Sampler(
        environments, facing, memory, seed,
        beat=stop.before_step, explore=config.explore, timesteps=clock.timesteps, interruptible=stop.interruptible,
    )  # fmt: skip


def _trainer(algorithm: Algorithm, memory: Batches, pool: LocalPool, smoothing: int, clock: RunClock) -> Trainer:
    return Trainer({DEFAULT_MODEL: algorithm}, memory, pool, smoothing=smoothing, clock=clock)
