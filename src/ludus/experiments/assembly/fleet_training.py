"""Training with a fleet (`memory: redis://…`): workers started elsewhere deliver their segments through a message stream."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.buffers.segment_validation import SegmentValidator
from ludus.config.schema import AlgorithmConfig
from ludus.core.tree import Array
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.publishing_pool import PublishingPool
from ludus.distributed.redis.learner import BatchSettings, FleetRun, PublishedWeights, RedisFleet, channel_of
from ludus.distributed.redis.messages import WorkerSpec
from ludus.envs.vector_env import training_env_config
from ludus.errors import ConfigError
from ludus.experiments.assembly.components import (
    ComponentStack,
    LearningRun,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
    whole_episodes,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.worker_training import (
    blocks_of,
    make_clock,
    make_sampled_policy,
    newest_weights,
    probe_environment,
)
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import make_evaluation
from ludus.experiments.runs.run_dir import Run
from ludus.models.policy import Policy
from ludus.sampling.sampler import segment_spec
from ludus.transport.message_stream import MAX_MESSAGE
from ludus.transport.shared_memory import BlockLayout


def assemble_fleet(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of the learner of a fleet."""
    resolved = prepared.resolved
    e, config = resolved.experiment, resolved.config
    clock = RunClock(e.stop.time_s)
    stop = StopCheck(hooks.interrupted, clock)

    shape = probe_environment(e.env, config, stop)
    policy = make_sampled_policy(shape, prepared, hooks)

    learning = open_learning_run(prepared, {DEFAULT_MODEL: policy}, stack)
    run, pool = learning.run, learning.pool

    layout = BlockLayout(segment_spec(policy, shape, config.steps), shape.num)
    env_config = training_env_config(e.env, config.env_config, config.self_play)
    spec = replace(worker_spec(prepared, policy, run, blocks_of(config)), masked=shape.masked, env_config=env_config)
    validator = SegmentValidator(shape.observation_space, shape.action_space, layout.spec)
    blocks = BatchSettings(layout, blocks_of(config), max_block_age(config), validator.find_error)
    clock_of_versions = make_clock(config, pool.newest(DEFAULT_MODEL)[1], prepared.timesteps)
    fleet = stack.own(
        open_fleet(prepared, hooks, learning, spec, blocks, lambda: newest_weights(pool), clock_of_versions.timesteps)
    )
    trainer = Trainer(
        learning.algorithms,
        whole_episodes(fleet.batches, config),
        PublishingPool(pool, lambda name, version: fleet.publish(*newest_weights(pool))),
        smoothing=config.metrics_num_episodes_for_smoothing,
        clock=clock,
    )
    evaluation = make_evaluation(resolved, policy, run, stop, hooks.announce)
    return add_controller(prepared, hooks, stack, learning, fleet, trainer, evaluation)


def worker_spec(prepared: PreparedRun, policy: Policy, run: Run, blocks: int) -> WorkerSpec:
    """What the workers of the fleet are told. `blocks`: in a batch."""
    e, config = prepared.resolved.experiment, prepared.resolved.config
    return WorkerSpec(
        channel=channel_of(run.store, uuid.uuid4().hex[:16]),
        room=max(4, 2 * blocks, config.workers * config.blocks_ahead),
        env=e.env,
        env_config=config.env_config,
        preprocess=config.preprocess.model_dump(mode="json"),
        wrappers=tuple(config.wrappers),
        display=config.display,
        num_envs=config.num_envs_per_worker,
        steps=config.steps,
        description=policy.description(),
        masked=False,
        seed=config.seed,
        in_turn=config.sampling != "async",
        explore=config.explore,
        forgiving=config.restart_failed_sub_environments,
        device=config.inference_device,
        self_play=config.self_play.model_dump(mode="json"),
    )


def max_block_age(config: AlgorithmConfig) -> int | None:
    """Updates after which a block is too old to learn from."""
    return 0 if config.sampling != "async" and not config.replays else config.max_lag


def open_fleet(
    prepared: PreparedRun,
    hooks: RunHooks,
    learning: LearningRun,
    spec: WorkerSpec,
    blocks: BatchSettings,
    latest: Callable[[], tuple[int, Mapping[str, Array]]],
    timesteps: Callable[[int], int],
    more_metrics: Callable[[], dict[str, float]] = dict,
) -> RedisFleet:
    """`latest`: newest version and weights. `timesteps`: version → timesteps of training. Raises ConfigError if blocks are too large."""
    if blocks.layout.nbytes > MAX_MESSAGE:
        raise ConfigError(
            f"A segment of {spec.num_envs} environments × {spec.steps} steps has {blocks.layout.nbytes >> 20} MB, and a message may "
            f"have {MAX_MESSAGE >> 20}.",
            "Use fewer num_envs_per_worker, or a shorter rollout_fragment_length.",
        )
    run, pool, before = learning.run, learning.pool, prepared.before
    model = pool.names()[0]
    return RedisFleet(
        prepared.resolved.experiment.memory,
        spec,
        FleetRun(run.store, pool.incarnation(model), lambda: run.status == "finished", pool.confirm),
        PublishedWeights(latest, before.state["models"][model]["version"] if before else None, timesteps),
        blocks,
        announce=hooks.announce,
        more_metrics=more_metrics,
    )
