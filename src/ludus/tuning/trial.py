"""One trial of a sweep in its own process: an ordinary run that is advanced from report to report.

All progress is in the run directory, so another process can continue the trial after a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ludus.config.search_space import SEED
from ludus.config.translation import canonical_config
from ludus.core.metrics import Numbers, read_jsonl
from ludus.errors import Fenced, LudusError, NotFound, UsageError, WorkerFailed
from ludus.experiments.assembly.components import PreparedRun, RunHooks
from ludus.experiments.resolve import ResolvedExperiment, resolve
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.run_dir import CONFIG, Run
from ludus.experiments.runs.run_status import now_text
from ludus.experiments.training import open_training, prepare_new_run, prepare_resumed_run
from ludus.tuning.messages import FAILED, FINISHED, OVER, SCORE

log = logging.getLogger(__name__)

WORST_SCORE = -1e30
"""The score of a trial that has no value yet."""

LOCK = ".trial.lock"
_LOCK_TIMEOUT_S = 60.0
_MAX_SILENCE_S = 30.0
_MAX_EXPLOITS = 100


class _LatestMetrics:
    """A sink that keeps the newest value of every metric."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.reports = 0

    def write(self, numbers: Numbers) -> None:
        self.numbers |= {name: float(value) for name, value in numbers.items()}
        self.reports += 1

    def close(self) -> None:
        pass


class TrialRun:
    """Trains one trial in this process: continues its run, or starts it."""

    def __init__(
        self,
        directory: Path,
        data: Mapping[str, Any],
        *,
        values: Any = None,
        pointer: Mapping[str, Any] | None = None,
        metric: str = "episode_return_mean",
        mode: str = "max",
        report_s: float = 1.0,
    ) -> None:
        """`values`: searched values of this trial as JSON, stored in the run's metadata. `pointer`: a return value of `checkpoint`; if it
        is of another run, its weights and optimizer are copied, and the counters continue."""
        self.directory, self._metric, self._sign, self._report_s = directory, metric, 1 if mode == "max" else -1, report_s
        self._latest = _LatestMetrics()
        self._over: float | None = None
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            with self._end_on_error():
                self._stack.callback(_lock_directory(directory).close)
                self._begin(data, values, pointer)
            undo.pop_all()

    def _begin(self, data: Mapping[str, Any], values: Any, pointer: Mapping[str, Any] | None) -> None:
        run = Run(self.directory) if (self.directory / CONFIG).exists() else None
        if run is not None and run.meta().get("status") == "finished":
            for row in read_jsonl(run.metrics_path):
                self._latest.numbers |= {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
            self._over = FINISHED
            self._stack.close()
            return
        if run is not None:  # a trial keeps its seed when it copies another one
            seed = run.config().get("config", {}).get("seed", 0)
            data = {**data, "config": {**canonical_config(data.get("config") or {}), "seed": seed}}
            values = values and [[path, seed if tuple(path) == SEED else value] for path, value in values]
        resolved = resolve(data)
        prepared, exploited = self._prepare_run(resolved, run, pointer)
        self._training = self._stack.enter_context(open_training(prepared, RunHooks([self._latest])))
        opened = self._training.components.run
        if values is not None:
            opened.write_meta({"trial": values})
        if exploited is not None:
            earlier = opened.meta().get("exploited", [])
            self._training.components.controller.checkpoint()
            opened.write_meta({"exploited": [*earlier, exploited][-_MAX_EXPLOITS:]})

    def _prepare_run(
        self, resolved: ResolvedExperiment, run: Run | None, pointer: Mapping[str, Any] | None
    ) -> tuple[PreparedRun, dict[str, Any] | None]:
        """The prepared run, and the pointer to the other run whose checkpoint it copies, if any."""
        if run is None:
            if pointer is None or Path(pointer["run"]) == self.directory:
                return prepare_new_run(resolved, self.directory), None
            return prepare_new_run(resolved, self.directory, _read_source_checkpoint(pointer)), dict(pointer)
        try:
            own: Checkpoint | None = checkpoint.newest(run.store)
        except NotFound:
            own = None
        another = pointer is not None and Path(pointer["run"]) != self.directory
        if pointer is not None and another and dict(pointer) not in run.meta().get("exploited", []):
            theirs = _read_source_checkpoint(pointer)
            return prepare_resumed_run(resolved, run, _merge_checkpoints(own, theirs)), dict(pointer)
        if own is None:
            log.warning("%s has no checkpoint yet; it starts again", self.directory)
        return prepare_resumed_run(resolved, run, own), None

    # -- TrialTraining

    def advance(self) -> Numbers:
        if self._over is not None:
            return self._numbers()
        before, deadline = self._latest.reports, time.monotonic() + self._report_s

        def enough() -> bool:
            now = time.monotonic()
            return now >= deadline and (self._latest.reports > before or now >= deadline + _MAX_SILENCE_S)

        with self._end_on_error():
            if self._training.advance(enough):
                result = self._training.conclude("")
                self._latest.numbers |= result.metrics
                self._over = FINISHED
                self._stack.close()
        return self._numbers()

    def checkpoint(self) -> dict[str, Any]:
        if self._over is not None:
            run, name = checkpoint.locate(self.directory)
            return {"run": str(run), "checkpoint": name}
        return {"run": str(self.directory), "checkpoint": self._training.components.controller.checkpoint()}

    def close(self) -> None:
        if self._over is None:
            self._over = FAILED  # remains if the following fails
            with self._stack:
                self._training.conclude("stopped by the sweep")
        self._stack.close()

    # -- end

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        """End the training after an error, and record it in the run's metadata. Errors that a retry would not repeat are raised."""
        try:
            yield
        except Exception as error:  # the code of environments and models may raise anything
            self._stack.__exit__(*sys.exc_info())
            if not self._record_failure(error):
                raise

    def _record_failure(self, error: Exception) -> bool:
        """Returns whether a retry would fail again."""
        final = isinstance(error, UsageError) or (isinstance(error, LudusError) and error.final)
        log.error("the trial %s ends: %s", self.directory.name, error)
        if (self.directory / CONFIG).exists() and not isinstance(error, Fenced):  # another process owns the run then
            with contextlib.suppress(LudusError):  # must not hide the original error
                Run(self.directory).write_meta({"status": "failed", "ended": now_text(), "error": f"{error}"[:2000]})
        if final:
            self._over = FAILED
        return final

    def _numbers(self) -> dict[str, Any]:
        numbers: dict[str, Any] = dict(self._latest.numbers)
        value = numbers.get(self._metric, math.nan)
        for name in ("timesteps", "iterations", "time_s"):
            numbers.setdefault(name, 0.0)
        numbers[SCORE] = self._sign * value if math.isfinite(value) else WORST_SCORE
        if self._over is not None:
            numbers |= {OVER: self._over, "done": True}
        return numbers


def _read_source_checkpoint(pointer: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint of another trial; if it was deleted, the newest one."""
    run = Path(pointer["run"])
    try:
        return checkpoint.open_checkpoint(run / checkpoint.FOLDER / pointer["checkpoint"])[1]
    except NotFound:
        return checkpoint.newest(Run.open(run).store)


def _merge_checkpoints(own: Checkpoint | None, theirs: Checkpoint) -> Checkpoint:
    """The weights and returns of another trial's checkpoint with our own counters and random state: counters never decrease."""
    if own is None:
        return theirs
    counted = ("timesteps", "iterations", "training_iteration", "iteration_began", "episodes", "time_s")
    before = own.state["progress"]
    progress = dict(theirs.state["progress"]) | {name: before[name] for name in counted if name in before}
    models = {
        name: {**described, "version": max(described["version"], own.state["models"].get(name, {}).get("version", 0))}
        for name, described in theirs.state["models"].items()
    }
    return dataclasses.replace(theirs, state={**theirs.state, "progress": progress, "models": models}, sampler=own.sampler)


def _lock_directory(directory: Path) -> IO[bytes]:
    """Lock the run directory, waiting for the previous process to finish its writes. Raises WorkerFailed after a time-out."""
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / LOCK, "ab")  # noqa: SIM115 - held as long as the attempt lasts
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise WorkerFailed(f"Another process has been busy with {directory} for {_LOCK_TIMEOUT_S:.0f} s.") from None
            time.sleep(0.1)
