"""CartPole for the peers: the fast vector environment, and the evaluation all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

EVAL_EPISODES = 20
EVAL_SEED = 10_000

Act = Callable[[np.ndarray], np.ndarray]


def make_vector(num_envs: int) -> gym.vector.VectorEnv:
    """Gymnasium's own vectorised CartPole (about ten times SyncVectorEnv), resetting within the step.

    Gymnasium resets one step late and emits a dead transition there; libraries that do not know that
    convention would train on it.
    """
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.vector import AutoresetMode

    class SameStepCartPole(CartPoleVectorEnv):
        metadata = {**CartPoleVectorEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}

        def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
            obs, reward, terminated, truncated, info = super().step(action)
            done = self.prev_done
            if done.any():
                info = {"final_obs": obs}
                self.state[:, done] = self.np_random.uniform(self.low, self.high, size=(4, done.sum()))
                self.steps[done] = 0
                self.prev_done = np.zeros_like(done)
                obs = self.state.T.astype(np.float32)
            return obs, reward, terminated, truncated, info

    return SameStepCartPole(num_envs)


class EpisodeReturns:
    """Returns of finished episodes, summed from a vector environment's step results."""

    def __init__(self, num_envs: int) -> None:
        self._running = np.zeros(num_envs)

    def step(self, reward: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Add one step's rewards; the returns of the episodes that ended in it."""
        self._running += reward
        if not done.any():
            return self._running[:0]
        finished = self._running[done]
        self._running[done] = 0.0
        return finished


def evaluate(act: Act, episodes: int = EVAL_EPISODES, seed: int = EVAL_SEED) -> float:
    """Mean return of fresh episodes, stepped side by side; `act` maps observations (n, 4) to n actions."""
    envs = [gym.make("CartPole-v1") for _ in range(episodes)]
    obs = np.stack([env.reset(seed=seed + index)[0] for index, env in enumerate(envs)])
    returns = np.zeros(episodes)
    alive = np.ones(episodes, dtype=bool)
    while alive.any():
        actions = np.asarray(act(obs)).reshape(episodes)
        for index in np.flatnonzero(alive):
            obs[index], reward, terminated, truncated, _ = envs[index].step(int(actions[index]))
            returns[index] += reward
            alive[index] = not (terminated or truncated)
    for env in envs:
        env.close()
    return float(returns.mean())
