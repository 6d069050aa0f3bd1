"""Players as processes: real programs that crash, flood their log, ignore SIGTERM or use many threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ludus.envs import player_process
from ludus.envs.player_process import PlayerProcess
from ludus.errors import EnvironmentFault
from ludus.process import identity
from ludus.process.commands.command import Games
from ludus.process.commands.thread_limits import ResourceLimit
from tests.waiting import wait_until

PYTHON = (sys.executable, "-I", "-S", "-c")
STAY = "import time; print('ready', flush=True); time.sleep(600)"


def shared_games() -> Games | None:
    return player_process._shared._games


def is_gone(pid: int) -> bool:
    return identity.start_ticks(pid) is None


def test_a_player_that_ends_is_named_with_its_code_and_last_lines(tmp_path: Path) -> None:
    program = "import sys; print('loading the level'); sys.exit('no such level')"
    with PlayerProcess([*PYTHON, program], name="Racer", log=tmp_path / "Player-0.log") as player:
        assert player.wait(20.0) is not None
        with pytest.raises(EnvironmentFault) as caught:
            player.check()
    assert "Racer ended with code 1." in str(caught.value)
    assert "loading the level" in str(caught.value)
    assert "no such level" in str(caught.value)
    assert str(tmp_path / "Player-0.log") in str(caught.value)


def test_a_running_player_passes_the_check_and_close_ends_it(tmp_path: Path) -> None:
    player = PlayerProcess([*PYTHON, STAY], log=tmp_path / "log", environment={**os.environ, "DISPLAY": ":77"})
    player.check()
    assert Path(f"/proc/{player.pid}/environ").read_bytes().count(b"DISPLAY=:77") == 1
    ended = player.close()
    assert ended is not None
    assert ended.code == -signal.SIGTERM
    assert player.close() is ended
    assert is_gone(player.pid)


def test_the_last_player_of_a_process_leaves_no_thread(tmp_path: Path) -> None:
    first, second = (PlayerProcess([*PYTHON, STAY], log=tmp_path / name) for name in "ab")
    games = shared_games()
    assert games is not None
    first.close(0.0)
    assert shared_games() is games
    second.close(0.0)
    assert shared_games() is None
    assert is_gone(games.spawner_pid)


def test_repeated_lines_are_counted_instead_of_written(tmp_path: Path) -> None:
    line = "RenderTexture color format fallback"
    program = f"for _ in range(200_000): print({line!r})"
    with PlayerProcess([*PYTHON, program], log=tmp_path / "log") as player:
        assert player.wait(60.0) is not None
    text = (tmp_path / "log").read_text()
    assert len(text) < 10_000
    assert "repeated" in text


def test_a_player_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    player = PlayerProcess([*PYTHON, program], log=tmp_path / "log", grace_s=0.2)
    wait_until(lambda: player.last_lines() == ["ready"])
    ended = player.close()
    assert ended is not None
    assert ended.killed
    assert ended.code == -signal.SIGKILL


def test_a_program_that_does_not_exist_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"Racer cannot be started.*No such file.*Racer\.x86_64"):
        PlayerProcess([str(tmp_path / "Racer.x86_64")], name="Racer", log=tmp_path / "log")
    assert shared_games() is None


def test_a_player_without_a_log_file_has_a_temporary_one() -> None:
    with PlayerProcess([*PYTHON, STAY]) as player:
        wait_until(lambda: player.last_lines() == ["ready"])
        place = player.log_path
    assert not place.exists()
    assert not place.parent.exists()


def test_threads_are_counted_against_the_limit_and_known_for_the_next_start(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import threading, time
        for _ in range(40): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        print('ready', flush=True); time.sleep(600)
        """
    )
    with PlayerProcess([*PYTHON, program], name="Racer", log=tmp_path / "log") as player:
        wait_until(lambda: player.last_lines() == ["ready"])
        assert player.check_threads([ResourceLimit("pids.max", 1000, 900)]) == 41
        assert player_process._shared.expected_threads(sys.executable) == 41
        with pytest.raises(EnvironmentFault, match=r"Racer \(process \d+\) has 41 threads, and 3 are left of 1,000 \(pids.max\)"):
            player.check_threads([ResourceLimit("pids.max", 1000, 997)])


def test_a_player_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    owner = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from ludus.envs.player_process import PlayerProcess
        player = PlayerProcess({[*PYTHON, STAY]!r}, log=Path({str(tmp_path / "log")!r}))
        print(player.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not is_gone(pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: is_gone(pid))
