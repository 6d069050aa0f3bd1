"""Sweeps: concurrent trials of one experiment, each of which is an ordinary run.

runs/<name>/t000_lr-0.001_seed-0/ …      the trials
           sweep.json                    state of the sweep: experiment, trials and how they ended; enough to resume it
           results.json results.csv best.yaml sweep.png
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np

import ludus
from ludus.algorithms.base import algorithm_class
from ludus.config import search_space
from ludus.config.schema import EXTERNAL, ExperimentConfig, TuneConfig
from ludus.config.search_space import SearchedKey, TrialValues
from ludus.config.translation import canonical_config, translate_experiment
from ludus.config.validation import parse_experiment
from ludus.core import trust
from ludus.distributed.code_bundle import CodeBundle
from ludus.envs.registry import registered_envs
from ludus.envs.wrappers import wrapper_names
from ludus.errors import ConfigError, Damaged, LudusError, MissingExtra, NotFound, UsageError
from ludus.experiments import runner
from ludus.experiments.resolve import ClusterOptions, resolve
from ludus.experiments.runs import tracking
from ludus.experiments.runs.remote_runs import is_remote
from ludus.experiments.runs.run_dir import CONFIG, Run
from ludus.experiments.validation import validate
from ludus.process.host import usable_cores
from ludus.storage.local import LocalStore
from ludus.storage.safe_read import parse_json
from ludus.tuning.messages import (
    FINISHED,
    OVER,
    OnTrialEvent,
    ReserveResources,
    StartTrial,
    TrialEnvironment,
    TrialEvent,
    TrialRequest,
    TrialResources,
)
from ludus.tuning.report import SweepResult, read_curve, read_results
from ludus.tuning.trial import TrialRun

log = logging.getLogger(__name__)

STATE, LOCK, TUNE = "sweep.json", ".sweep.lock", ".tune"
FORMAT = 1
DEFAULT_KEEP = 3
"""Default number of checkpoints that a trial keeps in addition to the best: another trial may be copying one."""

Announce = Callable[[str], None]


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep that are not part of the experiment: directory, cluster and callbacks."""

    local_dir: Path = Path("runs")
    cluster: ClusterOptions | None = None
    """None: the Ray cluster to which this process is connected, else a local one that is started for the sweep."""
    max_concurrent: int | None = None
    retry_failed: bool = False
    announce: Announce | None = None
    hear: OnTrialEvent | None = None
    noted: Callable[[str, Path], None] | None = None
    """Called with the name and directory of a new sweep before it is created."""
    begin: Callable[[int, int], None] | None = None
    """Called before the trials of a sweep start, with the number of ended trials and of all trials."""

    def say(self, sentence: str) -> None:
        if self.announce is not None:
            self.announce(sentence)


# -- state ----------------------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """A validated sweep: its trials and how they ended."""

    name: str
    directory: Path
    data: dict[str, Any]
    """The experiment, search values included."""
    tune: TuneConfig
    trials: list[TrialValues]
    ended: dict[str, str] = field(default_factory=dict)
    """Trial → finished, stopped (by the scheduler) or failed."""

    @property
    def max_failures(self) -> int:
        return int(self.data.get("max_failures", ExperimentConfig.model_fields["max_failures"].default))

    def experiment_of(self, trial: TrialValues) -> dict[str, Any]:
        return _trial_data(self.data, trial.values, self.tune.cpus_per_trial)

    def remaining_trials(self, retry_failed: bool) -> list[TrialValues]:
        return [t for t in self.trials if t.name not in self.ended or (retry_failed and self.ended[t.name] == "failed")]

    def save(self) -> None:
        plain = {
            "format": FORMAT,
            "ludus": ludus.__version__,
            "name": self.name,
            "experiment": self.data,
            "trials": [{"name": trial.name, "values": _encode_values(trial.values)} for trial in self.trials],
            "ended": self.ended,
        }
        LocalStore(self.directory).put(STATE, json.dumps(plain, indent=1, default=str).encode())


def plan_sweep(name: str, data: Mapping[str, Any], local_dir: Path = Path("runs")) -> Sweep:
    """Create a sweep and validate all its trials. Raises UsageError."""
    _refuse_store(local_dir)
    data = {**translate_experiment(search_space.replace_tune_domains(data)).data, "name": name}
    inner = data.get("config") or {}
    top = parse_experiment({key: value for key, value in data.items() if key not in ("config", "env", "run")} | {"env": "-"})
    data["config"] = canonical_config(inner if isinstance(inner, Mapping) else {})
    seed = data["config"].get("seed", 0)
    base = seed if isinstance(seed, int) and not isinstance(seed, bool) else 0
    mutations = search_space.find_mutations(data, top.tune.hyperparam_mutations) if top.tune.scheduler == "pbt" else []
    trials = search_space.make_trials(data, top.num_samples, base, mutations)
    sweep = Sweep(top.name, local_dir.expanduser() / top.name, data, top.tune, trials)
    if top.tune.scheduler == "pbt" and len(trials) < 2:
        raise ConfigError("Population based training needs at least 2 trials.", "Set num_samples to 4 or more.")
    for trial in trials:
        _check(sweep, trial)
    if top.tune.scheduler:
        _time_limit(sweep)
    return sweep


def _check(sweep: Sweep, trial: TrialValues) -> None:
    data = sweep.experiment_of(trial)
    if data.get("env") == EXTERNAL:
        raise ConfigError("External games connect to one run, so they cannot be swept.", "Train it with `ludus train`.")
    inner = canonical_config(data["config"])
    if inner.get("num_workers") == "auto":
        raise ConfigError(
            "config.num_workers is auto, which would give every trial the whole machine.",
            "Set a number: trials run concurrently.",
        )
    tracking.check_tracking(resolve(data).experiment.track)
    needed = trial_resources(data, None)
    if sweep.tune.cpus_per_trial is not None and sweep.tune.cpus_per_trial < needed.all_cpus:
        raise ConfigError(
            f"tune.cpus_per_trial is {sweep.tune.cpus_per_trial}, and the trial {trial.name} has {needed.all_cpus} processes.",
            f"Set it to {needed.all_cpus} or more, or leave it out.",
        )


def _refuse_store(place: Path) -> None:
    if is_remote(place):
        raise UsageError(
            "A sweep needs a directory that all nodes of the Ray cluster share; it cannot be on an object store.",
            "Give --local-dir a directory. Single runs may be on a store: ludus train --local-dir s3://…",
        )


def open_sweep(directory: Path) -> Sweep:
    """The sweep in a directory. Raises NotFound, Damaged."""
    _refuse_store(directory)
    directory = directory.expanduser()
    trust.note_run(directory)
    if not (directory / STATE).exists():
        raise NotFound(f"{directory} is not the directory of a sweep (it has no {STATE}).", "Name the one that holds its trials.")
    try:
        plain = parse_json(LocalStore(directory).get(STATE), str(directory / STATE))
        data = dict(plain["experiment"])
        trials = [TrialValues(str(entry["name"]), _decode_values(entry["values"])) for entry in plain["trials"]]
        ended = {str(name): str(state) for name, state in plain["ended"].items()}
        name, form = str(plain["name"]), int(plain["format"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{directory / STATE} is damaged: {error!r}.", "Its trials are ordinary runs and are intact.") from error
    if form != FORMAT:
        raise UsageError(f"{directory / STATE} has format {form}; this is ludus {ludus.__version__}, format {FORMAT}.")
    tune = parse_experiment({"name": name, "env": "-", "tune": data.get("tune") or {}}).tune
    return Sweep(name, directory, data, tune, trials, ended)


def _encode_values(values: Mapping[search_space.Path, Any]) -> list[list[Any]]:
    return [[list(path), value] for path, value in values.items()]


def _decode_values(plain: Sequence[Sequence[Any]]) -> search_space.Assignment:
    return {tuple(map(str, path)): value for path, value in plain}


# -- trials ---------------------------------------------------------------------------------------------------------------


def trial_resources(data: Mapping[str, Any], cpus_per_trial: int | None) -> TrialResources:
    """Resources of a trial, all on one node: the learner process, and one core for each other process."""
    inner = canonical_config(data.get("config") or {})
    number = {key: int(inner.get(key) or 0) for key in ("num_workers", "num_learners", "evaluation_num_workers")}
    workers = number["num_workers"] + max(0, number["num_learners"] - 1) + number["evaluation_num_workers"]
    return TrialResources(max(1, (cpus_per_trial or 0) - workers), float(inner.get("num_gpus") or 0), workers)


def _trial_data(data: Mapping[str, Any], values: Mapping[search_space.Path, Any], cpus_per_trial: int | None) -> dict[str, Any]:
    """The experiment of one trial, with threads limited to its reserved cores."""
    out = search_space.apply_values(data, values)
    out["config"] = canonical_config(out.get("config") or {})
    if out["config"].get("num_workers") != "auto":
        threads = trial_resources(out, cpus_per_trial).cpus
        for key in ("torch_threads", "learner_threads"):
            out["config"][key] = out["config"].get(key) or threads
    if out.get("keep_checkpoints_num") is None:
        out["keep_checkpoints_num"] = DEFAULT_KEEP
    return out


def _start_trial(directory: Path, data: Mapping[str, Any], tune: TuneConfig, order: TrialRequest) -> TrialRun:
    values = order.config["trial"]["values"]
    return TrialRun(
        directory / order.name,
        _trial_data(data, _decode_values(values), tune.cpus_per_trial),
        values=values,
        pointer=order.pointer,
        metric=tune.metric,
        mode=tune.mode,
        report_s=tune.report_s,
    )


def _trial_resources(data: Mapping[str, Any], cpus_per_trial: int | None, config: Mapping[str, Any]) -> TrialResources:
    return trial_resources(search_space.apply_values(data, _decode_values(config["trial"]["values"])), cpus_per_trial)


def start_plain_trial(data: Mapping[str, Any], report_s: float, order: TrialRequest) -> TrialRun:
    """Start a trial of a user's own Tuner. Its config has `env`, `run` and keys of `config:`, which override `data`."""
    if order.directory is None:
        raise UsageError(
            "The results of this Tuner are not on a file system.", "Give RunConfig a storage_path that is a directory."
        )
    return TrialRun(order.directory, _plain_data(data, order.config), pointer=order.pointer, report_s=report_s)


def plain_trial_resources(data: Mapping[str, Any], config: Mapping[str, Any]) -> TrialResources:
    return trial_resources(_plain_data(data, config), None)


def _plain_data(data: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    top = {key: value for key, value in config.items() if key in ("env", "run", "stop")}
    inner = {key: value for key, value in config.items() if key not in top}
    whole = {**data, **top}
    whole["config"] = {**canonical_config(data.get("config") or {}), **canonical_config(inner)}
    if "env" not in whole:
        raise ConfigError(
            "No environment is given.", 'Put "env" into the param_space, or use trainable("PPO", env="CartPole-v1").'
        )
    return _trial_data({"name": "trial", **whole}, {}, None)


def plain_trainable(data: Mapping[str, Any], report_s: float = 1.0) -> Any:
    """The return value of `ludus.trainable`. Raises MissingExtra, UsageError."""
    given = {**data, "config": canonical_config(data.get("config") or {})}
    algorithm_class(str(data["run"]))
    inner = given["config"]
    names = [str(given.get("env", "")), str(data["run"]), *wrapper_names(inner.get("wrappers") or [])]
    code_bundles = [CodeBundle.of(*names, models=[(inner.get("model") or {}).get("custom_model")])]
    code_bundles += [CodeBundle(registered_envs=dict(registered_envs()))]  # the names in the param_space are not known yet
    code_bundles += [CodeBundle(spec=spec) for spec in gym.registry.values() if callable(spec.entry_point)]
    begin: StartTrial = functools.partial(start_plain_trial, given, report_s)
    reserve: ReserveResources = functools.partial(plain_trial_resources, given)
    name = re.sub(r"\W+", "_", str(data["run"]))
    return _import_tune().trainable(name, begin, reserve, TrialEnvironment.here(code_bundles))


# -- schedulers -----------------------------------------------------------------------------------------------------------


def _time_limit(sweep: Sweep) -> tuple[str, float]:
    """(unit of time, maximum). Raises ConfigError if no stop condition bounds it."""
    stop = resolve(sweep.experiment_of(sweep.trials[0])).experiment.stop
    times = ("timesteps", "iterations", "training_iteration", "time_s")
    limits = {name: getattr(stop, name) for name in times if getattr(stop, name) is not None}
    name: str = sweep.tune.time_attr or next(iter(limits), "timesteps")
    if name not in limits:
        raise ConfigError(
            f"tune.scheduler is {sweep.tune.scheduler}, but no stop condition limits {name}.",
            f"Set stop.{name}, or another tune.time_attr.",
        )
    return name, float(limits[name])


def _make_scheduler(sweep: Sweep) -> Any:
    from ludus.tuning import ray_tune as tuning

    tune = sweep.tune
    if tune.scheduler is None:
        return tuning.fifo()
    time_attr, longest = _time_limit(sweep)
    if tune.scheduler == "asha":
        sign = 1 if tune.mode == "max" else -1
        ended = [sweep.directory / name for name in sweep.ended]
        curves = [[(x, sign * y) for x, y in read_curve(run, tune.metric, time_attr)] for run in ended]
        grace = tune.grace_period or max(longest / 100, 1e-9)
        return tuning.asha(time_attr, longest, grace, tune.reduction_factor, curves)
    interval = tune.perturbation_interval or longest / 10
    keys = search_space.find_mutations(sweep.data, tune.hyperparam_mutations)
    seed = int(sweep.trials[0].values.get(search_space.SEED, sweep.data["config"].get("seed", 0)))
    explorer = Mutator(sweep.data, keys, tune.resample_probability, tune.cpus_per_trial, seed)
    return tuning.pbt(time_attr, interval, tune.quantile_fraction, explorer, seed)


class Mutator:
    """Perturbs the config of a better trial into a valid one (population based training)."""

    TRIES = 20

    def __init__(
        self, data: Mapping[str, Any], keys: Sequence[SearchedKey], resample: float, cpus: int | None, seed: int
    ) -> None:
        self._data, self._keys, self._resample, self._cpus = dict(data), list(keys), resample, cpus
        self._generator = np.random.default_rng([seed, 7])

    def __call__(self, config: dict[str, Any]) -> dict[str, Any]:
        theirs = _decode_values(config["trial"]["values"])
        for _ in range(self.TRIES):
            values = search_space.perturb(self._keys, theirs, self._generator, self._resample)
            try:
                resolve(_trial_data(self._data, values, self._cpus))
            except ConfigError as error:  # such as a batch that its minibatches do not divide
                log.info("an invalid mutation was skipped: %s", error)
                continue
            return {**config, "trial": {**config["trial"], "values": _encode_values(values)}}
        return config


# -- running --------------------------------------------------------------------------------------------------------------


def run_sweep(experiments: Mapping[str, Mapping[str, Any]], options: SweepOptions) -> list[SweepResult]:
    """Run sweeps one after the other, each in its own directory, after validating all of them.

    Stops after an interrupted one, which is the last of the list. Raises UsageError.
    """
    sweeps = [plan_sweep(name, data, options.local_dir) for name, data in experiments.items()]
    if not sweeps:
        raise UsageError("There is no experiment to sweep over.")
    for sweep in sweeps:
        _check_free(sweep.directory)
    for sentence in dict.fromkeys(notice for data in experiments.values() for notice in validate.find_notices(data)):
        options.say(sentence)
    return _run(sweeps, options)


def resume_sweep(directory: Path, options: SweepOptions) -> SweepResult:
    """Resume an interrupted or killed sweep: trials that have not ended continue from their checkpoints."""
    return resume_sweeps([directory], options)[0]


def resume_sweeps(directories: Sequence[Path], options: SweepOptions) -> list[SweepResult]:
    """Resume sweeps one after the other, as `run_sweep` does."""
    return _run([open_sweep(directory) for directory in directories], options, resumed=True)


def _check_free(directory: Path) -> None:
    if (directory / STATE).exists():
        raise UsageError(
            f"{directory} already holds a sweep.",
            f"Continue it with ludus tune --resume {directory}, or choose another name or --local-dir.",
        )


def _run(sweeps: Sequence[Sweep], options: SweepOptions, resumed: bool = False) -> list[SweepResult]:
    _import_tune()
    with contextlib.ExitStack() as stack:
        for sweep in sweeps:
            stack.enter_context(_lock_sweep(sweep.directory, made=not resumed))
        if resumed:
            sweeps = [open_sweep(sweep.directory) for sweep in sweeps]  # re-read under the lock
            return _run_in_order(sweeps, options, stack)
        for sweep in sweeps:
            _check_free(sweep.directory)
            if options.noted is not None:
                options.noted(sweep.name, sweep.directory)
            sweep.save()
        try:
            return _run_in_order(sweeps, options, stack)
        except (LudusError, KeyboardInterrupt):
            for sweep in sweeps:
                _remove_empty_sweep(sweep)
            raise


def _run_in_order(sweeps: Sequence[Sweep], options: SweepOptions, stack: contextlib.ExitStack) -> list[SweepResult]:
    results: list[SweepResult] = []
    began = time.monotonic()
    if any(sweep.remaining_trials(options.retry_failed) for sweep in sweeps):
        stack.enter_context(_open_ray(options))
    startup_s = time.monotonic() - began
    for sweep in sweeps:
        results.append(_run_one(sweep, options, startup_s))
        if results[-1].interrupted:
            break
    return results


def _remove_empty_sweep(sweep: Sweep) -> None:
    """Delete the files of a sweep whose trials never started, so that the command can be repeated."""
    if any((sweep.directory / trial.name).exists() for trial in sweep.trials):
        return
    with contextlib.suppress(OSError):  # the directory has other files
        for name in (STATE, LOCK):
            (sweep.directory / name).unlink(missing_ok=True)
        sweep.directory.rmdir()


def _run_one(sweep: Sweep, options: SweepOptions, startup_s: float) -> SweepResult:
    left = sweep.remaining_trials(options.retry_failed)
    began = time.monotonic()
    if left:
        for trial in left:
            sweep.ended.pop(trial.name, None)
        _announce_trials(sweep, left, options)
        if options.begin is not None:
            options.begin(len(sweep.trials) - len(left), len(sweep.trials))
        _run_trials(sweep, left, options)
    else:
        options.say(f"All {len(sweep.trials)} trials of {sweep.directory} have ended.")
    _mark_stopped(sweep)
    return read_results(sweep.name, sweep.directory, sweep.data, sweep.tune, sweep.trials, sweep.ended).write(
        startup_s=startup_s, wall_s=time.monotonic() - began
    )


def _announce_trials(sweep: Sweep, left: Sequence[TrialValues], options: SweepOptions) -> None:
    of = f" of {len(sweep.trials)}" if len(left) < len(sweep.trials) else ""
    options.say(f"{len(left)}{of} trials of {sweep.name} → {sweep.directory}")


def _run_trials(sweep: Sweep, left: Sequence[TrialValues], options: SweepOptions) -> None:
    from ludus.tuning import ray_tune as tuning

    _check_resources(sweep, left)
    data = {key: value for key, value in sweep.data.items() if key != "tune"}
    directory = sweep.directory.absolute()
    begin: StartTrial = functools.partial(_start_trial, directory, data, sweep.tune)
    reserve: ReserveResources = functools.partial(_trial_resources, data, sweep.tune.cpus_per_trial)
    actor = tuning.trainable(sweep.name, begin, reserve, TrialEnvironment.here(_code_bundles(sweep, left)))

    def hear(event: TrialEvent) -> None:
        state = _end_state(event)
        if state is not None:
            sweep.ended[event.name] = state
            with contextlib.suppress(LudusError):  # a full disk; the trials record their own state
                sweep.save()
        if options.hear is not None:
            options.hear(event)

    tuning.fit(
        actor,
        [(trial.name, {"values": _current_values(sweep, trial)}) for trial in left],
        _make_scheduler(sweep),
        directory=sweep.directory / TUNE,
        max_concurrent=options.max_concurrent or sweep.tune.max_concurrent,
        max_failures=sweep.max_failures,
        hear=hear,
    )


def _code_bundles(sweep: Sweep, left: Sequence[TrialValues]) -> list[CodeBundle]:
    """One code bundle for each distinct set of names that the trials use."""
    different: dict[str, CodeBundle] = {}
    for trial in left:
        data = sweep.experiment_of(trial)
        inner = data["config"]
        names = json.dumps([data["env"], data.get("run"), inner.get("wrappers"), inner.get("model")], default=str)
        if names not in different:
            different[names] = runner.code_bundle_of(resolve(data))
    return list(different.values())


def _end_state(event: TrialEvent) -> str | None:
    if event.kind == "failed":
        return "failed"
    if event.kind != "ended":
        return None
    over = event.numbers.get(OVER)
    return "stopped" if over is None else "finished" if over == FINISHED else "failed"


def _current_values(sweep: Sweep, trial: TrialValues) -> list[list[Any]]:
    """The values of a trial, including changes by population based training."""
    changed = Run(sweep.directory / trial.name).meta().get("trial")
    return changed if isinstance(changed, list) else _encode_values(trial.values)


def _check_resources(sweep: Sweep, left: Sequence[TrialValues]) -> None:
    """Raises UsageError for a trial that fits no node: it would wait forever."""
    from ludus.tuning import ray_tune as tuning

    cores, accelerators = tuning.largest_node()
    for trial in left:
        needed = trial_resources(sweep.experiment_of(trial), sweep.tune.cpus_per_trial)
        if needed.all_cpus > cores:
            raise UsageError(
                f"The trial {trial.name} reserves {needed.all_cpus} cores of one machine, and the largest has {cores:g}.",
                f"Set fewer num_workers; or, where it does not matter that they share cores, --ray-num-cpus {needed.all_cpus}.",
            )
        if needed.gpus > accelerators:
            raise UsageError(
                f"The trial {trial.name} reserves {needed.gpus:g} accelerators, and the largest machine has {accelerators:g}.",
                "Set num_gpus to a part of one, or to 0.",
            )


def _mark_stopped(sweep: Sweep) -> None:
    """Record in the metadata of a run that the scheduler stopped it."""
    for name, state in sweep.ended.items():
        run = Run(sweep.directory / name)
        if state == "stopped" and (run.directory / CONFIG).exists() and run.meta().get("status") == "interrupted":
            with contextlib.suppress(LudusError):
                run.write_meta({"status": "stopped", "stopped_by": sweep.tune.scheduler})


def _import_tune() -> Any:
    try:
        from ludus.tuning import ray_tune as tuning
    except ImportError as error:
        raise MissingExtra(f"Sweeps need Ray Tune, which is not installed ({error}).", "pip install 'ludus[tune]'") from error
    return tuning


# -- Ray and locks --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_ray(options: SweepOptions) -> Iterator[None]:
    """Connect to or start a Ray cluster for the trials. Raises MissingExtra, UsageError."""
    tuning = _import_tune()
    from ludus.ray_cluster.cluster import LOCAL, Cluster

    if options.cluster is None and tuning.is_connected():
        yield
        return
    given = options.cluster or ClusterOptions(LOCAL)
    cpus = given.num_cpus
    if given.address == LOCAL and cpus is None:
        cpus = usable_cores()
    with Cluster(given.address, num_cpus=cpus, object_store_memory=given.object_store_memory, announce=options.announce):
        yield


@contextlib.contextmanager
def _lock_sweep(directory: Path, made: bool) -> Iterator[None]:
    """Hold the lock of a sweep's directory. Raises UsageError if another process holds it."""
    import fcntl

    if made:
        directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"A sweep is running in {directory} ({_owner(file)}).", "Wait for its end, stop it, or choose another name."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _owner(file: IO[str]) -> str:
    file.seek(0)
    return file.read(200) or "it has just begun"
