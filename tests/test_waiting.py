"""What tests wait with says what did not happen."""

from __future__ import annotations

import asyncio

import pytest

from tests.waiting import wait_until, wait_until_async


def test_it_returns_the_first_true_value() -> None:
    values = iter([None, 0, "", "found", "later"])
    assert wait_until(lambda: next(values), poll_s=0.0) == "found"
    values = iter([None, "found"])
    assert asyncio.run(wait_until_async(lambda: next(values))) == "found"


def test_a_condition_that_never_holds_is_reported_with_its_last_value() -> None:
    with pytest.raises(AssertionError, match=r"all workers: not within 0.01 s; the last value is \[\]"):
        wait_until(list, 0.01, what="all workers", poll_s=0.001)
    with pytest.raises(AssertionError, match=r"3 of 4: not within 0 s; the last value is 0"):
        asyncio.run(wait_until_async(lambda: 0, 0, what=lambda: "3 of 4"))


def test_it_ends_early_with_the_reason_when_it_cannot_happen_any_more() -> None:
    with pytest.raises(AssertionError, match="the report: the process has ended"):
        wait_until(lambda: False, 60, what="the report", failed=lambda: "the process has ended")


def test_the_pause_can_be_something_else_than_sleep() -> None:
    pauses: list[float] = []
    wait_until(lambda: len(pauses) == 3, poll_s=0.5, pause=pauses.append)
    assert pauses == [0.5, 0.5, 0.5]
