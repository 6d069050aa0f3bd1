"""A trained agent: a policy that chooses actions, outside any session. What `ludus.load` returns and what plays evaluations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from ludus import spaces
from ludus.errors import UsageError
from ludus.model.policy import Policy
from ludus.spaces import ACTION_MASK
from ludus.tree import Tree, map_tree

State = tuple[Tensor, ...]


class TrainedAgent:
    """Chooses actions with a trained policy.

    action, state = agent.act(observation)             # at the start of an episode
    action, state = agent.act(observation, state)      # then hand the state back (recurrent models need it)
    """

    def __init__(self, policy: Policy, seed: int = 0, version: int = 0) -> None:
        self.policy, self.version = policy, version
        self._fit = spaces.Fit(policy.observation_space)
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def observation_space(self) -> gym.Space[Any]:
        return self.policy.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        return self.policy.action_space

    def act(
        self, observation: Any, state: State | None = None, mask: Any = None, *, deterministic: bool = True
    ) -> tuple[Any, State]:
        """An action as the environment takes it, and the state for the next call. Raises UsageError on a misfit."""
        if isinstance(observation, dict) and ACTION_MASK in observation:
            mask = observation[ACTION_MASK] if mask is None else mask
            unwrap = not isinstance(self.observation_space, gym.spaces.Dict)
            observation = spaces.without_mask(observation, unwrap)
        row = self._tensors(observation)
        flat = None if mask is None else self._mask(mask)
        with torch.inference_mode():
            noise = None if deterministic else self.policy.distribution.noise((1,), self._generator)
            before = self.policy.initial_state(1) if state is None else state
            action, _, _, after = self.policy.step(row, before, None, flat, noise)
        chosen = self.policy.distribution.to_environment(map_tree(Tensor.numpy, action))
        return map_tree(_unbatch, chosen), after

    def _mask(self, mask: Any) -> Tensor:
        try:
            flat = spaces.flat_mask(mask, self.action_space)
        except (ValueError, TypeError) as error:
            raise UsageError(f"The mask does not fit: {error}.") from error
        for part in spaces.choices(self.action_space):
            if not flat[part].any():
                raise UsageError(f"The mask forbids every action (options {part.start} to {part.stop - 1}).")
        return torch.from_numpy(flat).unsqueeze(0)

    def _tensors(self, observation: Any) -> Tree:
        try:
            return map_tree(lambda x: torch.from_numpy(x[None]), self._fit(observation))
        except ValueError as error:
            raise UsageError(f"The observation does not fit: {error}.") from error


def _unbatch(x: Any) -> Any:
    item = np.asarray(x)[0]
    return item.item() if item.ndim == 0 and item.dtype.kind in "iu" else item
