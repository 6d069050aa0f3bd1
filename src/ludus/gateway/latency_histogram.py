"""Latency histogram of a gateway's ticks; one per label value, such as a model version."""

from __future__ import annotations

from typing import Any

BUCKETS = 64
"""Bucket k counts times of at least 2^(k-1) µs and less than 2^k µs."""


class LatencyHistogram:
    """Counters that are updated on every tick. Not thread-safe."""

    __slots__ = ("buckets", "failed", "seconds", "timed_out")

    def __init__(self) -> None:
        self.buckets = [0] * BUCKETS
        self.seconds = 0.0
        self.failed = self.timed_out = 0

    def record(self, seconds: float) -> None:
        self.seconds += seconds
        self.buckets[int(seconds * 1e6).bit_length()] += 1

    @property
    def ticks(self) -> int:
        return sum(self.buckets)

    def to_json(self) -> dict[str, Any]:
        used = max((k for k, count in enumerate(self.buckets) if count), default=-1)
        return {
            "buckets": self.buckets[: used + 1],
            "seconds": self.seconds,
            "failed": self.failed,
            "timed_out": self.timed_out,
        }
