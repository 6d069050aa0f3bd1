"""The models of a run, which decide for the agents of many matches at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Floats
from ludus.errors import EnvironmentFault
from ludus.models.inference.batched_policy import (
    ActingPolicy,
    ActingPolicySource,
    Decision,
    State,
    decide_rows,
)
from ludus.models.policy import BatchDecision, Policy
from ludus.models.weights.version_store import FixedSource


class PolicySet:
    """The models of a run, which decide for any number of agents at once."""

    def __init__(
        self, sources: Mapping[str, ActingPolicySource[ActingPolicy]], generator: torch.Generator, explore: bool
    ) -> None:
        self._sources, self._generator, self._explore = dict(sources), generator, explore

    def add_fixed(self, model: str, policy: ActingPolicy) -> None:
        """Add a policy whose weights do not change."""
        self._sources[model] = FixedSource(policy)

    def remove(self, model: str) -> None:
        del self._sources[model]

    def models(self) -> frozenset[str]:
        return frozenset(self._sources)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for source in self._sources.values():
                policy = source.newest()[0]
                if isinstance(policy, Policy):  # an exported policy has no gradients
                    contexts.enter_context(policy.acting())
            yield

    def state_spec(self, model: str) -> Tree:
        """Specs of the recurrent state; empty if there is none."""
        policy = self._sources[model].newest()[0]
        return policy.state_spec() if policy.recurrent else ()

    def draw_noise(self, model: str, generator: torch.Generator) -> Array | None:
        """One row of noise for `act` or `decide`; None if not exploring."""
        return self._sources[model].newest()[0].draw_noise(1, generator) if self._explore else None

    def act(
        self, model: str, observation: Tree, state: State, mask: Bools | None, rows: int, noise: Array | None = None
    ) -> tuple[BatchDecision, int]:
        """Decide for all rows; returns the version too. `noise`: by default drawn here if exploring."""
        policy, version = self._sources[model].newest()
        if noise is None and self._explore:
            noise = policy.draw_noise(rows, self._generator)
        acted = policy.act(observation, state, mask, noise)
        if not (np.isfinite(acted.value).all() and np.isfinite(acted.log_prob).all()):
            raise _not_finite(model)
        return acted, version

    def decide(
        self, model: str, requests: Sequence[tuple[Tree, State | None, Bools | None]], noise: Array | None = None
    ) -> list[Decision]:
        """The same for separate requests. A state of None is the initial one, a mask of None allows everything."""
        policy, version = self._sources[model].newest()
        observations, states, masks = zip(*requests, strict=True)
        if noise is None and self._explore:
            noise = policy.draw_noise(len(requests), self._generator)
        decisions = decide_rows(policy, version, observations, states, masks, noise)
        if not all(math.isfinite(decision.value) and math.isfinite(decision.log_prob) for decision in decisions):
            raise _not_finite(model)
        return decisions

    def values(self, model: str, observation: Tree, state: State) -> Floats:
        values: Floats = self._sources[model].newest()[0].act(observation, state).value
        return values


def _not_finite(model: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"The model {model!r} returned a value that is not finite.", "Check the observations for extremely large numbers."
    )


def plain_action(action: Tree) -> Any:
    """Convert an action to what an environment takes: a Python int for a scalar integer."""
    if isinstance(action, np.integer):
        return action.item()
    arrays = map_tree(np.asarray, action)
    return map_tree(lambda array: array.item() if array.ndim == 0 and array.dtype.kind in "iu" else array, arrays)


def plain_actions(actions: Tree, rows: int) -> list[Any]:
    """Convert the actions [N, …] of all rows."""
    if isinstance(actions, np.ndarray) and actions.ndim == 1 and actions.dtype.kind in "iu":
        integers: list[Any] = actions.tolist()
        return integers
    return [plain_action(map_tree(lambda part, row=row: part[row], actions)) for row in range(rows)]
