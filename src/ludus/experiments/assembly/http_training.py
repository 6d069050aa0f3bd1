"""Training from games that call this run over HTTP (`env: external`), by a gateway in this process or in gateway workers."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Publisher, Trainer
from ludus.buffers.collate import CollatedBatches
from ludus.config.schema import AlgorithmConfig, ExternalConfig
from ludus.config.validation import parse_external_config
from ludus.distributed.gateway_workers import bind, check_exposure
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
)
from ludus.experiments.assembly.learners import distribute_all, make_algorithms
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import embedding_bound, make_policy
from ludus.experiments.runs.run_dir import Run
from ludus.experiments.validation.game_seats import GameSeats, seats_of
from ludus.gateway.http_connection import HttpLimits
from ludus.gateway.inline_source import InlineGatewaySource, NotifyingMemory
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.protocol.spec import read_token
from ludus.sampling.segment_recorder import session_spec

if TYPE_CHECKING:
    from ludus.distributed.gateway_source import GatewaySource

_BATCHES_AHEAD = 4
"""Batches that may wait for the learner; also bounds how many sessions record at a time."""

_LEAST_BLOCKS = 1024
"""A session holds a block while it records, even for a few steps: room for many short ones."""


def assemble_http(prepared: PreparedRun, hooks: RunHooks, stack: ComponentStack) -> TrainingComponents:
    """Make the components of a run that learns from games that connect to it."""
    resolved, before = prepared.resolved, prepared.before
    config = resolved.config
    external = parse_external_config(config.env_config)
    seats = seats_of(external)
    clock = RunClock(resolved.experiment.stop.time_s)

    check_exposure(external.host, read_token(external.token_file))
    listening = stack.own(bind(external.host, external.port))  # first: the port may be in use
    policies = _make_policies(seats, prepared, hooks)
    check_memory(resolved, policies)

    each = dict.fromkeys(policies, config)
    algorithms = make_algorithms(resolved.algorithm, policies, each, before, stack)
    run = stack.own(open_run(prepared, next(iter(policies.values()))))
    algorithms = distribute_all(algorithms, policies, each, run, stack)
    pool = make_pool(run, policies, prepared, stack)

    games: InlineGatewaySource | GatewaySource
    publisher: Publisher
    if config.workers:
        games, memory, publisher = _start_gateway_workers(listening, external, seats, config, policies, pool, run, stack)
    else:
        games, memory = _start_gateway(listening, external, seats, config, policies, pool, stack)
        publisher = pool

    trainer = Trainer(algorithms, memory, publisher, smoothing=config.metrics_num_episodes_for_smoothing, clock=clock)
    restore_counters(prepared, trainer, games)
    controller = stack.own(make_controller(prepared, run, pool, games, trainer, None, hooks.sinks))
    return TrainingComponents(run, pool, games, trainer, controller)


def gateway_settings(config: ExternalConfig, seats: GameSeats) -> GatewaySettings:
    return GatewaySettings(
        http=HttpLimits(body_bytes=config.max_body_bytes),
        sessions=SessionLimits(sessions=config.max_sessions, tick_s=config.tick_timeout_s, silent_s=config.silent_s),
        token=read_token(config.token_file),
        spec=seats.spec(),
    )


def _make_policies(seats: GameSeats, prepared: PreparedRun, hooks: RunHooks) -> dict[str, Policy]:
    config, before = prepared.resolved.config, prepared.before
    policies = {}
    for name, (observation_space, action_space) in seats.models.items():
        scales = byte_scales.choose(observation_space, config, None, before, hooks.announce, name)
        bound = embedding_bound(before, name)
        policies[name] = make_policy(observation_space, action_space, config, scales, embed_above=bound)
    return policies


def _start_gateway(
    listening: socket.socket,
    external: ExternalConfig,
    seats: GameSeats,
    config: AlgorithmConfig,
    policies: dict[str, Policy],
    pool: LocalVersionStore,
    stack: ComponentStack,
) -> tuple[InlineGatewaySource, CollatedBatches]:
    """A gateway in this process, which pauses while the learner computes."""
    blocks = max(_LEAST_BLOCKS, _BATCHES_AHEAD * config.train_batch_size)
    memories = {name: NotifyingMemory(session_spec(policy, config.steps, name), 1, blocks) for name, policy in policies.items()}
    memory = stack.own(CollatedBatches(list(memories.values()), config.train_batch_size))
    acting = {
        name: BatchedPolicy(pool.source(name), seed=config.seed + number, deterministic=not config.explore)
        for number, name in enumerate(policies)
    }
    return stack.own(
        InlineGatewaySource(listening, gateway_settings(external, seats), seats.seats, acting, memories, memory)
    ), memory


def _start_gateway_workers(
    listening: socket.socket,
    external: ExternalConfig,
    seats: GameSeats,
    config: AlgorithmConfig,
    policies: dict[str, Policy],
    pool: LocalVersionStore,
    run: Run,
    stack: ComponentStack,
) -> tuple[GatewaySource, CollatedBatches, Publisher]:
    """Gateways in `num_workers` processes, which serve games while the learner computes."""
    from ludus.distributed.gateway_source import GatewayBoards, GatewaySource
    from ludus.distributed.publishing_pool import PublishingPool

    boards = stack.own(GatewayBoards(policies, config.steps, _BATCHES_AHEAD * config.train_batch_size))
    for name in pool.names():
        boards.publish(name, pool.newest(name)[1])
    memory = stack.own(CollatedBatches([boards.memory.of(name) for name in policies], config.train_batch_size))
    settings, logs = gateway_settings(external, seats), run.directory / "logs" / "actor"
    given = (listening, settings, seats.seats, config.workers, boards, memory, logs)
    return stack.own(GatewaySource(*given, explore=config.explore)), memory, PublishingPool(pool, boards.publish)
