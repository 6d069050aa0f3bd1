"""Experiments whose games call us: `env: external`. The same learner and the same run; experience comes over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from ludus.algorithms.base import Algorithm
from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Publisher, Trainer
from ludus.buffers.collate import Collated
from ludus.config.schema import GAMECORE, AlgorithmConfig, ExternalConfig
from ludus.config.validation import parse_external_config
from ludus.core import spaces
from ludus.core.metrics import Sink
from ludus.distributed.gateway_source import Boards, FleetGathering, PublishingPool
from ludus.distributed.gateway_workers import bind, check_exposure
from ludus.errors import ConfigError
from ludus.experiments.assembly import byte_scales
from ludus.experiments.assembly.components import (
    Resolved,
    count_on,
    embedding_bound,
    make_algorithm,
    make_conductor,
    make_policy,
    make_pool,
    opened,
    share,
)
from ludus.experiments.assembly.memory_estimate import check_memory
from ludus.experiments.assembly.program import Handle, Program
from ludus.experiments.runs.checkpoint import Checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.gateway.http_connection import HttpLimits
from ludus.gateway.inline_source import Gathering, WatchedMemory
from ludus.gateway.server import GatewaySettings
from ludus.gateway.sessions import SessionLimits
from ludus.models.inference.batched_policy import Deciding
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalPool
from ludus.protocol.spec import read_token
from ludus.sampling.segment_recorder import session_spec

_BATCHES_AHEAD = 4  # what is waiting to be learned from, at most; also bounds how many sessions record at a time


@dataclass(frozen=True)
class GameSeats:
    """The seats of a game, and the models that play them."""

    models: Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]]
    seats: Mapping[str, str]

    def spec(self) -> dict[str, Any]:
        """What `GET /spec` says."""
        shown = {
            name: {"observation_space": spaces.to_json(seen), "action_space": spaces.to_json(done)}
            for name, (seen, done) in ((seat, self.models[model]) for seat, model in self.seats.items())
        }
        return shown[""] if set(shown) == {""} else {"seats": shown}


def only_model_seats(experiment: Mapping[str, Any], model: str) -> dict[str, str]:
    """Seat → model, of an experiment with a single one: by the names of its `env_config` if its matches run on a gamecore server."""
    declared = (experiment["config"].get("env_config") or {}).get("seats") if experiment["env"] == GAMECORE else None
    return dict.fromkeys(declared or ("",), model)


def seats_of(config: ExternalConfig) -> GameSeats:
    """Raises ConfigError when a space is none, or seats of one model differ."""
    models: dict[str, tuple[gym.Space[Any], gym.Space[Any]]] = {}
    seats: dict[str, str] = {}
    for name, seat in config.all_seats().items():
        both = (spaces.from_json(seat.observation_space), spaces.from_json(seat.action_space))
        spaces.array_spec(both[0])
        if spaces.split_mask(both[0])[1] is not None:
            raise ConfigError(
                f"The observation_space of {f'seat {name!r}' if name else 'the game'} holds {spaces.ACTION_MASK!r}.",
                "Leave it out: every game may send action_mask, beside the observation.",
            )
        if models.setdefault(seat.model, both) != both:
            raise ConfigError(f"Seat {name!r} has other spaces than the rest of model {seat.model!r}.", "Give it its own model.")
        seats[name] = seat.model
    return GameSeats(models, seats)


def settings_of(config: ExternalConfig, seats: GameSeats) -> GatewaySettings:
    return GatewaySettings(
        http=HttpLimits(body_bytes=config.max_body_bytes),
        sessions=SessionLimits(sessions=config.max_sessions, tick_s=config.tick_timeout_s, silent_s=config.silent_s),
        token=read_token(config.token_file),
        spec=seats.spec(),
    )


def program_of(
    resolved: Resolved,
    open_run: Callable[[], Run],
    before: Checkpoint | None,
    sinks: Sequence[Sink],
    counting_on: bool,
    announce: Callable[[str], None] | None = None,
) -> tuple[Program, tuple[Handle, ...]]:
    """Which components such a run has and how they are joined. The port is taken first: it may not be free."""
    config = resolved.config
    outside = parse_external_config(config.env_config)
    seats = seats_of(outside)
    program = Program()
    clock = program.add("clock", RunClock, resolved.experiment.stop.time_s)
    listening = program.add("listening", _listening, outside)
    policies = program.add("policies", _policies, seats, config, before, announce)
    program.add("memory check", check_memory, resolved, policies)
    algorithms = program.add("algorithms", Algorithms, resolved.algorithm, policies, dict.fromkeys(seats.models, config), before)
    run = program.add("run", _opened, open_run, policies, config)
    learning = program.add("learning", Shared, algorithms, policies, dict.fromkeys(seats.models, config), run)
    pool = program.add("pool", make_pool, run, before if counting_on else None)
    program.add("versions", add_models, pool, policies, before)
    if config.workers:
        boards = program.add("boards", _boards, policies, config)
        publisher = program.add("publisher", PublishingPool, pool, boards)
        memory = program.add("memory", _stream, boards, policies, config.train_batch_size)
        games = program.add_worker("games", _fleet, listening, outside, seats, config, boards, publisher, memory, run)
    else:
        memories = program.add("memories", _memories, policies, config)
        memory = program.add("memory", _memory, memories, config.train_batch_size)
        deciding = program.add("deciding", _deciding, pool, policies, config)
        games = program.add_worker("games", _games, listening, outside, seats, deciding, memories, memory)
        publisher = pool
    smoothing = config.metrics_num_episodes_for_smoothing
    trainer = program.add_worker("trainer", _trainer, learning, memory, publisher, smoothing, clock)
    program.add("counters", count_on, before if counting_on else None, trainer, games)
    conductor = program.add_worker("conductor", make_conductor, trainer, games, pool, run, resolved, None, sinks)
    return program, (run, games, trainer, conductor, pool)


def _listening(config: ExternalConfig) -> socket.socket:
    check_exposure(config.host, read_token(config.token_file))
    return bind(config.host, config.port)


def _policies(
    seats: GameSeats, config: AlgorithmConfig, before: Checkpoint | None, announce: Callable[[str], None] | None
) -> dict[str, Policy]:
    made = {}
    for name, (seen, done) in seats.models.items():
        scales = byte_scales.choose(seen, config, None, before, announce, name)
        made[name] = make_policy(seen, done, config, scales, embed_above=embedding_bound(before, name))
    return made


class _Closing(dict[str, Algorithm]):
    """By model; closed together."""

    def close(self) -> None:
        for algorithm in self.values():
            if hasattr(algorithm, "close"):
                algorithm.close()


class Algorithms(_Closing):
    """One for every model, each with the configuration of its own."""

    def __init__(
        self,
        kind: type[Algorithm],
        policies: Mapping[str, Policy],
        configs: Mapping[str, AlgorithmConfig],
        before: Checkpoint | None,
    ) -> None:
        super().__init__({name: make_algorithm(kind, policy, configs[name], before, name) for name, policy in policies.items()})


class Shared(_Closing):
    """The same on several learners each."""

    def __init__(
        self,
        algorithms: Algorithms,
        policies: Mapping[str, Policy],
        configs: Mapping[str, AlgorithmConfig],
        run: Run,
    ) -> None:
        super().__init__()
        try:
            for name, algorithm in algorithms.items():
                self[name] = share(algorithm, policies[name], configs[name], run, name)
        except BaseException:
            self.close()
            raise


def _opened(open_run: Callable[[], Run], policies: dict[str, Policy], config: AlgorithmConfig) -> Run:
    return opened(open_run, next(iter(policies.values())), config)


def _memories(policies: dict[str, Policy], config: AlgorithmConfig) -> dict[str, WatchedMemory]:
    """A session holds a block while it records, even for a few steps: room for many short ones."""
    blocks = max(1024, _BATCHES_AHEAD * config.train_batch_size)
    return {name: WatchedMemory(session_spec(policy, config.steps, name), 1, blocks) for name, policy in policies.items()}


def _memory(memories: dict[str, WatchedMemory], batch_steps: int) -> Collated:
    return Collated(list(memories.values()), batch_steps)


def add_models(pool: LocalPool, policies: dict[str, Policy], before: Checkpoint | None) -> None:
    for name, policy in policies.items():
        pool.add(name, policy, above=before.state["models"][name]["version"] if before else 0)


def _deciding(pool: LocalPool, policies: dict[str, Policy], config: AlgorithmConfig) -> dict[str, Deciding[Policy]]:
    return {
        name: Deciding(pool.source(name), seed=config.seed + number, deterministic=not config.explore)
        for number, name in enumerate(policies)
    }


def _boards(policies: dict[str, Policy], config: AlgorithmConfig) -> Boards:
    return Boards(policies, config.steps, _BATCHES_AHEAD * config.train_batch_size)


def _stream(boards: Boards, policies: dict[str, Policy], batch_steps: int) -> Collated:
    return Collated([boards.memory.of(name) for name in policies], batch_steps)


def _fleet(
    listening: socket.socket,
    outside: ExternalConfig,
    seats: GameSeats,
    config: AlgorithmConfig,
    boards: Boards,
    publisher: PublishingPool,
    memory: Collated,
    run: Run,
) -> FleetGathering:
    settings = settings_of(outside, seats)
    logs = run.directory / "logs" / "actor"
    given = (listening, settings, seats.seats, config.workers, config.steps, boards, publisher, memory, logs)
    return FleetGathering(*given, explore=config.explore)


def _games(
    listening: socket.socket,
    config: ExternalConfig,
    seats: GameSeats,
    deciding: dict[str, Deciding[Policy]],
    memories: dict[str, WatchedMemory],
    memory: Collated,
) -> Gathering:
    return Gathering(listening, settings_of(config, seats), seats.seats, deciding, memories, memory)


def _trainer(algorithms: dict[str, Algorithm], memory: Collated, pool: Publisher, smoothing: int, clock: RunClock) -> Trainer:
    return Trainer(algorithms, memory, pool, smoothing=smoothing, clock=clock)
