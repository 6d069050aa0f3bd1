"""Batched decisions for sessions: all requests to one policy in one turn of the event loop are one forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import gymnasium as gym
import numpy as np
import torch

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools
from ludus.models.inference.micro_batcher import MicroBatcher
from ludus.models.policy import BatchDecision

State = tuple[Array, ...]


class ActingPolicy(Protocol):
    """What acting needs of a policy: a `Policy` or an exported one."""

    @property
    def observation_space(self) -> gym.Space[Any]: ...
    @property
    def action_space(self) -> gym.Space[Any]: ...
    @property
    def recurrent(self) -> bool: ...

    def state_spec(self) -> Tree: ...
    def draw_noise(self, rows: int, generator: torch.Generator) -> Array: ...
    def act(
        self, observation: Tree, state: State = (), mask: Array | None = None, noise: Array | None = None
    ) -> BatchDecision: ...  # fmt: skip


PolicyT = TypeVar("PolicyT", bound=ActingPolicy)
PolicyT_co = TypeVar("PolicyT_co", bound=ActingPolicy, covariant=True)


class ActingPolicySource(Protocol[PolicyT_co]):
    def newest(self) -> tuple[PolicyT_co, int]:
        """Return the policy to act with now, and its version. Does not block."""
        ...


class Decision(NamedTuple):
    action: Tree
    """As the environment takes it."""
    chosen: Tree
    """As the policy chose it; this is recorded."""
    log_prob: float
    value: float
    state: State
    version: int
    lost: bool = False
    """There is no decision: the match has to be given up."""


class DecisionRequest(NamedTuple):
    observation: Tree
    state: State | None
    mask: Bools | None
    temperature: float


class BatchedPolicy(Generic[PolicyT]):
    """A policy that serves sessions. Observations are arrays with the policy's dtypes and shapes, without a batch dimension.

    New weights are loaded between two batches, never within one.
    """

    def __init__(
        self,
        source: ActingPolicySource[PolicyT],
        *,
        max_batch_size: int = 256,
        seed: int | None = None,
        deterministic: bool = False,
    ) -> None:
        self._source = source
        self._temperature = 0.0 if deterministic else 1.0
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self.batcher: MicroBatcher[DecisionRequest, Decision] = MicroBatcher(self._run, max_batch_size)

    @property
    def policy(self) -> PolicyT:
        return self._source.newest()[0]

    def decide(
        self,
        observation: Tree,
        state: State | None = None,
        mask: Bools | None = None,
        temperature: float | None = None,
    ) -> asyncio.Future[Decision]:
        """`state` is that of the previous decision, None at the start of an episode. Call on the event loop only.

        `temperature`: 0 takes the most probable action, 1 samples as in training, higher values are more random. Default: as constructed.
        """
        return self.batcher.submit(
            DecisionRequest(observation, state, mask, self._temperature if temperature is None else temperature)
        )

    def _run(self, rows: list[DecisionRequest]) -> list[Decision]:
        policy, version = self._source.newest()
        observations, states, masks, temperatures = zip(*rows, strict=True)
        return decide_rows(policy, version, observations, states, masks, self._noise(policy, temperatures))

    def _noise(self, policy: ActingPolicy, temperatures: tuple[float, ...]) -> Array | None:
        if not any(temperatures):
            return None
        noise = policy.draw_noise(len(temperatures), self.generator)
        if set(temperatures) != {1.0}:
            noise = noise * np.array(temperatures, np.float32)[:, None]
        return noise


def decide_rows(
    policy: ActingPolicy,
    version: int,
    observations: Sequence[Tree],
    states: Sequence[State | None],
    masks: Sequence[Bools | None],
    noise: Array | None,
) -> list[Decision]:
    """Decide for all rows in one forward pass. A state of None is the initial one, a mask of None allows everything."""
    n = len(observations)
    acted = policy.act(stack_rows(observations), stack_states(policy, states), stack_masks(masks), noise)
    # Copies: a session keeps its state until its next tick, and a view would keep the whole batch alive.
    after = list(zip(*([row.copy() for row in part] for part in acted.state), strict=True)) if acted.state else [()] * n
    columns = (_rows(acted.action, n), _rows(acted.chosen, n), acted.log_prob.tolist(), acted.value.tolist(), after)
    decisions = [Decision(*parts, version) for parts in zip(*columns, strict=True)]
    for row in () if acted.lost is None else np.flatnonzero(acted.lost).tolist():
        decisions[row] = decisions[row]._replace(lost=True)
    return decisions


def stack_rows(trees: Sequence[Tree]) -> Tree:
    first = trees[0]
    if isinstance(first, np.ndarray):
        return np.array(trees)
    return map_tree(lambda *items: np.array(items), first, *trees[1:])


def stack_states(policy: ActingPolicy, states: Sequence[State | None]) -> State:
    if not policy.recurrent:
        return ()
    fresh: State = tuple(spec.zeros() for spec in policy.state_spec())
    columns = zip(*(fresh if state is None else state for state in states), strict=True)
    return tuple(np.array(column) for column in columns)


def stack_masks(masks: Sequence[Bools | None]) -> Bools | None:
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    whole = np.ones((len(masks), len(given[0])), np.bool_)
    for row, mask in enumerate(masks):
        if mask is not None:
            whole[row] = mask
    return whole


def _rows(batch: Tree, n: int) -> list[Any]:
    """Split a batched tree into rows, which are views of it."""
    if isinstance(batch, np.ndarray):
        return list(batch)
    return [map_tree(lambda x, row=row: x[row], batch) for row in range(n)]
