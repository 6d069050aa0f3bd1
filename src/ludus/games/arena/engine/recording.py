"""Recordings of matches: how a match began and every decision since, which is enough to play it again, bit for bit.

recorder = Recorder(arena, m, names=("hard", "medium"))
while not arena.over[m]:
    recorder.add(actions)  # before each step
    arena.step(actions)
recorder.write(path)

for moment in replay(read_recording(path)):
    ...  # moment.units, moment.match

A match of eight minutes with six heroes takes 5 to 20 kB. Hashes of the state go with it, so that a replay that goes another way,
on whatever machine, is noticed at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ludus.core.types import Ints32
from ludus.errors import ConfigError, Damaged, UsageError
from ludus.games.arena.engine.checksummed_file import read_sealed, seal, write_whole
from ludus.games.arena.engine.heroes import HEROES, row_of
from ludus.games.arena.engine.layout import EVERY, HEADS, LIMIT, OVER, RULES, SEED, TICK, TICKS_PER_SECOND, WINNER
from ludus.games.arena.engine.settings import MAX_SECONDS, MAX_SIZE, Lineup
from ludus.games.arena.engine.vector import Arena, parse_state

KIND: Final = b"LudusArenaRecord"
FORMAT: Final = 1
HASH_EVERY: Final = 50
"""Decisions from one hash of the state to the next: ten seconds of the game."""
MAX_DECISIONS: Final = MAX_SECONDS * TICKS_PER_SECOND
_HASH = 16
_MAX_NAME = 80
_LOW, _HIGH = -1, 127  # no head of an action has as many choices; everything beyond is equally illegal

Decisions = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Recording:
    """`seed`, `lineup`, `limit` and `every` say how it began; `start`, if there is one, is the saved state it began from instead."""

    size: int
    seed: int
    lineup: Lineup
    limit: int
    every: int
    decisions: Decisions  # [T, H, 4]
    hashes: Sequence[bytes]
    """Of the state before decisions 0, `hash_every`, 2 · `hash_every` …, and after the last one."""
    lenient: bool = False
    start: bytes | None = None
    names: tuple[str, str] = ("", "")
    result: dict[str, Any] = field(default_factory=dict)
    hash_every: int = HASH_EVERY
    rules: int = RULES

    @property
    def mode(self) -> str:
        return f"{self.size}v{self.size}"

    @property
    def seconds(self) -> float:
        """Of the game that it shows."""
        return len(self.decisions) * self.every / TICKS_PER_SECOND

    def begin(self, arena: Arena | None = None) -> Arena:
        """An Arena with this one match at its beginning."""
        arena = arena or Arena(self.size, 1, lineup=self.lineup, lenient=self.lenient)
        if self.start is not None:
            arena.load(0, self.start)
        else:
            arena.reset([self.seed], lineups=[self.lineup])
            arena.match[0, LIMIT], arena.match[0, EVERY] = self.limit, self.every
        return arena


class Recorder:
    """Of one match of an Arena, from now on. Not to be used after the match was reset."""

    def __init__(self, arena: Arena, m: int = 0, names: Sequence[str] = ("", ""), hash_every: int = HASH_EVERY) -> None:
        if len(names) != 2:
            raise UsageError(f"{len(names)} names for two camps: {list(names)!r}.", "One for each.")
        self._arena, self._m, self._every = arena, m, hash_every
        self._names = (str(names[0])[:_MAX_NAME], str(names[1])[:_MAX_NAME])
        self._decisions: list[Decisions] = []
        self._hashes: list[bytes] = []
        self._begun: Recording | None = None

    def __len__(self) -> int:
        """Decisions so far."""
        return len(self._decisions)

    def add(self, actions: npt.NDArray[np.integer]) -> None:
        """What all heroes of all matches are about to do, [M, H, 4]; call it before `step`. Nothing once the match is over."""
        if self._arena.match[self._m, OVER]:
            return
        if self._begun is None:
            self._begun = self._beginning()
        if len(self._decisions) % self._every == 0:
            self._hashes.append(self._hash())
        self._decisions.append(np.clip(actions[self._m], _LOW, _HIGH).astype(np.int8))

    def finished(self) -> Recording:
        """What was recorded so far."""
        begun = self._begun or self._beginning()
        heroes = self._arena.heroes
        decisions = np.stack(self._decisions) if self._decisions else np.zeros((0, heroes, len(HEADS)), np.int8)
        match = self._arena.match[self._m]
        winner = int(match[WINNER])
        return Recording(
            size=begun.size,
            seed=begun.seed,
            lineup=begun.lineup,
            limit=begun.limit,
            every=begun.every,
            decisions=decisions,
            hashes=(*self._hashes, self._hash()),
            lenient=begun.lenient,
            start=begun.start,
            names=self._names,
            result={"over": bool(match[OVER]), "winner": winner if winner >= 0 else None, "ticks": int(match[TICK])},
            hash_every=self._every,
        )

    def write(self, path: Path) -> Path:
        return write_recording(path, self.finished())

    def _hash(self) -> bytes:
        return bytes.fromhex(self._arena.hash(self._m))

    def _beginning(self) -> Recording:
        arena, match = self._arena, self._arena.match[self._m]
        ids = [HEROES[row].id for row in arena.lineup[self._m]]
        begun = Recording(
            size=arena.size,
            seed=int(match[SEED]),
            lineup=(tuple(ids[: arena.size]), tuple(ids[arena.size :])),
            limit=int(match[LIMIT]),
            every=int(match[EVERY]),
            decisions=np.zeros((0, arena.heroes, len(HEADS)), np.int8),
            hashes=(),
            lenient=arena.lenient,
        )
        if begun.begin().hash(0) == arena.hash(self._m):
            return begun
        return Recording(**{**vars(begun), "start": arena.save(self._m)})  # not from the first tick: the state itself is needed


# -- files --------------------------------------------------------------------------------------------------------------


def write_recording(path: Path, recording: Recording) -> Path:
    return write_whole(path, pack(recording))


def pack(recording: Recording) -> bytes:
    header = {
        "format": FORMAT,
        "rules": recording.rules,
        "size": recording.size,
        "seed": recording.seed,
        "lineup": [list(camp) for camp in recording.lineup],
        "limit": recording.limit,
        "every": recording.every,
        "lenient": recording.lenient,
        "saved": recording.start is not None,
        "names": list(recording.names),
        "result": recording.result,
        "decisions": len(recording.decisions),
        "hash_every": recording.hash_every,
    }
    # One hero's one head after the other: what changes rarely lies together, and takes half the room.
    planes = np.ascontiguousarray(recording.decisions.transpose(1, 2, 0))
    return seal(KIND, header, [recording.start or b"", planes.tobytes(), b"".join(recording.hashes)])


def read_recording(path: Path) -> Recording:
    """Raises NotFound, UsageError for a file of another kind or of other rules, Damaged for one that is not whole."""
    header, parts = read_sealed(path, KIND, "a recording of the Arena")
    found = header.get("format"), header.get("rules")
    if found != (FORMAT, RULES):
        raise UsageError(
            f"{path} was recorded under rules {found[1]!r} in format {found[0]!r}; this is Ludus with rules {RULES}, format {FORMAT}.",
            "Under other rules the same decisions make another match: replay it with the version that recorded it.",
        )
    return _recording(header, parts, str(path))


def _recording(header: dict[str, Any], parts: list[bytes], name: str) -> Recording:
    def whole(key: str, low: int, high: int) -> int:
        value = header.get(key)
        if type(value) is not int or not low <= value <= high:
            raise Damaged(f"{name} says {key}: {value!r}, which no recording does.")
        return value

    if len(parts) != 3:
        raise Damaged(f"{name} has {len(parts)} parts and not 3.")
    size = whole("size", 1, MAX_SIZE)
    number, hash_every = whole("decisions", 0, MAX_DECISIONS), whole("hash_every", 1, MAX_DECISIONS)
    hashes = -(-number // hash_every) + 1
    if len(parts[1]) != number * 2 * size * len(HEADS) or len(parts[2]) != hashes * _HASH:
        raise Damaged(f"{name} has parts that do not fit {number} decisions of {2 * size} heroes.")
    planes = np.frombuffer(parts[1], np.int8).reshape(2 * size, len(HEADS), number)
    return Recording(
        size=size,
        seed=whole("seed", 0, (1 << 31) - 1),
        lineup=_lineup(header.get("lineup"), size, name),
        limit=whole("limit", 1, MAX_DECISIONS),
        every=whole("every", 1, TICKS_PER_SECOND),
        decisions=np.ascontiguousarray(planes.transpose(2, 0, 1)),
        hashes=[parts[2][at : at + _HASH] for at in range(0, len(parts[2]), _HASH)],
        lenient=bool(header.get("lenient", False)),
        start=_start(parts[0], header.get("saved"), size, name),
        names=_names(header.get("names"), name),
        result=header["result"] if isinstance(header.get("result"), dict) else {},
        hash_every=hash_every,
    )


def _lineup(given: Any, size: int, name: str) -> Lineup:
    try:
        camps = [[int(hero) for hero in camp] for camp in given]
        for hero in (hero for camp in camps for hero in camp):
            row_of(hero)
    except (TypeError, ValueError, ConfigError) as error:
        raise Damaged(f"{name} has a line-up that cannot be: {given!r}.") from error
    if [len(camp) for camp in camps] != [size, size]:
        raise Damaged(f"{name} has a line-up that is not of {size}v{size}: {given!r}.")
    return camps


def _start(saved: bytes, expected: Any, size: int, name: str) -> bytes | None:
    if bool(saved) != bool(expected):
        raise Damaged(f"{name} does not hold the state that it begins from.")
    if not saved:
        return None
    try:
        found, _, _ = parse_state(saved)
    except ConfigError as error:
        raise Damaged(f"{name} begins from a state that cannot be: {error.message}") from error
    if found != size:
        raise Damaged(f"{name} is of {size}v{size} and begins from a state of {found}v{found}.")
    return saved


def _names(given: Any, name: str) -> tuple[str, str]:
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(one, str) for one in given):
        raise Damaged(f"{name} has names that cannot be: {given!r}.")
    clean = [re.sub(r"[^\w .:@/()+-]", "", one)[:_MAX_NAME] for one in given]  # they are shown in terminals
    return clean[0], clean[1]


# -- playing it again -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The state before decision `number`, and that decision; after the last one there is none. The arrays belong to the Arena that
    plays: copy what is to be kept."""

    number: int
    units: Ints32
    match: Ints32
    decision: Ints32 | None  # [H, 4]


def replay(recording: Recording, arena: Arena | None = None) -> Iterator[Moment]:
    """Moment after moment; raises Damaged as soon as the match goes another way than it was recorded."""
    arena = recording.begin(arena)
    last = len(recording.decisions)
    for number in range(last + 1):
        if number % recording.hash_every == 0 or number == last:
            _compare(recording, arena, number)
        decision = recording.decisions[number].astype(np.int32) if number < last else None
        yield Moment(number, arena.units[0], arena.match[0], decision)
        if decision is not None:
            arena.step(decision[None])


def verify(recording: Recording) -> str:
    """Play all of it again; the hash of its last state. Raises Damaged if anything differs."""
    arena = recording.begin()
    for _ in replay(recording, arena):
        pass
    return arena.hash(0)


def _compare(recording: Recording, arena: Arena, number: int) -> None:
    last = number == len(recording.decisions)
    expected = recording.hashes[-1 if last else number // recording.hash_every].hex()
    found = arena.hash(0)
    if found != expected:
        raise Damaged(
            f"The replay goes another way: before decision {number} of {len(recording.decisions)} the state is {found},"
            f" and was {expected} when it was recorded.",
            "It was recorded by another version of the rules, or changed since.",
        )
