"""skrl PPO, stepped by its StepTrainer."""

from __future__ import annotations

import logging
from typing import Any

import cartpole
import gymnasium as gym
import numpy as np
import settings
import torch
from report import Args, Run, describe, parse_args, skip
from skrl import logger
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import StepTrainer
from skrl.utils import set_seed
from torch import nn

# skrl ships no CartPole-v1 settings for PPO: these are PPO_CFG's defaults, with the time limit handled.
TUNED_ENVS = 8
TUNED: dict[str, Any] = {"time_limit_bootstrap": True}
SHOWN = (
    "rollouts",
    "learning_epochs",
    "mini_batches",
    "learning_rate",
    "discount_factor",
    "gae_lambda",
    "ratio_clip",
    "value_clip",
    "entropy_loss_scale",
    "value_loss_scale",
    "grad_norm_clip",
    "time_limit_bootstrap",
)


def mlp(outputs: int) -> nn.Sequential:
    hidden = settings.HIDDEN
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Policy(CategoricalMixin, Model):
    def __init__(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device="cpu")
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = mlp(2)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device="cpu")
        DeterministicMixin.__init__(self)
        self.net = mlp(1)

    def compute(self, inputs: dict[str, Any], role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


def equal_arguments(ppo: settings.PPO) -> dict[str, Any]:
    return {
        "rollouts": ppo.steps,
        "learning_epochs": ppo.epochs,
        "mini_batches": ppo.batch // ppo.minibatch,
        "learning_rate": ppo.lr,
        "discount_factor": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "ratio_clip": ppo.clip,
        "value_clip": 0.0,
        "entropy_loss_scale": ppo.ent_coef,
        "value_loss_scale": ppo.vf_coef,
        "grad_norm_clip": ppo.max_grad_norm,
        "time_limit_bootstrap": True,
    }


def make_agent(env: Any, cfg: PPO_CFG) -> PPO:
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    memory = RandomMemory(memory_size=cfg.rollouts, num_envs=env.num_envs, device="cpu")
    return PPO(models=models, memory=memory, cfg=cfg, device="cpu", **spaces)


def train(trainer: StepTrainer, run: Run, num_envs: int, rollouts: int, timesteps: int) -> None:
    returns = cartpole.EpisodeReturns(num_envs)
    frames = 0
    run.begin()
    for step in range(timesteps):
        _, rewards, terminated, truncated, _ = trainer.train(timestep=step, timesteps=timesteps)
        frames += num_envs
        done = (terminated | truncated).numpy().ravel()
        for episode_return in returns.step(rewards.numpy().ravel(), done):
            run.episode(episode_return, frames)
        if (step + 1) % rollouts == 0:
            run.iteration(frames)
        run.saw(frames)
        if run.over:
            return


def cartpole_run(args: Args) -> None:
    equal = args.mode == "equal"
    num_envs = settings.CARTPOLE.envs if equal else TUNED_ENVS
    arguments = equal_arguments(settings.CARTPOLE) if equal else TUNED
    cfg = PPO_CFG(**arguments)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    if equal:
        shown = describe(settings.CARTPOLE, advantage_normalisation="whole batch")
    else:
        shown = {**{name: getattr(cfg, name) for name in SHOWN}, "envs": num_envs, "source": "PPO_CFG defaults"}
    run = Run("skrl", args, {**shown, "env": "gymnasium CartPoleVectorEnv"})
    env = wrap_env(cartpole.make_vector(num_envs), wrapper="gymnasium", verbose=False)
    agent = make_agent(env, cfg)
    if equal:
        agent.optimizer.param_groups[0]["eps"] = settings.CARTPOLE.adam_eps
    timesteps = args.max_frames // num_envs
    trainer_cfg = {"timesteps": timesteps, "disable_progressbar": True, "headless": True}
    trainer = StepTrainer(env=env, agents=agent, cfg=trainer_cfg)
    train(trainer, run, num_envs, cfg.rollouts, timesteps)

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        return agent.policy.net(torch.from_numpy(obs)).argmax(-1).numpy()

    run.finish(lambda: cartpole.evaluate(act))


def main() -> None:
    args = parse_args()
    if args.task != "cartpole":
        skip("skrl", args, "skrl stores observations as float32 and ships no Atari example")
        return
    logger.setLevel(logging.WARNING)
    torch.set_num_threads(args.threads)
    set_seed(args.seed)
    cartpole_run(args)


if __name__ == "__main__":
    main()
