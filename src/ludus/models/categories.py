"""Learned embeddings for observations with very many categories."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from ludus.errors import ConfigError

EMBED_ABOVE = 1024
"""Categories with more values than this are embedded in new runs; as one-hot, a batch of 2,048 steps would take 8 MB and more."""
EMBEDDING_SIZE = 32
MAX_CATEGORIES = 1 << 22
_COPIES = 4  # weights, gradient and the two moments of Adam


def category_counts(space: gym.spaces.Discrete[Any] | gym.spaces.MultiDiscrete[Any]) -> list[int]:
    """Return the number of values of each category of a space."""
    return [int(space.n)] if isinstance(space, gym.spaces.Discrete) else [int(n) for n in space.nvec.reshape(-1)]


def check_countable(where: str, counts: list[int]) -> None:
    """Raise ConfigError if there are too many categories for an embedding table."""
    total = sum(counts)
    if total <= MAX_CATEGORIES:
        return
    size = total * EMBEDDING_SIZE * 4 * _COPIES / 1e9
    raise ConfigError(
        f"{where} has {total:,} categories; an embedding of each would take {size:.1f} GB to learn, and most would never occur. "
        f"At most {MAX_CATEGORIES:,} are embedded.",
        "Encode digits or coordinates instead, as Box or MultiDiscrete (wrap the environment).",
    )


class CategoryEmbedding(nn.Module):
    """[…] or […, *shape] of categories → […, EMBEDDING_SIZE · categories]; one table for all categories of the space."""

    def __init__(self, space: gym.spaces.Discrete[Any] | gym.spaces.MultiDiscrete[Any]) -> None:
        super().__init__()
        counts = category_counts(space)
        self._depth = 0 if isinstance(space, gym.spaces.Discrete) else int(space.nvec.ndim)
        self.table = nn.Embedding(sum(counts), EMBEDDING_SIZE)
        first_rows = np.cumsum([0, *counts[:-1]]) - np.asarray(space.start).reshape(-1)
        self.register_buffer("first_rows", torch.as_tensor(first_rows, dtype=torch.int64), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        flat = value.flatten(-self._depth) if self._depth else value.unsqueeze(-1)
        vectors: Tensor = self.table(flat + self.first_rows)  # type: ignore[operator]
        return vectors.flatten(-2)
