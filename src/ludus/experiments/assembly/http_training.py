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
from ludus.experiments.assembly.components import (
    ComponentStack,
    PreparedRun,
    RunHooks,
    TrainingComponents,
    add_controller,
)
from ludus.experiments.assembly.learners import open_learning_run
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.policies import make_run_policy
from ludus.experiments.runs.run_dir import Run
from ludus.experiments.validation.game_seats import GameSeats, seats_of
from ludus.gateway.http_connection import HttpLimits
from ludus.gateway.inline_source import InlineGatewaySource, NotifyingMemory
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.gateway.worker_policies import WorkerSelfPlay
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.protocol.spec import read_token
from ludus.sampling.league_sessions import make_match_opponents
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
    policies = {
        name: make_run_policy(*spaces, config, before, look=None, announce=hooks.announce, model=name)
        for name, spaces in seats.models.items()
    }
    check_memory(resolved, policies)

    learning = open_learning_run(prepared, policies, stack)
    pool = learning.pool

    games: InlineGatewaySource | GatewaySource
    publisher: Publisher
    if config.workers:
        games, memory, publisher = _start_gateway_workers(listening, external, seats, config, policies, pool, learning.run, stack)
    else:
        games, memory = _start_gateway(listening, external, seats, config, policies, pool, learning.run, stack)
        publisher = pool

    trainer = Trainer(learning.algorithms, memory, publisher, smoothing=config.metrics_num_episodes_for_smoothing, clock=clock)
    return add_controller(prepared, hooks, stack, learning, games, trainer)


def gateway_settings(config: ExternalConfig, seats: GameSeats) -> GatewaySettings:
    return GatewaySettings(
        http=HttpLimits(body_bytes=config.max_body_bytes),
        sessions=SessionLimits(sessions=config.max_sessions, tick_s=config.tick_timeout_s, silent_s=config.silent_s),
        token=read_token(config.token_file),
        spec=seats.spec(),
    )


def _start_gateway(
    listening: socket.socket,
    external: ExternalConfig,
    seats: GameSeats,
    config: AlgorithmConfig,
    policies: dict[str, Policy],
    pool: LocalVersionStore,
    run: Run,
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
    opponents = None
    if config.self_play.opponents is not None:
        (model,) = policies
        drawn = make_match_opponents(
            config.self_play,
            acting[model],
            pool.source(model),
            config.seed,
            seats=list(seats.seats),
            model=model,
            run=run.directory,
            deterministic=not config.explore,
        )
        opponents = config.self_play, drawn
    settings = gateway_settings(external, seats)
    return stack.own(InlineGatewaySource(listening, settings, seats.seats, acting, memories, memory, opponents)), memory


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
    from ludus.distributed.gateway_source import GatewaySharedMemory, GatewaySource
    from ludus.distributed.publishing_pool import PublishingPool

    shared = stack.own(GatewaySharedMemory(policies, config.steps, _BATCHES_AHEAD * config.train_batch_size))
    for name in pool.names():
        shared.publish(name, pool.newest(name)[1])
    memory = stack.own(CollatedBatches([shared.memory.of(name) for name in policies], config.train_batch_size))
    settings, logs = gateway_settings(external, seats), run.directory / "logs" / "actor"
    given = (listening, settings, seats.seats, config.workers, shared, memory, logs)
    self_play = None
    if config.self_play.opponents is not None:
        self_play = WorkerSelfPlay(config.self_play, config.seed, str(run.directory), config.workers)
    return (
        stack.own(GatewaySource(*given, explore=config.explore, self_play=self_play)),
        memory,
        PublishingPool(pool, shared.publish),
    )
