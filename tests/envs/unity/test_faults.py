"""Unity players that fail: each is an error that names the player, the cause and the last lines of its log, or is handled."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from ludus.envs import player_process
from ludus.envs.unity import player as unity_player
from ludus.envs.unity.match import UnityMatch
from ludus.errors import EnvironmentFault
from ludus.process import identity
from ludus.process.commands.thread_limits import ResourceLimit
from tests.unity_player.executable import write_player
from tests.unity_player.ports import first_port
from tests.waiting import wait_until

FIRST_PORT = first_port(23_000)
STEPS = 60


def run(tmp_path: Path, *faults: str, scene: str = "ball", **env_config: Any) -> UnityMatch:
    """Play some steps, and return the match."""
    player = write_player(tmp_path, scene, faults=faults)
    match = UnityMatch(
        "unity", {"file_name": str(player), "base_port": FIRST_PORT, "timeout_wait": 20, "no_graphics": True, **env_config}
    )
    with contextlib.ExitStack() as stack:
        stack.callback(match.close)
        now = match.reset(0)
        for _ in range(STEPS):
            spaces = {turn.agent: match.agents[turn.agent].action for turn in now.turns}
            now = match.step({agent: np.zeros(space.shape, space.dtype) for agent, space in spaces.items()})
            if now.over:
                now = match.reset(0)
        stack.pop_all()
    return match


def play_on(match: UnityMatch) -> None:
    for _ in range(3):
        match.step({})


def pid_of(match: UnityMatch) -> int:
    assert match._player is not None
    assert match._player.process is not None
    return match._player.process.pid


@pytest.fixture(autouse=True)
def no_player_is_left() -> Iterator[None]:
    yield
    assert player_process._shared._games is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", r"ended with code 1\..*Failed to load mono"),
        ("crash=5", r"did not make a step: .*ended by signal SIGABRT.*Caught fatal signal"),
        ("exit=5", r"did not make a step: .*ended with code 3.*Quitting because of a missing asset"),
        ("old", r"speaks version 0\.9\.0 of ML-Agents' protocol \(Unity package \S+\), Ludus speaks 1\.5\.0"),
        ("new", r"speaks version 2\.0\.0 of ML-Agents' protocol"),
        ("nan=5", r"The agent \d+ of '3DBall\?team=0' sent observation 0 \(VectorSensor_size8\): it contains nan"),
        ("infinite=5", r"The agent \d+ of '3DBall\?team=0' has the reward inf"),
        ("shape=5", r"sent observation 0 .*: it has 3 numbers, and its shape is \[8\]"),
        ("short=5", r"sent observation 0 .*: it has 7 numbers, and its shape is \[8\]"),
        ("late=5", r"The behaviour 'Late\?team=0' of unity appeared after the start.*3DBall\?team=0.*needs a policy"),
        ("unknown=5", r"sent agents of 'Unknown\?team=0' without the parameters of that behaviour"),
        ("garbage=5", r"sent \d+ bytes that are no message of ML-Agents"),
    ],
)
def test_a_fault_of_the_player_is_an_error_with_its_cause(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=re.compile(message, re.DOTALL)):
        run(tmp_path, fault)


def test_a_player_that_never_connects_is_ended_after_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"(?s)did not connect to port \d+ within 0.5 s \(timeout_wait\).*no_graphics"):
        run(tmp_path, "never", timeout_wait=0.5)


def test_a_player_that_hangs_in_a_step_is_ended_after_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"(?s)did not make a step within 1 s \(timeout_wait\).*Engine configuration"):
        run(tmp_path, "hang=5", timeout_wait=1)


def test_a_slow_start_is_awaited(tmp_path: Path) -> None:
    run(tmp_path, "slow=1", timeout_wait=20).close()


@pytest.mark.parametrize("scene", ["ball", "walk"])
def test_a_player_before_api_1_3_gets_its_actions_in_the_old_field(tmp_path: Path, scene: str) -> None:
    """It ends if they are missing."""
    match = run(tmp_path, "minor", scene=scene)
    assert isinstance(next(iter(match.agents.values())).action, gym.spaces.Box if scene == "ball" else gym.spaces.MultiDiscrete)
    match.close()


def test_a_player_that_connects_twice_goes_on_with_its_first_connection(tmp_path: Path) -> None:
    match = run(tmp_path, "twice")
    assert match._player is not None
    assert match._player.process is not None
    process = match._player.process

    def is_refused() -> bool:
        match.step({})
        return "The second connection was refused" in process.log_path.read_text()

    wait_until(is_refused)
    assert match._player._server.refused == 1
    match.close()


@pytest.mark.parametrize("fault", ["stubborn", "immortal"])
def test_a_player_that_ignores_the_order_to_quit_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(unity_player, "QUIT_S", 0.3)
    monkeypatch.setattr(unity_player, "GRACE_S", 0.3)
    match = run(tmp_path, fault)
    pid = pid_of(match)
    match.close()
    assert identity.start_ticks(pid) is None


def test_a_player_that_is_killed_between_two_steps_is_named(tmp_path: Path) -> None:
    match = run(tmp_path)
    os.kill(pid_of(match), signal.SIGKILL)
    with contextlib.closing(match), pytest.raises(EnvironmentFault, match="ended by signal SIGKILL"):
        play_on(match)


def test_a_flood_of_equal_lines_is_counted(tmp_path: Path) -> None:
    match = run(tmp_path, "flood", log_folder=str(tmp_path / "logs"))
    match.close()
    (log,) = (tmp_path / "logs").glob("Player-*.log")
    text = log.read_text()
    assert len(text) < 20_000
    repeated = sum(int(count.replace(",", "")) for count in re.findall(r"repeated ([\d,]+) times", text))
    assert repeated >= 2_000 * STEPS
    assert text.count("RenderTexture.Create failed") < 50


def test_threads_of_a_player_are_counted_against_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is real in every respect but its size: this machine allows more threads than a test should start."""
    monkeypatch.setattr(player_process, "thread_limits", lambda: [ResourceLimit("pids.max", 1000, 990, "raise pids.max")])
    with pytest.raises(EnvironmentFault, match=r"(?s)has 5\d\d threads, and 10 are left of 1,000 \(pids.max\).*raise pids.max"):
        run(tmp_path, "threads=500")


def test_a_port_that_somebody_else_has_taken_is_left_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with contextlib.closing(run(tmp_path, base_port=port)) as match:
            assert match._player is not None
            assert match._player.port > port


def test_two_trainings_that_start_at_once_with_the_same_worker_id_do_not_collide(tmp_path: Path) -> None:
    """The players of both report the seed of their own training."""
    program = textwrap.dedent(
        """
        import sys, time, numpy as np
        from ludus.envs.unity.match import UnityMatch
        match = UnityMatch("unity", {"file_name": sys.argv[1], "base_port": int(sys.argv[2]), "worker_id": 3, "no_graphics": True, "seed": int(sys.argv[3])})
        now = match.reset(0)
        for _ in range(50):
            now = match.step({turn.agent: np.zeros(2) for turn in now.turns})
            now = match.reset(0) if now.over else now
        told = ""
        while not told:  # its log is written by another process; the caller has a time limit
            told = next((line for line in match._player.process.last_lines(20) if line.startswith("Connected")), "")
            time.sleep(0.01)
        assert f"'seed': {int(sys.argv[3]) + match._player.port - int(sys.argv[2]) - 3}" in told, told
        print(match._player.port, flush=True)
        sys.stdin.read(1)
        match.close()
        """
    )
    player = write_player(tmp_path)
    commands = [[sys.executable, "-c", program, str(player), str(FIRST_PORT + 5000), str(seed)] for seed in (1000, 5000)]
    with contextlib.ExitStack() as stack:
        trainings = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for command in commands
        ]
        for each in trainings:
            stack.callback(each.kill)
        ports = {int(each.stdout.readline()) for each in trainings if each.stdout is not None}
        assert len(ports) == 2
        assert min(ports) >= FIRST_PORT + 5003
        for each in trainings:
            each.communicate("x", timeout=20)
            assert each.returncode == 0


def test_a_player_ends_with_a_training_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import time
        from ludus.envs.unity.match import UnityMatch
        match = UnityMatch("unity", {{"file_name": {str(write_player(tmp_path))!r}, "base_port": {FIRST_PORT}, "no_graphics": True}})
        print(match._player.process.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        pid = int(training.stdout.readline())
        assert identity.start_ticks(pid) is not None
        training.kill()
    wait_until(lambda: identity.start_ticks(pid) is None)


def test_no_thread_is_left_by_a_match(tmp_path: Path) -> None:
    before = threading.active_count()
    run(tmp_path).close()
    assert threading.active_count() == before
