"""The access log: whole lines under concurrent writers, disk errors and arbitrary session names."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.errors import UsageError
from ludus.serving import access_log
from ludus.serving.access_log import AccessEntry, AccessLog, AccessLogStats
from tests.waiting import wait_until

SOON_S = 20.0
NEVER_S = 3600.0
"""Only `flush` and `close` write."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    with AccessLog(path, clock=lambda: 1_700_000_000.25) as log:
        log.record(AccessEntry(
            kind="tick", status=200, session=b"match-17", seq=3, ms=1.23456, request_id="r1", caller="lobby",
            peer="10.0.0.7:5123", model="blue", version=12,
        ))  # fmt: skip
        log.record(AccessEntry(kind="start", status=503, error="draining"))
    assert lines(path) == [
        {
            "time": "2023-11-14T22:13:20.250Z", "kind": "tick", "status": 200, "session": "match-17", "request_id": "r1",
            "caller": "lobby", "peer": "10.0.0.7:5123", "model": "blue", "seq": 3, "version": 12, "ms": 1.235,
        },
        {"time": "2023-11-14T22:13:20.250Z", "kind": "start", "status": 503, "error": "draining", "ms": 0.0},
    ]  # fmt: skip
    assert log.stats() == AccessLogStats(2, 0)
    assert path.stat().st_mode & 0o007 == 0, "not for everybody to read"


def test_lines_are_written_in_the_background(tmp_path: Path) -> None:
    with AccessLog(tmp_path / "log", flush_s=0.01) as log:
        log.record(AccessEntry(kind="tick", status=200))
        wait_until(lambda: log.stats().written == 1)
        assert len(lines(tmp_path / "log")) == 1


@given(session=st.one_of(st.binary(max_size=600), st.text(max_size=600)), ms=st.floats(), peer=st.text(max_size=200))
def test_any_session_name_gives_one_short_line(session: bytes | str, ms: float, peer: str) -> None:
    entry = AccessEntry("tick", 200, session, 0, ms, session, peer, peer, peer, peer, 1)
    line = access_log._line(0.0, entry)
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert len(line) < access_log._PIPE_BYTES
    said = json.loads(line)
    assert said["kind"] == "tick"
    assert len(said.get("session", "")) <= 256


def test_dropped_lines_are_counted_and_reported_in_the_log(tmp_path: Path) -> None:
    with AccessLog(tmp_path / "log", capacity=5, flush_s=NEVER_S) as log:
        for seq in range(12):
            log.record(AccessEntry(kind="tick", status=200, seq=seq))
        log.flush()
        log.record(AccessEntry(kind="end", status=200))
    assert [(line["kind"], line.get("seq", line.get("lines"))) for line in lines(tmp_path / "log")] == [
        ("dropped", 7), *(("tick", seq) for seq in range(5)), ("end", None),
    ]  # fmt: skip
    assert log.stats() == AccessLogStats(6, 7)


def test_a_rotated_file_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with AccessLog(path, flush_s=NEVER_S) as log:
        log.record(AccessEntry(kind="tick", status=200, seq=1))
        log.flush()
        path.rename(tmp_path / "log.1")
        log.record(AccessEntry(kind="tick", status=200, seq=2))
        log.flush()
        path.unlink()
        path.write_text("")  # as logrotate's `create` does
        log.record(AccessEntry(kind="tick", status=200, seq=3))
        log.flush()
        assert [line["seq"] for line in lines(path)] == [3]
        path.rename(tmp_path / "log.2")
        log.record(AccessEntry(kind="tick", status=200, seq=4))
    assert [line["seq"] for line in lines(tmp_path / "log.1")] == [1]
    assert [line["seq"] for line in lines(path)] == [4]


def test_a_log_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"access log '.*missing/log': No such file"):
        AccessLog(tmp_path / "missing" / "log")


_WRITER = """
import sys
from ludus.serving.access_log import AccessEntry, AccessLog
with AccessLog(sys.argv[1], capacity=100_000, flush_s=0.001) as log:
    for seq in range(int(sys.argv[3])):
        log.record(AccessEntry(kind="tick", status=200, session=sys.argv[2] * 40, seq=seq))
        if seq % 100 == 0:
            log.flush()
"""


def writers(path: str, each: int, **more: Any) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", _WRITER, path, who, str(each)], **more) for who in "abc"]


def check_together(said: list[dict[str, Any]], each: int) -> None:
    assert Counter(line["session"] for line in said) == {who * 40: each for who in "abc"}
    for who in "abc":
        assert [line["seq"] for line in said if line["session"][0] == who] == list(range(each))


@pytest.mark.system
def test_several_processes_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    processes = writers(str(tmp_path / "log"), 3000)
    assert [process.wait(SOON_S) for process in processes] == [0, 0, 0]
    check_together(lines(tmp_path / "log"), 3000)


@pytest.mark.system
@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_several_processes_share_a_standard_output_that_is_a_pipe() -> None:
    read, write = os.pipe()
    processes = writers("-", 1000, stdout=write)
    os.close(write)
    with open(read, encoding="ascii") as pipe:
        said = [json.loads(line) for line in pipe]
    assert [process.wait(SOON_S) for process in processes] == [0, 0, 0]
    check_together(said, 1000)


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes")
def test_a_blocked_reader_does_not_block_requests(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    log = AccessLog(fifo, capacity=100, flush_s=0.001)
    try:
        deadline = time.monotonic() + SOON_S
        while not log.stats().dropped:  # the pipe is full, the thread waits in it, and requests go on
            log.record(AccessEntry(kind="tick", status=200, session=b"x" * 200))
            assert time.monotonic() < deadline
        log.close(timeout_s=0.01)
    finally:
        while log._thread.is_alive():
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 1 << 16)
        log.close()
        os.close(reader)


# -- disks that refuse ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tiny_disk(directory: Path, size_kib: int) -> Iterator[Path]:
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", str(directory)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("at_once", [1, 7, 300])
def test_a_full_disk_drops_lines_is_reported_once_and_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: int
) -> None:
    with tiny_disk(tmp_path / "disk", 16) as disk:
        (disk / "ballast").write_bytes(bytes(8192))
        with AccessLog(disk / "log", flush_s=NEVER_S) as log:
            for seq in range(300):
                log.record(AccessEntry(kind="tick", status=200, seq=seq))
                if (seq + 1) % at_once == 0:
                    log.flush()
            log.flush()
            stats = log.stats()
            assert stats.written + stats.dropped == 300
            assert stats.written > 50
            assert stats.dropped > 50
            assert len([r for r in caplog.records if "No space left" in r.message]) == 1
            (disk / "ballast").unlink()
            log.record(AccessEntry(kind="tick", status=200, seq=300))
        read = (disk / "log").read_text().splitlines()
        whole, torn = [], 0
        for line in read:
            try:
                whole.append(json.loads(line))
            except ValueError:
                torn += 1
        assert torn <= 1, "what comes after half a line begins a line"
        assert [line["seq"] for line in whole if line["kind"] == "tick"] == [*range(stats.written), 300]
        assert [line["lines"] for line in whole if line["kind"] == "dropped"] == [stats.dropped]
        assert log.stats() == AccessLogStats(stats.written + 1, stats.dropped)


def test_a_missing_directory_drops_lines_until_it_returns(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with AccessLog(home / "log", flush_s=NEVER_S) as log:
        home.rename(tmp_path / "away")
        log.record(AccessEntry(kind="tick", status=200, seq=1))
        log.flush()
        assert log.stats() == AccessLogStats(0, 1)
        home.mkdir()
        log.record(AccessEntry(kind="tick", status=200, seq=2))
        log.flush()
        assert log.stats() == AccessLogStats(1, 1)
    assert [line["kind"] for line in lines(home / "log")] == ["dropped", "tick"]


def test_lines_of_other_threads_are_neither_lost_nor_doubled(tmp_path: Path) -> None:
    with AccessLog(tmp_path / "log", capacity=100_000, flush_s=0.0005) as log:

        def ask(who: int) -> None:
            for seq in range(2000):
                log.record(AccessEntry(kind="tick", status=200, session=str(who), seq=seq))

        threads = [threading.Thread(target=ask, args=(who,)) for who in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = Counter((line["session"], line["seq"]) for line in lines(tmp_path / "log"))
    assert set(found.values()) == {1}
    assert len(found) == 6000
