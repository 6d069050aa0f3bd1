"""Sets of entities: a permutation-invariant encoder, and a head that points at one entity.

Most slots of a set are usually empty. Outside an exported graph only as many slots are computed as the fullest set of the batch uses:
its entities are compacted first, and results are scattered back.

Shapes: N slots of a set, W slots after compaction, F features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ludus.models.distributions import MASKED
from ludus.models.layers import Dense, is_tracing, mlp


@dataclass(frozen=True)
class EncodedEntities:
    """Encoded entities of a set."""

    each: Tensor
    """[*, W, dim]"""
    present: Tensor
    """[*, W]: absent entities do not contribute to the pooled features, but may be pointed at."""
    slots: int
    """N, the number of slots of the set."""
    order: Tensor | None
    """[*, W] original slots; None if not compacted."""

    def scatter_back(self, numbers: Tensor) -> Tensor:
        """[*, rows, W] numbers per entity → [*, rows, N], MASKED for entities that were left out."""
        if self.order is None:
            return numbers
        empty = numbers.new_full((*numbers.shape[:-1], self.slots), MASKED)
        return empty.scatter(-1, self.order.unsqueeze(-2).expand(numbers.shape), numbers)


class EntityEncoder(nn.Module):
    """Encodes a set of entities [N, F] with a presence mask: shared layers, one round of attention, mean and max pooling."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.embed = mlp(features, [dim, dim], "relu")
        self.query, self.value = Dense(dim, dim), Dense(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)  # softmax is invariant to a key bias
        self.size = 2 * dim

    def forward(self, entities: Tensor, present: Tensor) -> Tensor:
        return self.pool(self.encode_entities(entities, present))

    def encode_entities(self, entities: Tensor, present: Tensor, pointed: Tensor | None = None) -> EncodedEntities:
        """`pointed`: entities that a pointer may choose in addition to the present ones; absent entities have zero features."""
        slots, order = entities.shape[-2], None
        if not is_tracing() and entities.device.type == "cpu":  # on an accelerator the synchronisation costs more than it saves
            entities, present, order = _compact(entities, present, present if pointed is None else present | pointed)
        x: Tensor = self.embed(torch.where(present.unsqueeze(-1), entities, 0.0))
        # k·q = x·(Kᵀ·(Q·x + b)): one layer instead of two; and the values of a mean are the mean of the values.
        scale, to_key = 1 / math.sqrt(x.shape[-1]), self.key.weight.t()
        query = F.linear(x, to_key @ self.query.weight * scale, to_key @ self.query.bias * scale)
        hidden = torch.where(present, 0.0, MASKED).unsqueeze(-2)
        weights = (query @ x.transpose(-1, -2) + hidden).softmax(dim=-1)
        return EncodedEntities(x + self.value(weights @ x), present, slots, order)

    def pool(self, encode_entities: EncodedEntities) -> Tensor:
        """[*, 2 dim] features of the whole set."""
        each, present = encode_entities.each, encode_entities.present
        count = present.sum(dim=-1, keepdim=True)
        mean = ((present / count.clamp(min=1)).to(each.dtype).unsqueeze(-2) @ each).squeeze(-2)
        maximum = (each + torch.where(present, 0.0, MASKED).unsqueeze(-1)).amax(dim=-2)
        return torch.cat([mean, torch.where(count > 0, maximum, 0.0)], dim=-1)


class Pointer(nn.Module):
    """A pointer head (Vinyals et al. 2015): `rows` queries, each with a logit per entity."""

    def __init__(self, features: int, dim: int, rows: int) -> None:
        super().__init__()
        self.rows, self.dim = rows, dim
        self.query = Dense(features, rows * dim, gain=0.1)  # nearly uniform at the start
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, features: Tensor, encode_entities: EncodedEntities, allowed: Tensor | None) -> Tensor:
        """[*, features], a set, [*, rows, N] → [*, rows · N]; entities that are not allowed are masked."""
        query = self.query(features).unflatten(-1, (self.rows, self.dim)) / math.sqrt(self.dim)
        logits = encode_entities.scatter_back(((query @ self.key.weight) @ encode_entities.each.transpose(-1, -2)).float())
        if allowed is not None:
            logits = torch.where(allowed, logits, MASKED)
        return logits.flatten(-2)


def _compact(entities: Tensor, present: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move the kept entities of each set, in order, to the first slots; also return their original slots, None if nothing is saved."""
    counts = kept.sum(dim=-1)
    widest, slots = max(1, int(counts.max())) if counts.numel() else 1, kept.shape[-1]
    if widest == slots:
        return entities, present, None
    order = kept.sort(dim=-1, descending=True, stable=True).indices[..., :widest]
    sets = torch.arange(counts.numel()).unsqueeze(-1) * slots
    rows = entities.reshape(-1, entities.shape[-1]).index_select(0, (order.reshape(-1, widest) + sets).reshape(-1))
    return rows.reshape(*order.shape, entities.shape[-1]), present.gather(-1, order), order
