"""Sets of entities: an encoder that does not care for their order, and a head that points at one of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ludus.model.layers import Dense, mlp

_HIDDEN = -1e9  # finite: see `distributions`


class EntityEncoder(nn.Module):
    """A set of entities [N, F] with a presence mask: shared layers, one round of attention, pooled by mean and maximum."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.embed = mlp(features, [dim, dim], "relu")
        self.query, self.value = Dense(dim, dim), Dense(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)  # the softmax would not notice one
        self.size = 2 * dim

    def forward(self, entities: Tensor, present: Tensor) -> Tensor:
        return self.pooled(self.each(entities, present), present)

    def each(self, entities: Tensor, present: Tensor) -> Tensor:
        """[*, N, dim] every entity, as it stands among the others."""
        x: Tensor = self.embed(entities)
        q, k, v = self.query(x), self.key(x), self.value(x)
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = torch.where(present.unsqueeze(-2), logits, _HIDDEN).softmax(dim=-1)
        among: Tensor = x + weights @ v
        return among

    def pooled(self, each: Tensor, present: Tensor) -> Tensor:
        """[*, 2 dim] the set as a whole."""
        shown = present.unsqueeze(-1)
        count = shown.sum(dim=-2).clamp(min=1)
        mean = torch.where(shown, each, 0.0).sum(dim=-2) / count
        maximum = torch.where(shown, each, _HIDDEN).amax(dim=-2)
        return torch.cat([mean, torch.where(present.any(dim=-1, keepdim=True), maximum, 0.0)], dim=-1)


class Pointer(nn.Module):
    """Which entity is meant: `rows` questions, each answered by a number for every entity (Vinyals et al. 2015)."""

    def __init__(self, features: int, dim: int, rows: int) -> None:
        super().__init__()
        self.rows, self.dim = rows, dim
        self.query = Dense(features, rows * dim, gain=0.1)  # near to indifferent in the beginning
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, features: Tensor, each: Tensor, allowed: Tensor | None) -> Tensor:
        """[*, F], [*, N, dim], [*, rows, N] → [*, rows · N]; who is not allowed is never meant."""
        query = self.query(features).unflatten(-1, (self.rows, self.dim))
        logits: Tensor = query @ self.key(each).transpose(-1, -2) / math.sqrt(self.dim)
        if allowed is not None:
            logits = torch.where(allowed, logits, _HIDDEN)
        return logits.flatten(-2)
