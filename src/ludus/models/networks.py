"""Networks built from the observation space: MLP, Nature CNN, small ResNet, entity sets, and an LSTM or GRU on top.

`Network` maps (observation, state, first) to (outputs, value, state). Its parts are ordinary modules that a custom model can
reuse. Observations are trees of tensors with any leading dimensions; recurrent calls have exactly [T, B].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ludus.core.plugins import did_you_mean
from ludus.core.tree import Tree
from ludus.errors import ConfigError
from ludus.models.autoregressive_actions import Branch
from ludus.models.byte_scales import IMAGE_DIVISOR
from ludus.models.categories import EMBEDDING_SIZE, CategoryEmbedding, category_counts, check_countable
from ludus.models.entity_encoder import EncodedEntities, EntityEncoder, Pointer
from ludus.models.layers import ACTIVATIONS, Dense, apply_mlp, is_tracing, mlp

NATURE_FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


@dataclass(frozen=True)
class NetworkConfig:
    """The `model:` section of an experiment, resolved."""

    fcnet_hiddens: tuple[int, ...] | None = None
    """Layers after the encoders; by default 64, 64 for vectors and 512 after a convolution."""
    fcnet_activation: str = "tanh"
    conv: str = "nature"
    """`nature` (three convolutions) or `resnet` (three small residual stages) for images."""
    conv_filters: tuple[tuple[int, int, int], ...] | None = None
    """Custom convolutions as (channels, kernel, stride); replaces `conv`."""
    entity_dim: int = 64
    entity_present: tuple[tuple[str, int], ...] = ()
    """Entity sets without a mask: name, and index of the feature that is above 0 for present entities."""
    autoregressive: tuple[Branch, ...] = ()
    """Parts of an action that are chosen after its first part (`ludus.models.autoregressive_actions`)."""
    vf_share_layers: bool | None = None
    """One trunk for policy and value; by default only for images and recurrent models."""
    core: str | None = None
    """None, `lstm` or `gru`."""
    cell_size: int = 128
    max_seq_len: int = 16
    free_log_std: bool = True
    """A learned standard deviation per action dimension that does not depend on the observation."""
    log_std_init: float = 0.0
    dueling: bool = False
    """Q-networks: separate streams for state value and advantages."""
    head_hiddens: tuple[int, ...] = ()
    """Q-networks: layers between the trunk and the outputs, one set per stream if dueling."""
    embed_above: int | None = None
    """Categories with more values than this are embedded instead of one-hot; None: never, as in checkpoints of earlier releases."""
    central: bool = False
    """The critic sees `state` in addition to `observation`, the policy only the latter (`ludus.models.centralized_critic`)."""
    central_shares: bool = False
    """The centralised critic takes features from the policy's layers."""
    custom_model: str | None = None
    """A user's model: the name of its file in `model/`, or `module:Class`."""
    custom_model_config: Mapping[str, Any] = field(default_factory=dict)
    byte_scales: tuple[tuple[str, float], ...] = ()
    """Path → divisor of the uint8 leaves of an observation that are not divided by 255 (`ludus.models.byte_scales`)."""

    def __post_init__(self) -> None:
        """Convert the plain mappings of a stored description to branches."""
        made = tuple(b if isinstance(b, Branch) else Branch(**{**b, "after": tuple(b["after"])}) for b in self.autoregressive)
        object.__setattr__(self, "autoregressive", made)


class PolicyNetwork(nn.Module):
    """The interface between a policy and its network, built-in or custom: (observation, state, first) → (outputs, value, state).

    Observations are trees with any leading dimensions; a recurrent network is called with exactly [T, B] and `first` [T, B].
    """

    norm: RunningNorm | None
    recurrent: bool = False
    pixels: int = 0
    """Pixels of all images of an observation; decides whether to use several cores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = None

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        return ()

    def to_network_layout(self, observation: Tree) -> Tree:
        """Convert observations to the memory layout for repeated learning."""
        return observation

    def freeze(self, *, values: bool = True) -> None:
        """Declare that the weights do not change until `thaw`, so that a faster form of them can be used."""

    def thaw(self) -> None:
        pass

    def normalise_observations(self) -> None:
        """Add running statistics of the numeric observations. Call before the first step."""
        raise NotImplementedError

    def observe(self, observation: Tree) -> None:
        """Learner only: merge observations [N, …] into the running statistics, if there are any."""

    def decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """One step of N rows within an episode, without a time dimension; this is exported."""
        raise NotImplementedError

    def forward(
        self, observation: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError


# -- encoders of one leaf of the observation ----------------------------------------------------------------------------


class ImageEncoder(nn.Module):
    """Convolutions over an image, channels first or last, uint8 divided by `divisor`; runs in channels-last layout."""

    def __init__(self, space: gym.spaces.Box, config: NetworkConfig, divisor: float = IMAGE_DIVISOR) -> None:
        super().__init__()
        self.channels_last_input = channels_last(space.shape)
        c, h, w = _chw(space.shape)
        self.chw, self.pixels = (c, h, w), h * w
        self.scale = 1 / divisor if space.dtype == np.uint8 else 1.0
        if config.conv_filters is not None or config.conv == "nature":
            self.body: nn.Module = _convolutions(c, config.conv_filters or _fitting_filters(h, w))
        elif config.conv == "resnet":
            self.body = _resnet(c)
        else:
            raise ConfigError(f"model.conv is {config.conv!r}.", "Use 'nature' or 'resnet'.")
        self.body = self.body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        try:
            with torch.no_grad():
                self.size = int(self.body(torch.zeros(1, c, h, w)).numel())
        except RuntimeError as error:
            raise ConfigError(f"The convolutions do not fit an image of {h}×{w}: {error}.", "Set model.conv_filters.") from error

    def to_network_layout(self, image: Tensor) -> Tensor:
        """[..., C, H, W] → [..., H, W, C] in memory, once, for images that are learned from several times.

        Transposing bytes costs a fifth of transposing the floats in every epoch.
        """
        return image if self.channels_last_input else _to_channels_last(image)

    def forward(self, image: Tensor) -> Tensor:
        lead = image.shape[:-3]
        x = image.flatten(0, -4) if len(lead) != 1 else image
        if tuple(image.shape[-3:]) != self.chw:
            x = x.permute(0, 3, 1, 2)
        elif image.dtype == torch.uint8 and not is_tracing():
            x = _to_channels_last(x).permute(0, 3, 1, 2)
        weight = next(self.body.parameters())
        x = x.to(weight.dtype, memory_format=torch.channels_last)
        x = self.body(x.mul_(self.scale) if image.dtype == torch.uint8 else x)
        features: Tensor = x.flatten(1).reshape(*lead, self.size)
        return features


def _to_channels_last(planes: Tensor) -> Tensor:
    """[…, C, H, W] → […, H, W, C], plane by plane: a third of the time of a general transposition of bytes."""
    out = planes.new_empty((*planes.shape[:-3], *planes.shape[-2:], planes.shape[-3]))
    for channel in range(planes.shape[-3]):
        out[..., channel] = planes[..., channel, :, :]
    return out


def channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether an image is [H, W, C]. A few planes with equal sides are [C, H, W]."""
    planes_first = shape[0] <= 16 and shape[1] == shape[2]
    return shape[-1] <= 16 and shape[-1] < shape[0] and not planes_first


def _chw(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return (shape[2], shape[0], shape[1]) if channels_last(shape) else (shape[0], shape[1], shape[2])


def _fitting_filters(h: int, w: int) -> Sequence[tuple[int, int, int]]:
    return NATURE_FILTERS if min(h, w) >= 36 else ((16, 3, 1), (32, 3, 2)) if min(h, w) >= 7 else ((32, min(h, w, 2), 1),)


def _convolutions(channels: int, filters: Sequence[tuple[int, int, int]]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for out, kernel, stride in filters:
        conv = nn.Conv2d(channels, out, kernel, stride)
        nn.init.orthogonal_(conv.weight, math.sqrt(2))
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [conv, nn.ReLU(inplace=True)]
        channels = out
    return nn.Sequential(*layers)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + change


def _resnet(channels: int) -> nn.Sequential:
    """Three stages of 16, 32, 32 channels (Espeholt et al. 2018, the deep IMPALA network with one block per stage)."""
    layers: list[nn.Module] = []
    for out in (16, 32, 32):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), _Residual(out)]
        channels = out
    return nn.Sequential(*layers, nn.ReLU())


# -- the whole observation ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    path: tuple[Any, ...]
    kind: str  # vector | onehot | embedded | image | entities
    space: Any
    size: int = 0
    mask: tuple[Any, ...] | None = None
    present: int | None = None
    """Entities without a mask: index of the presence feature."""
    divisor: float = IMAGE_DIVISOR
    """Divisor of uint8 values."""


def _plan(space: gym.Space[Any], config: NetworkConfig | None = None, path: tuple[Any, ...] = ()) -> list[_Leaf]:
    """Assign every leaf of the observation to an encoder. A 2-D Box with a sibling `<name>_mask` in a Dict is an entity set, and so is
    one named in the config. Masks of branches are not network inputs.
    """
    config = config or NetworkConfig()
    if isinstance(space, gym.spaces.Dict):
        present, masks = dict(config.entity_present), {branch.mask for branch in config.autoregressive}
        plan: list[_Leaf] = []
        for key, item in sorted(space.spaces.items()):
            if key in masks or (key.endswith("_mask") and _is_entities(space, key[: -len("_mask")])):
                continue
            if _is_entities(space, key):
                plan.append(_Leaf((*path, key), "entities", item, mask=(*path, f"{key}_mask")))
            elif key in present:
                plan.append(_Leaf((*path, key), "entities", item, present=_presence_feature(key, item, present[key])))
            else:
                plan += _plan(item, config, (*path, key))
        return plan
    if isinstance(space, gym.spaces.Tuple):
        return [leaf for i, item in enumerate(space.spaces) for leaf in _plan(item, config, (*path, i))]
    if isinstance(space, gym.spaces.Box):
        divisor = dict(config.byte_scales).get(".".join(map(str, path)), IMAGE_DIVISOR)
        if len(space.shape) == 3 and min(space.shape[0], space.shape[-1]) <= 16 and min(_chw(space.shape)[1:]) >= 5:
            return [_Leaf(path, "image", space, divisor=divisor)]
        return [_Leaf(path, "vector", space, math.prod(space.shape), divisor=divisor)]
    if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        counts = category_counts(space)
        if config.embed_above is None or max(counts) <= config.embed_above:
            return [_Leaf(path, "onehot", space, sum(counts))]
        check_countable(".".join(map(str, ("observation", *path))), counts)
        return [_Leaf(path, "embedded", space, EMBEDDING_SIZE * len(counts))]
    return [_Leaf(path, "vector", space, math.prod(np.atleast_1d(np.asarray(space.shape)).tolist()))]


def entities_of(space: gym.Space[Any], config: NetworkConfig) -> dict[str, int]:
    """Return the entity sets of an observation with their capacity."""
    return {leaf.path[-1]: int(leaf.space.shape[0]) for leaf in _plan(space, config) if leaf.kind == "entities"}


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


def _pick(tree: Tree, path: tuple[Any, ...]) -> Tensor:
    for step in path:
        tree = tree[step]
    return tree  # type: ignore[no-any-return]


def _replace(tree: Tree, path: tuple[Any, ...], leaf: Tensor) -> Tree:
    """Return the tree with one leaf replaced."""
    if not path:
        return leaf
    head, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {key: _replace(item, rest, leaf) if key == head else item for key, item in tree.items()}
    return tuple(_replace(item, rest, leaf) if i == head else item for i, item in enumerate(tree))


class VectorPart(nn.Module):
    """All numeric and categorical leaves as one float vector [*, size]; uint8 divided by the divisor of the leaf.

    Categories are one-hot or, if there are very many, embedded; embedded ones come last, from `plain_size` on.
    """

    def __init__(self, plan: list[_Leaf]) -> None:
        super().__init__()
        self.plan = [leaf for leaf in plan if leaf.kind in ("vector", "onehot")]
        self.embedded = [leaf for leaf in plan if leaf.kind == "embedded"]
        self.embeddings = nn.ModuleList(CategoryEmbedding(leaf.space) for leaf in self.embedded)
        self.plain_size = sum(leaf.size for leaf in self.plan)
        self.size = self.plain_size + sum(leaf.size for leaf in self.embedded)

    def forward(self, observation: Tree) -> Tensor | None:
        parts = self._plain_parts(observation)
        parts += [embed(_pick(observation, leaf.path)) for embed, leaf in zip(self.embeddings, self.embedded, strict=True)]
        return (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]) if parts else None

    def plain(self, observation: Tree) -> Tensor:
        """[N, plain_size]: the part that does not depend on weights."""
        parts = self._plain_parts(observation)
        joined = torch.cat(parts, dim=-1)
        return joined.reshape(-1, joined.shape[-1])

    def _plain_parts(self, observation: Tree) -> list[Tensor]:
        return [self._part(leaf, _pick(observation, leaf.path)) for leaf in self.plan]

    def normalize(self, vector: Tensor | None, norm: RunningNorm | None) -> Tensor | None:
        """Normalise the part of the vector that does not depend on weights."""
        if norm is None or vector is None:
            return vector
        if self.plain_size == self.size:
            return norm(vector)  # type: ignore[no-any-return]
        return torch.cat([norm(vector[..., : self.plain_size]), vector[..., self.plain_size :]], dim=-1)

    @staticmethod
    def _part(leaf: _Leaf, value: Tensor) -> Tensor:
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

    def __init__(self, plan: list[_Leaf], vector_size: int, config: NetworkConfig) -> None:
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
        parts += [encode(_pick(observation, path)) for encode, path in zip(self.images, self.image_paths, strict=True)]
        entity_sets: list[EncodedEntities] = []
        for encoder, leaf in zip(self.sets, self.set_leaves, strict=True):
            assert isinstance(encoder, EntityEncoder)
            entities = _pick(observation, leaf.path)
            present = (_pick(observation, leaf.mask) if leaf.mask is not None else entities[..., leaf.present]) > 0
            entity_sets.append(encoder.encode_entities(entities, present, self._pointer_targets(leaf, present, observation)))
            parts.append(encoder.pool(entity_sets[-1]))
        return apply_mlp(self.dense, parts), entity_sets

    def _pointer_targets(self, leaf: _Leaf, present: Tensor, observation: Tree) -> Tensor | None:
        """Entities of a set that may be pointed at; all without a mask. None: no branch points at this set."""
        branches = [branch for branch in self._pointing if branch.points_at == leaf.path[-1]]
        if not branches:
            return None
        beside = leaf.path[:-1]
        allowed = [
            torch.ones_like(present) if b.mask is None else (_pick(observation, (*beside, b.mask)) > 0).any(dim=-2)
            for b in branches
        ]
        return torch.stack(allowed).any(dim=0)


class Pointing(nn.Module):
    """Heads of the action branches that choose an entity; their outputs follow all others."""

    def __init__(self, space: gym.Space[Any], config: NetworkConfig, trunk: Trunk, features: int) -> None:
        super().__init__()
        self._branches = [branch for branch in config.autoregressive if branch.points_at is not None]
        names = [leaf.path[-1] for leaf in trunk.set_leaves]
        self.heads = nn.ModuleList()
        self._sets: list[int] = []
        self.size = 0
        for branch in self._branches:
            if branch.points_at not in names:
                raise ConfigError(
                    f"model.autoregressive points at {branch.points_at!r}, which is not an entity set.",
                    f"Available: {', '.join(names)}." if names else "Name its presence feature in model.entity_present.",
                )
            self._sets.append(names.index(branch.points_at))
            entities = int(trunk.set_leaves[self._sets[-1]].space.shape[0])
            _check_branch_mask(space, branch, entities)
            self.heads.append(Pointer(features, config.entity_dim, len(branch.after)))
            self.size += len(branch.after) * entities

    def forward(self, features: Tensor, entity_sets: list[EncodedEntities], observation: Tree) -> list[Tensor]:
        return [
            head(features, entity_sets[number], None if branch.mask is None else observation[branch.mask] > 0)
            for head, number, branch in zip(self.heads, self._sets, self._branches, strict=True)
        ]


def _check_branch_mask(space: gym.Space[Any], branch: Branch, entities: int) -> None:
    if branch.mask is None:
        return
    found = space.spaces.get(branch.mask) if isinstance(space, gym.spaces.Dict) else None
    wanted = (len(branch.after), entities)
    if found is None or found.shape != wanted:
        shown = "is not there" if found is None else f"is {found}"
        raise ConfigError(
            f"model.autoregressive: the mask {branch.mask!r} of part {branch.part} {shown} in the observation.",
            f"It has {wanted[0]} rows, one for each option that the part comes after, of {wanted[1]}.",
        )


# -- recurrence ---------------------------------------------------------------------------------------------------------


class RecurrentCore(nn.Module):
    """An LSTM or GRU over [T, B, F] whose state is reset wherever `first` is true.

    The input projection of the whole sequence is one matrix product; only the recurrent part runs step by step.
    """

    def __init__(self, kind: str, inputs: int, cells: int) -> None:
        super().__init__()
        if kind not in ("lstm", "gru"):
            raise ConfigError(f"model.core is {kind!r}.", "Use 'lstm' or 'gru'.")
        self.kind, self.size = kind, cells
        gates = 4 if kind == "lstm" else 3
        self.input = Dense(inputs, gates * cells, gain=1.0)
        self.recurrent = Dense(cells, gates * cells, gain=1.0)
        if kind == "lstm":
            nn.init.ones_(self.input.bias[cells : 2 * cells])  # remember by default (Jozefowicz et al. 2015)

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(rows, self.size) for _ in range(2 if self.kind == "lstm" else 1))

    def forward(self, x: Tensor, state: tuple[Tensor, ...], first: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        projected = self.input(x)
        keep = (~first).to(x.dtype).unsqueeze(-1)
        outputs = []
        for step, kept in zip(projected.unbind(0), keep.unbind(0), strict=True):
            state = tuple(s * kept for s in state)
            state = self._lstm(step, *state) if self.kind == "lstm" else self._gru(step, *state)
            outputs.append(state[0])
        return torch.stack(outputs), state

    def advance(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One step [B, F] within an episode."""
        step = self.input(x)
        return self._lstm(step, *state) if self.kind == "lstm" else self._gru(step, *state)

    def _lstm(self, step: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (step + self.recurrent(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def _gru(self, step: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        xr, xz, xn = step.chunk(3, dim=-1)
        hr, hz, hn = self.recurrent(h).chunk(3, dim=-1)
        z = torch.sigmoid(xz + hz)
        return ((1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h,)


# -- normalisation and the network --------------------------------------------------------------------------------------


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


class FrozenShared:
    """A snapshot of a network whose heads share their layers, for acting: both heads are one matrix product."""

    def __init__(self, trunk: list[Dense], head: Dense, value_head: Dense, activation: str, *, values: bool = True) -> None:
        self._activation = torch.sigmoid_ if activation == "tanh" else torch.relu_
        *self._hidden, policy = fold_activations([*trunk, head], activation)
        value = fold_activations([*trunk, value_head], activation)[-1]
        self._heads = (torch.cat([policy[0], value[0]]), torch.cat([policy[1], value[1]])) if values else policy
        self._outputs, self._values = head.out_features, values

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, inputs] → (outputs [N, …], value [N])."""
        for weight, bias in self._hidden:
            x = self._activation(F.linear(x, weight, bias))
        heads = F.linear(x, *self._heads)
        if not self._values:
            return heads, heads.new_zeros(len(heads))
        return heads[:, : self._outputs], heads[:, self._outputs]


class FrozenMLP:
    """A snapshot of a two-tower network, for acting: the first layers of both towers are one matrix product.

    With tanh(z) = 2·sigmoid(2z) − 1 folded into the weights, a hidden layer is one product and one in-place sigmoid. For 64
    environments that takes a third of the time of the original modules; outputs differ by float32 rounding.
    """

    def __init__(self, policy: list[Dense], value: list[Dense], activation: str, *, values: bool = True) -> None:
        self._activation = torch.sigmoid_ if activation == "tanh" else torch.relu_
        (first_p, *self._policy), (first_v, *self._value) = (fold_activations(tower, activation) for tower in (policy, value))
        self._width, self._values = policy[0].out_features, values
        self._first = (torch.cat([first_p[0], first_v[0]]), torch.cat([first_p[1], first_v[1]])) if values else first_p

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, inputs] → (outputs [N, …], value [N])."""
        both = self._activation(F.linear(x, *self._first))
        if not self._values:
            return self._tower(both, self._policy), both.new_zeros(len(both))
        outputs = self._tower(both[:, : self._width], self._policy)
        return outputs, self._tower(both[:, self._width :], self._value).squeeze(-1)

    def _tower(self, x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        *hidden, last = layers
        for weight, bias in hidden:
            x = self._activation(F.linear(x, weight, bias))
        return F.linear(x, *last)


def fold_activations(tower: list[Dense], activation: str) -> list[tuple[Tensor, Tensor]]:
    """Return weights and biases; for tanh such that every hidden layer ends in a plain sigmoid."""
    layers: list[tuple[Tensor, Tensor]] = []
    for depth, layer in enumerate(tower):
        weight: Tensor = layer.weight
        bias: Tensor = layer.bias
        if activation == "tanh" and depth > 0:  # undo 2·s − 1 of the layer before
            weight, bias = 2 * weight, bias - weight.sum(dim=1)
        if activation == "tanh" and depth < len(tower) - 1:
            weight, bias = 2 * weight, 2 * bias
        layers.append((weight, bias))
    return layers


class EncodedNetwork(PolicyNetwork):
    """Base of the built-in networks: encoders and layers chosen from the observation space, and its normalisation."""

    def __init__(self, observation_space: gym.Space[Any], config: NetworkConfig) -> None:
        super().__init__()
        if config.fcnet_activation not in ACTIVATIONS:
            raise ConfigError(f"model.fcnet_activation is {config.fcnet_activation!r}.", f"Use one of {', '.join(ACTIVATIONS)}.")
        self._plan = _plan(observation_space, config)
        sets = entities_of(observation_space, config)
        unknown = [name for name, _ in config.entity_present if name not in sets]
        if unknown:
            raise ConfigError(
                f"model.entity_present names {unknown[0]!r}, which is not in the observation.",
                did_you_mean(
                    unknown[0], list(observation_space.spaces) if isinstance(observation_space, gym.spaces.Dict) else []
                ),
            )
        self.vector = VectorPart(self._plan)
        self.trunk = self._make_trunk(config)
        self.pixels = sum(encoder.pixels for encoder in self.trunk.image_encoders)

    def _make_trunk(self, config: NetworkConfig) -> Trunk:
        return Trunk(self._plan, self.vector.size, config)

    def normalise_observations(self) -> None:
        """Add running statistics of the vector part. Call before the first step."""
        if self.vector.plain_size:
            self.norm = RunningNorm(self.vector.plain_size)

    @torch.no_grad()
    def observe(self, observation: Tree) -> None:
        if self.norm is not None:
            self.norm.update(self.vector.plain(observation))

    def to_network_layout(self, observation: Tree) -> Tree:
        for encoder, path in zip(self.trunk.image_encoders, self.trunk.image_paths, strict=True):
            observation = _replace(observation, path, encoder.to_network_layout(_pick(observation, path)))
        return observation

    def vector_input(self, observation: Tree) -> Tensor | None:
        """The normalised vector part."""
        return self.vector.normalize(self.vector(observation), self.norm)


class Network(EncodedNetwork):
    """The default model of every algorithm: (observation, state, first) → (outputs, value, state)."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        num_outputs: int,
        config: NetworkConfig,
        free_outputs: Sequence[int] = (),
    ) -> None:
        super().__init__(observation_space, config)
        self.core = RecurrentCore(config.core, self.trunk.size, config.cell_size) if config.core else None
        self.recurrent = self.core is not None
        share = config.vf_share_layers
        if share is None:
            share = self.core is not None or len(self.trunk.images) > 0
        if not share and self.core is not None:
            raise ConfigError(
                "model.vf_share_layers is false, but the model is recurrent.", "A recurrent model shares its layers."
            )
        self.value_trunk = None if share else self._make_trunk(config)
        features = self.features = self.core.size if self.core else self.trunk.size
        free = list(free_outputs) if config.free_log_std else []
        self.pointing = Pointing(observation_space, config, self.trunk, features)
        self.head = Dense(features, num_outputs - len(free) - self.pointing.size, gain=0.01)
        self.value_head = Dense(features if share else self.trunk.size, 1, gain=1.0)
        self.log_std = nn.Parameter(torch.full((len(free),), config.log_std_init)) if free else None
        order = [i for i in range(num_outputs) if i not in set(free)] + free
        self.output_order = None if order == sorted(order) else np.argsort(order).tolist()
        self._frozen: FrozenMLP | FrozenShared | None = None
        self._values = True

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        return self.core.initial_state(rows) if self.core else ()

    def freeze(self, *, values: bool = True) -> None:
        """Without `values` the value head is not computed and all values are 0."""
        self._values = values
        if self.core is not None or len(self.trunk.images) or len(self.trunk.sets):
            return
        trunks = [self.trunk] if self.value_trunk is None else [self.trunk, self.value_trunk]
        hidden: list[list[Dense]] = [list(trunk.dense) for trunk in trunks]  # type: ignore[arg-type]
        activations = {layer.activation for tower in hidden for layer in tower}
        if activations not in ({"tanh"}, {"relu"}):
            return
        if self.value_trunk is None:
            self._frozen = FrozenShared(hidden[0], self.head, self.value_head, activations.pop(), values=values)
        else:
            towers = [*hidden[0], self.head], [*hidden[1], self.value_head]
            self._frozen = FrozenMLP(*towers, activations.pop(), values=values)

    def thaw(self) -> None:
        self._frozen, self._values = None, True

    def forward(
        self, observation: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        vector = self.vector_input(observation)
        if self._frozen is not None and vector is not None:
            outputs, value = self._frozen(vector)
            return self._order_outputs(outputs), value, ()
        outputs, features, state = self.compute_outputs(observation, vector, state, first)
        if not self._values:
            return outputs, outputs.new_zeros(outputs.shape[:-1]), state
        value_features = features if self.value_trunk is None else self.value_trunk(vector, observation)
        return outputs, self.value_head(value_features).squeeze(-1).float(), state

    def compute_outputs(
        self, observation: Tree, vector: Tensor | None, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return (outputs, features, state); without `first` this is one step within an episode."""
        features, entity_sets = self.trunk.encode(vector, observation)
        if self.core is not None:
            if first is None:
                state = self.core.advance(features, state)
                features = state[0]
            else:
                features, state = self.core(features.float(), state, first)
        outputs = self._order_outputs(self.head(features))
        if self.pointing.size:
            outputs = torch.cat([outputs, *self.pointing(features, entity_sets, observation)], dim=-1)
        return outputs.float(), features, state

    def decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        vector = self.vector_input(observation)
        outputs, features, state = self.compute_outputs(observation, vector, state, None)
        value_features = features if self.value_trunk is None else self.value_trunk(vector, observation)
        return outputs, self.value_head(value_features).squeeze(-1), state

    def _order_outputs(self, outputs: Tensor) -> Tensor:
        """Insert the free log standard deviations where the distribution expects them."""
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand(*outputs.shape[:-1], -1)], dim=-1)
        if self.output_order is not None:
            if is_tracing():  # as Gather, which every runtime supports
                return outputs.index_select(-1, torch.tensor(self.output_order))
            outputs = outputs[..., self.output_order]
        return outputs
