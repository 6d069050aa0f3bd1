"""A replay buffer of single transitions with n-step returns, sampled uniformly or by priority (Schaul et al. 2016).

Every observation is stored once, in a ring: its slot also holds the step taken there, if any, and the slot of the next
observation. Slots are evicted in order of age, so the successors of a stored step are always stored too.

`origin` identifies the rows of blocks. A row continues the open episode of its origin if it does not start an episode and its
first observation equals the last one stored; otherwise steps were lost in between, and the two are not linked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludus.buffers.collate import split_repeated_origins
from ludus.buffers.sum_tree import Doubles, SumTree
from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.core.types import Bools, Floats, Ints, Segments
from ludus.errors import ConfigError

Uniform = Callable[[int], Doubles]
"""Returns the given number of random numbers in [0, 1)."""

_NONE = -1
_MAX_LANES = 1 << 17  # interrupted sessions leave theirs behind


@dataclass(frozen=True)
class Priorities:
    """Steps are sampled in proportion to (|TD error| + eps)^alpha."""

    alpha: float = 0.6
    eps: float = 1e-6


@dataclass(frozen=True)
class TransitionBatch:
    """N transitions of up to n steps."""

    slot: Ints
    """Ring slots, for `update_priorities`."""
    observation: Tree
    action: Tree
    reward: Floats
    """Discounted sum of rewards until `next_observation`."""
    discount: Floats
    """Discount of the value of `next_observation`; 0 if the episode terminated before it."""
    next_observation: Tree
    next_mask: Bools | None
    """[N, M] allowed actions at `next_observation`; None if the environment never sent a mask."""
    weight: Floats
    """Importance weight that corrects for prioritized sampling; at most 1."""


class TransitionReplay:
    """A ring of `capacity` observations. Deterministic: the caller passes the random numbers to `sample`."""

    def __init__(
        self,
        observation: Tree,
        action: Tree,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        priorities: Priorities | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """`observation`, `action`: trees of ArraySpecs. Raises ConfigError if the buffer would need more than `max_bytes`."""
        self.capacity, self.n_step, self.gamma = capacity, n_step, gamma
        self.priorities = priorities
        self._check_size(observation, action, max_bytes)
        self._observation: Tree = map_tree(lambda spec: spec.zeros(capacity), observation)
        self._action: Tree = map_tree(lambda spec: spec.zeros(capacity), action)
        self._reward = np.zeros(capacity, np.float32)
        self._terminated = np.zeros(capacity, np.bool_)
        self._stepped = np.zeros(capacity, np.bool_)  # slots with a step
        self.ready = np.zeros(capacity, np.bool_)
        """Slots whose n-step return is known: those that can be sampled."""
        self._next = np.full(capacity, _NONE, np.int64)
        self._mask: Bools | None = None
        self._tree = None if priorities is None else SumTree(capacity)
        self._lanes: dict[int, int] = {}  # origin → index into _tail and _recent
        self._tail = np.zeros(0, np.int64)  # number of the last observation of the open episode
        self._recent = np.zeros((0, n_step - 1), np.int64)  # numbers of its newest steps, whose n-step return is incomplete
        self._row_groups: tuple[Ints, list[Ints], Ints] | None = None
        self._evicted: list[Ints] = []
        self._fresh: list[Ints] = []
        self.written = 0  # observations so far; number k is at slot k % capacity
        self.added = 0
        """Steps so far."""
        self.priority_max = 1.0
        self._count = 0

    def __len__(self) -> int:
        """Number of transitions that can be sampled."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the filled part."""
        filled = min(self.written, self.capacity) / self.capacity
        arrays = [leaf for _, leaf in leaves(self._columns())]
        return int(filled * sum(int(leaf.nbytes) for leaf in arrays)) + (self._tree.nbytes if self._tree else 0)

    @property
    def full_bytes(self) -> int:
        """Bytes of `state` of a full buffer, without masks."""
        columns = sum(int(leaf.nbytes) for _, leaf in leaves(self._columns()))
        return columns + (8 * self.capacity if self.priorities else 0)

    def _check_size(self, observation: Tree, action: Tree, max_bytes: int | None) -> None:
        specs = [spec for _, spec in (*leaves(observation), *leaves(action))]
        each = sum(int(spec.zeros().nbytes) for spec in specs) + 4 + 3 + 8 + (8 if self.priorities else 0)
        needed = each * self.capacity
        if max_bytes is not None and needed > max_bytes:
            raise ConfigError(
                f"replay_buffer_config.capacity is {self.capacity:,}; observations of {each:,} bytes would need "
                f"{needed:,} bytes; max_bytes is {max_bytes:,}.",
                f"Keep at most {max_bytes // each:,}, or raise replay_buffer_config.max_bytes if the machine has the memory.",
            )

    # -- adding

    def add(self, segments: Segments) -> None:
        """Copy the valid steps. Raises ConfigError if the block alone would fill the buffer."""
        steps = segments.steps
        if 4 * steps > self.capacity:  # a step stores at most three observations
            raise ConfigError(
                f"replay_buffer_config.capacity is {self.capacity:,}, but a single block has {steps:,} steps.",
                f"Use at least {4 * steps:,}, or fewer environments, or a shorter rollout_fragment_length.",
            )
        if segments.spec.mask_size and self._mask is None:
            self._mask = np.ones((self.capacity, segments.spec.mask_size), np.bool_)
        self.added += steps
        groups, lanes = self._group_rows(segments.origin)
        for group in groups:
            self._add(segments, group, lanes[group])
        self._update_tree()

    def _group_rows(self, origin: Ints) -> tuple[list[Ints], Ints]:
        """Return groups of rows with distinct origins, in order of time, and the lanes of all rows."""
        if self._row_groups is None or not np.array_equal(self._row_groups[0], origin):
            if len(self._lanes) + len(origin) > _MAX_LANES:
                self._lanes.clear()
                self._tail, self._recent = self._tail[:0], self._recent[:0]
            lanes = np.array([self._lanes.setdefault(number, len(self._lanes)) for number in origin.tolist()], np.int64)
            more = len(self._lanes) - len(self._tail)
            self._tail = np.concatenate([self._tail, np.full(more, _NONE, np.int64)])
            self._recent = np.concatenate([self._recent, np.full((more, self.n_step - 1), _NONE, np.int64)])
            self._row_groups = origin.copy(), split_repeated_origins(origin), lanes
        return self._row_groups[1:]

    def _add(self, segments: Segments, rows: Ints, lanes: Ints) -> None:
        """Add rows with distinct origins."""
        block = _BlockRows.of(segments, rows)
        continued = self._continuing_rows(block, lanes)
        self._close_episodes(lanes[~continued])
        number = self._store_observations(block, np.where(continued, self._tail[lanes], _NONE))
        slot = number % self.capacity
        steps = len(block.stepped)
        at = slot[:steps][block.stepped]
        map_tree(lambda stored, given: stored.__setitem__(at, given[:, rows][block.stepped]), self._action, segments.action)
        self._reward[at] = block.reward[block.stepped]
        self._terminated[at] = block.terminated[block.stepped]
        self._stepped[at] = True
        self._next[slot[:steps][block.leads]] = slot[1:][block.leads]
        self._track_returns(block, lanes, number)
        t, row = block.open_at
        self._tail[lanes] = _NONE
        self._tail[lanes[row]] = number[t, row]

    def _continuing_rows(self, block: _BlockRows, lanes: Ints) -> Bools:
        """Return the rows [R] that continue the open episode of their lane, with the same observation."""
        tail = self._tail[lanes]
        evicted = self.written + block.max_slots - self.capacity
        continued: Bools = (tail >= evicted) & (tail != _NONE) & block.stepped[0] & ~block.first[0]
        if continued.any():
            slot = tail % self.capacity  # arbitrary for rows that do not continue
            for (_, stored), (_, given) in zip(leaves(self._observation), leaves(block.observation), strict=True):
                same = stored[slot] == given[0, block.rows]
                continued &= same.reshape(len(same), -1).all(axis=1)
        return continued

    def _store_observations(self, block: _BlockRows, stored: Ints) -> Ints:
        """Store the observations, oldest first, and return their numbers [T+1, R]; `stored`: those already stored in row 0."""
        number = np.full(block.stored.shape, _NONE, np.int64)
        number[0] = stored
        new = block.stored & (number == _NONE)
        t, row = np.nonzero(new)
        first, finals = self.written, len(block.final_step)
        self.written += t.size + finals
        slots = np.arange(first, self.written) % self.capacity
        self._count -= int(np.count_nonzero(self.ready[slots]))
        for flags in (self.ready, self._stepped, self._terminated):
            flags[slots] = False
        self._next[slots] = _NONE
        self._evicted.append(slots)
        number[t, row] = np.arange(first, first + t.size)
        at, column, beyond = slots[: t.size], block.rows[row], slots[t.size :]
        map_tree(lambda stored, given: stored.__setitem__(at, given[t, column]), self._observation, block.observation)
        if self._mask is not None:
            self._mask[at] = block.mask[t, column]
            self._mask[beyond] = True  # final observations have no mask
        if finals:
            map_tree(
                lambda stored, given: stored.__setitem__(beyond, given[block.final]), self._observation, block.final_observation
            )
            self._next[number[block.final_step, block.final_row] % self.capacity] = beyond
        return number

    def _track_returns(self, block: _BlockRows, lanes: Ints, number: Ints) -> None:
        """Mark the steps whose n-step return is complete."""
        if self.n_step == 1:
            self._mark_ready(number[: len(block.stepped)][block.stepped])
            return
        for t in np.flatnonzero(block.stepped.any(axis=1)):
            step = block.stepped[t]
            lane = lanes[step]
            self._mark_ready(self._recent[lane, -1])
            self._recent[lane, 1:] = self._recent[lane, :-1]
            self._recent[lane, 0] = number[t, step]
            over = block.closes[t]
            if over.any():
                self._close_episodes(lanes[over])

    def _close_episodes(self, lanes: Ints) -> None:
        """Mark the last steps of these lanes as ready: their episodes have no further steps."""
        if self.n_step > 1 and lanes.size:
            self._mark_ready(self._recent[lanes].reshape(-1))
            self._recent[lanes] = _NONE

    def _mark_ready(self, numbers: Ints) -> None:
        slots = numbers[numbers >= max(0, self.written - self.capacity)] % self.capacity
        self.ready[slots] = True
        self._count += slots.size
        self._fresh.append(slots)

    def _update_tree(self) -> None:
        """Update the sum tree once per block. New transitions get the highest priority so far."""
        evicted, fresh = np.concatenate([*self._evicted, _NO_SLOTS]), np.concatenate([*self._fresh, _NO_SLOTS])
        self._evicted.clear()
        self._fresh.clear()
        if self._tree is not None:
            self._tree.set(evicted, 0.0)
            self._tree.set(fresh[self.ready[fresh]], self.priority_max)

    # -- sampling

    def sample(self, count: int, uniform: Uniform, beta: float = 0.0) -> TransitionBatch:
        """Sample with replacement from a non-empty buffer. `beta`: exponent of the importance weights."""
        if self._tree is None:
            slot, weight = self._sample_uniform(count, uniform), np.ones(count, np.float32)
        else:
            slot = self._tree.draw((np.arange(count) + uniform(count)) / count)  # stratified
            probability = self._tree[slot] / self._tree.total
            raw = (probability * self._count) ** -beta
            weight = (raw / raw.max()).astype(np.float32)
        return self.gather(slot, weight)

    def gather(self, slot: Ints, weight: Floats) -> TransitionBatch:
        """Return the transitions that start at these slots."""
        reward, discount, end = self._returns(slot)
        next_slot = np.where(self._next[end] == _NONE, slot, self._next[end])  # after termination any slot will do
        return TransitionBatch(
            slot,
            map_tree(lambda x: x[slot], self._observation),
            map_tree(lambda x: x[slot], self._action),
            reward,
            discount,
            map_tree(lambda x: x[next_slot], self._observation),
            None if self._mask is None else self._mask[next_slot],
            weight,
        )

    def _sample_uniform(self, count: int, uniform: Uniform) -> Ints:
        """Sample ready slots uniformly, by rejection."""
        filled = min(self.written, self.capacity)
        sampled: Ints = np.zeros(0, np.int64)
        while sampled.size < count:
            tries = int(1.2 * (count - sampled.size) * filled / self._count) + 8
            slots = (uniform(tries) * filled).astype(np.int64)
            sampled = np.concatenate([sampled, slots[self.ready[slots]]])
        return sampled[:count]

    def _returns(self, slot: Ints) -> tuple[Floats, Floats, Ints]:
        """n-step returns from these slots: (discounted sum of rewards, discount of the bootstrap value, slot of the last step)."""
        end, continues = slot, np.ones(len(slot), np.bool_)
        total, discount = self._reward[slot].astype(np.float64), np.full(len(slot), self.gamma)
        for _ in range(self.n_step - 1):
            after = self._next[end]
            continues = continues & ~self._terminated[end] & (after != _NONE) & self._stepped[after]
            if not continues.any():
                break
            end = np.where(continues, after, end)
            total = np.where(continues, total + discount * self._reward[end], total)
            discount = np.where(continues, discount * self.gamma, discount)
        discount = np.where(self._terminated[end], 0.0, discount)
        return total.astype(np.float32), discount.astype(np.float32), end

    def update_priorities(self, slot: Ints, error: Floats) -> None:
        """Set priorities from the TD errors of sampled transitions. Call before the next `add`."""
        if self._tree is None or self.priorities is None:
            return
        priority = (np.abs(error.astype(np.float64)) + self.priorities.eps) ** self.priorities.alpha
        self._tree.set(slot, priority)
        self.priority_max = max(self.priority_max, float(priority.max(initial=0.0)))

    # -- checkpoint state

    def _columns(self) -> dict[str, Tree]:
        columns = {
            "observation": self._observation,
            "action": self._action,
            "reward": self._reward,
            "terminated": self._terminated,
            "stepped": self._stepped,
            "ready": self.ready,
            "next": self._next,
        }
        return columns | ({} if self._mask is None else {"mask": self._mask})

    def state(self) -> dict[str, Array]:
        """Return all columns by name. Open episodes end here: a resumed run restarts its environments."""
        filled = min(self.written, self.capacity)
        arrays = {path: leaf[:filled] for path, leaf in leaves(self._columns())}
        counters = np.array([self.written, self.added, self._count], np.int64)
        arrays |= {"counters": counters, "priority_max": np.array(self.priority_max)}
        return arrays | ({} if self._tree is None else {"priority": self._tree[:filled]})

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Raises ConfigError if the state has another capacity or other columns."""
        if "mask" in state and self._mask is None:
            self._mask = np.ones((self.capacity, state["mask"].shape[1]), np.bool_)
        written, added, count = (int(number) for number in state["counters"])
        filled = min(written, self.capacity)
        for path, column in leaves(self._columns()):
            given = state.get(path)
            if given is None or given.shape != (filled, *column.shape[1:]):
                raise ConfigError(f"The replay buffer of the checkpoint does not fit: {path} has another shape.", _REFILL)
            column[:filled] = given
        self.written, self.added, self._count = written, added, count
        self.priority_max = float(state["priority_max"])
        if self._tree is not None:
            priority = state["priority"] if "priority" in state else np.where(self.ready[:filled], self.priority_max, 0.0)
            self._tree.set(np.arange(filled), priority)


_NO_SLOTS = np.zeros(0, np.int64)
_REFILL = "Use the replay_buffer_config of that run, or set store_buffer_in_checkpoints: false to start with an empty one."


@dataclass(frozen=True)
class _BlockRows:
    """Some rows of a block, and what to store of them. R rows, T steps."""

    rows: Ints
    observation: Tree  # of the whole block
    mask: Bools
    reward: Floats  # [T, R], and so on
    first: Bools
    terminated: Bools
    stepped: Bools
    """A step was taken, and its outcome is known."""
    leads: Bools
    """… and its next observation is in the next row."""
    stored: Bools  # [T+1, R]
    """The observation is stored."""
    closes: Bools
    """The last known step of its episode."""
    open_at: tuple[Ints, Ints]
    """(t, row) of observations from which an episode may continue in the next block."""
    final_observation: Tree
    final: Ints
    """Indices of the final observations of these rows, with their steps and rows."""
    final_step: Ints
    final_row: Ints

    @classmethod
    def of(cls, segments: Segments, rows: Ints) -> _BlockRows:
        steps, count = segments.spec.steps, len(rows)
        every = count == segments.rows

        def mine(x: Any) -> Any:
            return x if every else x[:, rows]

        valid, first, terminated = mine(segments.valid), mine(segments.first), mine(segments.terminated)
        final, step, row, has_final = _finals(segments, rows, every)
        after = np.zeros_like(valid)
        after[:-1] = valid[1:]
        cut = mine(segments.truncated) & ~terminated
        # If the next row does not belong to the same episode, the next observation is lost.
        lost = ~terminated & ~has_final & (first[1:] | (cut & after))
        stepped = valid & ~lost
        leads = stepped & ~terminated & ~has_final
        stored = np.zeros((steps + 1, count), np.bool_)
        stored[:-1] = stepped
        stored[1:] |= leads
        continues = np.zeros_like(stepped)
        continues[:-1] = leads[:-1] & stepped[1:]
        last = np.zeros_like(stepped)  # no step after it in this block
        last[:] = ~(np.cumsum(stepped[::-1], axis=0)[::-1] - stepped).astype(np.bool_)
        open_after = leads & last & ~cut
        t, at = np.nonzero(open_after)
        closes = stepped & ~continues & ~open_after
        keep = stepped[step, row]
        return cls(
            rows,
            segments.observation,
            segments.action_mask,
            mine(segments.reward),
            first,
            terminated,
            stepped,
            leads,
            stored,
            closes,
            (t + 1, at),
            segments.final_observation,
            final[keep],
            step[keep],
            row[keep],
        )

    @property
    def max_slots(self) -> int:
        """Upper bound on the slots needed."""
        return int(np.count_nonzero(self.stored)) + len(self.final)


def _finals(segments: Segments, rows: Ints, every: bool) -> tuple[Ints, Ints, Ints, Bools]:
    """(index, step, row among these) of the final observations, and a mask [T, R] of the steps that have one."""
    has_final = np.zeros((segments.spec.steps, len(rows)), np.bool_)
    n = segments.finals
    if not n:
        return _NO_SLOTS, _NO_SLOTS, _NO_SLOTS, has_final
    step, row = segments.final_at[:n, 0], segments.final_at[:n, 1]
    final = np.arange(n)
    if not every:
        position = np.full(segments.rows, _NONE, np.int64)
        position[rows] = np.arange(len(rows))
        mine = position[row] != _NONE
        final, step, row = final[mine], step[mine], position[row[mine]]
    has_final[step, row] = True
    return final, step, row, has_final
