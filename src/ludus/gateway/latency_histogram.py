"""How the answers of a gateway are counted: one meter for whatever is to be told apart, such as the versions of a model."""

from __future__ import annotations

from typing import Any

BUCKETS = 64
"""Times are counted by the powers of two of a microsecond: bucket k holds those below 2^k µs and not below 2^(k-1)."""


class Meter:
    """Plain numbers, changed in the path of every tick by whoever answers it."""

    __slots__ = ("buckets", "failed", "seconds", "timed_out")

    def __init__(self) -> None:
        self.buckets = [0] * BUCKETS
        self.seconds = 0.0
        self.failed = self.timed_out = 0

    def took(self, seconds: float) -> None:
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
