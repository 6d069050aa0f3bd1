"""A trained agent: a policy that chooses actions outside a session. Returned by `ludus.load` and used in evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from ludus.core import spaces
from ludus.core.spaces import ACTION_MASK
from ludus.core.tree import Tree, map_tree
from ludus.errors import UsageError
from ludus.models.policy import Policy

State = tuple[Tensor, ...]


class TrainedAgent:
    """Chooses actions with a trained policy.

    action, state = agent.act(observation)             # at the start of an episode
    action, state = agent.act(observation, state)      # then hand the state back (recurrent models need it)

    Observations of N environments, one row each, as a Gymnasium VectorEnv returns them, give N actions:

    actions, state = agent.act(observations, state, episode_start=terminated | truncated)
    """

    def __init__(self, policy: Policy, seed: int = 0, version: int = 0) -> None:
        self.policy, self.version = policy, version
        self._fit = spaces.SpaceParser(policy.observation_space)
        self._batch_fit: tuple[int, spaces.SpaceParser] | None = None
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def observation_space(self) -> gym.Space[Any]:
        return self.policy.observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        return self.policy.action_space

    def act(
        self,
        observation: Any,
        state: State | None = None,
        mask: Any = None,
        *,
        deterministic: bool = True,
        episode_start: Any = None,
    ) -> tuple[Any, State]:
        """Return an action as the environment takes it, and the state for the next call; for a batch, one action per row.

        Arrays with one dimension more than the observation space are a batch. `mask`: allowed actions, for a batch one row each; by default
        the entry `action_mask` of the observation. `episode_start`: whether (for a batch: in which rows) a new episode starts, so that a
        recurrent model resets its state. Raises UsageError if something does not fit.
        """
        if isinstance(observation, dict) and ACTION_MASK in observation:
            mask = observation[ACTION_MASK] if mask is None else mask
            unwrap = not isinstance(self.observation_space, gym.spaces.Dict)
            observation = spaces.without_mask(observation, unwrap)
        rows = _rows(self._fit.spec, observation)
        n = 1 if rows is None else rows
        seen = self._tensors(observation, rows)
        flat = None if mask is None else self._mask(mask, rows)
        with torch.inference_mode():
            noise = None if deterministic else self.policy.distribution.noise((n,), self._generator)
            before = self.policy.initial_state(n) if state is None else self._check_state(state, n)
            action, _, _, after = self.policy.step(seen, before, _first(episode_start, n), flat, noise)
        chosen = self.policy.distribution.to_environment(map_tree(Tensor.numpy, action))
        return (map_tree(_first_row, chosen) if rows is None else chosen), after

    def _check_state(self, state: State, rows: int) -> State:
        if state and state[0].shape[0] != rows:
            raise UsageError(
                f"The state has {state[0].shape[0]} rows, the observation has {rows}.",
                "Start with state=None for another batch.",
            )
        return state

    def _mask(self, mask: Any, rows: int | None) -> Tensor:
        try:
            flat = spaces.flat_mask(mask, self.action_space, rows)
        except (ValueError, TypeError) as error:
            raise UsageError(f"The mask does not fit: {error}.") from error
        for part in spaces.choices(self.action_space):
            if not flat[..., part].any(axis=-1).all():
                raise UsageError(f"The mask forbids every action (options {part.start} to {part.stop - 1}).")
        return torch.from_numpy(flat if rows is not None else flat[None])

    def _tensors(self, observation: Any, rows: int | None) -> Tree:
        try:
            if rows is None:
                return map_tree(lambda x: torch.from_numpy(x[None]), self._fit(observation))
            if self._batch_fit is None or self._batch_fit[0] != rows:
                self._batch_fit = rows, _BatchFit(self.observation_space, rows)
            return map_tree(torch.from_numpy, self._batch_fit[1](observation))
        except ValueError as error:
            raise UsageError(f"The observation does not fit: {error}.") from error


class _BatchFit(spaces.SpaceParser):
    """The same for arrays with one row per environment."""

    def __init__(self, space: gym.Space[Any], rows: int) -> None:
        super().__init__(space)
        self.spec = map_tree(lambda spec: replace(spec, shape=(rows, *spec.shape)), self.spec)
        self._single = self.spec if isinstance(self.spec, spaces.ArraySpec) else None
        self._short = -1


def _rows(spec: Tree, observation: Any) -> int | None:
    """Return the number of observations if every part has one dimension more than the space; None for a single one."""
    if isinstance(spec, dict):
        same = isinstance(observation, Mapping) and observation.keys() == spec.keys()
        parts = [(spec[key], observation[key]) for key in spec] if same else []
    elif isinstance(spec, tuple):
        same = isinstance(observation, (list, tuple)) and len(observation) == len(spec)
        parts = list(zip(spec, observation, strict=True)) if same else []
    else:
        return _batch_size(spec, observation)
    counts = {_rows(*part) for part in parts}
    return counts.pop() if len(counts) == 1 else None


def _batch_size(spec: spaces.ArraySpec, value: Any) -> int | None:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return None
    try:
        shape = np.shape(value)
    except ValueError:  # lists of different lengths; reported later
        return None
    return int(shape[0]) if len(shape) == len(spec.shape) + 1 and shape[0] else None


def _first(episode_start: Any, rows: int) -> Tensor | None:
    if episode_start is None:
        return None
    flags = np.asarray(episode_start, np.bool_)
    if flags.shape not in ((), (rows,)):
        raise UsageError(f"episode_start has shape {list(flags.shape)}.", f"Give one value, or one for each of the {rows} rows.")
    return torch.from_numpy(np.broadcast_to(flags, (rows,)).copy())


def _first_row(x: Any) -> Any:
    item = np.asarray(x)[0]
    return item.item() if item.ndim == 0 and item.dtype.kind in "iu" else item
