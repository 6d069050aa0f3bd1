"""Ludus as a contestant: the whole product (run directory, metrics, checkpoints, evaluation), reporting as the peers do.

Run as `python -m bench.ours --task cartpole --mode tuned --seed 1 …`; prints one JSON line.
"""

from __future__ import annotations

import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from bench.peers import settings
from bench.peers.report import Args, Run, describe, parse_args

ENVIRONMENTS = {"cartpole": "CartPole-v1", "pong": "ALE/Pong-v5"}


class Watch:
    """A metrics sink that tells the common clock about every iteration."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def write(self, numbers: Any) -> None:
        self._run.iteration(int(numbers["timesteps"]))

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


def tuned() -> dict[str, Any]:
    from ludus import config

    with resources.as_file(resources.files("ludus.experiment.presets") / "cartpole.yaml") as path:
        found: dict[str, Any] = config.load_experiments(path)["cartpole"]
    return dict(found["config"])


def main(args: Args) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the `ludus` command does
    chosen = tuned() if args.mode == "tuned" else equal(args.task)
    run = Run("ludus", args, describe(settings.CARTPOLE, **chosen) if args.mode == "equal" else chosen)
    from ludus.experiment import experiment
    from ludus.game.environment import make_environments

    limits = {"timesteps": args.max_frames, "time_s": args.max_seconds, "episode_return_mean": args.target}
    data = {"env": ENVIRONMENTS[args.task], "stop": limits, "config": chosen | {"seed": args.seed}}
    run.begin()
    with tempfile.TemporaryDirectory() as directory:
        result = experiment.start(data, local_dir=Path(directory), sinks=[Watch(run)])
    if result.stopped_by == "episode_return_mean":
        run.reach(int(result.metrics["timesteps"]))  # after the run directory is complete: a stricter clock than the peers'

    def evaluate() -> float:
        from ludus.actor.evaluate import play

        with result.agent.policy.acting():
            return play(result.agent.policy, make_environments(ENVIRONMENTS[args.task], 20), 20, 10_000).mean

    run.finish(evaluate)


if __name__ == "__main__":
    main(parse_args())
