"""Served players whose server does not answer. The coordinator asks the servers again, with growing delays, until they answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from ludus.core.backoff import Backoff
from ludus.errors import LudusError
from ludus.league.players import Player
from ludus.protocol.client import Client
from ludus.sampling.league_policies import read_player_token

_FIRST_S: Final = 2.0
_MAX_S: Final = 60.0
_STABLE_S: Final = 120.0
"""A server that was available for this time starts with short delays again."""
_TIMEOUT_S: Final = 5.0
_THREADS: Final = 4


def answers(player: Player) -> bool:
    """Whether the server of a player answers now. Blocks for up to five seconds."""
    try:
        with Client(player.model, read_player_token(player.model, player.token_file), _TIMEOUT_S, 0) as client:
            client.spec()
    except LudusError:
        return False
    return True


@dataclass
class _AwayPlayer:
    player: Player
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_S, _MAX_S))
    ask_at: float = 0.0
    answer: Future[bool] | None = None
    available_since: float | None = None
    """Since when its server answers; None: it does not."""


class AwayPlayers:
    """Asks the servers of players, on background threads. Close it at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, ask: Callable[[Player], bool] = answers) -> None:
        self._clock, self._ask = clock, ask
        self._players: dict[str, _AwayPlayer] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="away-players")  # threads start when they are needed

    def add(self, player: Player) -> float:
        """Begin to ask the server of a player; returns the seconds until then."""
        now = self._clock()
        entry = self._players.setdefault(player.name, _AwayPlayer(player))
        if entry.available_since is not None and now - entry.available_since >= _STABLE_S:
            entry.backoff.reset()
        delay = entry.backoff.next_delay()
        entry.player, entry.available_since, entry.ask_at = player, None, now + delay
        return delay

    def poll(self) -> list[str]:
        """Names of the players whose server has answered. Does not block."""
        now, returned = self._clock(), []
        for name, entry in self._players.items():
            if entry.available_since is not None:
                continue
            if entry.answer is None and now >= entry.ask_at:
                entry.answer = self._pool.submit(self._ask, entry.player)
            if entry.answer is None or not entry.answer.done():
                continue
            if entry.answer.result():
                entry.available_since = now
                returned.append(name)
            else:
                entry.ask_at = now + entry.backoff.next_delay()
            entry.answer = None
        return returned

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
