"""Adam over one flat vector: all parameters of a model live in a single buffer, their gradients in another.

Clipping, the finite check, the update, an all-reduce and a weight broadcast are then one operation each, however many layers
the model has. The gradient of a minibatch may be computed by several threads, each with a shard of it and a buffer of its
own: on CPUs that is faster than splitting every single operation over the cores. And by several learners, each with a part of
the minibatch: the vector is then summed over their group, together with the numbers that come with the loss.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ludus.algorithms.optim.gradient_allreduce import ALONE, Group
from ludus.core.tree import Array
from ludus.errors import ConfigError, TrainingDiverged

_FUSED: Callable[..., None] | None = getattr(torch, "_fused_adam_", None)
"""The kernel behind `torch.optim.Adam(fused=True)`; without it the same formula in plain operations."""

M = TypeVar("M", bound=nn.Module)
Shard = TypeVar("Shard")
Numbers = dict[str, Tensor]
Precision = Literal["bf16", "fp16"]

MOST_NUMBERS = 64
"""Numbers that may come with a loss; they travel behind the gradient."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Optimizer(Generic[M]):
    """Adam (Kingma & Ba 2015) with global gradient-norm clipping. Takes ownership of the model's parameter storage."""

    def __init__(
        self,
        model: M,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        grad_clip: float | None = None,
        threads: int = 1,
        *,
        accumulation: int = 1,
        precision: Precision | None = None,
        group: Group = ALONE,
    ) -> None:
        """`accumulation`: every thread takes its shard in so many pieces. `precision`: of what is safe in less than float32."""
        parameters = list(model.parameters())
        self.device = parameters[0].device if parameters else torch.device("cpu")
        threads = threads if self.device.type == "cpu" else 1  # an accelerator is kept busy by one
        self.lr, self.betas, self.eps, self.grad_clip = lr, betas, eps, grad_clip
        self.accumulation, self.group = accumulation, group
        self.updates = 0
        self.grad_norm = 0.0
        self.flat, self.wire = _flatten(parameters, self.device)
        self.grad = self.wire[: self.flat.numel()]
        self._mean = torch.zeros_like(self.flat)
        self._variance = torch.zeros_like(self.flat)
        self._count = torch.zeros((), device=self.device)
        self._half = None if precision is None else _HALF[precision]
        self.scale = _scale_for(precision, self.device)
        self._models, self._grads = [model], [self.grad]
        for _ in range(threads - 1):
            replica, grad = _replica(model, self.flat)
            self._models.append(replica)
            self._grads.append(grad)
        self._pool = ThreadPoolExecutor(threads - 1, "gradient") if threads > 1 else None

    @property
    def threads(self) -> int:
        return len(self._models)

    @property
    def pieces(self) -> int:
        """Into how many shards a minibatch, or this learner's part of it, is best split."""
        return len(self._models) * self.accumulation

    def step(
        self, loss: Callable[[M, Shard], tuple[Tensor, Numbers]], shards: Sequence[Shard], weights: Sequence[float]
    ) -> Numbers:
        """Differentiate the weighted sum of the shards' losses and update; `pieces` shards at most.

        Returns the weighted sum of the numbers that come with the losses. With several learners both sums are over the
        shards of all of them, whose weights together are 1. Raises TrainingDiverged before anything is changed by a NaN, and
        WorkerFailed when another learner is lost.
        """
        assert len(shards) <= self.pieces
        scale = 1.0 if self.scale is None else self.scale.value
        if self._pool is None or len(shards) == 1:
            results = _gradient(loss, self._half, scale, self._models[0], self.grad, shards, weights)
        else:
            results = self._on_threads(self._pool, partial(_gradient, loss, self._half, scale), shards, weights)
        numbers = {name: torch.stack([r[name] for r in results]).sum() for name in results[0]}
        if self.group.size > 1:
            numbers = self._sum_over_learners(numbers)
        self.apply()
        return numbers

    def _on_threads(
        self, pool: ThreadPoolExecutor, gradient: Callable[..., list[Numbers]], shards: Sequence[Shard], weights: Sequence[float]
    ) -> list[Numbers]:
        count = min(self.threads, len(shards))
        work = [(self._models[i], self._grads[i], shards[i::count], weights[i::count]) for i in range(count)]
        with one_thread_each():
            waiting: list[Future[list[Numbers]]] = [pool.submit(gradient, *part) for part in work[1:]]
            results = gradient(*work[0])
            for future in waiting:
                results += future.result()
        for _, grad, _, _ in work[1:]:
            self.grad.add_(grad)
        return results

    def _sum_over_learners(self, numbers: Numbers) -> Numbers:
        """One sum for gradient and numbers: for a small network the way is longer than the load."""
        n, count = self.flat.numel(), len(numbers)
        assert count <= MOST_NUMBERS
        if count:
            self.wire[n : n + count] = torch.stack(list(numbers.values()))
        self.group.sum_(self.wire[: n + count])
        return dict(zip(numbers, self.wire[n : n + count].clone().unbind(), strict=True))

    @torch.no_grad()
    def apply(self) -> None:
        """Update from the gradients that are there."""
        if self.scale is not None:
            self.grad.mul_(1 / self.scale.value)
        norm = float(self.grad.norm())
        if self.scale is not None and not self.scale.follow(math.isfinite(norm)):
            return
        if not math.isfinite(norm):
            raise TrainingDiverged(f"The gradient became {norm} at update {self.updates}.")
        self.grad_norm = norm
        if self.grad_clip and norm > self.grad_clip:
            self.grad.mul_(self.grad_clip / (norm + 1e-6))
        self.updates += 1
        if _FUSED is not None:  # one pass over memory instead of seven, half the time
            self._fused_update()
            return
        beta1, beta2 = self.betas
        self._mean.lerp_(self.grad, 1 - beta1)
        self._variance.mul_(beta2).addcmul_(self.grad, self.grad, value=1 - beta2)
        correction1, correction2 = 1 - beta1**self.updates, math.sqrt(1 - beta2**self.updates)
        denominator = self._variance.sqrt().mul_(1 / correction2).add_(self.eps)
        self.flat.addcdiv_(self._mean, denominator, value=-self.lr / correction1)

    def _fused_update(self) -> None:
        assert _FUSED is not None
        beta1, beta2 = self.betas
        _FUSED(
            [self.flat],
            [self.grad],
            [self._mean],
            [self._variance],
            [],
            [self._count.fill_(self.updates)],
            lr=self.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, Array]:
        moments = {"mean": self._mean, "variance": self._variance, "updates": torch.tensor(self.updates)}
        if self.scale is not None:
            moments["loss_scale"] = torch.tensor([self.scale.value, float(self.scale.good)], dtype=torch.float64)
        return {name: value.cpu().numpy().copy() for name, value in moments.items()}

    def load_state(self, state: dict[str, Array]) -> None:
        self._mean.copy_(torch.from_numpy(state["mean"].copy()))
        self._variance.copy_(torch.from_numpy(state["variance"].copy()))
        self.updates = int(state["updates"])
        if self.scale is not None and "loss_scale" in state:
            self.scale.value, self.scale.good = float(state["loss_scale"][0]), int(state["loss_scale"][1])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class LossScale:
    """Keeps gradients inside the narrow range of float16: the loss is multiplied by as much as they bear.

    A gradient that overflowed is not applied and halves the scale; many good ones in a row double it (Micikevicius 2018).
    """

    def __init__(self, value: float = 2.0**16, patience: int = 2000) -> None:
        self.value, self.good, self._patience = value, 0, patience

    def follow(self, finite: bool) -> bool:
        """Whether the gradient is to be applied. Raises TrainingDiverged when it overflows without any scale."""
        if not finite:
            self.value, self.good = self.value / 2, 0
            if self.value < 2.0**-10:
                raise TrainingDiverged("The gradient overflows float16 at any scale of the loss.")
            return False
        self.good += 1
        if self.good >= self._patience:
            self.value, self.good = self.value * 2, 0
        return True


def _scale_for(precision: Precision | None, device: torch.device) -> LossScale | None:
    if precision != "fp16":
        return None
    if device.type == "cpu":
        raise ConfigError("config.mixed_precision is fp16, and the learner computes on a CPU.", "Use bf16, or leave it out.")
    return LossScale()


def _gradient(
    loss: Callable[[M, Shard], tuple[Tensor, Numbers]],
    half: torch.dtype | None,
    scale: float,
    model: M,
    grad: Tensor,
    shards: Sequence[Shard],
    weights: Sequence[float],
) -> list[Numbers]:
    """Of the weighted sum of these shards' losses, into `grad`; the weighted numbers of each."""
    torch.set_num_threads(torch.get_num_threads())  # a fresh thread would take all cores for each operation
    grad.zero_()
    results: list[Numbers] = []
    for shard, weight in zip(shards, weights, strict=True):
        if half is None:
            value, numbers = loss(model, shard)
        else:
            with torch.autocast(grad.device.type, half):
                value, numbers = loss(model, shard)
        factor = weight * scale
        (value if factor == 1.0 else value * factor).backward()
        results.append(numbers if weight == 1.0 else {name: number * weight for name, number in numbers.items()})
    return results


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """PyTorch's own threads off inside the block: the shards already fill the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _replica(model: M, flat: Tensor) -> tuple[M, Tensor]:
    """A copy of the model that shares its parameters and buffers, with gradients of its own."""
    twin = copy.deepcopy(model)
    grad = torch.zeros_like(flat)
    offset = 0
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
        mine.grad = grad[offset : offset + mine.numel()].as_strided(theirs.size(), theirs.stride())
        offset += mine.numel()
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        twin.get_submodule(owner).register_buffer(last, buffer)
    return twin, grad


def _flatten(parameters: list[nn.Parameter], device: torch.device) -> tuple[Tensor, Tensor]:
    """Move all parameters, and their gradients, into two contiguous vectors; the parameters become views.

    The second has room for numbers behind the gradients.
    """
    sizes = [p.numel() for p in parameters]
    total = sum(sizes)
    flat, wire = torch.empty(total, device=device), torch.zeros(total + MOST_NUMBERS, device=device)
    for p, piece, grad_piece in zip(parameters, flat.split(sizes), wire[:total].split(sizes), strict=True):
        stride = p.data.stride()  # a convolution in channels-last keeps its layout
        view, old = piece.as_strided(p.size(), stride, piece.storage_offset()), p.data
        view.copy_(old)
        p.data = view
        p.grad = grad_piece.as_strided(p.size(), stride, grad_piece.storage_offset())
    return flat, wire
