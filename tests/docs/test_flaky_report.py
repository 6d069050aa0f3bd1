"""`make test` prints tests that failed in parallel and passed alone; pytest itself writes what the report reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "flaky_report.py"
TESTS = """
import pathlib
import pytest

def test_steady():
    pass

@pytest.mark.parametrize("mode", ["a[b]"])
def test_shaky(mode):
    second = pathlib.Path("ran").exists()
    pathlib.Path("ran").touch()
    assert second, "the port is taken"

def test_broken():
    raise ValueError("always")
"""


def pytest_run(directory: Path, report: str, *words: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--junitxml", report, *words, "test_some.py"]
    return subprocess.run(command, cwd=directory, capture_output=True, timeout=100).returncode


def report(directory: Path) -> str:
    words = [sys.executable, str(SCRIPT), "first.xml", "second.xml"]
    out = subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_only_tests_that_pass_the_second_time_are_listed(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(TESTS)
    assert pytest_run(tmp_path, "first.xml") == 1
    assert pytest_run(tmp_path, "second.xml", "--last-failed") == 1
    printed = report(tmp_path)
    assert "test_some::test_shaky[a[b]]" in printed
    assert "the port is taken" in printed
    assert "test_broken" not in printed
    assert "test_steady" not in printed


def test_nothing_is_printed_without_flaky_tests_or_reports(tmp_path: Path) -> None:
    assert report(tmp_path) == ""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text("def test_broken():\n    assert False\n")
    pytest_run(tmp_path, "first.xml")
    pytest_run(tmp_path, "second.xml")
    assert report(tmp_path) == ""
