"""Whole segments as a batch, for algorithms that need the current policy's values along each segment (V-trace).

Shapes: T steps, B rows, N valid steps, [L, S]: S sequences of L steps of a recurrent policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludus.algorithms.minibatch import describe_tensors
from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Floats, Ints, Segments
from ludus.models.devices import to_device
from ludus.models.policy import Policy


class PolicyEvaluation(NamedTuple):
    """A policy's evaluation of recorded steps. N is in the order of `valid`: by step, then by row."""

    log_prob: Tensor  # [N]
    entropy: Tensor  # [N]
    value: Tensor  # [N]
    next_value: Floats  # [T, B] value of each step's successor, without gradient; undefined where it is not needed


class EvaluationGrids(NamedTuple):
    """A policy's evaluation as arrays [T, B], 0 at invalid steps."""

    log_prob: Floats
    value: Floats
    next_value: Floats


@dataclass
class Trajectories:
    """B whole segments, divisible by rows. Tensors share the memory of the segments until rows are selected.

    Rows that are neither valid nor the successor of a valid step may hold any value and are never passed to a policy.
    """

    observation: Tree  # [T+1, B, …]
    action: Tree  # [T, B, …]
    mask: Tensor | None  # [T+1, B, M]
    first: Tensor  # [T+1, B]
    state: tuple[Tensor, ...]  # [states, B, …]
    final_observation: Tree  # [K, …]
    final_at: Ints  # [K, 2]
    final_value: Floats  # [K] estimated by the behaviour policy
    log_prob: Floats  # [T, B] of the behaviour policy
    reward: Floats  # [T, B] after reward scaling
    terminated: Bools
    truncated: Bools
    valid: Bools
    state_every: int = 0
    in_network_layout: bool = False
    anchor: Floats | None = None
    """[T, B] log-probabilities of the policy that the surrogate is clipped around, unless it is the current one."""

    @classmethod
    def from_segments(cls, segments: Segments) -> Trajectories:
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

    def to_network_layout(self, policy: Policy) -> Trajectories:
        """Convert the observations to the layout of the network once, for several passes over them."""
        return replace(
            self,
            observation=policy.to_network_layout(self.observation),
            final_observation=policy.to_network_layout(self.final_observation),
            in_network_layout=True,
        )

    # -- parts

    @property
    def units(self) -> int:
        return int(self.valid.shape[1])

    @property
    def samples(self) -> int:
        return int(np.count_nonzero(self.valid))

    def select(self, index: Tensor) -> Trajectories:
        """Select rows; consecutive rows are a view, copied once when they are evaluated."""
        rows = index.numpy()
        begin, end = int(rows[0]), int(rows[-1]) + 1
        in_order = end - begin == len(rows) and (np.diff(rows) == 1).all()
        if in_order and len(rows) == self.units:
            return self

        def pick(x: Tensor) -> Tensor:
            return x[:, begin:end] if in_order else x.index_select(1, index)

        def take(x: Array) -> Any:
            return x[:, begin:end] if in_order else x[:, rows]

        new_row = np.full(self.units, -1)
        new_row[rows] = np.arange(len(rows))
        finals = np.flatnonzero(new_row[self.final_at[:, 1]] >= 0)
        final_at = self.final_at[finals]
        final_at[:, 1] = new_row[final_at[:, 1]]
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
        """Yield all rows in order, in chunks of about `samples` samples, to bound the memory of a pass."""
        rows = max(1, samples // max(1, len(self.valid)))
        for index in torch.arange(self.units).split(rows):
            yield self.select(index)

    def describe(self) -> str:
        columns = [("reward", self.reward), ("log_prob", self.log_prob)]
        return describe_tensors([(name, torch.from_numpy(x[self.valid])) for name, x in columns])

    # -- between [T, B] and [N]

    def flat(self, grid: Floats, device: torch.device) -> Tensor:
        """[T, B] → [N]"""
        return to_device(torch.from_numpy(grid[self.valid]), device)

    def grid(self, samples: Tensor) -> Floats:
        """[N] → [T, B], 0 at invalid steps"""
        out = np.zeros(self.valid.shape, np.float32)
        out[self.valid] = samples.detach().cpu().numpy()
        return out

    # -- evaluation

    @torch.no_grad()
    def evaluate_grids(self, policy: Policy, samples: int) -> EvaluationGrids:
        """Evaluate all steps without gradients, in chunks of about `samples` samples."""
        parts = []
        for part in self.chunks(samples):
            now = part.evaluate(policy)
            parts.append((part.grid(now.log_prob), part.grid(now.value), now.next_value))
        return EvaluationGrids(*(np.concatenate(grids, axis=1) for grids in zip(*parts, strict=True)))

    def evaluate(self, policy: Policy) -> PolicyEvaluation:
        """Evaluate all valid steps in one pass, with gradients if enabled, and the values of their successors."""
        bootstraps: Bools = self.valid & ~self.terminated  # steps whose successor is in the next row, which is not a valid step
        bootstraps[:-1] &= ~self.valid[1:]
        bootstraps[self.final_at[:, 0], self.final_at[:, 1]] = False
        if policy.recurrent:
            return self._evaluate_sequences(policy, bootstraps)
        index = None if self.valid.all() else torch.from_numpy(np.flatnonzero(self.valid))
        steps = len(self.valid)

        def rows(x: Tensor) -> Tensor:
            flat = x[:steps].flatten(0, 1)
            return flat if index is None else flat.index_select(0, index)

        observation = self._prepare(policy, map_tree(rows, self.observation))
        action, mask = _to_policy_device(policy, (map_tree(rows, self.action), () if self.mask is None else rows(self.mask)))
        log_prob, entropy, value = policy.evaluate(observation, action, None if self.mask is None else mask)
        next_value = np.zeros(self.valid.shape, np.float32)
        next_value[:-1] = self.grid(value)[1:]
        self._fill_bootstrap_values(policy, bootstraps, next_value)
        return PolicyEvaluation(log_prob, entropy, value, next_value)

    def _fill_bootstrap_values(self, policy: Policy, bootstraps: Bools, next_value: Floats) -> None:
        """Fill in the values of successors that are not valid steps: bootstrap and final observations."""
        at = np.flatnonzero(bootstraps) + self.units
        if at.size + len(self.final_at) == 0:
            return
        observation = self._observations_at(at)
        if len(self.final_at):
            observation = map_tree(lambda x, final: torch.cat([x, final]), observation, self.final_observation)
        with torch.no_grad():
            value = policy.value(self._prepare(policy, observation)).cpu().numpy()
        next_value[bootstraps] = value[: at.size]
        next_value[self.final_at[:, 0], self.final_at[:, 1]] = value[at.size :]

    def _observations_at(self, at: Ints) -> Tree:
        """Observations [E, …] at flat positions of [T+1, B]."""
        last = self.units * len(self.valid)
        if at.size == self.units and at[0] == last:  # no episode ended: exactly the row after the last step
            return map_tree(lambda x: x[-1], self.observation)
        t, b = (torch.from_numpy(i) for i in np.divmod(at, self.units))
        return map_tree(lambda x: x[t, b], self.observation)

    def _prepare(self, policy: Policy, observation: Tree) -> Tree:
        return _to_policy_device(policy, observation if self.in_network_layout else policy.to_network_layout(observation))

    def _evaluate_sequences(self, policy: Policy, bootstraps: Bools) -> PolicyEvaluation:
        """Evaluate sequences of `state_every` steps from the recorded states, each with one extra row for the last successor.

        Final observations keep the value given by the behaviour policy, because their recurrent state is not recorded.
        """
        layout = _SequenceLayout.build(self.valid, bootstraps, self.state_every)
        observation = self._prepare(policy, map_tree(layout.sequences, self.observation))
        others = (self.action, () if self.mask is None else self.mask, self.first)
        action, mask, first = _to_policy_device(policy, map_tree(layout.sequences, others))
        state = _to_policy_device(policy, tuple(map(layout.states, self.state)))
        log_prob, entropy, value = policy.evaluate(observation, action, None if self.mask is None else mask, state, first)
        at, successor_at = layout.positions(self.valid)
        next_value = np.zeros(self.valid.shape, np.float32)
        next_value[self.valid] = value.detach().cpu().numpy().reshape(-1)[successor_at]
        next_value[self.final_at[:, 0], self.final_at[:, 1]] = self.final_value
        index = to_device(torch.from_numpy(at), policy.device)
        log_prob, entropy, value = (x.flatten().index_select(0, index) for x in (log_prob, entropy, value))
        return PolicyEvaluation(log_prob, entropy, value, next_value)


def _to_policy_device(policy: Policy, tree: Tree) -> Tree:
    device = policy.device
    return tree if device.type == "cpu" else map_tree(lambda x: to_device(x, device), tree)


@dataclass(frozen=True)
class _SequenceLayout:
    """Maps [T+1, B] to [L+1, S]: sequences of L steps that overlap by one row; those without a valid step are left out."""

    length: int
    count: int
    rows: int
    keep: Ints  # [S] of count·B
    hidden: Tensor | None  # [L+1, S] entries that are zeroed before a policy evaluates them

    @classmethod
    def build(cls, valid: Bools, bootstraps: Bools, length: int) -> _SequenceLayout:
        steps, rows = valid.shape
        count = -(-steps // length)
        needed = np.zeros((count * length + 1, rows), np.bool_)
        needed[:steps] = valid
        needed[1 : steps + 1] |= bootstraps
        learned = np.zeros((count * length, rows), np.bool_)
        learned[:steps] = valid
        keep = np.flatnonzero(learned.reshape(count, length, rows).any(axis=1))
        visible = np.stack([needed[k * length : (k + 1) * length + 1] for k in range(count)], axis=1)
        hidden = ~visible.reshape(length + 1, -1)[:, keep]
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
        if cut.data_ptr() == x.data_ptr():  # one sequence per row: shares the memory of the segment
            cut = cut.clone()
        cut[self.hidden] = 0
        return cut

    def states(self, state: Tensor) -> Tensor:
        flat = state[: self.count].flatten(0, 1)
        return flat if len(self.keep) == self.count * self.rows else flat.index_select(0, torch.from_numpy(self.keep))

    def positions(self, valid: Bools) -> tuple[Ints, Ints]:
        """Positions of the valid steps, and of their successors, in a flattened [L+1, S]."""
        sequence = np.zeros(self.count * self.rows, np.int64)
        sequence[self.keep] = np.arange(len(self.keep))
        step, row = np.nonzero(valid)
        at = step % self.length * len(self.keep) + sequence[step // self.length * self.rows + row]
        return at, at + len(self.keep)
