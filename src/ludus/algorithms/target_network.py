"""A policy that follows another one from afar, so that what is learned towards stands still for a while."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ludus.core.tree import Array
from ludus.models.policy import Policy


class Target:
    """A copy of `policy`, whose parameters live in the vector `flat`. It sees observations normalised as that one does."""

    def __init__(self, policy: Policy, flat: Tensor) -> None:
        self._followed, self._flat = flat, flat.clone()
        self.policy = copy.deepcopy(policy).requires_grad_(False)
        offset = 0
        for mine in self.policy.parameters():
            mine.grad = None
            size, stride = mine.size(), mine.stride()
            mine.data = self._flat[offset : offset + mine.numel()].as_strided(size, stride, offset)
            offset += mine.numel()
        for name, buffer in policy.named_buffers():
            owner, _, last = name.rpartition(".")
            self.policy.get_submodule(owner).register_buffer(last, buffer)
        self.follow(1.0)

    @torch.no_grad()
    def follow(self, tau: float) -> None:
        """Go this part of the way to where the other is now."""
        if tau == 1.0:
            self._flat.copy_(self._followed)
        else:
            self._flat.lerp_(self._followed, tau)
        self._changed()

    def _changed(self) -> None:
        with torch.no_grad():
            self.policy.network.freeze()

    def weights(self) -> Array:
        weights: Array = self._flat.cpu().numpy().copy()
        return weights

    def load_weights(self, weights: Array) -> None:
        self._flat.copy_(torch.from_numpy(weights.copy()))
        self._changed()
