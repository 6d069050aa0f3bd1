"""Output of a training in a notebook: one line that is updated in place."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from typing import Any

Show = Callable[[str], Any]


def is_notebook() -> bool:
    """Whether this process is the kernel of Jupyter, Colab or the like."""
    from rich.console import Console

    return Console().is_jupyter


def updating_output() -> UpdatingOutput:
    """Output of the running cell of which each line replaces the last. Only in a notebook."""
    from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore] # every notebook has it

    handle: Any = None

    def show(text: str) -> None:
        nonlocal handle
        shown = HTML(f"<pre>{html.escape(text)}</pre>")
        if handle is None:
            handle = display(shown, display_id=True)
        else:
            handle.update(shown)

    return UpdatingOutput(show)


class UpdatingOutput(io.TextIOBase):
    """A text file of which only the last line is shown."""

    def __init__(self, show: Show) -> None:
        super().__init__()
        self._show, self._open = show, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._open = (self._open + text).split("\n")
        if lines:
            self._show(lines[-1])
        return len(text)
