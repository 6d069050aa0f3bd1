"""Adam over one flat vector: all parameters of a model live in a single buffer, their gradients in another.

Clipping, the finite check, the update, an all-reduce and a weight broadcast are then one operation each, however many layers
the model has. For a small network that is a third of the time of a training step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ludus.errors import TrainingDiverged
from ludus.tree import Array


class Optimizer:
    """Adam (Kingma & Ba 2015) with global gradient-norm clipping. Takes ownership of the model's parameter storage."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        grad_clip: float | None = None,
    ) -> None:
        self.lr, self.betas, self.eps, self.grad_clip = lr, betas, eps, grad_clip
        self.updates = 0
        self.grad_norm = 0.0
        self._parameters = list(model.parameters())
        self.flat, self.grad = _flatten(self._parameters)
        self._mean = torch.zeros_like(self.flat)
        self._variance = torch.zeros_like(self.flat)

    def step(self, loss: Tensor) -> None:
        """Differentiate `loss` and update. Raises TrainingDiverged before anything is changed by a NaN."""
        self.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        self.apply()

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
        beta1, beta2 = self.betas
        self._mean.lerp_(self.grad, 1 - beta1)
        self._variance.mul_(beta2).addcmul_(self.grad, self.grad, value=1 - beta2)
        correction1, correction2 = 1 - beta1**self.updates, math.sqrt(1 - beta2**self.updates)
        denominator = self._variance.sqrt().mul_(1 / correction2).add_(self.eps)
        self.flat.addcdiv_(self._mean, denominator, value=-self.lr / correction1)

    def state(self) -> dict[str, Array]:
        moments = {"mean": self._mean, "variance": self._variance, "updates": torch.tensor(self.updates)}
        return {name: value.numpy().copy() for name, value in moments.items()}

    def load_state(self, state: dict[str, Array]) -> None:
        self._mean.copy_(torch.from_numpy(state["mean"].copy()))
        self._variance.copy_(torch.from_numpy(state["variance"].copy()))
        self.updates = int(state["updates"])


def _flatten(parameters: list[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move all parameters, and their gradients, into two contiguous vectors; the parameters become views."""
    sizes = [p.numel() for p in parameters]
    flat, grad = torch.empty(sum(sizes)), torch.zeros(sum(sizes))
    for p, piece, grad_piece in zip(parameters, flat.split(sizes), grad.split(sizes), strict=True):
        dense = p.data.is_contiguous()
        layout = p.data.shape if dense else p.data.permute(0, 2, 3, 1).shape  # a convolution in channels-last
        source = p.data if dense else p.data.permute(0, 2, 3, 1)
        piece.copy_(source.reshape(-1))
        p.data = piece.view(layout) if dense else piece.view(layout).permute(0, 3, 1, 2)
        p.grad = grad_piece.view(layout) if dense else grad_piece.view(layout).permute(0, 3, 1, 2)
    return flat, grad
