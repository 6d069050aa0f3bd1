"""Drives `bench/load.c` against a whole service, and reads what it has measured."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.serving.agents import REPLY_BYTES, Array, Traffic
from bench.serving.process import LOAD_CPU, Server, ServerFailed, cpu_seconds
from bench.train import Row

WARMUP_S = 0.5
PATIENCE_S = 120.0  # beyond the time that was asked for
SLICE_BUCKETS = 2048
TRACED = np.dtype(
    [("session", "<u4"), ("match", "<u4"), ("tick", "<u4"), ("status", "<u4"), ("sent", "<u8"), ("got", "<u8"), ("action", "<i8")]
)


@dataclass(frozen=True)
class Load:
    """What the generator is asked for. `prefix` makes session ids that the server has not seen."""

    traffic: Traffic
    connections: int
    seconds: float
    prefix: str
    sessions: int = 0
    rate: float = 0.0
    """Ticks per second in all; 0: each connection sends its next one when the reply is in."""
    slice_s: float = 0.0
    trace: int = 0
    """Sessions of which every tick is kept."""


@dataclass(frozen=True)
class Driven:
    row: Row
    slices: Array
    """[slices, buckets]: how many replies took how long, if `slice_s` was asked for."""
    failures: Array
    """[slices]"""
    trace: Array
    began: float
    """On time.monotonic(): when the window did."""


class Running:
    """The generator between two of its words."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def await_word(self, word: str) -> None:
        line = self.line()
        if line != word:
            raise ServerFailed(f"the load generator said {line!r} instead of {word!r}")

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def line(self) -> str:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerFailed(f"the load generator gave up: {self._process.stderr.read()[-500:].strip() or 'time is up'}")
        return line.strip()


def drive(
    binary: Path, server: Server, load: Load, busy: Callable[[], float], during: Callable[[], None] | None = None
) -> Driven:
    """One run. `during` is called when the window begins, and should return before it ends.

    `busy` tells the CPU seconds of the whole machine. Raises ServerFailed if the generator gave up.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as directory:
        place = Path(directory)
        command = [str(binary), *_options(server, load, place)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            watchdog = threading.Timer(load.seconds + PATIENCE_S, process.kill)
            watchdog.start()
            try:
                row, began = _watched(Running(process), server, process.pid, busy, during)
            finally:
                watchdog.cancel()
                process.kill()
        slices = _read(place / "slices", np.dtype("<u4")).reshape(-1, 1 + SLICE_BUCKETS)
        return Driven(row, slices[:, 1:], slices[:, 0], _read(place / "trace", TRACED), began)


def _options(server: Server, load: Load, place: Path) -> list[str]:
    traffic, token = load.traffic, server.stack.token
    (place / "bodies").write_bytes(traffic.bodies.tobytes())
    (place / "expected").write_bytes(traffic.expected.astype("<i8").tobytes())
    options: dict[str, Any] = {
        "--port": server.port,
        "--connections": load.connections,
        "--sessions": load.sessions or load.connections,
        "--seconds": load.seconds,
        "--warmup": WARMUP_S,
        "--prefix": load.prefix,
        "--bodies": place / "bodies",
        "--body-size": traffic.bodies.shape[1],
        "--reply-bytes": REPLY_BYTES,
        "--expected": place / "expected",
        "--versions": len(traffic.expected),
        "--match": traffic.match,
        "--rate": load.rate,
        "--numbered": 1,
        "--cpu": LOAD_CPU if server.pinned else -1,
    }
    if token:
        options |= {"--header": f"Authorization: Bearer {token}", "--start-body": '{"format": "raw"}'}
    if load.slice_s:
        options |= {"--slice": load.slice_s, "--slice-file": place / "slices"}
    if load.trace:
        options |= {"--trace": load.trace, "--trace-file": place / "trace"}
    return [str(word) for option in options.items() for word in option]


def _watched(
    running: Running, server: Server, pid: int, busy: Callable[[], float], during: Callable[[], None] | None
) -> tuple[Row, float]:
    running.await_word("open")
    tree = server.tree(not_mine=pid)
    running.go()
    running.await_word("begin")
    began = time.monotonic()
    before, busy_before = cpu_seconds(tree), busy()
    if during is not None:
        during()
    running.await_word("end")
    spent = busy() - busy_before
    used = cpu_seconds(server.tree(not_mine=pid)) - before
    row: Row = json.loads(running.line())
    return row | {"server_cpu_s": used, "busy_s": spent, "processes": len(tree)}, began


def _read(path: Path, dtype: np.dtype[Any]) -> Array:
    return np.frombuffer(path.read_bytes(), dtype) if path.exists() else np.zeros(0, dtype)


def _bucket_ms() -> Array:
    """The middle of every bucket: see slice_index in load.c."""
    at = np.arange(SLICE_BUCKETS)
    power, part = 7 + (at - 128) // 64, (at - 128) % 64
    wide = 2.0 ** (power - 6)
    return np.where(at < 128, at + 0.5, (64 + part + 0.5) * wide) / 1000


BUCKET_MS = _bucket_ms()


def percentile_ms(counts: Array, share: float) -> float:
    """Of the replies counted in these buckets; nan when there are none."""
    total = counts.sum()
    return float(BUCKET_MS[np.searchsorted(np.cumsum(counts), share * total, side="right")]) if total else float("nan")
