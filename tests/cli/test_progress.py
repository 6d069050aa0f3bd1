"""Progress bars and lines."""

from __future__ import annotations

import io
import sys

import pytest

from ludus.cli import progress as progress_module
from ludus.cli.progress import ProgressBar, progress_line


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_is_printed_now_and_then_and_at_the_end() -> None:
    clock, out = Clock(), io.StringIO()
    with ProgressBar("rendering", 40, "frames", stream=out, clock=clock) as progress:
        for _ in range(40):
            clock.now += 0.6
            progress.advance()
    assert out.getvalue().splitlines() == [
        "rendering: 17 of 40 frames (42 %), 10 s, about 14 s left",
        "rendering: 34 of 40 frames (85 %), 20 s, about 3.6 s left",
        "rendering: 40 of 40 frames (100 %), 24 s, 1.67 per second",
    ]


def test_short_or_quiet_operations_print_nothing() -> None:
    clock, out = Clock(), io.StringIO()
    with ProgressBar("rendering", 3, stream=out, clock=clock) as progress:
        clock.now = 5.0
        progress.update(3)
    with ProgressBar("rendering", 3, stream=out, clock=clock, quiet=True) as progress:
        clock.now = 500.0
        progress.update(3)
    assert out.getvalue() == ""


def test_a_terminal_shows_how_many_items_are_done() -> None:
    out = Terminal()
    with ProgressBar("rendering", 8, "frames", stream=out) as progress:
        progress.update(2)
        progress.update(8)
    assert "8 of 8 frames" in out.getvalue()
    assert " per second" in out.getvalue()
    out = Terminal()
    with ProgressBar("starting 2 workers", stream=out):
        pass
    assert "starting 2 workers" in out.getvalue()


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [
        (0, 10, "playing: 0 (0 %), 12 s"),
        (5, 10, "playing: 5 (50 %), 12 s, about 12 s left"),
        (5, None, "playing: 5, 12 s, 0.417 per second"),
    ],
)
def test_the_line_shows_the_remaining_time_if_it_is_known(done: int, total: int | None, text: str) -> None:
    assert progress_line("playing", str(done), done, total, 12.0) == text


def test_a_deferred_bar_appears_with_its_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(progress_module, "LINE_EVERY_S", 0.0)
    with ProgressBar("rendering", unit="frames", deferred=True):
        pass
    assert out.getvalue() == ""
    with ProgressBar("rendering", unit="frames", deferred=True) as bar:
        bar.update(1, 4)
        bar.update(4, 4)
    assert out.getvalue().startswith("rendering: 1 of 4 frames (25 %)")
    with ProgressBar("rendering", unit="frames", quiet=True, deferred=True) as bar:
        bar.update(1, 4)
    assert out.getvalue().count("25 %") == 1
