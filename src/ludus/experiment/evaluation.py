"""Evaluations of a run that calls its environments."""

from __future__ import annotations

from collections.abc import Callable

from ludus.actor.evaluate import Score, play
from ludus.config import AlgorithmConfig
from ludus.experiment.parts import Resolved
from ludus.game.environment import Environments, make_environments
from ludus.model.policy import Policy

_ROWS = 16


class Evaluation:
    """Own environments, own seeds: training does not notice it."""

    def __init__(self, env: str, config: AlgorithmConfig, policy: Policy, interrupted: Callable[[], bool]) -> None:
        self._env, self._config, self._policy, self._interrupted = env, config, policy, interrupted
        self._environments: Environments | None = None

    def __call__(self, iteration: int) -> Score:
        if self._environments is None:
            rows = min(self._config.evaluation_duration, _ROWS)
            forgiving = self._config.restart_failed_sub_environments
            self._environments = make_environments(self._env, rows, self._config.env_config, forgiving=forgiving)
        seed = (self._config.seed * 7919 + iteration * 104_729 + 1) % (1 << 31)
        with self._policy.acting():
            return play(self._policy, self._environments, self._config.evaluation_duration, seed, interrupted=self._interrupted)

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()


def make_evaluation(resolved: Resolved, policy: Policy, interrupted: Callable[[], bool]) -> Evaluation | None:
    config = resolved.config
    return Evaluation(resolved.experiment.env, config, policy, interrupted) if config.evaluation_duration else None
