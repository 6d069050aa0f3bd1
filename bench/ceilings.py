"""What the machine could do at best: the raw environment, raw forward and backward passes, and what they add up to.

Run as `python -m bench.ceilings --task cartpole|pong`; prints one JSON line. Nothing of Ludus is in here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from bench.peers import settings

REPEATS = 5


def seconds(function: Callable[[], Any], calls: int) -> float:
    """Median seconds per call."""
    function()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def towers() -> nn.Module:
    def tower(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    return nn.ModuleList([tower(2), tower(1)])


def nature() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 7),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32, memory_format=torch.channels_last).mul_(1 / 255)


def measure(task: str) -> dict[str, Any]:
    ppo = settings.CARTPOLE if task == "cartpole" else settings.PONG
    name, actions = ("CartPole-v1", 2) if task == "cartpole" else ("ALE/Pong-v5", 6)
    if task == "pong":
        import ale_py

        gym.register_envs(ale_py)
    envs = gym.make_vec(name, ppo.envs, vectorization_mode="vector_entry_point")
    envs.reset(seed=0)
    choices = np.random.default_rng(0).integers(0, actions, (64, ppo.envs))
    turn = iter(range(1 << 30))
    env_s = seconds(lambda: envs.step(choices[next(turn) % 64]), 300 if task == "cartpole" else 40) / ppo.envs

    if task == "cartpole":
        net = towers()
        small, large = torch.randn(ppo.envs, 4), torch.randn(ppo.minibatch, 4)

        def outputs(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([net[0](x), net[1](x)], dim=-1)  # type: ignore[index]
    else:
        net = nature()
        small = torch.randint(0, 256, (ppo.envs, 4, 84, 84), dtype=torch.uint8)
        large = torch.randint(0, 256, (ppo.minibatch, 4, 84, 84), dtype=torch.uint8)

        def outputs(x: torch.Tensor) -> torch.Tensor:
            return net(scaled(x))  # type: ignore[no-any-return]

    optimizer = torch.optim.Adam(net.parameters(), lr=1e-6, fused=True)

    def forward() -> None:
        with torch.inference_mode():
            outputs(small)

    def update() -> None:
        optimizer.zero_grad()
        outputs(large).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    forward_s = seconds(forward, 200 if task == "cartpole" else 20) / ppo.envs
    update_s = seconds(update, 20 if task == "cartpole" else 3) / ppo.minibatch
    return {
        "peer": "composed ceiling",
        "task": task,
        "env_steps_per_s": round(1 / env_s, 1),
        "forward_per_s": round(1 / forward_s, 1),
        "update_per_s": round(1 / update_s, 1),
        "fps": round(1 / (env_s + forward_s + ppo.epochs * update_s), 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=("cartpole", "pong"), default="cartpole")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads or (2 if args.task == "pong" else 1))
    print(json.dumps(measure(args.task)))
