"""Scenes of a Unity player as environments with several agents, played by the stand-in player."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from ludus.envs.pettingzoo import Departure, MatchStep, MultiAgentMatch, Turn, make_match, sample_action
from ludus.envs.unity import match as unity_match
from ludus.envs.unity.match import UnityMatch
from ludus.errors import ConfigError, EnvironmentFault, UnknownName
from tests.tools import need
from tests.unity_player.executable import write_player
from tests.unity_player.ports import first_port
from tests.unity_player.scenes import sensors, soccer, walk
from tests.waiting import wait_until

FIRST_PORT = first_port(22_000)

Open = Callable[..., UnityMatch]


@pytest.fixture
def open_match(tmp_path: Path) -> Iterator[Open]:
    opened: list[UnityMatch] = []

    def make(scene: str, areas: int = 1, **env_config: Any) -> UnityMatch:
        player = write_player(tmp_path, scene, areas=areas)
        made = make_match("unity", {"file_name": str(player), "base_port": FIRST_PORT, "no_graphics": True, **env_config})
        assert isinstance(made, UnityMatch)
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.close()


def play(match: MultiAgentMatch, steps: int, choose: Callable[[Turn], Any]) -> list[MatchStep]:
    """Results of the steps; the next match begins when one is over."""
    found, now = [], match.reset(0)
    for _ in range(steps):
        now = match.step({turn.agent: choose(turn) for turn in now.turns})
        found.append(now)
        if now.over:
            now = match.reset(0)
    return found


def at_random(match: MultiAgentMatch) -> Callable[[Turn], Any]:
    random = np.random.default_rng(0)
    return lambda turn: sample_action(match.agents[turn.agent].action, turn.mask, random)


def parts_of(space: gym.Space[Any]) -> gym.spaces.Dict:
    assert isinstance(space, gym.spaces.Dict)
    return space


def departures_of(steps: list[MatchStep]) -> list[Departure]:
    return [left for step in steps for left in step.departures]


def test_a_scene_with_one_agent_is_an_episode_after_the_other(open_match: Open) -> None:
    match = open_match("walk")
    (agent,) = match.agents
    assert agent == "Walk_0"
    assert match.agents[agent].observation == gym.spaces.Box(-np.inf, np.inf, (walk.LENGTH,), np.float32)
    assert match.agents[agent].action == gym.spaces.MultiDiscrete([3, 2])
    steps = play(match, 300, lambda turn: np.array([walk.RIGHT, int(turn.mask is None or turn.mask[4])]))
    ended = departures_of(steps)
    assert len(ended) > 60
    assert all(left.terminated and left.reward == pytest.approx(walk.GOAL) for left in ended)
    assert all(step.over == bool(step.departures) for step in steps)
    assert match.late_rewards == 0


def test_masks_keep_agents_from_forbidden_actions(open_match: Open) -> None:
    """The player ends when a forbidden action arrives."""
    match = open_match("walk")
    steps = play(match, 500, at_random(match))
    masks = {tuple(turn.mask.tolist()) for step in steps for turn in step.turns if turn.mask is not None}
    assert len(masks) >= 3


def test_an_interrupted_episode_is_truncated_with_its_last_observation(open_match: Open) -> None:
    match = open_match("walk")
    steps = play(match, walk.LIMIT, lambda turn: np.array([walk.STAY, walk.SLOW]))
    (left,) = departures_of(steps)
    assert left.truncated
    assert not left.terminated
    assert left.observation is not None
    assert left.observation.sum() == 1.0


def test_agents_of_two_teams_are_named_by_team_and_share_the_reward_of_their_group(open_match: Open) -> None:
    match = open_match("soccer", teams=["blue", "red"])
    assert list(match.agents) == ["blue_0", "blue_1", "red_0", "red_1"]
    steps = play(match, 2500, at_random(match))
    overs = [step for step in steps if step.over]
    assert len(overs) > 3
    for step in overs:
        ended = {left.agent: left for left in step.departures}
        assert ended.keys() == match.agents.keys()
        scored = ended["blue_0"].terminated
        blue, red = ended["blue_0"].reward + ended["blue_1"].reward, ended["red_0"].reward + ended["red_1"].reward
        if scored:  # 1 less what it took in time for the group, and a little for touching the ball
            assert max(blue, red) > 0.9
            assert min(blue, red) < -1.9
        else:
            assert abs(blue) + abs(red) < 0.1


def test_agents_that_are_sent_off_leave_and_come_back_to_a_free_slot(open_match: Open) -> None:
    match = open_match("soccer", environment_parameters={"send_off": 1})
    away, still = np.array([2, 1]), np.array([0, 0])  # backwards and to the side, to the edge of the field
    returned, gone, lengths, length = 0, set[str](), list[int](), 0
    now = match.reset(0)
    while len(lengths) < 2:
        now = match.step({turn.agent: still if turn.agent == "team0_0" else away for turn in now.turns})
        length += 1
        gone |= {left.agent for left in now.departures}
        if now.over:
            lengths.append(length)
            now, gone, length = match.reset(0), set(), 0
        back = gone & {turn.agent for turn in now.turns}
        returned += len(back)
        gone -= back
    assert lengths == [soccer.LIMIT] * 2
    assert returned > 10


def test_several_areas_are_slots_of_one_match_which_ends_when_all_have_ended_an_episode(open_match: Open) -> None:
    match = open_match("ball", areas=3)
    assert list(match.agents) == ["3DBall_0", "3DBall_1", "3DBall_2"]
    now, ended, matches = match.reset(0), set[str](), 0
    choose = at_random(match)
    for _ in range(400):
        assert len(now.turns) == 3
        now = match.step({turn.agent: choose(turn) for turn in now.turns})
        ended |= {left.agent for left in now.departures if left.terminated}
        if now.over:
            assert ended == match.agents.keys()
            cut = [left for left in now.departures if left.truncated]
            assert all(left.observation is not None for left in cut)
            now, ended, matches = match.reset(0), set(), matches + 1
    assert matches > 3


def test_agents_act_only_when_they_request_a_decision(open_match: Open) -> None:
    match = open_match("shifts")
    periods = dict(zip(match.agents, walk.Shifts.PERIODS, strict=True))
    now = match.reset(0)
    for number in range(walk.Shifts.DECISIONS):
        assert {turn.agent for turn in now.turns} == {agent for agent, period in periods.items() if number % period == 0}
        if number:
            assert {turn.agent: turn.reward for turn in now.turns} == {
                agent: pytest.approx(period + 1.0) for agent, period in periods.items() if number % period == 0
            }
        now = match.step({turn.agent: 1 for turn in now.turns})
    assert {left.agent for left in now.departures} == {"Worker_0"}


def test_hybrid_actions_arrive_as_they_were_chosen(open_match: Open) -> None:
    match = open_match("hybrid")
    (own,) = match.agents.values()
    assert parts_of(own.action)["continuous"] == gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def right(turn: Turn) -> Any:
        first, second = turn.observation
        return {
            "continuous": np.asarray(turn.observation),
            "discrete": np.array([first > 0, int(second > -1 / 3) + int(second > 1 / 3)], np.int64),
        }

    steps = play(match, 3 * sensors.ROUNDS, right)
    rewards = [turn.reward for step in steps for turn in step.turns] + [left.reward for left in departures_of(steps)]
    assert len(rewards) == 3 * sensors.ROUNDS
    assert rewards == pytest.approx([2.0] * len(rewards), abs=1e-5)


def test_pictures_are_bytes_if_they_come_as_png_and_floats_otherwise(open_match: Open) -> None:
    match = open_match("pictures")
    (own,) = match.agents.values()
    height, width = sensors.Pictures.HEIGHT, sensors.Pictures.WIDTH
    assert parts_of(own.observation)["obs_0"] == gym.spaces.Box(0, 255, (height, width, 3), np.uint8)
    assert parts_of(own.observation)["obs_1"] == gym.spaces.Box(-np.inf, np.inf, (height, width, 1), np.float32)
    assert parts_of(own.observation)["obs_2"] == gym.spaces.Box(0, 255, (height, width, 4), np.uint8)
    seen = match.reset(0).turns[0].observation
    light = seen["obs_0"][..., 0]
    assert set(np.unique(light)) == {51, 255}
    np.testing.assert_array_equal(seen["obs_0"][..., 2], 255 - light)
    np.testing.assert_allclose(seen["obs_1"][..., 0], light / 255, atol=1e-6)
    np.testing.assert_array_equal(seen["obs_2"], np.stack([light, light * 0, 255 - light, 255 - light], axis=-1))

    def lit(turn: Turn) -> int:
        row, column = np.argwhere(turn.observation["obs_0"][..., 0] == 255)[0]
        return int(2 * (row >= height // 2) + (column >= width // 2))

    steps = play(match, sensors.ROUNDS, lit)
    assert [turn.reward for step in steps for turn in step.turns] == [1.0] * (sensors.ROUNDS - 1)


def test_buffers_are_padded_with_zeros(open_match: Open) -> None:
    match = open_match("crowd")
    (own,) = match.agents.values()
    assert parts_of(own.observation)["obs_0"].shape == (sensors.Crowd.MOST, 3)
    seen = match.reset(0).turns[0].observation
    count = round(float(seen["obs_1"][0]) * sensors.Crowd.MOST)
    assert (seen["obs_0"][:count, 2] > 0).all()
    assert (seen["obs_0"][count:] == 0).all()


def test_the_next_match_goes_on_without_a_reset_and_leaving_early_resets_the_scene(open_match: Open) -> None:
    match = open_match("ball")
    now, lengths, length = match.reset(0), list[int](), 0
    while len(lengths) < 3:
        now = match.step({turn.agent: np.array([1.0, -1.0], np.float32) for turn in now.turns})
        length += 1
        if now.over:
            lengths.append(length)
            now, length = match.reset(0), 0
    assert match._player is not None
    assert match._player.exchanges == 1 + sum(lengths)
    match.step({turn.agent: np.zeros(2, np.float32) for turn in now.turns})
    (left,) = match.truncate()
    assert left.truncated
    assert left.observation is not None
    exchanges = match._player.exchanges
    assert len(match.reset(0).turns) == 1
    assert match._player.exchanges == exchanges + 1


def test_the_layout_of_a_scene_is_known_without_another_player(open_match: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_match("ball")
    again = UnityMatch("unity", first._config.model_dump())
    assert again.agents == first.agents
    assert again._player is None
    again.close()
    monkeypatch.setattr(unity_match, "_layouts", type(unity_match._layouts)())
    assert len(open_match("ball", areas=2).agents) == 2


def test_two_matches_with_the_same_worker_id_use_two_ports(open_match: Open) -> None:
    first, second = open_match("walk"), open_match("walk", seed=5)
    choose = at_random(first)
    for match in (first, second):
        play(match, 20, choose)
    assert first._player is not None
    assert second._player is not None
    assert first._player.port != second._player.port
    assert second._player.seed == 5 + second._player.port - FIRST_PORT


def test_the_settings_of_the_engine_and_of_the_scene_reach_the_player(open_match: Open, tmp_path: Path) -> None:
    sampler = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 0.5, "max_value": 2}}
    ranges = {"sampler_type": "multirangeuniform", "sampler_parameters": {"intervals": [[1, 2], [4, 5]]}}
    normal = {"sampler_type": "gaussian", "sampler_parameters": {"mean": 1, "st_dev": 0.25}}
    match = open_match(
        "ball",
        no_graphics=True,
        log_folder=str(tmp_path / "logs"),
        time_scale=5,
        capture_frame_rate=30,
        seed=7,
        num_areas=2,
        additional_args=["--level", "ice"],
        environment_parameters={"mass": 2.5, "size": sampler, "wind": normal, "gap": ranges},
    )
    assert match._player is not None
    seed = match._player.seed
    match.close()  # its log is complete then
    (log,) = (tmp_path / "logs").glob("Player-*.log")
    text = log.read_text()
    assert "nographics=True, batchmode=True" in text
    assert "ignored: ['--level', 'ice']" in text
    assert f"'seed': {seed}" in text
    assert seed >= 7
    assert "time_scale (5.0,)" in text
    assert "capture_frame_rate (30,)" in text
    assert "screen_resolution (84, 84)" in text
    assert "('mass', 2.5)" in text


def test_what_the_game_reports_becomes_statistics(open_match: Open) -> None:
    match = open_match("ball")
    assert match.take_statistics() == {}
    play(match, 100, lambda turn: np.array([1.0, 1.0], np.float32))
    found = match.take_statistics()
    assert found.keys() == {"unity/Ball/Seconds"}
    assert 0 < found["unity/Ball/Seconds"] < 60
    assert match.take_statistics() == {}


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({"file_name": "nowhere/Game"}, "there is no player nowhere/Game"),
        ({"worker_id": 2}, "worker_id is 2, and file_name null"),
        ({"file_name": "Game", "time_scale": 0}, "time_scale"),
        ({"file_name": "Game", "timescale": 3}, "timescale"),
        ({"file_name": "Game", "teams": ["a", "a"]}, "the same name"),
        ({"file_name": "Game", "environment_parameters": {"mass": {"sampler_type": "cauchy"}}}, "sampler_type"),
        ({"max_agents": 0}, "max_agents"),
        ({"max_agents": {"Ball": 0}}, "max_agents"),
    ],
)
def test_wrong_settings_are_named(env_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_match("unity", env_config)


def test_other_names_of_the_family_are_unknown() -> None:
    with pytest.raises(UnknownName, match="env: unity"):
        make_match("unity/3DBall")


def test_a_player_that_is_not_executable_is_named(tmp_path: Path) -> None:
    player = write_player(tmp_path)
    player.chmod(0o644)
    with pytest.raises(ConfigError, match=r"chmod \+x"):
        make_match("unity", {"file_name": str(player.with_suffix(""))})


def test_settings_that_do_not_fit_the_scene_are_named(open_match: Open) -> None:
    with pytest.raises(ConfigError, match="has no name for team 1"):
        open_match("soccer", teams=["blue"])
    with pytest.raises(ConfigError, match="max_agents names 'Football'"):
        open_match("soccer", max_agents={"Football": 3})


def test_more_agents_than_slots_are_an_error_with_a_remedy(open_match: Open) -> None:
    with pytest.raises(EnvironmentFault, match=r"further agent of '3DBall\?team=0'.*max_agents"):
        open_match("ball", areas=3, max_agents=2).reset(0)
    assert len(open_match("ball", areas=3, max_agents={"3DBall?team=0": 5}).agents) == 5


def test_editor_mode_waits_for_somebody_to_press_play(tmp_path: Path) -> None:
    player = write_player(tmp_path, "walk")
    settings = {"base_port": FIRST_PORT + 5000, "timeout_wait": 30}
    editor = subprocess.Popen(
        ["/bin/sh", "-c", f'sleep 0.3; exec "{player}" --mlagents-port {FIRST_PORT + 5000}'], stdout=subprocess.DEVNULL
    )
    try:
        probe = make_match("unity", settings)
        assert list(probe.agents) == ["Walk_0"]
        probe.close()  # the editor stays in play mode
        match = make_match("unity", settings)
        play(match, 20, at_random(match))
        with pytest.raises(EnvironmentFault, match=f"Port {FIRST_PORT + 5000}, to which the Unity editor connects, is taken"):
            make_match("unity", {**settings, "seed": 1})
        match.close()
        assert editor.wait(20) == 0
    finally:
        editor.kill()
        editor.wait()


def test_an_editor_that_is_not_started_is_an_error_that_says_press_play() -> None:
    with pytest.raises(EnvironmentFault, match=r"Unity editor did not connect.*Press Play"):
        make_match("unity", {"base_port": FIRST_PORT + 6000, "timeout_wait": 0.3})


def test_a_recorded_player_draws_on_a_private_screen_whose_picture_is_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("Xvfb")
    monkeypatch.setenv("LUDUS_SCREEN", "xvfb")
    plain = write_player(tmp_path, "walk")
    window = Path(__file__).parents[2] / "display" / "window.py"
    player = tmp_path / "drawing.x86_64"
    player.write_text(f'#!/bin/sh\ntail -f /dev/null | {sys.executable} {window} 640 480 200 30 40 &\nexec {plain} "$@"\n')
    player.chmod(0o755)
    match = UnityMatch("unity", {"file_name": str(player), "base_port": FIRST_PORT, "no_graphics": True}, "rgb_array")
    with contextlib.closing(match):
        match.reset(0)
        assert match.render().shape == (480, 640, 3)
        wait_until(lambda: match.render()[240, 320].tolist() == [200, 30, 40])
        assert match._player is not None
        assert match._player.process is not None
        log = match._player.process.log_path
        wait_until(lambda: "screen_resolution (640, 480)" in log.read_text())
        assert "nographics=False" in log.read_text()
