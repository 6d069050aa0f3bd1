"""Adam over one flat vector: all parameters of a model live in a single buffer, their gradients in another.

Clipping, the finite check, the update, an all-reduce and a weight broadcast are then one operation each, however many layers
the model has. The gradient of a minibatch may be computed by several threads, each with a shard of it and a buffer of its
own: on CPUs that is faster than splitting every single operation over the cores.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ludus.errors import TrainingDiverged
from ludus.tree import Array

_FUSED: Callable[..., None] | None = getattr(torch, "_fused_adam_", None)
"""The kernel behind `torch.optim.Adam(fused=True)`; without it the same formula in plain operations."""

M = TypeVar("M", bound=nn.Module)
Shard = TypeVar("Shard")
Numbers = dict[str, Tensor]


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
    ) -> None:
        self.lr, self.betas, self.eps, self.grad_clip = lr, betas, eps, grad_clip
        self.updates = 0
        self.grad_norm = 0.0
        self.flat, self.grad = _flatten(list(model.parameters()))
        self._mean = torch.zeros_like(self.flat)
        self._variance = torch.zeros_like(self.flat)
        self._models, self._grads = [model], [self.grad]
        for _ in range(threads - 1):
            replica, grad = _replica(model, self.flat)
            self._models.append(replica)
            self._grads.append(grad)
        self._pool = ThreadPoolExecutor(threads - 1, "gradient") if threads > 1 else None

    @property
    def threads(self) -> int:
        return len(self._models)

    def step(
        self, loss: Callable[[M, Shard], tuple[Tensor, Numbers]], shards: Sequence[Shard], weights: Sequence[float]
    ) -> Numbers:
        """Differentiate the weighted sum of the shards' losses and update; one shard per thread at most.

        Returns the weighted sum of the numbers that come with the losses. Raises TrainingDiverged before anything is
        changed by a NaN.
        """
        assert len(shards) <= self.threads
        work = list(zip(self._models, self._grads, shards, weights, strict=False))
        if self._pool is None or len(work) == 1:
            results = [_gradient(loss, *part) for part in work]
        else:
            with one_thread_each():
                waiting: list[Future[Numbers]] = [self._pool.submit(partial(_gradient, loss, *part)) for part in work[1:]]
                results = [_gradient(loss, *work[0]), *(future.result() for future in waiting)]
            for _, grad, _, _ in work[1:]:
                self.grad.add_(grad)
        self.apply()
        return {name: torch.stack([r[name] for r in results]).sum() for name in results[0]}

    @torch.no_grad()
    def apply(self) -> None:
        """Update from the gradients that are there."""
        norm = float(self.grad.norm())
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
            [torch.tensor(float(self.updates))],
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
        return {name: value.numpy().copy() for name, value in moments.items()}

    def load_state(self, state: dict[str, Array]) -> None:
        self._mean.copy_(torch.from_numpy(state["mean"].copy()))
        self._variance.copy_(torch.from_numpy(state["variance"].copy()))
        self.updates = int(state["updates"])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _gradient(loss: Callable[[M, Shard], tuple[Tensor, Numbers]], model: M, grad: Tensor, shard: Shard, weight: float) -> Numbers:
    torch.set_num_threads(torch.get_num_threads())  # a fresh thread would take all cores for each operation
    grad.zero_()
    value, numbers = loss(model, shard)
    (value if weight == 1.0 else value * weight).backward()
    return numbers if weight == 1.0 else {name: number * weight for name, number in numbers.items()}


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


def _flatten(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move all parameters, and their gradients, into two contiguous vectors; the parameters become views."""
    sizes = [p.numel() for p in parameters]
    flat, grad = torch.empty(sum(sizes)), torch.zeros(sum(sizes))
    for p, piece, grad_piece in zip(parameters, flat.split(sizes), grad.split(sizes), strict=True):
        stride = p.data.stride()  # a convolution in channels-last keeps its layout
        view, old = piece.as_strided(p.size(), stride, piece.storage_offset()), p.data
        view.copy_(old)
        p.data = view
        p.grad = grad_piece.as_strided(p.size(), stride, grad_piece.storage_offset())
    return flat, grad
