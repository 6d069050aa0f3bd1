"""The summary that is printed after training: stop reason, scores, paths and next commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from ludus.config.schema import EXTERNAL
from ludus.core.formatting import format_duration, format_number
from ludus.experiments.control.training_display import evaluated_win_rates, format_with_interval, is_zero_sum, training_win_rates
from ludus.experiments.result import Result
from ludus.experiments.runs.remote_runs import display_path
from ludus.experiments.runs.run_status import STOP_REASONS, describe_stop, is_interruption


def stop_reason(stopped_by: str) -> str:
    """`Stopped: time limit reached`, from the key of the stop condition or the signal."""
    words = describe_stop(stopped_by)
    return words[0].upper() + words[1:] if is_interruption(stopped_by) else f"Stopped: {words}"


def summary_lines(result: Result, command: str = "ludus") -> Iterator[str]:
    """Lines of the summary. `command`: the name of the program on this host."""
    yield f"{stop_reason(result.stopped_by)}. {_main_score(result)}."
    if evaluation := _evaluation(result):
        yield evaluation
    yield _how_long(result)
    yield from result.remarks()
    place = shlex.quote(result.place)
    yield f"run         {result.place}"
    if result.checkpoint:
        yield f"checkpoint  {display_path(result.checkpoint)}"
    yield from (f"{what:<12}{command} {words}" for what, words in _next_steps(result, place))


def _main_score(result: Result) -> str:
    """The main score of the agent: its win rate in zero-sum games, else its return."""
    mean, numbers = result.episode_return_mean, result.metrics
    if is_zero_sum(numbers):
        rates = evaluated_win_rates(numbers)
        return f"Win rate {'; '.join(rates)} in the last evaluation" if rates else "The win rate was not evaluated"
    if math.isnan(mean):
        return "No episode ended during training"
    if rates := training_win_rates(numbers):
        return f"Win rate in training {'; '.join(rates)}. Mean return {format_number(mean)} in training"
    return f"Mean return {format_number(mean)} in training"


def _evaluation(result: Result) -> str:
    numbers = result.metrics
    mean, episodes = (numbers.get(f"evaluation/{name}", math.nan) for name in ("return_mean", "episodes"))
    if math.isnan(mean):
        return ""
    of = "" if math.isnan(episodes) else f" over {episodes:,.0f} episodes"
    rates = [] if is_zero_sum(numbers) else evaluated_win_rates(numbers)
    won = f"win rate {'; '.join(rates)}; " if rates else ""
    return f"Evaluation: {won}mean return {format_with_interval(mean, numbers, 'evaluation/return')}{of}."


def _how_long(result: Result) -> str:
    steps, seconds = result.metrics.get("timesteps", 0.0), result.metrics.get("time_s", 0.0)
    speed = f" ({steps / seconds:,.0f} steps/s)" if seconds and steps else ""
    return f"{steps:,.0f} steps in {format_duration(seconds)}{speed}."


def _next_steps(result: Result, place: str) -> Iterator[tuple[str, str]]:
    """(purpose, command without the program name)."""
    interrupted = is_interruption(result.stopped_by)
    if interrupted:
        yield "continue", f"train --resume {place}"
    if result.checkpoint:
        yield ("serve it", f"serve {place}") if result.env == EXTERNAL else ("watch it", f"rollout {place} --video")
    yield "look at it", f"runs show {place}"
    if not interrupted and (longer := longer_stop(result)):
        yield "train on", f"train --resume {place} --stop {longer}"


def longer_stop(result: Result) -> str:
    """The stop condition that ended the run, with about twice its value; empty for a reached target."""
    reached = result.metrics.get(result.stopped_by, 0.0)
    if result.stopped_by == "episode_return_mean" or result.stopped_by not in STOP_REASONS or reached <= 0:
        return ""
    digits = 1 - math.floor(math.log10(2 * reached))
    twice = round(2 * reached, digits)
    return f"{result.stopped_by}={twice:.0f}" if twice >= 1 else ""
