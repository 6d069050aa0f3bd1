"""Batches of complete episodes from blocks of arbitrary steps (`batch_mode: complete_episodes`)."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from ludus.buffers.collate import join_segments
from ludus.core.tree import Tree, map_tree
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Floats, Ints, Segments
from ludus.errors import EnvironmentFault
from ludus.transport.base import SegmentReader

_MAX_BATCHES_WITHOUT_END = 50  # worth of steps, before the environment is reported as never ending


class EpisodeAssembler:
    """Puts pieces of episodes together. Episodes with a missing start or a lost step are left out and counted."""

    def __init__(self) -> None:
        self._open: defaultdict[int, list[Segments]] = defaultdict(list)
        self._whole: deque[Segments] = deque()
        self.steps = 0
        """Of the complete episodes that wait."""
        self.left_out = 0

    def add(self, origin: int, piece: Segments, *, ended: bool) -> None:
        """Add consecutive steps of one row. Those of one origin arrive in the order of time."""
        if piece.first[0, 0]:
            self.left_out += bool(self._open.pop(origin, None))  # the previous episode of this row was interrupted
        elif origin in self._open and not _continues(self._open[origin][-1], piece):
            del self._open[origin]  # a block between them was dropped
        if not piece.first[0, 0] and origin not in self._open:
            if ended:
                self.left_out += 1
            return
        self._open[origin].append(piece)
        if not ended:
            return
        pieces = self._open.pop(origin)
        if not all(part.valid.all() for part in pieces) or any(part.first[1:-1].any() for part in pieces):
            self.left_out += 1
            return
        episode = _concatenate(pieces)
        self._whole.append(episode)
        self.steps += episode.steps

    def take(self) -> Segments:
        """All complete episodes that wait, one per row. There must be one."""
        batch = join_segments(list(self._whole))
        self._whole.clear()
        self.steps = 0
        return batch


def raise_if_endless(steps: int, batch_steps: int) -> None:
    """Raise EnvironmentFault if no episode has ended for many batches. `steps`: since the last end."""
    if steps > _MAX_BATCHES_WITHOUT_END * batch_steps:
        raise EnvironmentFault(
            f"No episode ended within {steps:,} steps, but batch_mode is complete_episodes.",
            "Use batch_mode: truncate_episodes, or bound the episodes with preprocess.max_episode_steps.",
        )


class CompleteEpisodes:
    """Batches of at least `batch_steps` steps, one episode per row. Blocks are copied and released at once.

    `origin` identifies a row. Episodes with a missing start or a lost step are left out and counted.
    """

    def __init__(self, blocks: SegmentReader, batch_steps: int) -> None:
        self._blocks, self._batch_steps = blocks, batch_steps
        self._episodes = EpisodeAssembler()
        self._since_end = 0
        self._scores: list[tuple[Floats, Ints]] = []
        self._results: list[Floats] = []
        self._taken: Segments | None = None

    @property
    def left_out(self) -> int:
        return self._episodes.left_out

    def take(self, timeout_s: float = 0.0) -> Segments | None:
        """Return the next batch or None. Raises EnvironmentFault if no episode ends."""
        if self._episodes.steps < self._batch_steps:
            block = self._blocks.take(timeout_s)
            if block is None:
                return None
            try:
                self._absorb(block)
            finally:
                self._blocks.release(block)
        if self._episodes.steps < self._batch_steps:
            raise_if_endless(self._since_end, self._batch_steps)
            return None
        batch = self._episodes.take()
        returns, lengths = zip(*self._scores, strict=True)
        batch.episode_return, batch.episode_length = np.concatenate(returns), np.concatenate(lengths)
        batch.results[0] = np.sum(self._results, axis=0)  # of all ended episodes, left out or not, like the returns
        self._scores.clear()
        self._results.clear()
        self._taken = batch
        return batch

    def release(self, segments: Segments) -> None:
        if segments is not self._taken:
            raise ValueError("A batch was released without having been taken.")
        self._taken = None

    def _absorb(self, block: Segments) -> None:
        self._scores.append((block.episode_return, block.episode_length))
        self._results.append(block.results.sum(axis=0))
        done = block.terminated | block.truncated
        finals = {(int(t), int(row)): i for i, (t, row) in enumerate(block.final_at[: block.finals])}
        self._since_end = 0 if done.any() else self._since_end + int(done.size)
        for row in range(block.rows):
            origin, begin = int(block.origin[row]), 0
            for end in (*np.flatnonzero(done[:, row]).tolist(), None):
                stop = block.spec.steps if end is None else end + 1
                while begin < stop and not block.valid[begin, row] and not done[begin, row]:
                    begin += 1  # the environment only resets: no episode has this step
                if begin < stop:
                    piece = copy_steps(block, row, begin, stop, finals.get((stop - 1, row)))
                    self._episodes.add(origin, piece, ended=end is not None)
                begin = stop


def _continues(before: Segments, after: Segments) -> bool:
    """Whether a piece begins with the observation after the last step of another."""
    same: list[bool] = []
    map_tree(lambda x, y: same.append(np.array_equal(x[-1], y[0])), before.observation, after.observation)
    return all(same)


def copy_steps(block: Segments, row: int, begin: int, stop: int, final: int | None = None) -> Segments:
    """Copy some steps of one row, with the observation after them. `final`: its index in `final_observation`, if it is there."""

    def cut(name: str, last: int) -> Tree:
        return map_tree(lambda x: np.array(x[begin:last, row : row + 1]), getattr(block, name))

    steps = {name: cut(name, stop) for name in OVER_STEPS}
    after = {name: cut(name, stop + 1) for name in OVER_STEPS_AND_AFTER}
    spec = replace(block.spec, steps=stop - begin, finals=0)
    empty = Segments.empty(replace(spec, steps=1), 1)
    piece = replace(empty, spec=spec, origin=block.origin[row : row + 1].copy(), **steps, **after)
    if final is not None:  # the row after the last step already belongs to the next episode
        map_tree(lambda whole, kept: whole.__setitem__((-1, 0), kept[final]), piece.observation, block.final_observation)
        piece.value[-1, 0] = block.final_value[final]
    return piece


def _concatenate(pieces: list[Segments]) -> Segments:
    """Concatenate the steps of all pieces, with the observation after the last."""
    if len(pieces) == 1:
        return pieces[0]

    def over_steps(name: str) -> Tree:
        return map_tree(lambda *parts: np.concatenate(parts), *(getattr(piece, name) for piece in pieces))

    def over_steps_and_after(name: str) -> Tree:
        *before, last = (getattr(piece, name) for piece in pieces)
        return map_tree(lambda *parts: np.concatenate([*(p[:-1] for p in parts[:-1]), parts[-1]]), *before, last)

    steps = {name: over_steps(name) for name in OVER_STEPS}
    after = {name: over_steps_and_after(name) for name in OVER_STEPS_AND_AFTER}
    spec = replace(pieces[0].spec, steps=sum(piece.spec.steps for piece in pieces))
    return replace(pieces[0], spec=spec, cache={}, **steps, **after)
