"""RLlib PPO (new API stack) on a private, loopback-only Ray."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Read when Ray is imported: a throw-away cluster on the loopback needs no tokens and reports to nobody.
# Without its native signal handler a SIGTERM becomes SystemExit, and Ray is shut down on the way out.
# One thread is for the runners; the learner in this process sets its own number.
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DISABLE_FAILURE_SIGNAL_HANDLER="1",
    OMP_NUM_THREADS="1",
)

import cartpole
import gymnasium as gym
import numpy as np
import ray
import settings
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env
from report import Args, Run, describe, parse_args

RUNNERS = 2
OBJECT_STORE_BYTES = 512 * 2**20
PONG = "ludus-pong"

# RLlib's own example, rllib/examples/algorithms/ppo/cartpole_ppo.py, with two runners for its four and the
# learner in the driver, because it was written for more cores than a small machine has.
TUNED_ENVS_PER_RUNNER = 16
TUNED_TRAINING: dict[str, Any] = {"lr": 0.0003, "num_epochs": 6, "vf_loss_coeff": 0.01}
TUNED_MODEL = DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear", vf_share_layers=True)

EQUAL_MODEL = DefaultModelConfig(fcnet_hiddens=[settings.HIDDEN] * 2, fcnet_activation="tanh", vf_share_layers=False)
# The last "convolution" covers its whole input, which makes it the shared 512-unit layer.
NATURE_CNN = DefaultModelConfig(
    conv_filters=[[32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"], [512, 7, 1, "valid"]],
    conv_activation="relu",
    vf_share_layers=True,
    head_fcnet_hiddens=[],
)


@contextmanager
def local_ray() -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="ray-")
    ray.init(
        address="local",
        num_cpus=RUNNERS + 1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=directory,
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def log_return(*, episode: Any, prev_episode_chunks: list[Any], metrics_logger: Any, **_: Any) -> None:
    """RLlib keeps only a merged mean; the window needs every return. An episode arrives in chunks."""
    episode_return = sum(float(chunk.get_return()) for chunk in (*prev_episode_chunks, episode))
    metrics_logger.log_value("finished_returns", episode_return, reduce="item_series")


def base_config(args: Args, envs_per_runner: int) -> PPOConfig:
    return (
        PPOConfig()
        .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=envs_per_runner)
        .learners(num_learners=0)
        .callbacks(on_episode_end=log_return)
        .debugging(seed=args.seed, log_level="ERROR")
    )


def equal_config(args: Args, ppo: settings.PPO, model: DefaultModelConfig) -> PPOConfig:
    return (
        base_config(args, ppo.envs // RUNNERS)
        .env_runners(rollout_fragment_length=ppo.steps)
        .rl_module(model_config=model)
        .training(
            train_batch_size_per_learner=ppo.batch,
            minibatch_size=ppo.minibatch,
            num_epochs=ppo.epochs,
            lr=ppo.lr,
            gamma=ppo.gamma,
            lambda_=ppo.gae_lambda,
            clip_param=ppo.clip,
            entropy_coeff=ppo.ent_coef,
            vf_loss_coeff=ppo.vf_coef,
            vf_clip_param=float("inf"),
            use_kl_loss=False,
            grad_clip=ppo.max_grad_norm,
            grad_clip_by="global_norm",
        )
    )


def make_pong(_: Any) -> gym.Env:
    import ale_py
    from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return wrap_atari_for_new_api_stack(env, dim=84, frameskip=4, framestack=4)


def train(algorithm: Algorithm, run: Run) -> None:
    run.begin()
    while not run.over:
        result = algorithm.train()
        frames = int(result["num_env_steps_sampled_lifetime"])
        returns = result["env_runners"].get("finished_returns")
        # NaN instead of an empty list when no episode ended.
        for episode_return in returns if isinstance(returns, list) else ():
            run.episode(episode_return, frames)
        run.iteration(frames)


def greedy(algorithm: Algorithm) -> cartpole.Act:
    module = algorithm.get_module()

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        return module.forward_inference({"obs": torch.from_numpy(obs)})["action_dist_inputs"].argmax(-1).numpy()

    return act


def cartpole_run(args: Args) -> None:
    if args.mode == "tuned":
        shown = {
            **TUNED_TRAINING,
            "model": "one linear layer of 32, shared",
            "runners": RUNNERS,
            "envs_per_runner": TUNED_ENVS_PER_RUNNER,
            "source": "rllib/examples/algorithms/ppo/cartpole_ppo.py",
        }
        config = base_config(args, TUNED_ENVS_PER_RUNNER).training(**TUNED_TRAINING).rl_module(model_config=TUNED_MODEL)
    else:
        shown = describe(settings.CARTPOLE, runners=RUNNERS, adam_eps=1e-8, env="gymnasium CartPoleVectorEnv")
        config = equal_config(args, settings.CARTPOLE, EQUAL_MODEL).env_runners(gym_env_vectorize_mode="vector_entry_point")
    run = Run("rllib", args, shown)
    with local_ray():
        algorithm = config.environment("CartPole-v1").build_algo()
        train(algorithm, run)
        run.finish(lambda: cartpole.evaluate(greedy(algorithm)))
        algorithm.stop()


def pong_run(args: Args) -> None:
    ppo = settings.PONG
    run = Run("rllib", args, describe(ppo, runners=RUNNERS, adam_eps=1e-8, env="wrap_atari_for_new_api_stack"))
    with local_ray():
        register_env(PONG, make_pong)
        algorithm = equal_config(args, ppo, NATURE_CNN).environment(PONG, clip_rewards=True).build_algo()
        train(algorithm, run)
        run.finish()
        algorithm.stop()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.task == "cartpole":
        cartpole_run(args)
    else:
        pong_run(args)


if __name__ == "__main__":
    main()
