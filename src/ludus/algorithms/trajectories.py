"""Whole segments, for algorithms that look along them with the values of the policy that learns (V-trace).

Letters: T steps, B rows, N valid steps, [L, S] for S sequences of L steps of a recurrent policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludus.algorithms.minibatch import described
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Floats, Ints, Segments
from ludus.models.devices import moved
from ludus.models.policy import Policy


class Evaluated(NamedTuple):
    """What a policy says about recorded steps. N in the order of `valid`: step by step, row by row."""

    log_prob: Tensor  # [N]
    entropy: Tensor  # [N]
    value: Tensor  # [N]
    following: Floats  # [T, B] value of each step's true successor, without gradient; rubbish where it is not needed


class Grids(NamedTuple):
    """The same as arrays [T, B], 0 where nothing is valid."""

    log_prob: Floats
    value: Floats
    following: Floats


@dataclass
class Trajectories:
    """B whole segments side by side, divisible by rows. Tensors share the memory of the segments until they are selected.

    What is not a valid step, nor the successor of one, is never shown to a policy: it may hold anything.
    """

    observation: Tree  # [T+1, B, …]
    action: Tree  # [T, B, …]
    mask: Tensor | None  # [T+1, B, M]
    first: Tensor  # [T+1, B]
    state: tuple[Tensor, ...]  # [states, B, …]
    final_observation: Tree  # [K, …]
    final_at: Ints  # [K, 2]
    final_value: Floats  # [K] as estimated by the policy that acted
    log_prob: Floats  # [T, B] of the policy that acted
    reward: Floats  # [T, B] as it is learned from
    terminated: Bools
    truncated: Bools
    valid: Bools
    state_every: int = 0
    arranged: bool = False
    anchor: Floats | None = None
    """[T, B] log-probabilities of a policy that the learned one stays near, if that is another."""

    @classmethod
    def of(cls, segments: Segments) -> Trajectories:
        n = segments.finals
        return cls(
            observation=map_tree(torch.from_numpy, segments.observation),
            action=map_tree(torch.from_numpy, segments.action),
            mask=torch.from_numpy(segments.action_mask) if segments.spec.mask_size else None,
            first=torch.from_numpy(segments.first),
            state=tuple(map(torch.from_numpy, segments.state)),
            final_observation=map_tree(lambda x: torch.from_numpy(x[:n]), segments.final_observation),
            final_at=segments.final_at[:n],
            final_value=segments.final_value[:n],
            log_prob=segments.log_prob,
            reward=segments.reward,
            terminated=segments.terminated,
            truncated=segments.truncated,
            valid=segments.valid,
            state_every=segments.spec.state_every,
        )

    def laid_out(self, policy: Policy) -> Trajectories:
        """With observations laid out for `policy`, once, for several passes over them."""
        return replace(
            self,
            observation=policy.arranged(self.observation),
            final_observation=policy.arranged(self.final_observation),
            arranged=True,
        )

    # -- parts

    @property
    def units(self) -> int:
        return int(self.valid.shape[1])

    @property
    def samples(self) -> int:
        return int(np.count_nonzero(self.valid))

    def select(self, index: Tensor) -> Trajectories:
        """Some of the rows. Neighbours in order are a view, whose one copy is made where it is evaluated."""
        rows = index.numpy()
        begin, end = int(rows[0]), int(rows[-1]) + 1
        in_order = end - begin == len(rows) and (np.diff(rows) == 1).all()
        if in_order and len(rows) == self.units:
            return self

        def pick(x: Tensor) -> Tensor:
            return x[:, begin:end] if in_order else x.index_select(1, index)

        def take(x: Array) -> Any:
            return x[:, begin:end] if in_order else x[:, rows]

        place = np.full(self.units, -1)
        place[rows] = np.arange(len(rows))
        finals = np.flatnonzero(place[self.final_at[:, 1]] >= 0)
        final_at = self.final_at[finals]
        final_at[:, 1] = place[final_at[:, 1]]
        return replace(
            self,
            observation=map_tree(pick, self.observation),
            action=map_tree(pick, self.action),
            mask=None if self.mask is None else pick(self.mask),
            first=pick(self.first),
            state=tuple(map(pick, self.state)),
            final_observation=map_tree(lambda x: x.index_select(0, torch.from_numpy(finals)), self.final_observation),
            final_at=final_at,
            final_value=self.final_value[finals],
            log_prob=take(self.log_prob),
            reward=take(self.reward),
            terminated=take(self.terminated),
            truncated=take(self.truncated),
            valid=take(self.valid),
            anchor=None if self.anchor is None else take(self.anchor),
        )

    def chunks(self, samples: int) -> Iterator[Trajectories]:
        """All rows in order, in parts of about so many samples: bounds what a pass over them holds in memory."""
        rows = max(1, samples // max(1, len(self.valid)))
        for index in torch.arange(self.units).split(rows):
            yield self.select(index)

    def describe(self) -> str:
        numbers = [("reward", self.reward), ("log_prob", self.log_prob)]
        return described([(name, torch.from_numpy(x[self.valid])) for name, x in numbers])

    # -- between [T, B] and [N]

    def flat(self, grid: Floats, device: torch.device) -> Tensor:
        """[T, B] → [N]"""
        return moved(torch.from_numpy(grid[self.valid]), device)

    def grid(self, samples: Tensor) -> Floats:
        """[N] → [T, B], 0 where nothing is valid"""
        out = np.zeros(self.valid.shape, np.float32)
        out[self.valid] = samples.detach().cpu().numpy()
        return out

    # -- evaluation

    @torch.no_grad()
    def evaluated(self, policy: Policy, samples: int) -> Grids:
        """What `policy` says, from a pass without gradients in parts of about so many samples."""
        parts = []
        for part in self.chunks(samples):
            now = part.evaluate(policy)
            parts.append((part.grid(now.log_prob), part.grid(now.value), now.following))
        return Grids(*(np.concatenate(grids, axis=1) for grids in zip(*parts, strict=True)))

    def evaluate(self, policy: Policy) -> Evaluated:
        """One pass over all valid steps, with gradients where they are enabled, and the values of their successors."""
        outside = self._outside()
        if policy.recurrent:
            return self._unrolled(policy, outside)
        index = None if self.valid.all() else torch.from_numpy(np.flatnonzero(self.valid))
        steps = len(self.valid)

        def rows(x: Tensor) -> Tensor:
            flat = x[:steps].flatten(0, 1)
            return flat if index is None else flat.index_select(0, index)

        observation = self._arranged(policy, map_tree(rows, self.observation))
        action, mask = _moved(policy, (map_tree(rows, self.action), () if self.mask is None else rows(self.mask)))
        log_prob, entropy, value = policy.evaluate(observation, action, None if self.mask is None else mask)
        following = np.zeros(self.valid.shape, np.float32)
        following[:-1] = self.grid(value)[1:]
        self._look_beyond(policy, outside, following)
        return Evaluated(log_prob, entropy, value, following)

    def _outside(self) -> Bools:
        """[T, B] steps whose successor is in the next row, which is itself not learned from."""
        outside: Bools = self.valid & ~self.terminated
        outside[:-1] &= ~self.valid[1:]
        outside[self.final_at[:, 0], self.final_at[:, 1]] = False
        return outside

    def _look_beyond(self, policy: Policy, outside: Bools, following: Floats) -> None:
        """Fill in the values of successors that are no valid steps: what comes after the last one, and final observations."""
        at = np.flatnonzero(outside) + self.units
        if at.size + len(self.final_at) == 0:
            return
        seen = self._after(at)
        if len(self.final_at):
            seen = map_tree(lambda x, final: torch.cat([x, final]), seen, self.final_observation)
        with torch.no_grad():
            value = policy.value(self._arranged(policy, seen)).cpu().numpy()
        following[outside] = value[: at.size]
        following[self.final_at[:, 0], self.final_at[:, 1]] = value[at.size :]

    def _after(self, at: Ints) -> Tree:
        """Observations [E, …] at flat positions of [T+1, B]."""
        last = self.units * len(self.valid)
        if at.size == self.units and at[0] == last:  # as it is unless episodes end: the row after the last step
            return map_tree(lambda x: x[-1], self.observation)
        t, b = (torch.from_numpy(i) for i in np.divmod(at, self.units))
        return map_tree(lambda x: x[t, b], self.observation)

    def _arranged(self, policy: Policy, observation: Tree) -> Tree:
        return _moved(policy, observation if self.arranged else policy.arranged(observation))

    def _unrolled(self, policy: Policy, outside: Bools) -> Evaluated:
        """Sequences of `state_every` steps from the recorded states, each with one row more: the successor of its last step.

        Final observations keep the value that the acting policy gave them: the state they were seen in is not kept.
        """
        cut = _Cut.of(self.valid, outside, self.state_every)
        observation = self._arranged(policy, map_tree(cut.sequences, self.observation))
        others = (self.action, () if self.mask is None else self.mask, self.first)
        action, mask, first = _moved(policy, map_tree(cut.sequences, others))
        state = _moved(policy, tuple(map(cut.states, self.state)))
        log_prob, entropy, value = policy.evaluate(observation, action, None if self.mask is None else mask, state, first)
        at, after = cut.positions(self.valid)
        following = np.zeros(self.valid.shape, np.float32)
        following[self.valid] = value.detach().cpu().numpy().reshape(-1)[after]
        following[self.final_at[:, 0], self.final_at[:, 1]] = self.final_value
        index = moved(torch.from_numpy(at), policy.device)
        log_prob, entropy, value = (x.flatten().index_select(0, index) for x in (log_prob, entropy, value))
        return Evaluated(log_prob, entropy, value, following)


def _moved(policy: Policy, tree: Tree) -> Tree:
    """To where the policy computes."""
    device = policy.device
    return tree if device.type == "cpu" else map_tree(lambda x: moved(x, device), tree)


@dataclass(frozen=True)
class _Cut:
    """How [T+1, B] becomes [L+1, S]: sequences of L steps that overlap by a row; those without a valid step are left out."""

    length: int
    count: int
    rows: int
    keep: Ints  # [S] of count·B
    hidden: Tensor | None  # [L+1, S] what no policy may see

    @classmethod
    def of(cls, valid: Bools, outside: Bools, length: int) -> _Cut:
        steps, rows = valid.shape
        count = -(-steps // length)
        needed = np.zeros((count * length + 1, rows), np.bool_)
        needed[:steps] = valid
        needed[1 : steps + 1] |= outside
        learned = np.zeros((count * length, rows), np.bool_)
        learned[:steps] = valid
        keep = np.flatnonzero(learned.reshape(count, length, rows).any(axis=1))
        shown = np.stack([needed[k * length : (k + 1) * length + 1] for k in range(count)], axis=1)
        hidden = ~shown.reshape(length + 1, -1)[:, keep]
        return cls(length, count, rows, keep, torch.from_numpy(hidden) if hidden.any() else None)

    def sequences(self, x: Tensor) -> Tensor:
        missing = self.count * self.length + 1 - len(x)
        if missing > 0:
            x = torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])
        shape, stride = (self.length + 1, self.count, *x.shape[1:]), (x.stride(0), self.length * x.stride(0), *x.stride()[1:])
        cut: Tensor = x.as_strided(shape, stride, x.storage_offset()).flatten(1, 2)
        if len(self.keep) < self.count * self.rows:
            cut = cut.index_select(1, torch.from_numpy(self.keep))
        if self.hidden is None:
            return cut
        if cut.data_ptr() == x.data_ptr():  # one sequence per row: still the memory of the segment
            cut = cut.clone()
        cut[self.hidden] = 0
        return cut

    def states(self, state: Tensor) -> Tensor:
        flat = state[: self.count].flatten(0, 1)
        return flat if len(self.keep) == self.count * self.rows else flat.index_select(0, torch.from_numpy(self.keep))

    def positions(self, valid: Bools) -> tuple[Ints, Ints]:
        """Of the valid steps, and of their successors, in a flattened [L+1, S]."""
        place = np.zeros(self.count * self.rows, np.int64)
        place[self.keep] = np.arange(len(self.keep))
        step, row = np.nonzero(valid)
        at = step % self.length * len(self.keep) + place[step // self.length * self.rows + row]
        return at, at + len(self.keep)
