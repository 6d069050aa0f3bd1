"""RLlib from the start of its process to the end of its first training step, as a user's script does it. Prints one line then."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

# As in rllib_ppo.py: a private Ray on the loopback, that reports to nobody.
os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_FAILURE_SIGNAL_HANDLER="1")

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main(runners: int, envs: int, batch: int) -> None:
    directory = tempfile.mkdtemp(prefix="ray-")
    ray.init(
        address="local",
        num_cpus=runners + 1,
        include_dashboard=False,  # which would only make it slower
        object_store_memory=256 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=directory,
    )
    try:
        algorithm = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(
                num_env_runners=runners,
                num_envs_per_env_runner=envs,
                rollout_fragment_length=batch // (envs * max(1, runners)),
            )
            .learners(num_learners=0)
            .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False))
            .training(train_batch_size_per_learner=batch, minibatch_size=batch, num_epochs=1, lr=3e-4)
            .debugging(seed=0, log_level="ERROR")
            .build_algo()
        )
        algorithm.train()
        print(f"first step, ray {ray.__version__}", flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]))
