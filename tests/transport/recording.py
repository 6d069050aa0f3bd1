"""Writers of recordings, for processes of their own: nothing here imports torch."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ludus.testing.memory_contract import SPEC, _fill
from ludus.transport.base import SegmentWriter
from ludus.transport.replay_log import ReplayLogWriter

PLENTY = 1 << 30
ONE = replace(SPEC, finals=0)
"""A bit of everything, as sessions record it."""


def written(room: SegmentWriter, number: int, steps: int = 4) -> None:
    """A segment that says a number."""
    block = room.reserve(0)
    assert block is not None
    _fill(block, number)
    block.finals = 0
    block.valid[:] = np.arange(block.spec.steps)[:, None] < steps
    block.origin[:] = number
    room.commit(block)


def write_for_ever(directory: str) -> None:
    """Tells how much is in files."""
    room = ReplayLogWriter(ONE, directory, PLENTY, file_bytes=20_000)
    number = 0
    while True:
        written(room, number)
        number += 1
        if number % 50 == 0:
            print(room.stats().written, flush=True)  # noqa: T201
            time.sleep(0.01)


def write_many(directory: str, limit: str, who: str, each: str) -> None:
    with ReplayLogWriter(ONE, directory, int(limit), file_bytes=30_000) as room:
        for number in range(int(each)):
            written(room, 1000 * int(who) + number)
            if number % 10 == 9:
                time.sleep(0.002)
    stats = room.stats()
    Path(directory, f"{who}.counts").write_text(f"{stats.written} {stats.dropped} {stats.waiting}")


if __name__ == "__main__":
    if sys.argv[1] == "many":
        write_many(*sys.argv[2:])
    else:
        write_for_ever(sys.argv[2])
