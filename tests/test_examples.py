"""Every example runs as its first lines say."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ludus.distributed.gateway_workers import bind

ROOT = Path(__file__).parent.parent


def run(*words: str, cwd: Path) -> str:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    out = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=240)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_the_quickstart_trains_loads_and_plays(tmp_path: Path) -> None:
    printed = run(str(ROOT / "examples" / "quickstart.py"), "40000", cwd=tmp_path)
    score = float(printed.split("the loaded agent scored")[1])
    assert score >= 60, "a random agent scores about 22"


@pytest.mark.long
def test_the_duel_is_learned_from_its_file(tmp_path: Path) -> None:
    """Striking at random is worth about 0.2."""
    words = ["-m", "ludus.cli.main", "train", "-f", str(ROOT / "examples" / "duel.yaml"), "--json", "--quiet"]
    printed = run(*words, "--stop", "timesteps=60000", "--local-dir", str(tmp_path), cwd=tmp_path)
    result = json.loads(printed.splitlines()[-1])
    assert result["episode_return_mean"] >= 0.45


def test_the_installed_command_finds_a_game_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "my_game.py").write_text("import gymnasium as gym\n\ndef make():\n    return gym.make('CartPole-v1')\n")
    command = Path(sys.executable).parent / "ludus"
    words = [str(command), "train", "my_game:make", "--stop", "iterations=1", "--quiet", "--json"]
    out = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout.splitlines()[-1])["stopped_by"] == "iterations"


def test_the_demo_learns_draws_and_films(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "ludus"
    out = subprocess.run([str(command), "demo"], capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert out.returncode == 0, out.stderr
    (run,) = (tmp_path / "runs" / "cartpole-fast").iterdir()
    assert (run / "plots" / "learning-curve.png").read_bytes()[:4] == b"\x89PNG"
    assert (run / "videos" / "agent.mp4").stat().st_size > 10_000
    assert "Learned in" in out.stdout
    assert "Try next" in out.stdout


# -- games over HTTP ----------------------------------------------------------------------------------------------------


def free_port() -> str:
    with bind("127.0.0.1", 0) as free:
        return str(free.getsockname()[1])


@contextlib.contextmanager
def background(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that goes on until it is interrupted; it must end in order then."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=environment
    ) as process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, out
        finally:
            process.kill()


@pytest.mark.long
def test_the_atari_example_trains_from_games_and_deploys_what_it_learned(tmp_path: Path) -> None:
    atari, port = ROOT / "examples" / "atari", free_port()
    words = ["--port", port, "--games", "2", "--batch-size", "64", "--steps", "3", "--project", str(tmp_path / "atari")]
    printed = run(str(atari / "launch.py"), *words, cwd=tmp_path)
    version = int(printed.split("trained to version")[1])
    assert version >= 4
    port = free_port()
    with background(str(atari / "deploy.py"), "--port", port, "--project", str(tmp_path / "atari"), cwd=tmp_path) as deployed:
        assert deployed.stdout is not None
        said = ""
        while "serving version" not in said:
            said = deployed.stdout.readline()
            assert said, "it ended before it served"
        assert int(said.split()[2]) > version, "whoever opens it goes on counting from what was learned last"
        played = run(str(atari / "gamecore.py"), "--port", port, "--matches", "1", "--max-steps", "80", cwd=tmp_path)
    assert "match 1: score" in played


def test_the_cartpole_game_is_played_and_learned_from_over_http(tmp_path: Path) -> None:
    example, port = ROOT / "examples" / "cartpole_http", free_port()
    words = ["train", "-f", str(example / "cartpole.yaml"), "--set", f"config.env_config.port={port}", "--stop", "iterations=2"]
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(run, "-m", "ludus.cli.main", *words, "--json", "--quiet", cwd=tmp_path)
        played = run(str(example / "game.py"), "--port", port, "--games", "16", cwd=tmp_path)
        result = json.loads(training.result(60).splitlines()[-1])
    assert result["iterations"] == 2
    assert result["timesteps"] >= 2 * 2048
    assert json.loads(played.splitlines()[-1])["steps"] >= result["timesteps"]
