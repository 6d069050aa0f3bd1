"""A ring whose writer, or reader, is killed with -9 at random moments, and what must hold all the same."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ludus.transport.ring_buffer import RingReader, RingRecord, RingWriter, Wakeup

_NUMBER = struct.Struct("<Q")
_WAIT_S = 30.0


def size_of(number: int) -> int:
    """Of a record: from a few bytes to a good part of the ring, and never the same for long."""
    return 64 + number * 7919 % 60_000


def fill(data: memoryview, number: int) -> None:
    """Every eight bytes say which record they belong to."""
    np.frombuffer(data, np.uint64, len(data) // 8)[:] = number


def check(record: RingRecord) -> None:
    """The record is whole, and the one that it should be."""
    assert len(record.data) == size_of(record.number)
    words = np.frombuffer(record.data, np.uint64, len(record.data) // 8)
    assert (words == record.number).all(), f"record {record.number} holds parts of {np.unique(words)[:5]}"


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def write_for_ever(ring: Path, wakeup: Path) -> None:
    with RingWriter(ring, wakeup) as writer:
        while True:
            number = writer.committed
            data = writer.reserve(size_of(number), _WAIT_S)
            assert data is not None
            fill(data, number)
            writer.commit()


def read_for_ever(ring: Path, wakeup: Path, heard: int) -> None:
    """Tells `heard` of every record that it is about to release."""
    with RingReader(ring) as reader, Wakeup(wakeup) as rung:
        while True:
            record = reader.take()
            if record is None:
                rung.wait(_WAIT_S)
                continue
            check(record)
            os.write(heard, _NUMBER.pack(record.number))
            reader.release(record)


@dataclass
class Killed:
    kills: int = 0
    records: int = 0
    slowest_s: float = 0.0
    """From a kill to the next record."""


def kill_writers(ring: Path, wakeup: Path, kills: int, seed: int) -> Killed:
    """Reads what writers write that are killed one after the other: nothing is torn, missing or doubled."""
    moments, tally = random.Random(seed), Killed()
    with RingReader(ring) as reader, Wakeup(wakeup) as rung:
        while tally.kills < kills:
            pid = forked(lambda: write_for_ever(ring, wakeup))
            began, first = time.monotonic(), 0.0
            end = began + _WAIT_S
            while time.monotonic() < end:
                record = reader.take()
                if record is None:
                    rung.wait(min(0.05, max(0.0, end - time.monotonic())))
                    continue
                assert record.number == tally.records
                check(record)
                reader.release(record)
                tally.records += 1
                if not first:
                    first = time.monotonic()
                    end = first + moments.uniform(0.0, 0.02)
            assert first, "a new writer wrote nothing"
            tally.slowest_s = max(tally.slowest_s, first - began)
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            tally.kills += 1
        while (record := reader.take()) is not None:
            assert record.number == tally.records
            check(record)
            reader.release(record)
            tally.records += 1
        assert tally.records == reader.committed
    return tally


def kill_readers(ring: Path, wakeup: Path, kills: int, seed: int) -> Killed:
    """Readers are killed one after the other while a writer writes: what was not released comes again, and nothing else."""
    moments, tally = random.Random(seed), Killed()
    writer = forked(lambda: write_for_ever(ring, wakeup))
    next_number = 0
    try:
        while tally.kills < kills:
            heard, hear = os.pipe()
            pid = forked(lambda hear=hear: read_for_ever(ring, wakeup, hear))  # type: ignore[misc]
            os.close(hear)
            assert select.select([heard], [], [], _WAIT_S)[0], "a new reader read nothing"
            time.sleep(moments.uniform(0.0, 0.01))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            with open(heard, "rb") as file:
                data = file.read()
            numbers = [n for (n,) in _NUMBER.iter_unpack(data[: len(data) // 8 * 8])]
            assert numbers[0] in (next_number, next_number - 1), "a record was lost"  # the last may have been released or not
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            next_number = numbers[-1] + 1
            tally.kills += 1
            tally.records = next_number
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    return tally


def reap(pid: int) -> int:
    """How a child ended; kills it when it does not."""
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
