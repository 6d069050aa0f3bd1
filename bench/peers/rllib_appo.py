"""RLlib's APPO and IMPALA (new API stack): two env runners that sample while the learner learns."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np
import rllib_ppo as ppo_script  # sets Ray's environment, before anything of Ray is imported
import settings
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env
from report import Args, Run, describe, parse_args

DOOM = "ludus-doom"
# As for Pong: the last "convolution" covers its whole input, which makes it the shared 512-unit layer.
DOOM_CNN = DefaultModelConfig(
    conv_filters=[[32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"], [512, [5, 12], 1, "valid"]],
    conv_activation="relu",
    vf_share_layers=True,
    head_fcnet_hiddens=[],
)


class Normalised(gym.ObservationWrapper):
    """float32 in [0, 1], as RLlib's own wrapper makes of Atari: its convolutions refuse uint8."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0.0, 1.0, env.observation_space.shape, np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation.astype(np.float32) / 255.0


def make_doom(_: Any) -> gym.Env:
    from doom import Doom

    return Normalised(Doom(channels_last=True))


def config(args: Args) -> APPOConfig | IMPALAConfig:
    ppo = settings.ASYNC
    if args.mode == "appo":
        # Each batch is learned from once, from a plain queue: by default it would be learned from twice.
        made = APPOConfig().training(use_circular_buffer=False, simple_queue_size=3, clip_param=ppo.clip, lambda_=ppo.gae_lambda)
    else:
        made = IMPALAConfig()
    return (
        made.environment(ppo_script.PONG if args.task == "pong" else DOOM, clip_rewards=args.task == "pong" or None)
        .env_runners(
            num_env_runners=settings.WORKERS,
            num_envs_per_env_runner=ppo.envs // settings.WORKERS,
            rollout_fragment_length=ppo.steps,
        )
        .learners(num_learners=0)
        .rl_module(model_config=ppo_script.NATURE_CNN if args.task == "pong" else DOOM_CNN)
        .training(
            train_batch_size_per_learner=ppo.batch,
            num_epochs=1,
            lr=ppo.lr,
            gamma=ppo.gamma,
            entropy_coeff=ppo.ent_coef,
            vf_loss_coeff=ppo.vf_coef,
            grad_clip=ppo.max_grad_norm,
        )
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=args.seed, log_level="ERROR")
    )


def train(algorithm: Algorithm, run: Run) -> None:
    """Counts what was learned from; what was sampled and thrown away is no step of training."""
    frames, before, ppo = 0, 0, settings.ASYNC
    run.begin()
    while not run.over:
        result = algorithm.train()
        learner = result.get("learners", {}).get("__all_modules__", {})
        # One artificial step per fragment, for the value after its end, is counted there, too.
        frames = int(learner.get("num_env_steps_trained_lifetime", 0)) * ppo.steps // (ppo.steps + 1) or frames
        if frames > before:
            run.iteration(frames)
            before = frames


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    register_env(ppo_script.PONG, ppo_script.make_pong)
    register_env(DOOM, make_doom)
    kind = "wrap_atari_for_new_api_stack" if args.task == "pong" else "ViZDoom, float32"
    run = Run("rllib", args, describe(settings.ASYNC, algorithm=args.mode, runners=settings.WORKERS, env=kind))
    # By default its runners have a lower priority than the loop that polls them, which starves them where cores are few.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
    with ppo_script.local_ray():
        algorithm = config(args).build_algo()
        train(algorithm, run)
        run.finish()
        algorithm.stop()


if __name__ == "__main__":
    main()
