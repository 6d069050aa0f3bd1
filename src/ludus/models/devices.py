"""Where a policy computes: on the CPU, or on an accelerator, with arrays and decisions on the CPU all the same."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.tree import Tree, map_tree
from ludus.errors import ConfigError
from ludus.models.policy import Policy

CPU = torch.device("cpu")


def learner_device(name: str, num_gpus: float) -> torch.device:
    """`auto` is an accelerator if `num_gpus` asks for one. Raises ConfigError when there is none, or no such device."""
    if num_gpus and not torch.cuda.is_available():
        raise ConfigError(
            f"config.num_gpus is {num_gpus:g}, and PyTorch finds no GPU on this machine.",
            "Train on the CPU with --num-gpus 0, or install a PyTorch that supports the GPU.",
        )
    if name == "auto":
        return torch.device("cuda", 0) if num_gpus else CPU
    return named_device(name, "learner_device")


def named_device(name: str, key: str) -> torch.device:
    """A device by its name in the config. Raises ConfigError."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"config.{key} is {name!r}, which is no device.", "Use cpu, cuda or cuda:1.") from error
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ConfigError(f"config.{key} is {name!r}: of accelerators, only cuda is supported.", "Use cpu or cuda.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(f"config.{key} is {name!r}, and PyTorch finds {count} accelerators here.", "Use cpu.")
    return torch.device("cuda", device.index or 0)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, by way of page-locked memory, so that the copy goes on while others are prepared."""
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class DevicePolicy(Policy):
    """A policy on an accelerator for those who act with tensors on the CPU, as every sampler does."""

    def step(
        self,
        observation: Tree,
        state: tuple[Tensor, ...] = (),
        first: Tensor | None = None,
        mask: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tree, Tensor, Tensor, tuple[Tensor, ...]]:
        action, log_prob, value, after = super().step(*self._there(observation, state, first, mask, noise))
        return map_tree(Tensor.cpu, action), log_prob.cpu(), value.cpu(), tuple(s.cpu() for s in after)

    def value(self, observation: Tree, state: tuple[Tensor, ...] = (), first: Tensor | None = None) -> Tensor:
        return super().value(*self._there(observation, state, first)).cpu()

    def _there(self, observation: Tree, state: tuple[Tensor, ...], *rest: Tensor | None) -> tuple[Tree, ...]:
        device = self.device
        seen = map_tree(lambda x: to_device(x, device), observation)
        return seen, tuple(to_device(s, device) for s in state), *(None if x is None else to_device(x, device) for x in rest)


def acting_on(policy: Policy, device: torch.device) -> Policy:
    """The policy itself for the CPU; else a copy on the device that takes and gives tensors on the CPU."""
    return policy if device.type == "cpu" else _copied(policy, DevicePolicy, device)


def learning_on(policy: Policy, device: torch.device) -> Policy:
    """The policy itself if it is there; else a copy on the device."""
    return policy if policy.device == device else _copied(policy, Policy, device)


def _copied(policy: Policy, kind: type[Policy], device: torch.device) -> Policy:
    twin = kind.from_description(policy.description())
    twin.load_weights(policy.weights())
    return twin.to(device)
