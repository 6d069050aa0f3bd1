"""Step a player of Unity with `mlagents-envs`: speed, or a record of all that it returns.

    bench/.venvs/mlagents_envs/bin/python bench/peers/unity_steps.py PLAYER --seconds 5
    bench/.venvs/mlagents_envs/bin/python bench/peers/unity_steps.py PLAYER --steps 1000 --record steps.jsonl

Actions depend only on the agent's place, its observation mask and the step, so that others can send the same ones. A line of the
record is one step: behaviour → decision steps and terminal steps.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WARMUP_STEPS = 50
TIMEOUT_S = 60


def choose(
    step: int, behaviour: str, place: int, continuous: int, masks: Sequence[Sequence[bool]]
) -> tuple[list[float], list[int]]:
    """The action of the agent at `place` in the list of those that want one. `masks`: per branch, true for what is forbidden."""
    draw = random.Random(f"{step} {behaviour} {place}")
    numbers = [round(draw.uniform(-1, 1), 3) for _ in range(continuous)]
    return numbers, [draw.choice([action for action, forbidden in enumerate(mask) if not forbidden]) for mask in masks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("player", type=Path)
    parser.add_argument("--worker-id", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--player-arguments", nargs=argparse.REMAINDER, default=[])
    asked = parser.parse_args()
    from mlagents_envs.environment import UnityEnvironment
    from mlagents_envs.side_channel.stats_side_channel import StatsSideChannel

    statistics = StatsSideChannel()
    env = UnityEnvironment(
        str(asked.player.resolve()),
        worker_id=asked.worker_id,
        seed=asked.seed,
        no_graphics=True,
        timeout_wait=TIMEOUT_S,
        side_channels=[statistics],
        additional_args=asked.player_arguments,
    )
    try:
        env.reset()
        if asked.record:
            record(env, statistics, asked.steps, asked.record)
        else:
            measured = measure(env, asked.seconds)
    finally:
        env.close()
    if not asked.record:
        print(json.dumps(measured))  # after the last line of the player


def measure(env: Any, seconds: float) -> dict[str, Any]:
    """Steps per second with equal actions at every step, and all observations and rewards read."""
    import grpc
    import numpy as np
    from google.protobuf.internal import api_implementation
    from mlagents_envs.base_env import ActionTuple

    def step() -> int:
        agents = 0
        for name, spec in env.behavior_specs.items():
            decisions, _ = env.get_steps(name)
            agents += len(decisions)
            action = ActionTuple(
                np.zeros((len(decisions), spec.action_spec.continuous_size), np.float32),
                np.zeros((len(decisions), spec.action_spec.discrete_size), np.int32),
            )
            env.set_actions(name, action)
        env.step()
        return agents

    for _ in range(WARMUP_STEPS):
        step()
    steps = agents = 0
    began, cpu = time.perf_counter(), time.process_time()
    while (taken := time.perf_counter() - began) < seconds:
        agents += step()
        steps += 1
    return {
        "steps_per_s": steps / taken,
        "agent_steps_per_s": agents / taken,
        "cpu_share": (time.process_time() - cpu) / taken,
        "grpcio": grpc.__version__,
        "protobuf": api_implementation.Type(),
    }


def record(env: Any, statistics: Any, steps: int, path: Path) -> None:
    import numpy as np
    from mlagents_envs.base_env import ActionTuple

    with path.open("w") as file:
        for step in range(steps):
            row: dict[str, Any] = {}
            for name in sorted(env.behavior_specs):
                decisions, terminals = env.get_steps(name)
                row[name] = {"decisions": describe(decisions), "terminals": describe(terminals)}
                spec = env.behavior_specs[name].action_spec
                chosen = [
                    choose(step, name, place, spec.continuous_size, [mask[place] for mask in decisions.action_mask or ()])
                    for place in range(len(decisions))
                ]
                action = ActionTuple(
                    np.array([numbers for numbers, _ in chosen], np.float32).reshape(len(chosen), spec.continuous_size),
                    np.array([branches for _, branches in chosen], np.int32).reshape(len(chosen), spec.discrete_size),
                )
                env.set_actions(name, action)
            told = statistics.get_and_reset_stats()
            file.write(json.dumps({"behaviours": row, "statistics": sorted(told)}) + "\n")
            env.step()


def describe(steps: Any) -> dict[str, Any]:
    """All arrays of decision steps or terminal steps."""
    described = {
        "ids": steps.agent_id.tolist(),
        "rewards": steps.reward.tolist(),
        "groups": [int(group) for group in steps.group_id],
        "group_rewards": steps.group_reward.tolist(),
        "observations": [observations.tolist() for observations in steps.obs],
    }
    if hasattr(steps, "interrupted"):
        described["interrupted"] = steps.interrupted.tolist()
    elif steps.action_mask is not None:
        described["masks"] = [mask.tolist() for mask in steps.action_mask]
    return described


if __name__ == "__main__":
    main()
