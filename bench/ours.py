"""Ludus as a contestant: the whole product (run directory, metrics, checkpoints, evaluation), reporting as the peers do.

Run as `python -m bench.ours --task cartpole --mode tuned --seed 1 …`; prints one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from bench.peers import settings
from bench.peers.report import AGENTS_MODE, ASYNC_MODES, Args, Run, describe, parse_args

ENVIRONMENTS = {
    "cartpole": "CartPole-v1",
    "pong": "ALE/Pong-v5",
    "doom": "VizdoomBasic-v1",
    "simple_spread": "mpe2/simple_spread_v3",
    "pistonball": "pettingzoo/pistonball_v6",
    "connect_four": "pettingzoo/connect_four_v3",
}
ASYNC_START_S = 6.0  # for the processes of an asynchronous run
SHOWN = (
    "sampler/env_share",
    "sampler/policy_share",
    "sampler/blocked_share",
    "learner/wait_share",
    "learner/lag_mean",
    "learner/lag_max",
)


class Watch:
    """A metrics sink that tells the common clock about every iteration."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[str, list[float]] = {}

    def write(self, numbers: Any) -> None:
        self._run.begin()
        self._run.iteration(int(numbers["timesteps"]))
        for name in SHOWN:
            if name in numbers:
                self._seen.setdefault(name, []).append(float(numbers[name]))

    def shares(self) -> dict[str, float]:
        """Where the time went, by our own counters: medians of the second half of the run."""
        return {name: round(statistics.median(seen[len(seen) // 2 :]), 3) for name, seen in self._seen.items()}

    def close(self) -> None:
        pass


def equal(task: str) -> dict[str, Any]:
    """The settings every contestant gets."""
    ppo = settings.CARTPOLE if task == "cartpole" else settings.PONG
    return {
        "num_envs_per_worker": ppo.envs,
        "train_batch_size": ppo.batch,
        "num_epochs": ppo.epochs,
        "minibatch_size": ppo.minibatch,
        "lr": ppo.lr,
        "gamma": ppo.gamma,
        "lambda": ppo.gae_lambda,
        "clip_param": ppo.clip,
        "entropy_coeff": ppo.ent_coef,
        "vf_loss_coeff": ppo.vf_coef,
        "grad_clip": ppo.max_grad_norm,
        "adam_epsilon": ppo.adam_eps,
        "evaluation_duration": 0,
    }


def asynchronous(mode: str) -> dict[str, Any]:
    """The settings of asynchronous contestants: two workers, every step learned from once, one gradient step a batch."""
    ppo = settings.ASYNC
    common = {key: value for key, value in equal("pong").items() if key != "clip_param" or mode == "appo"}
    return common | {
        "num_workers": settings.WORKERS,
        "num_envs_per_worker": ppo.envs // settings.WORKERS,
        "rollout_fragment_length": ppo.steps,
        "train_batch_size": ppo.batch,
        "num_epochs": ppo.epochs,
        "minibatch_size": ppo.minibatch,
        "lr": ppo.lr,
    }


def several_agents(args: Args) -> dict[str, Any]:
    """The settings of contestants that train several agents."""
    from bench.peers import matches

    task = matches.TASKS[args.task]
    model: dict[str, Any] = {"fcnet_hiddens": [matches.HIDDEN] * 2, "vf_share_layers": False}
    wrapped: dict[str, Any] = {}
    if task.images:
        model = {"conv_filters": matches.CONVOLUTIONS, "fcnet_hiddens": [matches.DENSE], "fcnet_activation": "relu"}
        wrapped = {"env_config": {"continuous": False}, "wrappers": ["bench.peers.matches:SmallPictures"]}
    elif task.turns:
        wrapped = {"wrappers": ["bench.peers.matches:FlatBoard"]}
    return {
        "multiagent": {"count_steps_by": "agent_steps"},
        "num_workers": args.workers,
        "num_envs_per_worker": task.copies // max(1, args.workers),
        "train_batch_size": task.batch,
        "num_epochs": task.epochs,
        "minibatch_size": task.minibatch,
        "lr": task.lr,
        "gamma": task.gamma,
        "lambda": task.gae_lambda,
        "clip_param": task.clip,
        "entropy_coeff": task.ent_coef,
        "vf_loss_coeff": task.vf_coef,
        "grad_clip": task.max_grad_norm,
        "adam_epsilon": task.adam_eps,
        "torch_threads": args.threads,
        "evaluation_duration": 0,
        "model": model,
        **wrapped,
    }


def settings_of(args: Args) -> dict[str, Any]:
    if args.mode == AGENTS_MODE:
        return several_agents(args)
    if args.mode in ASYNC_MODES:
        return asynchronous(args.mode)
    return tuned() if args.mode == "tuned" else equal(args.task)


def tuned() -> dict[str, Any]:
    from ludus.config.experiment_file import load_experiments

    with resources.as_file(resources.files("ludus.experiments.presets") / "cartpole-fast.yaml") as path:
        found: dict[str, Any] = load_experiments(path)["cartpole-fast"]
    return dict(found["config"])


def main(args: Args) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the `ludus` command does
    chosen = settings_of(args)
    chosen |= json.loads(os.environ.get("LUDUS_BENCH_CONFIG", "{}"))
    run = Run("ludus", args, describe(settings.CARTPOLE, **chosen) if args.mode == "equal" else dict(chosen))
    from ludus.envs.vector_env import make_environments
    from ludus.experiments import runner

    has_processes = args.mode in (*ASYNC_MODES, AGENTS_MODE)
    begun_s = ASYNC_START_S if has_processes else 0.0
    limits = {"timesteps": args.max_frames, "time_s": args.max_seconds + begun_s, "episode_return_mean": args.target}
    data = {
        "env": os.environ.get("LUDUS_BENCH_ENV", ENVIRONMENTS[args.task]),
        "stop": limits,
        "config": chosen | {"seed": args.seed},
    }
    if args.mode in ASYNC_MODES:
        data["run"] = args.mode.upper()
    watch = Watch(run)
    if not has_processes:  # those begin with the first update, when all processes are there
        run.begin()
    with tempfile.TemporaryDirectory() as directory:
        result = runner.train(data, local_dir=Path(directory), sinks=[watch])
    if result.stopped_by == "episode_return_mean":
        run.reach(int(result.metrics["timesteps"]))  # after the run directory is complete: a stricter clock than the peers'
    run.note(watch.shares())

    def evaluate() -> float:
        from ludus.sampling.episode_runner import EpisodePlan, play

        with result.agent.policy.acting():
            return play(result.agent.policy, make_environments(ENVIRONMENTS[args.task], 20), EpisodePlan(20), 10_000).mean

    run.finish(evaluate)


if __name__ == "__main__":
    main(parse_args())
