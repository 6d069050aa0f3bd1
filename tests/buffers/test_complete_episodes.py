"""Whole episodes: every one that ended is there once, from its first step to the observation after its last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.buffers.complete_episodes import CompleteEpisodes
from ludus.core.types import Segments
from ludus.envs.vector_env import LoopEnvironments, VectorEnvironments
from ludus.errors import EnvironmentFault
from ludus.models.policy import Policy
from ludus.sampling.sampler import Sampler, segment_spec
from ludus.transport.local import LocalMemory
from tests.environments import Count, SameStep


class Source:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def newest(self) -> tuple[Policy, int]:
        return self._policy, 3


def whole(environments: Any, steps: int, batch_steps: int) -> tuple[Sampler, CompleteEpisodes]:
    environments.reset(0)
    policy = Policy(environments.observation_space, environments.action_space)
    memory = LocalMemory(segment_spec(policy, environments, steps), environments.num, 1)
    return Sampler(environments, Source(policy), memory, 0), CompleteEpisodes(memory, batch_steps)


def next_batch(sampler: Sampler, episodes: CompleteEpisodes) -> Segments:
    for _ in range(1000):
        sampler.step()
        batch = episodes.take()
        if batch is not None:
            episodes.release(batch)
            return batch
    raise AssertionError("there was no batch")


def check(batch: Segments, lengths: list[int], after_end: bool) -> list[tuple[int, int]]:
    """Every row is an episode; returns (row of the environment, episode) of each."""
    seen = []
    for row in range(batch.rows):
        n, origin = int(batch.valid[:, row].sum()), int(batch.origin[row])
        assert n == lengths[origin]
        assert batch.valid[:n, row].all()
        episode = int(batch.observation[0, row, 0])
        assert batch.observation[: n + after_end, row].tolist() == [[episode, t] for t in range(n + after_end)]
        assert batch.first[0, row]
        assert not batch.first[1:n, row].any()
        ends = (batch.terminated | batch.truncated)[:n, row]
        assert ends[-1]
        assert not ends[:-1].any()
        assert (batch.reward[:n, row] == 1).all()
        assert (batch.version[:n, row] == 3).all()
        seen.append((origin, episode))
    return seen


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 7), st.integers(1, 40))
def test_every_episode_is_there_once_and_whole(lengths: list[int], steps: int, batch_steps: int) -> None:
    envs: list[Any] = [Count(length=length, truncates=i % 2 == 1) for i, length in enumerate(lengths)]
    sampler, episodes = whole(LoopEnvironments("count", envs), steps, batch_steps)
    seen: list[tuple[int, int]] = []
    ended = 0
    for _ in range(4):
        batch = next_batch(sampler, episodes)
        assert batch.steps >= batch_steps
        ended += len(batch.episode_return)
        assert sorted(set(batch.episode_length.tolist())) == sorted({lengths[o] for o in batch.origin.tolist()})
        seen += check(batch, lengths, after_end=True)
    assert len(seen) == len(set(seen)) == ended, "each once, and all that ended"
    for origin in range(len(lengths)):
        own = sorted(episode for row, episode in seen if row == origin)
        assert own == list(range(own[0], own[0] + len(own))) if own else True
    assert episodes.left_out == 0


class Told(SameStep):
    """Says at the end of an episode in which row it was."""

    result_names = ("row",)

    def step(self, actions: Any) -> Any:
        *outcome, infos = super().step(actions)
        over = outcome[2] | outcome[3]
        return *outcome, {**infos, "row": np.arange(self.num_envs), "_row": over}


def test_episode_results_are_reported_once() -> None:
    sampler, episodes = whole(VectorEnvironments("told", Told(num_envs=3)), 4, 12)
    ended = total = count = 0.0
    for _ in range(4):
        batch = next_batch(sampler, episodes)
        ended += len(batch.episode_return)
        ((told, of),) = batch.results.sum(axis=0).tolist()
        total, count = total + told, count + of
    assert count == ended > 0
    assert total > 0


def test_the_last_observation_of_a_cut_episode_is_the_final_one_where_rows_reset_at_once() -> None:
    sampler, episodes = whole(VectorEnvironments("same step", SameStep(num_envs=3)), 4, 12)
    for _ in range(3):
        batch = next_batch(sampler, episodes)
        check(batch, [2, 3, 4], after_end=False)
        for row in np.flatnonzero(batch.truncated.any(axis=0)):
            n, episode = int(batch.valid[:, row].sum()), batch.observation[0, row, 0]
            assert batch.observation[n, row].tolist() == [episode, n]


def test_an_episode_that_was_lost_in_the_middle_is_left_out() -> None:
    sampler, episodes = whole(LoopEnvironments("count", [Count(length=6)]), 4, 6)
    assert sampler.step()
    block = episodes._blocks.take(0)
    assert block is not None
    episodes._absorb(block)
    block.first[0] = True  # a replaced worker begins anew in the same row
    episodes._absorb(block)
    assert episodes.left_out == 1


def test_an_environment_without_episode_ends_is_an_error() -> None:
    sampler, episodes = whole(LoopEnvironments("count", [Count(length=10**9)]), 8, 4)
    with pytest.raises(EnvironmentFault, match=r"No episode ended within .* steps, but batch_mode is complete_episodes"):
        next_batch(sampler, episodes)
