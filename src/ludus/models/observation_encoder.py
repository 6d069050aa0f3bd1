"""From an observation to features: one encoder per leaf of the space, joined and followed by dense layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ludus.core.spaces import category_counts
from ludus.core.tree import Tree
from ludus.errors import ConfigError
from ludus.models.byte_scales import IMAGE_DIVISOR
from ludus.models.entity_encoder import EncodedEntities, EntityEncoder
from ludus.models.image_encoder import ImageEncoder, chw
from ludus.models.layers import RunningNorm, apply_mlp, mlp
from ludus.models.network_config import NetworkConfig

EMBED_ABOVE = 1024
"""Categories with more values than this are embedded in new runs; as one-hot, a batch of 2,048 steps would take 8 MB and more."""
EMBEDDING_SIZE = 32
MAX_CATEGORIES = 1 << 22
_COPIES = 4  # weights, gradient and the two moments of Adam


@dataclass(frozen=True)
class ObservationLeaf:
    path: tuple[Any, ...]
    kind: str  # vector | onehot | embedded | image | entities
    space: Any
    size: int = 0
    mask: tuple[Any, ...] | None = None
    present: int | None = None
    """Entities without a mask: index of the presence feature."""
    divisor: float = IMAGE_DIVISOR
    """Divisor of uint8 values."""


def plan_encoders(
    space: gym.Space[Any], config: NetworkConfig | None = None, path: tuple[Any, ...] = ()
) -> list[ObservationLeaf]:
    """Assign every leaf of the observation to an encoder. A 2-D Box with a sibling `<name>_mask` in a Dict is an entity set, and so is
    one named in the config. Masks of branches are not network inputs.
    """
    config = config or NetworkConfig()
    if isinstance(space, gym.spaces.Dict):
        present, masks = dict(config.entity_present), {branch.mask for branch in config.autoregressive}
        plan: list[ObservationLeaf] = []
        for key, item in sorted(space.spaces.items()):
            if key in masks or (key.endswith("_mask") and _is_entities(space, key[: -len("_mask")])):
                continue
            if _is_entities(space, key):
                plan.append(ObservationLeaf((*path, key), "entities", item, mask=(*path, f"{key}_mask")))
            elif key in present:
                plan.append(ObservationLeaf((*path, key), "entities", item, present=_presence_feature(key, item, present[key])))
            else:
                plan += plan_encoders(item, config, (*path, key))
        return plan
    if isinstance(space, gym.spaces.Tuple):
        return [leaf for i, item in enumerate(space.spaces) for leaf in plan_encoders(item, config, (*path, i))]
    if isinstance(space, gym.spaces.Box):
        divisor = dict(config.byte_scales).get(".".join(map(str, path)), IMAGE_DIVISOR)
        if len(space.shape) == 3 and min(space.shape[0], space.shape[-1]) <= 16 and min(chw(space.shape)[1:]) >= 5:
            return [ObservationLeaf(path, "image", space, divisor=divisor)]
        return [ObservationLeaf(path, "vector", space, math.prod(space.shape), divisor=divisor)]
    if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        counts = category_counts(space)
        if config.embed_above is None or max(counts) <= config.embed_above:
            return [ObservationLeaf(path, "onehot", space, sum(counts))]
        check_countable(".".join(map(str, ("observation", *path))), counts)
        return [ObservationLeaf(path, "embedded", space, EMBEDDING_SIZE * len(counts))]
    return [ObservationLeaf(path, "vector", space, math.prod(space.shape or ()))]


def entities_of(space: gym.Space[Any], config: NetworkConfig) -> dict[str, int]:
    """Return the entity sets of an observation with their capacity."""
    return {leaf.path[-1]: int(leaf.space.shape[0]) for leaf in plan_encoders(space, config) if leaf.kind == "entities"}


def _is_entities(space: gym.spaces.Dict, key: str) -> bool:
    item, mask = space.spaces.get(key), space.spaces.get(f"{key}_mask")
    return isinstance(item, gym.spaces.Box) and len(item.shape) == 2 and mask is not None and mask.shape == item.shape[:1]


def _presence_feature(key: str, item: gym.Space[Any], feature: int) -> int:
    if not isinstance(item, gym.spaces.Box) or len(item.shape) != 2:
        raise ConfigError(
            f"model.entity_present names {key!r}, which is {item}.", "A set of entities is a Box [entities, features]."
        )
    if not 0 <= feature < item.shape[1]:
        raise ConfigError(f"model.entity_present: {key!r} has no feature {feature}.", f"They are 0 to {item.shape[1] - 1}.")
    return feature


def pick_leaf(tree: Tree, path: tuple[Any, ...]) -> Tensor:
    for step in path:
        tree = tree[step]
    return tree  # type: ignore[no-any-return]


def replace_leaf(tree: Tree, path: tuple[Any, ...], leaf: Tensor) -> Tree:
    """Return the tree with one leaf replaced."""
    if not path:
        return leaf
    head, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {key: replace_leaf(item, rest, leaf) if key == head else item for key, item in tree.items()}
    return tuple(replace_leaf(item, rest, leaf) if i == head else item for i, item in enumerate(tree))


class VectorPart(nn.Module):
    """All numeric and categorical leaves as one float vector [*, size]; uint8 divided by the divisor of the leaf.

    Categories are one-hot or, if there are very many, embedded; embedded ones come last, from `plain_size` on.
    """

    def __init__(self, plan: list[ObservationLeaf]) -> None:
        super().__init__()
        self.plan = [leaf for leaf in plan if leaf.kind in ("vector", "onehot")]
        self.embedded = [leaf for leaf in plan if leaf.kind == "embedded"]
        self.embeddings = nn.ModuleList(CategoryEmbedding(leaf.space) for leaf in self.embedded)
        self.plain_size = sum(leaf.size for leaf in self.plan)
        self.size = self.plain_size + sum(leaf.size for leaf in self.embedded)

    def forward(self, observation: Tree) -> Tensor | None:
        parts = self._plain_parts(observation)
        parts += [embed(pick_leaf(observation, leaf.path)) for embed, leaf in zip(self.embeddings, self.embedded, strict=True)]
        return (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]) if parts else None

    def plain(self, observation: Tree) -> Tensor:
        """[N, plain_size]: the part that does not depend on weights."""
        parts = self._plain_parts(observation)
        joined = torch.cat(parts, dim=-1)
        return joined.reshape(-1, joined.shape[-1])

    def _plain_parts(self, observation: Tree) -> list[Tensor]:
        return [self._part(leaf, pick_leaf(observation, leaf.path)) for leaf in self.plan]

    def normalize(self, vector: Tensor | None, norm: RunningNorm | None) -> Tensor | None:
        """Normalise the part of the vector that does not depend on weights."""
        if norm is None or vector is None:
            return vector
        if self.plain_size == self.size:
            return norm(vector)  # type: ignore[no-any-return]
        return torch.cat([norm(vector[..., : self.plain_size]), vector[..., self.plain_size :]], dim=-1)

    @staticmethod
    def _part(leaf: ObservationLeaf, value: Tensor) -> Tensor:
        if leaf.kind == "vector":
            depth = len(leaf.space.shape)
            flat = value.flatten(-depth) if depth > 1 else value.unsqueeze(-1) if depth == 0 else value
            return (
                flat if flat.dtype == torch.float32 else flat.float() * (1 / leaf.divisor if flat.dtype == torch.uint8 else 1.0)
            )
        if isinstance(leaf.space, gym.spaces.Discrete):
            return F.one_hot(value - int(leaf.space.start), int(leaf.space.n)).float()
        depth = leaf.space.nvec.ndim
        flat, starts = value.flatten(-depth), np.asarray(leaf.space.start).reshape(-1)
        pieces = [F.one_hot(flat[..., i] - int(starts[i]), int(n)) for i, n in enumerate(leaf.space.nvec.reshape(-1))]
        return torch.cat(pieces, dim=-1).float()


class Trunk(nn.Module):
    """Encoders of all leaves, joined and followed by dense layers: observation → features [*, size]."""

    def __init__(self, plan: list[ObservationLeaf], vector_size: int, config: NetworkConfig) -> None:
        super().__init__()
        self.images = nn.ModuleList(ImageEncoder(leaf.space, config, leaf.divisor) for leaf in plan if leaf.kind == "image")
        self.sets = nn.ModuleList(
            EntityEncoder(leaf.space.shape[1], config.entity_dim) for leaf in plan if leaf.kind == "entities"
        )
        self.image_paths = [leaf.path for leaf in plan if leaf.kind == "image"]
        self.set_leaves = [leaf for leaf in plan if leaf.kind == "entities"]
        self._pointing = config.autoregressive
        joined = vector_size + sum(int(e.size) for e in (*self.images, *self.sets))
        hiddens = config.fcnet_hiddens
        if hiddens is None:
            hiddens = (512,) if len(self.images) else (64, 64)
        activation = "relu" if len(self.images) and config.fcnet_hiddens is None else config.fcnet_activation
        self.dense = mlp(joined, hiddens, activation)
        self.size = hiddens[-1] if hiddens else joined

    @property
    def image_encoders(self) -> list[ImageEncoder]:
        return [encoder for encoder in self.images if isinstance(encoder, ImageEncoder)]

    def forward(self, vector: Tensor | None, observation: Tree, before: Tensor | None = None) -> Tensor:
        return self.encode(vector, observation, before)[0]

    def encode(
        self, vector: Tensor | None, observation: Tree, before: Tensor | None = None
    ) -> tuple[Tensor, list[EncodedEntities]]:
        """Return the features and the encoded entities of every set. `before`: features of another module, placed ahead of the vector."""
        parts = [part for part in (before, vector) if part is not None]
        parts += [encode(pick_leaf(observation, path)) for encode, path in zip(self.images, self.image_paths, strict=True)]
        entity_sets: list[EncodedEntities] = []
        for encoder, leaf in zip(self.sets, self.set_leaves, strict=True):
            assert isinstance(encoder, EntityEncoder)
            entities = pick_leaf(observation, leaf.path)
            present = (pick_leaf(observation, leaf.mask) if leaf.mask is not None else entities[..., leaf.present]) > 0
            entity_sets.append(encoder.encode_entities(entities, present, self._pointer_targets(leaf, present, observation)))
            parts.append(encoder.pool(entity_sets[-1]))
        return apply_mlp(self.dense, parts), entity_sets

    def _pointer_targets(self, leaf: ObservationLeaf, present: Tensor, observation: Tree) -> Tensor | None:
        """Entities of a set that may be pointed at; all without a mask. None: no branch points at this set."""
        branches = [branch for branch in self._pointing if branch.points_at == leaf.path[-1]]
        if not branches:
            return None
        beside = leaf.path[:-1]
        allowed = [
            torch.ones_like(present) if b.mask is None else (pick_leaf(observation, (*beside, b.mask)) > 0).any(dim=-2)
            for b in branches
        ]
        return torch.stack(allowed).any(dim=0)


# -- categories ---------------------------------------------------------------------------------------------------------


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
