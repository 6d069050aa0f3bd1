"""Batches of complete episodes of single agents, by model (`batch_mode: complete_episodes` with several agents)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ludus.buffers.complete_episodes import EpisodeAssembler, copy_steps, raise_if_endless
from ludus.core.types import Floats, Ints, Segments
from ludus.transport.base import SegmentReader


class CompleteAgentEpisodes:
    """The complete episodes in the batches of another reader, one per row; the others continue in the next batch of their model.

    The rows of `batches` hold recorded segments: runs of valid steps, each followed by the observation after it unless its episode has
    terminated. A batch that completes fewer than `least_steps` steps of its model waits for the next one.
    """

    def __init__(self, batches: SegmentReader, least_steps: int, batch_steps: int) -> None:
        """`batch_steps`: of the batches that are read, to detect environments whose episodes never end."""
        self._batches, self._least_steps, self._batch_steps = batches, least_steps, batch_steps
        self._episodes: defaultdict[str, EpisodeAssembler] = defaultdict(EpisodeAssembler)
        self._since_end: defaultdict[str, int] = defaultdict(int)
        self._matches: list[tuple[Floats, Ints]] = []  # returns and lengths of matches that no batch has reported
        self._results: list[Floats] = []
        self._env_steps: int | None = None
        self._taken: set[int] = set()

    @property
    def left_out(self) -> int:
        """Number of episodes that ended without being complete here."""
        return sum(episodes.left_out for episodes in self._episodes.values())

    def take(self, timeout_s: float = 0.0) -> Segments | None:
        """Return the next batch or None. Raises EnvironmentFault if no episode ends."""
        block = self._batches.take(timeout_s)
        if block is None:
            return None
        model = block.model
        try:
            self._absorb(block)
        finally:
            self._batches.release(block)
        if self._episodes[model].steps < self._least_steps:
            raise_if_endless(self._since_end[model], self._batch_steps)
            return None
        batch = self._episodes[model].take()
        returns, lengths = zip(*self._matches, strict=True)
        batch.episode_return, batch.episode_length = np.concatenate(returns), np.concatenate(lengths)
        batch.results[0] = np.sum(self._results, axis=0)
        batch.env_steps, self._env_steps = self._env_steps, None
        self._matches.clear()
        self._results.clear()
        self._taken.add(id(batch))
        return batch

    def release(self, segments: Segments) -> None:
        if id(segments) not in self._taken:
            raise ValueError("A batch was released without having been taken.")
        self._taken.remove(id(segments))

    def _absorb(self, block: Segments) -> None:
        model = block.model
        self._matches.append((block.episode_return, block.episode_length))
        self._results.append(block.results.sum(axis=0))
        if block.env_steps is not None:
            self._env_steps = (self._env_steps or 0) + block.env_steps
        done = (block.terminated | block.truncated) & block.valid
        self._since_end[model] = 0 if done.any() else self._since_end[model] + block.steps
        for row in range(block.rows):
            for begin, stop in recorded_runs(block, row):
                piece = copy_steps(block, row, begin, stop)
                self._episodes[model].add(int(block.origin[row]), piece, ended=bool(done[stop - 1, row]))


def recorded_runs(block: Segments, row: int) -> Iterator[tuple[int, int]]:
    """Consecutive valid steps of one episode, as (first step, step after the last)."""
    valid, done = block.valid[:, row], (block.terminated | block.truncated)[:, row]
    begin: int | None = None
    for step in range(block.spec.steps):
        if begin is None and valid[step]:
            begin = step
        if begin is not None and (done[step] or step + 1 == block.spec.steps or not valid[step + 1]):
            yield begin, step + 1
            begin = None
