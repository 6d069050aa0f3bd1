"""What a training shows on the way."""

from __future__ import annotations

import re

import pytest

from ludus.cli.display import Display, told, wins

NUMBERS = {"time_s": 12.0, "timesteps": 4096.0, "fps": 341.3, "episodes": 3.0, "episode_return_mean": 1.5}


def won(who: str, mean: float, low: float, high: float) -> dict[str, float]:
    return {f"match/win/{who}": mean, f"match/win/{who}_low": low, f"match/win/{who}_high": high}


def test_without_matches_nothing_is_said_of_them() -> None:
    assert wins(NUMBERS) == ""


def test_wins_are_shown_by_opponent_and_with_the_interval_of_an_evaluation() -> None:
    told = {**won("easy", 0.93, 0.86, 0.966), **won("medium", 0.371, 0.28, 0.47), "match/loss/medium": 0.5}
    assert wins({**NUMBERS, **told}) == "won: easy 93 [86–97] %, medium 37 [28–47] %"
    judged = {"evaluation/win/medium": 0.5, "evaluation/win/medium_low": 0.341, "evaluation/win/medium_high": 0.66}
    assert wins({**told, **judged}) == "won: easy 93 [86–97] %, medium 37 [28–47] % (50 [34–66])"


def test_the_line_of_a_report_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as shown:
        shown.write({**NUMBERS, **won("hard", 0.25, 0.2, 0.3)})
    assert re.search(r"return 1\.5  won: hard 25 \[20–30\] %", capsys.readouterr().out)


def test_whoever_is_met_in_evaluations_alone_is_shown_too() -> None:
    """As when training plays against itself."""
    told = {**won("past", 0.55, 0.45, 0.65), "match/loss/past": 0.45}
    judged = {f"evaluation/{how}/hard{which}": 0.25 for how in ("win", "loss") for which in ("", "_low", "_high")}
    assert wins({**NUMBERS, **told, **judged}) == "won: past 55 [45–65] %, hard (25 [25–25])"


def test_what_became_of_heroes_and_which_versions_play_is_on_the_table() -> None:
    from rich.console import Console

    said = {
        **won("past", 0.5, 0.4, 0.6),
        "match/seconds": 238.4,
        "match/kills": 1.71,
        "match/last_hits": 23.9,
        "match/past_version": 940.0,
    }
    assert told({**NUMBERS, **said}) == "seconds 238, kills 1.7, last hits 23.9"
    assert told(NUMBERS) == ""
    display = Display(quiet=True)
    display._last = {**NUMBERS, **said, "episodes": 3.0, "learner/version": 994.0}
    console = Console(record=True, width=160)
    console.print(display._table())
    shown = console.export_text()
    assert "won: past 50 [40–60] %" in shown
    assert "kills 1.7" in shown
    assert "newest 994, of opponents from the past 940" in shown
