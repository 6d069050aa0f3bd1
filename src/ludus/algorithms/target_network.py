"""The target network of DQN: a delayed copy of the online policy."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ludus.algorithms.optim.flat_adam import share_buffers
from ludus.core.tree import Array
from ludus.models.policy import Policy


class TargetNetwork:
    """A copy of `policy`, whose parameters are views of the vector `flat`. It shares the observation normaliser."""

    def __init__(self, policy: Policy, flat: Tensor) -> None:
        self._online, self._flat = flat, flat.clone()
        self.policy = copy.deepcopy(policy).requires_grad_(False)
        offset = 0
        for parameter in self.policy.parameters():
            parameter.grad = None
            size, stride = parameter.size(), parameter.stride()
            parameter.data = self._flat[offset : offset + parameter.numel()].as_strided(size, stride, offset)
            offset += parameter.numel()
        share_buffers(policy, self.policy)
        self.update(1.0)

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """θ_target ← θ_target + τ·(θ − θ_target)."""
        if tau == 1.0:
            self._flat.copy_(self._online)
        else:
            self._flat.lerp_(self._online, tau)
        self.policy.network.freeze()

    def weights(self) -> Array:
        weights: Array = self._flat.cpu().numpy().copy()
        return weights

    @torch.no_grad()
    def load_weights(self, weights: Array) -> None:
        self._flat.copy_(torch.from_numpy(weights.copy()))
        self.policy.network.freeze()
