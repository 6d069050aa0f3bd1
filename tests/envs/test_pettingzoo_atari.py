"""Atari games of PettingZoo: ROMs from ale-py, the same steps as PettingZoo's own, and the Pong of the example league."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.leagues.pong import BALL_AHEAD, BALL_BELOW, BALL_Y, DOWN, NOTHING, OTHER_Y, OWN_Y, UP, follow_ball, observe
from ludus.config.schema import PreprocessConfig
from ludus.core.tree import leaves
from ludus.envs.pettingzoo import MatchStep, make_match
from ludus.errors import EnvironmentFault, MissingExtra

PONG = "pettingzoo/pong_v3"
OBJECTS = "examples.leagues.pong:PongObjects"
EXTRA = "pip install 'ludus[pettingzoo-atari]'"


@pytest.fixture
def emulator() -> Any:
    pytest.importorskip("ale_py", reason=EXTRA)
    return pytest.importorskip("multi_agent_ale_py", reason=EXTRA)


# -- installation -------------------------------------------------------------------------------------------------------


def test_without_the_emulator_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("pettingzoo.atari")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "multi_agent_ale_py", None)
    with pytest.raises(MissingExtra, match=r"multi_agent_ale_py.*ludus\[pettingzoo-atari\]"):
        make_match(PONG)


def test_without_roms_the_error_names_the_extra(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(MissingExtra, match=r"needs ROMs.*ludus\[pettingzoo-atari\]"):
        make_match(PONG)


def test_roms_can_be_in_another_place(emulator: Any, tmp_path: Path) -> None:
    config = {"auto_rom_install_path": str(tmp_path)}
    with pytest.raises(EnvironmentFault, match="rom pong is not installed"):
        make_match(PONG, config)
    shutil.copy(rom_directory() / "pong.bin", tmp_path)
    make_match(PONG, config).reset(1)


def rom_directory() -> Path:
    import ale_py

    return Path(ale_py.__file__).parent / "roms"


# -- steps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("game", "cycles"), [("pong_v3", 400), ("warlords_v3", 60)])
def test_steps_are_those_of_pettingzoo_until_the_end(emulator: Any, game: str, cycles: int) -> None:
    module = importlib.import_module(f"pettingzoo.atari.{game}")
    theirs = module.parallel_env(auto_rom_install_path=str(rom_directory()), max_cycles=cycles, obs_type="ram")
    ours = make_match(f"pettingzoo/{game}", {"max_cycles": cycles, "obs_type": "ram"})
    random = np.random.default_rng(1)
    expected, step = theirs.reset(seed=3)[0], ours.reset(3)
    for _ in range(cycles):
        assert [turn.agent for turn in step.turns] == theirs.agents
        for turn in step.turns:
            np.testing.assert_array_equal(turn.observation, expected[turn.agent])
        actions = {agent: int(random.integers(6)) for agent in theirs.agents}
        expected, rewards, terminations, truncations, _ = theirs.step(actions)
        step = ours.step(actions)
        assert rewards_of(step) == {agent: float(reward) for agent, reward in rewards.items()}
        left = {departure.agent: (departure.terminated, departure.truncated) for departure in step.departures}
        assert left == {a: (terminations[a], truncations[a]) for a in rewards if terminations[a] or truncations[a]}
    assert step.over
    assert theirs.agents == []


def rewards_of(step: MatchStep) -> dict[str, float]:
    return {turn.agent: turn.reward for turn in step.turns} | {left.agent: left.reward for left in step.departures}


def test_images_are_preprocessed_and_tell_the_players_apart(emulator: Any) -> None:
    preprocess = PreprocessConfig(grey=True, resize=(42, 42), stack=4, frame_skip=4, agent_indicator=True)
    match = make_match(PONG, preprocess=preprocess, render_mode="rgb_array")
    turns = match.reset(1).turns
    assert [turn.observation["agent"].tolist() for turn in turns] == [[1.0, 0.0], [0.0, 1.0]]
    for turn in turns:
        assert dict(leaves(turn.observation)).keys() == {"agent", "observation"}
        assert turn.observation["observation"].shape == (42, 42, 4)
    assert match.render().shape == (210, 160, 3)
    assert match.metadata["render_fps"] == 15


# -- the Pong of the example league -------------------------------------------------------------------------------------


def memory(ball: tuple[int, int], left: int, right: int) -> Any:
    found = np.zeros(128, np.uint8)
    found[49], found[54] = ball
    found[50], found[51] = left, right
    return found


def test_both_players_see_the_field_from_the_same_side() -> None:
    for_right = observe(memory((150, 90), left=60, right=180), right=True)
    for_left = observe(memory((106, 90), left=180, right=60), right=False)
    np.testing.assert_array_equal(for_right, for_left)
    assert for_right[BALL_AHEAD] > 0, "the ball is near the own paddle"
    assert for_right[OWN_Y] > for_right[OTHER_Y]
    assert for_right[BALL_BELOW] == -2, "it is far above the own paddle"


def test_the_script_follows_the_ball() -> None:
    middle, low, high = (observe(memory((150, y), 50, 100), right=True) for y in (106, 150, 60))
    assert [follow_ball(seen, None) for seen in (middle, low, high)] == [NOTHING, DOWN, UP]
    assert follow_ball(np.concatenate([low, high]), None) == UP, "the newest observation counts"


BALL, RIGHT, LEFT = (236, 236, 236), (92, 186, 92), (213, 130, 74)
"""Colours on the screen."""


def centre(picture: Any, colour: tuple[int, int, int]) -> tuple[float, float] | None:
    """(x, y) of the middle of everything in that colour, between the upper and the lower edge of the field."""
    found = np.argwhere((picture[34:194] == colour).all(-1))
    if not len(found):
        return None
    y, x = ((found.min(0) + found.max(0)) / 2).tolist()
    return x, y + 34


def test_observations_are_what_the_screen_shows(emulator: Any) -> None:
    """Objects at the edges are cut off on the screen, so only whole ones are compared."""
    match = make_match(PONG, {"obs_type": "ram"}, render_mode="rgb_array", wrappers=[{OBJECTS: {"points": 3}}])
    random, step, compared, scores = np.random.default_rng(0), match.reset(1), 0, {"first_0": 0.0, "second_0": 0.0}
    while not step.over:
        seen, picture = {turn.agent: turn.observation for turn in step.turns}, match.render()
        ball, right, left = (centre(picture, colour) for colour in (BALL, RIGHT, LEFT))
        assert ball, "serves are automatic"
        if right and left and all(50 < y < 170 for _, y in (ball, right, left)):
            compared += 1
            for agent, own, other, side in (("first_0", right, left, 1), ("second_0", left, right, -1)):
                own_y, other_y, ahead, ball_y, below = (float(number) for number in seen[agent] * [80, 80, 80, 80, 16])
                assert own_y - other_y == pytest.approx(own[1] - other[1], abs=3)
                assert ball_y - own_y == pytest.approx(ball[1] - own[1], abs=3)
                assert below == pytest.approx(np.clip(ball[1] - own[1], -32, 32), abs=3)
                assert ahead == pytest.approx(side * (ball[0] - 79.5), abs=3)
        step = match.step({turn.agent: int(random.integers(3)) for turn in step.turns})
        for agent, reward in rewards_of(step).items():
            scores[agent] += reward
    assert compared > 20
    assert sum(scores.values()) == 0
    assert max(scores.values()) <= 3
    assert all(departure.terminated for departure in step.departures)


def test_matches_do_not_depend_on_those_before(emulator: Any) -> None:
    match = make_match(PONG, {"obs_type": "ram"}, wrappers=[{OBJECTS: {"points": 1}}])
    courses = []
    for _ in range(2):
        step, course = match.reset(5), []
        while not step.over:
            step = match.step({turn.agent: int(turn.observation[BALL_Y] > 0) + 1 for turn in step.turns})
            course.append(np.concatenate([turn.observation for turn in step.turns] or [np.zeros(10)]))
        courses.append(np.stack(course))
    np.testing.assert_array_equal(courses[0], courses[1])
