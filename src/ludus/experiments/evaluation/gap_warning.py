"""Warns when deterministic evaluations score far below the episodes of training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import gymnasium as gym

from ludus.config.schema import AlgorithmConfig
from ludus.core.metrics import Numbers, Sink

log = logging.getLogger(__name__)

MIN_REPORTS = 5
"""Reports needed before the range of training returns measures progress."""
MIN_EPISODES = 5


class EvaluationGapWarning:
    """A metrics sink that compares evaluations with the current training return and warns once.

    It warns if the upper end of the evaluation's 95 % interval is below the training return by more than half of the range of training
    returns, and by more than a quarter of the training return.
    """

    def __init__(self, announce: Callable[[str], None] | None) -> None:
        self._announce = announce
        self._returns: list[float] = []  # lowest, highest and last
        self._reports = 0
        self._warned = False

    def write(self, numbers: Numbers) -> None:
        mean = numbers.get("episode_return_mean", math.nan)
        if not math.isnan(mean):
            self._reports += 1
            known = self._returns or [mean, mean, mean]
            self._returns = [min(known[0], mean), max(known[1], mean), mean]
        scored = numbers.get("evaluation/return_mean", math.nan)
        if not math.isnan(scored) and self._is_far_below(numbers):
            self._warn(scored)

    def _is_far_below(self, numbers: Numbers) -> bool:
        if self._warned or self._reports < MIN_REPORTS or numbers.get("evaluation/episodes", 0) < MIN_EPISODES:
            return False
        lowest, highest, last = self._returns
        gap = last - numbers.get("evaluation/return_high", numbers["evaluation/return_mean"])
        return gap > max(0.5 * (highest - lowest), 0.25 * abs(last))

    def _warn(self, scored: float) -> None:
        self._warned = True
        sentence = (
            f"deterministic evaluation is far below training: a return of {scored:.3g} against {self._returns[-1]:.3g}. The most probable "
            "action may get stuck where sampled ones do not. Train longer, lower the entropy bonus, use a recurrent model (model.core: "
            "lstm), or evaluate as in training (evaluation_config: {explore: true})"
        )
        log.warning("%s", sentence)
        if self._announce is not None:
            self._announce(f"warning: {sentence}")

    def close(self) -> None:
        pass


def gap_sinks(env: str, config: AlgorithmConfig, announce: Callable[[str], None] | None) -> list[Sink]:
    """One sink if evaluations are deterministic and have the environment and rewards of training, else none."""
    spec = gym.registry.get(env)
    atari = spec is not None and str(spec.entry_point).startswith("ale_py")  # rewards are clipped in training
    other = (
        config.multiagent is not None
        or atari
        or config.evaluation_config.explore
        or config.evaluation_config.env_config is not None
        or config.preprocess.clip_reward
        or config.preprocess.episodic_life
    )
    return [] if other else [EvaluationGapWarning(announce)]
