"""A centralised critic (MAPPO, Yu et al. 2022): the policy sees its agent's observation, the critic also the global state.

The critic is needed for learning only. For acting the actor is extracted: `without_critic` for stored data, `actor_policy` for a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from ludus.core.tree import Tree
from ludus.errors import ConfigError
from ludus.models.byte_scales import below
from ludus.models.layers import Dense
from ludus.models.network_config import NetworkConfig
from ludus.models.networks import EncodedNetwork, Network, PolicyNetwork
from ludus.models.observation_encoder import pick_leaf, plan_encoders, replace_leaf
from ludus.models.policy import Policy, Weights

OWN, STATE = "observation", "state"
"""The two parts of the observation of such a network."""
_ACTOR = "network.actor."


class CentralNetwork(EncodedNetwork):
    """An ordinary network for the policy, and separate layers for the critic.

    With `central_shares` the critic takes the agent's view from the policy's layers, including their recurrent state, and trains them.
    Otherwise it encodes everything itself and is not recurrent.
    """

    def __init__(
        self, observation_space: gym.Space[Any], num_outputs: int, config: NetworkConfig, free_outputs: Sequence[int] = ()
    ) -> None:
        PolicyNetwork.__init__(self)  # the actor is the first module; it checks the configuration
        if not isinstance(observation_space, gym.spaces.Dict) or set(observation_space.spaces) != {OWN, STATE}:
            raise ConfigError(
                f"A centralised critic takes {OWN!r} and {STATE!r}, not {observation_space}.",
                "Leave out model.centralized_value, or return both from the environment; the Arena does with env_config.whole: true.",
            )
        self.actor = Network(observation_space[OWN], num_outputs, _actor_config(config), free_outputs)
        nn.init.zeros_(self.actor.value_head.weight)  # never trained: the actor alone returns value 0
        self.recurrent = self.actor.recurrent
        self._share = config.central_shares
        plan = [leaf for leaf in plan_encoders(observation_space, config) if not self._share or leaf.path[0] == STATE]
        self.make_encoders(plan, config, self.actor.features if self._share else 0)
        self.pixels += self.actor.pixels
        self.value_head = Dense(self.trunk.size, 1, gain=1.0)
        self._values = True

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        return self.actor.initial_state(rows)

    def to_network_layout(self, observation: Tree) -> Tree:
        observation = {**observation, OWN: self.actor.to_network_layout(observation[OWN])}
        for encoder, path in zip(self.trunk.image_encoders, self.trunk.image_paths, strict=True):
            if path[0] == STATE:  # the actor has converted the others
                observation = replace_leaf(observation, path, encoder.to_network_layout(pick_leaf(observation, path)))
        return observation

    def freeze(self, *, values: bool = True) -> None:
        self._values = values
        self.actor.freeze(values=False)

    def thaw(self) -> None:
        self._values = True
        self.actor.thaw()

    def normalise_observations(self) -> None:
        self.actor.normalise_observations()
        super().normalise_observations()

    @torch.no_grad()
    def observe(self, observation: Tree) -> None:
        self.actor.observe(observation[OWN])
        super().observe(observation)

    def forward(
        self, observation: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if self._share and self._values:
            outputs, features, state = self._actor_outputs(observation[OWN], state, first)
            return outputs, self._value(observation, outputs, features), state
        outputs, _, state = self.actor(observation[OWN], state, first)
        return outputs, self._value(observation, outputs), state

    def decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        outputs, features, state = self._actor_outputs(observation[OWN], state, None)
        return outputs, self._value(observation, outputs, features if self._share else None), state

    def _actor_outputs(
        self, own: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self.actor.compute_outputs(own, self.actor.vector_input(own), state, first)

    def _value(self, observation: Tree, outputs: Tensor, features: Tensor | None = None) -> Tensor:
        if not self._values:
            return outputs.new_zeros(outputs.shape[:-1])
        value: Tensor = self.value_head(self.trunk(self.vector_input(observation), observation, features)).squeeze(-1)
        return value.float()


def _actor_config(config: NetworkConfig) -> NetworkConfig:
    scales = below(config.byte_scales, OWN)  # the actor has no separate value layers
    return replace(config, central=False, central_shares=False, vf_share_layers=True, byte_scales=scales)


def actor_policy(policy: Policy) -> Policy:
    """Return the policy for acting, which shares the weights; a policy without a centralised critic is returned unchanged."""
    network = policy.network
    if not isinstance(network, CentralNetwork):
        return policy
    assert isinstance(policy.observation_space, gym.spaces.Dict)
    with torch.random.fork_rng(devices=[]):
        own = Policy(
            policy.observation_space[OWN],
            policy.action_space,
            _actor_config(policy.config),
            policy.normalise_observations,
            policy.kind,
        )
    own.network = network.actor
    return own


def without_critic(description: Mapping[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """Return the description and weights of a stored policy without its critic."""
    network = description.get("network") or {}
    if not network.get("central"):
        return dict(description), weights
    actor_description = {
        **description,
        "observation_space": description["observation_space"]["spaces"][OWN],
        "network": {**network, "central": False, "central_shares": False, "vf_share_layers": True},
    }
    if network.get("byte_scales"):
        scales = tuple((str(path), float(divisor)) for path, divisor in network["byte_scales"])
        actor_description["network"]["byte_scales"] = below(scales, OWN)
    actor_weights = {f"network.{name.removeprefix(_ACTOR)}": array for name, array in weights.items() if name.startswith(_ACTOR)}
    return actor_description, actor_weights
