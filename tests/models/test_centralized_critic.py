"""A value that sees everything, beside a policy that sees its own part."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from ludus.algorithms.ppo import PPOConfig
from ludus.experiments.assembly.policies import make_policy
from ludus.models.centralized_critic import actor_policy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy

OWN = gym.spaces.Dict(
    {
        "units": gym.spaces.Box(-1, 1, (5, 4), np.float32),
        "units_mask": gym.spaces.MultiBinary(5),
        "self": gym.spaces.Box(-1, 1, (3,), np.float32),
        "picture": gym.spaces.Box(0, 255, (3, 12, 12), np.uint8),
    }
)
SPACE = gym.spaces.Dict({"observation": OWN, "state": gym.spaces.Box(-1, 1, (6,), np.float32)})
ROWS = 9


def policy(**config: Any) -> Policy:
    torch.manual_seed(3)
    return Policy(SPACE, gym.spaces.Discrete(4), NetworkConfig(central=True, entity_dim=8, fcnet_hiddens=(16,), **config))


def seen() -> dict[str, Any]:
    g = torch.Generator().manual_seed(4)
    own = {
        "units": torch.rand((ROWS, 5, 4), generator=g),
        "units_mask": (torch.rand((ROWS, 5), generator=g) < 0.5).to(torch.int8),
        "self": torch.rand((ROWS, 3), generator=g),
        "picture": torch.randint(0, 256, (ROWS, 3, 12, 12), generator=g, dtype=torch.uint8),
    }
    return {"observation": own, "state": torch.rand((ROWS, 6), generator=g)}


def gradient_of_value(it: Policy) -> dict[str, float]:
    it.value(seen(), *asked(it)).sum().backward()
    return {name: float(p.grad.abs().max()) for name, p in it.named_parameters() if p.grad is not None}


def asked(it: Policy) -> tuple[Any, ...]:
    return (it.initial_state(ROWS), torch.zeros(ROWS, dtype=torch.bool)) if it.recurrent else ()


@pytest.mark.parametrize("core", [None, "lstm"])
@pytest.mark.parametrize("share", [False, True])
def test_the_value_sees_both_parts_and_the_policy_its_own(share: bool, core: str | None) -> None:
    it, observation = policy(central_shares=share, core=core), seen()
    _, log_prob, value, _ = it.step(observation, *asked(it))
    elsewhere = {**observation, "state": -observation["state"]}
    _, other_log_prob, other_value, _ = it.step(elsewhere, *asked(it))
    assert torch.equal(log_prob, other_log_prob)
    assert (value - other_value).abs().min() > 1e-5
    own: dict[str, Tensor] = observation["observation"]
    moved = {**observation, "observation": {**own, "self": -own["self"]}}
    assert (it.step(moved, *asked(it))[2] - value).abs().max() > 1e-5


def test_shared_layers_learn_from_the_value_and_layers_of_its_own_keep_it_to_themselves() -> None:
    apart, shared = gradient_of_value(policy()), gradient_of_value(policy(central_shares=True))
    embedding = "network.actor.trunk.sets.0.embed.0.weight"
    assert apart.get(embedding, 0.0) == 0.0
    assert shared[embedding] > 0.0
    assert not any(name.startswith("network.trunk.sets") for name in shared)


@pytest.mark.parametrize("share", [False, True])
def test_network_layout_and_frozen_form_give_the_same_outputs(share: bool) -> None:
    it, observation = policy(central_shares=share), seen()
    action, log_prob, value, _ = it.step(observation)
    to_network_layout = it.to_network_layout(observation)
    assert to_network_layout["observation"]["picture"].shape == (ROWS, 12, 12, 3)
    with it.acting():
        for shown in (observation, to_network_layout):
            again, its_log_prob, its_value, _ = it.step(shown)
            assert torch.equal(action, again)
            torch.testing.assert_close(its_log_prob, log_prob)
            torch.testing.assert_close(its_value, value)
    torch.testing.assert_close(actor_policy(it).step(observation["observation"])[1], log_prob)


def test_a_stored_one_from_before_they_could_be_shared_is_what_it_was() -> None:
    old = policy(vf_share_layers=True).description()
    del old["network"]["central_shares"]
    again = Policy.from_description(old)
    assert not again.config.central_shares
    again.load_weights(policy().weights())


@pytest.mark.parametrize("central", [True, False])
def test_a_policy_that_sees_the_global_state_is_reported(central: bool, caplog: pytest.LogCaptureFixture) -> None:
    made = make_policy(SPACE, gym.spaces.Discrete(4), PPOConfig.model_validate({"model": {"centralized_value": central}}))
    assert made.config.central == central
    assert ("the policy sees both" in caplog.text) == (not central)
