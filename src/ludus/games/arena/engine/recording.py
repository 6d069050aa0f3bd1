"""Record matches as their start and all decisions, and replay them bit for bit.

recorder = Recorder(arena, m, names=("hard", "medium"))
while not arena.over[m]:
    recorder.add(actions)  # before each step
    arena.step(actions)
recorder.write(path)

for step in replay(read_recording(path)):
    ...  # step.units, step.match

A match of eight minutes with six heroes takes 5 to 20 kB. The recording holds hashes of the state, so that a diverging replay is
detected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ludus.core.types import Ints32
from ludus.errors import ConfigError, Damaged, UsageError
from ludus.games.arena.engine.checksummed_file import encode_file, read_file, write_file
from ludus.games.arena.engine.heroes import HEROES, row_of
from ludus.games.arena.engine.layout import EVERY, HEADS, LIMIT, OVER, RULES, SEED, TICK, TICKS_PER_SECOND, WINNER
from ludus.games.arena.engine.settings import MAX_SECONDS, MAX_SIZE, Lineup
from ludus.games.arena.engine.vector import Arena, parse_state

KIND: Final = b"LudusArenaRecord"
FORMAT: Final = 1
HASH_EVERY: Final = 50
"""Decisions between two hashes of the state: ten seconds of game time."""
MAX_DECISIONS: Final = MAX_SECONDS * TICKS_PER_SECOND
_HASH = 16
_MAX_NAME = 80
_LOW, _HIGH = -1, 127  # no head has as many options; values beyond are illegal in any case

Decisions = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Recording:
    """A recorded match. It starts from the saved state `start`, or without one from `seed`, `lineup`, `limit` and `every`."""

    size: int
    seed: int
    lineup: Lineup
    limit: int
    every: int
    decisions: Decisions  # [T, H, 4]
    hashes: Sequence[bytes]
    """Hashes of the state before decisions 0, `hash_every`, 2 · `hash_every` …, and after the last one."""
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
        """Length in game time."""
        return len(self.decisions) * self.every / TICKS_PER_SECOND

    def begin(self, arena: Arena | None = None) -> Arena:
        """Return an Arena with this match at its start."""
        arena = arena or Arena(self.size, 1, lineup=self.lineup, lenient=self.lenient)
        if self.start is not None:
            arena.load(0, self.start)
        else:
            arena.reset([self.seed], lineups=[self.lineup])
            arena.match[0, LIMIT], arena.match[0, EVERY] = self.limit, self.every
        return arena


class Recorder:
    """Records one match of an Arena, from now on. Must not be used after a reset of the match."""

    def __init__(self, arena: Arena, m: int = 0, names: Sequence[str] = ("", ""), hash_every: int = HASH_EVERY) -> None:
        if len(names) != 2:
            raise UsageError(f"{len(names)} names for two camps: {list(names)!r}.", "One for each.")
        self._arena, self._m, self._every = arena, m, hash_every
        self._names = (str(names[0])[:_MAX_NAME], str(names[1])[:_MAX_NAME])
        self._decisions: list[Decisions] = []
        self._hashes: list[bytes] = []
        self._first: Recording | None = None

    def __len__(self) -> int:
        """Number of recorded decisions."""
        return len(self._decisions)

    def add(self, actions: npt.NDArray[np.integer]) -> None:
        """Add the next actions of all matches, [M, H, 4]; call before `step`. Ignored once the match is over."""
        if self._arena.match[self._m, OVER]:
            return
        if self._first is None:
            self._first = self._describe_start()
        if len(self._decisions) % self._every == 0:
            self._hashes.append(self._hash())
        self._decisions.append(np.clip(actions[self._m], _LOW, _HIGH).astype(np.int8))

    def recording(self) -> Recording:
        """Return the recording so far."""
        begun = self._first or self._describe_start()
        decisions = np.stack(self._decisions) if self._decisions else begun.decisions
        match = self._arena.match[self._m]
        winner = int(match[WINNER])
        result = {"over": bool(match[OVER]), "winner": winner if winner >= 0 else None, "ticks": int(match[TICK])}
        return replace(begun, decisions=decisions, hashes=(*self._hashes, self._hash()), result=result)

    def write(self, path: Path) -> Path:
        return write_recording(path, self.recording())

    def _hash(self) -> bytes:
        return bytes.fromhex(self._arena.hash(self._m))

    def _describe_start(self) -> Recording:
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
            names=self._names,
            hash_every=self._every,
        )
        if begun.begin().hash(0) == arena.hash(self._m):
            return begun
        return replace(begun, start=arena.save(self._m))  # does not start at tick 0: needs the state itself


# -- files --------------------------------------------------------------------------------------------------------------


def write_recording(path: Path, recording: Recording) -> Path:
    return write_file(path, pack(recording))


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
    # Grouped by hero and head, which compresses to half the size.
    planes = np.ascontiguousarray(recording.decisions.transpose(1, 2, 0))
    return encode_file(KIND, header, [recording.start or b"", planes.tobytes(), b"".join(recording.hashes)])


def read_recording(path: Path) -> Recording:
    """Raises NotFound, UsageError for a file of another kind or of other rules, Damaged for a truncated one."""
    header, parts = read_file(path, KIND, "a recording of the Arena")
    found = header.get("format"), header.get("rules")
    if found != (FORMAT, RULES):
        raise UsageError(
            f"{path} was recorded under rules {found[1]!r} in format {found[0]!r}; this is Ludus with rules {RULES}, format {FORMAT}.",
            "Replay it with the version of Ludus that recorded it: other rules give another match.",
        )
    return _recording(header, parts, str(path))


def _recording(header: dict[str, Any], parts: list[bytes], name: str) -> Recording:
    def whole(key: str, low: int, high: int) -> int:
        value = header.get(key)
        if type(value) is not int or not low <= value <= high:
            raise Damaged(f"{name} has the invalid value {key}: {value!r}.")
        return value

    if len(parts) != 3:
        raise Damaged(f"{name} has {len(parts)} parts instead of 3.")
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
        raise Damaged(f"{name} has an invalid line-up: {given!r}.") from error
    if [len(camp) for camp in camps] != [size, size]:
        raise Damaged(f"{name} has a line-up that is not of {size}v{size}: {given!r}.")
    return camps


def _start(saved: bytes, expected: Any, size: int, name: str) -> bytes | None:
    if bool(saved) != bool(expected):
        raise Damaged(f"{name} does not hold the state that it starts from.")
    if not saved:
        return None
    try:
        found, _, _ = parse_state(saved)
    except ConfigError as error:
        raise Damaged(f"{name} starts from an invalid state: {error.message}") from error
    if found != size:
        raise Damaged(f"{name} is of {size}v{size} and starts from a state of {found}v{found}.")
    return saved


def _names(given: Any, name: str) -> tuple[str, str]:
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(one, str) for one in given):
        raise Damaged(f"{name} has invalid names: {given!r}.")
    clean = [re.sub(r"[^\w .:@/()+-]", "", one)[:_MAX_NAME] for one in given]  # terminals print them
    return clean[0], clean[1]


# -- replay --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayStep:
    """The state before decision `number`, and that decision (None after the last one). The arrays belong to the replaying Arena:
    copy them to keep them."""

    number: int
    units: Ints32
    match: Ints32
    decision: Ints32 | None  # [H, 4]


def replay(recording: Recording, arena: Arena | None = None) -> Iterator[ReplayStep]:
    """Yield every step of the match. Raises Damaged as soon as the replay differs from the recording."""
    arena = recording.begin(arena)
    last = len(recording.decisions)
    for number in range(last + 1):
        if number % recording.hash_every == 0 or number == last:
            _compare(recording, arena, number)
        decision = recording.decisions[number].astype(np.int32) if number < last else None
        yield ReplayStep(number, arena.units[0], arena.match[0], decision)
        if decision is not None:
            arena.step(decision[None])


def verify(recording: Recording) -> str:
    """Replay the whole match and return the hash of its last state. Raises Damaged if anything differs."""
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
            f"The replay differs: before decision {number} of {len(recording.decisions)} the state is {found};"
            f" the recording has {expected}.",
            "It was recorded with other rules, or modified since.",
        )
