"""What an update runs over: segments as tensors, laid out for learning and divisible into minibatches and shards.

Letters: T steps of a segment, B rows, M samples, [L, S] for S sequences of L steps of a recurrent policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Floats, Segments
from ludus.models.devices import moved
from ludus.models.policy import Policy

D = TypeVar("D", bound="Divisible")


class Divisible(Protocol):
    """Something whose loss is a mean over samples and that can be cut into parts: samples, sequences or whole trajectories."""

    @property
    def units(self) -> int:
        """How many parts it could be cut into."""
        ...

    @property
    def samples(self) -> int:
        """Valid steps inside: the weight of its loss."""
        ...

    def select(self: D, index: Tensor) -> D: ...

    def describe(self) -> str:
        """The statistics that a reader of a diverged run wants to see."""
        ...


def split(batch: D, parts: int) -> list[D]:
    """Shards of nearly equal size, none of them empty; what belongs together stays whole."""
    if parts == 1 or batch.units < 2 * parts:
        return [batch]
    return [batch.select(index) for index in torch.arange(batch.units).tensor_split(parts)]


def part_of(batch: D, rank: int, size: int) -> D | None:
    """The part of one of several learners; None if there are not enough units for it."""
    index = torch.arange(batch.units).tensor_split(size)[rank]
    return batch.select(index) if len(index) else None


def minibatches(batch: D, size: int, generator: torch.Generator) -> Iterator[D]:
    """A random partition into parts of equal size, as near to `size` units as that allows."""
    order = torch.randperm(batch.units, generator=generator)
    for index in order.tensor_split(max(1, round(batch.units / size))):
        yield batch.select(index)


def mean_over(valid: Tensor | None) -> Callable[[Tensor], Tensor]:
    if valid is None:
        return torch.mean
    count = valid.sum().clamp(min=1)
    return lambda x: torch.where(valid, x, 0.0).sum() / count


def described(numbers: Sequence[tuple[str, Tensor]]) -> str:
    parts = []
    for name, x in numbers:
        bad = int((~torch.isfinite(x)).sum())
        parts.append(
            f"{name} min {float(x.min()):.3g} mean {float(x.mean()):.3g} max {float(x.max()):.3g}"
            + (f" ({bad} not finite)" if bad else "")
        )
    return "Batch: " + "; ".join(parts) + "."


@dataclass
class Batch:
    """Samples with advantages and targets. Leaves are [M, …], or [L, S, …] with a state per sequence for a recurrent policy."""

    observation: Tree
    action: Tree
    mask: Tensor | None
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    valid: Tensor | None = None
    first: Tensor | None = None
    state: tuple[Tensor, ...] = ()

    def select(self, index: Tensor) -> Batch:
        """Samples of a flat batch, or sequences of a recurrent one; a view where they are neighbours in order."""
        dim = 0 if self.valid is None else 1
        begin, count = int(index[0]), len(index)
        in_order = int(index[-1]) == begin + count - 1 and bool((index.diff() == 1).all())
        index = moved(index, self.advantage.device)

        def pick(x: Tensor, dim: int = dim) -> Tensor:
            return x.narrow(dim, begin, count) if in_order else x.index_select(dim, index)

        return self._with(pick, lambda x: pick(x, 0))

    def on(self, device: torch.device) -> Batch:
        """The same on the device where it is learned from."""
        if device.type == "cpu":
            return self
        return self._with(lambda x: moved(x, device), lambda x: moved(x, device))

    def _with(self, change: Callable[[Tensor], Tensor], change_state: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            observation=map_tree(change, self.observation),
            action=map_tree(change, self.action),
            mask=None if self.mask is None else change(self.mask),
            log_prob=change(self.log_prob),
            value=change(self.value),
            advantage=change(self.advantage),
            target=change(self.target),
            valid=None if self.valid is None else change(self.valid),
            first=None if self.first is None else change(self.first),
            state=tuple(map(change_state, self.state)),
        )

    @property
    def units(self) -> int:
        return self.advantage.shape[-1]

    @property
    def samples(self) -> int:
        return self.advantage.shape[0] if self.valid is None else int(self.valid.sum())

    def describe(self) -> str:
        return described([(name, getattr(self, name)) for name in ("advantage", "target", "value", "log_prob")])


def make_batch(policy: Policy, segments: Segments, advantage: Floats, target: Floats) -> Batch:
    """`segments` with [T, B] advantages and targets, where the policy computes."""
    return (_sequences if policy.recurrent else _samples)(policy, segments, advantage, target).on(policy.device)


def _samples(policy: Policy, segments: Segments, advantage: Floats, target: Floats) -> Batch:
    """All valid rows as one flat batch. Padding and reset rows never reach the loss."""
    t = segments.spec.steps
    valid = segments.valid
    keep = None if valid.all() else torch.from_numpy(np.flatnonzero(valid))

    def flat(x: Array) -> Tensor:
        tensor = torch.from_numpy(x[:t]).flatten(0, 1)
        return tensor if keep is None else tensor.index_select(0, keep)

    return Batch(
        observation=policy.arranged(map_tree(flat, segments.observation)),
        action=map_tree(flat, segments.action),
        mask=flat(segments.action_mask) if segments.spec.mask_size else None,
        log_prob=flat(segments.log_prob),
        value=flat(segments.value),
        advantage=flat(advantage),
        target=flat(target),
    )


def _sequences(policy: Policy, segments: Segments, advantage: Floats, target: Floats) -> Batch:
    """Segments cut into sequences of `state_every` steps, each with the recurrent state it began in."""
    length, count, b = segments.spec.state_every, segments.spec.states, segments.rows

    t, missing = segments.spec.steps, length * count - segments.spec.steps

    def cut(x: Array) -> Tensor:
        seen = np.where(segments.valid.reshape(t, b, *[1] * (x.ndim - 2)), x[:t], np.zeros((), x.dtype))
        if missing:  # the last sequence is shorter than the others
            seen = np.concatenate([seen, np.zeros((missing, *seen.shape[1:]), seen.dtype)])
        sequences: Tensor = torch.from_numpy(seen).unflatten(0, (count, length)).transpose(0, 1)
        return sequences.flatten(1, 2)  # [L, count·B, …]; what is not valid is 0

    batch = Batch(
        observation=policy.arranged(map_tree(cut, segments.observation)),
        action=map_tree(cut, segments.action),
        mask=cut(segments.action_mask) if segments.spec.mask_size else None,
        log_prob=cut(segments.log_prob),
        value=cut(segments.value),
        advantage=cut(advantage),
        target=cut(target),
        valid=cut(segments.valid),
        first=cut(segments.first),
        state=tuple(torch.from_numpy(s.reshape(count * b, *s.shape[2:])) for s in segments.state),
    )
    assert batch.valid is not None
    return batch.select(torch.nonzero(batch.valid.any(dim=0)).squeeze(1))
