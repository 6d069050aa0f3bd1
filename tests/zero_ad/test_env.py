"""Skirmishes in the real game. Skipped where 0 A.D. is not installed; settings and places are tested without it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ludus.errors import ConfigError, EnvironmentFault, MissingExtra
from ludus.games.zero_ad import game_process
from ludus.games.zero_ad import observations as seen
from ludus.games.zero_ad.battlefield import HALF_FIELD, MAX_MATCHES, SPACING, centre_of
from ludus.games.zero_ad.env import SkirmishEnv, opponent_names, soldier_templates, starting_places
from ludus.games.zero_ad.game_process import MAP_SIZE, ZeroADGame
from ludus.testing import check_vector_multi_agent_env


def _installed() -> bool:
    try:
        game_process.find_program()
    except MissingExtra:
        return False
    return True


needs_game = pytest.mark.skipif(not _installed(), reason="0 A.D. is not installed: apt-get install 0ad 0ad-data (1.4 GB)")


@pytest.fixture(scope="module")
def skirmish() -> Iterator[SkirmishEnv]:
    env = SkirmishEnv(2, units={"champion_infantry": 1, "champion_ranged": 1}, seconds=60)
    yield env
    env.close()


def begin(env: SkirmishEnv) -> None:
    env.reset(np.arange(env.num_envs), np.arange(env.num_envs))


@pytest.mark.system
@needs_game
def test_a_match_is_fought_until_a_team_is_dead(skirmish: SkirmishEnv) -> None:
    begin(skirmish)
    everybody, returns = np.ones(2, np.bool_), np.zeros((2, 4))
    for _ in range(200):
        attack = np.tile([seen.FIRST_ATTACK, seen.FIRST_ATTACK, seen.KEEP, seen.KEEP], (2, 1))
        step = skirmish.step(attack, everybody)
        returns += step.reward
        if step.terminated.all():
            break
    assert step.terminated.all()
    np.testing.assert_allclose(returns[:, 0], 2.0, atol=1e-5, err_msg="all damage and the last enemy")
    np.testing.assert_allclose(returns[:, 0], -returns[:, 2], atol=1e-6)
    assert not step.acting.any()


@pytest.mark.system
@needs_game
def test_a_soldier_walks_where_it_is_sent(skirmish: SkirmishEnv) -> None:
    begin(skirmish)
    before = skirmish._state().place.copy()
    actions = np.tile([seen.FIRST_MOVE, seen.KEEP, seen.FIRST_MOVE, seen.KEEP], (2, 1))
    for _ in range(2):
        skirmish.step(actions, np.ones(2, np.bool_))
    moved = skirmish._state().place - before
    assert (moved[:, 0, 0, 0] > 5).all(), "blue goes to the right"
    assert (moved[:, 1, 0, 0] < -5).all(), "red to the left"
    assert np.abs(moved[:, :, 1]).max() < 1


@pytest.mark.system
@needs_game
def test_a_picture_shows_both_teams(skirmish: SkirmishEnv) -> None:
    begin(skirmish)
    picture = skirmish.render()
    assert picture.dtype == np.uint8
    for colour in ((60, 120, 255), (220, 60, 50)):
        assert (picture == np.array(colour)).all(axis=2).sum() > 100


@pytest.mark.system
@needs_game
def test_with_one_match_per_game_a_match_depends_on_its_seed_and_its_actions_alone() -> None:
    units = {"champion_infantry": 1, "champion_ranged": 1}
    check_vector_multi_agent_env(
        lambda count: SkirmishEnv(count, units=units, seconds=20, turns=5, matches_per_game=1), matches=2, steps=25
    )


@pytest.mark.system
@needs_game
def test_a_game_that_dies_is_an_error_with_its_last_lines() -> None:
    with ZeroADGame() as game:
        game.start_map(1)
        assert game.evaluate("1 + 1") == 2
        with pytest.raises(EnvironmentFault, match=r"returned nothing for the code 'nothing\.at\.all"):
            game.evaluate("nothing.at.all()")
        os.kill(game.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFault, match=r"(?s)0 A\.D\. does not answer /step.*SIGKILL.*RL interface listening"):
            _step_until_it_fails(game)


def _step_until_it_fails(game: ZeroADGame) -> None:
    for _ in range(100):
        game.step()
        time.sleep(0.05)


def test_a_missing_game_is_named_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(game_process, "PROGRAM", "no-such-game")
    with pytest.raises(MissingExtra, match=r"no-such-game.*apt-get install --no-install-recommends 0ad"):
        SkirmishEnv(1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"units": {}}, r"units are \{\}"),
        ({"units": {"champion_infantry": 9}}, "units are"),
        ({"opponent": "petra"}, "no opponent 'petra'"),
        ({"opponent": []}, r"no opponent \[\]"),
        ({"matches_per_game": 0}, "matches_per_game is 0"),
        ({"turns": 0}, "decisions of 0 turns"),
        ({"seconds": 0.1}, r"match of 0\.1 s"),
        ({"render_mode": "human"}, "render_mode 'human'"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SkirmishEnv(1, **settings)  # type: ignore[arg-type]


def test_templates_and_opponents() -> None:
    assert soldier_templates({"champion_infantry": 2, "champion_ranged": 1}) == [
        *["units/athen/champion_infantry"] * 2,
        "units/athen/champion_ranged",
    ]
    assert opponent_names("self") is None
    assert opponent_names("nearest") == ["nearest"]
    assert opponent_names(["nearest", "weakest"]) == ["nearest", "weakest"]


def test_matches_are_apart_from_each_other_and_from_the_edge_of_the_map() -> None:
    centres = np.array([centre_of(number) for number in range(MAX_MATCHES)])
    distances = np.linalg.norm(centres[:, None] - centres, axis=2) + 1e9 * np.eye(MAX_MATCHES)
    assert distances.min() == SPACING > 2 * HALF_FIELD
    assert centres.min() > HALF_FIELD
    assert centres.max() < MAP_SIZE - HALF_FIELD


def test_teams_start_face_to_face_by_the_seed() -> None:
    places = starting_places(5, np.random.default_rng(1))
    assert (places[0, :, 0] < -20).all()
    assert (places[1, :, 0] > 20).all()
    assert (places == starting_places(5, np.random.default_rng(1))).all()
    assert (places != starting_places(5, np.random.default_rng(2))).any()
