"""Sample Factory's APPO as it is meant: workers, inference and learner in processes of their own, without waiting for each other."""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium as gym
import sample_factory_ppo as ppo_script
import settings
import torch
from report import Run, describe, parse_args
from sample_factory.envs.env_utils import register_env

DOOM = "doom_basic"


def make_doom(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gym.Env:
    from sf_examples.vizdoom.doom.doom_utils import make_doom_env

    return make_doom_env(name, cfg, env_config, render_mode)


def arguments(task: str) -> dict[str, Any]:
    image = {"env": ppo_script.PONG, "env_framestack": 4} if task == "pong" else {"env": DOOM, "pixel_format": "CHW"}
    return {
        **ppo_script.equal_arguments(settings.ASYNC),
        **image,
        "serial_mode": False,
        "async_rl": True,
        "num_workers": settings.WORKERS,
        "num_envs_per_worker": settings.ASYNC.envs // settings.WORKERS,
        # Its own default, and what it was designed for: one half is stepped while the other waits for actions.
        "worker_num_splits": 2,
        "policy_workers_per_policy": 1,
        "with_vtrace": False,  # its default; with it, 2.1.1 fails while it gathers statistics
        # Else it plays for up to a quarter of a minute before the first rollout; that is start-up, and not what is measured.
        "decorrelate_experience_max_seconds": 0,
        "decorrelate_envs_on_one_worker": False,
        "encoder_conv_architecture": "convnet_atari",
        "encoder_conv_mlp_layers": [512],
        "nonlinearity": "relu",
        "obs_scale": 255.0,
        "env_frameskip": 4,
        # Counts agent steps; with frame skip it would report four times as many.
        "summaries_use_frameskip": False,
    }


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    register_env(ppo_script.PONG, ppo_script.make_pong)
    register_env(DOOM, make_doom)
    chosen = arguments(args.task)
    shown = describe(settings.ASYNC, env=chosen["env"], workers=settings.WORKERS, network="convnet_atari, 512 units")
    run = Run("sample_factory", args, shown)
    with tempfile.TemporaryDirectory(prefix="sample-factory-") as directory:
        if args.task == "doom":
            from sf_examples.vizdoom.doom.doom_params import add_doom_env_args, add_doom_env_eval_args

            extend = (add_doom_env_args, add_doom_env_eval_args)
        else:
            extend = ()
        ppo_script.train(ppo_script.make_cfg(chosen, args, directory, extend), run)
        run.finish()


if __name__ == "__main__":
    main()
