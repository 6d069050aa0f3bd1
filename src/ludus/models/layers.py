"""Elementary layers of all networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _LinearTanh(torch.autograd.Function):
    """tanh(x·Wᵀ + b) in five memory passes.

    tanh(z) = 2·sigmoid(2z) − 1 costs a third of torch.tanh on CPUs without AVX-512 and differs by less than 2e-7. The gradient of a
    narrow input layer is computed as (xᵀ·g)ᵀ, which MKL does several times faster than gᵀ·x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.addmm(bias, x, weight.t(), beta=2, alpha=2).sigmoid_().mul_(2).sub_(1)
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, y = ctx.saved_tensors
        g = torch.ops.aten.tanh_backward(grads[0], y)
        wide = weight.shape[0] > weight.shape[1]
        weight_grad = x.t().mm(g).t() if wide else g.t().mm(x)
        return (g.mm(weight) if ctx.needs_input_grad[0] else None), weight_grad, g.sum(dim=0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "elu": F.elu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "linear": lambda x: x,
}
_GAINS = {"tanh": 5 / 3, "relu": math.sqrt(2), "linear": 1.0}


class Dense(nn.Linear):
    """A linear layer with its activation, orthogonally initialised."""

    def __init__(self, inputs: int, outputs: int, activation: str = "linear", gain: float | None = None) -> None:
        super().__init__(inputs, outputs)
        self.activation = activation
        nn.init.orthogonal_(self.weight, _GAINS.get(activation, math.sqrt(2)) if gain is None else gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))
        fused = self.activation == "tanh" and x.ndim == 2 and x.dtype == torch.float32 and not x.is_cuda
        if (
            fused
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._get_tracing_state()
            and not torch.compiler.is_compiling()
        ):
            return _LinearTanh.apply(x, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]
        return ACTIVATIONS[self.activation](super().forward(x))


def mlp(inputs: int, hiddens: Sequence[int], activation: str) -> nn.Sequential:
    sizes = [inputs, *hiddens]
    return nn.Sequential(*(Dense(a, b, activation) for a, b in itertools.pairwise(sizes)))


_MIN_INPUT_COLUMNS = 256
"""With fewer columns a second product costs as much as it saves."""


def apply_mlp(layers: nn.Sequential, parts: Sequence[Tensor]) -> Tensor:
    """Apply the layers of `mlp` to the concatenation of `parts`.

    Observations need no gradient, and a wide observation is most of the first layer: it gets a separate product, so that no unneeded
    gradient is computed.
    """
    parts = parts if len(parts) == 1 else [part.float() for part in parts]
    input_columns = sum(part.shape[-1] for part in parts if not part.requires_grad)
    has_gradient = any(part.requires_grad for part in parts)
    if not len(layers) or not has_gradient or input_columns < _MIN_INPUT_COLUMNS or is_tracing():
        x: Tensor = layers(_concat(parts))
        return x
    first, *others = layers
    assert isinstance(first, Dense)
    runs = [_concat(list(run)) for _, run in itertools.groupby(parts, key=lambda part: part.requires_grad)]
    weights = first.weight.split([run.shape[-1] for run in runs], dim=1)
    x = F.linear(runs[0], weights[0], first.bias)
    for run, weight in zip(runs[1:], weights[1:], strict=True):
        x = x + F.linear(run, weight)
    x = ACTIVATIONS[first.activation](x)
    for layer in others:
        x = layer(x)
    return x


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


def is_tracing() -> bool:
    """Return whether a graph is being exported or compiled, which must have the plain form."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()


class RunningNorm(nn.Module):
    """Running mean and variance of the vector part, as buffers: part of the weights, updated by the learner only."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * self._inverse_std()).clamp(-10, 10)

    def _inverse_std(self) -> Tensor:
        if is_tracing():  # torch.onnx drops the addition of 1e-8, which makes a constant feature NaN
            return torch.rsqrt(self.variance * 1e4 + 1e-4) * 1e2
        return torch.rsqrt(self.variance + 1e-8)

    @torch.no_grad()
    def update(self, x_ND: Tensor) -> None:
        """Merge the statistics of a batch (Chan, Golub, LeVeque 1979)."""
        n = x_ND.shape[0]
        if n == 0:
            return
        batch = x_ND.double()
        mean, variance = batch.mean(dim=0), batch.var(dim=0, correction=0)
        total = self.count + n
        delta = mean - self.mean.double()
        old = self.variance.double() * self.count
        self.variance.copy_((old + variance * n + delta.square() * self.count * n / total) / total)
        self.mean.copy_(self.mean.double() + delta * n / total)
        self.count.copy_(total)
