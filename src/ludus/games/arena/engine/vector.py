"""Many matches of the Arena, stepped together.

arena = Arena(size=3, matches=64)
arena.reset(seeds=range(64))
arena.observe()
arena.step(actions)  # [64, 6, 4]
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ludus.core.types import Bools, Floats, Ints, Ints32
from ludus.errors import ConfigError, UsageError
from ludus.games.arena.bots.bots import SCRIPTS, act
from ludus.games.arena.engine import heroes
from ludus.games.arena.engine.geometry import distance
from ludus.games.arena.engine.jit import compiling, inner, kernel
from ludus.games.arena.engine.layout import (
    AIMED,
    ALIVE,
    ARMOUR,
    ASSISTS,
    BASE,
    CAMP,
    CAST,
    CAST_TARGET,
    CREEPS,
    DAMAGE,
    DEATHS,
    DIRECTIONS,
    EARNED,
    EVERY,
    FIELDS,
    HEADS,
    HEALED,
    HERO,
    HERO_ROW,
    HP,
    ILLEGAL,
    ITEMS,
    KILLS,
    KIND,
    LAST_HITS,
    LENGTH,
    LEVEL,
    LIMIT,
    MATCH_FIELDS,
    MAX_HP,
    MAX_MANA,
    MELEE,
    NOTHING,
    OUTER_X,
    OVER,
    RECALL,
    RECALLING,
    RULES,
    SEED,
    SIEGE,
    SIZE,
    SKILL_1,
    SKILL_3,
    STRIKE,
    STRUCTURES,
    TARGET,
    TARGET_UNIT,
    TICK,
    TICKS_PER_SECOND,
    TOWER,
    WAVES,
    WHAT,
    WIDTH,
    WINNER,
    XP,
    X,
    Y,
    units_of,
)
from ludus.games.arena.engine.observations import FEATURES, SCALARS, allow, see_unit, see_whole
from ludus.games.arena.engine.rules import (
    MAX_ITEMS,
    MAX_LEVEL,
    PENDING,
    begin,
    is_allowed,
    is_legal,
    may_aim,
    may_strike,
    needed,
    observed_slot,
    tick,
)
from ludus.games.arena.engine.settings import MAX_SECONDS, PARTS, ArenaSettings, Lineup, rows_of, size_of

MASK_BEFORE_TARGETS: Final = RECALL + 1 + 2 * DIRECTIONS
_MAGIC = b"LudusArenaState\0"
_LANE_X: Final = OUTER_X + 4_000
_HEAD = struct.Struct("<16sIII")
_GOLD, _XP, _HEALTH, _KILL, _DEATH, _ASSIST, _LAST_HIT, _DAMAGE, _HEALING, _TOWERS, _WIN = range(11)
_MAX_MATCHES = 100_000
_LARGEST = 100_000_000


class Arena:
    """`matches` matches of `size` against `size`, all with the same settings; each has its own seed, line-up and time.

    Arrays are filled in place and belong to the Arena: copy what is to be kept. Heroes come in the order camp 0, camp 1. Not for
    several threads at once.
    """

    def __init__(
        self,
        size: int | str = 1,
        matches: int = 1,
        settings: ArenaSettings | None = None,
        lineup: Lineup | None = None,
        *,
        lenient: bool = False,
    ) -> None:
        """`lenient`: an order that is aimed at somebody it cannot be aimed at goes to the nearest one it can. Otherwise it is
        illegal: nothing is done, and it is counted."""
        prepare()
        self.size = size_of(size)
        self.settings = settings or ArenaSettings()
        self.lenient = lenient
        if not 1 <= matches <= _MAX_MATCHES:
            raise ConfigError(f"{matches} matches at once.", f"From 1 to {_MAX_MATCHES}.")
        self.matches, self.heroes, self.slots = matches, 2 * self.size, units_of(self.size)
        m, h, u = self.matches, self.heroes, self.slots
        self.units: Ints32 = np.zeros((m, FIELDS, u), np.int32)
        self.match: Ints32 = np.zeros((m, MATCH_FIELDS), np.int32)
        self.entities: Floats = np.zeros((m, h, u, FEATURES), np.float32)
        self.scalars: Floats = np.zeros((m, h, SCALARS), np.float32)
        self.mask: Bools = np.zeros((m, h, MASK_BEFORE_TARGETS + u), np.bool_)
        self.target_mask: Bools = np.zeros((m, h, len(AIMED), u), np.bool_)
        self.reward: Floats = np.zeros((m, h), np.float32)
        self.parts: Floats = np.zeros((m, h, len(PARTS)), np.float32)
        self._lineup = np.tile(rows_of(lineup, self.size), (m, 1))
        self._pending: Ints32 = np.zeros((PENDING, u), np.int32)
        self._memo: Floats = np.zeros((h + 2, len(PARTS)), np.float32)
        self._orders: Ints32 = np.zeros((m, h, len(HEADS)), np.int32)
        self._targets: Ints32 = np.zeros((h,), np.int32)
        self._legal: Bools = np.zeros((m, h), np.bool_)
        self.rewards = self.settings.rewards
        self.match[:, OVER] = 1  # until they are reset

    # -- what is the case

    @property
    def over(self) -> Bools:
        return np.asarray(self.match[:, OVER] == 1)

    @property
    def winner(self) -> Ints32:
        """The camp whose enemy's base fell; -1 while none has, and when time was up."""
        return self.match[:, WINNER]

    @property
    def tick(self) -> Ints32:
        return self.match[:, TICK]

    @property
    def lineup(self) -> Ints32:
        """Rows of the table of heroes, [M, H]."""
        return self._lineup

    # -- playing

    def reset(
        self, seeds: Iterable[int], which: Sequence[int] | None = None, lineups: Sequence[Lineup | None] | None = None
    ) -> None:
        """Matches `which` (all, if not said) begin anew, each with its seed, and its line-up if there are some (None: the usual one)."""
        chosen = np.arange(self.matches) if which is None else np.asarray(which, np.int64)
        given = np.array([int(seed) & 0x7FFFFFFF for seed in seeds], np.int32)
        if len(given) != len(chosen):
            raise UsageError(f"{len(given)} seeds for {len(chosen)} matches.", "One for each.")
        if lineups is not None:
            if len(lineups) != len(chosen):
                raise UsageError(f"{len(lineups)} line-ups for {len(chosen)} matches.", "One for each.")
            self._lineup[chosen] = np.stack([rows_of(lineup, self.size) for lineup in lineups])
        self.match[chosen, SEED] = given
        self.match[chosen, SIZE] = self.size
        self.match[chosen, LIMIT] = self.settings.limit
        self.match[chosen, EVERY] = self.settings.every
        _begin(self.units, self.match, heroes.TABLE, self._lineup, chosen)
        self.reward[chosen] = 0
        self.parts[chosen] = 0

    def step(self, actions: npt.NDArray[np.integer]) -> None:
        """One decision of all heroes, [M, H, 4]. Matches that are over stand still."""
        if actions.shape != self._orders.shape:
            raise UsageError(f"Actions of shape {actions.shape}.", f"They have the shape {self._orders.shape}.")
        self._orders[:] = actions
        self._advance(0)

    def advance(self, actions: npt.NDArray[np.integer], ticks: int) -> None:
        """As `step`, but for so many ticks: to look at what happens within a decision."""
        self._orders[:] = actions
        self._advance(ticks)

    def _advance(self, ticks: int) -> None:
        rewards = self.rewards
        _step(
            self.units, self.match, heroes.TABLE, self._pending, self._orders, self._targets, ticks, self.lenient, self._memo,
            self.parts, self.reward, rewards.vector, rewards.spirit, rewards.zero_sum,
        )  # fmt: skip

    def observe(self) -> None:
        """Fill `entities`, `scalars`, `mask` and `target_mask`."""
        _observe(self.units, self.match, heroes.TABLE, self.entities, self.scalars, self.mask, self.target_mask)

    def legal(self, actions: npt.NDArray[np.integer]) -> Bools:
        """Which orders could be carried out now, [M, H]."""
        _legal(self.units, self.match, heroes.TABLE, np.ascontiguousarray(actions, np.int32), self._legal)
        return self._legal.copy()

    def script(self, who: npt.NDArray[np.integer]) -> Ints32:
        """What scripts would do now, [M, H, 4]. `who` [M, H]: places in SCRIPTS; -1: nobody's, and nothing."""
        if who.shape != self._legal.shape or who.min() < -1 or who.max() >= len(SCRIPTS):
            raise UsageError(
                f"Scripts of shape {who.shape}, from {who.min()} to {who.max()}.",
                f"They have the shape {self._legal.shape}, and are places in {', '.join(SCRIPTS)}, or -1.",
            )
        orders: Ints32 = np.zeros_like(self._orders)
        self.fill(np.ascontiguousarray(who, np.int8), orders)
        return orders

    def fill(self, who: npt.NDArray[np.int8], orders: Ints32) -> None:
        """As `script`, into the orders of those that a script plays; `who` is as it should be."""
        act(self.units, self.match, heroes.TABLE, who, orders)

    # -- keeping

    def to_lane(self, which: Sequence[int] | None = None) -> None:
        """Heroes of these matches, or of all, stand before their outer tower: still out of each other's sight."""
        chosen = range(self.matches) if which is None else which
        self.units[list(chosen), X, : self.size] = _LANE_X
        self.units[list(chosen), X, self.size : self.heroes] = LENGTH - _LANE_X

    def save(self, m: int) -> bytes:
        """The whole state of a match."""
        parts = (self.match[m].astype("<i4"), self.units[m].astype("<i4"))
        return b"".join((_HEAD.pack(_MAGIC, RULES, self.size, 0), *(part.tobytes() for part in parts)))

    def load(self, m: int, saved: bytes) -> None:
        """Raises ConfigError for what is not the state of a match of this size and these rules."""
        size, match, units = parse_state(saved)
        if size != self.size:
            raise ConfigError(f"The saved state is of {size}v{size}.", f"This Arena plays {self.size}v{self.size}.")
        self.match[m], self.units[m] = match, units
        self._lineup[m] = units[HERO_ROW, : self.heroes]
        self.reward[m] = 0
        self.parts[m] = 0

    def hash(self, m: int) -> str:
        """Of the whole state; equal states have equal ones, on every machine."""
        return hashlib.blake2b(self.save(m), digest_size=16).hexdigest()


_prepared = False


def prepare() -> None:
    """See that the kernels are compiled. They are once for each machine and version, which takes about half a minute."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    with compiling() as must:
        if must:
            tiny = Arena()
            tiny.reset([0])
            tiny.observe()
            tiny.legal(tiny._orders)
            tiny.script(np.zeros_like(tiny._legal, np.int8))
            tiny.step(tiny._orders)


def parse_state(saved: bytes) -> tuple[int, Ints32, Ints32]:
    """The size, the match and its units. Raises ConfigError for anything that no match can have come to."""
    if len(saved) < _HEAD.size or not saved.startswith(_MAGIC):
        raise ConfigError("This is not a saved state of the Arena.")
    _, rules, size, _ = _HEAD.unpack_from(saved)
    if rules != RULES:
        raise ConfigError(f"The state was saved under rules {rules}; these are rules {RULES}.", "Save it anew.")
    size_of(int(size))
    slots = units_of(size)
    if len(saved) != _HEAD.size + 4 * (MATCH_FIELDS + FIELDS * slots):
        raise ConfigError(f"A saved state of {size}v{size} has another length than {len(saved)} bytes.", "Is the file whole?")
    numbers = np.frombuffer(saved, "<i4", offset=_HEAD.size).astype(np.int32)
    match, units = numbers[:MATCH_FIELDS], numbers[MATCH_FIELDS:].reshape(FIELDS, slots)
    _check_state(size, match, units)
    return size, match, units


def _check_state(size: int, match: Ints32, units: Ints32) -> None:
    """Numbers by which kernels find their way must lead somewhere: compiled code does not look."""
    slots = units.shape[1]
    here, creeps = units[:, : 2 * size], units[:, 2 * (size + STRUCTURES) :]
    kinds = [HERO] * (2 * size) + [TOWER, TOWER, BASE] * 2
    camps = [0] * size + [1] * size + [0] * STRUCTURES + [1] * STRUCTURES + [0] * CREEPS + [1] * CREEPS
    alive = units[ALIVE] == 1
    fits = [
        match[SIZE] == size,
        1 <= match[EVERY] <= TICKS_PER_SECOND,
        1 <= match[LIMIT] <= MAX_SECONDS * TICKS_PER_SECOND,
        0 <= match[TICK] <= match[LIMIT],
        0 <= match[WAVES] <= match[TICK],
        -1 <= match[WINNER] <= 1,
        _all_within(match[OVER : OVER + 1], 0, 1),
        _all_within(units[ALIVE], 0, 1),
        np.array_equal(units[KIND, : len(kinds)], kinds),
        _all_within(creeps[KIND][creeps[ALIVE] == 1], MELEE, SIEGE),
        np.array_equal(units[CAMP][alive], np.array(camps)[alive]),
        np.array_equal(here[CAMP], camps[: 2 * size]),
        _all_within(here[HERO_ROW], 0, len(heroes.HEROES) - 1),
        _all_within(units[TARGET], -1, slots - 1),
        _all_within(units[CAST_TARGET], -1, slots - 1),
        _all_within(units[CAST], 0, RECALLING),
        bool(np.all((here[CAST] != 1) | (here[CAST_TARGET] >= 0))),
        _all_within(here[LEVEL], 1, MAX_LEVEL),
        _all_within(here[ITEMS], 0, MAX_ITEMS),
        _all_within(units[X], 0, LENGTH),
        _all_within(units[Y], 0, WIDTH),
        _all_within(units, -_LARGEST, _LARGEST),
        _all_within(units[MAX_HP, : len(kinds)], 1, _LARGEST),
        _all_within(here[MAX_MANA], 1, _LARGEST),
        _all_within(units[ARMOUR], 0, _LARGEST),
    ]
    if not all(fits):
        raise ConfigError("The saved state holds numbers that no match comes to.", "Is the file damaged?")


def _all_within(numbers: Ints32, low: int, high: int) -> bool:
    return bool(np.all((numbers >= low) & (numbers <= high)))


# -- kernels that Python calls ----------------------------------------------------------------------------------------


@kernel
def _begin(units: Ints32, match: Ints32, table: Ints32, lineup: Ints32, chosen: Ints) -> None:
    for k in range(chosen.shape[0]):
        m = chosen[k]
        begin(units[m], match[m], table, lineup[m])


@kernel
def _observe(
    units: Ints32, match: Ints32, table: Ints32, entities: Floats, scalars: Floats, mask: Bools, target_mask: Bools
) -> None:
    for m in range(units.shape[0]):
        for h in range(entities.shape[1]):
            for row in range(entities.shape[2]):
                see_unit(units[m], match[m], table, h, observed_slot(match[m], h, row), entities[m, h, row])
            see_whole(units[m], match[m], table, h, scalars[m, h])
            allow(units[m], match[m], table, h, mask[m, h], target_mask[m, h])


@kernel
def _legal(units: Ints32, match: Ints32, table: Ints32, orders: Ints32, out: Bools) -> None:
    for m in range(units.shape[0]):
        for h in range(orders.shape[1]):
            row = int(orders[m, h, TARGET_UNIT])
            target = observed_slot(match[m], h, row) if 0 <= row < units.shape[2] else -1
            out[m, h] = is_legal(units[m], match[m], table, h, orders[m, h], target)


@inner
def _aimed_at(units: Ints32, match: Ints32, table: Ints32, h: int, order: Ints32, lenient: bool) -> int:
    """The slot that an order is aimed at; if it cannot be, and that is allowed, the nearest that it can, or -1."""
    row, what = int(order[TARGET_UNIT]), int(order[WHAT])
    target = observed_slot(match, h, row) if 0 <= row < units.shape[1] else -1
    if not lenient or (what != STRIKE and what != SKILL_1 and what != SKILL_3) or not is_allowed(units, match, table, h, what):
        return target
    if is_legal(units, match, table, h, order, target):
        return target
    best, best_far = -1, 1 << 40
    for r in range(units.shape[1]):
        j = observed_slot(match, h, r)
        fits = may_strike(units, match, h, j) if what == STRIKE else may_aim(units, match, table, h, what - SKILL_1 + 1, j)
        if fits:
            far = distance(units, h, j)
            if far < best_far:
                best, best_far = j, far
    return best


@inner
def _buildings(units: Ints32, match: Ints32, camp: int) -> float:
    """Health of a camp's buildings, in whole buildings."""
    total = 0.0
    first = 2 * int(match[SIZE]) + camp * STRUCTURES
    for s in range(first, first + STRUCTURES):
        total += units[HP, s] / units[MAX_HP, s]
    return total


@inner
def _experience(units: Ints32, h: int) -> int:
    total = int(units[XP, h])
    for level in range(1, int(units[LEVEL, h])):
        total += needed(level)
    return total


@inner
def _count(units: Ints32, match: Ints32, h: int, out: Floats) -> None:
    """All that rewards are differences of."""
    camp = h // int(match[SIZE])
    out[_GOLD] = units[EARNED, h] / 100.0
    out[_XP] = _experience(units, h) / 100.0
    out[_HEALTH] = units[HP, h] / units[MAX_HP, h]
    out[_KILL] = units[KILLS, h]
    out[_DEATH] = units[DEATHS, h]
    out[_ASSIST] = units[ASSISTS, h]
    out[_LAST_HIT] = units[LAST_HITS, h]
    out[_DAMAGE] = units[DAMAGE, h] / 100.0
    out[_HEALING] = units[HEALED, h] / 100.0
    out[_TOWERS] = _buildings(units, match, camp) - _buildings(units, match, 1 - camp)
    out[_WIN] = 0.0
    if match[WINNER] >= 0:
        out[_WIN] = 1.0 if match[WINNER] == camp else -1.0


@inner
def _pay(parts: Floats, reward: Floats, weights: Floats, spirit: float, zero_sum: bool) -> None:
    """From the parts of all heroes' rewards to the rewards."""
    number = reward.shape[0]
    size = number // 2
    mean_0, mean_1 = 0.0, 0.0
    for h in range(number):
        total = 0.0
        for part in range(weights.shape[0]):
            total += weights[part] * parts[h, part]
        reward[h] = total
        if h < size:
            mean_0 += total / size
        else:
            mean_1 += total / size
    for h in range(number):
        mine, theirs = (mean_0, mean_1) if h < size else (mean_1, mean_0)
        reward[h] = (1 - spirit) * reward[h] + spirit * mine - (theirs if zero_sum else 0.0)


@kernel
def _step(
    units: Ints32,
    match: Ints32,
    table: Ints32,
    pending: Ints32,
    orders: Ints32,
    targets: Ints32,
    ticks: int,
    lenient: bool,
    memo: Floats,
    parts: Floats,
    reward: Floats,
    weights: Floats,
    spirit: float,
    zero_sum: bool,
) -> None:
    """`ticks`: so many; 0: from one decision to the next."""
    for m in range(units.shape[0]):
        parts[m] = 0
        reward[m] = 0
        if match[m, OVER] == 1:
            continue
        for h in range(orders.shape[1]):
            target = _aimed_at(units[m], match[m], table, h, orders[m, h], lenient)
            if not is_legal(units[m], match[m], table, h, orders[m, h], target):
                orders[m, h, WHAT] = NOTHING
                units[m, ILLEGAL, h] += 1
            targets[h] = target
            _count(units[m], match[m], h, memo[h])
        for _ in range(ticks if ticks > 0 else int(match[m, EVERY])):
            tick(units[m], match[m], table, pending, orders[m], targets)
            if match[m, OVER] == 1:
                break
        for h in range(orders.shape[1]):
            _count(units[m], match[m], h, parts[m, h])
            for part in range(parts.shape[2]):
                parts[m, h, part] -= memo[h, part]
        _pay(parts[m], reward[m], weights, spirit, zero_sum)
