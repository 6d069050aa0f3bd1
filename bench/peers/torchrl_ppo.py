"""TorchRL PPO, assembled the way its own PPO example does: collector, GAE, ClipPPOLoss, replay buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cartpole
import numpy as np
import settings
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode
from report import Args, Run, describe, parse_args, skip
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import EnvBase
from torchrl.envs.libs.gym import GymEnv, GymWrapper
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.advantages import GAE


@dataclass(frozen=True)
class Setup:
    ppo: settings.PPO
    normalize_advantage: bool


# TorchRL ships no CartPole settings for PPO; these are its MuJoCo ones (sota-implementations/ppo).
TUNED = Setup(
    ppo=settings.PPO(envs=1, steps=2048, epochs=10, minibatch=64, lr=3e-4, clip=0.2, ent_coef=0.0, vf_coef=0.25, adam_eps=1e-5),
    normalize_advantage=True,
)
EQUAL = Setup(ppo=settings.CARTPOLE, normalize_advantage=True)


class ManualResetCartPole(CartPoleVectorEnv):
    """Gymnasium's vectorised CartPole, reset only where asked: the mode TorchRL prefers."""

    metadata = {**CartPoleVectorEnv.metadata, "autoreset_mode": AutoresetMode.DISABLED}
    autoreset_mode = AutoresetMode.DISABLED

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        result = super().step(action)
        self.prev_done[:] = False
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        mask = None if options is None else options.get("reset_mask")
        if mask is None:
            return super().reset(seed=seed)
        self.state[:, mask] = self.np_random.uniform(self.low, self.high, size=(4, mask.sum()))
        self.steps[mask] = 0
        return self.state.T.astype(np.float32), {}


def make_env(num_envs: int) -> EnvBase:
    if num_envs == 1:
        return GymEnv("CartPole-v1", categorical_action_encoding=True)
    return GymWrapper(ManualResetCartPole(num_envs), categorical_action_encoding=True)


def mlp(outputs: int) -> nn.Module:
    return MLP(in_features=4, out_features=outputs, num_cells=[settings.HIDDEN] * 2, activation_class=nn.Tanh)


def make_actor(env: EnvBase) -> ProbabilisticActor:
    module = TensorDictModule(mlp(2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(
        module,
        in_keys=["logits"],
        spec=env.action_spec_unbatched,
        distribution_class=Categorical,
        return_log_prob=True,
    )


class Learner:
    def __init__(self, actor: ProbabilisticActor, setup: Setup) -> None:
        ppo = setup.ppo
        critic = ValueOperator(mlp(1), in_keys=["observation"])
        self._ppo = ppo
        self._gae = GAE(gamma=ppo.gamma, lmbda=ppo.gae_lambda, value_network=critic, average_gae=False)
        self._loss = ClipPPOLoss(
            actor,
            critic,
            clip_epsilon=ppo.clip,
            entropy_bonus=ppo.ent_coef > 0,
            entropy_coeff=ppo.ent_coef,
            critic_coeff=ppo.vf_coef,
            loss_critic_type="l2",
            normalize_advantage=setup.normalize_advantage,
        )
        self._parameters = list(self._loss.parameters())
        self._optimizer = torch.optim.Adam(self._parameters, lr=ppo.lr, eps=ppo.adam_eps)
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(ppo.batch), sampler=SamplerWithoutReplacement(), batch_size=ppo.minibatch
        )

    def update(self, data: TensorDictBase) -> None:
        with torch.no_grad():
            data = self._gae(data)
        self._buffer.empty()
        self._buffer.extend(data.reshape(-1))
        for _ in range(self._ppo.epochs):
            for batch in self._buffer:
                losses = self._loss(batch)
                sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(self._parameters, self._ppo.max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)


def report_episodes(data: TensorDictBase, returns: cartpole.EpisodeReturns, run: Run, frames: int) -> None:
    reward = data["next", "reward"].squeeze(-1).reshape(-1, data.shape[-1]).numpy()
    done = data["next", "done"].squeeze(-1).reshape(-1, data.shape[-1]).numpy()
    for step in range(data.shape[-1]):
        for episode_return in returns.step(reward[:, step], done[:, step]):
            run.episode(episode_return, frames)


def train(collector: Collector, learner: Learner, ppo: settings.PPO, run: Run) -> None:
    returns = cartpole.EpisodeReturns(ppo.envs)
    frames = 0
    run.begin()
    for data in collector:
        frames += data.numel()
        report_episodes(data, returns, run, frames)
        run.saw(frames)
        if run.reached:
            return
        learner.update(data)
        run.iteration(frames)
        if run.over:
            return


def cartpole_run(args: Args) -> None:
    setup = TUNED if args.mode == "tuned" else EQUAL
    env_name = "GymEnv" if args.mode == "tuned" else "gymnasium CartPoleVectorEnv"
    source = {"source": "sota-implementations/ppo, MuJoCo settings"} if args.mode == "tuned" else {}
    run = Run("torchrl", args, describe(setup.ppo, env=env_name, **source))
    env = make_env(setup.ppo.envs)
    env.set_seed(args.seed)
    actor = make_actor(env)
    learner = Learner(actor, setup)
    collector = Collector(env, actor, frames_per_batch=setup.ppo.batch, total_frames=-1)
    train(collector, learner, setup.ppo, run)
    collector.shutdown()

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        observed = TensorDict({"observation": torch.from_numpy(obs)}, batch_size=[len(obs)])
        return actor.get_dist(observed).logits.argmax(-1).numpy()

    run.finish(lambda: cartpole.evaluate(act))


def main() -> None:
    args = parse_args()
    if args.task != "cartpole":
        skip("torchrl", args, "not implemented in this suite")
        return
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    cartpole_run(args)


if __name__ == "__main__":
    main()
