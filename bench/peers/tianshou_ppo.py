"""Tianshou PPO: its collector and update, called directly so that no test episodes are mixed in."""

from __future__ import annotations

from dataclasses import dataclass

import cartpole
import gymnasium as gym
import numpy as np
import settings
import torch
from report import Args, Run, describe, parse_args, skip
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import ActorCritic, Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from tianshou.utils.torch_utils import policy_within_training_step
from torch import nn


@dataclass(frozen=True)
class Setup:
    ppo: settings.PPO
    shared_network: bool
    activation: type[nn.Module]
    advantage_normalization: bool


# The defaults of Tianshou's own CartPole script, test/discrete/test_ppo_discrete.py.
TUNED = Setup(
    ppo=settings.PPO(envs=20, steps=100, epochs=10, minibatch=64, lr=3e-4, clip=0.2, ent_coef=0.0, adam_eps=1e-8),
    shared_network=True,
    activation=nn.ReLU,
    advantage_normalization=False,
)
EQUAL = Setup(ppo=settings.CARTPOLE, shared_network=False, activation=nn.Tanh, advantage_normalization=True)


def make_algorithm(setup: Setup, action_space: gym.spaces.Discrete) -> PPO:
    def net() -> Net:
        return Net(state_shape=4, hidden_sizes=[settings.HIDDEN] * 2, activation=setup.activation)

    actor_net = net()
    actor = DiscreteActor(preprocess_net=actor_net, action_shape=2, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=actor_net if setup.shared_network else net())
    for module in ActorCritic(actor, critic).modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.zeros_(module.bias)
    ppo = setup.ppo
    return PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=action_space, deterministic_eval=True),
        critic=critic,
        optim=AdamOptimizerFactory(lr=ppo.lr, eps=ppo.adam_eps),
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        eps_clip=ppo.clip,
        vf_coef=ppo.vf_coef,
        ent_coef=ppo.ent_coef,
        max_grad_norm=ppo.max_grad_norm,
        advantage_normalization=setup.advantage_normalization,
        max_batchsize=ppo.batch,
    )


def train(algorithm: PPO, envs: DummyVectorEnv, ppo: settings.PPO, run: Run) -> None:
    buffer = VectorReplayBuffer(ppo.batch, ppo.envs)
    collector = Collector[CollectStats](algorithm, envs, buffer)
    collector.reset()
    frames = 0
    run.begin()
    while not run.over:
        with policy_within_training_step(algorithm.policy):
            stats = collector.collect(n_step=ppo.batch)
            frames += stats.n_collected_steps
            for episode_return in stats.returns:
                run.episode(episode_return, frames)
            if run.reached:
                run.saw(frames)
                return
            algorithm.update(buffer=buffer, batch_size=ppo.minibatch, repeat=ppo.epochs)
        collector.reset_buffer(keep_statistics=True)
        run.iteration(frames)


def cartpole_run(args: Args) -> None:
    setup = TUNED if args.mode == "tuned" else EQUAL
    source = {"source": "test/discrete/test_ppo_discrete.py"} if args.mode == "tuned" else {}
    run = Run("tianshou", args, describe(setup.ppo, env="DummyVectorEnv", shared=setup.shared_network, **source))
    envs = DummyVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(setup.ppo.envs)])
    envs.seed(args.seed)
    algorithm = make_algorithm(setup, gym.spaces.Discrete(2))
    train(algorithm, envs, setup.ppo, run)

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        return algorithm.policy.actor(obs)[0].argmax(-1).numpy()

    run.finish(lambda: cartpole.evaluate(act))


def main() -> None:
    args = parse_args()
    if args.task != "cartpole":
        skip("tianshou", args, "not implemented in this suite")
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    cartpole_run(args)


if __name__ == "__main__":
    main()
