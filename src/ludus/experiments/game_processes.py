"""Games that a run with `env: external` starts itself: a number of processes that play against it, started again when they end.

Each has a screen by `config.display`; with `auto` it has the display of this process, and no private one, because it may draw nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ludus.display.game_screen import GameScreen
from ludus.errors import LudusError
from ludus.process.commands.command import GameExit, GameProcess, Games
from ludus.process.screen_choice import AUTO, screen_choice

log = logging.getLogger(__name__)

MAX_DELAY_S = 30.0
"""Longest pause before a game that fails again and again is started once more."""

_FIRST_DELAY_S = 0.5
_HEALTHY_S = 10.0
"""A game that ran for this long has not failed at its start."""
_POLL_S = 0.5
_STOP_S = 5.0
_SHOWN_LINES = 5


def next_delay(failures: int) -> float:
    """Seconds before a game is started again that has failed this many times in a row."""
    return min(_FIRST_DELAY_S * 2.0 ** min(failures, 16), MAX_DELAY_S)


def fill_command(command: Sequence[str], url: str, number: int, seed: int) -> list[str]:
    """Replace {url}, {port}, {number} and {seed} in the words of a command."""
    values = {"{url}": url, "{port}": url.rpartition(":")[2], "{number}": str(number), "{seed}": str(seed)}
    filled = []
    for word in command:
        for placeholder, value in values.items():
            word = word.replace(placeholder, value)
        filled.append(word)
    return filled


@dataclass
class _Slot:
    number: int
    log: Path
    starts: int = 0
    due: float = 0.0
    game: GameProcess | None = None
    screen: GameScreen | None = None
    failures: int = 0


class GameProcesses:
    """Keeps `count` games running, in a thread of its own, until it is closed. `url`: where they find the run; `logs`: directory."""

    def __init__(self, command: Sequence[str], count: int, url: str, logs: Path) -> None:
        self._command, self._url = list(command), url
        self._slots = [_Slot(number, logs / f"game-{number}.log") for number in range(count)]
        self._games = Games()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="games", daemon=True)

    def __enter__(self) -> GameProcesses:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(_STOP_S)
        self._games.close(grace_s=_STOP_S)
        for slot in self._slots:
            _close_screen(slot)

    def _run(self) -> None:
        while not self._closing.is_set():
            for slot in self._slots:
                self._advance(slot)
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _advance(self, slot: _Slot) -> None:
        if slot.game is not None:
            if slot.game.exit is None:
                return
            self._note_exit(slot, slot.game.exit)
            slot.game = None
        if self._closing.is_set() or time.monotonic() < slot.due:
            return
        _close_screen(slot)
        try:
            slot.screen = None if screen_choice() == AUTO else GameScreen()
            if self._closing.is_set():  # a screen takes a while to start
                _close_screen(slot)
                return
            environment = None if slot.screen is None else slot.screen.environment(os.environ)
            seed = slot.number + slot.starts * len(self._slots)  # another one for each start
            command = fill_command(self._command, self._url, slot.number, seed)
            slot.starts += 1
            slot.game = self._games.start(command, log=slot.log, environment=environment, on_exit=lambda _: self._wake.set())
        except (LudusError, OSError) as error:
            self._retry_later(slot, f"cannot be started: {error}")

    def _note_exit(self, slot: _Slot, outcome: GameExit) -> None:
        if outcome.code == 0:
            slot.failures = 0 if outcome.seconds >= _HEALTHY_S else slot.failures
            slot.due = time.monotonic() + _FIRST_DELAY_S
            return
        if outcome.seconds >= _HEALTHY_S:
            slot.failures = 0
        lines = "".join(f"\n  {line}" for line in outcome.last_lines[-_SHOWN_LINES:])
        self._retry_later(slot, f"{outcome}{lines}")

    def _retry_later(self, slot: _Slot, what: str) -> None:
        slot.failures += 1
        pause = next_delay(slot.failures - 1)
        slot.due = time.monotonic() + pause
        log.warning("the game %s %s; it is started again in %.1f s (log: %s)", self._command[0], what, pause, slot.log)


def _close_screen(slot: _Slot) -> None:
    screen, slot.screen = slot.screen, None
    if screen is not None:
        screen.close()
