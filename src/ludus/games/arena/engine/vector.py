"""Vectorized game engine of the Arena: many matches stepped together.

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
from ludus.games.arena.bots.bots import BOTS, fill_orders
from ludus.games.arena.engine import heroes, layout
from ludus.games.arena.engine.geometry import distance
from ludus.games.arena.engine.jit import compile_lock, inner, kernel
from ludus.games.arena.engine.observations import FEATURES, SCALARS, write_entity, write_masks, write_scalars
from ludus.games.arena.engine.rules import (
    MAX_ITEMS,
    MAX_LEVEL,
    PENDING,
    begin_match,
    can_attack,
    can_target,
    experience_needed,
    is_allowed,
    is_legal,
    slot_of_row,
    tick,
)
from ludus.games.arena.engine.settings import MAX_SECONDS, PARTS, ArenaSettings, Lineup, rows_of, size_of

MASK_BEFORE_TARGETS: Final = layout.RECALL + 1 + 2 * layout.DIRECTIONS
_MAGIC = b"LudusArenaState\0"
_LANE_X: Final = layout.OUTER_X + 4_000
_HEAD = struct.Struct("<16sIII")
_GOLD, _XP, _HEALTH, _KILL, _DEATH, _ASSIST, _LAST_HIT, _DAMAGE, _HEALING, _TOWERS, _WIN = range(11)
_MAX_MATCHES = 100_000
_LARGEST = 100_000_000


class Arena:
    """`matches` matches of `size` against `size`, all with the same settings; each has its own seed, line-up and time.

    Arrays are filled in place and belong to the Arena: copy them to keep them. Heroes are ordered camp 0, camp 1. Not thread-safe.
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
        """`lenient`: an order with an invalid target goes to the nearest valid one. Otherwise it is illegal: the hero does
        nothing, and the order is counted."""
        ensure_compiled()
        self.size = size_of(size)
        self.settings = settings or ArenaSettings()
        self.lenient = lenient
        if not 1 <= matches <= _MAX_MATCHES:
            raise ConfigError(f"{matches} matches at once.", f"From 1 to {_MAX_MATCHES}.")
        self.matches, self.heroes, self.slots = matches, 2 * self.size, layout.units_of(self.size)
        m, h, u = self.matches, self.heroes, self.slots
        self.units: Ints32 = np.zeros((m, layout.FIELDS, u), np.int32)
        self.match: Ints32 = np.zeros((m, layout.MATCH_FIELDS), np.int32)
        self.entities: Floats = np.zeros((m, h, u, FEATURES), np.float32)
        self.scalars: Floats = np.zeros((m, h, SCALARS), np.float32)
        self.mask: Bools = np.zeros((m, h, MASK_BEFORE_TARGETS + u), np.bool_)
        self.target_mask: Bools = np.zeros((m, h, len(layout.AIMED), u), np.bool_)
        self.reward: Floats = np.zeros((m, h), np.float32)
        self.parts: Floats = np.zeros((m, h, len(PARTS)), np.float32)
        self._lineup = np.tile(rows_of(lineup, self.size), (m, 1))
        self._pending: Ints32 = np.zeros((PENDING, u), np.int32)
        self._totals: Floats = np.zeros((h + 2, len(PARTS)), np.float32)
        self._orders: Ints32 = np.zeros((m, h, len(layout.HEADS)), np.int32)
        self._targets: Ints32 = np.zeros((h,), np.int32)
        self._legal: Bools = np.zeros((m, h), np.bool_)
        self._rows = np.divmod(np.arange(m * h), h)  # match and hero of all rows of `observe`
        self.rewards = self.settings.rewards
        self.match[:, layout.OVER] = 1  # until the first reset

    # -- status

    @property
    def over(self) -> Bools:
        return np.asarray(self.match[:, layout.OVER] == 1)

    @property
    def winner(self) -> Ints32:
        """Camp that destroyed the enemy's base; -1 while the match runs and after a draw."""
        return self.match[:, layout.WINNER]

    @property
    def tick(self) -> Ints32:
        return self.match[:, layout.TICK]

    @property
    def lineup(self) -> Ints32:
        """Rows of the hero table, [M, H]."""
        return self._lineup

    # -- playing

    def reset(
        self, seeds: Iterable[int], which: Sequence[int] | None = None, lineups: Sequence[Lineup | None] | None = None
    ) -> None:
        """Restart the matches `which` (default: all), each with its seed and, if given, its line-up (None: the default one)."""
        chosen = np.arange(self.matches) if which is None else np.asarray(which, np.int64)
        given = np.array([int(seed) & 0x7FFFFFFF for seed in seeds], np.int32)
        if len(given) != len(chosen):
            raise UsageError(f"{len(given)} seeds for {len(chosen)} matches.", "One for each.")
        if lineups is not None:
            if len(lineups) != len(chosen):
                raise UsageError(f"{len(lineups)} line-ups for {len(chosen)} matches.", "One for each.")
            self._lineup[chosen] = np.stack([rows_of(lineup, self.size) for lineup in lineups])
        self.match[chosen, layout.SEED] = given
        self.match[chosen, layout.SIZE] = self.size
        self.match[chosen, layout.LIMIT] = self.settings.limit
        self.match[chosen, layout.EVERY] = self.settings.every
        _begin(self.units, self.match, heroes.TABLE, self._lineup, chosen)
        self.reward[chosen] = 0
        self.parts[chosen] = 0

    def step(self, actions: npt.NDArray[np.integer]) -> None:
        """Play one decision of all heroes, [M, H, 4]. Finished matches do not change."""
        if actions.shape != self._orders.shape:
            raise UsageError(f"Actions have the shape {actions.shape}.", f"The expected shape is {self._orders.shape}.")
        self._orders[:] = actions
        self._advance(0)

    def advance(self, actions: npt.NDArray[np.integer], ticks: int) -> None:
        """Like `step`, for the given number of ticks: shows the states within a decision."""
        self._orders[:] = actions
        self._advance(ticks)

    def _advance(self, ticks: int) -> None:
        rewards = self.rewards
        _step(
            self.units, self.match, heroes.TABLE, self._pending, self._orders, self._targets, ticks, self.lenient, self._totals,
            self.parts, self.reward, rewards.vector, rewards.spirit, rewards.zero_sum,
        )  # fmt: skip

    def observe(self) -> None:
        """Fill `entities`, `scalars`, `mask` and `target_mask`."""
        entities, scalars = self.entities.reshape(-1, self.slots, FEATURES), self.scalars.reshape(-1, SCALARS)
        mask, targets = self.mask.reshape(-1, self.mask.shape[2]), self.target_mask.reshape(-1, *self.target_mask.shape[2:])
        _observe(self.units, self.match, heroes.TABLE, *self._rows, entities, scalars, mask, targets)

    def observe_rows(self, matches: Ints, heroes_of: Ints) -> tuple[Floats, Floats, Bools, Bools]:
        """Return entities, scalars, mask and target mask of these heroes, [rows, …], in new arrays."""
        rows, slots = len(matches), self.slots
        entities, scalars = np.empty((rows, slots, FEATURES), np.float32), np.empty((rows, SCALARS), np.float32)
        mask = np.empty((rows, MASK_BEFORE_TARGETS + slots), np.bool_)
        targets = np.empty((rows, len(layout.AIMED), slots), np.bool_)
        _observe(self.units, self.match, heroes.TABLE, matches, heroes_of, entities, scalars, mask, targets)
        return entities, scalars, mask, targets

    def central_observation(self, matches: Ints, heroes_of: Ints) -> Floats:
        """Return [rows, S], the state input of a centralised value function: all units without fog of war, and the scalars of all heroes.

        Each row belongs to one hero of one match. Its own scalars come first, then its camp's, then the enemy's.
        """
        state = np.empty((len(matches), self.slots * FEATURES + self.heroes * SCALARS), np.float32)
        units = self.units.copy()
        units[:, layout.SEEN] = 1
        _write_states(units, self.match, heroes.TABLE, matches, heroes_of, self.size, state)
        return state

    def legal(self, actions: npt.NDArray[np.integer]) -> Bools:
        """Return which orders are legal now, [M, H]."""
        _legal(self.units, self.match, heroes.TABLE, np.ascontiguousarray(actions, np.int32), self._legal)
        return self._legal.copy()

    def bot_actions(self, who: npt.NDArray[np.integer]) -> Ints32:
        """Return the actions of the bots now, [M, H, 4]. `who` [M, H]: indices in BOTS; -1: no bot, which gives action 0."""
        if who.shape != self._legal.shape or who.min() < -1 or who.max() >= len(BOTS):
            raise UsageError(
                f"The bots have the shape {who.shape} and indices from {who.min()} to {who.max()}.",
                f"The shape is {self._legal.shape}; values are indices in {', '.join(BOTS)}, or -1.",
            )
        orders: Ints32 = np.zeros_like(self._orders)
        self.fill_bot_actions(np.ascontiguousarray(who, np.int8), orders)
        return orders

    def fill_bot_actions(self, who: npt.NDArray[np.int8], orders: Ints32) -> None:
        """Like `bot_actions`, but write into `orders` and only for heroes with a bot. `who` is not checked."""
        fill_orders(self.units, self.match, heroes.TABLE, who, orders)

    # -- state

    def move_to_lane(self, which: Sequence[int] | None = None) -> None:
        """Place the heroes of these matches (default: all) in front of their outer tower, out of sight of each other."""
        chosen = range(self.matches) if which is None else which
        self.units[list(chosen), layout.X, : self.size] = _LANE_X
        self.units[list(chosen), layout.X, self.size : self.heroes] = layout.LENGTH - _LANE_X

    def save(self, m: int) -> bytes:
        """Serialize the complete state of match `m`."""
        parts = (self.match[m].astype("<i4"), self.units[m].astype("<i4"))
        return b"".join((_HEAD.pack(_MAGIC, layout.RULES, self.size, 0), *(part.tobytes() for part in parts)))

    def load(self, m: int, saved: bytes) -> None:
        """Restore match `m` from `save`. Raises ConfigError for a state of another size or of other rules."""
        size, match, units = parse_state(saved)
        if size != self.size:
            raise ConfigError(f"The saved state is of {size}v{size}.", f"This Arena plays {self.size}v{self.size}.")
        self.match[m], self.units[m] = match, units
        self._lineup[m] = units[layout.HERO_ROW, : self.heroes]
        self.reward[m] = 0
        self.parts[m] = 0

    def hash(self, m: int) -> str:
        """Return a digest of the complete state; the same on every machine."""
        return hashlib.blake2b(self.save(m), digest_size=16).hexdigest()


_compiled = False


def ensure_compiled() -> None:
    """Compile the kernels unless the cache has them. Takes about half a minute, once for each machine and version."""
    global _compiled
    if _compiled:
        return
    _compiled = True
    with compile_lock() as must:
        if must:
            tiny = Arena()
            tiny.reset([0])
            tiny.observe()
            tiny.legal(tiny._orders)
            tiny.bot_actions(np.zeros_like(tiny._legal, np.int8))
            tiny.step(tiny._orders)


def parse_state(saved: bytes) -> tuple[int, Ints32, Ints32]:
    """Return size, match and units of a saved state. Raises ConfigError for values that no match can reach."""
    if len(saved) < _HEAD.size or not saved.startswith(_MAGIC):
        raise ConfigError("This is not a saved state of the Arena.")
    _, rules, size, _ = _HEAD.unpack_from(saved)
    if rules != layout.RULES:
        raise ConfigError(
            f"The state was saved under rules {rules}; these are rules {layout.RULES}.", "Save it again with these rules."
        )
    size_of(int(size))
    slots = layout.units_of(size)
    if len(saved) != _HEAD.size + 4 * (layout.MATCH_FIELDS + layout.FIELDS * slots):
        raise ConfigError(f"A saved state of {size}v{size} has another length than {len(saved)} bytes.", "Is the file whole?")
    numbers = np.frombuffer(saved, "<i4", offset=_HEAD.size).astype(np.int32)
    match, units = numbers[: layout.MATCH_FIELDS], numbers[layout.MATCH_FIELDS :].reshape(layout.FIELDS, slots)
    _check_state(size, match, units)
    return size, match, units


def _check_state(size: int, match: Ints32, units: Ints32) -> None:
    """Check every value that kernels use as an index: compiled code has no bounds checks."""
    slots = units.shape[1]
    here, creeps = units[:, : 2 * size], units[:, 2 * (size + layout.STRUCTURES) :]
    kinds = [layout.HERO] * (2 * size) + [layout.TOWER, layout.TOWER, layout.BASE] * 2
    camps = (
        [0] * size + [1] * size + [0] * layout.STRUCTURES + [1] * layout.STRUCTURES + [0] * layout.CREEPS + [1] * layout.CREEPS
    )
    alive = units[layout.ALIVE] == 1
    fits = [
        match[layout.SIZE] == size,
        1 <= match[layout.EVERY] <= layout.TICKS_PER_SECOND,
        1 <= match[layout.LIMIT] <= MAX_SECONDS * layout.TICKS_PER_SECOND,
        0 <= match[layout.TICK] <= match[layout.LIMIT],
        0 <= match[layout.WAVES] <= match[layout.TICK],
        -1 <= match[layout.WINNER] <= 1,
        _all_between(match[layout.OVER : layout.OVER + 1], 0, 1),
        _all_between(units[layout.ALIVE], 0, 1),
        np.array_equal(units[layout.KIND, : len(kinds)], kinds),
        _all_between(creeps[layout.KIND][creeps[layout.ALIVE] == 1], layout.MELEE, layout.SIEGE),
        np.array_equal(units[layout.CAMP][alive], np.array(camps)[alive]),
        np.array_equal(here[layout.CAMP], camps[: 2 * size]),
        _all_between(here[layout.HERO_ROW], 0, len(heroes.HEROES) - 1),
        _all_between(units[layout.TARGET], -1, slots - 1),
        _all_between(units[layout.CAST_TARGET], -1, slots - 1),
        _all_between(units[layout.CAST], 0, layout.RECALLING),
        bool(np.all((here[layout.CAST] != 1) | (here[layout.CAST_TARGET] >= 0))),
        _all_between(here[layout.LEVEL], 1, MAX_LEVEL),
        _all_between(here[layout.ITEMS], 0, MAX_ITEMS),
        _all_between(units[layout.X], 0, layout.LENGTH),
        _all_between(units[layout.Y], 0, layout.WIDTH),
        _all_between(units, -_LARGEST, _LARGEST),
        _all_between(units[layout.MAX_HP, : len(kinds)], 1, _LARGEST),
        _all_between(here[layout.MAX_MANA], 1, _LARGEST),
        _all_between(units[layout.ARMOUR], 0, _LARGEST),
    ]
    if not all(fits):
        raise ConfigError("The saved state holds values that no match can reach.", "Is the file damaged?")


def _all_between(numbers: Ints32, low: int, high: int) -> bool:
    return bool(np.all((numbers >= low) & (numbers <= high)))


def building_health(units: Ints32, size: int, camp: int) -> npt.NDArray[np.float64]:
    """Remaining health of outer tower, inner tower and base of a camp, as shares of their full health."""
    slots = [layout.structure_slot(size, camp, which) for which in range(layout.STRUCTURES)]
    return np.asarray(units[layout.HP, slots] * units[layout.ALIVE, slots] / np.maximum(1, units[layout.MAX_HP, slots]))


# -- kernels that Python calls ----------------------------------------------------------------------------------------


@kernel
def _begin(units: Ints32, match: Ints32, table: Ints32, lineup: Ints32, chosen: Ints) -> None:
    for k in range(chosen.shape[0]):
        m = chosen[k]
        begin_match(units[m], match[m], table, lineup[m])


@kernel
def _observe(
    units: Ints32, match: Ints32, table: Ints32, matches: Ints, heroes_of: Ints,
    entities: Floats, scalars: Floats, mask: Bools, target_mask: Bools,
) -> None:  # fmt: skip
    for k in range(matches.shape[0]):
        m, h = int(matches[k]), int(heroes_of[k])
        for row in range(entities.shape[1]):
            write_entity(units[m], match[m], table, h, slot_of_row(match[m], h, row), entities[k, row])
        write_scalars(units[m], match[m], table, h, scalars[k])
        write_masks(units[m], match[m], table, h, mask[k], target_mask[k])


@kernel
def _write_states(units: Ints32, match: Ints32, table: Ints32, matches: Ints, heroes_of: Ints, size: int, state: Floats) -> None:
    for k in range(matches.shape[0]):
        m, h = int(matches[k]), int(heroes_of[k])
        for row in range(units.shape[2]):
            start = row * FEATURES
            write_entity(units[m], match[m], table, h, slot_of_row(match[m], h, row), state[k, start : start + FEATURES])
        camp, seat = h // size, h % size
        for i in range(2 * size):
            other = camp * size + (seat + i) % size if i < size else (1 - camp) * size + i - size
            at = units.shape[2] * FEATURES + i * SCALARS
            write_scalars(units[m], match[m], table, other, state[k, at : at + SCALARS])


@kernel
def _legal(units: Ints32, match: Ints32, table: Ints32, orders: Ints32, out: Bools) -> None:
    for m in range(units.shape[0]):
        for h in range(orders.shape[1]):
            row = int(orders[m, h, layout.TARGET_UNIT])
            target = slot_of_row(match[m], h, row) if 0 <= row < units.shape[2] else -1
            out[m, h] = is_legal(units[m], match[m], table, h, orders[m, h], target)


@inner
def _resolve_target(units: Ints32, match: Ints32, table: Ints32, h: int, order: Ints32, lenient: bool) -> int:
    """Return the target slot of an order; if that is invalid and `lenient` is set, the nearest valid one, or -1."""
    row, what = int(order[layout.TARGET_UNIT]), int(order[layout.WHAT])
    target = slot_of_row(match, h, row) if 0 <= row < units.shape[1] else -1
    if (
        not lenient
        or (what != layout.STRIKE and what != layout.SKILL_1 and what != layout.SKILL_3)
        or not is_allowed(units, match, table, h, what)
    ):
        return target
    if is_legal(units, match, table, h, order, target):
        return target
    best, best_far = -1, 1 << 40
    for r in range(units.shape[1]):
        j = slot_of_row(match, h, r)
        fits = (
            can_attack(units, match, h, j)
            if what == layout.STRIKE
            else can_target(units, match, table, h, what - layout.SKILL_1 + 1, j)
        )
        if fits:
            far = distance(units, h, j)
            if far < best_far:
                best, best_far = j, far
    return best


@inner
def _buildings(units: Ints32, match: Ints32, camp: int) -> float:
    """Sum of the health shares of a camp's buildings."""
    total = 0.0
    first = 2 * int(match[layout.SIZE]) + camp * layout.STRUCTURES
    for s in range(first, first + layout.STRUCTURES):
        total += units[layout.HP, s] / units[layout.MAX_HP, s]
    return total


@inner
def _experience(units: Ints32, h: int) -> int:
    total = int(units[layout.XP, h])
    for level in range(1, int(units[layout.LEVEL, h])):
        total += experience_needed(level)
    return total


@inner
def _write_totals(units: Ints32, match: Ints32, h: int, out: Floats) -> None:
    """Write the totals whose differences are the parts of the reward."""
    camp = h // int(match[layout.SIZE])
    out[_GOLD] = units[layout.EARNED, h] / 100.0
    out[_XP] = _experience(units, h) / 100.0
    out[_HEALTH] = units[layout.HP, h] / units[layout.MAX_HP, h]
    out[_KILL] = units[layout.KILLS, h]
    out[_DEATH] = units[layout.DEATHS, h]
    out[_ASSIST] = units[layout.ASSISTS, h]
    out[_LAST_HIT] = units[layout.LAST_HITS, h]
    out[_DAMAGE] = units[layout.DAMAGE, h] / 100.0
    out[_HEALING] = units[layout.HEALED, h] / 100.0
    out[_TOWERS] = _buildings(units, match, camp) - _buildings(units, match, 1 - camp)
    out[_WIN] = 0.0
    if match[layout.WINNER] >= 0:
        out[_WIN] = 1.0 if match[layout.WINNER] == camp else -1.0


@inner
def _write_rewards(parts: Floats, reward: Floats, weights: Floats, spirit: float, zero_sum: bool) -> None:
    """Compute the rewards of all heroes from their parts."""
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
    totals: Floats,
    parts: Floats,
    reward: Floats,
    weights: Floats,
    spirit: float,
    zero_sum: bool,
) -> None:
    """`ticks`: number of ticks to play; 0: until the next decision."""
    for m in range(units.shape[0]):
        parts[m] = 0
        reward[m] = 0
        if match[m, layout.OVER] == 1:
            continue
        for h in range(orders.shape[1]):
            target = _resolve_target(units[m], match[m], table, h, orders[m, h], lenient)
            if not is_legal(units[m], match[m], table, h, orders[m, h], target):
                orders[m, h, layout.WHAT] = layout.NOTHING
                units[m, layout.ILLEGAL, h] += 1
            targets[h] = target
            _write_totals(units[m], match[m], h, totals[h])
        for _ in range(ticks if ticks > 0 else int(match[m, layout.EVERY])):
            tick(units[m], match[m], table, pending, orders[m], targets)
            if match[m, layout.OVER] == 1:
                break
        for h in range(orders.shape[1]):
            _write_totals(units[m], match[m], h, parts[m, h])
            for part in range(parts.shape[2]):
                parts[m, h, part] -= totals[h, part]
        _write_rewards(parts[m], reward[m], weights, spirit, zero_sum)
