"""Placement of policies on the CPU or an accelerator; arrays and decisions stay on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ludus.core.tree import Tree, map_tree
from ludus.errors import ConfigError
from ludus.models.policy import Policy

CPU = torch.device("cpu")


def learner_device(name: str, num_gpus: float) -> torch.device:
    """`auto` selects an accelerator if `num_gpus` is set. Raises ConfigError if there is none, or no such device."""
    if num_gpus and not torch.cuda.is_available():
        raise ConfigError(
            f"config.num_gpus is {num_gpus:g}, but PyTorch finds no GPU on this machine.",
            "Train on the CPU with --num-gpus 0, or install a PyTorch that supports the GPU.",
        )
    if name == "auto":
        return torch.device("cuda", 0) if num_gpus else CPU
    return parse_device(name, "learner_device")


def parse_device(name: str, key: str) -> torch.device:
    """Return the device of a config value. Raises ConfigError."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"config.{key} is {name!r}, which is not a device.", "Use cpu, cuda or cuda:1.") from error
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ConfigError(f"config.{key} is {name!r}: of accelerators, only cuda is supported.", "Use cpu or cuda.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(f"config.{key} is {name!r}, but PyTorch finds {count} accelerators.", "Use cpu.")
    return torch.device("cuda", device.index or 0)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor, through page-locked memory, so that the copy is asynchronous."""
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class DevicePolicy(Policy):
    """A policy on an accelerator that takes and returns tensors on the CPU, for samplers."""

    def step(
        self,
        observation: Tree,
        state: tuple[Tensor, ...] = (),
        first: Tensor | None = None,
        mask: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tree, Tensor, Tensor, tuple[Tensor, ...]]:
        action, log_prob, value, after = super().step(*self._to_policy_device(observation, state, first, mask, noise))
        return map_tree(Tensor.cpu, action), log_prob.cpu(), value.cpu(), tuple(s.cpu() for s in after)

    def value(self, observation: Tree, state: tuple[Tensor, ...] = (), first: Tensor | None = None) -> Tensor:
        return super().value(*self._to_policy_device(observation, state, first)).cpu()

    def _to_policy_device(self, observation: Tree, state: tuple[Tensor, ...], *rest: Tensor | None) -> tuple[Tree, ...]:
        device = self.device
        moved = map_tree(lambda x: to_device(x, device), observation)
        return moved, tuple(to_device(s, device) for s in state), *(None if x is None else to_device(x, device) for x in rest)


def copy_for_acting(policy: Policy, device: torch.device) -> Policy:
    """Return the policy itself for the CPU; otherwise a copy on the device that takes and returns CPU tensors."""
    return policy if device.type == "cpu" else _copy_to_device(policy, DevicePolicy, device)


def copy_for_learning(policy: Policy, device: torch.device) -> Policy:
    """Return the policy itself if it is on the device; otherwise a copy there."""
    return policy if policy.device == device else _copy_to_device(policy, Policy, device)


def _copy_to_device(policy: Policy, kind: type[Policy], device: torch.device) -> Policy:
    copy = kind.from_description(policy.description())
    copy.load_weights(policy.weights())
    return copy.to(device)
