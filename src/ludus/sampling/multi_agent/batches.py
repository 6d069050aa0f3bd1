"""Batches for the trainer: what the agents of a model have recorded."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ludus.buffers.collate import join_segments, pack_segments
from ludus.core.types import Segments, SegmentSpec
from ludus.sampling.multi_agent.copies import MatchCopies
from ludus.sampling.multi_agent.seating import FinishedMatch
from ludus.transport.local import LocalMemory


@dataclass(frozen=True)
class MultiAgentSettings:
    """What a MultiAgentSampler puts into a batch."""

    batch_steps: int
    by_env_steps: bool = False
    """`batch_steps` are environment steps; otherwise decisions of the agents of a model."""
    central: bool = False
    """Record the state for a centralised critic."""
    explore: bool = True
    smoothing: int = 100
    """Number of episodes over which returns are averaged."""
    joint: bool = False
    """Complete the batches of all models at the same time, when they have `batch_steps` steps on average. For samplers of workers: a
    learner waits for all of them, so they must agree on which batch comes next.
    """


def recorded_bound(settings: MultiAgentSettings, agents: int, models: int, copies: int) -> int:
    """Maximum number of steps that are recorded for one model until its batch is complete."""
    steps_counted_once = agents if settings.by_env_steps else models if settings.joint else 1
    return settings.batch_steps * steps_counted_once + 2 * copies * agents


def match_batches(specs: Sequence[SegmentSpec], settings: MultiAgentSettings, copies: MatchCopies) -> MatchBatches:
    """Batches of the models that are trained, with memory for all that may be recorded, even in segments of one step."""
    agents = len(copies.agents)
    blocks = recorded_bound(settings, agents, len(specs), len(copies)) + 2 * len(copies) * agents + 16
    return MatchBatches({spec.model: LocalMemory(spec, 1, blocks) for spec in specs})


class MatchBatches:
    """Batches for the trainer: everything that a model has recorded since its last batch, once the sampler marks it complete.

    A batch also carries the matches that have ended since the previous batch of any model.
    """

    def __init__(self, memories: Mapping[str, LocalMemory]) -> None:
        self.memories = dict(memories)
        self._complete: deque[tuple[str, int | None]] = deque()
        self._finished: list[FinishedMatch] = []
        self._taken: set[int] = set()

    def ready(self) -> bool:
        return bool(self._complete)

    def complete(self, model: str, env_steps: int | None = None) -> None:
        """`env_steps`: environment steps since the previous batch of any model; None: steps are counted as decisions."""
        self._complete.append((model, env_steps))

    def add_finished(self, match: FinishedMatch) -> None:
        self._finished.append(match)

    def take(self, timeout_s: float) -> Segments | None:
        """Return the next complete batch or None. Never blocks: the sampler runs in the same process."""
        if not self._complete:
            return None
        model, env_steps = self._complete.popleft()
        with self._take_parts(model) as parts:
            batch = join_segments(parts)
        self._describe_matches(batch, env_steps)
        self._taken.add(id(batch))
        return batch

    @property
    def next_model(self) -> str:
        """The model of the next complete batch."""
        return self._complete[0][0]

    def take_into(self, block: Segments, *, separate: bool = False) -> None:
        """Pack the next complete batch into a block of its model. Raises ValueError if the block is too small.

        `separate`: every segment has a row of its own, as a replay buffer needs it.
        """
        model, env_steps = self._complete.popleft()
        with self._take_parts(model) as parts:
            pack_segments(parts, block, separate=separate)
        self._describe_matches(block, env_steps)

    def discard(self) -> None:
        """Drop the next complete batch. The matches that have ended are reported with the one after it."""
        model, _ = self._complete.popleft()
        with self._take_parts(model):
            pass

    @contextlib.contextmanager
    def _take_parts(self, model: str) -> Iterator[list[Segments]]:
        """All segments that a model has recorded since its last batch, inside the block."""
        memory, parts = self.memories[model], []
        while (part := memory.take(0)) is not None:
            parts.append(part)
        yield parts
        for part in parts:
            memory.release(part)

    def _describe_matches(self, batch: Segments, env_steps: int | None) -> None:
        """Add the matches that have ended since the previous batch of any model."""
        batch.episode_return = np.array([match.total for match in self._finished], np.float32)
        batch.episode_length = np.array([match.steps for match in self._finished], np.int64)
        batch.env_steps = env_steps
        for column, name in enumerate(batch.spec.results):
            scores = [value for match in self._finished if (value := match.result(name)) is not None]
            batch.results[0, column] = sum(scores), len(scores)
        self._finished.clear()

    def release(self, segments: Segments) -> None:
        if id(segments) not in self._taken:
            raise ValueError("A batch was released without having been taken.")
        self._taken.remove(id(segments))

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()
