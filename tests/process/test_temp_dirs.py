"""Private directories of processes: gone with their owner, never while it lives."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ludus.process.identity import is_alive_since, start_ticks
from ludus.process.temp_dirs import TempDir, sweep


def of_a_dead_process(base: Path) -> Path:
    """What a killed process leaves: a directory with its name."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, TempDir(base).path.name.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    name = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    return base / name


def test_only_its_user_can_look_inside(tmp_path: Path) -> None:
    scratch = TempDir(tmp_path)
    assert stat.S_IMODE(scratch.path.stat().st_mode) == 0o700
    scratch.close()
    assert not scratch.path.exists()


def test_what_a_dead_process_left_is_swept_by_the_next(tmp_path: Path) -> None:
    left = of_a_dead_process(tmp_path)
    (left / "file").write_text("x")
    mine = TempDir(tmp_path)
    assert not left.exists()
    assert mine.path.exists()


def test_directories_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    mine, strange = TempDir(tmp_path), tmp_path / "ludus-something"
    strange.mkdir()
    fields = mine.path.name.split("-")
    elsewhere = tmp_path / "-".join(["ludus", fields[1], "1", "999999", "1", "abc"])  # of another PID namespace
    elsewhere.mkdir()
    assert sweep(tmp_path) == 0
    assert mine.path.exists()
    assert strange.exists()
    assert elsewhere.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    dead = of_a_dead_process(tmp_path)
    dead.rmdir()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    dead.symlink_to(precious)
    sweep(tmp_path)
    assert (precious / "file").exists()


def test_a_number_that_another_process_got_is_not_the_same_process() -> None:
    mine = start_ticks(os.getpid())
    assert mine is not None
    assert is_alive_since(os.getpid(), mine)
    assert not is_alive_since(os.getpid(), mine + 1)
