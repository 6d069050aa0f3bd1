"""Sets of entities: an encoder that does not care for their order, and a head that points at one of them.

Most places of a set are empty most of the time. What is computed outside an exported graph is computed for as many places as the
fullest set of a batch fills: its entities move together first, and answers about them go back to where they stood.

Letters: N places of a set, W of them after moving together, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ludus.models.distributions import MASKED
from ludus.models.layers import Dense, mlp, traced


@dataclass(frozen=True)
class Crowd:
    """Entities of a set, one by one, as each stands among the others."""

    each: Tensor
    """[*, W, dim]"""
    present: Tensor
    """[*, W]: others have no part in the whole, but may be pointed at."""
    places: int
    """N, of the set they came from."""
    order: Tensor | None
    """[*, W] where they stood there; None: where they are."""

    def back(self, numbers: Tensor) -> Tensor:
        """[*, rows, W] numbers about them → [*, rows, N], the lowest for whoever was left out."""
        if self.order is None:
            return numbers
        empty = numbers.new_full((*numbers.shape[:-1], self.places), MASKED)
        return empty.scatter(-1, self.order.unsqueeze(-2).expand(numbers.shape), numbers)


class EntityEncoder(nn.Module):
    """A set of entities [N, F] with a presence mask: shared layers, one round of attention, pooled by mean and maximum."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.embed = mlp(features, [dim, dim], "relu")
        self.query, self.value = Dense(dim, dim), Dense(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)  # the softmax would not notice one
        self.size = 2 * dim

    def forward(self, entities: Tensor, present: Tensor) -> Tensor:
        return self.pooled(self.crowd(entities, present))

    def crowd(self, entities: Tensor, present: Tensor, pointed: Tensor | None = None) -> Crowd:
        """[*, N, F], [*, N], and whom there will be an answer about besides those who are present; whoever is not has no features."""
        places, order = entities.shape[-2], None
        if not traced() and entities.device.type == "cpu":  # elsewhere to ask how many there are costs more than it saves
            entities, present, order = _together(entities, present, present if pointed is None else present | pointed)
        x: Tensor = self.embed(torch.where(present.unsqueeze(-1), entities, 0.0))
        # k·q = x·(Kᵀ·(Q·x + b)): one layer instead of two; and the values of a mean are the mean of the values.
        scale, to_key = 1 / math.sqrt(x.shape[-1]), self.key.weight.t()
        asked = F.linear(x, to_key @ self.query.weight * scale, to_key @ self.query.bias * scale)
        hidden = torch.where(present, 0.0, MASKED).unsqueeze(-2)
        weights = (asked @ x.transpose(-1, -2) + hidden).softmax(dim=-1)
        return Crowd(x + self.value(weights @ x), present, places, order)

    def pooled(self, crowd: Crowd) -> Tensor:
        """[*, 2 dim] the set as a whole."""
        each, present = crowd.each, crowd.present
        count = present.sum(dim=-1, keepdim=True)
        mean = ((present / count.clamp(min=1)).to(each.dtype).unsqueeze(-2) @ each).squeeze(-2)
        maximum = (each + torch.where(present, 0.0, MASKED).unsqueeze(-1)).amax(dim=-2)
        return torch.cat([mean, torch.where(count > 0, maximum, 0.0)], dim=-1)


class Pointer(nn.Module):
    """Which entity is meant: `rows` questions, each answered by a number for every entity (Vinyals et al. 2015)."""

    def __init__(self, features: int, dim: int, rows: int) -> None:
        super().__init__()
        self.rows, self.dim = rows, dim
        self.query = Dense(features, rows * dim, gain=0.1)  # near to indifferent in the beginning
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, features: Tensor, crowd: Crowd, allowed: Tensor | None) -> Tensor:
        """[*, features], a set, [*, rows, N] → [*, rows · N]; who is not allowed is never meant."""
        query = self.query(features).unflatten(-1, (self.rows, self.dim)) / math.sqrt(self.dim)
        logits = crowd.back(((query @ self.key.weight) @ crowd.each.transpose(-1, -2)).float())
        if allowed is not None:
            logits = torch.where(allowed, logits, MASKED)
        return logits.flatten(-2)


def _together(entities: Tensor, present: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Those who are kept, in their order, in the first places of each set; and where they stood, unless nothing was saved."""
    counts = kept.sum(dim=-1)
    widest, places = max(1, int(counts.max())) if counts.numel() else 1, kept.shape[-1]
    if widest == places:
        return entities, present, None
    order = kept.sort(dim=-1, descending=True, stable=True).indices[..., :widest]
    sets = torch.arange(counts.numel()).unsqueeze(-1) * places
    rows = entities.reshape(-1, entities.shape[-1]).index_select(0, (order.reshape(-1, widest) + sets).reshape(-1))
    return rows.reshape(*order.shape, entities.shape[-1]), present.gather(-1, order), order
