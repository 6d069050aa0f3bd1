"""The Q-network of value-based policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
from torch import Tensor, nn

from ludus.core.tree import Tree
from ludus.errors import ConfigError
from ludus.models.frozen_layers import FrozenTower, FrozenTwoTowers, fold_activations
from ludus.models.layers import Dense, mlp
from ludus.models.network_config import NetworkConfig
from ludus.models.networks import EncodedNetwork


class QNetwork(EncodedNetwork):
    """(observation, (), None) → (Q-values [*, A], maximum Q-value [*], ()).

    Dueling (Wang et al. 2016): Q = V + A − mean(A). Both streams share the trunk unless `vf_share_layers` is false.
    """

    def __init__(self, observation_space: gym.Space[Any], num_actions: int, config: NetworkConfig) -> None:
        super().__init__(observation_space, config)
        if config.core:
            raise ConfigError(
                f"model.core is {config.core!r}: DQN learns from single steps and cannot train a recurrent model.",
                "Use PPO, APPO or IMPALA, or stack the last observations.",
            )
        self.head = _stream(self.trunk.size, config, num_actions)
        self.value_head = _stream(self.trunk.size, config, 1) if config.dueling else None
        separate = config.dueling and config.vf_share_layers is False
        self.value_trunk = self.make_trunk(config) if separate else None
        self._frozen: Callable[[Tensor], Tensor] | None = None
        self._values = True

    def forward(
        self, observation: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        q = self.action_values(observation)
        return q, q.amax(dim=-1) if self._values else q.new_zeros(q.shape[:-1]), ()

    def action_values(self, observation: Tree) -> Tensor:
        vector = self.vector_input(observation)
        return self._q_values(vector, observation) if self._frozen is None or vector is None else self._frozen(vector)

    def decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        q = self._q_values(self.vector_input(observation), observation)
        return q, q.amax(dim=-1), ()

    def _q_values(self, vector: Tensor | None, observation: Tree) -> Tensor:
        features = self.trunk(vector, observation)
        advantage: Tensor = self.head(features).float()
        if self.value_head is None:
            return advantage
        value = self.value_head(features if self.value_trunk is None else self.value_trunk(vector, observation)).float()
        return _dueling(value, advantage)

    # -- acting

    def freeze(self, *, values: bool = True) -> None:
        self._values = values
        if len(self.trunk.images) or len(self.trunk.sets):
            return
        heads = _layers(self.head), [] if self.value_head is None else _layers(self.value_head)
        trunks = _layers(self.trunk.dense), _layers((self.value_trunk or self.trunk).dense)
        hidden = [*trunks[0], *heads[0][:-1]]
        activations = {layer.activation for layer in hidden}
        if activations not in ({"tanh"}, {"relu"}):
            return
        activation = activations.pop()
        advantage, value = [*trunks[0], *heads[0]], [*trunks[1], *heads[1]]
        if self.value_head is None:
            self._frozen = FrozenTower(fold_activations(advantage, activation), activation)
        elif self.value_trunk is None and len(heads[0]) == 1:  # the sum of two linear layers is a linear layer
            *below, (weight, bias) = fold_activations(advantage, activation)
            value_weight, value_bias = fold_activations(value, activation)[-1]
            last = _dueling(value_weight, weight, dim=0), _dueling(value_bias, bias, dim=0)
            self._frozen = FrozenTower([*below, last], activation)
        else:
            self._frozen = partial(_dueling_towers, FrozenTwoTowers(advantage, value, activation))

    def thaw(self) -> None:
        self._frozen, self._values = None, True


def _stream(features: int, config: NetworkConfig, outputs: int) -> nn.Sequential:
    layers = mlp(features, config.head_hiddens, config.fcnet_activation)
    return layers.append(Dense(config.head_hiddens[-1] if config.head_hiddens else features, outputs, gain=0.01))


def _layers(tower: nn.Module) -> list[Dense]:
    return [layer for layer in tower.children() if isinstance(layer, Dense)]


def _dueling(value: Tensor, advantage: Tensor, dim: int = -1) -> Tensor:
    return value + (advantage - advantage.mean(dim=dim, keepdim=True))


def _dueling_towers(towers: FrozenTwoTowers, x: Tensor) -> Tensor:
    advantage, value = towers(x)
    return _dueling(value.unsqueeze(-1), advantage)
