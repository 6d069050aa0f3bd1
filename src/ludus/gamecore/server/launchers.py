"""Process launchers: one `Games` for plain commands, and one per game with a prefork module, whose processes start in milliseconds."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Mapping

from ludus.errors import WorkerFailed
from ludus.gamecore.server.catalogue import GameEntry, fill_placeholders, find_placeholders
from ludus.gamecore.server.command import CONFIG, INHERITED, GameCommand, GameDirectory, has_wrapper
from ludus.process.commands.command import GameProcess, Games

log = logging.getLogger(__name__)

WARM_S = 120.0
"""Time limit for importing a prefork module; after that its games start as plain commands."""


class GameLaunchers:
    """`wait_until_warm` runs on an event loop; `start` and `close` block."""

    def __init__(self, base_environment: Mapping[str, str], mark: str) -> None:
        """`mark`: prefix of LUDUS_GAME_CONFIG in all processes of this server, by which they are found if the server was killed."""
        self._base_environment, self._mark = base_environment, mark
        self._plain = Games()
        self._warm: dict[str, Games] = {}
        self._warm_ups: dict[str, asyncio.Task[bool]] = {}
        self._lock = threading.Lock()

    async def wait_until_warm(self, game: str, entry: GameEntry) -> bool:
        """Wait for the import of the prefork module, and return whether the game is started by forking."""
        if entry.warm is None or has_wrapper(entry, self._base_environment):
            return False
        if game not in self._warm_ups:
            self._warm_ups[game] = asyncio.create_task(self._warm_up(game, entry, entry.warm))
        return await asyncio.shield(self._warm_ups[game])

    async def _warm_up(self, game: str, entry: GameEntry, module: str) -> bool:
        environment = {
            name: self._base_environment[name] for name in (*INHERITED, *entry.inherit) if name in self._base_environment
        }
        environment |= {
            name: fill_placeholders(value, {}) for name, value in entry.environment.items() if not find_placeholders([value])
        }
        environment[CONFIG] = self._mark
        try:
            games = Games(module, environment)
            with self._lock:
                self._warm[game] = games
            await asyncio.to_thread(games.wait_until_warm, WARM_S)
        except (WorkerFailed, OSError) as error:
            log.warning("%s: prefork failed, starting it as a command: %s", game, getattr(error, "message", error))
            return False
        log.info("%s: prefork module imported", game)
        return True

    def start(
        self,
        game: str,
        entry: GameEntry,
        command: GameCommand,
        game_dir: GameDirectory,
        name: str,
        on_exit: Callable[[GameProcess], object],
        *,
        warm: bool,
    ) -> GameProcess:
        """Raises WorkerFailed."""
        start = functools.partial(
            Games.start,
            log=game_dir.log,
            name=name,
            kind=game,
            environment=command.environment,
            directory=command.directory,
            threads=entry.limits.threads,
            log_bytes=max(1, int(entry.limits.log_mb * 500_000)),  # there are two files
            on_exit=on_exit,
        )
        if warm:
            try:
                return start(self._warm[game], [str(entry.warm)], warm=True)
            except WorkerFailed:
                if self._warm[game].warm_failure is None:  # not a failure of the prefork process
                    raise
        return start(self._plain, command.words)

    def close(self) -> None:
        """Kill all remaining processes."""
        with self._lock:
            pools = [self._plain, *self._warm.values()]
        for games in pools:
            games.close(0.0)
