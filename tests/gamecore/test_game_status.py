"""What becomes of a game that has ended, as a rule without a clock."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.gamecore.server.catalogue import RestartPolicy
from ludus.gamecore.server.game_status import EndDecision, GameStatus, State, decide_end

AGAIN = RestartPolicy(times=3, backoff_s=2.0)


def test_what_ended_well_is_finished_and_never_started_again() -> None:
    assert decide_end(0, "It ended with code 0.", None, 0, AGAIN) == EndDecision("finished", "")


def test_a_crash_is_followed_by_longer_and_longer_pauses_and_then_by_none() -> None:
    pauses = [decide_end(1, "It ended.", None, restarts, AGAIN).again_s for restarts in range(5)]
    assert pauses == [2.0, 4.0, 8.0, None, None]
    assert decide_end(1, "It ended.", None, 3, AGAIN) == EndDecision("crashed", "It ended.")
    assert decide_end(1, "It ended.", None, 0, RestartPolicy(on="never")) == EndDecision("crashed", "It ended.")
    assert decide_end(None, "It ended.", None, 0, RestartPolicy(on="never")).state == "crashed"


def test_pauses_are_bounded_by_a_minute_or_by_what_was_asked_for() -> None:
    assert decide_end(1, "", None, 900, RestartPolicy(times=1000, backoff_s=1.0)).again_s == 60.0
    assert decide_end(1, "", None, 5, RestartPolicy(times=1000, backoff_s=100.0)).again_s == 100.0


def test_what_was_asked_to_end_is_what_it_was_asked_to_be() -> None:
    asked: list[State] = ["stopped", "timed-out"]
    for state in asked:
        assert decide_end(0, "x", (state, "Because."), 0, AGAIN) == EndDecision(state, "Because.")
    assert decide_end(-9, "x", ("crashed", "Too large."), 0, AGAIN) == EndDecision("starting", "Too large.", 2.0)


def test_a_record_is_read_as_it_was_written_and_nothing_else_is_one() -> None:
    status = GameStatus("a", "g", state="crashed", reason="x", restarts=2, result={"winner": 1})
    assert GameStatus.from_json(status.to_json()) == status
    assert GameStatus.from_json({**status.to_json(), "of a later version": 1}) == status
    wrong: tuple[Any, ...] = (None, [], {}, {"state": "running"}, {**status.to_json(), "state": "odd"})
    for data in wrong:
        with pytest.raises(ValueError):
            GameStatus.from_json(data)
