"""Who starts the processes: one `Games` for all commands, and one for each game that is kept warm, which is then a fork that takes milliseconds."""

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
"""So long may a module take to be imported; until then its games wait, and after that they are started as commands."""


class GameLaunchers:
    """`ready` belongs to an event loop; `start` and `close` block."""

    def __init__(self, base_environment: Mapping[str, str], mark: str) -> None:
        """`mark`: what LUDUS_GAME_CONFIG of all that belongs to this server begins with: so it is found if the server is killed."""
        self._base_environment, self._mark = base_environment, mark
        self._plain = Games()
        self._warm: dict[str, Games] = {}
        self._warm_ups: dict[str, asyncio.Task[bool]] = {}
        self._lock = threading.Lock()

    async def wait_until_warm(self, game: str, entry: GameEntry) -> bool:
        """Whether its games are forks. The first one waits until the module is imported, all others with it; no thread is held up by that."""
        if entry.warm is None or has_wrapper(entry, self._base_environment):
            return False
        if game not in self._warm_ups:
            self._warm_ups[game] = asyncio.create_task(self._warm_up(game, entry, entry.warm))
        return await asyncio.shield(self._warm_ups[game])

    async def _warm_up(self, game: str, entry: GameEntry, module: str) -> bool:
        environment = {name: self._base_environment[name] for name in (*INHERITED, *entry.inherit) if name in self._base_environment}
        environment |= {name: fill_placeholders(value, {}) for name, value in entry.environment.items() if not find_placeholders([value])}
        environment[CONFIG] = self._mark
        try:
            games = Games(module, environment)
            with self._lock:
                self._warm[game] = games
            await asyncio.to_thread(games.wait_until_warm, WARM_S)
        except (WorkerFailed, OSError) as error:
            log.warning("%s is started by its command: %s", game, getattr(error, "message", error))
            return False
        log.info("%s is kept warm", game)
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
                if self._warm[game].warm_failure is None:  # it is not because it is a fork
                    raise
        return start(self._plain, command.words)

    def close(self) -> None:
        """Whatever still runs is killed."""
        with self._lock:
            pools = [self._plain, *self._warm.values()]
        for games in pools:
            games.close(0.0)
