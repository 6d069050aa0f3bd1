"""The vectorized engine: symmetry, determinism, saved states and action masks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ludus.errors import ConfigError
from ludus.games.arena.engine.heroes import IDS
from ludus.games.arena.engine.layout import (
    AIMED,
    ALIVE,
    CAMP,
    CAST,
    CAST_TARGET,
    CAST_X,
    CAST_Y,
    COOLDOWN_1,
    COOLDOWN_HEAL,
    DEATHS,
    DIRECTIONS,
    FIELDS,
    HERO_ROW,
    HURT_BY,
    KIND,
    LENGTH,
    LEVEL,
    MANA,
    MATCH_FIELDS,
    MAX_MANA,
    MOVE,
    RECALL,
    SIZE,
    SKILL_2,
    TARGET,
    TICK,
    WIDTH,
    WINNER,
    X,
    Y,
    units_of,
)
from ludus.games.arena.engine.settings import Lineup
from ludus.games.arena.engine.vector import MASK_BEFORE_TARGETS, Arena
from tests.arena.scenes import legal_play

# -- from both sides --------------------------------------------------------------------------------------------------

LINEUPS: dict[int, list[Lineup]] = {
    1: [((107,), (190,)), ((173,), (111,)), ((141,), (117,))],
    3: [((190, 173, 117), (141, 111, 107)), ((141, 141, 190), (107, 107, 173))],
}


def other_slots(size: int) -> npt.NDArray[np.int64]:
    """Return the slot of the other camp that corresponds to each slot."""
    parts = [(0, size), (2 * size, 3), (2 * (size + 3), 12)]
    return np.concatenate([np.r_[at + n : at + 2 * n, at : at + n] for at, n in parts])


def rotate(units: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.int32]:
    """Swap the camps and rotate the field by 180 degrees."""
    other = other_slots(size)
    made = units[:, other].copy()
    made[CAMP] = 1 - made[CAMP]
    made[X], made[Y] = LENGTH - made[X], WIDTH - made[Y]
    for field in (TARGET, CAST_TARGET):
        made[field] = np.where(made[field] >= 0, other[made[field]], -1)
    line = made[CAST] == 2
    made[CAST_X] = np.where(line, -made[CAST_X], LENGTH - made[CAST_X])
    made[CAST_Y] = np.where(line, -made[CAST_Y], WIDTH - made[CAST_Y])
    low = (1 << size) - 1
    made[HURT_BY] = ((made[HURT_BY] & low) << size) | (made[HURT_BY] >> size)
    return made


def without_stale_fields(units: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Clear stale fields of dead units and of finished skills."""
    kept = units.copy()
    kept[:, (units[ALIVE] == 0) & (units[KIND] > 2)] = 0
    kept[:, (units[ALIVE] == 0) & (units[KIND] == 0) & (units[LEVEL] == 0)] = 0
    idle = units[CAST] == 0
    for field in (CAST_TARGET, CAST_X, CAST_Y):
        kept[field, idle | (units[CAST] == 4)] = 0
    return kept


@pytest.mark.parametrize("size", [1, 3])
def test_a_match_with_swapped_camps_is_the_same_match_rotated(size: int) -> None:
    lineups = LINEUPS[size]
    n = len(lineups)
    here, there = Arena(size, n), Arena(size, n)
    random = np.random.default_rng(size)
    swapped = [(second, first) for first, second in lineups]
    here.reset(range(n), lineups=lineups)
    there.reset(range(n), lineups=swapped)
    for decision in range(2_000):
        here.observe()
        there.observe()
        for name in ("entities", "scalars", "mask", "target_mask"):
            assert np.array_equal(getattr(here, name), np.roll(getattr(there, name), size, axis=1)), (decision, name)
        orders = legal_play(here, random)
        here.step(orders)
        there.step(np.roll(orders, size, axis=1))
        assert np.array_equal(here.reward, np.roll(there.reward, size, axis=1)), decision
        if decision % 20 == 0:
            for m in range(n):
                assert np.array_equal(without_stale_fields(here.units[m]), without_stale_fields(rotate(there.units[m], size))), (
                    decision,
                    m,
                )
        assert np.array_equal(here.over, there.over)
        assert np.array_equal(here.winner, np.where(there.winner < 0, -1, 1 - there.winner))
        over = np.flatnonzero(here.over).tolist()
        if over:
            here.reset([decision] * len(over), over)
            there.reset([decision] * len(over), over)
    assert here.units[:, DEATHS, : 2 * size].sum() > 0, "no hero died"


# -- the same everywhere ----------------------------------------------------------------------------------------------


def hashes(size: int, decisions: int, every: int, saved: bytes | None = None) -> list[str]:
    """Play a random match; return a hash every `every` decisions."""
    arena = Arena(size)
    arena.reset([7], lineups=[tuple(tuple(IDS[(i + camp) % 6] for i in range(size)) for camp in (0, 1))])
    if saved is not None:
        arena.load(0, saved)
    random, found = np.random.default_rng(size), []
    for decision in range(1, decisions + 1):
        arena.observe()
        arena.step(legal_play(arena, random))
        if arena.over[0]:
            arena.reset([decision])
        if decision % every == 0:
            found.append(arena.hash(0))
    return found


def mid_game_state(size: int) -> bytes:
    """Return a saved state with a dead hero and a hero that casts."""
    arena = Arena(size)
    arena.reset([3])
    random = np.random.default_rng(0)
    while not (arena.units[0, DEATHS, : 2 * size].any() and arena.units[0, CAST, : 2 * size].any()):
        arena.observe()
        arena.step(legal_play(arena, random))
        assert not arena.over[0]
    return arena.save(0)


_PROGRAM = """
import sys
from tests.arena.test_vector import hashes
saved = open(sys.argv[4], "rb").read() if len(sys.argv) > 4 else None
print(*hashes(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), saved))
"""


def run_in_process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(command, cwd=root, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def test_seed_and_actions_determine_the_match_compiled_or_not_in_any_process(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(mid_game_state(3))
    with (
        run_in_process("1", "10000", "1000", PYTHONHASHSEED="1", NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1") as other,
        run_in_process("3", "10000", "1000", PYTHONHASHSEED="3", NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2") as team,
        run_in_process("3", "12", "1", str(tmp_path / "state"), NUMBA_DISABLE_JIT="1", PYTHONHASHSEED="2") as plain,
    ):
        here, ours = hashes(1, 10_000, 1_000), hashes(3, 10_000, 1_000)
        slow = hashes(3, 12, 1, (tmp_path / "state").read_bytes())
        assert len(set(here)) == len(set(ours)) == 10
        assert other.communicate(timeout=120)[0].split() == here
        assert team.communicate(timeout=120)[0].split() == ours
        assert plain.communicate(timeout=120)[0].split() == slow


def test_another_seed_gives_another_match() -> None:
    first, second = Arena(), Arena()
    first.reset([1])
    second.reset([2])
    assert first.hash(0) != second.hash(0)


@pytest.mark.parametrize("size", [1, 3])
def test_matches_played_together_equal_matches_played_alone(size: int) -> None:
    together, alone = Arena(size, 5), [Arena(size) for _ in range(5)]
    together.reset(range(5))
    random = np.random.default_rng(0)
    for m, arena in enumerate(alone):
        arena.reset([m])
    for _ in range(300):
        together.observe()
        orders = legal_play(together, random)
        together.step(orders)
        for m, arena in enumerate(alone):
            arena.step(orders[m : m + 1])
            assert np.array_equal(arena.reward[0], together.reward[m])
    assert [together.hash(m) for m in range(5)] == [arena.hash(0) for arena in alone]


def test_a_reset_of_one_match_does_not_change_the_others() -> None:
    arena = Arena(1, 3)
    arena.reset([1, 2, 3])
    random = np.random.default_rng(0)
    for _ in range(50):
        arena.observe()
        arena.step(legal_play(arena, random))
    before = [arena.hash(m) for m in range(3)]
    arena.reset([2], [1])
    assert [arena.hash(m) for m in (0, 2)] == [before[0], before[2]]
    fresh = Arena()
    fresh.reset([2])
    assert arena.hash(1) == fresh.hash(0)


# -- saved -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_a_loaded_match_continues_identically(size: int) -> None:
    saved = mid_game_state(size)
    first, second = Arena(size, 2), Arena(size)
    first.reset([1, 1])
    first.load(1, saved)
    second.load(0, saved)
    random = np.random.default_rng(4)
    for _ in range(100):
        second.observe()
        orders = legal_play(second, random)
        first.step(np.repeat(orders, 2, axis=0))
        second.step(orders)
        assert np.array_equal(first.reward[1], second.reward[0])
    assert first.hash(1) == second.hash(0)
    assert np.array_equal(first.lineup[1], second.units[0, HERO_ROW, : 2 * size])


_HEAD = 28


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda s: b"", "not a saved state"),
        (lambda s: b"X" + s[1:], "not a saved state"),
        (lambda s: s[:-1], "another length"),
        (lambda s: s + b"\0", "another length"),
        (lambda s: s[:16] + b"\xff\xff\0\0" + s[20:], "saved under rules"),
        (lambda s: s[:20] + b"\x63\0\0\0" + s[24:], "no mode"),
    ],
    ids=["empty", "another file", "cut", "longer", "other rules", "no such size"],
)
def test_invalid_saved_states_are_rejected(damage: object, sentence: str) -> None:
    arena = Arena()
    arena.reset([0])
    before = arena.hash(0)
    assert callable(damage)
    with pytest.raises(ConfigError, match=sentence):
        arena.load(0, damage(arena.save(0)))
    assert arena.hash(0) == before


def test_a_state_of_another_size_is_rejected() -> None:
    three, one = Arena(3), Arena(1)
    three.reset([0])
    with pytest.raises(ConfigError, match="3v3"):
        one.load(0, three.save(0))


@pytest.mark.parametrize(
    ("field", "value"),
    [(ALIVE, 2), (KIND, 6), (KIND, -1), (CAMP, 2), (HERO_ROW, 6), (HERO_ROW, -1), (TARGET, 32), (TARGET, -2), (CAST_TARGET, 99), (CAST, 5),
     (LEVEL, 0), (LEVEL, 99), (X, -1), (X, LENGTH + 1), (Y, WIDTH + 1)],
)  # fmt: skip
def test_unit_values_out_of_range_are_rejected(field: int, value: int) -> None:
    arena = Arena()
    arena.reset([0])
    arena.units[0, field, 0] = value
    with pytest.raises(ConfigError, match="no match can reach"):
        arena.load(0, arena.save(0))


@pytest.mark.parametrize(("field", "value"), [(SIZE, 3), (TICK, -1), (TICK, 10**6)])
def test_match_values_out_of_range_are_rejected(field: int, value: int) -> None:
    arena = Arena()
    arena.reset([0])
    arena.match[0, field] = value
    with pytest.raises(ConfigError, match="no match can reach"):
        arena.load(0, arena.save(0))


def test_damaged_states_are_rejected_or_playable() -> None:
    saved, random = mid_game_state(1), np.random.default_rng(0)
    arena = Arena()
    arena.reset([0])
    refused = 0
    for _ in range(400):
        damaged = bytearray(saved)
        for at in random.integers(_HEAD, len(saved), size=3):
            damaged[at] = random.integers(256)
        try:
            arena.load(0, bytes(damaged))
        except ConfigError:
            refused += 1
            continue
        for _ in range(5):
            arena.observe()
            arena.step(legal_play(arena, random))
        assert ((arena.units[0, X] >= 0) & (arena.units[0, X] <= LENGTH)).all()
    assert 0 < refused < 400
    assert len(saved) == _HEAD + 4 * (MATCH_FIELDS + FIELDS * units_of(1))


# -- masks ------------------------------------------------------------------------------------------------------------


def allowed(arena: Arena, h: int, order: tuple[int, int, int, int]) -> bool:
    """Whether the masks allow an order."""
    mask, targets = arena.mask[0, h], arena.target_mask[0, h]
    what, move, skill, target = order
    if not 0 <= what <= RECALL or not mask[what]:
        return False
    if what == MOVE:
        return 0 <= move < DIRECTIONS and bool(mask[8 + move])
    if what == SKILL_2:
        return 0 <= skill < DIRECTIONS and bool(mask[8 + DIRECTIONS + skill])
    if what in AIMED:
        fits = 0 <= target < arena.slots
        return fits and bool(targets[AIMED.index(what), target]) and bool(mask[MASK_BEFORE_TARGETS + target])
    return True


@pytest.mark.parametrize("size", [1, 3])
def test_masks_allow_exactly_the_legal_actions(size: int) -> None:
    arena, random = Arena(size), np.random.default_rng(size)
    arena.reset([5], lineups=[LINEUPS[size][-1]])
    seen: dict[int, set[bool]] = {what: set() for what in range(8)}
    for decision in range(800):
        if decision % 160 == 159:  # otherwise skills are mostly on cooldown
            arena.units[0, COOLDOWN_1 : COOLDOWN_HEAL + 1] = 0
            arena.units[0, MANA] = arena.units[0, MAX_MANA]
        arena.observe()
        if decision % 80 == 79:
            for what in range(-1, 9):
                for target in range(-1, arena.slots + 1):
                    move, skill = (int(d) for d in random.integers(-1, DIRECTIONS + 1, size=2))
                    order = what, move, skill, target
                    legal = arena.legal(np.tile(np.array(order, np.int32), (1, 2 * size, 1)))[0]
                    for h in range(2 * size):
                        assert bool(legal[h]) is allowed(arena, h, order), (decision, h, order)
                        if 0 <= what < 8:
                            seen[what].add(bool(legal[h]))
        for head in (slice(0, 8), slice(8, 24), slice(24, 40), slice(40, None)):
            assert arena.mask[:, :, head].any(axis=-1).all()  # every head has an option
        arena.step(legal_play(arena, random))
    assert all(answers == {True, False} for what, answers in seen.items() if what != 0), seen
    assert arena.match[0, WINNER] == -1
