"""Match scheduler: orders matches from a gamecore server, checks silent ones, and stops the rest on close.

Requests to the server run on one background thread, because they may take long.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import secrets
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
from ludus.envs.opponents.opponent_rows import ChooseScript
from ludus.errors import EnvironmentFault, LudusError, Refused, Unreachable
from ludus.gamecore.game_spec import ANY_RULE, CAMPS
from ludus.gamecore.live_matches import LiveMatch, LiveMatches, MatchProcess, MatchSlot
from ludus.protocol.gamecore_client import GameState

log = logging.getLogger(__name__)

_MIN_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
"""Delay between attempts, doubled each time."""
_SILENT_S: Final = 5.0
"""Silence after which a match is lost if its server is unreachable: games end with their server."""
_RETRY_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Status codes of temporary failures; any other error means that the request is wrong."""
_MAX_AGE_S: Final = 900.0
"""Older processes get no further matches and end with their current ones."""
_CLOSE_S: Final = 1.5
_STOP_THREADS: Final = 8
CAMP_S: Final = 3600.0
"""Time limit of a game for one action: longer than any learner update. A game detects a dead actor by its connection."""


class GamecoreApi(Protocol):
    """The methods of `GamecoreClient` used here."""

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
class OrderDefaults:
    """Settings shared by all orders."""

    start_from: str | None = None
    eval_mode: bool = False
    together: int = 0
    """Matches that one process plays concurrently; 0: one process per match."""


class MatchScheduler:
    """Keeps one match per slot running until `close`."""

    def __init__(
        self, client: GamecoreApi, matches: LiveMatches, actor: Mapping[str, Any], defaults: OrderDefaults, seed: int | None
    ) -> None:
        """`actor`: URL, token and time-out of this gateway, as one camp of an order."""
        self._client, self._matches, self._actor, self._defaults = client, matches, actor, defaults
        self._game = matches.game
        self._prefix = f"ludus-{secrets.token_hex(4)}"  # of match ids
        self._random: list[np.random.Generator] = [
            np_random(None if seed is None else seed + slot.index)[0] for slot in matches.slots
        ]
        self.timesteps = 0
        """Training timesteps; they determine the options of later matches."""
        self.choose_script: ChooseScript = lambda slot, match_id: None
        self.fault: EnvironmentFault | None = None
        """An error that retries cannot fix."""
        self.away_since: float | None = None
        self.away = ""
        """Why the server is unreachable; empty: it is not."""
        self._ever_started = False  # the server has accepted an order, so the settings are valid
        self._processes: list[MatchProcess] = []  # processes with matches; guarded by matches.condition
        most = defaults.together
        # Matches per process, so that all processes have about as many.
        self._capacity = -(-len(matches.slots) // -(-len(matches.slots) // most)) if most else 0
        self._condition = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence, self._match_numbers = itertools.count(), itertools.count()
        self._closing = False
        matches.on_match_end = self._on_match_end
        self._thread = threading.Thread(target=self._run, name="match-scheduler", daemon=True)

    def start(self) -> None:
        for slot in self._matches.slots:
            self._begin_match(slot)
        self._thread.start()

    def check(self, match: LiveMatch) -> None:
        """Check the state of a silent match on the server, asynchronously."""
        self._schedule(lambda: self._check(match))

    def close(self) -> None:
        """Stop the remaining games within a short time limit; the others end when they lose their actor."""
        with self._condition:
            self._closing = True
            self._due.clear()
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        with self._matches.condition:
            left = [] if self.away else [process.id for process in self._processes]
        if left:
            pool = ThreadPoolExecutor(_STOP_THREADS, thread_name_prefix="stopping")
            wait([pool.submit(self._stop, runtime_id) for runtime_id in left], _CLOSE_S)
            pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    # -- the thread

    def _schedule(self, action: Callable[[], None], after_s: float = 0.0) -> None:
        with self._condition:
            heapq.heappush(self._due, (time.monotonic() + after_s, next(self._sequence), action))
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closing and (not self._due or self._due[0][0] > time.monotonic()):
                    self._condition.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closing:
                    return
                action = heapq.heappop(self._due)[2]
            try:
                action()
            except Exception as error:  # last resort of this thread: a bug is raised in the thread that waits for the rows
                self._on_bug(error)
                return

    def _on_bug(self, error: Exception) -> None:
        log.exception("ordering matches failed")
        self._give_up(EnvironmentFault(f"Ordering matches failed: {error!r}."))

    def _give_up(self, fault: EnvironmentFault) -> None:
        with self._matches.condition:
            self.fault = fault
            self._matches.condition.notify_all()

    def _on_match_end(self, slot: MatchSlot, match: LiveMatch) -> None:
        """Begin the next match of a slot. Called by LiveMatches, holding its condition.

        If the same process can play it, the reply to this match's `end` announces it.
        """
        process = match.process
        assert process is not None
        process.leave(match)
        if match.lost:
            if process in self._processes:  # stop it once, and lose its other matches
                self._processes.remove(process)
                self._schedule(lambda: self._stop(process.id))
                self._lose(process, f"match {match.id} of the same process was lost")
            self._schedule(lambda: self._begin_match(slot), _retry_delay_s(slot.failures))
            return
        try:
            if slot.kind == RULE:
                self._game.opponent_sampler.record("" if match.opponent == ANY_RULE else match.opponent, match.won, match.lineup)
            self._begin_match(slot)
        except Exception as error:  # a bug: on the event loop it would only fail the session, and the rows would wait for ever
            self._on_bug(error)
        if not process.matches and process in self._processes:
            self._processes.remove(process)

    def _lose(self, process: MatchProcess, why: str) -> None:
        with self._matches.condition:
            for match in list(process.matches):
                self._matches.lose(match, why)

    def _begin_match(self, slot: MatchSlot) -> None:
        """Draw the next match of a slot, and assign it to a process with free capacity or to a new one."""
        with self._matches.condition:
            draw = self._game.draw(self._random[slot.index])
            match_id = f"{self._prefix}-{next(self._match_numbers)}"
            script = self.choose_script(slot.index, match_id) if slot.kind == PAST else None
            rule = draw.rule if script is None else script
            own, *others = slot.groups
            rows = {draw.camp: own} | ({1 - draw.camp: others[0]} if others and script is None else {})
            against = slot.kind if slot.kind != RULE else draw.rule or ANY_RULE
            now = time.monotonic()
            match = LiveMatch(match_id, slot.index, rows, against, now)
            match.lineup = draw.lineup
            drawn = ({"rule": rule} if rule else {}) | ({"start": "lane"} if draw.lane else {})
            options = {**self._game.options, **self._game.scheduled_options(self.timesteps), **drawn}
            heroes = None if draw.heroes is None else [[{"hero_id": hero} for hero in camp] for camp in draw.heroes]
            start_from = "any" if draw.repeats else self._defaults.start_from
            match.announcement = {
                "runtime_id": match.id,
                "heroes": heroes,
                "camps": [True if camp in rows else None for camp in range(CAMPS)],
                "seed": draw.seed,
                "options": options,
            }
            self._matches.add(slot, match)
            process = self._find_process(now - _MAX_AGE_S) if start_from is None else None
            if process is not None:
                process.join(match)
                return
            # A match that starts from a saved state of the server has its own process.
            process = MatchProcess(match.id, self._capacity if start_from is None else 0, now)
            process.add(match)
            self._processes.append(process)
        together = {"together": process.capacity} if process.capacity else {}
        order = {
            "server_config": [self._actor if camp in rows else None for camp in range(CAMPS)],
            "camp_config": {"mode": self._game.mode, "heroes": heroes},
            "eval_mode": self._defaults.eval_mode,
            "game": self._game.game,
            "seed": draw.seed,
            "start_from": start_from,
            "options": options | together,
        }
        self._schedule(lambda: self._start_process(process, order, 0))

    def _find_process(self, since: float) -> MatchProcess | None:
        """Return a process with free capacity that began after `since`."""
        free = (one for one in self._processes if len(one.matches) < one.capacity and one.began > since)
        return next(free, None)

    def _move_matches(self, process: MatchProcess) -> None:
        """Move the matches of a process that the server cannot start to existing processes with free capacity, of any age."""
        with self._matches.condition:
            if not process.capacity or process not in self._processes:  # its matches were lost in the meantime
                return
            self._processes.remove(process)
            ordered_last = sorted(process.matches, key=lambda match: match.id == process.id)
            for match in ordered_last:
                there = self._find_process(-math.inf)
                if there is None:
                    break
                process.leave(match)
                there.began = time.monotonic()
                there.join(match)
            if process.matches:
                self._processes.append(process)

    def _start_process(self, process: MatchProcess, order: dict[str, Any], attempts: int) -> None:
        if not process.matches:
            return
        try:
            self._client.start_game(process.id, **order)
        except Unreachable as error:
            self._mark_unreachable(error)
        except Refused as refused:
            if refused.status not in _RETRY_STATUSES:
                if not self._ever_started:  # the first order is invalid; a later refusal loses only these matches
                    message = f"{self._client.server} refused to start {self._game.game!r}: {refused.message}"
                    self._give_up(EnvironmentFault(message, refused.hint))
                self._lose(process, str(refused))
                return
            if attempts == 0:
                log.warning("%s cannot start a match now: %s", self._client.server, refused)
            self._move_matches(process)
        except LudusError as error:
            self._give_up(EnvironmentFault(f"Cannot order matches: {error}", error.hint))
            return
        else:
            self._mark_reachable()
            self._ever_started = process.accepted = True
            self._restart_timers(process)
            return
        self._restart_timers(process)
        self._schedule(lambda: self._start_process(process, order, attempts + 1), _retry_delay_s(attempts + 1))

    def _restart_timers(self, process: MatchProcess) -> None:
        """Restart the time limits of the matches of a process."""
        with self._matches.condition:
            for match in process.matches:
                match.last_activity = time.monotonic()

    def _check(self, match: LiveMatch) -> None:
        process = match.process
        if match.lost or process is None or not process.accepted:
            return
        silent_s = time.monotonic() - match.last_activity
        try:
            state = self._client.state(process.id)
        except Unreachable as error:
            self._mark_unreachable(error)
            if silent_s >= _SILENT_S:
                self._matches.lose(match, f"it is silent and its server is unreachable: {error.message}")
        except Refused as refused:
            if refused.status == 404:
                self._matches.lose(match, "its server has no record of it")
        else:
            self._mark_reachable()
            if state.over:
                last = f" Last output: {state.last_lines[-1]}" if state.last_lines else ""
                self._matches.lose(match, f"{state.describe()}{last}")

    def _stop(self, runtime_id: str) -> None:
        try:
            self._client.stop_game(runtime_id, grace_s=0.0)
        except LudusError as error:  # the game ends anyway when its actor is gone
            log.debug("stopping %s: %s", runtime_id, error)

    def _mark_unreachable(self, error: Unreachable) -> None:
        if not self.away:
            self.away_since = time.monotonic()
            log.warning("gamecore server unreachable, waiting: %s", error)
        self.away = str(error)

    def _mark_reachable(self) -> None:
        if self.away and self.away_since is not None:
            away_s = time.monotonic() - self.away_since
            log.warning("gamecore server %s reachable again after %.1f s", self._client.server, away_s)
        self.away, self.away_since = "", None


def _retry_delay_s(attempts: int) -> float:
    return 0.0 if attempts == 0 else exponential_delay(attempts, _MIN_DELAY_S, _MAX_DELAY_S)


def make_slots(kinds: Sequence[str], seats: int) -> tuple[list[MatchSlot], int]:
    """Return slots for groups with these kinds of opponents, and the number of rows including those of past opponents (last).

    Consecutive groups of kind `self` play each other.
    """

    def rows(group: int) -> tuple[int, ...]:
        return tuple(range(group * seats, (group + 1) * seats))

    slots: list[MatchSlot] = []
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
        slots.append(MatchSlot(len(slots), kind, groups))
        group += taken
    return slots, extra * seats
