"""Batches of tensors for a gradient update, divisible into minibatches and shards.

Shapes: T steps of a segment, B rows, M samples, [L, S]: S sequences of L steps of a recurrent policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Floats, Segments
from ludus.models.devices import to_device
from ludus.models.policy import Policy

D = TypeVar("D", bound="Divisible")


class Divisible(Protocol):
    """A batch whose loss is a mean over samples, and which can be split between units: samples, sequences or trajectories."""

    @property
    def units(self) -> int:
        """Number of indivisible units."""
        ...

    @property
    def samples(self) -> int:
        """Number of valid steps: the weight of its loss."""
        ...

    def select(self: D, index: Tensor) -> D: ...

    def describe(self) -> str:
        """Statistics for the error message of a diverged run."""
        ...


def split(batch: D, parts: int) -> list[D]:
    """Split into shards of nearly equal size, none of them empty."""
    if parts == 1 or batch.units < 2 * parts:
        return [batch]
    return [batch.select(index) for index in torch.arange(batch.units).tensor_split(parts)]


def rank_part(batch: D, rank: int, size: int) -> D | None:
    """Return the part of one learner of a group, or None if there are fewer units than learners."""
    index = torch.arange(batch.units).tensor_split(size)[rank]
    return batch.select(index) if len(index) else None


def minibatches(batch: D, size: int, generator: torch.Generator) -> Iterator[D]:
    """Yield a random partition into parts of nearly equal size, about `size` units each."""
    order = torch.randperm(batch.units, generator=generator)
    for index in order.tensor_split(max(1, round(batch.units / size))):
        yield batch.select(index)


def mean_over(valid: Tensor | None) -> Callable[[Tensor], Tensor]:
    if valid is None:
        return torch.mean
    count = valid.sum().clamp(min=1)
    return lambda x: torch.where(valid, x, 0.0).sum() / count


def describe_tensors(tensors: Sequence[tuple[str, Tensor]]) -> str:
    parts = []
    for name, x in tensors:
        bad = int((~torch.isfinite(x)).sum())
        parts.append(
            f"{name} min {float(x.min()):.3g} mean {float(x.mean()):.3g} max {float(x.max()):.3g}"
            + (f" ({bad} not finite)" if bad else "")
        )
    return "Batch: " + "; ".join(parts) + "."


@dataclass
class Batch:
    """Samples with advantages and value targets. Leaves are [M, …]; for a recurrent policy [L, S, …] with a state per sequence."""

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
        """Select samples, or sequences of a recurrent batch; a view if they are consecutive."""
        dim = 0 if self.valid is None else 1
        begin, count = int(index[0]), len(index)
        in_order = int(index[-1]) == begin + count - 1 and bool((index.diff() == 1).all())
        index = to_device(index, self.advantage.device)

        def pick(x: Tensor, dim: int = dim) -> Tensor:
            return x.narrow(dim, begin, count) if in_order else x.index_select(dim, index)

        state = tuple(pick(x, 0) for x in self.state)
        return replace(replace(self, state=())._map(pick), state=state)

    def to(self, device: torch.device) -> Batch:
        return self if device.type == "cpu" else self._map(lambda x: to_device(x, device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**map_tree(lambda x: None if x is None else change(x), tensors))

    @property
    def units(self) -> int:
        return self.advantage.shape[-1]

    @property
    def samples(self) -> int:
        return self.advantage.shape[0] if self.valid is None else int(self.valid.sum())

    def describe(self) -> str:
        return describe_tensors([(name, getattr(self, name)) for name in ("advantage", "target", "value", "log_prob")])


def make_batch(policy: Policy, segments: Segments, advantage: Floats, target: Floats) -> Batch:
    """Build a batch on the device of `policy` from segments and their [T, B] advantages and targets."""
    return (_sequences if policy.recurrent else _samples)(policy, segments, advantage, target).to(policy.device)


def _samples(policy: Policy, segments: Segments, advantage: Floats, target: Floats) -> Batch:
    """All valid steps as one flat batch; padding and reset rows are left out."""
    t = segments.spec.steps
    valid = segments.valid
    keep = None if valid.all() else torch.from_numpy(np.flatnonzero(valid))

    def flat(x: Array) -> Tensor:
        tensor = torch.from_numpy(x[:t]).flatten(0, 1)
        return tensor if keep is None else tensor.index_select(0, keep)

    return Batch(
        observation=policy.to_network_layout(map_tree(flat, segments.observation)),
        action=map_tree(flat, segments.action),
        mask=flat(segments.action_mask) if segments.spec.mask_size else None,
        log_prob=flat(segments.log_prob),
        value=flat(segments.value),
        advantage=flat(advantage),
        target=flat(target),
    )


def _sequences(policy: Policy, segments: Segments, advantage: Floats, target: Floats) -> Batch:
    """Segments cut into sequences of `state_every` steps, each with its initial recurrent state."""
    length, count, b = segments.spec.state_every, segments.spec.states, segments.rows
    t, missing = segments.spec.steps, length * count - segments.spec.steps

    def cut(x: Array) -> Tensor:
        steps = np.where(segments.valid.reshape(t, b, *[1] * (x.ndim - 2)), x[:t], np.zeros((), x.dtype))
        if missing:  # the last sequence is shorter than the others
            steps = np.concatenate([steps, np.zeros((missing, *steps.shape[1:]), steps.dtype)])
        sequences: Tensor = torch.from_numpy(steps).unflatten(0, (count, length)).transpose(0, 1)
        return sequences.flatten(1, 2)  # [L, count·B, …]; 0 at invalid steps

    batch = Batch(
        observation=policy.to_network_layout(map_tree(cut, segments.observation)),
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
