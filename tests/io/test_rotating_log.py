"""Logs in a bounded place, read while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ludus.io.log_dedup import REPORT_S
from ludus.io.rotating_log import DeduplicatingLog, LogReader, LogWriter, previous_path, tail


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
    assert sorted(tmp_path.iterdir()) == [path, previous_path(path)]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    lines = everything(LogReader(path))
    assert lines == [f"line {i}" for i in range(1000 - len(lines), 1000)]
    assert len(lines) > 100


def test_a_reader_sees_every_line_once_across_rotations(tmp_path: Path) -> None:
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
    assert previous_path(path).exists()
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
    left = (previous_path(path).read_text() + path.read_text()).splitlines()
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


def test_a_counting_log_writes_what_repeats_once(tmp_path: Path) -> None:
    now = 0.0
    log = DeduplicatingLog(tmp_path / "log", clock=lambda: now)
    log.line("begin")
    for _ in range(1000):
        log.write(b"every ")
        log.write(b"frame\n")
    waiting = log.pending
    now = REPORT_S
    log.tick()
    assert (waiting, log.pending) == (True, False)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "… the last line was repeated 998 times"
    log.write(b"half a line")
    log.close()
    assert (tmp_path / "log").read_text().splitlines()[-1] == "half a line"
    assert log.last(3) == ["every frame", "every frame", "half a line"]


def test_a_counting_log_is_bounded_and_turns_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DeduplicatingLog(path, max_bytes=1000)
    log.write(b"".join(f"{chr(97 + i % 26) * (i % 60 + 1)} {i}\n".encode() for i in range(2000)))
    log.close()
    assert all(0 < file.stat().st_size <= 1000 for file in (path, previous_path(path)))
    lines = (previous_path(path).read_text() + path.read_text()).splitlines()
    assert lines[-1].endswith(" 1999")
    assert all(line.split()[0] == line[0] * (int(line.split()[1]) % 60 + 1) for line in lines)


def test_a_deduplicating_log_reports_bytes_lost_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DeduplicatingLog(tmp_path / "log")
    log.line("before")
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    log.line("lost")
    log.line("this too")
    monkeypatch.setattr(os, "write", write)
    log.line("after")
    log.line("and after that")
    log.close()
    assert log.lost == len("lost\nthis too\n")
    assert (tmp_path / "log").read_text().splitlines() == ["before", "… 14 bytes could not be written", "after", "and after that"]


def test_the_tail_of_a_log_goes_back_into_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path, 3) == []
    writer = LogWriter(path, max_bytes=50)
    for i in range(20):
        writer.line(f"line {i}")
    writer.close()
    assert tail(path, 5) == [f"line {i}" for i in range(15, 20)]


def test_a_link_in_place_of_a_log_is_neither_read_nor_written_through(tmp_path: Path) -> None:
    path, other = tmp_path / "log", tmp_path / "other"
    other.write_text("secret\n")
    path.symlink_to(other)
    assert tail(path, 5) == []
    with pytest.raises(OSError, match="is a link"):
        LogReader(path).lines()
    writer = LogWriter(path)
    writer.line("ours")
    writer.close()
    assert (path.read_text(), other.read_text(), path.is_symlink()) == ("ours\n", "secret\n", False)
