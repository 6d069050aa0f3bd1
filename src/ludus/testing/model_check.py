"""Check of a custom model for your tests; every run makes the same check at its start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from torch import nn

from ludus.core import spaces, trust
from ludus.envs.vector_env import make_one
from ludus.models.custom.validation import check_custom
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import PROBABILITIES, VALUES, Policy

Spaces = tuple[gym.Space[Any], gym.Space[Any]]


def check_model(
    model: str | type[nn.Module],
    env: str | gym.Env[Any, Any] | Spaces,
    custom_model_config: Mapping[str, Any] | None = None,
    *,
    values: bool = False,
    **model_config: Any,
) -> Policy:
    """Raise UsageError with the remedy unless the model can be trained; return a policy with it.

    `model`: a value of `custom_model`, or the class. `env`: an environment, its name, or (observation_space, action_space).
    `values`: for DQN, whose outputs are action values. `model_config`: other keys of the `model:` section.

    def test_the_model_can_be_learned_with():
        check_model("customnet", "CartPole-v1", {"hidden": 64})
    """
    named = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
    observation_space, action_space = _spaces_of(env)
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in model_config.items()}
    config = NetworkConfig(custom_model=named, custom_model_config=dict(custom_model_config or {}), **given)
    policy = Policy(observation_space, action_space, config, kind=VALUES if values else PROBABILITIES)
    check_custom(policy)
    return policy


def _spaces_of(env: str | gym.Env[Any, Any] | Spaces) -> Spaces:
    if isinstance(env, tuple):
        return env
    trust.allow(env)
    made = make_one(env) if isinstance(env, str) else env
    try:
        return spaces.split_mask(made.observation_space)[0], made.action_space
    finally:
        if isinstance(env, str):
            made.close()
