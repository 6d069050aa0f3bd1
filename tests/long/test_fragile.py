"""F2: CartPole whose environments crash and stall is learned within twice the steps of one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.core.metrics import Numbers
from ludus.envs.vector_env import make_environments
from ludus.experiments.assembly.components import PreparedRun
from ludus.experiments.resolve import resolve
from ludus.experiments.training import assemble_run
from ludus.sampling.episode_runner import EpisodePlan, play
from tests.long.record import record

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
GOAL, MOST_STEPS = 450.0, 400_000


def steps_to_goal(where: Path, seed: int, **faults: Any) -> tuple[int, dict[str, float]]:
    """Train in slices until a fault-free evaluation reaches the goal; (environment steps, the last numbers)."""
    reached: dict[str, float] = {}
    data: dict[str, Any] = {
        "env": "tests.environments:make_fragile",
        "run": "PPO",
        "stop": {"timesteps": MOST_STEPS},
        "checkpoint_time_s": 0,
        "config": {
            "env_config": faults,
            "num_workers": 2,
            "num_envs_per_worker": 4,
            "rollout_fragment_length": 128,
            "minibatch_size": 256,
            "num_epochs": 10,
            "lr": 1e-3,
            "seed": seed,
            "evaluation_duration": 0,
            "restart_failed_sub_environments": True,
            "worker_hang_s": 30,
        },
    }
    resolved = resolve(data)
    fair = make_environments("CartPole-v1", 10, {})

    def open_run() -> Any:
        from ludus.experiments.runs.run_dir import Run

        return Run.create(where / f"run-{seed}-{bool(faults)}", resolved.to_dict())

    with assemble_run(PreparedRun(resolved, open_run, None, seed)) as parts:
        policy, _ = parts.pool.newest("model")
        judged = 0

        def good_enough() -> bool:
            nonlocal judged
            done = parts.trainer.progress.iterations
            if done == judged or done % 5:
                return False
            judged = done
            with policy.acting():
                score = play(policy, fair, EpisodePlan(10), 1000 + done)
            reached["score"] = score.mean
            return score.mean >= GOAL

        parts.controller.run(good_enough)
        numbers: Numbers = parts.source.metrics()
        fair.close()
        return parts.trainer.progress.timesteps, dict(numbers) | reached


def test_crashes_and_stalls_cost_at_most_as_many_steps_again(tmp_path: Path) -> None:
    calm, faulty, restarts = [], [], 0.0
    for seed in (1, 2, 3):
        steps, numbers = steps_to_goal(tmp_path, seed)
        assert numbers["score"] >= GOAL
        calm.append(steps)
        steps, numbers = steps_to_goal(tmp_path, seed, crash=0.0005, stall=0.0005, stall_s=(2.0, 5.0))
        assert numbers["score"] >= GOAL
        faulty.append(steps)
        restarts += numbers["sampler/env_restarts"]
    ratio = sorted(faulty)[1] / sorted(calm)[1]
    record("F2 crashes and stalls", calm=str(calm), faulty=str(faulty), ratio=round(ratio, 2), env_restarts=restarts)
    assert restarts > 0
    assert ratio <= 2.0
