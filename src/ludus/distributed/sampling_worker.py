"""Programs of sampling workers. They end by SIGTERM, which raises SystemExit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from ludus.core.backoff import Backoff
from ludus.distributed.match_results import EpisodeTotals
from ludus.distributed.sampling_plan import WEIGHTS, MatchPlan, SamplingPlan, ring_path
from ludus.envs.pettingzoo import make_match
from ludus.envs.vector_env import make_environments
from ludus.models.devices import copy_for_acting
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeightsReader
from ludus.process.host import keep_freed_memory
from ludus.process.workers.supervisor import Context
from ludus.sampling.match_opponents import seat_self_play
from ludus.sampling.multi_agent import EnvCopies, MultiAgentSampler, match_batches
from ludus.sampling.sampler import Interruption, Sampler
from ludus.sampling.self_play import with_past_opponents
from ludus.transport.shared_memory import SharedWriter

_ROOM_S = 0.2


def sample(context: Context, plan: SamplingPlan, index: int, begin: int, directory: Path, wakeup: Path) -> None:
    """Sample block after block, from number `begin` on."""
    torch.set_num_threads(1)
    keep_freed_memory()
    plan.code_bundle.unpack()
    with contextlib.closing(SharedWriter(ring_path(directory, index), plan.layouts, wakeup)) as writer:
        reader = SharedWeightsReader(directory / WEIGHTS)
        if plan.matches is None:
            _sample_environments(context, plan, index, begin, writer, reader)
        else:
            _sample_matches(context, plan, plan.matches, index, begin, writer, reader)


class _Counters:
    """The counters of a worker in its ring; they continue those of its predecessors."""

    def __init__(self, writer: SharedWriter) -> None:
        self._notes, self._before = writer.notes, list(writer.notes)

    def write(self, values: Iterable[float]) -> None:
        for i, value in enumerate(values):
            self._notes[i] = self._before[i] + value


def _wait_for_weights(context: Context, published: Callable[[], int], needed: int) -> float:
    """Wait for a version; returns the seconds."""
    if published() >= needed:
        return 0.0
    began, polls = time.perf_counter(), Backoff(0.0001, 0.001, factor=1.5)
    while published() < needed:
        context.beat()
        time.sleep(polls.next_delay())
    return time.perf_counter() - began


# -- environments with one agent ------------------------------------------------------------------------------------------


class SharedWeightsPolicy:
    """Loads the newest weights of a board into a policy of this process."""

    def __init__(self, policy: Policy, reader: SharedWeightsReader) -> None:
        self._policy, self._reader = policy, reader
        self._version = 0

    def newest_version(self) -> int:
        """The newest version, loaded or not. One memory read."""
        return self._reader.version

    def newest(self) -> tuple[Policy, int]:
        if self._reader.version != self._version:
            self._version = self._reader.load_into(self._policy)
        return self._policy, self._version


def _sample_environments(
    context: Context, plan: SamplingPlan, index: int, begin: int, writer: SharedWriter, reader: SharedWeightsReader
) -> None:
    policy = copy_for_acting(serialization.policy_from(dict(plan.description)), torch.device(plan.device))
    source = SharedWeightsPolicy(policy, reader)
    environments = make_environments(
        plan.env, plan.num_envs, plan.env_config, preprocess=plan.preprocess, wrappers=plan.wrappers, forgiving=plan.forgiving
    )
    with contextlib.closing(environments):
        environments.beat = context.beat
        seed = plan.seed_of(index, begin + writer.committed, context.incarnation)
        facing = with_past_opponents(environments, source, plan.self_play, seed, Path(plan.run) if plan.run else None)
        counters = _Counters(writer)
        blocked_s = weights_s = 0.0
        made = 0

        def write_counters() -> None:
            times = sampler.times
            spent = (times.environment_s, times.policy_s, blocked_s, weights_s)
            counters.write((times.steps, made, *spent, environments.restarts))

        def beat() -> None:
            context.beat()
            write_counters()  # a segment may take minutes: the node must see the steps earlier

        sampler = Sampler(
            environments, facing, writer, seed,
            first_row=index * plan.num_envs, interruption=Interruption(beat), explore=plan.explore,
            timesteps=None if plan.clock is None else plan.clock.timesteps,
        )  # fmt: skip
        context.ready()
        while True:
            weights_s += _wait_for_weights(context, source.newest_version, plan.needed_version(begin + writer.committed))
            called = time.perf_counter()
            spent = sampler.times.environment_s + sampler.times.policy_s
            context.beat()
            made += sampler.step(_ROOM_S)
            spent = sampler.times.environment_s + sampler.times.policy_s - spent
            blocked_s += max(0.0, time.perf_counter() - called - spent)
            write_counters()


# -- environments with several agents -------------------------------------------------------------------------------------


class PolicyBoard(nn.Module):
    """The policies of all models of a run with their versions, as they are published: one state dict, one version number."""

    def __init__(self, policies: Iterable[Policy]) -> None:
        super().__init__()
        self.versions: torch.Tensor
        self.policies = nn.ModuleList(policies)
        self.register_buffer("versions", torch.zeros(len(self.policies), dtype=torch.int64))

    def source(self, number: int) -> BoardSource:
        return BoardSource(self, number)


class BoardSource:
    """PolicySource of one model of a board. Its weights change when the board is loaded, between two batches."""

    def __init__(self, board: PolicyBoard, number: int) -> None:
        self._board, self._number = board, number

    def newest(self) -> tuple[Policy, int]:
        policy = self._board.policies[self._number]
        assert isinstance(policy, Policy)
        return policy, int(self._board.versions[self._number])


def _sample_matches(
    context: Context,
    plan: SamplingPlan,
    matches: MatchPlan,
    index: int,
    begin: int,
    writer: SharedWriter,
    reader: SharedWeightsReader,
) -> None:
    device = torch.device(plan.device)
    board = PolicyBoard(copy_for_acting(serialization.policy_from(dict(one)), device) for one in matches.descriptions.values())
    sources = {model: board.source(number) for number, model in enumerate(matches.descriptions)}
    loaded = reader.load_into(board)

    copies = EnvCopies(
        lambda: make_match(plan.env, plan.env_config, wrappers=plan.wrappers, preprocess=plan.preprocess), plan.num_envs,
        forgiving=plan.forgiving, beat=context.beat,
    )  # fmt: skip
    with contextlib.closing(copies):
        seed = plan.seed_of(index, begin + writer.committed, context.incarnation)
        seating = None
        if plan.self_play.opponents is not None:
            (source,) = sources.values()
            run = Path(plan.run) if plan.run else None
            seating = seat_self_play(plan.self_play, matches.policy_mapping, source, seed, run)
        batches = match_batches(matches.specs, matches.settings, copies)
        counters = _Counters(writer)
        blocked_s = weights_s = 0.0
        made = 0

        def write_counters() -> None:
            played = sampler.matches
            steps = played.env_steps if matches.settings.by_env_steps else played.agent_steps
            spent = (played.times.environment_s, played.times.policy_s, blocked_s, weights_s)
            of_matches = (played.matches, played.env_steps, played.agent_steps, played.late_rewards)
            lost = (played.stats.discarded, played.stats.unrecorded)
            counters.write((steps, made, *spent, copies.restarts, *of_matches, *lost))

        def beat() -> None:
            context.beat()
            write_counters()

        sampler = MultiAgentSampler(
            copies, matches.policy_mapping, sources, batches, matches.settings, seed,
            interruption=Interruption(beat), make_seating=seating, first_copy=index * len(copies),
        )  # fmt: skip
        episodes = EpisodeTotals(sampler.matches)
        skip = (begin + writer.committed) % plan.blocks_per_update  # blocks of an update that a predecessor has written
        context.ready()
        while True:
            weights_s += _wait_for_weights(context, lambda: reader.version, plan.needed_version(begin + writer.committed))
            if reader.version != loaded:
                loaded = reader.load_into(board)
            while not batches.ready():
                sampler.step()
                write_counters()
            waited = time.perf_counter()
            while batches.ready():
                if skip:
                    skip -= 1
                    batches.discard()
                    continue
                block = writer.reserve(_ROOM_S, batches.next_model)
                context.beat()
                if block is not None:
                    batches.take_into(block, separate=matches.separate_rows)
                    episodes.add_to(block)
                    writer.commit(block)
                    made += 1
            blocked_s += time.perf_counter() - waited
            write_counters()
