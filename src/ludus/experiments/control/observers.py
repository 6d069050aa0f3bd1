"""Progress display and callbacks of a training that was started from Python."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from ludus.experiments.control.callbacks import Callback, CallbackSink, ReportFunction
from ludus.experiments.result import Result

if TYPE_CHECKING:
    from ludus.experiments.control.training_display import TrainingDisplay


class Observers:
    """Made by `observe_training`. `arguments` are those of `runner.train` and `runner.resume`."""

    def __init__(self, callbacks: CallbackSink, display: TrainingDisplay | None) -> None:
        self._callbacks = callbacks
        sinks = [callbacks] if display is None else [display, callbacks]
        self.arguments: dict[str, Any] = {"sinks": sinks, "announce": None if display is None else _print_to_stderr}

    def start(self, directory: Path) -> None:
        self._callbacks.start(directory)

    def conclude(self, result: Result) -> Result:
        """Raises what a callback raised."""
        self._callbacks.end(result)
        self._callbacks.raise_error()
        return result


@contextlib.contextmanager
def observe_training(callbacks: Sequence[Callback | ReportFunction], progress: bool | None) -> Iterator[Observers]:
    """`progress` None: show it in a terminal and in a notebook. When the block fails, `on_end` is called without a result."""
    sink = CallbackSink(callbacks)
    with contextlib.ExitStack() as stack:
        display = make_display(progress)
        if display is not None:
            stack.enter_context(display)
        try:
            yield Observers(sink, display)
        except BaseException as error:
            if error is not sink.error:
                sink.end(None)
            raise


def make_display(progress: bool | None) -> TrainingDisplay | None:
    """A display on standard error, redrawn in place where possible; None: nothing to show."""
    if progress is False:
        return None
    from ludus.experiments.control.notebook import is_notebook, updating_output

    notebook = is_notebook()
    if not (notebook or progress or sys.stderr.isatty()):
        return None
    from ludus.experiments.control.training_display import TrainingDisplay

    if notebook:
        return TrainingDisplay(stream=cast(TextIO, updating_output()), live=False)
    return TrainingDisplay(stream=sys.stderr)


def _print_to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)  # noqa: T201 - part of the progress display
