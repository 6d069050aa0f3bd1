"""Complete episodes of agents: every one that the game knows is there once, from its first step to its last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ludus.buffers.agent_episodes import CompleteAgentEpisodes
from ludus.buffers.collate import packed_rows
from ludus.core.types import Segments, SegmentSpec
from ludus.envs.pettingzoo import match_of
from ludus.errors import EnvironmentFault
from ludus.sampling.multi_agent.batches import MatchBatches, MultiAgentSettings, match_batches, recorded_bound
from ludus.sampling.multi_agent.env_copies import EnvCopies
from ludus.sampling.multi_agent.sampler import MultiAgentSampler
from ludus.sampling.segment_recorder import session_spec
from tests.matches import ScriptParallel, ScriptTurns, Simple
from tests.sampling.test_multi_agent import CAST, STEPS, Versions, lives_of, made


class PackedBatches:
    """Batches as a worker packs them into blocks of fixed size."""

    def __init__(self, batches: MatchBatches, specs: Sequence[SegmentSpec], rows: int) -> None:
        self._batches, self._specs, self._rows = batches, {spec.model: spec for spec in specs}, rows

    def take(self, timeout_s: float) -> Segments | None:
        if not self._batches.ready():
            return None
        block = Segments.empty(self._specs[self._batches.next_model], self._rows)
        self._batches.take_into(block)
        return block

    def release(self, segments: Segments) -> None:
        """Nothing is reused."""


class Sampled:
    def __init__(self, envs: list[Any], *, packed: bool, least_steps: int, cast: dict[str, str] = CAST) -> None:
        self.envs, waiting = envs, list(envs)
        example = envs[0].possible_agents[0]
        spaces = envs[0].observation_space(example), envs[0].action_space(example)
        self.sources = {name: Versions(made(number, *spaces)) for number, name in enumerate(dict.fromkeys(cast.values()))}
        settings = MultiAgentSettings(30, joint=packed, by_env_steps=True)
        copies = EnvCopies(lambda: match_of(waiting.pop(0), "script"), len(envs))
        specs = [session_spec(source.policy, STEPS, name) for name, source in self.sources.items()]
        batches = match_batches(specs, settings, copies)
        self.sampler = MultiAgentSampler(copies, cast, self.sources, batches, settings, 0)
        rows = packed_rows(STEPS, recorded_bound(settings, 3, 2, len(envs)), 3 * len(envs))
        self.episodes = CompleteAgentEpisodes(PackedBatches(batches, specs, rows) if packed else batches, least_steps, 30)

    def run(self, updates: int) -> list[Segments]:
        taken: list[Segments] = []
        for _ in range(100 * updates):
            self.sampler.step()
            while (batch := self.episodes.take(0)) is not None:
                taken.append(batch)
                self.episodes.release(batch)
                self.sources[batch.model].version += 1  # as if it had learned
            if len(taken) >= updates:
                return taken
        raise AssertionError("there were no batches")


Episode = tuple[str, str, tuple[tuple[float, int, float], ...]]
"""Agent, how it ended, and (last number of the observation, action, reward) of each step."""


def books_of(env: Any) -> list[Episode]:
    """Lives that have ended, as the game knows them."""
    lives = [life for agent in env.possible_agents for life in lives_of(env, agent) if life.end]
    return [
        (life.agent, life.end, tuple((float(did.seen[-1]), did.action, round(did.reward, 3)) for did in life.steps))
        for life in lives
    ]


def recorded(batch: Segments) -> list[Episode]:
    found = []
    for row in range(batch.rows):
        n = int(batch.valid[:, row].sum())
        assert batch.valid[:n, row].all()
        assert batch.first[:n, row].tolist() == [True] + [False] * (n - 1)
        ends = (batch.terminated | batch.truncated)[:n, row].tolist()
        assert ends == [False] * (n - 1) + [True]
        steps = zip(batch.observation[:n, row, -1], batch.action[:n, row], batch.reward[:n, row], strict=True)
        agent = list(CAST)[int(batch.origin[row]) % 3]
        assert CAST[agent] == batch.model
        end = "terminated" if batch.terminated[n - 1, row] else "truncated"
        found.append((agent, end, tuple((float(x), int(a), round(float(r), 3)) for x, a, r in steps)))
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["in this process", "packed by a worker"])
@pytest.mark.parametrize("kind", [ScriptParallel, ScriptTurns])
def test_every_episode_of_the_books_is_there_once_and_whole(kind: Any, packed: bool) -> None:
    sampled = Sampled([kind() for _ in range(3)], packed=packed, least_steps=1)
    batches = sampled.run(30)
    found = [episode for batch in batches for episode in recorded(batch)]
    known = [episode for env in sampled.envs for episode in books_of(env)]
    assert len(found) == len(set(found)) > 50
    assert set(found) <= set(known)
    assert len(set(known) - set(found)) <= 0.1 * len(known), "those of batches that are not complete yet"
    assert sampled.episodes.left_out == 0
    assert {batch.model for batch in batches} == {"red", "blue"}
    spanning = [batch for batch in batches if len(set(batch.version[batch.valid].tolist())) > 1]
    assert spanning, "an episode goes on while its model learns"
    assert sum(batch.env_steps or 0 for batch in batches) <= sampled.sampler.matches.env_steps
    assert sum(batch.env_steps or 0 for batch in batches) >= sampled.sampler.matches.env_steps - 90


def test_a_batch_may_need_so_many_decisions() -> None:
    sampled = Sampled([ScriptParallel() for _ in range(3)], packed=False, least_steps=100)
    assert all(batch.steps >= 100 for batch in sampled.run(6))


def test_matches_are_reported_once() -> None:
    sampled = Sampled([Simple(length=7)], packed=False, least_steps=60, cast={"a": "m", "b": "m"})
    batches = sampled.run(5)
    lengths = np.concatenate([batch.episode_length for batch in batches])
    assert set(lengths.tolist()) == {7}
    assert len(lengths) == sum(batch.rows for batch in batches) / 2, "two agents play in each"


def test_matches_without_an_end_are_an_error() -> None:
    sampled = Sampled([Simple(length=10**9)], packed=False, least_steps=1, cast={"a": "m", "b": "m"})
    with pytest.raises(EnvironmentFault, match=r"No episode ended within .* steps, but batch_mode is complete_episodes"):
        sampled.run(100)


def test_an_episode_of_which_a_block_was_dropped_is_left_out() -> None:
    sampled = Sampled([Simple(length=100)], packed=False, least_steps=1, cast={"a": "m", "b": "m"})
    reader: Any = sampled.episodes
    for number in range(8):  # of 30 steps: the first match ends in block 3, the second in block 6
        while (block := reader._batches.take(0)) is None:
            sampled.sampler.step()
        if number != 1:
            reader._absorb(block)
    assert reader.left_out == 2, "both agents of the first match"
    whole = reader._episodes["m"].take()
    assert whole.valid.sum(axis=0).tolist() == [100, 100]
