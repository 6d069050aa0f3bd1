"""The CartPole game of the Kubernetes tests plays by the rules of Gymnasium."""

from __future__ import annotations

import gymnasium
import numpy as np

from tests.system.kubernetes import cartpole_game


def test_its_steps_are_those_of_gymnasium() -> None:
    env = gymnasium.make("CartPole-v1")
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        state = [float(value) for value in env.unwrapped.state]  # type: ignore[attr-defined]
        choose = np.random.default_rng(seed)
        over = False
        while not over:
            action = int(choose.integers(2))
            observation, _, over, _, _ = env.step(action)
            state = cartpole_game.step(state, action)
            np.testing.assert_allclose(state, observation, rtol=1e-5, atol=1e-6)
            assert cartpole_game.has_fallen(state) == over
