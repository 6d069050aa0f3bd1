"""Training in this process (`num_workers: 0`): sampler and learner take turns. Starts at once and is bit-reproducible."""

from __future__ import annotations

import functools

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.config.schema import AlgorithmConfig
from ludus.core.types import DEFAULT_MODEL
from ludus.envs.vector_env import Environments, make_environments
from ludus.experiments.assembly import byte_scales
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    make_controller,
    make_pool,
    open_run,
    restore_counters,
    whole_episodes,
)
from ludus.experiments.assembly.learners import distribute_learner, make_algorithm
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import embedding_bound, make_policy
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import make_evaluation
from ludus.models.devices import copy_for_acting, named_device
from ludus.sampling.sampler import Interruption, Sampler, VersionClock, segment_spec
from ludus.sampling.self_play import with_past_opponents
from ludus.transport.base import make_memory


def assemble_local(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run that samples and learns in turn, in this process."""
    resolved, before, seed = prepared.resolved, prepared.before, prepared.environment_seed
    e, config = resolved.experiment, resolved.config
    clock = RunClock(e.stop.time_s)
    stop = StopCheck(hooks.interrupted, clock)

    environments = stack.own(_reset_environments(e.env, config, seed, stop))

    look = functools.partial(byte_scales.largest_seen, e.env, config)
    scales = byte_scales.choose(environments.observation_space, config, look, before, hooks.announce)
    policy = make_policy(
        environments.observation_space, environments.action_space, config, scales, embed_above=embedding_bound(before)
    )
    policy = copy_for_acting(policy, named_device(config.inference_device, "inference_device"))
    check_memory(resolved, policy)

    algorithm = stack.own(make_algorithm(resolved.algorithm, policy, config, before))
    run = stack.own(open_run(prepared, policy))
    algorithm = distribute_learner(algorithm, policy, config, run, stack)
    pool = make_pool(run, {DEFAULT_MODEL: policy}, prepared, stack)

    # One block: sampling and learning alternate, as on-policy algorithms need it.
    memory = stack.own(make_memory("local", segment_spec(policy, environments, config.steps), environments.num, 1))
    newest = pool.source(DEFAULT_MODEL)
    source = with_past_opponents(environments, newest, config.self_play, seed, run.directory)
    steps = VersionClock(newest.newest()[1], prepared.timesteps, environments.num * config.steps)
    sampler = Sampler(
        environments, source, memory, seed,
        explore=config.explore, timesteps=steps.timesteps, interruption=Interruption(stop.before_step, stop.interruptible),
    )  # fmt: skip

    trainer = Trainer(
        {DEFAULT_MODEL: algorithm},
        whole_episodes(memory, config),
        pool,
        smoothing=config.metrics_num_episodes_for_smoothing,
        clock=clock,
    )
    restore_counters(prepared, trainer, sampler)
    evaluation = stack.own(make_evaluation(resolved, policy, run, stop, hooks.announce))
    controller = stack.own(make_controller(prepared, run, pool, sampler, trainer, evaluation, hooks.sinks))
    return TrainingComponents(run, pool, sampler, trainer, controller)


def _reset_environments(env: str, config: AlgorithmConfig, seed: int, stop: StopCheck) -> Environments:
    """Make and reset the environments: only a reset shows whether they mask actions. Raises Interrupted."""
    with stop.interruptible():
        environments = make_environments(
            env, config.num_envs_per_worker, config.env_config,
            preprocess=config.preprocess, wrappers=config.wrappers, forgiving=config.restart_failed_sub_environments,
            beat=stop.raise_if_due,
        )  # fmt: skip
        try:
            environments.reset(seed)
        except BaseException:
            environments.close()
            raise
    return environments
