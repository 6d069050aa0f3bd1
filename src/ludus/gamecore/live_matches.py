"""State of the running matches whose games call this process: the seat updates of each match and its pending ticks.

Games call the event loop of a gateway; the vector environment that steps the rows is another thread. A tick is parked until that
thread answers all matches at once, so that every row advances one step at a time, whichever process its game runs in.

    game ──tick──▶ MatchActor ──SeatUpdate──▶ LiveMatch (parked)   rows ◀──collect── vector env
    game ◀─action─ MatchActor ◀───────────────────────────────── answer ◀──actions── vector env
"""

from __future__ import annotations

import asyncio
import logging
import math
import reprlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ludus.core import spaces
from ludus.core.tree import Array, Tree, leaves
from ludus.core.types import Bools
from ludus.errors import ConfigError, Refused
from ludus.gamecore.game_spec import GameSpec
from ludus.gateway.actor import Actor
from ludus.models.inference.micro_batcher import BatchFuture
from ludus.protocol.codec import ONLY_SEAT
from ludus.protocol.step_message import decode_message, encode_message, misfit, parse_step, split_seats

log = logging.getLogger(__name__)

_LOG_FIRST, _LOG_EVERY = 20, 100
"""The first losses are logged one by one, later ones once per hundred."""


LeafBytes = tuple[bytes, ...]
"""The arrays of an observation as raw memory of the right size; values are checked later for all rows at once."""


@dataclass(slots=True)
class SeatUpdate:
    """One seat's part of a tick: its observation and the reward of its last action."""

    observation: LeafBytes | None
    mask: bytes | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


Rows = Mapping[int, tuple[int, ...]]
"""Camp → rows of its seats."""


class MatchProcess:
    """A game process and the matches that it plays. Guarded by `LiveMatches.condition`."""

    def __init__(self, runtime_id: str, capacity: int, now: float) -> None:
        """`capacity`: number of concurrent matches; 0: the process plays one match and ends."""
        self.id, self.capacity, self.began = runtime_id, capacity, now
        self.matches: set[LiveMatch] = set()
        self.accepted = False
        """Whether the server has accepted the request to start it."""
        self.waiting: list[LiveMatch] = []
        """Matches that are announced to the game in every reply until they begin."""

    def add(self, match: LiveMatch) -> None:
        self.matches.add(match)
        match.process = self

    def join(self, match: LiveMatch) -> None:
        """Add a further match, which the next reply announces to the game."""
        self.add(match)
        match.announced = False
        self.waiting.append(match)

    def leave(self, match: LiveMatch) -> None:
        self.matches.discard(match)
        if match in self.waiting:
            self.waiting.remove(match)


class LiveMatch:
    """One match from its order to its end. Guarded by `LiveMatches.condition`."""

    def __init__(self, runtime_id: str, slot: int, rows: Rows, opponent: str, now: float) -> None:
        self.id, self.slot, self.rows, self.opponent = runtime_id, slot, rows, opponent
        self.lineup = 0
        """Index of the lineup."""
        self.process: MatchProcess | None = None
        """The game process that plays it."""
        self.announcement: Mapping[str, Any] = {}
        """Description sent to a running game process; unused for the first match of a process."""
        self.announced = True
        """Whether its game process or the server knows of it."""
        self.seated_camps: set[int] = set()
        self.ended_camps: set[int] = set()
        """Camps whose session has ended."""
        self.left_rows: set[int] = set()
        """Rows whose seat has left while the match continues."""
        self.parked: dict[tuple[int, ...], BatchFuture] = {}
        """Pending ticks by the camps of their session."""
        self.updates: dict[int, SeatUpdate] = {}
        """Updates of the current round by row."""
        self.missing = self._count_expected()
        self.decisions = 0
        self.result: Mapping[str, Any] = {}
        self.lost = ""
        """Why the match was lost; empty: it was not."""
        self.last_activity = now
        """Time of the order, the last answer or the last request."""
        self.checked_at = now

    def _count_expected(self) -> int:
        return sum(len(rows) for camp, rows in self.rows.items() if camp not in self.ended_camps)

    @property
    def ready(self) -> bool:
        """Whether the updates of all seats have arrived."""
        return self.missing == 0

    @property
    def over(self) -> bool:
        return len(self.ended_camps) == len(self.rows)

    @property
    def won(self) -> bool:
        """Whether the learning side has won."""
        winner = self.result.get("winner")
        return type(winner) is int and winner == next(iter(self.rows))

    def receive(self, camps: tuple[int, ...], updates: Mapping[int, SeatUpdate], now: float) -> None:
        self.updates.update(updates)
        self.last_activity = now
        self.missing -= sum(len(self.rows[camp]) for camp in camps)

    def begin_round(self, now: float) -> dict[tuple[int, ...], BatchFuture]:
        """Begin a new round and return the pending ticks of the previous one."""
        self.left_rows = (self.left_rows - self.updates.keys()) | {row for row, one in self.updates.items() if one.over}
        parked, self.parked, self.updates = self.parked, {}, {}
        self.missing, self.last_activity = self._count_expected(), now
        self.decisions += 1
        return parked


@dataclass
class MatchSlot:
    """A sequence of matches that use the same rows."""

    index: int
    kind: str
    groups: tuple[tuple[int, ...], ...]
    """Rows of the learning side, and of the other side if this process plays it too."""
    current: LiveMatch | None = None
    upcoming: LiveMatch | None = None
    """The next match, ordered before the results of the current one are collected."""
    failures: int = 0
    """Consecutive matches that were lost before their first decision."""
    over: bool = False
    """Whether the last step ended a match, so that the next step only begins another."""
    match_id: str = ""
    """Of the last match that has begun."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(row for group in self.groups for row in group)


@dataclass
class StepOutcome:
    """Result of one step of all slots: updated rows, lost rows, ended matches."""

    updates: dict[int, SeatUpdate] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    ended: list[LiveMatch] = field(default_factory=list)


class LiveMatches:
    """All matches of one vector environment. Calls `on_match_end(slot, match)`, holding `condition`, when a slot needs another match."""

    def __init__(self, game: GameSpec, slots: Sequence[MatchSlot], clock: Callable[[], float] = time.monotonic) -> None:
        self.game, self.slots, self.clock = game, slots, clock
        self.on_match_end: Callable[[MatchSlot, LiveMatch], None] = lambda slot, match: None
        self.condition = threading.Condition()
        self.counts: Counter[str] = Counter()
        self.consecutive_failures = 0
        """Matches lost before their first decision since the last successful one."""
        self.last_loss = ""
        self.closed = False
        """After closing, no match is counted as lost."""
        self._by_id: dict[str, LiveMatch] = {}
        self._awaited = 0  # current matches with missing updates
        self._rows = sum(len(slot.rows) for slot in slots)

    # -- called by the scheduler

    def add(self, slot: MatchSlot, match: LiveMatch) -> None:
        """Register the next match of a slot."""
        with self.condition:
            self._by_id[match.id] = match
            slot.upcoming = match
            self.counts["ordered"] += 1

    def lose(self, match: LiveMatch, why: str) -> None:
        """Give up a match: its rows are lost in the current step, and the slot gets another match."""
        with self.condition:
            self._lose(match, why)

    def _lose(self, match: LiveMatch, why: str) -> None:
        slot = self.slots[match.slot]
        if self.closed or match.lost or (match.over and match.ready) or match not in (slot.current, slot.upcoming):
            return
        match.lost = self.last_loss = why or "?"
        if match is slot.current and not match.ready:
            self._awaited -= 1
        if match.decisions == 0:
            slot.failures += 1
            self.consecutive_failures += 1
        self._count_lost(match, why)
        self._by_id.pop(match.id, None)
        for answer in match.parked.values():
            answer.get_loop().call_soon_threadsafe(_refuse, answer)
        if match is slot.upcoming:
            slot.upcoming = None
        self.on_match_end(slot, match)
        self.condition.notify_all()

    def _count_lost(self, match: LiveMatch, why: str) -> None:
        self.counts["lost"] += 1
        number = self.counts["lost"]
        if number <= _LOG_FIRST or number % _LOG_EVERY == 0:
            log.warning("match %s was lost: %s (%d so far)", match.id, why, number)

    # -- called by sessions, on the event loop

    def seat_session(self, match_id: str, about: Mapping[str, Any]) -> tuple[LiveMatch, tuple[int, ...]]:
        """Return the match of a new session and the camps that it plays. Raises Refused."""
        with self.condition:
            match = self._by_id.get(match_id)
            if match is None:
                hint = "Send the runtime_id of the order as Ludus-Match."
                raise Refused(404, "match", f"This server has no match {match_id[:80]!r}.", hint)
            try:
                self.game.check(about)
                camps = self._camps(match, about)
            except Refused as refused:
                self._lose(match, str(refused))
                raise
            match.seated_camps.update(camps)
            if match.process is not None and match in match.process.waiting:
                match.process.waiting.remove(match)
            return match, camps

    def _camps(self, match: LiveMatch, about: Mapping[str, Any]) -> tuple[int, ...]:
        if self.game.joint_seats and about.get("camps") == sorted(match.rows) and not match.seated_camps:
            return tuple(sorted(match.rows))
        camp = about.get("camp", next(iter(match.rows)) if len(match.rows) == 1 else None)
        if isinstance(camp, bool) or camp not in match.rows:
            hint = 'Send it in the body of start: {"camp": 0}.'
            raise Refused(422, "camp", f"camp is {reprlib.repr(camp)}; this server plays {sorted(match.rows)}.", hint)
        if camp in match.seated_camps:
            raise Refused(409, "camp", f"Camp {camp} of this match has a session already.", "Start one session per camp.")
        return (int(camp),)

    def park(self, match: LiveMatch, camps: tuple[int, ...], updates: Mapping[int, SeatUpdate], answer: BatchFuture) -> None:
        """Store a tick until `answer` is called. Raises Refused when the match was lost."""
        with self.condition:
            if match.lost:
                raise Refused(410, "session_lost", f"This match was given up: {match.lost}", "End it.")
            match.parked[camps] = answer
            self._receive(match, camps, updates)

    def end(self, match: LiveMatch, camps: tuple[int, ...], updates: Mapping[int, SeatUpdate], result: Mapping[str, Any]) -> None:
        with self.condition:
            if match.lost:
                return
            if match.decisions == 0:
                self._lose(match, "it ended before its first decision")
                return
            match.ended_camps.update(camps)
            match.result = result or match.result
            self._receive(match, camps, updates)
            if match.over:
                self._by_id.pop(match.id, None)
                self.counts["finished"] += 1
                self.on_match_end(self.slots[match.slot], match)

    def _receive(self, match: LiveMatch, camps: tuple[int, ...], updates: Mapping[int, SeatUpdate]) -> None:
        slot = self.slots[match.slot]
        match.receive(camps, updates, self.clock())
        if match.ready:
            if match is slot.current:
                self._awaited -= 1
            if self._awaited == 0:
                self.condition.notify_all()

    # -- called by the vector environment

    def answer(self, actions: Callable[[int], Any]) -> None:
        """Answer all pending ticks; `actions(row)` returns an action as plain lists and numbers."""
        answers: list[tuple[BatchFuture, dict[int, Any]]] = []
        loop: asyncio.AbstractEventLoop | None = None
        with self.condition:
            now = self.clock()
            for slot in self.slots:
                match = slot.current
                if match is None or match.lost or not match.ready or match.over:
                    continue
                over = {row for row, update in match.updates.items() if update.over}
                for camps, answer in match.begin_round(now).items():
                    loop = answer.get_loop()
                    rows = [row for camp in camps for row in match.rows[camp]]
                    answers.append((answer, {row: None if row in over else actions(row) for row in rows}))
                self._awaited += 1
                self.consecutive_failures = slot.failures = 0
        if loop is not None:
            loop.call_soon_threadsafe(_send_actions, answers)

    def ready_to_step(self, *, wait_for_all: bool) -> bool:
        """Whether the next step can be collected. Call it holding `condition`.

        All current matches must be ready, and at most half of the rows (none with `wait_for_all`) may wait for a match that is
        starting. Matches not yet announced do not count: the answers of this step announce them.
        """
        if self._awaited:
            return False
        absent = beginning = 0
        for slot in self.slots:
            has_match = slot.current is not None and not slot.current.lost
            if not has_match and (slot.upcoming is None or not slot.upcoming.ready):  # no observation after this step
                absent += len(slot.rows)
                beginning += len(slot.rows) if slot.upcoming is None or slot.upcoming.announced else 0
        if beginning == 0:
            return absent < self._rows
        return not wait_for_all and 2 * beginning <= self._rows

    def silent_matches(self) -> list[LiveMatch]:
        """Announced matches with missing updates. Call it holding `condition`."""
        both = [match for slot in self.slots for match in (slot.current, slot.upcoming)]
        return [match for match in both if match is not None and match.announced and not match.ready and not match.lost]

    def collect(self) -> StepOutcome:
        """Return the outcome of the step. Every row is either updated or lost."""
        outcome = StepOutcome()
        with self.condition:
            for slot in self.slots:
                self._collect(slot, outcome)
        return outcome

    def _collect(self, slot: MatchSlot, outcome: StepOutcome) -> None:
        match, was_over, slot.over = slot.current, slot.over, False
        if match is None or match.lost:
            slot.current = None
            if slot.upcoming is None or not slot.upcoming.ready:
                outcome.lost += slot.rows
                return
            match = slot.current = slot.upcoming
            slot.upcoming, slot.match_id = None, match.id
            if not was_over:
                outcome.lost += slot.rows  # their actions of this step had no effect
            outcome.updates |= match.updates
            return
        outcome.updates |= match.updates
        outcome.lost += [row for row in slot.rows if row not in match.updates]
        if match.over:
            outcome.ended.append(match)
            slot.current, slot.over = None, True

    def discard_invalid(self, wrong: Mapping[int, str], outcome: StepOutcome) -> list[int]:
        """Give up the matches of rows with invalid observations, with all their rows and results. Returns these rows."""
        lost: list[int] = []
        with self.condition:
            for slot in self.slots:
                why = next((wrong[row] for row in slot.rows if row in wrong), "")
                if not why:
                    continue
                lost += slot.rows
                for match in [match for match in outcome.ended if self.slots[match.slot] is slot]:
                    outcome.ended.remove(match)
                    self.counts["finished"] -= 1
                    self.last_loss = why
                    self._count_lost(match, why)
                if slot.current is not None:
                    self._lose(slot.current, why)
                slot.over = False
        outcome.lost += lost
        return lost


def _send_actions(answers: Sequence[tuple[BatchFuture, dict[int, Any]]]) -> None:
    for answer, actions in answers:
        if not answer.done():
            answer.set_result(actions)
            if answer.waiter is not None:
                answer.waiter.resume()


def _refuse(answer: BatchFuture) -> None:
    if not answer.done():
        answer.set_exception(Refused(410, "session_lost", "This match was given up.", "End it."))
        if answer.waiter is not None:
            answer.waiter.resume()


# -- a session ------------------------------------------------------------------------------------------------------------


class StepParser:
    """Parses the messages of games. Shared by all sessions.

    Checks structure and sizes; `ObservationBatcher` checks the values of all rows at once.
    """

    def __init__(self, game: GameSpec) -> None:
        self.seats, self.joint, self.single = game.seats, game.joint_seats, game.seats == (ONLY_SEAT,)
        self._fit = spaces.SpaceParser(game.wire_space)
        self._paths = [(path.split(".") if path else [], _size(spec)) for path, spec in leaves(self._fit.spec)]
        self._branches = [(path.split(".") if path else [], keys) for path, keys in _branches(self._fit.spec)]
        self._action_space, self._masked = game.action_space, game.masked
        self._mask_size = spaces.mask_size(game.action_space)

    def parse_step(self, part: Any, *, began: bool, last: bool) -> SeatUpdate:
        """Parse the part of one seat. `began`: it has acted before. Raises Refused (422)."""
        step = parse_step(part, playing=began, last=last)
        given = step.observation
        try:
            seen = None if given is None else self._leaves(given) or tuple(x.tobytes() for _, x in leaves(self._fit(given)))
        except ValueError as error:
            raise misfit("observation", error) from None
        mask = None if step.over else self._mask(step.action_mask)
        return SeatUpdate(seen, mask, step.reward, step.terminated, step.truncated)

    def _leaves(self, given: Any) -> LeafBytes | None:
        """Fast path for observations of raw bytes; None: use the slow path."""
        found = []
        try:
            for path, keys in self._branches:
                if len(_at(given, path)) != keys:
                    return None
            for path, size in self._paths:
                leaf = _at(given, path)
                if leaf.__class__ is not bytes or len(leaf) != size:
                    return None
                found.append(leaf)
        except (TypeError, KeyError):
            return None
        return tuple(found)

    def _mask(self, given: Any) -> bytes | None:
        if given is None:
            return None
        if not self._masked:
            raise Refused(422, "action_mask", "This game was declared without masks.", "Set masked: true in env_config.")
        try:
            flat = given if given.__class__ is bytes else bytes(given) if given.__class__ is list else b""
        except (TypeError, ValueError):  # nested, or not integers
            flat = b""
        if len(flat) == self._mask_size:
            return flat
        try:
            return spaces.flat_mask(given, self._action_space).tobytes()
        except (ConfigError, ValueError, TypeError) as error:
            raise misfit("action_mask", error) from None


class ObservationBatcher:
    """Builds the observation and mask arrays of all rows, and finds rows with non-finite or out-of-range values."""

    def __init__(self, game: GameSpec) -> None:
        self._spec = spaces.array_spec(game.wire_space)
        self._leaves = [(path, spec) for path, spec in leaves(self._spec)]
        self._bounds = spaces.categories(game.wire_space) | spaces.bits(game.wire_space)
        self._choices = spaces.choices(game.action_space)
        self.blank: LeafBytes = tuple(bytes(_size(spec)) for _, spec in self._leaves)
        """Observation of a row before its first match."""
        self.open = b"\1" * spaces.mask_size(game.action_space)
        """Mask that allows every action."""

    def show(self, rows: Sequence[LeafBytes]) -> tuple[list[Array], dict[int, str]]:
        """Return a new array [rows, …] for each leaf, and the errors by row."""
        arrays, wrong = [], {}
        for i, (path, spec) in enumerate(self._leaves):
            array = np.frombuffer(bytearray().join([row[i] for row in rows]), spec.dtype).reshape(len(rows), *spec.shape)
            arrays.append(array)
            if spec.dtype.kind == "f":
                good = np.isfinite(array)
            elif path in self._bounds:
                low, high = self._bounds[path]
                good = (array >= low) & (array < high)
            else:
                continue
            if not good.all():
                for row in np.flatnonzero(~good.reshape(len(rows), -1).all(axis=1)).tolist():
                    wrong[row] = f"its observation contains {array[row][~good[row]].reshape(-1)[0]} in {path or 'it'!r}"
        return arrays, wrong

    def allow(self, rows: Sequence[bytes]) -> tuple[Bools, dict[int, str]]:
        """Return the masks [rows, options], and the errors by row."""
        given = np.frombuffer(bytearray().join(rows), np.uint8).reshape(len(rows), -1)
        bad: Bools = np.any(given > 1, axis=1)
        closed = np.zeros(len(rows), np.bool_)
        for part in self._choices:
            closed |= ~given[:, part].any(axis=1)
        wrong = dict.fromkeys(np.flatnonzero(closed).tolist(), "its action mask forbids every action")
        wrong |= dict.fromkeys(np.flatnonzero(bad).tolist(), "its action mask contains values other than 0 and 1")
        return given.view(np.bool_), wrong

    def tree(self, arrays: Sequence[Array]) -> Tree:
        """Arrange leaf arrays in the structure of the observation."""
        return _build_tree(self._spec, "", {path: array for (path, _), array in zip(self._leaves, arrays, strict=True)})


def _at(given: Any, path: Sequence[str]) -> Any:
    for key in path:
        given = given[key]
    return given


def _build_tree(spec: Tree, path: str, arrays: Mapping[str, Array]) -> Tree:
    here = f"{path}." if path else ""
    if isinstance(spec, dict):
        return {key: _build_tree(item, f"{here}{key}", arrays) for key, item in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_build_tree(item, f"{here}{i}", arrays) for i, item in enumerate(spec))
    return arrays[path]


def _branches(spec: Tree, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the path of every mapping and its number of keys."""
    if isinstance(spec, dict):
        yield path, len(spec)
        for key, item in spec.items():
            yield from _branches(item, f"{path}.{key}" if path else str(key))


def _size(spec: spaces.ArraySpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


class MatchActor(Actor):
    """Plays one or both camps of one match. An invalid message loses this match only."""

    def __init__(self, matches: LiveMatches, parser: StepParser) -> None:
        self._matches, self._parser = matches, parser
        self._match: LiveMatch | None = None
        self._camps: tuple[int, ...] = ()
        self._rows: dict[str, int] = {}
        self._acted: set[int] = set()

    async def start(self, session: str, body: bytes) -> bytes:
        about, packed = decode_message(body) if body.strip() else ({}, False)
        match, self._camps = self._matches.seat_session(self.match, about)
        names = self._parser.seats if len(self._camps) == 1 else self._parser.joint
        self._rows = dict(zip(names, [row for camp in self._camps for row in match.rows[camp]], strict=True))
        self._match = match
        return encode_message(self._new_matches(), packed)

    def _new_matches(self) -> dict[str, Any]:
        """Announce the further matches that the game process is to play."""
        process = None if self._match is None else self._match.process
        if process is None or not process.waiting:
            return {}
        with self._matches.condition:
            for match in process.waiting:
                if not match.announced:
                    match.announced, match.last_activity = True, self._matches.clock()
            return {"matches": [match.announcement for match in process.waiting]}

    async def tick(self, body: bytes) -> bytes:
        match = self._match
        assert match is not None
        try:
            message, packed = decode_message(body)
            message.pop("info", None)
            updates = self._parse_updates(message)
            missing = [seat for seat, row in self._rows.items() if row not in updates and row not in match.left_rows]
            if missing:
                raise Refused(422, "seats", f"The tick lacks seat {missing[0]!r}.", "Send all seats of the camp in every tick.")
        except Refused as refused:
            self._matches.lose(match, f"it sent an invalid tick: {refused}")
            raise
        answer = BatchFuture(loop=asyncio.get_running_loop())
        self._matches.park(match, self._camps, updates, answer)
        actions = await answer
        self._acted = {row for row, action in actions.items() if action is not None}
        if self._parser.single:
            return encode_message({"action": actions[self._rows[ONLY_SEAT]], **self._new_matches()}, packed)
        chosen = {seat: actions[row] for seat, row in self._rows.items() if row in updates}
        return encode_message({"actions": chosen, **self._new_matches()}, packed)

    def _parse_updates(self, message: dict[str, Any], *, last: bool = False) -> dict[int, SeatUpdate]:
        updates = {}
        for seat, part in split_seats(message, self._rows, allow_none=True).items():
            row = self._rows[seat]
            updates[row] = self._parser.parse_step(part, began=row in self._acted, last=last)
        return updates

    async def end(self, body: bytes) -> bytes:
        match = self._match
        if match is None:
            return b""
        if self.ended_by != "game":
            self._matches.lose(match, f"its session ended: {self.ended_by}")
            return b""
        try:
            message, packed = decode_message(body) if body.strip() else ({}, False)
            info = message.pop("info", None)
            updates = self._parse_updates(message, last=True) if message else {}
        except Refused as refused:
            self._matches.lose(match, f"it sent an invalid end: {refused}")
            raise
        result = info.get("result") if isinstance(info, dict) else None
        self._matches.end(match, self._camps, updates, result if isinstance(result, dict) else {})
        return encode_message(self._new_matches(), packed)
