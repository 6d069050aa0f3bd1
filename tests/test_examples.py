"""Every example runs as its first lines say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    (run,) = (tmp_path / "runs" / "cartpole").iterdir()
    assert (run / "plots" / "learning-curve.png").read_bytes()[:4] == b"\x89PNG"
    assert (run / "videos" / "agent.mp4").stat().st_size > 10_000
    assert "Learned in" in out.stdout
    assert "Try next" in out.stdout
