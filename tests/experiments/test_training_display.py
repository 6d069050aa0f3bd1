"""What a training shows on the way."""

from __future__ import annotations

import io
import math
import re

import pytest

from ludus.config.schema import StopConfig
from ludus.core.metrics import Numbers
from ludus.experiments.control.callbacks import announce_stop
from ludus.experiments.control.training_display import (
    RecentRates,
    TrainingDisplay,
    match_results,
    progress_line,
    progress_rows,
    progress_towards_stop,
    wins,
)

NUMBERS = {"time_s": 12.0, "timesteps": 4096.0, "fps": 341.3, "episodes": 3.0, "episode_return_mean": 1.5}


def won(who: str, mean: float, low: float, high: float) -> dict[str, float]:
    return {f"match/win/{who}": mean, f"match/win/{who}_low": low, f"match/win/{who}_high": high}


def rates_of(*points: tuple[float, float]) -> RecentRates:
    rates = RecentRates()
    for time_s, timesteps in points:
        rates.add({"time_s": time_s, "timesteps": timesteps, "iterations": timesteps / 100})
    return rates


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# -- towards the stop ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "share", "text", "left_s"),
    [
        ({"timesteps": 8192}, 0.5, "4,096 of 8,192 steps", 4.096),
        ({"time_s": 48}, 0.25, "12 s of 48 s", 36.0),
        ({"iterations": 400}, 0.1, "40 of 400 iterations", 36.0),
        ({"episodes": 30}, 0.1, "3 of 30 episodes", 108.0),  # it is not in the window: by the mean of the whole run
        ({"episode_return_mean": 5.5}, 0.2, "return 1.50 of 5.50", math.nan),
        ({"timesteps": 4000}, 1.024, "4,096 of 4,000 steps", 0.0),
        ({"timesteps": 8192, "time_s": 13}, 12 / 13, "12 s of 13 s", 1.0),  # what comes first
        ({"timesteps": 8192, "time_s": 1300, "episode_return_mean": 400}, 0.5, "4,096 of 8,192 steps", 4.096),
    ],
)
def test_progress_is_measured_by_the_condition_that_comes_first(
    stop: dict[str, float], share: float, text: str, left_s: float
) -> None:
    numbers = {**NUMBERS, "iterations": 40.0}
    found = progress_towards_stop(StopConfig.model_validate(stop), numbers, rates_of((10, 2096), (12, 4096)), first_return=0.5)
    assert found is not None
    assert found.share == pytest.approx(share)
    assert found.text == text
    assert found.left_s == pytest.approx(left_s, nan_ok=True)


def test_a_run_without_a_stop_has_no_bar() -> None:
    assert progress_towards_stop(StopConfig(), NUMBERS, RecentRates()) is None
    assert progress_line(NUMBERS, StopConfig(), RecentRates()) == "4,096 steps  12 s  341 steps/s  return 1.50"


def test_the_speed_is_that_of_the_last_seconds() -> None:
    rates = rates_of((1, 1_000), (50, 1_100), (55, 6_100), (60, 11_100))
    assert rates.rate("timesteps") == pytest.approx(1_000)
    assert "1,000 steps/s" in progress_line({**NUMBERS, "fps": 185.0}, StopConfig(), rates)
    assert math.isnan(rates_of((1, 5)).rate("timesteps"))


def test_a_learner_that_went_back_to_a_checkpoint_has_no_negative_speed() -> None:
    assert math.isnan(rates_of((50, 9_000), (40, 5_000)).rate("timesteps"))


@pytest.mark.parametrize(("mean", "text"), [(-0.0321, "return −0.0321"), (0.5, "return 0.500"), (1234.5, "return 1,234")])
def test_returns_of_any_magnitude_can_be_read(mean: float, text: str) -> None:
    assert text in progress_line({**NUMBERS, "episode_return_mean": mean}, StopConfig(), RecentRates())


def test_the_line_has_a_bar_the_time_left_and_the_evaluation() -> None:
    numbers = {**NUMBERS, "evaluation/return_mean": 0.5, "evaluation/return_low": 0.25, "evaluation/return_high": 0.75}
    line = progress_line(numbers, StopConfig(timesteps=8192, episode_return_mean=3.0), rates_of((10, 2096), (12, 4096)))
    assert line == (
        " 50 % █████       4,096 of 8,192 steps  12 s  4.1 s left  1,000 steps/s  return 1.50 (stops at 3.00)  "
        "evaluation 0.500 [0.250 to 0.750]"
    )


# -- the display ---------------------------------------------------------------------------------------------------------


def written(reports: list[Numbers], stop: StopConfig, step_s: float = 3.0) -> list[str]:
    clock, out = Clock(), io.StringIO()
    with TrainingDisplay(stream=out, clock=clock) as display:
        announce_stop([display], stop)
        for numbers in reports:
            clock.now += step_s
            display.write(numbers)
    return out.getvalue().splitlines()


def test_the_last_line_is_printed_once_and_has_the_evaluation() -> None:
    reports = [{**NUMBERS, "timesteps": steps, "time_s": steps / 100} for steps in (100.0, 200.0)]
    evaluation = {"timesteps": 100.0, "iterations": 1.0, "evaluation/episodes": 5.0, "evaluation/return_mean": 7.0}
    lines = written([*reports, evaluation], StopConfig(timesteps=200))
    assert len(lines) == 2
    assert "200 of 200 steps" in lines[-1]
    assert "evaluation 7.00" in lines[-1]


def test_a_line_that_was_printed_is_not_printed_again_at_the_end() -> None:
    assert len(written([NUMBERS], StopConfig())) == 1


def test_a_quiet_display_prints_nothing() -> None:
    out = io.StringIO()
    with TrainingDisplay(quiet=True, stream=out) as display:
        display.write(NUMBERS)
    assert out.getvalue() == ""


def test_a_terminal_shows_rows_that_fit_into_80_columns() -> None:
    from rich.console import Console

    display = TrainingDisplay(stream=io.StringIO(), live=False)
    display.begin(StopConfig(timesteps=8192, episode_return_mean=475))
    for i in range(50):
        display.write({**NUMBERS, "time_s": 1.0 * i, "timesteps": 100.0 * i, "episode_return_mean": i - 200.0})
    console = Console(record=True, width=80)
    console.print(display.render())
    shown = console.export_text()
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    assert [line.split()[0] for line in shown.splitlines()] == ["progress", "time", "speed", "return"]
    assert "4,900 of 8,192 steps" in shown
    assert "33 s left" in shown


def test_before_the_first_report_the_table_shows_that_it_waits() -> None:
    assert list(progress_rows({}, StopConfig(), RecentRates(), [])) == [("progress", "waiting for the first update …")]


# -- matches -------------------------------------------------------------------------------------------------------------


def test_without_matches_none_are_shown() -> None:
    assert wins(NUMBERS) == ""


def test_wins_are_shown_by_opponent_and_with_the_interval_of_an_evaluation() -> None:
    told = {**won("easy", 0.93, 0.86, 0.966), **won("medium", 0.371, 0.28, 0.47), "match/loss/medium": 0.5}
    assert wins({**NUMBERS, **told}) == "won: easy 93 [86–97] %, medium 37 [28–47] %"
    judged = {"evaluation/win/medium": 0.5, "evaluation/win/medium_low": 0.341, "evaluation/win/medium_high": 0.66}
    assert wins({**told, **judged}) == "won: easy 93 [86–97] %, medium 37 [28–47] % (50 [34–66])"


def test_the_line_of_a_report_has_them() -> None:
    (line,) = written([{**NUMBERS, **won("hard", 0.25, 0.2, 0.3)}], StopConfig())
    assert re.search(r"won: hard 25 \[20–30\] %  return 1\.50", line)


def test_the_line_shows_that_no_episode_has_ended() -> None:
    numbers = {name: value for name, value in NUMBERS.items() if name != "episode_return_mean"}
    (line,) = written([numbers], StopConfig())
    assert line.endswith("no episode ended yet")


def test_an_opponent_of_evaluations_alone_is_shown() -> None:
    """As when training plays against itself."""
    told = {**won("past", 0.55, 0.45, 0.65), "match/loss/past": 0.45}
    judged = {f"evaluation/{how}/hard{which}": 0.25 for how in ("win", "loss") for which in ("", "_low", "_high")}
    assert wins({**NUMBERS, **told, **judged}) == "won: past 55 [45–65] %, hard (25 [25–25])"


def test_what_became_of_heroes_and_which_versions_play_is_on_the_table() -> None:
    said = {
        **won("past", 0.5, 0.4, 0.6),
        "match/seconds": 238.4,
        "match/kills": 1.71,
        "match/last_hits": 23.9,
        "match/past_version": 940.0,
    }
    assert match_results({**NUMBERS, **said}) == "seconds 238, kills 1.7, last hits 23.9"
    assert match_results(NUMBERS) == ""
    rows = dict(progress_rows({**NUMBERS, **said, "learner/version": 994.0}, StopConfig(), RecentRates(), []))
    assert rows["matches"] == "won: past 50 [40–60] %"
    assert "kills 1.7" in rows[""]
    assert rows["versions"] == "newest 994, of opponents from the past 940"
