"""The progress display of a sweep."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest

from ludus.cli.training import tune
from ludus.cli.training.tune import SweepDisplay
from ludus.tuning.messages import TrialEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def hear(board: SweepDisplay, name: str, kind: str, numbers: Mapping[str, float] = {}, error: str = "") -> None:
    board.on_event(TrialEvent(name, kind, dict(numbers), {}, error))


def test_a_trial_that_ends_is_counted_among_all_trials_of_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with SweepDisplay(quiet=False, to_stderr=False) as board:
        board.begin(1, 4)
        hear(board, "t001", "started")
        hear(board, "t001", "ended", {"timesteps": 5000.0, "episode_return_mean": 0.0333})
        hear(board, "t002", "failed", error="out of memory")
    ended, failed = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[-2:])
    assert ended == "t001 ended 5,000 steps return 0.0333 (2 of 4 trials done)"
    assert failed == "t002 failed: out of memory 0 steps return – (3 of 4 trials done)"


def test_the_periodic_line_counts_done_failed_and_running_trials(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SweepDisplay(quiet=False, to_stderr=False) as board:
        board.begin(0, 8)
        hear(board, "t000", "ended")
        hear(board, "t001", "failed")
        hear(board, "t002", "started")
        monkeypatch.setattr(tune, "_LINE_EVERY_S", -1.0)
        hear(board, "t003", "started")
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 8 trials done, 1 failed, 2 running"


def test_trials_of_an_earlier_sweep_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with SweepDisplay(quiet=False, to_stderr=False) as board:
        board.begin(0, 2)
        hear(board, "t000", "ended")
        board.begin(0, 3)
        hear(board, "t000", "ended")
    assert "(1 of 3 trials done)" in capsys.readouterr().out.splitlines()[-1]


def test_a_terminal_shows_it_below_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    with SweepDisplay(quiet=False, to_stderr=False) as board:
        board.begin(0, 3)
        assert "0 of 3 trials done" in screen.getvalue()
        hear(board, "t000", "ended")
        hear(board, "t001", "started")
    assert "t000  ended  " in screen.getvalue()
    assert "1 of 3 trials done, 1 running" in screen.getvalue()
