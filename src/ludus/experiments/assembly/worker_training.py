"""Experiments whose environments are stepped by other processes: `num_workers: N`. The same learner and the same run."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from ludus.algorithms.base import Algorithm
from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Trainer
from ludus.buffers.block_batches import BlockBatches
from ludus.config.schema import AlgorithmConfig
from ludus.core.metrics import Sink
from ludus.core.tree import Array
from ludus.core.types import DEFAULT_MODEL
from ludus.distributed.code_bundle import Luggage
from ludus.distributed.ray_nodes import RayNodes
from ludus.distributed.sampling_pool import LocalNode, Nodes, Plan, Sampling, ThisNode
from ludus.envs.vector_env import make_environments
from ludus.envs.wrappers import wrapper_names
from ludus.errors import ConfigError
from ludus.experiments.assembly import byte_scales
from ludus.experiments.assembly.byte_scales import Scales
from ludus.experiments.assembly.components import (
    ClusterOptions,
    Resolved,
    count_on,
    embedding_bound,
    make_algorithm,
    make_conductor,
    make_policy,
    make_pool,
    opened,
    share,
    timesteps_of,
    whole_episodes,
)
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.program import Handle, Program
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import make_evaluation
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.process.workers.supervisor import Restart
from ludus.ray_cluster.cluster import Cluster
from ludus.sampling.sampler import VersionClock, segment_spec
from ludus.transport.base import Batches
from ludus.transport.message_stream import EMBEDDED, MAX_MESSAGE
from ludus.transport.shared_memory import Layout

if TYPE_CHECKING:
    from ludus.distributed.redis.learner import Fleet, FleetBatches

_STEADY_S = 1.0
"""A worker that has sampled for so long is replaced at once when it dies, however often that was before."""

_AHEAD: Mapping[str, int | None] = {"sync": 0, "pipelined": 1, "async": None}


@dataclass
class Shape:
    """What the environments of a worker are like."""

    num: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    masked: bool
    same_step_autoreset: bool
    results: tuple[str, ...] = ()


def program_of(
    resolved: Resolved,
    open_run: Callable[[], Run],
    before: Checkpoint | None,
    sinks: Sequence[Sink],
    environment_seed: int,
    counting_on: bool,
    interrupted: Callable[[], bool],
    announce: Callable[[str], None] | None = None,
) -> tuple[Program, tuple[Handle, ...]]:
    """Which components such a run has and how they are joined. The cluster comes first: it may not be there."""
    e, config = resolved.experiment, resolved.config
    program = Program()
    clock = program.add("clock", RunClock, e.stop.time_s)
    stop = program.add("stop", StopCheck, interrupted, clock)
    cluster = program.add("cluster", _cluster, resolved.cluster, announce)
    shape = program.add("shape", look_at, e.env, config, stop)
    scales = program.add("scales", _scales, shape, e.env, config, before, announce)
    policy = program.add("policy", _policy, shape, config, scales, before)
    program.add("memory check", check_memory, resolved, policy)
    algorithm = program.add("algorithm", make_algorithm, resolved.algorithm, policy, config, before)
    run = program.add("run", opened, open_run, policy, config)
    learning = program.add("learning", share, algorithm, policy, config, run)
    pool = program.add("pool", make_pool, run, before if counting_on else None)
    program.add("versions", _add_model, pool, policy, before)
    begun = timesteps_of(before if counting_on else None)
    if e.memory == EMBEDDED:
        plan = program.add("plan", _plan, e.env, config, shape, policy, pool, run, environment_seed, begun)
        sampling = program.add_worker("sampling", _sampling, plan, config.workers, pool, run, cluster, announce)
        batches = program.add("batches", make_batches, sampling, pool, config)
    else:
        given = (resolved, shape, policy, pool, run, before, begun, announce)
        sampling = program.add_worker("sampling", _fleet, *given)
        batches = program.add("batches", _fleet_batches, sampling)
    publisher = program.add("publisher", PublishingPool, pool, sampling)
    whole = program.add("whole", whole_episodes, batches, config)
    smoothing = config.metrics_num_episodes_for_smoothing
    trainer = program.add_worker("trainer", _trainer, learning, whole, publisher, smoothing, clock)
    program.add("counters", count_on, before if counting_on else None, trainer, sampling)
    evaluation = program.add("evaluation", make_evaluation, resolved, policy, run, stop, announce)
    conductor = program.add_worker("conductor", make_conductor, trainer, sampling, pool, run, resolved, evaluation, sinks)
    return program, (run, sampling, trainer, conductor, pool)


def look_at(env: str, config: AlgorithmConfig, stop: StopCheck | None = None) -> Shape:
    """Make one environment and reset it: only then does it show whether it masks actions. Raises Interrupted."""
    with contextlib.nullcontext() if stop is None else stop.interruptible():
        one = make_environments(env, 1, config.env_config, preprocess=config.preprocess, wrappers=config.wrappers)
        try:
            one.reset(config.seed)
            spaces = one.observation_space, one.action_space
            return Shape(config.num_envs_per_worker, *spaces, one.masked, one.same_step_autoreset, one.results)
        finally:
            one.close()


def blocks_of(config: AlgorithmConfig) -> int:
    """Blocks of workers that one update learns from."""
    if config.sampling != "async":
        return config.workers
    return 1 if config.replays else config.train_batch_size // (config.num_envs_per_worker * config.steps)


def make_clock(config: AlgorithmConfig, first_version: int, begun: int) -> VersionClock:
    """An algorithm that replays draws `train_batch_size` from its store; time passes with what was sampled for the update."""
    return VersionClock(first_version, begun, blocks_of(config) * config.num_envs_per_worker * config.steps)


def _scales(
    shape: Shape, env: str, config: AlgorithmConfig, before: Checkpoint | None, announce: Callable[[str], None] | None
) -> Scales:
    look = functools.partial(byte_scales.largest_seen, env, config)
    return byte_scales.choose(shape.observation_space, config, look, before, announce)


def _policy(shape: Shape, config: AlgorithmConfig, scales: Scales, before: Checkpoint | None = None) -> Policy:
    return make_policy(shape.observation_space, shape.action_space, config, scales, embed_above=embedding_bound(before))


def _add_model(pool: LocalVersionStore, policy: Policy, before: Checkpoint | None) -> None:
    pool.add(DEFAULT_MODEL, policy, above=before.state["models"][DEFAULT_MODEL]["version"] if before else 0)


def make_plan(
    env: str, config: AlgorithmConfig, shape: Shape, policy: Policy, first_version: int, seed: int, begun: int = 0, run: str = ""
) -> Plan:
    """`begun`: timesteps of earlier parts of the run. `run`: its directory."""
    return Plan(
        env=env,
        env_config=config.env_config,
        preprocess=config.preprocess,
        wrappers=config.wrappers,
        num_envs=shape.num,
        description=policy.description(),
        spec=segment_spec(policy, shape, config.steps),
        seed=seed,
        first_version=first_version,
        ahead=_AHEAD[config.sampling],
        slots=config.blocks_ahead,
        hang_s=config.worker_hang_s,
        restart=Restart(config.max_worker_restarts, config.worker_restart_backoff_s, steady_s=_STEADY_S),
        forgiving=config.restart_failed_sub_environments,
        explore=config.explore,
        device=config.inference_device,
        self_play=config.self_play,
        run=run,
        clock=make_clock(config, first_version, begun),
        luggage=Luggage.of(env, *wrapper_names(config.wrappers), models=[config.model.custom_model]),
    )


def _plan(
    env: str, config: AlgorithmConfig, shape: Shape, policy: Policy, pool: LocalVersionStore, run: Run, seed: int, begun: int
) -> Plan:  # fmt: skip
    return make_plan(env, config, shape, policy, pool.newest(DEFAULT_MODEL)[1], seed, begun, str(run.directory.absolute()))


def _cluster(options: ClusterOptions | None, announce: Callable[[str], None] | None) -> Cluster | None:
    if options is None:
        return None
    return Cluster(options.address, num_cpus=options.num_cpus, object_store_memory=options.object_store_memory, announce=announce)


def _sampling(
    plan: Plan, workers: int, pool: LocalVersionStore, run: Run, cluster: Cluster | None, announce: Callable[[str], None] | None
) -> Sampling:
    logs = run.directory / "logs" / "sampler"
    if announce is not None:
        announce(f"starting {workers} workers …" if workers > 1 else "starting 1 worker …")

    def nodes(bell: Path) -> Nodes:
        if cluster is not None:
            return RayNodes(cluster, plan, bell, log_dir=logs, announce=announce)
        return ThisNode(LocalNode(plan, bell, log_dir=logs))

    return Sampling(nodes, workers, lambda: _newest(pool))


def _newest(pool: LocalVersionStore) -> tuple[int, Mapping[str, Array]]:
    """The newest version and its weights as they are, not a copy: whoever keeps them copies them."""
    policy, version = pool.newest(DEFAULT_MODEL)
    return version, {name: tensor.detach().cpu().numpy() for name, tensor in policy.state_dict().items()}


def make_batches(sampling: Sampling, pool: LocalVersionStore, config: AlgorithmConfig) -> BlockBatches:
    sampling.batches = BlockBatches(
        sampling,
        config.workers,
        blocks_of(config),
        in_turn=config.sampling != "async",
        newest=lambda: pool.newest(DEFAULT_MODEL)[1],
        max_lag=config.max_lag,
    )
    return sampling.batches


def _fleet(
    resolved: Resolved,
    shape: Shape,
    policy: Policy,
    pool: LocalVersionStore,
    run: Run,
    before: Checkpoint | None,
    begun: int,
    announce: Callable[[str], None] | None,
) -> Fleet:
    """Workers that bring their segments by themselves, from wherever they are."""
    from ludus.buffers.segment_validation import SegmentValidator  # the others start without them
    from ludus.distributed.redis.learner import Fleet, channel_of
    from ludus.distributed.redis.messages import Orders

    e, config = resolved.experiment, resolved.config
    in_turn = config.sampling != "async"
    layout = Layout(segment_spec(policy, shape, config.steps), shape.num)
    if layout.nbytes > MAX_MESSAGE:
        raise ConfigError(
            f"A segment of {shape.num} environments × {config.steps} steps has {layout.nbytes >> 20} MB, and a message may have "
            f"{MAX_MESSAGE >> 20}.",
            "Use fewer num_envs_per_worker, or a shorter rollout_fragment_length.",
        )
    blocks = blocks_of(config)
    orders = Orders(
        channel=channel_of(run.store, uuid.uuid4().hex[:16]),
        room=max(4, 2 * blocks, config.workers * config.blocks_ahead),
        env=e.env,
        env_config=config.env_config,
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
    clock = make_clock(config, pool.newest(DEFAULT_MODEL)[1], begun)
    return Fleet(
        e.memory,
        run.store,
        orders,
        pool.incarnation(DEFAULT_MODEL),
        inspect=SegmentValidator(shape.observation_space, shape.action_space, layout.spec).find_error,
        layout=layout,
        blocks=blocks,
        max_age=0 if in_turn and not config.replays else config.max_lag,
        resumed=before.state["models"][DEFAULT_MODEL]["version"] if before else None,
        latest=lambda: _newest(pool),
        finished=lambda: run.status == "finished",
        confirm=pool.confirm,
        timesteps=clock.timesteps,
        announce=announce,
    )


def _fleet_batches(fleet: Fleet) -> FleetBatches:
    return fleet.batches


class PublishingPool:
    """The pool of the run, whose versions also reach the workers."""

    def __init__(self, pool: LocalVersionStore, sampling: Sampling | Fleet) -> None:
        self._pool, self._sampling = pool, sampling

    def newest(self, name: str) -> tuple[Policy, int]:
        return self._pool.newest(name)

    def publish(self, name: str) -> int:
        version = self._pool.publish(name)
        self._sampling.publish(*_newest(self._pool))
        return version


def _trainer(algorithm: Algorithm, batches: Batches, pool: PublishingPool, smoothing: int, clock: RunClock) -> Trainer:
    return Trainer({DEFAULT_MODEL: algorithm}, batches, pool, smoothing=smoothing, clock=clock)
