"""PufferLib's PuffeRL trainer on gymnasium's CartPole (its own C CartPole ends after 200 steps)."""

from __future__ import annotations

from typing import Any

import cartpole
import numpy as np
import pufferlib
import settings
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from pufferlib import pufferl
from pufferlib.pytorch import layer_init
from report import Args, Run, describe, parse_args, skip
from torch import nn

# pufferlib/config/default.ini with the overrides of classic_control.ini; the mini-batch of 8192 there is larger
# than the batch of 64 environments, so it is one batch here.
TUNED_ENVS = 64
TUNED: dict[str, Any] = {
    "bptt_horizon": 64,
    "minibatch_size": 4096,
    "update_epochs": 1,
    "total_timesteps": 500_000,
    "optimizer": "muon",
    "anneal_lr": True,
    "learning_rate": 0.015,
    "gamma": 0.995,
    "gae_lambda": 0.90,
    "clip_coef": 0.2,
    "vf_coef": 2.0,
    "vf_clip_coef": 0.2,
    "max_grad_norm": 1.5,
    "ent_coef": 0.001,
    "adam_beta1": 0.95,
    "adam_beta2": 0.999,
    "adam_eps": 1e-12,
    "prio_alpha": 0.8,
    "prio_beta0": 0.2,
}

# What PuffeRL asks for and neither mode changes.
BASE: dict[str, Any] = {
    "torch_deterministic": True,
    "cpu_offload": False,
    "device": "cpu",
    "precision": "float32",
    "use_rnn": False,
    "compile": False,
    "compile_mode": "default",
    "compile_fullgraph": True,
    "batch_size": "auto",
    "max_minibatch_size": 32768,
    "vtrace_rho_clip": 1.0,
    "vtrace_c_clip": 1.0,
    "data_dir": "experiments",
    "checkpoint_interval": 10**9,
}


def equal_arguments(ppo: settings.PPO, max_frames: int) -> dict[str, Any]:
    return {
        "bptt_horizon": ppo.steps,
        "minibatch_size": ppo.minibatch,
        "update_epochs": ppo.epochs,
        "total_timesteps": max(max_frames, ppo.batch),
        "optimizer": "adam",
        "anneal_lr": False,
        "learning_rate": ppo.lr,
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "clip_coef": ppo.clip,
        # Its value loss carries another factor of one half and no switch for the clipping.
        "vf_coef": 2 * ppo.vf_coef,
        "vf_clip_coef": 1e6,
        "max_grad_norm": ppo.max_grad_norm,
        "ent_coef": ppo.ent_coef,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": ppo.adam_eps,
        "prio_alpha": 0.0,
        "prio_beta0": 0.0,
    }


class NativeCartPole(pufferlib.PufferEnv):
    """Gymnasium's vectorised CartPole in PufferLib's native format; episodes go straight to the run."""

    def __init__(self, num_envs: int, run: Run) -> None:
        self._envs = CartPoleVectorEnv(num_envs)
        self._run = run
        self._returns = cartpole.EpisodeReturns(num_envs)
        self._frames = 0
        self.single_observation_space = self._envs.single_observation_space
        self.single_action_space = self._envs.single_action_space
        self.num_agents = num_envs
        super().__init__()

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, list[Any]]:
        self.observations[:], _ = self._envs.reset(seed=seed)
        return self.observations, []

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[Any]]:
        obs, reward, terminated, truncated, _ = self._envs.step(actions.reshape(self.num_agents))
        self.observations[:], self.rewards[:] = obs, reward
        # It has no bootstrapping at a time limit: both ends look alike to it.
        self.terminals[:] = terminated | truncated
        self._frames += self.num_agents
        for episode_return in self._returns.step(reward, self.terminals):
            self._run.episode(episode_return, self._frames)
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def close(self) -> None:
        self._envs.close()


class Policy(nn.Module):
    def __init__(self, hidden: int = settings.HIDDEN) -> None:
        super().__init__()
        self.policy = self._mlp(hidden, 2, std=0.01)
        self.value = self._mlp(hidden, 1, std=1.0)

    @staticmethod
    def _mlp(hidden: int, outputs: int, std: float) -> nn.Sequential:
        first, second = layer_init(nn.Linear(4, hidden)), layer_init(nn.Linear(hidden, hidden))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer_init(nn.Linear(hidden, outputs), std=std))

    def forward(self, observations: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(observations), self.value(observations)

    forward_eval = forward


class Trainer(pufferl.PuffeRL):
    def print_dashboard(self, *_: Any, **__: Any) -> None:
        """No terminal here to draw it on."""

    def save_checkpoint(self) -> None:
        """Nothing is kept."""


def train(trainer: Trainer, run: Run) -> None:
    run.begin()
    while not run.over and trainer.global_step < trainer.config["total_timesteps"]:
        trainer.evaluate()
        run.saw(trainer.global_step)
        if run.reached:
            return
        trainer.train()
        run.iteration(trainer.global_step)


def cartpole_run(args: Args) -> None:
    equal = args.mode == "equal"
    arguments = equal_arguments(settings.CARTPOLE, args.max_frames) if equal else TUNED
    shown = describe(settings.CARTPOLE) if equal else {**TUNED, "envs": TUNED_ENVS, "source": "classic_control.ini"}
    run = Run("pufferlib", args, {**shown, "env": "gymnasium CartPoleVectorEnv"})
    policy = Policy()
    env = NativeCartPole(settings.CARTPOLE.envs if equal else TUNED_ENVS, run)
    # True wherever nvcc is installed, GPU or not.
    pufferl.ADVANTAGE_CUDA = False
    trainer = Trainer({**BASE, **arguments, "seed": args.seed}, env, policy)
    train(trainer, run)
    trainer.utilization.stop()

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        return policy(torch.from_numpy(obs))[0].argmax(-1).numpy()

    run.finish(lambda: cartpole.evaluate(act))


def main() -> None:
    args = parse_args()
    if args.task != "cartpole":
        skip("pufferlib", args, "not implemented in this suite")
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    cartpole_run(args)


if __name__ == "__main__":
    main()
