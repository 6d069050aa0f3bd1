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
