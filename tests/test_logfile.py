"""Logs in a bounded place, read while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ludus.logfile import LogReader, LogWriter, before


def everything(reader: LogReader) -> list[str]:
    found = []
    while lines := reader.lines():
        found += lines
    return found


def test_a_log_and_the_one_before_it_are_all_there_is(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = LogWriter(path, max_bytes=1000)
    for i in range(1000):
        writer.line(f"line {i}")
    writer.close()
    assert sorted(tmp_path.iterdir()) == [path, before(path)]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    lines = everything(LogReader(path))
    assert lines == [f"line {i}" for i in range(1000 - len(lines), 1000)]
    assert len(lines) > 100


def test_whoever_follows_sees_every_line_once_across_turns(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LogReader(path)
    assert reader.lines() == []
    writer = LogWriter(path, max_bytes=500)
    found = []
    for i in range(300):
        writer.write(f"line {i}".encode())  # in pieces, so that a turn may come in the middle of a line
        if i % 3 == 0:
            found += everything(reader)
        writer.write(b"\r\n" if i % 2 else b"\n")
        if i % 7 == 0:
            found += everything(reader)
    found += everything(reader)
    assert found == [f"line {i}" for i in range(300)]
    assert reader.rest() == []
    writer.close()
    reader.close()


def test_what_was_written_between_the_last_look_and_the_turn_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = LogWriter(path, max_bytes=100)
    reader = LogReader(path)
    writer.line("a" * 40)
    assert len(everything(reader)) == 1
    writer.line("b" * 40)
    writer.line("c" * 40)  # turned in between
    assert before(path).exists()
    assert [line[0] for line in everything(reader)] == ["b", "c"]
    writer.close()
    reader.close()


def test_a_reader_that_was_too_slow_goes_on_with_the_oldest_that_is_left(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writer = LogWriter(path, max_bytes=100)
    reader = LogReader(path)
    writer.line("first")
    assert everything(reader) == ["first"]
    for i in range(40):
        writer.line(f"line {i}")
    writer.close()
    left = (before(path).read_text() + path.read_text()).splitlines()
    found = everything(reader)
    assert found[-len(left) :] == left
    own = len(found) - len(left)  # the rest of the file that it had open
    assert found[:own] == [f"line {i}" for i in range(own)]
    assert 0 < own < 40 - len(left)
    reader.close()


def test_a_last_line_without_an_end_is_not_lost_and_not_shown_twice(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo \xff")
    reader = LogReader(path)
    assert everything(reader) == ["one"]
    assert reader.rest() == ["two �"]
    assert reader.rest() == []
    reader.close()


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 5_000_000)
    reader = LogReader(path)
    pieces = everything(reader) + reader.rest()
    assert sum(map(len, pieces)) == 5_000_000
    assert max(map(len, pieces)) < 2_000_000
    reader.close()


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(tmp_path / "log")
    writer.line("before")
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    writer.line("lost")
    monkeypatch.setattr(os, "write", write)
    writer.line("after")
    writer.close()
    assert writer.lost == 5
    assert (tmp_path / "log").read_text() == "before\nafter\n"
