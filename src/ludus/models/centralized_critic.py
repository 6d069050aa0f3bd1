"""A centralised value (MAPPO, Yu et al. 2022): the policy sees what its agent sees, the value sees the whole besides.

The value is for learning alone. Whoever only acts takes the actor out of it: `plain` for what is stored, `actor_of` for a policy.
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
from ludus.models.networks import (
    Network,
    NetworkConfig,
    PolicyNetwork,
    RunningNorm,
    Trunk,
    VectorPart,
    _pick,
    _plan,
    _replace,
)
from ludus.models.policy import Policy, Weights

OWN, WHOLE = "observation", "state"
"""The two parts of what such a network is given."""
_ACTOR = "network.actor."


class CentralNetwork(PolicyNetwork):
    """An ordinary network for the policy, and layers of its own for the value, which see everything.

    With `central_shares` the value takes the own view from the policy's layers, with its memory if it has one, and teaches them.
    Otherwise it looks at all of it anew and has no memory.
    """

    def __init__(
        self, observation_space: gym.Space[Any], num_outputs: int, config: NetworkConfig, free_outputs: Sequence[int] = ()
    ) -> None:
        super().__init__()
        if not isinstance(observation_space, gym.spaces.Dict) or set(observation_space.spaces) != {OWN, WHOLE}:
            raise ConfigError(
                f"A centralised value takes {OWN!r} and {WHOLE!r}, not {observation_space}.",
                "Leave out model.centralized_value, or have the environment show both; the Arena does with env_config.whole: true.",
            )
        self.actor = Network(observation_space[OWN], num_outputs, _of_actor(config), free_outputs)
        nn.init.zeros_(self.actor.value_head.weight)  # nobody learns it: who asks the actor alone hears 0
        self.recurrent = self.actor.recurrent
        self._share = config.central_shares
        plan = [leaf for leaf in _plan(observation_space, config) if not self._share or leaf.path[0] == WHOLE]
        self.vector = VectorPart(plan)
        self.trunk = Trunk(plan, self.vector.size + (self.actor.features if self._share else 0), config)
        self.value_head = Dense(self.trunk.size, 1, gain=1.0)
        self.pixels = self.actor.pixels + sum(encoder.pixels for encoder in self.trunk.image_encoders)
        self._values = True

    def initial_state(self, rows: int) -> tuple[Tensor, ...]:
        return self.actor.initial_state(rows)

    def arranged(self, observation: Tree) -> Tree:
        observation = {**observation, OWN: self.actor.arranged(observation[OWN])}
        for encoder, path in zip(self.trunk.image_encoders, self.trunk.image_paths, strict=True):
            if path[0] == OWN:  # the actor's layers lay it out in the same way
                continue
            observation = _replace(observation, path, encoder.arranged(_pick(observation, path)))
        return observation

    def freeze(self, *, values: bool = True) -> None:
        self._values = values
        self.actor.freeze(values=False)

    def thaw(self) -> None:
        self._values = True
        self.actor.thaw()

    def normalise_observations(self) -> None:
        self.actor.normalise_observations()
        if self.vector.plain_size:
            self.norm = RunningNorm(self.vector.plain_size)

    @torch.no_grad()
    def observe(self, observation: Tree) -> None:
        self.actor.observe(observation[OWN])
        if self.norm is not None:
            self.norm.update(self.vector.plain(observation))

    def forward(
        self, observation: Tree, state: tuple[Tensor, ...], first: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if self._share and self._values:
            outputs, features, state = self._answers(observation[OWN], state, first)
            return outputs, self._value(observation, outputs, features), state
        outputs, _, state = self.actor(observation[OWN], state, first)
        return outputs, self._value(observation, outputs), state

    def decide(self, observation: Tree, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        outputs, features, state = self._answers(observation[OWN], state, None)
        return outputs, self._value(observation, outputs, features if self._share else None), state

    def _answers(self, own: Tree, state: tuple[Tensor, ...], first: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        return self.actor.answers(own, self.actor.numbers(own), state, first)

    def _value(self, observation: Tree, outputs: Tensor, features: Tensor | None = None) -> Tensor:
        if not self._values:
            return outputs.new_zeros(outputs.shape[:-1])
        vector = self.vector.normalised(self.vector(observation), self.norm)
        value: Tensor = self.value_head(self.trunk(vector, observation, features)).squeeze(-1)
        return value.float()


def _of_actor(config: NetworkConfig) -> NetworkConfig:
    scales = below(config.byte_scales, OWN)
    return replace(
        config, central=False, central_shares=False, vf_share_layers=True, byte_scales=scales
    )  # without a value of its own


def actor_of(policy: Policy) -> Policy:
    """The policy for whoever only acts, with the very same weights; one without a centralised value is that already."""
    network = policy.network
    if not isinstance(network, CentralNetwork):
        return policy
    assert isinstance(policy.observation_space, gym.spaces.Dict)
    with torch.random.fork_rng(devices=[]):
        own = Policy(
            policy.observation_space[OWN],
            policy.action_space,
            _of_actor(policy.config),
            policy.normalise_observations,
            policy.kind,
        )
    own.network = network.actor
    return own


def plain(description: Mapping[str, Any], weights: Weights) -> tuple[dict[str, Any], Weights]:
    """The same for a stored policy: its description and weights without the value."""
    network = description.get("network") or {}
    if not network.get("central"):
        return dict(description), weights
    described = {
        **description,
        "observation_space": description["observation_space"]["spaces"][OWN],
        "network": {**network, "central": False, "central_shares": False, "vf_share_layers": True},
    }
    if network.get("byte_scales"):
        scales = tuple((str(path), float(divisor)) for path, divisor in network["byte_scales"])
        described["network"]["byte_scales"] = below(scales, OWN)
    kept = {f"network.{name.removeprefix(_ACTOR)}": array for name, array in weights.items() if name.startswith(_ACTOR)}
    return described, kept
