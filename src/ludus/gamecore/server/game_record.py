"""The server's record of one running game: its request, its process and its requested end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.display.game_screen import GameScreen
from ludus.errors import UsageError, WorkerFailed
from ludus.gamecore.server.catalogue import GameEntry
from ludus.gamecore.server.command import GameDirectory
from ludus.gamecore.server.game_status import GameStatus, State
from ludus.gamecore.server.request import GameRequest
from ludus.gamecore.server.resource_usage import ResourceUsage, process_tree_usage
from ludus.io import rotating_log
from ludus.process.commands.command import GameProcess
from ludus.process.screen_choice import SCREEN

EXIT_S = 20.0
"""Time limit for the guard process to report the exit of a stopped game."""

LAST_LINES = 20


class GameRecord:
    """Used on the event loop of its table, except `usage` and `log_size`. Times are on the clock of the loop."""

    def __init__(
        self,
        request: GameRequest,
        entry: GameEntry,
        game_dir: GameDirectory,
        status: GameStatus,
        start_from: Path | None,
        saves_states: bool,
    ) -> None:
        self.request, self.entry, self.game_dir, self.status = request, entry, game_dir, status
        self.start_from, self.saves_states = start_from, saves_states
        self.is_forked = False
        self.process: GameProcess | None = None
        self.screen: GameScreen | None = None
        self.began = asyncio.get_running_loop().time()
        """Time of the request; later the start of the first process."""
        self.time_limit_s = request.timeout_s or entry.limits.seconds
        self.deadline = math.inf
        self.started, self.ended, self.stop_requested = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """The first process has started or failed to; no process is left; an end was requested."""
        self.failure: WorkerFailed | None = None
        self.requested_end: tuple[State, str] | None = None
        """Final state and reason, once an end was requested."""
        self.grace_s, self.kill_deadline = entry.grace_s, math.inf
        self.initial_log_size = 0
        """Size of the log when the current process started."""

    def open_screen(self, environment: Mapping[str, str]) -> GameScreen:
        """The screen of the game's next process; `environment`: the server's. Raises WorkerFailed."""
        try:
            self.screen = GameScreen(choice=environment.get(SCREEN) or self.entry.display, environ=environment)
        except UsageError as error:
            raise WorkerFailed(f"{self.request.game} gets no screen. {error.message}", error.hint) from error
        return self.screen

    def close_screen(self) -> None:
        screen, self.screen = self.screen, None
        if screen is not None:
            screen.close()

    def request_end(self, state: State, reason: str, grace_s: float) -> None:
        """Stop the process. The first call sets state and reason; later calls can only shorten the grace period."""
        if self.requested_end is None:
            self.requested_end, self.grace_s = (state, reason), grace_s
        self.grace_s = min(grace_s, self.grace_s)
        self.kill_deadline = min(self.kill_deadline, asyncio.get_running_loop().time() + grace_s + EXIT_S)
        self.stop_requested.set()
        if self.process is not None:
            self.process.ask_to_stop(grace_s)

    def request_timeout(self) -> None:
        self.request_end("timed-out", f"It ran for longer than {self.time_limit_s:g} s.", self.entry.grace_s)

    def prepare_restart(self) -> None:
        """Clear the requested end of the previous process."""
        self.requested_end, self.kill_deadline = None, math.inf
        self.stop_requested.clear()

    def to_json(self) -> dict[str, Any]:
        if not self.status.is_over:
            self.status.seconds = round(asyncio.get_running_loop().time() - self.began, 3)
        return self.status.to_json()

    def usage(self) -> ResourceUsage:
        """Measure current resource usage. Reads /proc."""
        process = self.process
        if process is None or not process.guard:
            return ResourceUsage()
        return process_tree_usage(process.guard, shared=self.is_forked)

    def last_lines(self) -> list[str]:
        return rotating_log.tail(self.game_dir.log, LAST_LINES)

    def log_size(self) -> int:
        with contextlib.suppress(OSError):
            return self.game_dir.log.stat().st_size
        return 0
