"""Stop conditions of a run, and the time limit on its start."""

from __future__ import annotations

import math

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Progress
from ludus.config.schema import StopConfig
from ludus.errors import StartTimeout
from ludus.experiments.control.experience_source import ExperienceSource, RemoteSampling


def reached_condition(stop: StopConfig, progress: Progress) -> str | None:
    """The key of the first stop condition that holds."""
    mean = progress.episode_return_mean
    if stop.episode_return_mean is not None and not math.isnan(mean) and mean >= stop.episode_return_mean:
        return "episode_return_mean"
    if stop.timesteps is not None and progress.timesteps >= stop.timesteps:
        return "timesteps"
    if stop.iterations is not None and progress.iterations >= stop.iterations:
        return "iterations"
    if stop.training_iteration is not None and progress.training_iteration >= stop.training_iteration:
        return "training_iteration"
    if stop.episodes is not None and progress.episodes >= stop.episodes:
        return "episodes"
    if stop.time_s is not None and progress.time_s >= stop.time_s:
        return "time_s"
    return None


def check_start(clock: RunClock, source: ExperienceSource, timeout_s: float | None) -> None:
    """Start the clock with the first step of remote sampling. Raises StartTimeout when there is none in time."""
    if clock.started or not isinstance(source, RemoteSampling):
        return
    if source.has_sampled():
        clock.start()
    elif timeout_s is not None and clock.startup_s >= timeout_s:
        raise StartTimeout(
            f"No step was sampled within {timeout_s:g} s of the start; waited for {source.awaited()}.",
            "Nothing was learned; see the logs in the run's directory. config.start_timeout_s allows a longer start.",
        )
