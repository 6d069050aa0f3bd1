"""A replay buffer of single transitions, drawn at random or by priority, with returns over n steps (Schaul et al. 2016).

An observation is kept once: what came of one step is where the next one was made. Every kept observation has a place in a ring,
with the step that was made there, if any, and the place of the observation that it led to. Whatever leads to a place is older
than it and makes room earlier, so that a step that is still there finds all that it led to.

Rows of blocks are told apart by their origin. A row goes on where its origin was before if it does not begin an episode and shows
the very observation with which that ended; else something between them was lost, and the two are not joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludus.buffers.collate import rows_in_turn
from ludus.buffers.sum_tree import Doubles, SumTree
from ludus.core.tree import Array, Tree, leaves, map_tree
from ludus.core.types import Bools, Floats, Ints, Segments
from ludus.errors import ConfigError

Uniform = Callable[[int], Doubles]
"""So many random numbers in [0, 1)."""

_NONE = -1
_MOST_LANES = 1 << 17  # sessions that broke off leave theirs behind


@dataclass(frozen=True)
class Priorities:
    """Steps are drawn in proportion to (|error| + eps)^alpha."""

    alpha: float = 0.6
    eps: float = 1e-6


@dataclass(frozen=True)
class Drawn:
    """N transitions over up to n steps."""

    place: Ints
    """Where they are, for `learned`."""
    observation: Tree
    action: Tree
    reward: Floats
    """Discounted sum until the following observation."""
    discount: Floats
    """Of what the following observation is worth; 0 where the game was over before."""
    following: Tree
    mask: Bools | None
    """[N, M] what is allowed there; None if nobody ever forbade anything."""
    weight: Floats
    """Corrects for being drawn by priority; at most 1."""


class Transitions:
    """So many observations are kept; the oldest make room. Nothing here is random: whoever draws brings the numbers."""

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
        """`observation`, `action`: trees of ArraySpecs. Raises ConfigError when all of it would need more than `max_bytes`."""
        self.capacity, self.n_step, self.gamma = capacity, n_step, gamma
        self.priorities = priorities
        self._check_size(observation, action, max_bytes)
        self._observation: Tree = map_tree(lambda spec: spec.zeros(capacity), observation)
        self._action: Tree = map_tree(lambda spec: spec.zeros(capacity), action)
        self._reward = np.zeros(capacity, np.float32)
        self._terminated = np.zeros(capacity, np.bool_)
        self._stepped = np.zeros(capacity, np.bool_)  # an action was taken here
        self._ready = np.zeros(capacity, np.bool_)  # and n steps from here are known, or all until the episode ended
        self._next = np.full(capacity, _NONE, np.int64)
        self._mask: Bools | None = None
        self._tree = None if priorities is None else SumTree(capacity)
        self._lanes: dict[int, int] = {}  # origin → its row in the three below
        self._tail = np.zeros(0, np.int64)  # number of the observation with which an open episode goes on
        self._recent = np.zeros((0, n_step - 1), np.int64)  # numbers of its newest steps, which wait for more of them
        self._known: tuple[Ints, list[Ints], Ints] | None = None
        self._evicted: list[Ints] = []
        self._fresh: list[Ints] = []
        self.written = 0  # observations, ever; number k is at place k % capacity
        self.added = 0
        """Steps, ever."""
        self.priority_max = 1.0
        self._count = 0

    def __len__(self) -> int:
        """Transitions that can be drawn."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Of what is filled."""
        filled = min(self.written, self.capacity) / self.capacity
        arrays = [leaf for _, leaf in leaves(self._columns())]
        return int(filled * sum(int(leaf.nbytes) for leaf in arrays)) + (self._tree.nbytes if self._tree else 0)

    @property
    def full_bytes(self) -> int:
        """Of what `state` returns when nothing more fits in; masks, which are known when the first one comes, not counted."""
        columns = sum(int(leaf.nbytes) for _, leaf in leaves(self._columns()))
        return columns + (8 * self.capacity if self.priorities else 0)

    def _check_size(self, observation: Tree, action: Tree, max_bytes: int | None) -> None:
        specs = [spec for _, spec in (*leaves(observation), *leaves(action))]
        each = sum(int(spec.zeros().nbytes) for spec in specs) + 4 + 3 + 8 + (8 if self.priorities else 0)
        needed = each * self.capacity
        if max_bytes is not None and needed > max_bytes:
            raise ConfigError(
                f"replay_buffer_config.capacity is {self.capacity:,}, and so many observations of {each:,} bytes would need "
                f"{needed:,} bytes; max_bytes is {max_bytes:,}.",
                f"Keep at most {max_bytes // each:,}, or raise replay_buffer_config.max_bytes if the machine has the memory.",
            )

    # -- adding

    def add(self, segments: Segments) -> None:
        """Copy what is valid. Raises ConfigError when a block alone would fill the buffer."""
        steps = segments.steps
        if 4 * steps > self.capacity:  # a step has at most two observations and a final one that are its own
            raise ConfigError(
                f"replay_buffer_config.capacity is {self.capacity:,}, and one block alone has {steps:,} steps.",
                f"Use at least {4 * steps:,}, or fewer environments, or a shorter rollout_fragment_length.",
            )
        if segments.spec.mask_size and self._mask is None:
            self._mask = np.ones((self.capacity, segments.spec.mask_size), np.bool_)
        self.added += steps
        groups, lanes = self._rows_of(segments.origin)
        for group in groups:
            self._add(segments, group, lanes[group])
        self._settle()

    def _rows_of(self, origin: Ints) -> tuple[list[Ints], Ints]:
        """Groups of rows of different origins, in order of time, and the lanes of all rows."""
        if self._known is None or not np.array_equal(self._known[0], origin):
            if len(self._lanes) + len(origin) > _MOST_LANES:
                self._lanes.clear()
                self._tail, self._recent = self._tail[:0], self._recent[:0]
            lanes = np.array([self._lanes.setdefault(number, len(self._lanes)) for number in origin.tolist()], np.int64)
            more = len(self._lanes) - len(self._tail)
            self._tail = np.concatenate([self._tail, np.full(more, _NONE, np.int64)])
            self._recent = np.concatenate([self._recent, np.full((more, self.n_step - 1), _NONE, np.int64)])
            self._known = origin.copy(), rows_in_turn(origin), lanes
        return self._known[1:]

    def _add(self, segments: Segments, rows: Ints, lanes: Ints) -> None:
        """Rows of different origins."""
        block = _Rows.of(segments, rows)
        joined = self._joined(block, lanes)
        self._close(lanes[~joined])
        number = self._keep(block, np.where(joined, self._tail[lanes], _NONE))
        place = number % self.capacity
        steps = len(block.stepped)
        at = place[:steps][block.stepped]
        map_tree(lambda kept, given: kept.__setitem__(at, given[:, rows][block.stepped]), self._action, segments.action)
        self._reward[at] = block.reward[block.stepped]
        self._terminated[at] = block.terminated[block.stepped]
        self._stepped[at] = True
        self._next[place[:steps][block.leads]] = place[1:][block.leads]
        self._follow(block, lanes, number)
        t, row = block.open_at
        self._tail[lanes] = _NONE
        self._tail[lanes[row]] = number[t, row]

    def _joined(self, block: _Rows, lanes: Ints) -> Bools:
        """[R] rows that go on where their lane is, with the same observation."""
        tail = self._tail[lanes]
        joined: Bools = (tail >= self.written + block.most - self.capacity) & (tail != _NONE) & block.stepped[0] & ~block.first[0]
        if joined.any():
            place = tail % self.capacity  # of the others it is any, and not looked at
            for (_, kept), (_, given) in zip(leaves(self._observation), leaves(block.seen), strict=True):
                same = kept[place] == given[0, block.rows]
                joined &= same.reshape(len(same), -1).all(axis=1)
        return joined

    def _keep(self, block: _Rows, already: Ints) -> Ints:
        """Take the observations in, oldest first; [T+1, R] their numbers, of which those of row 0 may be there already."""
        number = np.full(block.shown.shape, _NONE, np.int64)
        number[0] = already
        new = block.shown & (number == _NONE)
        t, row = np.nonzero(new)
        first, finals = self.written, len(block.final_step)
        self.written += t.size + finals
        places = np.arange(first, self.written) % self.capacity
        self._make_room(places)
        number[t, row] = np.arange(first, first + t.size)
        at, column, beyond = places[: t.size], block.rows[row], places[t.size :]
        map_tree(lambda kept, given: kept.__setitem__(at, given[t, column]), self._observation, block.seen)
        if self._mask is not None:
            self._mask[at] = block.allowed[t, column]
            self._mask[beyond] = True  # of an observation that is kept beside the block nobody says what was allowed
        if finals:
            map_tree(lambda kept, given: kept.__setitem__(beyond, given[block.final]), self._observation, block.final_seen)
            self._next[number[block.final_step, block.final_row] % self.capacity] = beyond
        return number

    def _make_room(self, places: Ints) -> None:
        self._count -= int(np.count_nonzero(self._ready[places]))
        for column in (self._ready, self._stepped, self._terminated):
            column[places] = False
        self._next[places] = _NONE
        self._evicted.append(places)

    def _follow(self, block: _Rows, lanes: Ints, number: Ints) -> None:
        """Steps can be drawn when as many are known as a return is summed over, or all that ever will be."""
        if self.n_step == 1:
            self._offer(number[: len(block.stepped)][block.stepped])
            return
        for t in np.flatnonzero(block.stepped.any(axis=1)):
            step = block.stepped[t]
            lane = lanes[step]
            self._offer(self._recent[lane, -1])
            self._recent[lane, 1:] = self._recent[lane, :-1]
            self._recent[lane, 0] = number[t, step]
            over = block.closes[t]
            if over.any():
                self._close(lanes[over])

    def _close(self, lanes: Ints) -> None:
        """No more will be known of what these did last."""
        if self.n_step > 1 and lanes.size:
            self._offer(self._recent[lanes].reshape(-1))
            self._recent[lanes] = _NONE

    def _offer(self, numbers: Ints) -> None:
        places = numbers[numbers >= max(0, self.written - self.capacity)] % self.capacity
        self._ready[places] = True
        self._count += places.size
        self._fresh.append(places)

    def _settle(self) -> None:
        """Tell the tree, once for a block. What is new is drawn soon: it is worth as much as the best known."""
        evicted, fresh = np.concatenate([*self._evicted, _NO_PLACES]), np.concatenate([*self._fresh, _NO_PLACES])
        self._evicted.clear()
        self._fresh.clear()
        if self._tree is not None:
            self._tree.set(evicted, 0.0)
            self._tree.set(fresh[self._ready[fresh]], self.priority_max)

    # -- drawing

    def draw(self, count: int, uniform: Uniform, beta: float = 0.0) -> Drawn:
        """With replacement; there must be some. `beta`: how far the weights undo the priorities."""
        if self._tree is None:
            place, weight = self._any(count, uniform), np.ones(count, np.float32)
        else:
            place = self._tree.draw((np.arange(count) + uniform(count)) / count)  # one of each of `count` equal parts
            probability = self._tree[place] / self._tree.total
            raw = (probability * self._count) ** -beta
            weight = (raw / raw.max()).astype(np.float32)
        return self.at(place, weight)

    def drawable(self) -> Ints:
        """The places of all transitions that can be drawn."""
        return np.flatnonzero(self._ready)

    def at(self, place: Ints, weight: Floats) -> Drawn:
        """The transitions that begin at these places."""
        reward, discount, end = self._returns(place)
        following = np.where(self._next[end] == _NONE, place, self._next[end])  # where nothing follows, anything does
        return Drawn(
            place,
            map_tree(lambda x: x[place], self._observation),
            map_tree(lambda x: x[place], self._action),
            reward,
            discount,
            map_tree(lambda x: x[following], self._observation),
            None if self._mask is None else self._mask[following],
            weight,
        )

    def _any(self, count: int, uniform: Uniform) -> Ints:
        """Places that are ready, each as likely as any other: those that are not are drawn again."""
        filled = min(self.written, self.capacity)
        found: Ints = np.zeros(0, np.int64)
        while found.size < count:
            tries = int(1.2 * (count - found.size) * filled / self._count) + 8
            places = (uniform(tries) * filled).astype(np.int64)
            found = np.concatenate([found, places[self._ready[places]]])
        return found[:count]

    def _returns(self, place: Ints) -> tuple[Floats, Floats, Ints]:
        """Over up to n steps from these: (discounted sum, discount of what follows, the last step)."""
        end, going = place, np.ones(len(place), np.bool_)
        total, discount = self._reward[place].astype(np.float64), np.full(len(place), self.gamma)
        for _ in range(self.n_step - 1):
            after = self._next[end]
            going = going & ~self._terminated[end] & (after != _NONE) & self._stepped[after]
            if not going.any():
                break
            end = np.where(going, after, end)
            total = np.where(going, total + discount * self._reward[end], total)
            discount = np.where(going, discount * self.gamma, discount)
        discount = np.where(self._terminated[end], 0.0, discount)
        return total.astype(np.float32), discount.astype(np.float32), end

    def learned(self, place: Ints, error: Floats) -> None:
        """How wrong we were about steps that were drawn; before anything else is added."""
        if self._tree is None or self.priorities is None:
            return
        priority = (np.abs(error.astype(np.float64)) + self.priorities.eps) ** self.priorities.alpha
        self._tree.set(place, priority)
        self.priority_max = max(self.priority_max, float(priority.max(initial=0.0)))

    # -- what a resumed run may go on with

    def _columns(self) -> dict[str, Tree]:
        columns = {name: getattr(self, f"_{name}") for name in _COLUMNS}
        return columns | ({} if self._mask is None else {"mask": self._mask})

    def state(self) -> dict[str, Array]:
        """All that is kept, by name. Episodes that are open end there: environments start anew when a run is resumed."""
        filled = min(self.written, self.capacity)
        arrays = {path: leaf[:filled] for path, leaf in leaves(self._columns())}
        counters = np.array([self.written, self.added, self._count], np.int64)
        arrays |= {"counters": counters, "priority_max": np.array(self.priority_max)}
        return arrays | ({} if self._tree is None else {"priority": self._tree[:filled]})

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Raises ConfigError when it was kept with another capacity or of other things."""
        if "mask" in state and self._mask is None:
            self._mask = np.ones((self.capacity, state["mask"].shape[1]), np.bool_)
        written, added, count = (int(number) for number in state["counters"])
        filled = min(written, self.capacity)
        for path, column in leaves(self._columns()):
            given = state.get(path)
            if given is None or given.shape != (filled, *column.shape[1:]):
                raise ConfigError(f"The replay buffer of the checkpoint does not fit: {path} is not as it is here.", _REFILL)
            column[:filled] = given
        self.written, self.added, self._count = written, added, count
        self.priority_max = float(state["priority_max"])
        if self._tree is not None:
            known = state["priority"] if "priority" in state else np.where(self._ready[:filled], self.priority_max, 0.0)
            self._tree.set(np.arange(filled), known)


_COLUMNS = ("observation", "action", "reward", "terminated", "stepped", "ready", "next")
_NO_PLACES = np.zeros(0, np.int64)
_REFILL = "Use the replay_buffer_config of that run, or set store_buffer_in_checkpoints: false to begin with an empty one."


@dataclass(frozen=True)
class _Rows:
    """Some rows of a block, and what is to be kept of them. R rows, T steps."""

    rows: Ints
    seen: Tree  # of the whole block
    allowed: Bools
    reward: Floats  # [T, R], and so on
    first: Bools
    terminated: Bools
    stepped: Bools
    """A step was made, and what it led to is known."""
    leads: Bools
    """… and that is in the next row."""
    shown: Bools  # [T+1, R]
    """The observation is kept."""
    closes: Bools
    """The last step of its episode, or the last one of which anything is known."""
    open_at: tuple[Ints, Ints]
    """(t, row) of observations with which an episode may go on in the next block."""
    final_seen: Tree
    final: Ints
    """Which of the final observations are of these rows, and of which steps."""
    final_step: Ints
    final_row: Ints

    @classmethod
    def of(cls, segments: Segments, rows: Ints) -> _Rows:
        steps, count = segments.spec.steps, len(rows)
        every = count == segments.rows

        def mine(x: Any) -> Any:
            return x if every else x[:, rows]

        valid, first, terminated = mine(segments.valid), mine(segments.first), mine(segments.terminated)
        final, step, row, aside = _finals(segments, rows, every)
        after = np.zeros_like(valid)
        after[:-1] = valid[1:]
        cut = mine(segments.truncated) & ~terminated
        # The row after a step that was not the last one belongs to it, or to nobody: then what came of it is not known.
        lost = ~terminated & ~aside & (first[1:] | (cut & after))
        stepped = valid & ~lost
        leads = stepped & ~terminated & ~aside
        shown = np.zeros((steps + 1, count), np.bool_)
        shown[:-1] = stepped
        shown[1:] |= leads
        goes_on = np.zeros_like(stepped)
        goes_on[:-1] = leads[:-1] & stepped[1:]
        last = np.zeros_like(stepped)  # nothing was done after it in this block
        last[:] = ~(np.cumsum(stepped[::-1], axis=0)[::-1] - stepped).astype(np.bool_)
        open_after = leads & last & ~cut
        t, at = np.nonzero(open_after)
        closes = stepped & ~goes_on & ~open_after
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
            shown,
            closes,
            (t + 1, at),
            segments.final_observation,
            final[keep],
            step[keep],
            row[keep],
        )

    @property
    def most(self) -> int:
        """How many places it may need."""
        return int(np.count_nonzero(self.shown)) + len(self.final)


def _finals(segments: Segments, rows: Ints, every: bool) -> tuple[Ints, Ints, Ints, Bools]:
    """(index, step, row among these) of final observations that are kept beside the block, and [T, R] where there is one."""
    aside = np.zeros((segments.spec.steps, len(rows)), np.bool_)
    n = segments.finals
    if not n:
        return _NO_PLACES, _NO_PLACES, _NO_PLACES, aside
    step, row = segments.final_at[:n, 0], segments.final_at[:n, 1]
    final = np.arange(n)
    if not every:
        position = np.full(segments.rows, _NONE, np.int64)
        position[rows] = np.arange(len(rows))
        mine = position[row] != _NONE
        final, step, row = final[mine], step[mine], position[row[mine]]
    aside[step, row] = True
    return final, step, row, aside
