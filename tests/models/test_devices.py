"""Which device a policy computes on, and that those who act do not have to know."""

from __future__ import annotations

import pytest
import torch

from ludus.errors import ConfigError
from ludus.models.devices import CPU, DevicePolicy, copy_for_acting, copy_for_learning, learner_device, parse_device, to_device
from tests.algorithms.experience import policy_for

WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without accelerators")


def test_the_default_device_is_the_cpu() -> None:
    assert learner_device("auto", 0) == CPU
    assert learner_device("cpu", 0) == CPU
    assert parse_device("cpu", "inference_device") == CPU


@WITHOUT
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_accelerators_that_are_not_there_are_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=r"num_gpus is 1, but PyTorch finds no GPU on this machine.*--num-gpus 0"):
        learner_device(name, 1)


@WITHOUT
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="learner_device is 'cuda:1', but PyTorch finds 0"):
        learner_device("cuda:1", 0)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_a_word_that_names_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="inference_device"):
        parse_device(name, "inference_device")


def test_devices_we_know_nothing_of_are_refused() -> None:
    with pytest.raises(ConfigError, match="only cuda"):
        parse_device("xpu", "learner_device")


@pytest.mark.parametrize("kind", ["mlp", "lstm", "hybrid"])
def test_a_policy_elsewhere_decides_as_one_here(kind: str) -> None:
    policy = policy_for(kind)
    twin = DevicePolicy.from_description(policy.description())
    twin.load_weights(policy.weights())
    generator = torch.Generator().manual_seed(1)
    observation, state = torch.randn(5, 3, generator=generator), policy.initial_state(5)
    noise = policy.distribution.noise((5,), generator)
    mask = torch.ones(5, policy.distribution.mask_size, dtype=torch.bool)
    with torch.inference_mode():
        mine, theirs = (p.step(observation, state, None, mask, noise) for p in (policy, twin))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        torch.testing.assert_close(policy.value(observation, state), twin.value(observation, state), rtol=0, atol=0)


def test_on_the_cpu_nothing_is_copied() -> None:
    policy, x = policy_for("mlp"), torch.ones(3)
    assert copy_for_acting(policy, CPU) is policy
    assert copy_for_learning(policy, CPU) is policy
    assert to_device(x, CPU) is x
    assert policy.device == CPU
