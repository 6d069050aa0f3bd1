"""Wait for a condition that nothing announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def wait_until(
    condition: Callable[[], _T | None],
    timeout_s: float = 60.0,
    *,
    what: str | Callable[[], object] = "",
    failed: Callable[[], object] | None = None,
    poll_s: float = 0.01,
    pause: Callable[[float], object] = time.sleep,
) -> _T:
    """The first true value of the condition.

    Raises AssertionError with `what`, which may be a function, and the last value when the time is over; at once when `failed`
    returns something true, which is the reason.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        _check(value, deadline, timeout_s, what, failed)
        pause(poll_s)
    return value


async def wait_until_async(
    condition: Callable[[], _T | None], timeout_s: float = 60.0, *, what: str | Callable[[], object] = "", poll_s: float = 0.001
) -> _T:
    """The same on an event loop, which runs meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        _check(value, deadline, timeout_s, what, None)
        await asyncio.sleep(poll_s)
    return value


def _check(
    value: object, deadline: float, timeout_s: float, what: str | Callable[[], object], failed: Callable[[], object] | None
) -> None:
    if failed is not None and (reason := failed()):
        raise AssertionError(f"{_text(what)}: {reason}")
    if time.monotonic() > deadline:
        raise AssertionError(f"{_text(what)}: not within {timeout_s:g} s; the last value is {value!r}")


def _text(what: str | Callable[[], object]) -> str:
    return str(what() if callable(what) else what) or "the condition"
