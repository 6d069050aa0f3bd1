"""Adam over one flat vector: all parameters of a model live in a single buffer, their gradients in another.

Clipping, the finite check, the update, an all-reduce and a weight broadcast are then one operation each for any number of
layers. Several threads can compute the gradient of a minibatch, each from one shard into its own buffer; on CPUs that is
faster than splitting every operation over the cores. Several learners can share a minibatch too: gradient and metrics are
then summed over their group.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ludus.core.tree import Array
from ludus.errors import ConfigError, TrainingDiverged

_FUSED: Callable[..., None] | None = getattr(torch, "_fused_adam_", None)
"""The kernel behind `torch.optim.Adam(fused=True)`; without it the same formula in plain operations."""

M = TypeVar("M", bound=nn.Module)
Shard = TypeVar("Shard")
Metrics = dict[str, Tensor]
Precision = Literal["bf16", "fp16"]

MAX_METRICS = 64
"""Maximum number of metrics of a loss; they are all-reduced together with the gradient."""

_HALF_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class GradientAllReduce(Protocol):
    """Sums gradients over a group of learners: `gradient_allreduce`."""

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> None:
        """Replace a contiguous float32 vector by its sum over all members, the same bits on each. Raises WorkerFailed."""
        ...

    def close(self) -> None: ...


class SingleLearner:
    """The group of a single learner: sums are no-ops."""

    rank, size = 0, 1

    def sum_(self, tensor: Tensor) -> None:
        pass

    def close(self) -> None:
        pass


SINGLE_LEARNER: GradientAllReduce = SingleLearner()


class FlatAdam(Generic[M]):
    """Adam (Kingma & Ba 2015) with global gradient-norm clipping. Owns the storage of the model's parameters."""

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
    ) -> None:
        """`accumulation`: number of shards per thread. `precision`: of the operations that autocast runs below float32."""
        parameters = list(model.parameters())
        self.device = parameters[0].device if parameters else torch.device("cpu")
        threads = threads if self.device.type == "cpu" else 1  # one thread keeps an accelerator busy
        self.lr, self.betas, self.eps, self.grad_clip = lr, betas, eps, grad_clip
        self.accumulation = accumulation
        self.group: GradientAllReduce = SINGLE_LEARNER
        self.updates = 0
        self.grad_norm = 0.0
        self.flat, self.allreduce_buffer = _flatten(parameters, self.device)
        self.grad = self.allreduce_buffer[: self.flat.numel()]
        self._mean = torch.zeros_like(self.flat)
        self._variance = torch.zeros_like(self.flat)
        self._count = torch.zeros((), device=self.device)
        self._half = None if precision is None else _HALF_PRECISION[precision]
        if precision == "fp16" and self.device.type == "cpu":
            raise ConfigError("config.mixed_precision is fp16, but the learner runs on a CPU.", "Use bf16, or leave it out.")
        self.scale = LossScale() if precision == "fp16" else None
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
    def max_shards(self) -> int:
        """Number of shards into which a minibatch, or this learner's part of it, is split."""
        return len(self._models) * self.accumulation

    def step(
        self, loss: Callable[[M, Shard], tuple[Tensor, Metrics]], shards: Sequence[Shard], weights: Sequence[float]
    ) -> Metrics:
        """Update from the gradient of the weighted sum of the shards' losses; at most `max_shards` shards.

        Returns the weighted sum of the metrics. With several learners both sums are over the shards of all of them, whose
        weights add up to 1. Raises TrainingDiverged before a NaN changes the weights, and WorkerFailed when another learner
        is lost.
        """
        assert len(shards) <= self.max_shards
        scale = 1.0 if self.scale is None else self.scale.value
        if self._pool is None or len(shards) == 1:
            results = _gradient(loss, self._half, scale, self._models[0], self.grad, shards, weights)
        else:
            results = self._on_threads(self._pool, partial(_gradient, loss, self._half, scale), shards, weights)
        metrics = {name: torch.stack([r[name] for r in results]).sum() for name in results[0]}
        if self.group.size > 1:
            metrics = self._sum_over_learners(metrics)
        self.apply()
        return metrics

    def _on_threads(
        self, pool: ThreadPoolExecutor, gradient: Callable[..., list[Metrics]], shards: Sequence[Shard], weights: Sequence[float]
    ) -> list[Metrics]:
        count = min(self.threads, len(shards))
        work = [(self._models[i], self._grads[i], shards[i::count], weights[i::count]) for i in range(count)]
        with single_threaded():
            waiting: list[Future[list[Metrics]]] = [pool.submit(gradient, *part) for part in work[1:]]
            results = gradient(*work[0])
            for future in waiting:
                results += future.result()
        for _, grad, _, _ in work[1:]:
            self.grad.add_(grad)
        return results

    def _sum_over_learners(self, metrics: Metrics) -> Metrics:
        """All-reduce gradient and metrics in one call: for a small network latency dominates."""
        n, count = self.flat.numel(), len(metrics)
        assert count <= MAX_METRICS
        if count:
            self.allreduce_buffer[n : n + count] = torch.stack(list(metrics.values()))
        self.group.sum_(self.allreduce_buffer[: n + count])
        return dict(zip(metrics, self.allreduce_buffer[n : n + count].clone().unbind(), strict=True))

    @torch.no_grad()
    def apply(self) -> None:
        """Update the weights from the accumulated gradient."""
        if self.scale is not None:
            self.grad.mul_(1 / self.scale.value)
        norm = float(self.grad.norm())
        if self.scale is not None and not self.scale.update(math.isfinite(norm)):
            return
        if not math.isfinite(norm):
            raise TrainingDiverged(f"The gradient became {norm} at update {self.updates}.")
        self.grad_norm = norm
        if self.grad_clip and norm > self.grad_clip:
            self.grad.mul_(self.grad_clip / (norm + 1e-6))
        self.updates += 1
        beta1, beta2 = self.betas
        if _FUSED is not None:  # one pass over memory instead of seven, half the time
            vectors = [self.flat], [self.grad], [self._mean], [self._variance]
            rates = {"lr": self.lr, "beta1": beta1, "beta2": beta2, "eps": self.eps}
            count = self._count.fill_(self.updates)
            _FUSED(*vectors, [], [count], **rates, weight_decay=0.0, amsgrad=False, maximize=False)
            return
        self._mean.lerp_(self.grad, 1 - beta1)
        self._variance.mul_(beta2).addcmul_(self.grad, self.grad, value=1 - beta2)
        correction1, correction2 = 1 - beta1**self.updates, math.sqrt(1 - beta2**self.updates)
        denominator = self._variance.sqrt().mul_(1 / correction2).add_(self.eps)
        self.flat.addcdiv_(self._mean, denominator, value=-self.lr / correction1)

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
    """Dynamic loss scaling (Micikevicius et al. 2018), which keeps gradients within the range of float16.

    An overflowing gradient is skipped and halves the scale; `patience` finite gradients in a row double it.
    """

    def __init__(self, value: float = 2.0**16, patience: int = 2000) -> None:
        self.value, self.good, self._patience = value, 0, patience

    def update(self, finite: bool) -> bool:
        """Adapt the scale and return whether to apply the gradient. Raises TrainingDiverged if it overflows at any scale."""
        if not finite:
            self.value, self.good = self.value / 2, 0
            if self.value < 2.0**-10:
                raise TrainingDiverged("The gradient overflows float16 at every loss scale.")
            return False
        self.good += 1
        if self.good >= self._patience:
            self.value, self.good = self.value * 2, 0
        return True


def _gradient(
    loss: Callable[[M, Shard], tuple[Tensor, Metrics]],
    half: torch.dtype | None,
    scale: float,
    model: M,
    grad: Tensor,
    shards: Sequence[Shard],
    weights: Sequence[float],
) -> list[Metrics]:
    """Compute the gradient of the weighted sum of the shards' losses into `grad`; return the weighted metrics of each shard."""
    torch.set_num_threads(torch.get_num_threads())  # a new thread would otherwise use all cores for each operation
    grad.zero_()
    results: list[Metrics] = []
    for shard, weight in zip(shards, weights, strict=True):
        if half is None:
            value, metrics = loss(model, shard)
        else:
            with torch.autocast(grad.device.type, half):
                value, metrics = loss(model, shard)
        factor = weight * scale
        (value if factor == 1.0 else value * factor).backward()
        results.append(metrics if weight == 1.0 else {name: metric * weight for name, metric in metrics.items()})
    return results


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Disable PyTorch's intra-op threads inside the block: the shards already use all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _replica(model: M, flat: Tensor) -> tuple[M, Tensor]:
    """Copy the model; the copy shares parameters and buffers and has a separate gradient."""
    replica = copy.deepcopy(model)
    grad = torch.zeros_like(flat)
    offset = 0
    for copied, original in zip(replica.parameters(), model.parameters(), strict=True):
        copied.data = original.data
        copied.grad = grad[offset : offset + copied.numel()].as_strided(original.size(), original.stride())
        offset += copied.numel()
    share_buffers(model, replica)
    return replica, grad


def share_buffers(source: nn.Module, replica: nn.Module) -> None:
    """Replace the buffers of a replica by those of its source."""
    for name, buffer in source.named_buffers():
        owner, _, last = name.rpartition(".")
        replica.get_submodule(owner).register_buffer(last, buffer)


def _flatten(parameters: list[nn.Parameter], device: torch.device) -> tuple[Tensor, Tensor]:
    """Move all parameters and their gradients into two contiguous vectors, of which they become views.

    The second vector has room for metrics after the gradient.
    """
    sizes = [p.numel() for p in parameters]
    total = sum(sizes)
    flat, allreduce_buffer = torch.empty(total, device=device), torch.zeros(total + MAX_METRICS, device=device)
    for p, piece, grad_piece in zip(parameters, flat.split(sizes), allreduce_buffer[:total].split(sizes), strict=True):
        stride = p.data.stride()  # a convolution in channels-last keeps its layout
        view, old = piece.as_strided(p.size(), stride, piece.storage_offset()), p.data
        view.copy_(old)
        p.data = view
        p.grad = grad_piece.as_strided(p.size(), stride, grad_piece.storage_offset())
    return flat, allreduce_buffer
