"""Matches that call us, as tables: what the seats of each have said, and who waits for an answer.

Games talk to the event loop of a gateway; whoever plays the rows is another thread. A tick is parked until that thread answers, all
tables at once; so every row goes one step at a time, whatever process its game runs in.

    game ──tick──▶ TableActor ──Said──▶ Table … parked …   rows ◀──collect── player
    game ◀─action─ TableActor ◀─────────────────────────── answer ◀──actions── player
"""

from __future__ import annotations

import asyncio
import logging
import math
import reprlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ludus.core import spaces
from ludus.core.plugins import did_you_mean
from ludus.core.tree import Array, Tree, leaves
from ludus.core.types import Bools
from ludus.errors import ConfigError, Refused
from ludus.gamecore.game_spec import ONLY_SEAT, Playable
from ludus.gateway.actor import Actor
from ludus.gateway.builtin_actor import decoded, encoded
from ludus.models.inference.micro_batcher import Answer

log = logging.getLogger(__name__)

_KEYS: Final = frozenset({"observation", "reward", "terminated", "truncated", "action_mask"})
_LARGEST: Final = 1e15
_SHOWN: Final = 300
"""Characters of a complaint that quotes the game."""
_LOGGED, _EVERY = 20, 100
"""So many losses are told one by one, then one in so many."""


Leaves = tuple[bytes, ...]
"""Of an observation: arrays as they are in memory, of the right size; whether they are right is looked at for all rows at once."""


@dataclass(slots=True)
class Said:
    """What one seat was told by its game: what it sees now, and what its last action has earned."""

    seen: Leaves | None
    mask: bytes | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


Rows = Mapping[int, tuple[int, ...]]
"""Camp → the rows of its seats."""


class Venue:
    """A game process, and the matches that are played in it. Changed under the lock of the Tables."""

    def __init__(self, runtime_id: str, places: int, now: float) -> None:
        """`places`: for how many at a time; 0: it plays the first one, and ends."""
        self.id, self.places, self.began = runtime_id, places, now
        self.tables: set[Table] = set()
        self.accepted = False
        """Its server has said that it starts it."""
        self.waiting: list[Table] = []
        """Those that the game is told of in every reply, until they begin."""

    def add(self, table: Table) -> None:
        self.tables.add(table)
        table.venue = self

    def join(self, table: Table) -> None:
        """As a further match: the game is told of it with the next reply."""
        self.add(table)
        table.told = False
        self.waiting.append(table)

    def leave(self, table: Table) -> None:
        self.tables.discard(table)
        if table in self.waiting:
            self.waiting.remove(table)


class Table:
    """One match, while it is ours. Everything in it is changed under the lock of its Tables."""

    def __init__(self, runtime_id: str, slot: int, rows: Rows, against: str, now: float) -> None:
        self.id, self.slot, self.rows, self.against = runtime_id, slot, rows, against
        self.lineup = 0
        """Which one, of those that are drawn from."""
        self.venue: Venue | None = None
        """The process that plays it."""
        self.order: Mapping[str, Any] = {}
        """As its game is told of it, if it is not the first one there."""
        self.told = True
        """Its game knows of it, or its server does."""
        self.seated: set[int] = set()
        self.ended: set[int] = set()
        """Camps whose session is over."""
        self.left: set[int] = set()
        """Rows whose seat has left a match that goes on."""
        self.parked: dict[tuple[int, ...], Answer] = {}
        """By the camps of a session."""
        self.said: dict[int, Said] = {}
        """By row, of this round."""
        self.missing = self._expected()
        self.decisions = 0
        self.result: Mapping[str, Any] = {}
        self.lost = ""
        """Why it came to nothing."""
        self.since = now
        """When it was ordered, last answered, or last heard."""
        self.looked = now

    def _expected(self) -> int:
        return sum(len(rows) for camp, rows in self.rows.items() if camp not in self.ended)

    @property
    def ready(self) -> bool:
        """All seats have spoken: it is our turn."""
        return self.missing == 0

    @property
    def over(self) -> bool:
        return len(self.ended) == len(self.rows)

    @property
    def won(self) -> bool:
        """By the own side."""
        winner = self.result.get("winner")
        return type(winner) is int and winner == next(iter(self.rows))

    def heard(self, camps: tuple[int, ...], said: Mapping[int, Said], now: float) -> None:
        self.said.update(said)
        self.since = now
        self.missing -= sum(len(self.rows[camp]) for camp in camps)

    def answered(self, now: float) -> dict[tuple[int, ...], Answer]:
        """A new round begins; who waits for the answer, by the camps of the session."""
        self.left = (self.left - self.said.keys()) | {row for row, one in self.said.items() if one.over}
        parked, self.parked, self.said = self.parked, {}, {}
        self.missing, self.since = self._expected(), now
        self.decisions += 1
        return parked


@dataclass
class Slot:
    """A place for one match after the other, always with the same rows."""

    index: int
    kind: str
    groups: tuple[tuple[int, ...], ...]
    """Rows of the own side, and of the other if it is played from here."""
    table: Table | None = None
    following: Table | None = None
    """The match after that one, while that one may still be looked at."""
    failures: int = 0
    """Matches in a row that came to nothing before they began."""
    over: bool = False
    """The last step ended its match: the next one only begins another."""

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(row for group in self.groups for row in group)


@dataclass
class Outcome:
    """What a step of all slots brought: rows that were told something, rows that were lost, matches that ended."""

    said: dict[int, Said] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    ended: list[Table] = field(default_factory=list)


class Tables:
    """All tables of one player. `finished(slot)` is called, under the lock, when a slot needs another match."""

    def __init__(self, game: Playable, slots: Sequence[Slot], clock: Callable[[], float] = time.monotonic) -> None:
        self.game, self.slots, self.clock = game, slots, clock
        self.finished: Callable[[Slot, Table], None] = lambda slot, table: None
        self.changed = threading.Condition()
        self.counts: Counter[str] = Counter()
        self.failures_in_a_row = 0
        """Matches that came to nothing before a decision, without one that did not."""
        self.last_loss = ""
        self.closed = False
        """Nothing is lost any more: nobody plays."""
        self._by_id: dict[str, Table] = {}
        self._awaited = 0  # tables in play whose games have yet to speak
        self._rows = sum(len(slot.rows) for slot in slots)

    # -- for whoever orders matches

    def lay(self, slot: Slot, table: Table) -> None:
        """The next match of a slot is ordered."""
        with self.changed:
            self._by_id[table.id] = table
            slot.following = table
            self.counts["ordered"] += 1

    def lose(self, table: Table, why: str) -> None:
        """Nothing more will come of this match. Its rows are lost in the step that is under way; the slot gets another."""
        with self.changed:
            self._lose(table, why)

    def _lose(self, table: Table, why: str) -> None:
        slot = self.slots[table.slot]
        if self.closed or table.lost or (table.over and table.ready) or table not in (slot.table, slot.following):
            return
        table.lost = self.last_loss = why or "?"
        if table is slot.table and not table.ready:
            self._awaited -= 1
        if table.decisions == 0:
            slot.failures += 1
            self.failures_in_a_row += 1
        self._count_lost(table, why)
        self._by_id.pop(table.id, None)
        for answer in table.parked.values():
            self._cancel(answer)
        if table is slot.following:
            slot.following = None
        self.finished(slot, table)
        self.changed.notify_all()

    def _count_lost(self, table: Table, why: str) -> None:
        self.counts["lost"] += 1
        number = self.counts["lost"]
        if number <= _LOGGED or number % _EVERY == 0:
            log.warning("match %s is lost: %s (%d so far)", table.id, why, number)

    @staticmethod
    def _cancel(answer: Answer) -> None:
        """Its session is over for us. May be called by any thread."""
        answer.get_loop().call_soon_threadsafe(_refuse, answer)

    # -- for sessions, on the event loop

    def sit(self, match: str, about: Mapping[str, Any]) -> tuple[Table, tuple[int, ...]]:
        """The table of a session that begins, and the camps it plays. Raises Refused."""
        with self.changed:
            table = self._by_id.get(match)
            if table is None:
                hint = "Send the runtime_id of the order as Ludus-Match."
                raise Refused(404, "match", f"No match {match[:80]!r} was ordered from here.", hint)
            try:
                self.game.check(about)
                camps = self._camps(table, about)
            except Refused as refused:
                self._lose(table, str(refused))
                raise
            table.seated.update(camps)
            if table.venue is not None and table in table.venue.waiting:
                table.venue.waiting.remove(table)
            return table, camps

    def _camps(self, table: Table, about: Mapping[str, Any]) -> tuple[int, ...]:
        if self.game.joint and about.get("camps") == sorted(table.rows) and not table.seated:
            return tuple(sorted(table.rows))
        camp = about.get("camp", next(iter(table.rows)) if len(table.rows) == 1 else None)
        if isinstance(camp, bool) or camp not in table.rows:
            hint = 'The body of start says it: {"camp": 0}.'
            raise Refused(422, "camp", f"camp is {reprlib.repr(camp)}, from here are played {sorted(table.rows)}.", hint)
        if camp in table.seated:
            raise Refused(409, "camp", f"Camp {camp} of this match has a session already.", "One for each camp, once.")
        return (int(camp),)

    def park(self, table: Table, camps: tuple[int, ...], said: Mapping[int, Said], answer: Answer) -> None:
        """A tick. Raises Refused when nobody waits for it any more."""
        with self.changed:
            self._still(table)
            table.parked[camps] = answer
            self._heard(table, camps, said)

    def end(self, table: Table, camps: tuple[int, ...], said: Mapping[int, Said], result: Mapping[str, Any]) -> None:
        with self.changed:
            if table.lost:
                return
            if table.decisions == 0:
                self._lose(table, "it ended before its first decision")
                return
            table.ended.update(camps)
            table.result = result or table.result
            self._heard(table, camps, said)
            if table.over:
                self._by_id.pop(table.id, None)
                self.counts["finished"] += 1
                self.finished(self.slots[table.slot], table)

    def _still(self, table: Table) -> None:
        if table.lost:
            raise Refused(410, "session_lost", f"This match was given up: {table.lost}", "End it.")

    def _heard(self, table: Table, camps: tuple[int, ...], said: Mapping[int, Said]) -> None:
        slot = self.slots[table.slot]
        table.heard(camps, said, self.clock())
        if table.ready:
            if table is slot.table:
                self._awaited -= 1
            if self._awaited == 0:
                self.changed.notify_all()

    # -- for the player of the rows

    def answer(self, actions: Callable[[int], Any]) -> None:
        """Tell all games whose turn it is not what their seats do; `actions(row)` as a message can say it."""
        answers: list[tuple[Answer, dict[int, Any]]] = []
        loop: asyncio.AbstractEventLoop | None = None
        with self.changed:
            now = self.clock()
            for slot in self.slots:
                table = slot.table
                if table is None or table.lost or not table.ready or table.over:
                    continue
                over = {row for row, said in table.said.items() if said.over}
                for camps, answer in table.answered(now).items():
                    loop = answer.get_loop()
                    rows = [row for camp in camps for row in table.rows[camp]]
                    answers.append((answer, {row: None if row in over else actions(row) for row in rows}))
                self._awaited += 1
                self.failures_in_a_row = slot.failures = 0
        if loop is not None:
            loop.call_soon_threadsafe(_release, answers)

    def settled(self, *, all_of_them: bool) -> bool:
        """Under the lock: no game in play is awaited, and not too many matches are just beginning: with `all_of_them` none. Those that a game is
        yet to be told of do not count: it is told by our answers."""
        if self._awaited:
            return False
        absent = beginning = 0
        for slot in self.slots:
            if not _shows(slot):
                absent += len(slot.rows)
                beginning += len(slot.rows) if slot.following is None or slot.following.told else 0
        if beginning == 0:
            return absent < self._rows
        return not all_of_them and 2 * beginning <= self._rows

    def waited_for(self) -> list[Table]:
        """Under the lock: those who have not spoken."""
        both = [table for slot in self.slots for table in (slot.table, slot.following)]
        return [table for table in both if table is not None and table.told and not table.ready and not table.lost]

    def collect(self) -> Outcome:
        """What came of the step. Every row is in it: told something, or lost."""
        outcome = Outcome()
        with self.changed:
            for slot in self.slots:
                self._collect(slot, outcome)
        return outcome

    def _collect(self, slot: Slot, outcome: Outcome) -> None:
        table, was_over, slot.over = slot.table, slot.over, False
        if table is None or table.lost:
            slot.table = None
            if slot.following is None or not slot.following.ready:
                outcome.lost += slot.rows
                return
            table = slot.table = slot.following
            slot.following = None
            if not was_over:
                outcome.lost += slot.rows  # they have done nothing in this step
            outcome.said |= table.said
            return
        outcome.said |= table.said
        outcome.lost += [row for row in slot.rows if row not in table.said]
        if table.over:
            outcome.ended.append(table)
            slot.table, slot.over = None, True

    def spoilt(self, wrong: Mapping[int, str], outcome: Outcome) -> list[int]:
        """Rows were shown something that is not right: their matches are lost, with all their rows, and so is a result that came with it."""
        lost: list[int] = []
        with self.changed:
            for slot in self.slots:
                why = next((wrong[row] for row in slot.rows if row in wrong), "")
                if not why:
                    continue
                lost += slot.rows
                for table in [table for table in outcome.ended if self.slots[table.slot] is slot]:
                    outcome.ended.remove(table)
                    self.counts["finished"] -= 1
                    self.last_loss = why
                    self._count_lost(table, why)
                if slot.table is not None:
                    self._lose(slot.table, why)
                slot.over = False
        outcome.lost += lost
        return lost


def _shows(slot: Slot) -> bool:
    """Whether the rows of a slot will have something to see after this step."""
    if slot.table is not None and not slot.table.lost:
        return True
    return slot.following is not None and slot.following.ready


def _release(answers: Sequence[tuple[Answer, dict[int, Any]]]) -> None:
    for answer, actions in answers:
        if not answer.done():
            answer.set_result(actions)
            if answer.waiter is not None:
                answer.waiter.resume()


def _refuse(answer: Answer) -> None:
    if not answer.done():
        answer.set_exception(Refused(410, "session_lost", "This match was given up.", "End it."))
        if answer.waiter is not None:
            answer.waiter.resume()


# -- a session ------------------------------------------------------------------------------------------------------------


class Reading:
    """How what games send becomes what rows see. Shared by all sessions.

    A tick is taken apart and measured; its numbers are checked when all rows are there, in one go: `Sight`.
    """

    def __init__(self, game: Playable) -> None:
        self.seats, self.joint, self.lone = game.seats, game.joint, game.seats == (ONLY_SEAT,)
        self._fit = spaces.SpaceParser(game.seen_space)
        self._paths = [(path.split(".") if path else [], _size(spec)) for path, spec in leaves(self._fit.spec)]
        self._branches = [(path.split(".") if path else [], keys) for path, keys in _branches(self._fit.spec)]
        self._action_space, self._masked = game.action_space, game.masked
        self._mask_size = spaces.mask_size(game.action_space)

    def parts(self, message: dict[str, Any], names: Collection[str]) -> Mapping[str, Any]:
        """By seat, of those that the session has. Raises Refused (422)."""
        if self.lone:
            return {ONLY_SEAT: message}
        seats = message.get("seats")
        if not isinstance(seats, dict) or message.keys() - {"seats"}:
            raise Refused(422, "seats", "This game has several seats.", f"Send {{seats: {{name: …}}}}: {', '.join(names)}.")
        if unknown := [name for name in seats if name not in names]:
            name = str(unknown[0])[:80]
            raise Refused(422, "seats", f"There is no seat {name!r}.", did_you_mean(name, names))
        return seats

    def said(self, part: Any, *, began: bool, last: bool) -> Said:
        """Of one seat. `began`: it has acted before. Raises Refused (422)."""
        if not isinstance(part, dict):
            raise Refused(422, "malformed", "A step is not an object.", 'Send {"observation": …, "reward": …}.')
        if part.keys() - _KEYS:
            key = str(min(part.keys() - _KEYS, key=str))[:80]
            raise Refused(422, "unknown_key", f"A step has an unknown key {key!r}.", did_you_mean(key, _KEYS))
        terminated, truncated = _flag(part, "terminated"), _flag(part, "truncated")
        if last:
            terminated = terminated or not truncated
        reward = _reward(part.get("reward", 0.0))
        if reward and not began:
            raise Refused(422, "reward", f"A reward of {reward:g} came before any action.", "Reward what an action did.")
        given, over = part.get("observation"), terminated or truncated
        if given is None and not terminated:
            raise Refused(422, "observation", "The observation is missing.", 'Send it as "observation".')
        seen = None if given is None else self._leaves(given) or self._fitted(given)
        return Said(seen, None if over else self._mask(part.get("action_mask")), reward, terminated, truncated)

    def _leaves(self, given: Any) -> Leaves | None:
        """Of an observation all of whose arrays are raw bytes, as games that are in a hurry send them; None: look closer."""
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

    def _fitted(self, given: Any) -> Leaves:
        try:
            return tuple(leaf.tobytes() for _, leaf in leaves(self._fit(given)))
        except ValueError as error:
            what = str(error)[:_SHOWN]
            raise Refused(422, "observation", f"The observation does not fit: {what}.", "GET /spec shows the space.") from None

    def _mask(self, given: Any) -> bytes | None:
        if given is None:
            return None
        if not self._masked:
            raise Refused(422, "action_mask", "This game was declared without masks.", "Set masked: true in env_config.")
        try:
            flat = given if given.__class__ is bytes else bytes(given) if given.__class__ is list else b""
        except (TypeError, ValueError):  # it has parts, or no whole numbers
            flat = b""
        if len(flat) == self._mask_size:
            return flat
        try:
            return spaces.flat_mask(given, self._action_space).tobytes()
        except (ConfigError, ValueError, TypeError) as error:
            what = str(error)[:_SHOWN]
            raise Refused(422, "action_mask", f"The action mask does not fit: {what}", "One 0 or 1 per option.") from None


class Sight:
    """What all rows see, as arrays; and which of them show something that is no number, or none of its category."""

    def __init__(self, game: Playable) -> None:
        self._spec = spaces.array_spec(game.seen_space)
        self._leaves = [(path, spec) for path, spec in leaves(self._spec)]
        self._bounds = spaces.categories(game.seen_space) | spaces.bits(game.seen_space)
        self._choices = spaces.choices(game.action_space)
        self.blank: Leaves = tuple(bytes(_size(spec)) for _, spec in self._leaves)
        """What a row sees before its first match."""
        self.open = b"\1" * spaces.mask_size(game.action_space)
        """A mask that forbids nothing."""

    def show(self, rows: Sequence[Leaves]) -> tuple[list[Array], dict[int, str]]:
        """An array of its own for each leaf, [rows, …]; and by row what is wrong."""
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
                    wrong[row] = f"its observation holds {array[row][~good[row]].reshape(-1)[0]} in {path or 'it'!r}"
        return arrays, wrong

    def allow(self, rows: Sequence[bytes]) -> tuple[Bools, dict[int, str]]:
        """[rows, options], and by row what is wrong."""
        given = np.frombuffer(bytearray().join(rows), np.uint8).reshape(len(rows), -1)
        wrong = {}
        bad: Bools = np.any(given > 1, axis=1)
        mask: Bools = given.view(np.bool_)
        closed = np.zeros(len(rows), np.bool_)
        for part in self._choices:
            closed |= ~given[:, part].any(axis=1)
        for row in np.flatnonzero(bad | closed).tolist():
            wrong[row] = (
                "its action mask holds something else than 0 and 1" if bad[row] else "its action mask forbids every action"
            )
        return mask, wrong

    def tree(self, arrays: Sequence[Array]) -> Tree:
        """In the structure of the observation."""
        return _planted(self._spec, "", {path: array for (path, _), array in zip(self._leaves, arrays, strict=True)})


def _at(given: Any, path: Sequence[str]) -> Any:
    for key in path:
        given = given[key]
    return given


def _planted(spec: Tree, path: str, arrays: Mapping[str, Array]) -> Tree:
    here = f"{path}." if path else ""
    if isinstance(spec, dict):
        return {key: _planted(item, f"{here}{key}", arrays) for key, item in spec.items()}
    if isinstance(spec, tuple):
        return tuple(_planted(item, f"{here}{i}", arrays) for i, item in enumerate(spec))
    return arrays[path]


def _branches(spec: Tree, path: str = "") -> Iterator[tuple[str, int]]:
    """Paths of all mappings, and how many keys each has."""
    if isinstance(spec, dict):
        yield path, len(spec)
        for key, item in spec.items():
            yield from _branches(item, f"{path}.{key}" if path else str(key))


def _size(spec: spaces.ArraySpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _flag(part: Mapping[str, Any], key: str) -> bool:
    value = part.get(key, False)
    if not isinstance(value, bool):
        raise Refused(422, key, f"{key} is {reprlib.repr(value)}.", "It is true or false.")
    return value


def _reward(given: Any) -> float:
    plain = isinstance(given, (int, float)) and not isinstance(given, bool)
    if not plain or not (abs(given) <= _LARGEST and math.isfinite(given)):
        raise Refused(422, "reward", f"The reward is {reprlib.repr(given)}.", f"It is a number up to {_LARGEST:g}.")
    return float(given)


class TableActor(Actor):
    """One camp of one match, or both. Whatever is wrong with what its game says costs the match, and nothing else."""

    def __init__(self, tables: Tables, reading: Reading) -> None:
        self._tables, self._reading = tables, reading
        self._table: Table | None = None
        self._camps: tuple[int, ...] = ()
        self._rows: dict[str, int] = {}
        self._acted: set[int] = set()

    async def start(self, session: str, body: bytes) -> bytes:
        about, packed = decoded(body) if body.strip() else ({}, False)
        table, self._camps = self._tables.sit(self.match, about)
        names = self._reading.seats if len(self._camps) == 1 else self._reading.joint
        self._rows = dict(zip(names, [row for camp in self._camps for row in table.rows[camp]], strict=True))
        self._table = table
        return encoded(self._handed(), packed)

    def _handed(self) -> dict[str, Any]:
        """The matches that the game is to play as well, if there are some."""
        venue = None if self._table is None else self._table.venue
        if venue is None or not venue.waiting:
            return {}
        with self._tables.changed:
            for table in venue.waiting:
                if not table.told:
                    table.told, table.since = True, self._tables.clock()
            return {"matches": [table.order for table in venue.waiting]}

    async def tick(self, body: bytes) -> bytes:
        table = self._table
        assert table is not None
        try:
            message, packed = decoded(body)
            message.pop("info", None)
            said = self._said(message)
            missing = [seat for seat, row in self._rows.items() if row not in said and row not in table.left]
            if missing:
                raise Refused(
                    422, "seats", f"The tick says nothing of {missing[0]!r}.", "Send all seats of the camp in every tick."
                )
        except Refused as refused:
            self._tables.lose(table, f"it sent something else than was agreed on: {refused}")
            raise
        answer = Answer(loop=asyncio.get_running_loop())
        self._tables.park(table, self._camps, said, answer)
        actions = await answer
        self._acted = {row for row, action in actions.items() if action is not None}
        if self._reading.lone:
            return encoded({"action": actions[self._rows[ONLY_SEAT]], **self._handed()}, packed)
        chosen = {seat: actions[row] for seat, row in self._rows.items() if row in said}
        return encoded({"actions": chosen, **self._handed()}, packed)

    def _said(self, message: dict[str, Any], *, last: bool = False) -> dict[int, Said]:
        said = {}
        for seat, part in self._reading.parts(message, self._rows).items():
            row = self._rows[seat]
            said[row] = self._reading.said(part, began=row in self._acted, last=last)
        return said

    async def end(self, body: bytes) -> bytes:
        table = self._table
        if table is None:
            return b""
        if self.ended_by != "game":
            self._tables.lose(table, f"its session ended: {self.ended_by}")
            return b""
        try:
            message, packed = decoded(body) if body.strip() else ({}, False)
            info = message.pop("info", None)
            said = self._said(message, last=True) if message else {}
        except Refused as refused:
            self._tables.lose(table, f"it ended in another way than was agreed on: {refused}")
            raise
        result = info.get("result") if isinstance(info, dict) else None
        self._tables.end(table, self._camps, said, result if isinstance(result, dict) else {})
        return encoded(self._handed(), packed)
