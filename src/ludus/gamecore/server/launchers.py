"""Who starts the processes: one `CommandRunner` for all commands, and one for each game that is kept warm, which is then a fork that takes milliseconds."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Mapping

from ludus.errors import WorkerFailed
from ludus.gamecore.server.catalogue import Entry, filled, holes
from ludus.gamecore.server.command import CONFIG, INHERITED, Launch, Place, wrapped
from ludus.process.commands.command import CommandProcess, CommandRunner

log = logging.getLogger(__name__)

WARM_S = 120.0
"""So long may a module take to be imported; until then its games wait, and after that they are started as commands."""


class Starters:
    """`ready` belongs to an event loop; `start` and `close` block."""

    def __init__(self, surroundings: Mapping[str, str], mark: str) -> None:
        """`mark`: what LUDUS_GAME_CONFIG of all that belongs to this server begins with: so it is found if the server is killed."""
        self._surroundings, self._mark = surroundings, mark
        self._plain = CommandRunner()
        self._warm: dict[str, CommandRunner] = {}
        self._warming: dict[str, asyncio.Task[bool]] = {}
        self._lock = threading.Lock()

    async def ready(self, game: str, entry: Entry) -> bool:
        """Whether its games are forks. The first one waits until the module is imported, all others with it; no thread is held up by that."""
        if entry.warm is None or wrapped(entry, self._surroundings):
            return False
        if game not in self._warming:
            self._warming[game] = asyncio.create_task(self._warm_up(game, entry, entry.warm))
        return await asyncio.shield(self._warming[game])

    async def _warm_up(self, game: str, entry: Entry, module: str) -> bool:
        environment = {name: self._surroundings[name] for name in (*INHERITED, *entry.inherit) if name in self._surroundings}
        environment |= {name: filled(value, {}) for name, value in entry.environment.items() if not holes([value])}
        environment[CONFIG] = self._mark
        try:
            games = CommandRunner(module, environment)
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
        entry: Entry,
        what: Launch,
        place: Place,
        name: str,
        on_exit: Callable[[CommandProcess], object],
        *,
        warm: bool,
    ) -> CommandProcess:
        """Raises WorkerFailed."""
        start = functools.partial(
            CommandRunner.start,
            log=place.log,
            name=name,
            kind=game,
            environment=what.environment,
            directory=what.directory,
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
        return start(self._plain, what.command)

    def close(self) -> None:
        """Whatever still runs is killed."""
        with self._lock:
            everyone = [self._plain, *self._warm.values()]
        for games in everyone:
            games.close(0.0)
