"""Recording of many rows at once, in the format that learners take."""

from __future__ import annotations

import numpy as np

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import OVER_STEPS, Bools, Floats, Ints, Segments, SegmentSpec
from ludus.envs.matches.rows import Returns
from ludus.models.policy import BatchDecision
from ludus.sampling.segment_recorder import RecorderStats
from ludus.transport.base import SegmentWriter


class RowRecorder:
    """Records the episodes of all rows of one model, as a SegmentRecorder does for one: a segment ends when it is full, when its episode
    ends, when the weights change (not of a recurrent model), or with a batch.

    The steps of all rows are written into one block of arrays; a segment that has ended is copied to the memory. Rows are given by
    their index in `origins`.
    """

    def __init__(self, memory: SegmentWriter, spec: SegmentSpec, origins: Ints, stats: RecorderStats) -> None:
        self._memory, self._origins, self._stats = memory, origins, stats
        self._block = Segments.empty(spec, len(origins))
        self._t: Ints = np.zeros(len(origins), np.int64)  # steps in the block
        self._before: tuple[Array, ...] = map_tree(lambda part: part.zeros(len(origins)), spec.state) if spec.state_every else ()
        """The recurrent states before the last actions."""
        self.open: Bools = np.zeros(len(origins), np.bool_)
        """Rows with an action whose outcome is pending."""

    def step(
        self,
        rows: Ints,
        observation: Tree,
        mask: Bools | None,
        decision: BatchDecision,
        version: int,
        reward: Returns,
        state: tuple[Array, ...],
    ) -> None:
        """Record observations, decisions, and the rewards of the previous actions. `state`: before the decisions."""
        block, spec = self._block, self._block.spec
        self._store_reward(rows, reward)
        t = self._t[rows]
        ends = t == spec.steps
        if not spec.state_every:
            ends |= (t > 0) & (block.version[t - 1, rows] != version)
        if ends.any():
            ended = np.flatnonzero(ends)
            own_mask = None if mask is None else mask[ended]
            bootstrap = map_tree(lambda part: part[ended], observation), own_mask, decision.value[ended]
            self._end_segments(rows[ended], t[ended], *bootstrap)
            t = self._t[rows]
        self._store_observation(rows, t, observation, mask)
        block.first[t, rows] = ~self.open[rows]
        _set_rows(block.action, t, rows, decision.chosen)
        block.log_prob[t, rows] = decision.log_prob
        block.value[t, rows] = decision.value
        block.version[t, rows] = version
        block.terminated[t, rows] = block.truncated[t, rows] = False
        if spec.state_every:
            stored = np.flatnonzero(t % spec.state_every == 0)
            for part, before, now in zip(block.state, self._before, state, strict=True):
                part[t[stored] // spec.state_every, rows[stored]] = now[stored]
                before[rows] = now
        self.open[rows] = True
        self._t[rows] = t + 1

    def cut(self, rows: Ints, reward: Returns, observation: Tree, mask: Bools | None, value: Floats) -> None:
        """Commit the segments because a batch is complete; the observations to be acted on next are their bootstrap.

        `reward` is that of the last actions; the next `step` brings none for them.
        """
        self._store_reward(rows, reward)
        written = np.flatnonzero(self._t[rows] > 0)
        own_mask = None if mask is None else mask[written]
        rows, observation = rows[written], map_tree(lambda part: part[written], observation)
        self._end_segments(rows, self._t[rows], observation, own_mask, value[written])

    def cut_before_pending(self, rows: Ints) -> None:
        """Commit all steps before the pending actions because a batch is complete.

        A pending action starts the next segment; its observation is the bootstrap of this one.
        """
        block = self._block
        for row in rows.tolist():
            last = int(self._t[row]) - 1
            if last <= 0:
                continue
            self._commit(row, last, bootstrapped=True)
            for array in (block.observation, block.action):
                map_tree(lambda x, row=row, last=last: x.__setitem__((0, row), x[last, row]), array)
            for array in (block.action_mask, block.first, block.log_prob, block.value, block.version):
                array[0, row] = array[last, row]
            block.terminated[0, row] = block.truncated[0, row] = False
            for stored, before in zip(block.state, self._before, strict=True):
                stored[0, row] = before[row]
            self._t[row] = 1

    def finish(
        self,
        rows: Ints,
        reward: Returns,
        terminated: Bools,
        valued: Ints,
        observation: Tree = None,
        value: Floats | None = None,
    ) -> None:
        """End the episodes of rows with a pending action. `valued`: indices of the rows with a final observation and its value.

        An episode without either, and not terminated, ends before its last step.
        """
        known = terminated.copy()
        known[valued] = True
        ended = rows[known]
        self._store_reward(ended, reward[known])
        t = self._t[ended]
        written = t > 0
        self._block.terminated[t[written] - 1, ended[written]] = terminated[known][written]
        self._block.truncated[t[written] - 1, ended[written]] = ~terminated[known][written]
        bootstrapped: Bools = np.zeros(len(rows), np.bool_)
        if value is not None:
            self._store_observation(rows[valued], self._t[rows[valued]], observation, None)
            self._block.value[self._t[rows[valued]], rows[valued]] = value
            bootstrapped[valued] = True
        for index, row in enumerate(rows.tolist()):
            if not known[index]:
                self._discard_pending(row)
            elif self._t[row]:
                self._commit(row, int(self._t[row]), bootstrapped=bool(bootstrapped[index]))
        self.open[rows] = False

    def discard_pending(self, rows: Ints) -> None:
        """End interrupted episodes: drop their last actions, whose outcome is unknown, and commit the steps before them."""
        for row in rows[self.open[rows]].tolist():
            self._discard_pending(row)

    def _discard_pending(self, row: int) -> None:
        self._stats.discarded += 1
        steps = int(self._t[row]) - 1
        if steps > 0:
            self._block.truncated[steps - 1, row] = True
            self._commit(row, steps, bootstrapped=True)
        self._t[row], self.open[row] = 0, False

    def _store_reward(self, rows: Ints, reward: Returns) -> None:
        t = self._t[rows]
        if (t > 0).all():
            self._block.reward[t - 1, rows] = reward
        else:
            written = np.flatnonzero(t > 0)
            self._block.reward[t[written] - 1, rows[written]] = reward[written]

    def _store_observation(self, rows: Ints, t: Ints, observation: Tree, mask: Bools | None) -> None:
        _set_rows(self._block.observation, t, rows, observation)
        self._block.action_mask[t, rows] = True if mask is None else mask

    def _end_segments(self, rows: Ints, t: Ints, observation: Tree, mask: Bools | None, value: Floats) -> None:
        self._store_observation(rows, t, observation, mask)
        self._block.value[t, rows] = value
        for row, steps in zip(rows.tolist(), t.tolist(), strict=True):
            self._commit(row, steps, bootstrapped=True)

    def _commit(self, row: int, steps: int, *, bootstrapped: bool) -> None:
        """Copy the first steps of a row to the memory. `bootstrapped`: the value after them is known."""
        self._t[row] = 0
        to, block = self._memory.reserve(0), self._block
        if to is None:
            self._stats.unrecorded += steps
            return
        for array in (to.valid, to.terminated, to.truncated, to.first):
            array.fill(False)
        for numbers in (to.reward, to.value, to.log_prob):
            numbers.fill(0)
        for name in OVER_STEPS:
            if name != "valid":
                _copy_row(getattr(to, name), getattr(block, name), steps, row)
        to.valid[:steps] = True
        to.version[steps:] = block.version[steps - 1, row]
        _copy_row(to.first, block.first, steps, row)
        _copy_row(to.value, block.value, steps + bootstrapped, row)
        _copy_row(to.observation, block.observation, steps + 1, row)
        _copy_row(to.action_mask, block.action_mask, steps + 1, row)
        if every := block.spec.state_every:
            for stored, own in zip(to.state, block.state, strict=True):
                _copy_row(stored, own, -(-steps // every), row)
        to.origin[0] = self._origins[row]
        self._memory.commit(to)


def _set_rows(target: Tree, t: Ints, rows: Ints, values: Tree) -> None:
    if isinstance(target, np.ndarray):
        target[t, rows] = values
    else:
        map_tree(lambda x, part: x.__setitem__((t, rows), part), target, values)


def _copy_row(to: Tree, block: Tree, steps: int, row: int) -> None:
    if isinstance(to, np.ndarray):
        to[:steps, 0] = block[:steps, row]
    else:
        map_tree(lambda x, own: x.__setitem__((slice(steps), 0), own[:steps, row]), to, block)
