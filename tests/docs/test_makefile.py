"""`make check` runs the unit tests of the packages that need no services."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_check_selects_the_fast_packages() -> None:
    out = subprocess.run(["make", "-n", "check"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    (line,) = [line for line in out.stdout.splitlines() if "pytest" in line]
    words = set(line.split())
    assert {f"tests/{name}" for name in ("core", "models", "algorithms", "buffers", "envs", "protocol", "storage")} <= words
    assert "tests/system" not in words
