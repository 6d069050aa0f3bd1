"""Sample Factory's synchronous PPO (`equal`) and its asynchronous CartPole example (`tuned`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import cartpole
import gymnasium as gym
import numpy as np
import settings
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from report import Args, Run, describe, parse_args
from sample_factory.algo.learning.learner import Learner
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import EPISODIC, LEARNER_ENV_STEPS, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.actor_critic import create_actor_critic
from sample_factory.train import make_runner

CARTPOLE = "CartPole-v1"
BATCHED_CARTPOLE = "batched-cartpole"
PONG = "atari_pong"

# The command line at the top of sf_examples/train_gym_env.py.
TUNED: dict[str, Any] = {
    "use_rnn": False,
    "num_envs_per_worker": 20,
    "policy_workers_per_policy": 2,
    "recurrence": 1,
    "with_vtrace": False,
    "batch_size": 512,
    "reward_scale": 0.1,
    "save_every_sec": 10,
    "experiment_summaries_interval": 10,
}
TUNED_WORKERS = 2


class BatchedCartPole(gym.Env):
    """Gymnasium's vectorised CartPole as one environment with as many agents as copies."""

    is_multiagent = True

    def __init__(self, num_envs: int) -> None:
        self._envs = CartPoleVectorEnv(num_envs)
        self.num_agents = num_envs
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        obs, _ = self._envs.reset(seed=seed, options=options)
        return obs.astype(np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        obs, reward, terminated, truncated, _ = self._envs.step(np.asarray(action))
        return obs.astype(np.float32), reward, terminated, truncated, {}


def make_cartpole(_name: str, _cfg: Any = None, _env_config: Any = None, render_mode: str | None = None) -> gym.Env:
    return gym.make(CARTPOLE, render_mode=render_mode)


def make_batched(_name: str, _cfg: Any = None, _env_config: Any = None, render_mode: str | None = None) -> gym.Env:
    return BatchedCartPole(settings.CARTPOLE.envs)


def make_pong(_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gym.Env:
    import ale_py  # noqa: F401  registers the Atari environments
    from sf_examples.atari.atari_utils import make_atari_env

    return make_atari_env(PONG, cfg, env_config, render_mode)


class Watch(AlgoObserver):
    """Feeds the run from the runner's event loop and stops it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._frames = 0

    def on_start(self, runner: Runner) -> None:
        if not runner.cfg.async_rl:  # else its processes are only about to be made
            self._run.begin()

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        if self._run.over:
            # Checked right after the observers: the run has lasted longer than this.
            runner.cfg.train_for_seconds = -1

    def on_learned(self, _runner: Runner, message: dict[str, Any], _policy: int) -> None:
        """The learner reports its steps just after each training step."""
        self._run.begin()
        self._frames = message[LEARNER_ENV_STEPS]
        self._run.iteration(self._frames)
        if self._run.over:
            self._run.stop()

    def on_episode(self, _runner: Runner, message: dict[str, Any], _policy: int) -> None:
        for episode_return in np.atleast_1d(message[EPISODIC]["reward"]):
            self._run.episode(float(episode_return), self._frames)


def equal_arguments(ppo: settings.PPO) -> dict[str, Any]:
    return {
        "serial_mode": True,
        "async_rl": False,
        "num_workers": 1,
        "worker_num_splits": 1,
        "rollout": ppo.steps,
        "batch_size": ppo.minibatch,
        "num_batches_per_epoch": ppo.batch // ppo.minibatch,
        "num_epochs": ppo.epochs,
        "shuffle_minibatches": True,
        "learning_rate": ppo.lr,
        "gamma": ppo.gamma,
        "gae_lambda": ppo.gae_lambda,
        "ppo_clip_ratio": ppo.clip,
        "ppo_clip_value": 1e6,
        "exploration_loss": "entropy",
        "exploration_loss_coeff": ppo.ent_coef,
        "value_loss_coeff": ppo.vf_coef,
        "max_grad_norm": ppo.max_grad_norm,
        "adam_eps": ppo.adam_eps,
        "use_rnn": False,
        "recurrence": 1,
        "with_vtrace": False,
        "kl_loss_coeff": 0.0,
        "normalize_input": False,
        "normalize_returns": False,
        "value_bootstrap": True,
    }


def equal_cartpole() -> dict[str, Any]:
    return {
        **equal_arguments(settings.CARTPOLE),
        "env": BATCHED_CARTPOLE,
        "batched_sampling": True,
        "num_envs_per_worker": 1,
        "actor_critic_share_weights": False,
        "encoder_mlp_layers": [settings.HIDDEN] * 2,
        "nonlinearity": "tanh",
    }


def equal_pong() -> dict[str, Any]:
    return {
        **equal_arguments(settings.PONG),
        "env": PONG,
        "num_envs_per_worker": settings.PONG.envs,
        "encoder_conv_architecture": "convnet_atari",
        "encoder_conv_mlp_layers": [512],
        "nonlinearity": "relu",
        "obs_scale": 255.0,
        "env_frameskip": 4,
        "env_framestack": 4,
        # Counts agent steps; with frame skip it would report four times as many.
        "summaries_use_frameskip": False,
    }


def to_argv(arguments: dict[str, Any]) -> list[str]:
    argv = []
    for name, value in arguments.items():
        argv += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return argv


def make_cfg(arguments: dict[str, Any], args: Args, directory: str, extend: Sequence[Callable[[Any], Any]] = ()) -> Any:
    """`extend`: functions that add the arguments of an environment to the parser."""
    arguments = {
        **arguments,
        "algo": "APPO",
        "experiment": "bench",
        "train_dir": directory,
        "device": "cpu",
        "seed": args.seed,
        "train_for_env_steps": 10**10,
    }
    argv = to_argv(arguments)
    parser, _ = parse_sf_args(argv)
    for add in extend:
        add(parser)
    return parse_full_cfg(parser, argv)


def train(cfg: Any, run: Run) -> Runner:
    cfg, runner = make_runner(cfg)
    watch = Watch(run)
    runner.register_observer(watch)
    runner.register_episodic_stats_handler(watch.on_episode)
    runner.policy_msg_handlers[LEARNER_ENV_STEPS].append(watch.on_learned)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        raise RuntimeError(f"Sample Factory ended with status {status}")
    return runner


def greedy(runner: Runner) -> cartpole.Act:
    """The policy of the last checkpoint: outside serial mode the model lives in another process."""
    cfg, info = runner.cfg, runner.env_info
    model = create_actor_critic(cfg, info.obs_space, info.action_space)
    paths = Learner.get_checkpoints(Learner.checkpoint_dir(cfg, 0), "checkpoint_*")
    # Not Learner.load_checkpoint: it leaves weights_only at today's default, which rejects its own files.
    model.load_state_dict(torch.load(paths[-1], weights_only=False)["model"])
    model.eval()

    @torch.no_grad()
    def act(obs: np.ndarray) -> np.ndarray:
        normalized = model.normalize_obs({"obs": torch.from_numpy(obs)})
        return model(normalized, torch.zeros(len(obs), 1))["action_logits"].argmax(-1).numpy()

    return act


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    register_env(CARTPOLE, make_cartpole)
    register_env(BATCHED_CARTPOLE, make_batched)
    register_env(PONG, make_pong)
    if args.task == "pong":
        arguments = equal_pong()
        shown = describe(settings.PONG, env="make_atari_env, serial mode", network="convnet_atari, 512 units")
    elif args.mode == "equal":
        arguments = equal_cartpole()
        shown = describe(settings.CARTPOLE, env="gymnasium CartPoleVectorEnv, serial mode")
    else:
        arguments = {**TUNED, "env": CARTPOLE, "num_workers": TUNED_WORKERS}
        shown = {**TUNED, "num_workers": TUNED_WORKERS, "source": "sf_examples/train_gym_env.py"}
    run = Run("sample_factory", args, shown)
    with tempfile.TemporaryDirectory(prefix="sample-factory-") as directory:
        runner = train(make_cfg(arguments, args, directory), run)
        run.finish(None if args.task == "pong" else lambda: cartpole.evaluate(greedy(runner)))


if __name__ == "__main__":
    main()
