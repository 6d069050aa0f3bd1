"""One game of a server while it is looked after: its order, its process, as what it is to end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

from ludus.errors import WorkerFailed
from ludus.gamecore.server.catalogue import Entry
from ludus.gamecore.server.command import Place
from ludus.gamecore.server.game_status import State, Status
from ludus.gamecore.server.request import Order
from ludus.gamecore.server.resource_usage import Usage, usage
from ludus.io import rotating_log
from ludus.process.commands.command import CommandProcess

GONE_S = 20.0
"""A guard that has not spoken for so long after its game was to be gone will not any more."""

LAST_LINES = 20


class Match:
    """Belongs to the event loop of its hall, but for `seen` and `log_size`. Times are on the clock of the loop."""

    def __init__(self, order: Order, entry: Entry, place: Place, status: Status, start_from: Path | None, saves: bool) -> None:
        self.order, self.entry, self.place, self.status = order, entry, place, status
        self.start_from, self.saves = start_from, saves
        self.is_fork = False
        self.process: CommandProcess | None = None
        self.began = asyncio.get_running_loop().time()
        """When it was ordered; then: when its first process began."""
        self.allowed_s = order.timeout_s or entry.limits.seconds
        self.deadline = math.inf
        self.begun, self.over, self.wanted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """Its first process has begun or failed to; nothing of it is left; somebody wants its end."""
        self.failure: WorkerFailed | None = None
        self.asked: tuple[State, str] | None = None
        """As what it is to end, and why."""
        self.grace_s, self.gone_by = entry.grace_s, math.inf
        self.quiet_size = 0
        """Of its log, when this life began."""

    def end(self, state: State, reason: str, grace_s: float) -> None:
        """Ask its process to end; the first to ask says as what and why. A shorter grace replaces a longer."""
        if self.asked is None:
            self.asked, self.grace_s = (state, reason), grace_s
        self.grace_s = min(grace_s, self.grace_s)
        self.gone_by = min(self.gone_by, asyncio.get_running_loop().time() + grace_s + GONE_S)
        self.wanted.set()
        if self.process is not None:
            self.process.ask_to_stop(grace_s)

    def end_late(self) -> None:
        self.end("timed-out", f"It ran for longer than {self.allowed_s:g} s.", self.entry.grace_s)

    def live_again(self) -> None:
        """Whatever was wanted of its last life is done."""
        self.asked, self.gone_by = None, math.inf
        self.wanted.clear()

    def shown(self) -> dict[str, Any]:
        if not self.status.is_over:
            self.status.seconds = round(asyncio.get_running_loop().time() - self.began, 3)
        return self.status.to_json()

    def seen(self) -> Usage:
        """What it uses now. Reads /proc."""
        process = self.process
        return Usage() if process is None or not process.guard else usage(process.guard, shared=self.is_fork)

    def last_lines(self) -> list[str]:
        return rotating_log.tail(self.place.log, LAST_LINES)

    def log_size(self) -> int:
        with contextlib.suppress(OSError):
            return self.place.log.stat().st_size
        return 0
