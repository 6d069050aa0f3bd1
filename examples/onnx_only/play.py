"""Play CartPole with an exported agent; imports only onnxruntime and NumPy.

ludus train --env CartPole-v1 --stop timesteps=60000 && ludus export RUN
python examples/onnx_only/play.py RUN/exports/model-000021.onnx
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from agent import Agent


class CartPole:
    """Cart-pole (Barto, Sutton and Anderson 1983); a game ends after at most 500 steps."""

    def __init__(self, random: np.random.Generator) -> None:
        self.x, self.speed, self.angle, self.turning = random.uniform(-0.05, 0.05, 4)
        self.steps = 0

    def observation(self) -> np.ndarray:
        return np.array([self.x, self.speed, self.angle, self.turning], np.float32)

    def step(self, action: int) -> bool:
        """Push right (1) or left (0) for a fiftieth of a second. Return whether the game continues."""
        force = 10.0 if action == 1 else -10.0
        sine, cosine = math.sin(self.angle), math.cos(self.angle)
        pull = (force + 0.05 * self.turning**2 * sine) / 1.1
        spin = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        push = pull - 0.05 * spin * cosine / 1.1
        self.x, self.speed = self.x + 0.02 * self.speed, self.speed + 0.02 * push
        self.angle, self.turning = self.angle + 0.02 * self.turning, self.turning + 0.02 * spin
        self.steps += 1
        return abs(self.x) <= 2.4 and abs(self.angle) <= 12 * math.pi / 180 and self.steps < 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an exported agent of CartPole")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    agent, random = Agent(given.model), np.random.default_rng(0)
    for episode in range(given.episodes):
        game, on = CartPole(random), True
        agent.reset()
        while on:
            on = game.step(int(agent.act(game.observation(), temperature=given.temperature)))
        print(f"episode {episode}: {game.steps} steps")


if __name__ == "__main__":
    main()
