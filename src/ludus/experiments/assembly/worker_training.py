"""Training with sampling workers (`num_workers: N`): processes of this machine, or of the nodes of a Ray cluster.

`sampling` sets how they alternate with the learner: sync (in turn), pipelined (one batch ahead) or async.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.buffers.block_batches import BlockBatches
from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.code_bundle import CodeBundle
from ludus.distributed.publishing_pool import PublishingPool
from ludus.distributed.sampling_plan import SamplingPlan
from ludus.distributed.sampling_pool import LocalNode, SamplingNodes, SamplingPool, SingleNode
from ludus.envs.vector_env import make_environments, training_env_config
from ludus.envs.wrappers import wrapper_names
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
    whole_episodes,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import make_run_policy, measure_largest_values
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import make_evaluation
from ludus.experiments.resolve import Announce, ClusterOptions
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.process.workers.supervisor import WorkerRestart
from ludus.sampling.sampler import VersionClock, segment_spec

_STEADY_S = 1.0
"""A worker that has sampled for this long is replaced at once when it dies, however often that happened before."""

BATCHES_AHEAD: Mapping[str, int | None] = {"sync": 0, "pipelined": 1, "async": None}


@dataclass
class EnvironmentShape:
    """Spaces and properties of the environments of one worker."""

    num: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    masked: bool
    same_step_autoreset: bool
    results: tuple[str, ...] = ()


def assemble_workers(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run whose environments are stepped by workers of this machine or of a Ray cluster."""
    resolved = prepared.resolved
    e, config = resolved.experiment, resolved.config
    clock = RunClock(e.stop.time_s)
    stop = StopCheck(hooks.interrupted, clock)

    connect = cluster_nodes(resolved.cluster, hooks.announce, stack)  # first: the cluster may be unreachable
    shape = probe_environment(e.env, config, stop)
    policy = make_sampled_policy(shape, prepared, hooks)

    learning = open_learning_run(prepared, {DEFAULT_MODEL: policy}, stack)
    run, pool = learning.run, learning.pool

    first_version = pool.newest(DEFAULT_MODEL)[1]
    directory = str(run.directory.absolute())
    plan = make_plan(e.env, config, shape, policy, first_version, prepared.environment_seed, prepared.timesteps, directory)
    logs = run.directory / "logs" / "sampler"
    if hooks.announce is not None:
        hooks.announce(f"starting {config.workers} workers …" if config.workers > 1 else "starting 1 worker …")
    sampling = stack.own(SamplingPool(lambda wakeup: connect(plan, wakeup, logs), config.workers, lambda: newest_weights(pool)))

    trainer = Trainer(
        learning.algorithms,
        whole_episodes(make_batches(sampling, pool, config), config),
        PublishingPool(pool, lambda name, version: sampling.publish(*newest_weights(pool))),
        smoothing=config.metrics_num_episodes_for_smoothing,
        clock=clock,
    )
    evaluation = make_evaluation(resolved, policy, run, stop, hooks.announce)
    return add_controller(prepared, hooks, stack, learning, sampling, trainer, evaluation)


def probe_environment(env: str, config: AlgorithmConfig, stop: StopCheck | None = None) -> EnvironmentShape:
    """Make and reset one environment: only a reset shows whether it masks actions. Raises Interrupted."""
    with contextlib.nullcontext() if stop is None else stop.interruptible():
        env_config = training_env_config(env, config.env_config, config.self_play)
        one = make_environments(env, 1, env_config, preprocess=config.preprocess, wrappers=config.wrappers)
        try:
            one.reset(config.seed)
            spaces = one.observation_space, one.action_space
            return EnvironmentShape(config.num_envs_per_worker, *spaces, one.masked, one.same_step_autoreset, one.results)
        finally:
            one.close()


def make_sampled_policy(shape: EnvironmentShape, prepared: PreparedRun, hooks: RunHooks) -> Policy:
    """The policy for environments that other processes step. Raises ConfigError when the run needs too much memory."""
    env, config, before = prepared.resolved.experiment.env, prepared.resolved.config, prepared.before
    spaces = shape.observation_space, shape.action_space
    policy = make_run_policy(*spaces, config, before, look=lambda: measure_largest_values(env, config), announce=hooks.announce)
    check_memory(prepared.resolved, policy)
    return policy


def blocks_of(config: AlgorithmConfig) -> int:
    """Blocks of workers that one update learns from."""
    if config.sampling != "async":
        return config.workers
    return 1 if config.replays else config.train_batch_size // (config.num_envs_per_worker * config.steps)


def make_clock(config: AlgorithmConfig, first_version: int, begun: int) -> VersionClock:
    """Counts the steps sampled for each update, also where an algorithm with replay learns from more."""
    return VersionClock(first_version, begun, blocks_of(config) * config.num_envs_per_worker * config.steps)


def make_plan(
    env: str,
    config: AlgorithmConfig,
    shape: EnvironmentShape,
    policy: Policy,
    first_version: int,
    seed: int,
    begun: int = 0,
    run: str = "",
) -> SamplingPlan:
    """What a worker has to know. `begun`: timesteps of earlier parts of the run. `run`: its directory."""
    return SamplingPlan(
        env=env,
        env_config=training_env_config(env, config.env_config, config.self_play),
        preprocess=config.preprocess,
        wrappers=config.wrappers,
        display=config.display,
        min_nodes=config.min_nodes,
        num_envs=shape.num,
        description=policy.description(),
        spec=segment_spec(policy, shape, config.steps),
        seed=seed,
        first_version=first_version,
        ahead=BATCHES_AHEAD[config.sampling],
        slots=config.blocks_ahead,
        hang_s=config.worker_hang_s,
        restart=worker_restart(config),
        forgiving=config.restart_failed_sub_environments,
        explore=config.explore,
        device=config.inference_device,
        self_play=config.self_play,
        run=run,
        clock=make_clock(config, first_version, begun),
        code_bundle=code_bundle_of(env, config),
    )


def worker_restart(config: AlgorithmConfig) -> WorkerRestart:
    return WorkerRestart(config.max_worker_restarts, config.worker_restart_backoff_s, steady_s=_STEADY_S)


def code_bundle_of(env: str, config: AlgorithmConfig) -> CodeBundle:
    """Code of the user's script that workers need."""
    return CodeBundle.of(env, *wrapper_names(config.wrappers), models=[config.model.custom_model])


def cluster_nodes(
    options: ClusterOptions | None, announce: Announce | None, stack: ComponentStack
) -> Callable[[SamplingPlan, Path, Path], SamplingNodes]:
    """Connect to the Ray cluster, if there is one. Returns the function that starts workers on its nodes, or on this machine."""
    if options is None:
        return lambda plan, wakeup, logs: SingleNode(LocalNode(plan, wakeup, log_dir=logs))
    from ludus.distributed.ray_nodes import RayNodes
    from ludus.ray_cluster.cluster import Cluster

    cluster = stack.own(
        Cluster(options.address, num_cpus=options.num_cpus, object_store_memory=options.object_store_memory, announce=announce)
    )
    return lambda plan, wakeup, logs: RayNodes(cluster, plan, wakeup, log_dir=logs, announce=announce)


def newest_weights(pool: LocalVersionStore, model: str = DEFAULT_MODEL) -> tuple[int, Mapping[str, Array]]:
    """The newest version and its weights, not copied: the next update changes them."""
    policy, version = pool.newest(model)
    return version, {name: tensor.detach().cpu().numpy() for name, tensor in policy.state_dict().items()}


def make_batches(sampling: SamplingPool, pool: LocalVersionStore, config: AlgorithmConfig) -> BlockBatches:
    sampling.batches = BlockBatches(
        sampling,
        config.workers,
        blocks_of(config),
        in_turn=config.sampling != "async",
        newest=lambda: pool.newest(DEFAULT_MODEL)[1],
        max_lag=config.max_lag,
    )
    return sampling.batches
