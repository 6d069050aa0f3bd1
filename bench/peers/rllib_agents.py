"""RLlib PPO (new API stack) with several agents: one policy for all of them, `--workers` env runners."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import gymnasium as gym
import matches
import numpy as np
import rllib_ppo  # sets Ray's environment, before anything of Ray is imported
import torch
from pettingzoo.utils import BaseWrapper
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv, PettingZooEnv
from ray.rllib.utils.torch_utils import FLOAT_MIN
from ray.tune.registry import register_env
from report import Args, Run, parse_args

POLICY = "shared"
ENVIRONMENT = "ludus-agents"


class MaskFirst(BaseWrapper):
    """Observations as one vector: the action mask, then the board."""

    def observation_space(self, agent: Any) -> gym.Space:
        size = sum(int(np.prod(part.shape)) for part in self.env.observation_space(agent).spaces.values())
        return gym.spaces.Box(0.0, 1.0, (size,), np.float32)

    def observe(self, agent: Any) -> np.ndarray:
        seen = self.env.observe(agent)
        return np.concatenate([seen["action_mask"], seen["observation"].reshape(-1)]).astype(np.float32)


class FloatPictures(matches.SmallPictures):
    """RLlib's convolutions take floats only."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._space = gym.spaces.Box(0.0, 1.0, self._space.shape, np.float32)

    def _reduce(self, observations: dict) -> dict:
        return {agent: picture.astype(np.float32) / 255 for agent, picture in super()._reduce(observations).items()}


class MaskedModule(DefaultPPOTorchRLModule):
    """RLlib's network for PPO, without the actions that are forbidden by the first entries of the observation."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._mask(batch, super()._forward(batch, **kwargs))

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self._mask(batch, super()._forward_train(batch, **kwargs))

    def _mask(self, batch: dict[str, Any], outs: dict[str, Any]) -> dict[str, Any]:
        logits = outs[Columns.ACTION_DIST_INPUTS]
        allowed = batch[Columns.OBS][..., : logits.shape[-1]] > 0
        return {**outs, Columns.ACTION_DIST_INPUTS: torch.where(allowed, logits, FLOAT_MIN)}


def make_environment(task: matches.MatchTask) -> Any:
    if task.turns:
        return PettingZooEnv(MaskFirst(matches.MAKERS[task.name]()))
    if task.images:
        return ParallelPettingZooEnv(FloatPictures(matches.MAKERS[task.name]().env))
    return ParallelPettingZooEnv(matches.MAKERS[task.name]())


def network(task: matches.MatchTask) -> DefaultModelConfig:
    if not task.images:
        return DefaultModelConfig(fcnet_hiddens=[matches.HIDDEN] * 2, fcnet_activation="tanh", vf_share_layers=False)
    filters = [[*layer, "valid"] for layer in matches.CONVOLUTIONS]
    # The last "convolution" covers its whole input, which makes it the dense layer.
    return DefaultModelConfig(
        conv_filters=[*filters, [matches.DENSE, 9, 1, "valid"]],
        conv_activation="relu",
        vf_share_layers=True,
        head_fcnet_hiddens=[],
    )


def configuration(task: matches.MatchTask, args: Args) -> PPOConfig:
    module = RLModuleSpec(module_class=MaskedModule if task.turns else None, model_config=network(task))
    return (
        PPOConfig()
        .environment(ENVIRONMENT)
        .env_runners(num_env_runners=args.workers, num_envs_per_env_runner=task.copies // max(1, args.workers))
        .learners(num_learners=0)
        .multi_agent(policies={POLICY}, policy_mapping_fn=lambda *_, **__: POLICY, count_steps_by="agent_steps")
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs={POLICY: module}))
        .debugging(seed=args.seed, log_level="ERROR")
        .training(
            train_batch_size_per_learner=task.batch,
            minibatch_size=task.minibatch,
            num_epochs=task.epochs,
            lr=task.lr,
            gamma=task.gamma,
            lambda_=task.gae_lambda,
            clip_param=task.clip,
            entropy_coeff=task.ent_coef,
            vf_loss_coeff=task.vf_coef,
            vf_clip_param=float("inf"),
            use_kl_loss=False,
            grad_clip=task.max_grad_norm,
            grad_clip_by="global_norm",
        )
    )


def main() -> None:
    args = parse_args()
    task = matches.TASKS[args.task]
    torch.set_num_threads(args.threads)
    run = Run("rllib", args, {**asdict(task), "runners": args.workers, "adam_eps": 1e-8})
    with rllib_ppo.local_ray():
        register_env(ENVIRONMENT, lambda _: make_environment(task))
        algorithm = configuration(task, args).build_algo()
        run.begin()
        while not run.over:
            result = algorithm.train()
            steps = result["env_runners"]["num_agent_steps_sampled_lifetime"]
            run.iteration(int(sum(steps.values())))
        run.finish()
        algorithm.stop()


if __name__ == "__main__":
    main()
