"""Ray Tune backend: starts the processes of trials, reserves their resources, and runs the scheduler.

    driver ── Tuner ──▶ Trainable ── advance, checkpoint, close ──▶ attempt (one process at one trial; made by `begin`)

Tune holds no essential state: each trial stores its progress in its own run, and a sweep is resumed by a new Tuner with the remaining
trials. Nothing that Tune has pickled is read again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, PopulationBasedTraining, TrialScheduler

from ludus.ray_cluster.cluster import environment_variables
from ludus.tuning.messages import (
    SCORE,
    OnTrialEvent,
    ReserveResources,
    StartTrial,
    TrialEnvironment,
    TrialEvent,
    TrialRequest,
    TrialResources,
    TrialTraining,
)

log = logging.getLogger(__name__)

POINTER = "ludus.json"
"""The only file of a Tune checkpoint: the location of the real one."""

MAX_POINTERS = 3
_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the run of a trial writes its own metrics
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_THRESHOLD_S": "60",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output ignores verbose=0
}


def placement(reserved: TrialResources) -> tune.PlacementGroupFactory:
    """All bundles on one node: the workers of a trial are its child processes."""
    first = {"CPU": float(reserved.cpus)} | ({"GPU": float(reserved.gpus)} if reserved.gpus else {})
    return tune.PlacementGroupFactory([first, *({"CPU": 1.0} for _ in range(reserved.workers))], strategy="STRICT_PACK")


class TuneTrial(tune.Trainable):  # type: ignore[misc,unused-ignore]
    """A trial as Tune sees it. Subclasses, made by `trainable`, say what is trained."""

    begin: ClassVar[StartTrial]
    reserve: ClassVar[ReserveResources]
    surroundings: ClassVar[TrialEnvironment]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return placement(cls.reserve(config))

    def setup(self, config: dict[str, Any]) -> None:
        self._attempt: TrialTraining | None = None
        self._pointer: Mapping[str, Any] | None = None
        self.surroundings.enter()

    def step(self) -> dict[str, Any]:
        return dict(self._ensure_started().advance())

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / POINTER).write_text(json.dumps(self._ensure_started().checkpoint()))

    def load_checkpoint(self, checkpoint_dir: str | dict[str, Any] | None) -> None:
        assert isinstance(checkpoint_dir, str)
        self._pointer = json.loads((Path(checkpoint_dir) / POINTER).read_text())

    def cleanup(self) -> None:
        if self._attempt is not None:
            self._attempt.close()

    def _ensure_started(self) -> TrialTraining:
        """Not before the first step: only then it is known whether there is a checkpoint to begin with."""
        if self._attempt is None:
            directory: Path | None = Path(self.logdir)
            if (storage := self._storage) is not None:
                local = getattr(storage.storage_filesystem, "type_name", "") == "local"
                directory = Path(storage.trial_fs_path) if local else None
            self._attempt = type(self).begin(TrialRequest(str(self.trial_name), directory, dict(self.config), self._pointer))
        return self._attempt


def trainable(
    name: str,
    begin: StartTrial,
    reserve: ReserveResources,
    surroundings: TrialEnvironment,
) -> type[tune.Trainable]:
    """A trainable class for `ray.tune.Tuner`. `begin` and `reserve` are pickled, so they must be module functions or partials."""
    return type(
        name, (TuneTrial,), {"begin": staticmethod(begin), "reserve": staticmethod(reserve), "surroundings": surroundings}
    )


# -- schedulers ----------------------------------------------------------------------------------------------------------


def fifo() -> TrialScheduler:
    scheduler: TrialScheduler = FIFOScheduler()  # type: ignore[no-untyped-call]
    return scheduler


def asha(
    time: str, longest: float, grace: float, factor: float, before: Sequence[Sequence[tuple[float, float]]]
) -> TrialScheduler:
    """`before`: (time, score) curves of trials that ended before the sweep was resumed; they count in the rungs."""
    max_t: Any = longest  # annotated as int, but floats work
    least: Any = min(grace, longest)
    scheduler = AsyncHyperBandScheduler(
        time_attr=time, metric=SCORE, mode="max", max_t=max_t, grace_period=least, reduction_factor=factor
    )
    for number, curve in enumerate(before):
        for milestone, recorded in scheduler._brackets[0]._rungs:
            found = next((score for at, score in curve if at >= milestone), None)
            if found is not None:
                recorded[f"before-{number}"] = found
    return scheduler


def pbt(
    time: str, interval: float, quantile: float, explore: Callable[[dict[str, Any]], dict[str, Any]], seed: int
) -> TrialScheduler:
    """`explore`: perturbs the config of a better trial."""
    import random

    random.seed(seed)  # Tune draws the trial to copy from it
    return PopulationBasedTraining(
        time_attr=time,
        metric=SCORE,
        mode="max",
        perturbation_interval=interval,
        quantile_fraction=quantile,
        custom_explore_fn=explore,
        log_config=False,
    )


# -- running -------------------------------------------------------------------------------------------------------------


_listeners: list[OnTrialEvent] = []
"""Listeners of this process. Not attributes of the callback, which Tune pickles."""


class _Callback(tune.Callback):  # type: ignore[misc,unused-ignore]
    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _emit_event(trial, "started")

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        _emit_event(trial, "reported", result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _emit_event(trial, "ended", trial.last_result)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _emit_event(trial, "retried", error=_error_of(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        _emit_event(trial, "failed", error=_error_of(trial))


def _emit_event(trial: Any, kind: str, result: Mapping[str, Any] | None = None, error: str = "") -> None:
    numbers = {name: value for name, value in (result or {}).items() if isinstance(value, (int, float))}
    event = TrialEvent(str(trial), kind, numbers, dict(trial.config), error)
    for hear in _listeners:
        hear(event)


def _error_of(trial: Any) -> str:
    """The last line of a trial's error."""
    try:
        lines = Path(trial.error_file).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except (OSError, TypeError):
        return ""
    return lines[-1].strip() if lines else ""


def fit(
    actor: type[tune.Trainable],
    configs: Sequence[tuple[str, Mapping[str, Any]]],
    scheduler: TrialScheduler,
    *,
    directory: Path,
    max_concurrent: int | None,
    max_failures: int,
    hear: OnTrialEvent,
) -> None:
    """Run the trials (name, config) until all have ended. On SIGINT or SIGTERM they store checkpoints and stop.

    `directory`: temporary, for Tune's own files. A second signal raises KeyboardInterrupt.
    """
    shutil.rmtree(directory, ignore_errors=True)
    given = [{"name": name, **config} for name, config in configs]
    tuner = tune.Tuner(
        actor,
        param_space={"trial": tune.grid_search(given)},
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
            max_concurrent_trials=max_concurrent,
            reuse_actors=False,  # each trial has its own process
            trial_name_creator=_name_of,
            trial_dirname_creator=_name_of,
        ),
        run_config=tune.RunConfig(
            name=directory.name,
            storage_path=str(directory.parent.absolute()),
            failure_config=tune.FailureConfig(max_failures=max_failures),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=MAX_POINTERS),
            callbacks=[_Callback()],
            verbose=0,
        ),
    )
    _listeners.append(hear)
    try:
        with environment_variables(_ENVIRONMENT), _mute_tune_log(), _sigterm_as_sigint(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Consider boosting PBT")  # by reusing processes
            tuner.fit()
    finally:
        _listeners.remove(hear)
        shutil.rmtree(directory, ignore_errors=True)


def _name_of(trial: Any) -> str:
    return str(trial.config["trial"]["name"])


def is_connected() -> bool:
    """Whether this process is already connected to a Ray cluster."""
    return bool(ray.is_initialized())


def largest_node() -> tuple[float, float]:
    """(maximum cores, maximum accelerators) of any node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return max((n.get("CPU", 0.0) for n in nodes), default=0.0), max((n.get("GPU", 0.0) for n in nodes), default=0.0)


@contextlib.contextmanager
def _mute_tune_log() -> Iterator[None]:
    """Mute Tune's log: the sweep reports failures and interruptions itself."""
    logger = logging.getLogger("ray.tune")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """Treat SIGTERM as SIGINT, for which Tune installs its own handler; restore all handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
