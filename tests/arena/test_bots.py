"""Bots: legal, deterministic, without hidden information, and ordered by strength."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ludus.core.statistics import wilson_interval
from ludus.errors import ConfigError, UsageError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.bots.round_robin import BotMatch, bot_index, draw_lineup, play, play_pairs
from ludus.games.arena.engine.layout import (
    ALIVE,
    CAMP,
    COOLDOWN_1,
    COOLDOWN_HEAL,
    DIRECTIONS,
    GOLD,
    HP,
    ILLEGAL,
    LENGTH,
    MANA,
    RECALL,
    SEEN,
    TARGET,
    WIDTH,
    X,
    Y,
)
from ludus.games.arena.engine.vector import Arena

Orders = npt.NDArray[np.int32]


def random_lineups(size: int, matches: int, seed: int) -> Arena:
    """Return matches with random line-ups."""
    rng = np.random.default_rng(seed)
    arena = Arena(size, matches, lenient=True)
    arena.reset(range(seed, seed + matches), lineups=[draw_lineup(rng, size) for _ in range(matches)])
    return arena


def any_orders(arena: Arena, rng: np.random.Generator) -> Orders:
    shape = (arena.matches, arena.heroes)
    return np.stack([rng.integers(0, n, shape) for n in (RECALL + 1, DIRECTIONS, DIRECTIONS, arena.slots)], -1).astype(np.int32)


def all_heroes(arena: Arena, bot: str) -> npt.NDArray[np.int8]:
    return np.full((arena.matches, arena.heroes), bot_index(bot), np.int8)


@pytest.mark.parametrize("size", [1, 3])
def test_orders_of_every_bot_are_legal_in_random_states(size: int) -> None:
    arena, rng = random_lineups(size, 8, 5), np.random.default_rng(5)
    bots = [all_heroes(arena, bot) for bot in BOTS]
    for step in range(500):
        for bot, who in zip(BOTS, bots, strict=True):
            legal = arena.legal(arena.bot_actions(who))
            assert legal.all(), f"{bot} at decision {step} of {np.argwhere(~legal).tolist()}"
        # Alternate random play and bots, so that fights, sieges and deaths occur.
        arena.step(any_orders(arena, rng) if step % 3 else arena.bot_actions(bots[step // 3 % len(bots)]))


def test_no_order_in_a_match_between_bots_is_illegal() -> None:
    arena = random_lineups(3, 4, 11)
    who = np.array([[bot_index("hard")] * 3 + [bot_index(bot)] * 3 for bot in ("hard", "medium", "easy", "random")], np.int8)
    while not arena.over.all():
        arena.step(arena.bot_actions(who))
    assert arena.units[:, ILLEGAL].sum() == 0


@pytest.mark.parametrize("bot", ["nearest", "easy", "medium", "hard"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_bot_does_not_use_hidden_information(bot: str, size: int) -> None:
    """Moving invisible enemies and changing gold and cooldowns of all enemies does not change the orders."""
    arena, rng = random_lineups(size, 8, 3), np.random.default_rng(3)
    who, hidden, changed = all_heroes(arena, bot), 0, 0
    for step in range(400):
        orders = arena.bot_actions(who)
        if step % 4 == 0:
            for camp in (0, 1):
                kept = arena.units.copy()
                theirs = arena.units[:, CAMP] == 1 - camp
                theirs[:, 2 * size : 2 * size + 6] = False  # buildings are always visible
                dark = theirs & (kept[:, ALIVE] == 1) & (kept[:, SEEN] == 0)
                hidden += int(dark[:, : 2 * size].sum())
                for field, most in ((X, LENGTH), (Y, WIDTH), (HP, 900), (MANA, 500), (TARGET, 2)):
                    arena.units[:, field] = np.where(dark, rng.integers(1, most, dark.shape), kept[:, field])
                heroes = theirs & (np.arange(arena.slots) < 2 * size)
                for field in (GOLD, *range(COOLDOWN_1, COOLDOWN_HEAL + 1)):
                    arena.units[:, field] = np.where(heroes, rng.integers(0, 900, dark.shape), arena.units[:, field])
                differ = (arena.bot_actions(who) != orders).any(axis=-1).reshape(-1, 2, size)
                assert not differ[:, camp].any(), f"{bot} at decision {step} of {np.argwhere(differ[:, camp]).tolist()}"
                changed += int(differ[:, 1 - camp].sum())
                arena.units[:] = kept
        arena.step(orders)
    assert hidden > 100, "no unit was hidden"
    assert changed > 10, "those whose purse and skills were changed play as before: the test has tested nothing"


def test_a_match_between_bots_is_deterministic_also_from_a_saved_state() -> None:
    arena, other = random_lineups(3, 1, 21), random_lineups(3, 1, 77)
    who = np.array([[bot_index(bot) for bot in ("hard", "medium", "easy", "random", "nearest", "hard")]], np.int8)
    for step in range(600):
        if step == 300:
            other.load(0, arena.save(0))
        arena.step(arena.bot_actions(who))
        if step >= 300:
            other.step(other.bot_actions(who))
    again = random_lineups(3, 1, 21)
    for _ in range(600):
        again.step(again.bot_actions(who))
    assert arena.hash(0) == other.hash(0) == again.hash(0)


def test_heroes_without_a_bot_get_no_order() -> None:
    arena = random_lineups(3, 2, 1)
    who = np.full((2, 6), -1, np.int8)
    who[1, 4] = bot_index("nearest")
    orders = arena.bot_actions(who)
    assert np.argwhere(orders.any(axis=-1)).tolist() == [[1, 4]]
    assert orders[0].sum() == 0


def test_unknown_bots_are_rejected_by_name() -> None:
    arena = random_lineups(1, 1, 1)
    with pytest.raises(ConfigError, match="'hardest'"):
        bot_index("hardest")
    with pytest.raises(UsageError, match="from 5 to 5"):
        arena.bot_actions(np.full((1, 2), 5))
    with pytest.raises(UsageError, match="shape"):
        arena.bot_actions(np.zeros((2, 2), np.int8))


def test_stronger_bots_beat_weaker_ones() -> None:
    """The committed one (bench/results/arena-ladder.md) has hundreds of games; this detects accidental changes.

    Bounds: at the rates measured there, chance oversteps each of them less than once in a million.
    """
    bounds = {
        ("hard", "medium"): (10, 24),
        ("medium", "easy"): (11, 24),
        ("random", "medium"): (0, 5),
        ("nearest", "medium"): (0, 5),
    }
    found = {standing.pair: standing.won for standing in play_pairs(24, 1, 8, tuple(bounds))}
    assert all(low <= found[pair] <= high for pair, (low, high) in bounds.items()), found


def test_a_result_counts_for_the_bot_and_not_for_its_camp() -> None:
    lineup = ((107,), (107,))
    winners, seconds = play([BotMatch(("nearest", "random"), lineup, 4), BotMatch(("random", "nearest"), lineup, 4)], 1)
    assert winners == [0, 1]
    assert all(30 < s < 480 for s in seconds)
    (standing,) = play_pairs(4, 1, 4, (("medium", "random"),))
    assert (standing.won, standing.lost, standing.drawn) == (4, 0, 0)
    assert standing.bounds == wilson_interval(4, 4, 1.96)
    assert standing.row()["mode"] == "1v1"
