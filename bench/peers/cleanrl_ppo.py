"""PPO as one plain loop, in the manner of CleanRL: the strongest thing to write without a framework.

Written from the PPO paper (Schulman et al. 2017) and the usual implementation details: orthogonal
initialisation, advantages normalised per minibatch, truncation treated as termination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import cartpole
import gymnasium as gym
import numpy as np
import settings
import torch
from report import ASYNC_MODES, Args, Run, describe, parse_args
from settings import PPO
from torch import nn
from torch.distributions import Categorical


@dataclass(frozen=True)
class Extras:
    """What CleanRL's defaults do and the equal settings do not."""

    anneal_lr_over_frames: int = 0
    clip_value_loss: bool = False


# The defaults of CleanRL's ppo.py for CartPole-v1.
TUNED = PPO(envs=4, steps=128, epochs=4, minibatch=128, lr=2.5e-4, clip=0.2, ent_coef=0.01)
DOOM_THREADS = 3  # faster than two: a thread mostly waits for an engine
TUNED_EXTRAS = Extras(anneal_lr_over_frames=500_000, clip_value_loss=True)


def layer(module: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class MlpAgent(nn.Module):
    def __init__(self, observations: int, actions: int, hidden: int = settings.HIDDEN) -> None:
        super().__init__()
        self.policy = self._mlp(observations, hidden, actions, gain=0.01)
        self.value = self._mlp(observations, hidden, 1, gain=1.0)

    @staticmethod
    def _mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
        first, second = layer(nn.Linear(inputs, hidden)), layer(nn.Linear(hidden, hidden))
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer(nn.Linear(hidden, outputs), gain))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(obs), self.value(obs).squeeze(-1)


class CnnAgent(nn.Module):
    def __init__(self, image: tuple[int, int, int], actions: int) -> None:
        super().__init__()
        channels, height, width = image
        for kernel, stride in ((8, 4), (4, 2), (3, 1)):
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        self.trunk = nn.Sequential(
            layer(nn.Conv2d(channels, 32, 8, stride=4)),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3, stride=1)),
            nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(64 * height * width, 512)),
            nn.ReLU(),
        )
        self.policy = layer(nn.Linear(512, actions), gain=0.01)
        self.value = layer(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(obs.float() / 255.0)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


class Rollout:
    """Time-major storage, (T, B, ...)."""

    def __init__(self, ppo: PPO, obs_shape: tuple[int, ...], obs_dtype: torch.dtype) -> None:
        shape_TB = (ppo.steps, ppo.envs)
        self.obs_TB = torch.zeros(shape_TB + obs_shape, dtype=obs_dtype)
        self.action_TB = torch.zeros(shape_TB, dtype=torch.long)
        self.logp_TB = torch.zeros(shape_TB)
        self.value_TB = torch.zeros(shape_TB)
        self.reward_TB = torch.zeros(shape_TB)
        self.done_TB = torch.zeros(shape_TB)

    def advantages(self, last_value_B: torch.Tensor, ppo: PPO) -> torch.Tensor:
        """Generalised advantage estimation (Schulman et al. 2016)."""
        advantage_TB = torch.zeros_like(self.reward_TB)
        running_B = torch.zeros_like(last_value_B)
        next_value_B = last_value_B
        for t in reversed(range(ppo.steps)):
            alive_B = 1.0 - self.done_TB[t]
            delta_B = self.reward_TB[t] + ppo.gamma * next_value_B * alive_B - self.value_TB[t]
            running_B = delta_B + ppo.gamma * ppo.gae_lambda * alive_B * running_B
            advantage_TB[t] = running_B
            next_value_B = self.value_TB[t]
        return advantage_TB


class Trainer:
    def __init__(self, agent: nn.Module, envs: gym.vector.VectorEnv, ppo: PPO, extras: Extras) -> None:
        self.agent, self.envs, self.ppo, self.extras = agent, envs, ppo, extras
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=ppo.lr, eps=ppo.adam_eps)
        space = envs.single_observation_space
        obs_dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
        self.rollout = Rollout(ppo, space.shape, obs_dtype)
        self.returns = cartpole.EpisodeReturns(ppo.envs)
        self.frames = 0

    def train(self, run: Run, seed: int) -> None:
        obs, _ = self.envs.reset(seed=seed)
        self.obs_B = torch.from_numpy(obs)
        run.begin()
        while not run.over:
            if self.collect(run):
                self.anneal()
                self.update()
                run.iteration(self.frames)

    @torch.no_grad()
    def collect(self, run: Run) -> bool:
        """Fill the rollout; False if the run ended within it."""
        roll = self.rollout
        for t in range(self.ppo.steps):
            logits, roll.value_TB[t] = self.agent(self.obs_B)
            policy = Categorical(logits=logits, validate_args=False)
            action_B = policy.sample()
            roll.obs_TB[t], roll.action_TB[t], roll.logp_TB[t] = self.obs_B, action_B, policy.log_prob(action_B)
            obs, reward, terminated, truncated, _ = self.envs.step(action_B.numpy())
            done = terminated | truncated
            roll.reward_TB[t], roll.done_TB[t] = torch.from_numpy(reward), torch.from_numpy(done)
            self.obs_B = torch.from_numpy(obs)
            self.frames += self.ppo.envs
            for episode_return in self.returns.step(reward, done):
                run.episode(episode_return, self.frames)
            run.saw(self.frames)
            if run.over:
                return False
        return True

    def anneal(self) -> None:
        total = self.extras.anneal_lr_over_frames
        if total:
            left = max(0.0, 1.0 - (self.frames - self.ppo.batch) / total)
            self.optimizer.param_groups[0]["lr"] = left * self.ppo.lr

    def update(self) -> None:
        roll = self.rollout
        with torch.no_grad():
            _, last_value_B = self.agent(self.obs_B)
            advantage_TB = roll.advantages(last_value_B, self.ppo)
        obs, action, logp = roll.obs_TB.flatten(0, 1), roll.action_TB.flatten(), roll.logp_TB.flatten()
        value, advantage = roll.value_TB.flatten(), advantage_TB.flatten()
        target = advantage + value
        for pick in self.minibatches():
            loss = self.loss(obs[pick], action[pick], logp[pick], value[pick], advantage[pick], target[pick])
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.agent.parameters(), self.ppo.max_grad_norm)
            self.optimizer.step()

    def minibatches(self) -> Iterator[torch.Tensor]:
        for _ in range(self.ppo.epochs):
            yield from torch.randperm(self.ppo.batch).split(self.ppo.minibatch)

    def loss(
        self,
        obs: torch.Tensor,
        action: torch.Tensor,
        old_logp: torch.Tensor,
        old_value: torch.Tensor,
        advantage: torch.Tensor,
        target: torch.Tensor,
    ) -> torch.Tensor:
        ppo = self.ppo
        logits, value = self.agent(obs)
        policy = Categorical(logits=logits, validate_args=False)
        ratio = (policy.log_prob(action) - old_logp).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1.0 - ppo.clip, 1.0 + ppo.clip)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_loss = (value - target).square()
        if self.extras.clip_value_loss:
            near = old_value + (value - old_value).clamp(-ppo.clip, ppo.clip)
            value_loss = torch.max(value_loss, (near - target).square())
        return policy_loss + 0.5 * ppo.vf_coef * value_loss.mean() - ppo.ent_coef * policy.entropy().mean()


def make_pong(num_envs: int, threads: int) -> gym.vector.VectorEnv:
    from ale_py.vector_env import AtariVectorEnv

    # Frame skip 4, 84x84 grey and a stack of 4 are its defaults.
    return AtariVectorEnv("pong", num_envs, num_threads=threads, autoreset_mode="SameStep")


def make_doom(num_envs: int) -> gym.vector.VectorEnv:
    from doom import DoomThreads

    return DoomThreads(num_envs, DOOM_THREADS)


def cartpole_run(args: Args) -> None:
    ppo, extras = (TUNED, TUNED_EXTRAS) if args.mode == "tuned" else (settings.CARTPOLE, Extras())
    run = Run("cleanrl", args, describe(ppo, **describe(extras), env="gymnasium CartPoleVectorEnv"))
    agent = MlpAgent(observations=4, actions=2)
    Trainer(agent, cartpole.make_vector(ppo.envs), ppo, extras).train(run, args.seed)

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        return agent(torch.from_numpy(obs))[0].argmax(-1).numpy()

    run.finish(lambda: cartpole.evaluate(act))


def image_run(args: Args) -> None:
    """Pong, or Doom. In the asynchronous modes: one epoch, one gradient step a batch."""
    ppo = settings.ASYNC if args.mode in ASYNC_MODES else settings.PONG
    kind = "ale_py AtariVectorEnv" if args.task == "pong" else f"ViZDoom stepped by {DOOM_THREADS} threads"
    run = Run("cleanrl", args, describe(ppo, env=kind, network="Nature CNN 512"))
    envs = make_pong(ppo.envs, args.threads) if args.task == "pong" else make_doom(ppo.envs)
    image, actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
    Trainer(CnnAgent(image, actions), envs, ppo, Extras()).train(run, args.seed)
    run.finish()
    envs.close()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    if args.task == "cartpole":
        cartpole_run(args)
    else:
        image_run(args)


if __name__ == "__main__":
    main()
