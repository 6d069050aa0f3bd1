"""Handling of Ctrl-C, SIGTERM and a closed terminal while a command waits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from ludus.cli.output import notify


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` on SIGINT, SIGTERM and SIGHUP. Under nohup, SIGHUP stays ignored: closing the terminal must not stop it."""
    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled.remove(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def detach_on_interrupt(message: str) -> Iterator[None]:
    """Ctrl-C ends the waiting, not the job or game: print `message` and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        notify(message)
        raise typer.Exit(130) from None
