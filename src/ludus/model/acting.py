"""Decisions for many seats at once: whatever sessions ask of one policy in one turn of the event loop is one forward pass."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludus.model.batching import Batcher
from ludus.model.policy import Policy
from ludus.model.pool import PolicySource
from ludus.spaces import mask_size
from ludus.tree import Array, Tree, map_tree
from ludus.types import Bools

State = tuple[Array, ...]


class Decision(NamedTuple):
    action: Tree
    """As the game takes it."""
    chosen: Tree
    """As the policy chose it, which is what is recorded."""
    log_prob: float
    value: float
    state: State
    version: int


class Deciding:
    """A policy that answers sessions. Observations come as arrays of the policy's own dtypes and shapes, without a batch.

    New weights are taken up between two batches, never inside one.
    """

    def __init__(
        self, source: PolicySource, *, max_batch_size: int = 256, seed: int | None = None, deterministic: bool = False
    ) -> None:
        self._source, self._deterministic = source, deterministic
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self._masks = mask_size(source.newest()[0].action_space)
        self._batcher: Batcher[tuple[Tree, State | None, Bools | None], Decision] = Batcher(self._run, max_batch_size)

    @property
    def policy(self) -> Policy:
        return self._source.newest()[0]

    def decide(self, observation: Tree, state: State | None = None, mask: Bools | None = None) -> asyncio.Future[Decision]:
        """`state` is that of the decision before, None at the start of an episode. On the event loop only."""
        return self._batcher.submit((observation, state, mask))

    @torch.inference_mode()
    def _run(self, rows: list[tuple[Tree, State | None, Bools | None]]) -> list[Decision]:
        policy, version = self._source.newest()
        n = len(rows)
        observation = _stacked([row[0] for row in rows])
        noise = None if self._deterministic else policy.distribution.noise((n,), self.generator)
        before = self._states(policy, [row[1] for row in rows])
        chosen, log_prob, value, after = policy.step(observation, before, None, self._mask([row[2] for row in rows]), noise)
        kept = map_tree(Tensor.numpy, chosen)
        actions, kepts = _rows(policy.distribution.to_environment(kept), n), _rows(kept, n)
        # Copies, because a session keeps its state until its next tick: a row must not keep the whole batch alive.
        states = list(zip(*([row.copy() for row in s.numpy()] for s in after), strict=True)) if after else [()] * n
        return [
            Decision(*parts, version)
            for parts in zip(actions, kepts, log_prob.tolist(), value.tolist(), states, strict=True)
        ]  # fmt: skip

    def _states(self, policy: Policy, states: list[State | None]) -> tuple[Tensor, ...]:
        if not policy.recurrent:
            return ()
        fresh = policy.initial_state(len(states))
        for row, state in enumerate(states):
            if state is not None:
                for whole, part in zip(fresh, state, strict=True):
                    whole[row] = torch.from_numpy(part)
        return fresh

    def _mask(self, masks: list[Bools | None]) -> Tensor | None:
        if all(mask is None for mask in masks):
            return None
        whole = np.ones((len(masks), self._masks), np.bool_)
        for row, mask in enumerate(masks):
            if mask is not None:
                whole[row] = mask
        return torch.from_numpy(whole)


def _stacked(trees: list[Tree]) -> Tree:
    first = trees[0]
    if isinstance(first, np.ndarray):
        return torch.from_numpy(np.array(trees))
    return map_tree(lambda *items: torch.from_numpy(np.array(items)), first, *trees[1:])


def _rows(batch: Tree, n: int) -> list[Any]:
    """The rows of a batched tree; they are views of it, and it is nobody else's."""
    if isinstance(batch, np.ndarray):
        return list(batch)
    return [map_tree(lambda x, row=row: x[row], batch) for row in range(n)]
