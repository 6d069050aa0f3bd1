"""Callbacks of `ludus.train`, and the optional methods of metrics sinks. Both run in the process that called `ludus.train`."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ludus.config.schema import StopConfig
from ludus.core.metrics import Numbers, Sink
from ludus.errors import StoreError, UsageError
from ludus.experiments.runs.checkpoint import FOLDER

if TYPE_CHECKING:
    from ludus.experiments.control.training_display import TrainingDisplay
    from ludus.experiments.result import Result

log = logging.getLogger(__name__)


class TrainingRun:
    """A run in progress, as callbacks see it."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        """Directory of the run; set before `on_start`."""
        self.metrics: dict[str, float] = {}
        """The newest value of every reported metric."""
        self.stop_reason: str | None = None

    @property
    def timesteps(self) -> int:
        """Environment steps so far."""
        return int(self.metrics.get("timesteps", 0))

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run as if one of its stop conditions held: a checkpoint is written, and `ludus.train` returns.

        Takes effect after the current update; called in `on_start`, after the first one.
        """
        self.stop_reason = self.stop_reason or reason


class Callback:
    """Base class of callbacks: override what you need.

    `on_end` is always called when `on_start` was. An exception in any of the others ends the run: a checkpoint is written, and
    `ludus.train` raises it.
    """

    def on_start(self, run: TrainingRun) -> None:
        """The configuration is valid and the run is about to start. An exception here prevents it."""

    def on_report(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        """An update was made (or some, see `min_time_s_per_iteration`). `metrics`: a line of metrics.jsonl."""

    def on_checkpoint(self, run: TrainingRun, checkpoint: Path) -> None:
        """A checkpoint was written. `ludus.load(checkpoint)` reads it."""

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        """An evaluation ended: `evaluation/return_mean`, `evaluation/return_low` …, and the `timesteps` that it belongs to."""

    def on_end(self, run: TrainingRun, result: Result | None) -> None:
        """The run has ended; `result` is None when it failed."""


ReportFunction = Callable[[TrainingRun, Mapping[str, float]], Any]
"""A function given as a callback is called as its `on_report`."""


class _OnReport(Callback):
    def __init__(self, function: ReportFunction) -> None:
        self._function = function

    def on_report(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self._function(run, metrics)


# -- optional methods of metrics sinks --------------------------------------------------------------------------------------


@runtime_checkable
class CheckpointListener(Protocol):
    """A sink that is called with the name of each checkpoint."""

    def checkpoint_written(self, name: str) -> None: ...


@runtime_checkable
class StopRequester(Protocol):
    """A sink that may end the run."""

    def stop_requested(self) -> str | None:
        """The reason, or None."""
        ...

    def stops_in_order(self) -> bool:
        """Whether the run then counts as finished; otherwise as interrupted."""
        ...


@runtime_checkable
class VideoSink(Protocol):
    """A sink that shows videos."""

    def show_video(self, path: Path, name: str, timesteps: int) -> None:
        """`name`: of the series that this video continues; `timesteps`: of the version that plays in it."""
        ...


@runtime_checkable
class StopAware(Protocol):
    """A sink that shows how far a run is from its end."""

    def begin(self, stop: StopConfig) -> None: ...


def announce_stop(sinks: Iterable[Sink], stop: StopConfig) -> None:
    """Give the stop conditions of a run to the sinks that show them."""
    for sink in sinks:
        if isinstance(sink, StopAware):
            sink.begin(stop)


def notify_checkpoint(sinks: Iterable[Sink], name: str) -> None:
    for sink in sinks:
        if isinstance(sink, CheckpointListener):
            sink.checkpoint_written(name)


def show_videos(sinks: Iterable[Sink], videos: Iterable[Path], timesteps: int) -> None:
    """Give the videos of one evaluation to the sinks that show them, as `evaluation/video_1` and so on."""
    for number, path in enumerate(videos, 1):
        for sink in sinks:
            if isinstance(sink, VideoSink):
                try:
                    sink.show_video(path, f"evaluation/video_{number}", timesteps)
                except (StoreError, OSError) as error:  # such as an unreachable directory: training does not depend on it
                    log.warning("%s does not show %s: %s", type(sink).__name__, path, error)


def find_stop_request(sinks: Iterable[Sink]) -> tuple[str, bool] | None:
    """(reason, whether the run counts as finished) of the first sink that requests the end of the run."""
    for sink in sinks:
        if isinstance(sink, StopRequester) and (reason := sink.stop_requested()) is not None:
            return f"callback: {reason}", sink.stops_in_order()
    return None


class CallbackSink:
    """A metrics sink that calls callbacks. The first exception of one is kept and ends the run; `raise_error` raises it."""

    def __init__(self, callbacks: Iterable[Callback | ReportFunction]) -> None:
        """Raises UsageError."""
        self._callbacks = [_as_callback(each) for each in callbacks]
        self.run = TrainingRun()
        self.error: Exception | None = None
        self._is_started = self._is_reported = False

    def start(self, directory: Path) -> None:
        self.run.directory, self._is_started = directory, True
        for callback in self._callbacks:
            callback.on_start(self.run)

    def write(self, numbers: Numbers) -> None:
        news = dict(numbers)
        evaluated = "evaluation/episodes" in news  # its version, and so its counters, may be older
        self.run.metrics |= {key: value for key, value in news.items() if not evaluated or "/" in key}
        self._call("on_evaluation" if evaluated else "on_report", news)
        self._is_reported = True

    def checkpoint_written(self, name: str) -> None:
        assert self.run.directory is not None
        self._call("on_checkpoint", self.run.directory / FOLDER / name)

    def stop_requested(self) -> str | None:
        """None before the first report: until then there is nothing to keep."""
        return self.run.stop_reason if self._is_reported else None

    def stops_in_order(self) -> bool:
        return self.error is None

    def close(self) -> None:
        """Sinks are closed with the run; `end` calls the callbacks."""

    def end(self, result: Result | None) -> None:
        """Call every `on_end`. The first exception of one is kept, unless there is an earlier one."""
        if not self._is_started:
            return
        for callback in self._callbacks:
            error = self._try(callback, "on_end", result)
            if error is not None and (self.error is not None or result is None):
                log.error("%s.on_end failed", type(callback).__name__, exc_info=error)
            self.error = self.error or error

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _call(self, name: str, value: Any) -> None:
        if self.error is not None:
            return
        for callback in self._callbacks:
            self.error = self._try(callback, name, value)
            if self.error is not None:
                log.warning("%s.%s raised %r: the run ends", type(callback).__name__, name, self.error)
                self.run.stop_reason = f"{type(callback).__name__}.{name} raised {type(self.error).__name__}"
                return

    def _try(self, callback: Callback, name: str, value: Any) -> Exception | None:
        try:
            getattr(callback, name)(self.run, value)
        except Exception as error:  # of the user's code: raised after the run is saved, and the other callbacks are called
            return error
        return None


def _as_callback(given: Any) -> Callback:
    if isinstance(given, Callback):
        return given
    if isinstance(given, type) and issubclass(given, Callback):
        raise UsageError(f"callbacks has the class {given.__name__}.", f"Give an object: {given.__name__}().")
    if callable(given):
        return _OnReport(given)
    raise UsageError(
        f"callbacks has a {type(given).__name__}, which is no callback.",
        "Give a ludus.Callback, or a function (run, metrics) that is called with every report.",
    )


class TrainingObservers:
    """Callbacks and progress display of a training that was started from Python. If the block fails, `on_end` gets no result."""

    def __init__(self, callbacks: Sequence[Callback | ReportFunction], progress: bool | None) -> None:
        """`progress` None: show it in a terminal and in a notebook."""
        self._callbacks = CallbackSink(callbacks)
        self._display: TrainingDisplay | None = None
        self.arguments: dict[str, Any] = {"sinks": [self._callbacks], "announce": None}
        """Arguments of `runner.train` and `runner.resume`."""
        if progress is False:
            return
        from ludus.experiments.control.training_display import make_display

        self._display = make_display(progress)
        if self._display is not None:
            announce = functools.partial(print, file=sys.stderr, flush=True)
            self.arguments = {"sinks": [self._display, self._callbacks], "announce": announce}

    def __enter__(self) -> TrainingObservers:
        if self._display is not None:
            self._display.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and error is not self._callbacks.error:
            self._callbacks.end(None)
        if self._display is not None:
            self._display.__exit__()

    def start(self, directory: Path) -> None:
        self._callbacks.start(directory)

    def conclude(self, result: Result) -> Result:
        """Raises what a callback raised."""
        self._callbacks.end(result)
        self._callbacks.raise_error()
        return result
