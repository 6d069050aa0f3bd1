"""Stable-Baselines3 PPO."""

from __future__ import annotations

from typing import Any

import cartpole
import gymnasium as gym
import numpy as np
import settings
import torch
from report import Args, Run, describe, parse_args
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

# RL Baselines3 Zoo, hyperparams/ppo.yml, CartPole-v1; "linear" falls to zero over n_timesteps.
TUNED_FRAMES = 100_000
TUNED_ENVS = 8
TUNED: dict[str, Any] = {
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 20,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "ent_coef": 0.0,
    "learning_rate": LinearSchedule(0.001, 0.0, 1.0),
    "clip_range": LinearSchedule(0.2, 0.0, 1.0),
}


class NativeCartPole(VecEnv):
    """Gymnasium's vectorised CartPole behind SB3's interface; saves it a Python loop over 64 environments."""

    def __init__(self, num_envs: int) -> None:
        self._envs = cartpole.make_vector(num_envs)
        super().__init__(num_envs, self._envs.single_observation_space, self._envs.single_action_space)

    def reset(self) -> np.ndarray:
        seed = self._seeds[0]
        self._reset_seeds()
        return self._envs.reset(seed=seed)[0]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        obs, reward, terminated, truncated, info = self._envs.step(self._actions)
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(done):
            infos[index]["terminal_observation"] = info["final_obs"][index]
            infos[index]["TimeLimit.truncated"] = bool(truncated[index] and not terminated[index])
        return obs, reward, done, infos

    def close(self) -> None:
        self._envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self._envs, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self._envs, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [getattr(self._envs, method_name)(*args, **kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class Watch(BaseCallback):
    """Feeds the run from SB3's training loop and stops it."""

    def __init__(self, run: Run, num_envs: int) -> None:
        super().__init__()
        self._run = run
        self._returns = cartpole.EpisodeReturns(num_envs)

    def _on_training_start(self) -> None:
        self._run.begin()

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self._run.iteration(self.num_timesteps)

    def _on_step(self) -> bool:
        for episode_return in self._returns.step(self.locals["rewards"], self.locals["dones"]):
            self._run.episode(episode_return, self.num_timesteps)
        self._run.saw(self.num_timesteps)
        return not self._run.over


def equal_arguments(ppo: settings.PPO) -> dict[str, Any]:
    return {
        "n_steps": ppo.steps,
        "batch_size": ppo.minibatch,
        "n_epochs": ppo.epochs,
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "ent_coef": ppo.ent_coef,
        "vf_coef": ppo.vf_coef,
        "max_grad_norm": ppo.max_grad_norm,
        "learning_rate": ppo.lr,
        "clip_range": ppo.clip,
    }


def cartpole_run(args: Args) -> None:
    if args.mode == "tuned":
        arguments, envs, frames = TUNED, make_vec_env("CartPole-v1", TUNED_ENVS, seed=args.seed), TUNED_FRAMES
        shown = {
            **TUNED,
            "learning_rate": "linear 0.001",
            "clip_range": "linear 0.2",
            "n_envs": TUNED_ENVS,
            "n_timesteps": TUNED_FRAMES,
            "env": "DummyVecEnv",
            "source": "RL Baselines3 Zoo",
        }
    else:
        arguments, envs = equal_arguments(settings.CARTPOLE), NativeCartPole(settings.CARTPOLE.envs)
        frames = args.max_frames
        shown = describe(settings.CARTPOLE, env="gymnasium CartPoleVectorEnv")
    run = Run("sb3", args, shown)
    # The defaults already are separate 64x64 tanh networks and Adam with eps 1e-5.
    model = PPO("MlpPolicy", envs, seed=args.seed, device="cpu", **arguments)
    model.learn(total_timesteps=frames, callback=Watch(run, envs.num_envs))
    run.finish(lambda: cartpole.evaluate(lambda obs: model.predict(obs, deterministic=True)[0]))


def pong_run(args: Args) -> None:
    import ale_py

    gym.register_envs(ale_py)
    ppo = settings.PONG
    run = Run("sb3", args, describe(ppo, env="make_atari_env, DummyVecEnv, VecFrameStack", network="Nature CNN 512"))
    # The wrapper skips frames itself.
    env_kwargs = {"frameskip": 1, "repeat_action_probability": 0.0}
    envs = VecFrameStack(make_atari_env("ALE/Pong-v5", ppo.envs, seed=args.seed, env_kwargs=env_kwargs), 4)
    model = PPO("CnnPolicy", envs, seed=args.seed, device="cpu", **equal_arguments(ppo))
    model.learn(total_timesteps=args.max_frames, callback=Watch(run, ppo.envs))
    run.finish()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.task == "cartpole":
        cartpole_run(args)
    else:
        pong_run(args)


if __name__ == "__main__":
    main()
