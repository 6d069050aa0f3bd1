"""Entry points of sampling workers. SIGTERM ends them: it raises SystemExit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from ludus.core.backoff import Backoff
from ludus.distributed.match_blocks import MatchBlockSampler, MatchSamplingPlan
from ludus.distributed.sampling_plan import WEIGHTS, SamplingPlan, ring_path
from ludus.envs.vector_env import make_environments
from ludus.models.devices import copy_for_acting
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.models.weights.shared_weights import SharedWeightsReader
from ludus.process import screen_choice
from ludus.process.host import keep_freed_memory
from ludus.process.workers.supervisor import Context
from ludus.sampling.multi_agent.vector_copies import make_copies
from ludus.sampling.sampler import Interruption, Sampler
from ludus.sampling.self_play import with_past_opponents
from ludus.transport.shared_memory import SharedWriter

_ROOM_S = 0.2
_COUNT_EVERY_S = 0.05


def sample(context: Context, plan: SamplingPlan, index: int, begin: int, directory: Path, wakeup: Path) -> None:
    """Sample block after block, from number `begin` on."""
    torch.set_num_threads(1)
    keep_freed_memory()
    screen_choice.configure(plan.display)
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
    """Wait until version `needed` is published; returns the seconds waited."""
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
    matches: MatchSamplingPlan,
    index: int,
    begin: int,
    writer: SharedWriter,
    reader: SharedWeightsReader,
) -> None:
    device = torch.device(plan.device)
    board = PolicyBoard(copy_for_acting(serialization.policy_from(dict(one)), device) for one in matches.descriptions.values())
    sources = {model: board.source(number) for number, model in enumerate(matches.descriptions)}
    loaded = reader.load_into(board)

    copies = make_copies(
        plan.env, plan.num_envs, plan.env_config, wrappers=plan.wrappers, preprocess=plan.preprocess,
        forgiving=plan.forgiving, beat=context.beat,
    )  # fmt: skip
    with contextlib.closing(copies), contextlib.ExitStack() as stack:
        first, before = begin + writer.committed, writer.committed
        seed = plan.seed_of(index, first, context.incarnation)
        counters = _Counters(writer)
        blocked_s = weights_s = 0.0
        write_at = 0.0

        def write_counters() -> None:
            played, times = sampler.matches, sampler.times
            spent = (times.environment_s, times.policy_s, blocked_s, weights_s)
            of_matches = (played.matches, played.env_steps, played.agent_steps, played.late_rewards)
            lost = (played.stats.discarded, played.stats.unrecorded)
            counters.write((times.steps, writer.committed - before, *spent, copies.restarts, *of_matches, *lost))

        def beat() -> None:
            nonlocal write_at
            context.beat()
            if time.perf_counter() >= write_at:
                write_at = time.perf_counter() + _COUNT_EVERY_S
                write_counters()

        sampler = MatchBlockSampler(
            copies, matches, sources, writer, seed,
            self_play=plan.self_play, interruption=Interruption(beat), run=Path(plan.run) if plan.run else None,
            worker=index, skip=first % plan.blocks_per_update,
        )  # fmt: skip
        stack.callback(sampler.close)
        context.ready()
        while True:
            if sampler.is_between_batches():
                weights_s += _wait_for_weights(context, lambda: reader.version, plan.needed_version(begin + writer.committed))
                if reader.version != loaded:
                    loaded = reader.load_into(board)
            called, spent = time.perf_counter(), sampler.times.environment_s + sampler.times.policy_s
            context.beat()
            sampler.step(_ROOM_S)
            spent = sampler.times.environment_s + sampler.times.policy_s - spent
            blocked_s += max(0.0, time.perf_counter() - called - spent)
            write_counters()
