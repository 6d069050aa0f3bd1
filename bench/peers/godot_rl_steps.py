"""Step a game with the package `godot-rl`: speed, or a record of all that it returns.

    bench/.venvs/godot_rl/bin/python bench/peers/godot_rl_steps.py GAME --port 21000 --seconds 5
    bench/.venvs/godot_rl/bin/python bench/peers/godot_rl_steps.py GAME --port 21000 --steps 1000 --record steps.jsonl

Actions depend only on the step, the agent and the part, so that others can send the same ones. The first line of the record is the
description of the game, the second one its first observations.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

WARMUP_STEPS = 50


def choose(step: int, agent: int, part: str, size: int, *, discrete: bool) -> int | list[float]:
    draw = random.Random(f"{step} {agent} {part}")
    return draw.randrange(size) if discrete else [round(draw.uniform(-1, 1), 3) for _ in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--framerate", type=int)
    parser.add_argument("--arrays", action="store_true", help="make arrays of the observations of each step")
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    from godot_rl.core.godot_env import GodotEnv

    env = GodotEnv(env_path=str(asked.game.resolve()), port=asked.port, seed=asked.seed, framerate=asked.framerate)
    env.reset()
    if asked.record:
        record(env, asked.steps, asked.record)
        env.close()
        return
    measured = measure(env, asked.seconds, arrays=asked.arrays)
    env.close()
    print(json.dumps(measured))  # after the lines of the package


def actions_of(env: Any, step: int) -> list[list[Any]]:
    """For every agent a list of its parts."""
    import numpy as np

    actions = []
    for agent, space in enumerate(env.action_spaces):
        parts: list[Any] = []
        for name, part in space.spaces.items():
            discrete = hasattr(part, "n")
            chosen = choose(step, agent, name, int(part.n) if discrete else part.shape[0], discrete=discrete)
            parts.append(chosen if discrete else np.array(chosen))
        actions.append(parts)
    return actions


def measure(env: Any, seconds: float, *, arrays: bool) -> dict[str, Any]:
    """Steps per second with the same actions at every step."""
    import numpy as np

    actions = actions_of(env, 0)

    def step() -> None:
        seen = env.step(actions, order_ij=True)[0]
        if arrays:
            for name in seen[0]:
                np.array([one[name] for one in seen])

    for _ in range(WARMUP_STEPS):
        step()
    steps, began, cpu = 0, time.perf_counter(), time.process_time()
    while (taken := time.perf_counter() - began) < seconds:
        step()
        steps += 1
    return {"steps_per_s": steps / taken, "cpu_us_per_step": 1e6 * (time.process_time() - cpu) / steps}


def record(env: Any, steps: int, path: Path) -> None:
    with path.open("w") as file:
        described = {
            "observation": [{name: list(part.shape) for name, part in space.spaces.items()} for space in env.observation_spaces],
            "action": [{name: str(type(part).__name__) for name, part in space.spaces.items()} for space in env.action_spaces],
            "policies": env.agent_policy_names,
        }
        file.write(json.dumps(described) + "\n")
        first, _ = env.reset()
        file.write(json.dumps({"obs": plain(first)}) + "\n")
        for step in range(steps):
            seen, rewards, done, _, _ = env.step(actions_of(env, step), order_ij=True)
            file.write(json.dumps({"obs": plain(seen), "reward": rewards, "done": done}) + "\n")


def plain(observations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: part.tolist() if hasattr(part, "tolist") else part for name, part in one.items()} for one in observations]


if __name__ == "__main__":
    main()
