"""`env: godot_rl` with a game of ours that speaks the protocol."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.envs import pettingzoo
from ludus.envs.godot_rl.match import GodotMatch
from ludus.envs.godot_rl.settings import GodotSettings
from ludus.envs.pettingzoo import MatchStep, sample_action
from ludus.errors import ConfigError, EnvironmentFault, UnknownName, UsageError
from tests.envs.godot_rl.stand_in import game_at

FIRST_PORT = 21_400 + 200 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Of the tests of this process: those of others have their own."""


@contextlib.contextmanager
def playing(path: Path | None, **config: Any) -> Iterator[GodotMatch]:
    match = GodotMatch("godot_rl", {"env_path": path and str(path), "port": FIRST_PORT, "timeout": 20, **config})
    try:
        yield match
    finally:
        match.close()


def actions_of(match: GodotMatch, step: MatchStep, random: np.random.Generator) -> dict[str, Any]:
    return {turn.agent: sample_action(match.agents[turn.agent].action, None, random) for turn in step.turns}


def play(match: GodotMatch, steps: int, seed: int = 0) -> list[MatchStep]:
    """Random actions; a match that is over starts again."""
    random = np.random.default_rng(seed)
    played = [match.reset(0)]
    for _ in range(steps):
        over = played[-1].over
        played.append(match.reset(0) if over else match.step(actions_of(match, played[-1], random)))
    return played


def test_spaces_are_those_that_the_game_declares(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "hybrid")) as match:
        assert list(match.agents) == ["shared_policy_0", "shared_policy_1"]
        own = match.agents["shared_policy_1"]
        assert own.observation == gym.spaces.Dict(
            obs=gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            camera_2d=gym.spaces.Box(0, 255, (3, 4, 3), np.uint8),
            level=gym.spaces.Discrete(5),
        )
        assert own.action == gym.spaces.Dict(
            turn=gym.spaces.Discrete(3), thrust=gym.spaces.Box(-1, 1, (2,), np.float32), fire=gym.spaces.Discrete(2)
        )
    with playing(game_at(tmp_path, "chase")) as match:
        own = match.agents["shared_policy_3"]  # one part is the space itself
        assert own.observation == gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        assert own.action == gym.spaces.Box(-1, 1, (1,), np.float32)


def test_images_are_read_from_hexadecimal_digits(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "hybrid")) as match:
        step = match.reset(0)
        step = match.step(actions_of(match, step, np.random.default_rng(0)))
        seen = step.turns[1].observation
        expected = np.array([(1 * 7 + 1 + i) % 256 for i in range(36)], np.uint8).reshape(3, 4, 3)
        np.testing.assert_array_equal(seen["camera_2d"], expected)
        assert seen["level"] == 1


def test_agents_are_named_after_their_policies(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "policies")) as match:
        assert list(match.agents) == ["hunter_0", "prey_0", "hunter_1"]
        assert match.agents["prey_0"].observation != match.agents["hunter_0"].observation


def test_a_done_agent_waits_for_the_others(tmp_path: Path) -> None:
    with playing(game_at(tmp_path)) as match:
        step, present = match.reset(0), 4
        for _ in range(24):
            step = match.step({turn.agent: np.zeros(1, np.float32) for turn in step.turns})
            present -= len(step.departures)
            assert len(step.turns) == present
            assert all(left.terminated and not left.truncated for left in step.departures)
            if step.over:
                break
        assert (step.over, present) == (True, 0)


def test_a_done_agent_can_continue_with_its_next_episode(tmp_path: Path) -> None:
    with playing(game_at(tmp_path), done_agents="continue") as match:
        step = match.reset(0)
        ended: set[str] = set()
        for _ in range(24):
            before = len(ended)
            step = match.step({turn.agent: np.zeros(1, np.float32) for turn in step.turns})
            ended |= {left.agent for left in step.departures if left.terminated}
            if step.over:
                break
            assert len(step.turns) == 4
            assert len(ended) >= before
        assert ended == set(match.agents)
        cut = [left for left in step.departures if left.truncated]
        assert all(left.observation is not None for left in cut)
        assert len(step.departures) == 4
        again = match.reset(0)  # no message: the game goes on where it is
        for left in cut:
            np.testing.assert_array_equal(
                next(turn.observation for turn in again.turns if turn.agent == left.agent), left.observation
            )


def test_a_game_with_one_agent_is_not_reset_after_an_episode(tmp_path: Path) -> None:
    """It has started the next one itself, and its observation is that of the last step."""
    with playing(game_at(tmp_path, "one")) as match:
        step = match.reset(0)
        while not step.over:
            step = match.step({"shared_policy_0": np.zeros(1, np.float32)})
        first = match.reset(0).turns[0].observation
        assert first[3] == 0.0  # no step of the new episode is over
        after = match.step({"shared_policy_0": np.zeros(1, np.float32)}).turns[0].observation
        assert after[1] == first[1]  # the same goal: a reset would draw another one
        left = match.truncate()
        assert [one.truncated for one in left] == [True]
        assert match.reset(0).turns[0].observation[1] != first[1]  # in the middle of an episode the game is reset


def test_games_have_ports_and_seeds_of_their_own(tmp_path: Path) -> None:
    path = game_at(tmp_path, "one")
    with playing(path) as one, playing(path) as other:
        assert one._game.port != other._game.port
        assert (one.reset(0).turns[0].observation != other.reset(0).turns[0].observation).any()
    with playing(path) as one:
        first = [step.turns[0].observation.tolist() for step in play(one, 5) if step.turns]
    with playing(path) as one:
        assert [step.turns[0].observation.tolist() for step in play(one, 5) if step.turns] == first


def test_arguments_reach_the_game(tmp_path: Path) -> None:
    path = tmp_path / "echo.x86_64"
    path.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    path.chmod(0o755)
    with pytest.raises(EnvironmentFault) as fault:
        GodotMatch(
            "godot_rl",
            {"env_path": str(path), "port": FIRST_PORT, "seed": 7, "speedup": 8, "action_repeat": 4, "framerate": 30}
            | {"arguments": {"difficulty": 3}},
        )
    assert (
        f"--port={FIRST_PORT} --env_seed=7 --disable-render-loop --headless --fixed-fps 30 --action_repeat=4 --speedup=8 --difficulty=3"
        in str(fault.value)
    )
    assert "ended with code 3" in str(fault.value)


def test_methods_of_the_agents_can_be_called(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "one")) as match:
        assert match.call("dance") == ["agent 0 dances"]


def test_older_plugins_declare_one_space_for_all(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "chase", "old")) as match:
        assert [agent.observation.shape for agent in match.agents.values()] == [(4,)] * 4


def test_messages_may_arrive_in_parts(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "one", "halves")) as match:
        assert len(play(match, 5)) == 6


# -- what goes wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("die", r"at step 5: (It closed the connection|Its connection broke).*ended with code 11.*Segmentation fault"),
        ("hang", r"at step 5: It sent no 'step' within 1 s"),
        ("huge", r"announced a message of 4,294,967,295 bytes"),
        ("garbage", r"is not JSON.*<html>"),
        ("other", r"type 'reset' where 'step' was due"),
        ("nan", r"the observation obs of shared_policy_0.*(nan|NaN|finite)"),
        ("nan_reward", r"gave shared_policy_0 the reward nan"),
        ("fewer", r"'obs' of its message is not a list of 4 values"),
    ],
)
def test_a_fault_in_a_step_names_the_game_and_the_step(tmp_path: Path, fault: str, message: str) -> None:
    with playing(game_at(tmp_path, "chase", fault), timeout=1 if fault == "hang" else 20) as match:
        step, random = match.reset(0), np.random.default_rng(0)
        for _ in range(4):
            step = match.step(actions_of(match, step, random))
        with pytest.raises(EnvironmentFault) as raised:
            match.step(actions_of(match, step, random))
        text = " ".join(str(raised.value).split())
        assert f"godot_rl chase{fault}.x86_64" in text
        assert re.search(message, text), text


def test_a_game_that_never_connects_is_ended(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"did not connect to port \d+ within 0\.5 s.*Sync node"):
        GodotMatch("godot_rl", {"env_path": str(game_at(tmp_path, "one", "mute")), "port": FIRST_PORT, "timeout": 0.5})
    assert not processes_of(tmp_path)


def test_a_game_that_ends_at_once_is_noticed_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"ended with code 1(?s:.)*main\.tscn is missing"):
        GodotMatch("godot_rl", {"env_path": str(game_at(tmp_path, "one", "exit")), "port": FIRST_PORT})
    assert time.monotonic() - began < 30  # the default time limit of the connection is a minute


def test_a_game_that_speaks_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"Godot RL Agents 0\.7 does: the action move has the action_type 'quantum'"):
        GodotMatch("godot_rl", {"env_path": str(game_at(tmp_path, "one", "version")), "port": FIRST_PORT})
    assert not processes_of(tmp_path)


def test_a_game_that_ignores_close_is_ended(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "one", "stay")) as match:
        match.reset(0)
    assert not processes_of(tmp_path)


def test_a_taken_port_is_passed_over(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", FIRST_PORT)), playing(game_at(tmp_path, "one")) as match:
        assert match._game.port > FIRST_PORT


def test_another_connection_does_not_disturb_the_game(tmp_path: Path) -> None:
    with playing(game_at(tmp_path, "one")) as match:
        with socket.create_connection(("127.0.0.1", match._game.port), 5) as other:
            other.sendall(b"\xff\xff\xff\xff{}")
            assert len(play(match, 5)) == 6
        assert len(play(match, 5)) == 6


@pytest.mark.parametrize("given", ["Ball.Chase", "Ball.Chase.x86_64", "Ball.exe"])
def test_the_suffix_of_a_game_may_be_left_out(tmp_path: Path, given: str) -> None:
    made = tmp_path / ("Ball.x86_64" if given == "Ball.exe" else "Ball.Chase.x86_64")
    made.write_text("#!/bin/sh\n")
    made.chmod(0o755)
    assert GodotSettings(env_path=str(tmp_path / given)).program() == made


def test_the_port_of_the_editor_cannot_be_another_one() -> None:
    with (
        socket.create_server(("127.0.0.1", FIRST_PORT)),
        pytest.raises(ConfigError, match=rf"port {FIRST_PORT} is taken"),
        playing(None),
    ):
        pass


def test_a_game_of_the_editor_survives_the_match(tmp_path: Path) -> None:
    """It would end with its connection, and only a person can start it again."""
    game = game_at(tmp_path, "one")
    waiting = ["/bin/sh", "-c", f"sleep 0.3; exec {game} --port={FIRST_PORT}"]
    with subprocess.Popen(waiting) as process:
        try:
            with playing(None) as match:
                match.reset(0)
            with playing(None) as match:
                play(match, 30)
                assert process.poll() is None
                match._game.close()
                match._broken = True
            process.wait(10)
        finally:
            process.kill()


def test_the_editor_is_waited_for_until_the_time_is_over() -> None:
    with (
        pytest.raises(EnvironmentFault, match=r"did not connect to port \d+ within 0\.3 s.*Press Play"),
        playing(None, timeout=0.3),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env_path": "/nowhere/game"}, "there is no game /nowhere/game"),
        ({"env_path": __file__}, "is not executable"),
        ({"speed_up": 3}, "speed_up"),
        ({"port": 70_000}, "port"),
        ({"arguments": {"port": 3}}, "there is a key for it"),
    ],
)
def test_a_wrong_setting_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GodotMatch("godot_rl", config)


def test_the_family_has_one_name() -> None:
    pettingzoo.check_exists("godot_rl")  # without a game
    with pytest.raises(UnknownName, match=r"godot_rl/BallChase"):
        pettingzoo.check_exists("godot_rl/BallChase")


def processes_of(directory: Path) -> list[str]:
    """Command lines of processes that mention a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(directory) in (line := (entry / "cmdline").read_text()):
                found.append(line)
    return found
