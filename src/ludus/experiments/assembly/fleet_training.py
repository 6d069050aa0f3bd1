"""Training with a fleet (`memory: redis://…`): workers started elsewhere deliver their segments through a message stream."""

from __future__ import annotations

import uuid

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.buffers.segment_validation import SegmentValidator
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.publishing_pool import PublishingPool
from ludus.distributed.redis.learner import BatchSettings, FleetRun, PublishedWeights, RedisFleet, channel_of
from ludus.distributed.redis.messages import WorkerSpec
from ludus.envs.vector_env import training_env_config
from ludus.errors import ConfigError
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
    whole_episodes,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.worker_training import (
    EnvironmentShape,
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
from ludus.models.weights.version_store import LocalVersionStore
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

    fleet = stack.own(_make_fleet(prepared, hooks, shape, policy, pool, run))
    trainer = Trainer(
        learning.algorithms,
        whole_episodes(fleet.batches, config),
        PublishingPool(pool, lambda name, version: fleet.publish(*newest_weights(pool))),
        smoothing=config.metrics_num_episodes_for_smoothing,
        clock=clock,
    )
    evaluation = make_evaluation(resolved, policy, run, stop, hooks.announce)
    return add_controller(prepared, hooks, stack, learning, fleet, trainer, evaluation)


def _make_fleet(
    prepared: PreparedRun, hooks: RunHooks, shape: EnvironmentShape, policy: Policy, pool: LocalVersionStore, run: Run
) -> RedisFleet:
    resolved, before = prepared.resolved, prepared.before
    e, config = resolved.experiment, resolved.config
    in_turn = config.sampling != "async"
    layout = BlockLayout(segment_spec(policy, shape, config.steps), shape.num)
    if layout.nbytes > MAX_MESSAGE:
        raise ConfigError(
            f"A segment of {shape.num} environments × {config.steps} steps has {layout.nbytes >> 20} MB, and a message may have "
            f"{MAX_MESSAGE >> 20}.",
            "Use fewer num_envs_per_worker, or a shorter rollout_fragment_length.",
        )
    blocks = blocks_of(config)
    spec = WorkerSpec(
        channel=channel_of(run.store, uuid.uuid4().hex[:16]),
        room=max(4, 2 * blocks, config.workers * config.blocks_ahead),
        env=e.env,
        env_config=training_env_config(e.env, config.env_config, config.self_play),
        preprocess=config.preprocess.model_dump(mode="json"),
        wrappers=tuple(config.wrappers),
        num_envs=shape.num,
        steps=config.steps,
        description=policy.description(),
        masked=shape.masked,
        seed=config.seed,
        in_turn=in_turn,
        explore=config.explore,
        forgiving=config.restart_failed_sub_environments,
        device=config.inference_device,
        self_play=config.self_play.model_dump(mode="json"),
    )
    clock = make_clock(config, pool.newest(DEFAULT_MODEL)[1], prepared.timesteps)
    return RedisFleet(
        e.memory,
        spec,
        FleetRun(run.store, pool.incarnation(DEFAULT_MODEL), lambda: run.status == "finished", pool.confirm),
        PublishedWeights(
            lambda: newest_weights(pool),
            resumed=before.state["models"][DEFAULT_MODEL]["version"] if before else None,
            timesteps=clock.timesteps,
        ),
        BatchSettings(
            layout,
            blocks,
            max_age=0 if in_turn and not config.replays else config.max_lag,
            inspect=SegmentValidator(shape.observation_space, shape.action_space, layout.spec).find_error,
        ),
        announce=hooks.announce,
    )
