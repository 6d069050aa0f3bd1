"""Random episodes go through an agent; what arrives is compared with a plain list of what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from ludus.core.tree import Array
from ludus.core.types import Bools, Segments
from ludus.gateway.agent import EpisodeEnd, SeatAgent
from ludus.models.inference.batched_policy import Decision
from ludus.models.policy import Policy
from ludus.sampling.segment_recorder import RecorderStats, SegmentRecorder, session_spec
from ludus.transport.local import LocalMemory
from tests.gateway.scripted import RecordedSeat, run, tiny_policy

TERMINATED, TRUNCATED, CUT, BROKEN, UNDECIDED = "terminated", "truncated", "cut", "broken off", "neither"
"""How an episode may end; `cut` is truncated without a last observation, `neither` a finish that says nothing."""


@dataclass
class Step:
    """What one decision was, worked out beside the agent, one row at a time."""

    seen: Array
    mask: Bools | None
    before: tuple[Array, ...]
    action: int
    log_prob: float
    value: float
    version: int
    reward: float = 0.0
    after: tuple[Array, ...] = ()


@dataclass
class Episode:
    steps: list[Step] = field(default_factory=list)
    end: str = TERMINATED
    last_seen: Array | None = None
    last_value: float = 0.0

    @property
    def known(self) -> list[Step]:
        """The steps of which one knows what came of them."""
        return self.steps if self.end in (TERMINATED, TRUNCATED) else self.steps[:-1]


def decided(policy: Policy, version: int, seen: Array, mask: Bools | None, before: tuple[Array, ...]) -> Step:
    state = tuple(torch.from_numpy(part[None].copy()) for part in before)
    allowed = None if mask is None else torch.from_numpy(mask[None])
    with torch.no_grad():
        action, log_prob, value, after = policy.step(torch.from_numpy(seen[None]), state, None, allowed, None)
    kept = tuple(part[0].numpy().copy() for part in after)
    return Step(seen, mask, before, int(action[0]), float(log_prob[0]), float(value[0]), version, after=kept)


async def play(recorded_seat: RecordedSeat, random: np.random.Generator, episodes: int) -> list[Episode]:
    """One session; what it did, as told by the one who played."""
    agent, told = SeatAgent(recorded_seat.seat), []
    fresh = tuple(part[0].numpy() for part in recorded_seat.versions.newest()[0].initial_state(1))
    closing = False  # the last observation of the episode before is still being valued
    for number in range(episodes):
        episode, state = Episode(end=str(random.choice([TERMINATED, TRUNCATED, CUT, BROKEN, UNDECIDED]))), fresh
        for _ in range(int(random.integers(1, 12))):
            if random.random() < 0.15 and not closing:
                recorded_seat.versions.renew()
            closing = False
            seen = random.normal(size=3).astype(np.float32)
            mask = None
            if random.random() < 0.5:
                mask = random.random(4) < 0.5
                mask[random.integers(4)] = True
            step = decided(*recorded_seat.versions.newest(), seen, mask, state)
            state = step.after
            assert int(await agent.act(seen, mask)) == step.action
            step.reward = _rewarded(agent, random)
            episode.steps.append(step)
        finished = _ended(agent, recorded_seat, episode, state, random)
        closing = episode.end == TRUNCATED and number < episodes - 1 and bool(random.random() < 0.5)
        if finished is not None and not closing:  # who does not wait for it finds the next action waiting
            await finished
        told.append(episode)
    return told


def _rewarded(agent: SeatAgent, random: np.random.Generator) -> float:
    """Between two actions rewards come in any number of parts."""
    parts = [float(np.float32(part)) for part in random.normal(size=random.integers(3))]
    for part in parts:
        agent.reward(part)
    return sum(parts)


def _ended(
    agent: SeatAgent, recorded_seat: RecordedSeat, episode: Episode, state: tuple[Array, ...], random: np.random.Generator
) -> EpisodeEnd | None:
    if episode.end == BROKEN:
        agent.break_off()
        return None
    if episode.end == TERMINATED:
        return agent.finish(terminated=True, truncated=bool(random.random() < 0.3))
    if episode.end == TRUNCATED:
        episode.last_seen = random.normal(size=3).astype(np.float32)
        episode.last_value = decided(*recorded_seat.versions.newest(), episode.last_seen, None, state).value
        return agent.finish(truncated=True, observation=episode.last_seen)
    return agent.finish(truncated=episode.end == CUT)


def rows_of(segments: list[Segments], origin: int) -> list[Segments]:
    return [s for s in segments if s.origin[0] == origin]


def check(session: list[Episode], recorded: list[Segments], steps: int) -> None:
    """Every step whose outcome is known arrives once, in order, with all that belongs to it."""
    rest = iter(recorded)
    for episode in session:
        at = 0
        while at < len(episode.known):
            at += check_segment(next(rest), episode, at, steps)
        assert at == len(episode.known)
    assert next(rest, None) is None, "more arrived than was played"


def check_segment(segment: Segments, episode: Episode, at: int, steps: int) -> int:
    n = segment.steps
    assert segment.valid[:, 0].tolist() == [True] * n + [False] * (steps - n)
    assert 1 <= n <= steps
    known = episode.known[at : at + n]
    assert len(known) == n, "a step arrived whose outcome nobody knows"
    for t, step in enumerate(known):
        check_step(segment, t, step, first=at + t == 0)
    last = at + n == len(episode.known)
    check_ends(segment, n, episode, last)
    if not (last and episode.end == TERMINATED):
        check_bootstrap(segment, n, episode, at + n)
    if n < steps and not last:
        assert not segment.spec.state_every, "sequences of a recurrent model go on"
        assert episode.steps[at + n].version != known[-1].version, "cut for no reason"
    return n


def check_step(segment: Segments, t: int, step: Step, *, first: bool) -> None:
    assert segment.observation[t, 0].tolist() == step.seen.tolist()
    assert segment.action[t, 0] == step.action
    assert segment.reward[t, 0] == pytest.approx(step.reward, abs=1e-6)
    assert segment.log_prob[t, 0] == pytest.approx(step.log_prob, abs=1e-5)
    assert segment.value[t, 0] == pytest.approx(step.value, abs=1e-5)
    assert segment.version[t, 0] == step.version
    if not segment.spec.state_every:  # sequences of a recurrent model go on
        assert segment.version[:, 0].tolist() == [step.version] * len(segment.version), "within a segment one version acts"
    assert segment.first[t, 0] == first
    assert segment.action_mask[t, 0].tolist() == ([True] * 4 if step.mask is None else step.mask.tolist())
    every = segment.spec.state_every
    if every and t % every == 0:
        for kept, before in zip(segment.state, step.before, strict=True):
            np.testing.assert_allclose(kept[t // every, 0], before, atol=1e-5)


def check_ends(segment: Segments, n: int, episode: Episode, last: bool) -> None:
    terminated, truncated = segment.terminated[:, 0], segment.truncated[:, 0]
    assert not terminated[: n - 1].any()
    assert not terminated[n:].any()
    assert not truncated[: n - 1].any()
    assert not truncated[n:].any()
    assert not segment.first[1:n, 0].any()
    assert terminated[n - 1] == (last and episode.end == TERMINATED)
    whole = last and episode.end in (TERMINATED, TRUNCATED)
    if whole:
        assert truncated[n - 1] == (episode.end == TRUNCATED)
        assert segment.episode_return.tolist() == pytest.approx([sum(step.reward for step in episode.steps)], abs=1e-4)
        assert segment.episode_length.tolist() == [len(episode.steps)]
    else:
        same_block = n < segment.spec.steps and (
            segment.spec.state_every > 0 or episode.steps[-1].version == segment.version[0, 0]
        )
        assert truncated[n - 1] == (last and same_block), "it broke off, as far as this segment could know"
        assert not segment.episode_return.size
        assert not segment.episode_length.size
    assert not segment.reward[n + 1 :].any(), "padding shows nothing of what the block held before"
    assert not segment.log_prob[n + 1 :].any()
    assert not segment.value[n + 1 :].any()


def check_bootstrap(segment: Segments, n: int, episode: Episode, following: int) -> None:
    """The row after the last valid one shows what was seen next, and what it was worth."""
    if following < len(episode.steps):
        seen, value, mask = (getattr(episode.steps[following], name) for name in ("seen", "value", "mask"))
        assert segment.action_mask[n, 0].tolist() == ([True] * 4 if mask is None else mask.tolist())
    else:
        seen, value = episode.last_seen, episode.last_value
    assert segment.observation[n, 0].tolist() == seen.tolist()
    assert segment.value[n, 0] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("core", [None, "lstm", "gru"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_what_happened_is_what_arrives(steps: int, core: str | None) -> None:
    discarded = ended = 0
    for seed in range(4):
        recorded_seat, random = RecordedSeat(tiny_policy(core=core, seed=seed), steps), np.random.default_rng((seed, steps))
        session = run(play(recorded_seat, random, episodes=10))
        check(session, recorded_seat.segments(), steps)
        unknown = sum(len(episode.steps) - len(episode.known) for episode in session)
        assert recorded_seat.seat.stats.discarded == unknown
        assert recorded_seat.seat.stats.unrecorded == 0
        discarded, ended = discarded + unknown, ended + len(session)
    assert discarded > 10, "the script must do what it is for"
    assert ended == 40


def test_parallel_sessions_are_kept_apart() -> None:
    """Their requests mix in every batch of the model; their segments do not."""
    recorded_seat = RecordedSeat(tiny_policy(core="lstm"), 3)

    async def all_at_once() -> list[list[Episode]]:
        games = (_without_renewals(recorded_seat, np.random.default_rng(i)) for i in range(20))
        return list(await asyncio.gather(*games))

    sessions = run(all_at_once())
    recorded = recorded_seat.segments()
    for origin, session in enumerate(sessions):
        check(session, rows_of(recorded, origin), 3)
    assert {int(s.origin[0]) for s in recorded} <= set(range(20))


async def _without_renewals(recorded_seat: RecordedSeat, random: np.random.Generator) -> list[Episode]:
    class Still(np.random.Generator):
        """Versions change for all sessions at once: who changed them could not be told apart here."""

        def random(self, *args: Any, **kwargs: Any) -> Any:
            drawn = super().random(*args, **kwargs)
            return drawn if np.ndim(drawn) else max(float(drawn), 0.15)

    return await play(recorded_seat, Still(random.bit_generator), episodes=4)


def test_reused_blocks_show_nothing_of_what_they_held() -> None:
    """There are a few blocks only: segments are written where others were."""

    async def games() -> int:
        recorded_seat, random, checked = RecordedSeat(tiny_policy(), 4, blocks=4), np.random.default_rng(0), 0
        for _ in range(60):
            session = await play(recorded_seat, random, episodes=1)
            taken = list(_spoilt_when_released(recorded_seat))
            if recorded_seat.seat.stats.unrecorded:  # of a long episode
                recorded_seat.seat.stats.unrecorded = 0
            else:
                check(session, taken, 4)
                checked += 1
        return checked

    assert run(games()) > 40


def _spoilt_when_released(recorded_seat: RecordedSeat) -> Iterator[Segments]:
    while (segments := recorded_seat.memory.take(0)) is not None:
        yield deepcopy(segments)
        segments.valid[:], segments.terminated[:], segments.truncated[:], segments.first[:] = True, True, True, True
        segments.reward[:], segments.value[:], segments.log_prob[:], segments.version[:] = 99, 99, 99, 99
        segments.observation[:], segments.action_mask[:], segments.action[:] = 99, False, 3
        segments.episode_return, segments.episode_length = np.full(5, 9, np.float32), np.full(5, 9)
        recorded_seat.memory.release(segments)


# -- a memory without room ----------------------------------------------------------------------------------------------


def decision(number: int, version: int = 1) -> Decision:
    return Decision(number, np.int64(number % 4), -float(number), float(number), (), version)


def recorder_of(blocks: int, steps: int = 3) -> tuple[SegmentRecorder, LocalMemory, RecorderStats]:
    memory, stats = LocalMemory(session_spec(tiny_policy(), steps), 1, blocks), RecorderStats()
    return SegmentRecorder(memory, 7, stats), memory, stats


def seen(number: int) -> Array:
    return np.full(3, number, np.float32)


def test_steps_for_which_there_is_no_room_are_counted_and_the_rest_is_right() -> None:
    recorder, memory, stats = recorder_of(blocks=1)
    for number in range(5):  # three fill the block; the two after it find none
        recorder.step(seen(number), None, decision(number), float(number), ())
    full = memory.take(0)
    assert full is not None
    assert full.reward[:, 0].tolist() == [1, 2, 3]
    assert full.observation[3, 0].tolist() == [3, 3, 3]
    assert stats.unrecorded == 2
    memory.release(full)
    recorder.step(seen(5), None, decision(5), 5.0, ())  # goes on in the middle of its episode
    recorder.finish(6.0, terminated=True)
    rest = memory.take(0)
    assert rest is not None
    assert rest.steps == 1
    assert rest.reward[0, 0] == 6
    assert not rest.first.any()
    assert rest.terminated[0, 0]
    assert rest.episode_return.tolist() == [1 + 2 + 3 + 4 + 5 + 6], "a return is of the whole episode"
    assert rest.episode_length.tolist() == [6]


def test_an_episode_that_breaks_off_at_its_first_step_gives_its_block_back() -> None:
    recorder, memory, stats = recorder_of(blocks=1)
    for _ in range(5):
        recorder.step(seen(0), None, decision(0), 0.0, ())
        recorder.discard_pending()
    assert stats.discarded == 5
    assert stats.unrecorded == 0
    assert memory.stats().committed == 0


def test_after_the_end_nothing_more_can_end() -> None:
    recorder, memory, stats = recorder_of(blocks=4)
    recorder.finish(1.0, terminated=True)
    recorder.discard_pending()
    recorder.step(seen(0), None, decision(0), 0.0, ())
    open_once = recorder.open
    recorder.finish(1.0, terminated=True)
    recorder.finish(1.0, terminated=True)
    recorder.discard_pending()
    assert (open_once, recorder.open) == (True, False)
    assert (memory.stats().committed, stats.discarded) == (1, 0)
