"""Connect Four whose matches are stepped by one call, with boards as vectors: the same input as other contestants of bench.multiagent."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np

from ludus.core.types import Bools, Ints
from ludus.envs.matches.connect_four import COLUMNS, PLAYERS, ROWS, ConnectFourEnv
from ludus.envs.matches.vector_multi_agent import VectorMultiAgentStep

SQUARES = (PLAYERS + 1) * ROWS * COLUMNS


class FlatConnectFour(ConnectFourEnv):
    """Without convolutions."""

    single_observation_space = gym.spaces.Box(0.0, 1.0, (SQUARES,), np.float32)

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        return self._flatten(super().reset(seeds, matches))

    def step(self, actions: Ints, playing: Bools) -> VectorMultiAgentStep:
        return self._flatten(super().step(actions, playing))

    def _flatten(self, step: VectorMultiAgentStep) -> VectorMultiAgentStep:
        return replace(step, observation=step.observation.reshape(self.num_envs, PLAYERS, SQUARES))
