"""What soldiers observe: pure functions of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.core.types import Floats
from ludus.games.zero_ad import observations as seen
from ludus.games.zero_ad.observations import Facts, Field
from ludus.games.zero_ad.scripts import attack_nearest, attack_weakest

FACTS = Facts(*(np.array(row, np.float32) for row in ([200, 120], [4, 60], [0, 1])))
TIME = np.ones(1, np.float32)


def field(
    blue: list[tuple[float, float]],
    red: list[tuple[float, float]],
    health: list[list[float]],
    orders: list[list[int]] | None = None,
) -> Field:
    """One match of two soldiers a side."""
    chosen = orders if orders is not None else [[seen.IDLE] * 2] * 2
    return Field(np.array([[blue, red]], np.float32), np.array([health], np.float32), np.array([chosen], np.int64))


def enemies(view: Floats) -> Floats:
    return view[-2 * seen.ENEMY :].reshape(2, seen.ENEMY)


FULL = [[200.0, 120.0], [200.0, 120.0]]
BLUE, RED = [(-20.0, 0.0), (-20.0, 10.0)], [(20.0, 0.0), (20.0, -10.0)]


def test_sizes_tell_the_number_of_soldiers() -> None:
    for soldiers in range(1, 9):
        assert seen.soldiers_of(seen.observation_size(soldiers)) == soldiers


def test_both_teams_see_a_symmetric_field_alike() -> None:
    state = field(BLUE, RED, FULL)
    (blue, blue_mask), (red, red_mask) = (seen.observe(state, FACTS, TIME, team) for team in (0, 1))
    np.testing.assert_allclose(blue, red, atol=1e-6)
    assert (blue_mask == red_mask).all()
    assert blue[0, 0, 2] < 0, "every team comes from the left"


def test_slots_begin_with_the_weakest_and_end_with_the_dead() -> None:
    assert seen.enemy_slots(field(BLUE, RED, FULL), 0).tolist() == [[1, 0]]
    assert seen.enemy_slots(field(BLUE, RED, [[200.0, 120.0], [90.0, 120.0]]), 0).tolist() == [[0, 1]]
    assert seen.enemy_slots(field(BLUE, RED, [[200.0, 120.0], [200.0, 0.0]]), 0).tolist() == [[0, 1]]
    equal = Facts(np.array([200, 200], np.float32), FACTS.reach, FACTS.shoots)
    assert equal.health[0] == equal.health[1]
    near_second = field(BLUE, [(25.0, 0.0), (10.0, 0.0)], [[200.0, 200.0], [200.0, 200.0]])
    assert seen.enemy_slots(near_second, 0).tolist() == [[1, 0]], "of equals, the nearest to the team"


def test_an_enemy_is_seen_with_distance_reach_and_attackers() -> None:
    state = field(
        [(0.0, 0.0), (0.0, 0.0)], [(3.0, 4.0), (30.0, 0.0)], [[200.0, 120.0], [100.0, 120.0]], [[0, 0], [seen.IDLE] * 2]
    )
    view = seen.observe(state, FACTS, TIME, 0)[0][0]
    first = enemies(view[0])[0]
    np.testing.assert_allclose(first, [3 / 50, 4 / 50, 5 / 50, 0.5, 0, 1, 0, 1, 1], atol=1e-6)  # 5 m: out of reach of a spear
    second = enemies(view[0])[1]
    np.testing.assert_allclose(second, [30 / 50, 0, 30 / 50, 1, 1, 1, 0, 0, 0], atol=1e-6)
    assert enemies(view[1])[:, 6].tolist() == [1, 1], "the archer reaches both"


def test_the_dead_are_not_attacked_and_do_not_act() -> None:
    state = field(BLUE, RED, [[0.0, 120.0], [200.0, 0.0]])
    view, mask = seen.observe(state, FACTS, TIME, 0)
    assert mask[0, 0].tolist() == [True] + [False] * (seen.action_count(2) - 1)
    assert mask[0, 1, seen.FIRST_ATTACK :].tolist() == [True, False]
    assert not enemies(view[0, 1])[1].any()


def test_a_move_ahead_leads_to_the_enemy_for_both_teams() -> None:
    np.testing.assert_allclose(seen.move_offset(0, 0, 10.0), [10, 0], atol=1e-6)
    np.testing.assert_allclose(seen.move_offset(0, 1, 10.0), [-10, 0], atol=1e-6)


@pytest.mark.parametrize(("health", "nearest", "weakest"), [(100.0, 1, 0), (150.0, 0, 0)])
def test_scripts_choose_their_enemy(health: float, nearest: int, weakest: int) -> None:
    state = field([(0.0, 0.0), (0.0, 10.0)], [(40.0, 0.0), (10.0, 0.0)], [[200.0, 120.0], [health, 120.0]])
    views, masks = seen.observe(state, FACTS, TIME, 0)
    assert attack_nearest(views[0, 0], masks[0, 0]) == seen.FIRST_ATTACK + nearest
    assert attack_weakest(views[0, 0], masks[0, 0]) == seen.FIRST_ATTACK + weakest


def test_scripts_keep_when_no_enemy_lives() -> None:
    views, _ = seen.observe(field(BLUE, RED, [[200.0, 120.0], [0.0, 0.0]]), FACTS, TIME, 0)
    assert attack_nearest(views[0, 0]) == attack_weakest(views[0, 0]) == seen.KEEP
