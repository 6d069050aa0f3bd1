"""Keeps matches going on a gamecore server: orders the next one of every slot, looks after those that are silent, stops what is left.

One thread, because a request to the server may take long; nobody waits for it but the rows of the matches it is about.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from gymnasium.utils.seeding import np_random

from ludus.core.backoff import exponential_delay
from ludus.envs.opponents.opponent_mix import PAST, RULE, SELF
from ludus.errors import EnvironmentFault, LudusError, Refused, Unreachable
from ludus.gamecore.game_spec import ANY_RULE, CAMPS, Playable
from ludus.gamecore.live_matches import Slot, Table, Tables, Venue
from ludus.protocol.gamecore_client import GameState

log = logging.getLogger(__name__)

_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
"""Between attempts: doubled each time."""
_SILENT_S: Final = 5.0
"""A match that has been silent for so long while nobody reaches its server is lost: games end with their server."""
_LATER: Final = frozenset({408, 429, 500, 502, 503, 504})
"""What a server answers that may answer otherwise later; anything else is wrong with what was asked."""
_OPEN_S: Final = 900.0
"""A process that is older gets no further matches: it ends with those that it has."""
_CLOSE_S: Final = 1.5
_STOPPERS: Final = 8
CAMP_S: Final = 3600.0
"""A game waits for its actions while the learner learns, however long that takes; that its actor is gone it notices otherwise."""


class Client(Protocol):
    """Of `GamecoreClient`: what is needed of it."""

    @property
    def server(self) -> str: ...

    def start_game(
        self,
        runtime_id: str,
        server_config: Any = None,
        camp_config: Any = None,
        eval_mode: bool = False,
        *,
        game: str | None = None,
        seed: int | None = None,
        start_from: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> GameState: ...

    def state(self, runtime_id: str) -> GameState: ...

    def stop_game(self, runtime_id: str, *, grace_s: float | None = None) -> GameState | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Terms:
    """What all orders have in common."""

    actor: Mapping[str, Any]
    """Where we listen, and by which token: a camp of an order."""
    prefix: str
    """Of the ids of matches."""
    start_from: str | None = None
    eval_mode: bool = False
    together: int = 0
    """Matches that a process plays side by side, and goes on with others; 0: each has one of its own."""


class Matchmaker:
    """Begins with a match for every slot, and goes on until it is closed."""

    def __init__(self, client: Client, tables: Tables, game: Playable, terms: Terms, seed: int | None) -> None:
        self._client, self._tables, self._game, self._terms = client, tables, game, terms
        self._random: list[np.random.Generator] = [
            np_random(None if seed is None else seed + slot.index)[0] for slot in tables.slots
        ]
        self.timesteps = 0
        """Of training: matches that begin later may be told otherwise."""
        self.fault: EnvironmentFault | None = None
        """What will not get better by trying again."""
        self.away_since: float | None = None
        self.away = ""
        """Why the server does not answer; empty: it does."""
        self._begun = False  # the server has started a match for us: what we ask for is right
        self._venues: list[Venue] = []  # those with matches; changed under the lock of the tables
        self._places = _shared(len(tables.slots), terms.together)
        self._turn = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number, self._matches = itertools.count(), itertools.count()
        self._closing = False
        tables.finished = self._finished
        self._thread = threading.Thread(target=self._run, name="matchmaker", daemon=True)

    def start(self) -> None:
        for slot in self._tables.slots:
            self._begin(slot)
        self._thread.start()

    def look(self, table: Table) -> None:
        """Find out what became of a match that is silent."""
        self._do(lambda: self._look(table))

    def close(self) -> None:
        """Games that are left are stopped, as far as that is quick; the others find nobody to play with, and end."""
        with self._turn:
            self._closing = True
            self._due.clear()
            self._turn.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        with self._tables.changed:
            left = [] if self.away else [venue.id for venue in self._venues]
        if left:
            pool = ThreadPoolExecutor(_STOPPERS, thread_name_prefix="stopping")
            wait([pool.submit(self._stop, runtime_id) for runtime_id in left], _CLOSE_S)
            pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    # -- the thread

    def _do(self, what: Callable[[], None], after_s: float = 0.0) -> None:
        with self._turn:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._number), what))
            self._turn.notify()

    def _run(self) -> None:
        while True:
            with self._turn:
                while not self._closing and (not self._due or self._due[0][0] > time.monotonic()):
                    self._turn.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closing:
                    return
                what = heapq.heappop(self._due)[2]
            try:
                what()
            except Exception as error:  # a mistake of ours: the rows that wait for it are told, not left alone
                self._failed(error)
                return

    def _failed(self, error: Exception) -> None:
        log.exception("ordering matches failed")
        self._give_up(EnvironmentFault(f"Ordering matches failed: {error!r}."))

    def _give_up(self, fault: EnvironmentFault) -> None:
        with self._tables.changed:
            self.fault = fault
            self._tables.changed.notify_all()

    def _finished(self, slot: Slot, table: Table) -> None:
        """Called by the tables, under their lock. Where its game can go on with another match, it is told so in the reply to this one's end."""
        venue = table.venue
        assert venue is not None
        venue.leave(table)
        if table.lost:
            self._abandon(venue, table)
            self._do(lambda: self._begin(slot), _pause_s(slot.failures))
            return
        try:
            if slot.kind == RULE:
                self._game.rivals.record("" if table.against == ANY_RULE else table.against, table.won, table.lineup)
            self._begin(slot)
        except Exception as error:  # as in the thread: the event loop would answer the game, and the rows wait for ever
            self._failed(error)
        if not venue.tables and venue in self._venues:
            self._venues.remove(venue)

    def _abandon(self, venue: Venue, lost: Table) -> None:
        """With a match that is lost goes its process, and all that it plays."""
        if venue in self._venues:  # else this is one of the others
            self._venues.remove(venue)
            self._do(lambda: self._stop(venue.id))
            self._lose(venue, f"with match {lost.id}, in the same process")

    def _lose(self, venue: Venue, why: str) -> None:
        with self._tables.changed:
            for table in list(venue.tables):
                self._tables.lose(table, why)

    # -- what it does

    def _begin(self, slot: Slot) -> None:
        """Draw the next match of a slot: it goes to a process that has room for it, or to one of its own."""
        with self._tables.changed:
            draw = self._game.draw(self._random[slot.index])
            own, *others = slot.groups
            rows = {draw.camp: own} | ({1 - draw.camp: others[0]} if others else {})
            against = slot.kind if slot.kind != RULE else draw.rule or ANY_RULE
            now = time.monotonic()
            table = Table(f"{self._terms.prefix}-{next(self._matches)}", slot.index, rows, against, now)
            table.lineup = draw.lineup
            drawn = ({"rule": draw.rule} if draw.rule else {}) | ({"start": "lane"} if draw.lane else {})
            options = {**self._game.options, **self._game.changing(self.timesteps), **drawn}
            heroes = None if draw.heroes is None else [[{"hero_id": hero} for hero in camp] for camp in draw.heroes]
            start_from = "any" if draw.repeats else self._terms.start_from
            table.order = {
                "runtime_id": table.id,
                "heroes": heroes,
                "camps": [True if camp in rows else None for camp in range(CAMPS)],
                "seed": draw.seed,
                "options": options,
            }
            self._tables.lay(slot, table)
            venue = self._with_room(now - _OPEN_S) if start_from is None else None
            if venue is not None:
                venue.join(table)
                return
            # One that begins at a saved state, which the server has, is alone.
            venue = Venue(table.id, self._places if start_from is None else 0, now)
            venue.add(table)
            self._venues.append(venue)
        together = {"together": venue.places} if venue.places else {}
        order = {
            "server_config": [self._terms.actor if camp in rows else None for camp in range(CAMPS)],
            "camp_config": {"mode": self._game.mode, "heroes": heroes},
            "eval_mode": self._terms.eval_mode,
            "game": self._game.game,
            "seed": draw.seed,
            "start_from": start_from,
            "options": options | together,
        }
        self._do(lambda: self._order(venue, order, 0))

    def _with_room(self, since: float) -> Venue | None:
        """A process that began after that, and can play another match."""
        for venue in self._venues:
            if len(venue.tables) < venue.places and venue.began > since:
                return venue
        return None

    def _elsewhere(self, venue: Venue) -> None:
        """The server has no room for another process: its matches go to those that are there, however old, as far as these have room."""
        with self._tables.changed:
            if not venue.places or venue not in self._venues:  # its matches have been given up while it was ordered
                return
            self._venues.remove(venue)
            ordered_last = sorted(venue.tables, key=lambda table: table.id == venue.id)
            for table in ordered_last:
                there = self._with_room(-math.inf)
                if there is None:
                    break
                venue.leave(table)
                there.began = time.monotonic()
                there.join(table)
            if venue.tables:
                self._venues.append(venue)

    def _order(self, venue: Venue, order: dict[str, Any], attempts: int) -> None:
        if not venue.tables:
            return
        try:
            self._client.start_game(venue.id, **order)
        except Unreachable as error:
            self._is_away(error)
        except Refused as refused:
            if refused.status not in _LATER:
                self._refused(venue, refused)
                return
            if attempts == 0:
                log.warning("%s does not start a match now: %s", self._client.server, refused)
            self._elsewhere(venue)
        except LudusError as error:
            self._give_up(EnvironmentFault(f"Matches cannot be ordered: {error}", error.hint))
            return
        else:
            self._is_back()
            self._begun = venue.accepted = True
            self._waits(venue)
            return
        self._waits(venue)
        self._do(lambda: self._order(venue, order, attempts + 1), _pause_s(attempts + 1))

    def _waits(self, venue: Venue) -> None:
        """The time of its matches begins now."""
        with self._tables.changed:
            for table in venue.tables:
                table.since = time.monotonic()

    def _refused(self, venue: Venue, refused: Refused) -> None:
        """What is wrong with the first order is wrong with all; later the server may have been started anew, with other games."""
        if not self._begun:
            self._give_up(
                EnvironmentFault(f"{self._client.server} does not start {self._game.game!r}: {refused.message}", refused.hint)
            )
        self._lose(venue, str(refused))

    def _look(self, table: Table) -> None:
        venue = table.venue
        if table.lost or venue is None or not venue.accepted:
            return
        silent_s = time.monotonic() - table.since
        try:
            state = self._client.state(venue.id)
        except Unreachable as error:
            self._is_away(error)
            if silent_s >= _SILENT_S:
                self._tables.lose(table, f"it is silent, and so is its server: {error.message}")
        except Refused as refused:
            if refused.status == 404:
                self._tables.lose(table, "its server does not know it any more")
        else:
            self._is_back()
            if state.over:
                last = f" It said: {state.last_lines[-1]}" if state.last_lines else ""
                self._tables.lose(table, f"{state.told()}{last}")

    def _stop(self, runtime_id: str) -> None:
        try:
            self._client.stop_game(runtime_id, grace_s=0.0)
        except LudusError as error:  # it ends by itself when nobody answers it
            log.debug("stopping %s: %s", runtime_id, error)

    def _is_away(self, error: Unreachable) -> None:
        if not self.away:
            self.away_since = time.monotonic()
            log.warning("waiting for the gamecore server: %s", error)
        self.away = str(error)

    def _is_back(self) -> None:
        if self.away and self.away_since is not None:
            log.warning("the gamecore server %s is back after %.1f s", self._client.server, time.monotonic() - self.away_since)
        self.away, self.away_since = "", None


def _shared(matches: int, most: int) -> int:
    """How many of the matches go to one process, so that all have about as many."""
    return -(-matches // -(-matches // most)) if most else 0


def _pause_s(attempts: int) -> float:
    return 0.0 if attempts == 0 else exponential_delay(attempts, _PAUSE_S, _MAX_PAUSE_S)


def slots_of(kinds: Sequence[str], seats: int) -> tuple[list[Slot], int]:
    """Slots for groups with these kinds of opponents; and how many rows there are with those of past opponents, which come last.

    Groups of `self` play each other, two by two, as they follow one another.
    """

    def rows(group: int) -> tuple[int, ...]:
        return tuple(range(group * seats, (group + 1) * seats))

    slots: list[Slot] = []
    group, extra = 0, len(kinds)
    while group < len(kinds):
        kind = kinds[group]
        groups: tuple[tuple[int, ...], ...]
        if kind == SELF:
            groups, taken = (rows(group), rows(group + 1)), 2
        elif kind == PAST:
            groups, taken, extra = (rows(group), rows(extra)), 1, extra + 1
        else:
            groups, taken = (rows(group),), 1
        slots.append(Slot(len(slots), kind, groups))
        group += taken
    return slots, extra * seats
