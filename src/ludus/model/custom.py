"""A network of the user's own, in the form in which a policy uses it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from ludus.errors import ConfigError
from ludus.model.networks import NetworkConfig, PolicyNetwork


class CustomNetwork(PolicyNetwork):
    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], num_outputs: int, config: NetworkConfig
    ) -> None:
        super().__init__()
        raise ConfigError("model.custom_model is not there yet.")
