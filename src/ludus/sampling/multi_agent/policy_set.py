"""The models of a run, which decide for the agents of many matches at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools
from ludus.errors import EnvironmentFault
from ludus.models.inference.batched_policy import (
    ActingPolicy,
    ActingPolicySource,
    Decision,
    State,
    decide_rows,
    stack_rows,
    stack_states,
)
from ludus.models.policy import Policy
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

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for source in self._sources.values():
                policy = source.newest()[0]
                if isinstance(policy, Policy):  # an exported policy has no gradients
                    contexts.enter_context(policy.acting())
            yield

    def initial_state(self, model: str) -> State:
        policy = self._sources[model].newest()[0]
        return tuple(spec.zeros() for spec in policy.state_spec()) if policy.recurrent else ()

    def draw_noise(self, model: str, generator: torch.Generator) -> Array | None:
        """One row of noise for `decide`; None if not exploring."""
        return self._sources[model].newest()[0].draw_noise(1, generator) if self._explore else None

    def decide(
        self, model: str, requests: Sequence[tuple[Tree, State | None, Bools | None]], noise: Array | None = None
    ) -> list[Decision]:
        """Decide for all rows. `noise`: one row each; by default drawn here if exploring."""
        policy, version = self._sources[model].newest()
        observations, states, masks = zip(*requests, strict=True)
        if noise is None and self._explore:
            noise = policy.draw_noise(len(requests), self._generator)
        decisions = decide_rows(policy, version, observations, states, masks, noise)
        if not all(math.isfinite(decision.value) and math.isfinite(decision.log_prob) for decision in decisions):
            raise EnvironmentFault(
                f"The model {model!r} returned a value that is not finite.",
                "Check the observations for extremely large numbers.",
            )
        return decisions

    def values(self, model: str, requests: Sequence[tuple[Tree, State | None]]) -> list[float]:
        policy = self._sources[model].newest()[0]
        observations, states = zip(*requests, strict=True)
        values: list[float] = policy.act(stack_rows(observations), stack_states(policy, states)).value.tolist()
        return values


def plain_action(action: Tree) -> Any:
    """Convert an action to what an environment takes: a Python int for a scalar integer."""
    if isinstance(action, np.integer):
        return action.item()
    arrays = map_tree(np.asarray, action)
    return map_tree(lambda array: array.item() if array.ndim == 0 and array.dtype.kind in "iu" else array, arrays)
