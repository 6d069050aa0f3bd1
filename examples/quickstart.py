"""Train an agent, load it and play one episode with the Python API.

python examples/quickstart.py [TIMESTEPS]
"""

from __future__ import annotations

import sys

import gymnasium as gym

import ludus


def main(timesteps: int) -> None:
    result = ludus.train(
        env="CartPole-v1",
        run="PPO",
        stop={"episode_return_mean": 475, "timesteps": timesteps},
        num_envs=64,
        lr=1e-3,
    )
    print(f"{result.stopped_by}: {result.metrics['timesteps']:,} steps, mean return {result.episode_return_mean:.1f}")
    print(f"run: {result.run_dir}")

    agent = ludus.load(result.run_dir / "best")
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    state, total, over = None, 0.0, False
    while not over:
        action, state = agent.act(observation, state)
        observation, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        over = terminated or truncated
    print(f"the loaded agent scored {total:.0f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 600_000)
