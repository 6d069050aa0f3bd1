"""The decision after the exit of a game."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.gamecore.server.catalogue import GameRestartPolicy
from ludus.gamecore.server.game_status import EndDecision, GameStatus, State, decide_end

AGAIN = GameRestartPolicy(times=3, backoff_s=2.0)


def test_exit_code_0_is_finished_and_never_restarted() -> None:
    assert decide_end(0, "It ended with code 0.", None, 0, AGAIN) == EndDecision("finished", "")


def test_crashes_are_followed_by_growing_delays_up_to_the_limit_of_restarts() -> None:
    pauses = [decide_end(1, "It ended.", None, restarts, AGAIN).again_s for restarts in range(5)]
    assert pauses == [2.0, 4.0, 8.0, None, None]
    assert decide_end(1, "It ended.", None, 3, AGAIN) == EndDecision("crashed", "It ended.")
    assert decide_end(1, "It ended.", None, 0, GameRestartPolicy(on="never")) == EndDecision("crashed", "It ended.")
    assert decide_end(None, "It ended.", None, 0, GameRestartPolicy(on="never")).state == "crashed"


def test_restart_delays_are_bounded() -> None:
    assert decide_end(1, "", None, 900, GameRestartPolicy(times=1000, backoff_s=1.0)).again_s == 60.0
    assert decide_end(1, "", None, 5, GameRestartPolicy(times=1000, backoff_s=100.0)).again_s == 100.0


def test_a_requested_end_determines_the_state() -> None:
    asked: list[State] = ["stopped", "timed-out"]
    for state in asked:
        assert decide_end(0, "x", (state, "Because."), 0, AGAIN) == EndDecision(state, "Because.")
    assert decide_end(-9, "x", ("crashed", "Too large."), 0, AGAIN) == EndDecision("starting", "Too large.", 2.0)


def test_a_status_round_trips_and_invalid_data_is_rejected() -> None:
    status = GameStatus("a", "g", state="crashed", reason="x", restarts=2, result={"winner": 1})
    assert GameStatus.from_json(status.to_json()) == status
    assert GameStatus.from_json({**status.to_json(), "of a later version": 1}) == status
    wrong: tuple[Any, ...] = (None, [], {}, {"state": "running"}, {**status.to_json(), "state": "odd"})
    for data in wrong:
        with pytest.raises(ValueError):
            GameStatus.from_json(data)
