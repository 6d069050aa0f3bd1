"""Networks of policies: the interface, and the default model built from the observation space.

`Network` maps (observation, state, first) to (outputs, value, state). Its parts are ordinary modules that a custom model can
reuse. Observations are trees of tensors with any leading dimensions; recurrent calls have exactly [T, B].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.plugins import did_you_mean
from ludus.core.tree import Tree
from ludus.errors import ConfigError
from ludus.models.autoregressive_actions import Branch
from ludus.models.entity_encoder import EncodedEntities, Pointer
from ludus.models.frozen_layers import FrozenShared, FrozenTwoTowers
from ludus.models.layers import ACTIVATIONS, Dense, RunningNorm, is_tracing
from ludus.models.network_config import NetworkConfig
from ludus.models.observation_encoder import (
    ObservationLeaf,
    Trunk,
    VectorPart,
    entities_of,
    pick_leaf,
    plan_encoders,
    replace_leaf,
)
from ludus.models.recurrent_core import RecurrentCore


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


class EncodedNetwork(PolicyNetwork):
    """Base of the built-in networks: encoders and layers chosen from the observation space, and its normalisation."""

    vector: VectorPart
    trunk: Trunk

    def __init__(self, observation_space: gym.Space[Any], config: NetworkConfig) -> None:
        super().__init__()
        if config.fcnet_activation not in ACTIVATIONS:
            raise ConfigError(f"model.fcnet_activation is {config.fcnet_activation!r}.", f"Use one of {', '.join(ACTIVATIONS)}.")
        sets = entities_of(observation_space, config)
        unknown = [name for name, _ in config.entity_present if name not in sets]
        if unknown:
            known = list(observation_space.spaces) if isinstance(observation_space, gym.spaces.Dict) else []
            message = f"model.entity_present names {unknown[0]!r}, which is not in the observation."
            raise ConfigError(message, did_you_mean(unknown[0], known))
        self.make_encoders(plan_encoders(observation_space, config), config)

    def make_encoders(self, plan: list[ObservationLeaf], config: NetworkConfig, other_features: int = 0) -> None:
        """`other_features`: number of features of another module, which the trunk takes ahead of the vector."""
        self._plan, self.vector = plan, VectorPart(plan)
        self.trunk = Trunk(plan, self.vector.size + other_features, config)
        self.pixels = sum(encoder.pixels for encoder in self.trunk.image_encoders)

    def make_trunk(self, config: NetworkConfig) -> Trunk:
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
            observation = replace_leaf(observation, path, encoder.to_network_layout(pick_leaf(observation, path)))
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
        self.value_trunk = None if share else self.make_trunk(config)
        features = self.features = self.core.size if self.core else self.trunk.size
        free = list(free_outputs) if config.free_log_std else []
        self.pointing = Pointing(observation_space, config, self.trunk, features)
        self.head = Dense(features, num_outputs - len(free) - self.pointing.size, gain=0.01)
        self.value_head = Dense(features if share else self.trunk.size, 1, gain=1.0)
        self.log_std = nn.Parameter(torch.full((len(free),), config.log_std_init)) if free else None
        order = [i for i in range(num_outputs) if i not in set(free)] + free
        self.output_order = None if order == sorted(order) else np.argsort(order).tolist()
        self._frozen: FrozenTwoTowers | FrozenShared | None = None
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
            self._frozen = FrozenTwoTowers(*towers, activations.pop(), values=values)

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
