"""Delays between attempts, which grow exponentially. Nothing here waits."""

from __future__ import annotations

from typing import Protocol

_MAX_EXPONENT = 100  # 2.0**1024 overflows


class Uniform(Protocol):
    """The module `random`, a `random.Random` or a `numpy.random.Generator`."""

    def uniform(self, low: float, high: float, /) -> float: ...


def exponential_delay(failures: int, base_s: float, max_s: float, factor: float = 2.0) -> float:
    """Seconds to wait after the given number of failures, 1 or more: `base_s` after the first, at most `max_s`."""
    return min(base_s * factor ** min(failures - 1, _MAX_EXPONENT), max_s)


class Backoff:
    """Counts the failures since the last `reset`.

    With a `generator` each delay is multiplied by a number from `jitter`, so that many clients do not retry at the same time.
    """

    def __init__(
        self,
        base_s: float,
        max_s: float,
        *,
        factor: float = 2.0,
        jitter: tuple[float, float] = (0.5, 1.5),
        generator: Uniform | None = None,
    ) -> None:
        self._base_s, self._max_s, self._factor = base_s, max_s, factor
        self._jitter, self._generator = jitter, generator
        self.failures = 0

    def next_delay(self) -> float:
        """Count a failure; seconds until the next attempt."""
        self.failures += 1
        delay = exponential_delay(self.failures, self._base_s, self._max_s, self._factor)
        return delay if self._generator is None else delay * self._generator.uniform(*self._jitter)

    def reset(self) -> None:
        self.failures = 0
