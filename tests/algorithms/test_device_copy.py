"""A policy that acts here and learns elsewhere."""

from __future__ import annotations

import copy

import numpy as np

from ludus.algorithms.device_copy import AcceleratedAlgorithm
from tests.algorithms.experience import experience, policy_for, ppo


def test_the_acting_policy_has_the_new_weights_after_every_update() -> None:
    acting, block = policy_for("filtered"), experience(policy_for("filtered"), 8, 4)
    single, tensors = ppo(policy_for("filtered")), acting.state_dict()
    twinned = AcceleratedAlgorithm(ppo(copy.deepcopy(acting)), acting)
    for _ in range(2):
        assert twinned.learn(block, 0) == single.learn(block, 0)
    assert twinned.policy is acting
    for name, value in single.policy.weights().items():
        assert np.array_equal(acting.weights()[name], value), name
        assert acting.state_dict()[name].data_ptr() == tensors[name].data_ptr(), "whoever shares the tensors must see it"


def test_what_is_restored_into_the_acting_policy_is_learned_from() -> None:
    block = experience(policy_for("mlp"), 8, 4)
    before = ppo(policy_for("mlp"))
    before.learn(block, 0)
    acting = policy_for("mlp", seed=99)
    twinned = AcceleratedAlgorithm(ppo(copy.deepcopy(acting)), acting)
    acting.load_weights(before.policy.weights())
    twinned.load_state(*before.state())
    before.learn(block, 0)
    twinned.learn(block, 0)
    assert all(np.array_equal(acting.weights()[name], value) for name, value in before.policy.weights().items())
    assert twinned.state()[0].keys() == before.state()[0].keys()
