"""docs/distributed.md: its tables are compared with the code, and its examples are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.compat.coach.fleet_ini import KEYS, MEMORIES, STORES, read_fleet_file
from ludus.launch.job import ORCHESTRATORS

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_documented_keys_are_complete() -> None:
    table = PAGE[PAGE.index("| key |") : PAGE.index("Relative file names are resolved")]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(KEYS)
    for value in (*MEMORIES, *STORES, *ORCHESTRATORS):
        assert f"`{value}`" in table


def test_the_example_file_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (example,) = blocks("ini")
    assert read_fleet_file(example).place("cartpole") == "s3://games/cartpole"


def test_the_example_job_runs(tmp_path: Path) -> None:
    script = blocks("python")[0]
    environment = os.environ | {"LUDUS_STATE_DIR": str(tmp_path / "state")}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.splitlines()[-1] == "succeeded 0 ['hello']"
