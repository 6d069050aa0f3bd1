"""The environment-driven sampler: steps N environments with one batched forward a step and writes segments in place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from ludus.core import spaces
from ludus.core.tree import Array, Tree, copy_into, leaves, map_tree
from ludus.core.types import DEFAULT_MODEL, Bools, Floats, Ints, Segments, SegmentSpec
from ludus.envs.vector_env import Environments, Outcome, Seen, too_large_for_float32
from ludus.errors import EnvironmentFault, Interrupted
from ludus.models.policy import Policy
from ludus.models.weights.version_store import PolicySource
from ludus.transport.base import Room

_FINAL_SHARE = 4  # room for final observations: one per row, or one in four steps, whichever is more


class Shape(Protocol):
    """What environments are like, whether they are here or elsewhere."""

    num: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    resets_at_once: bool

    @property
    def masked(self) -> bool: ...

    @property
    def results(self) -> tuple[str, ...]: ...


def segment_spec(policy: Policy, environments: Shape, steps: int, model: str = DEFAULT_MODEL) -> SegmentSpec:
    """The shape of what this sampler will write."""
    n = environments.num
    every = min(steps, policy.config.max_seq_len) if policy.recurrent else 0
    return SegmentSpec(
        steps=steps,
        observation=spaces.array_spec(environments.observation_space),
        action=action_spec(policy),
        mask_size=spaces.mask_size(environments.action_space) if environments.masked else 0,
        state=policy.state_spec(),
        state_every=every,
        finals=max(n, steps * n // _FINAL_SHARE) if environments.resets_at_once else 0,
        model=model,
        results=environments.results,
    )


def action_spec(policy: Policy) -> Tree:
    """Actions are kept as the policy chose them: continuous ones unscaled, in float32."""
    return spaces.array_spec(policy.action_space, "action")


@dataclass
class _Rows:
    """Per-step tensor views of a block, made once."""

    observation: list[Tree]
    shown: list[Tree]  # the same rows as arrays
    first: tuple[Tensor, ...]
    mask: tuple[Tensor, ...] | None
    action: Tree  # whole tensors, written at the end of a segment
    log_prob: Tensor
    value: Tensor


def _rows(block: Segments) -> _Rows:
    if "rows" not in block.cache:
        steps = block.spec.steps
        block.cache["rows"] = _Rows(
            [map_tree(lambda x, t=t: torch.from_numpy(x[t]), block.observation) for t in range(steps + 1)],
            [map_tree(lambda x, t=t: x[t], block.observation) for t in range(steps + 1)],
            torch.from_numpy(block.first).unbind(0),
            torch.from_numpy(block.action_mask).unbind(0) if block.spec.mask_size else None,
            map_tree(torch.from_numpy, block.action),
            torch.from_numpy(block.log_prob),
            torch.from_numpy(block.value),
        )
    rows: _Rows = block.cache["rows"]
    return rows


@dataclass
class SamplerTimes:
    """What a sampler has done and where its time went, in seconds since it began. Updated at every step."""

    environment_s: float = 0.0
    policy_s: float = 0.0
    steps: int = 0
    """Of all rows."""


@dataclass(frozen=True)
class Clock:
    """How far training has come, by the version of its weights: every update learns from as many steps as the others."""

    first_version: int
    """Of this part of the run, which began after `begun` timesteps."""
    begun: int
    per_version: int

    def timesteps(self, version: int) -> int:
        return self.begun + max(0, version - self.first_version) * self.per_version


class Sampler:
    """Fills one block per `step()`. Reproducible: all randomness comes from `seed`.

    `beat` is called before every step of the environments. It may raise Interrupted: then the block is discarded.
    """

    def __init__(
        self,
        environments: Environments,
        source: PolicySource,
        memory: Room,
        seed: int,
        *,
        first_row: int = 0,
        beat: Callable[[], None] = lambda: None,
        explore: bool = True,
        timesteps: Callable[[int], int] | None = None,
        interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Without `explore`: always the most probable action. `timesteps`: how far training had
        come when a version was made, which the environments are told. `interruptible`: entered while environments are called;
        inside, Interrupted may be raised at any point."""
        self._explore, self._timesteps, self._interruptible = explore, timesteps, interruptible
        self._envs, self._source, self._memory, self._beat = environments, source, memory, beat
        self.times = SamplerTimes()
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._origin = np.arange(first_row, first_row + environments.num)
        self._seen: Seen | None = None
        self._first = np.ones(environments.num, np.bool_)
        self._over = np.zeros(environments.num, np.bool_)  # these rows only reset in the next step
        self._state: tuple[Tensor, ...] = ()
        self._tally = EpisodeTally(environments.num)
        self._choices = spaces.choices(environments.action_space)
        self._categories = spaces.categories(environments.observation_space)
        self._made = 0  # steps of earlier segments
        self._discarded = 0  # steps of a block that was interrupted

    def step(self, timeout_s: float = 0.0) -> bool:
        """Sample one block, or up to an interruption; False when the memory has no free one within that time."""
        block = self._memory.reserve(timeout_s)
        if block is None:
            return False
        policy, version = self._source.newest()
        if self._timesteps is not None:
            self._envs.progress(self._timesteps(version))
        before = self.times.steps
        try:
            with policy.acting(), self._interruptible():
                self.fill(block, policy, version)
        except Interrupted:
            self._memory.abandon(block)
            self._discarded += self.times.steps - before
            self._forget()
            return True
        except BaseException:
            self._memory.abandon(block)
            raise
        self._memory.commit(block)
        return True

    def fill(self, block: Segments, policy: Policy, version: int) -> None:
        """One segment of every row, with one policy throughout; inside `policy.acting()`."""
        if self._seen is None:
            self._begin(policy)
        seen, rows, steps = self._seen, _rows(block), block.spec.steps
        assert seen is not None
        noise: Sequence[Tensor | None] = [None] * steps
        if self._explore:
            noise = policy.distribution.noise((steps, self._envs.num), self._generator).unbind(0)
        actions: list[Tree] = []
        log_probs: list[Tensor] = []
        values: list[Tensor] = []
        lost: list[tuple[int, Bools]] = []
        block.finals = 0
        block.results.fill(0)
        clock, times, rows_num, last = time.perf_counter, self.times, self._envs.num, time.perf_counter()
        for t in range(steps):
            self._beat()
            self._show(block, t, seen)
            self._keep_state(block, t)
            mask = rows.mask[t] if rows.mask is not None else None
            action, log_prob, value, self._state = policy.step(rows.observation[t], self._state, rows.first[t], mask, noise[t])
            actions.append(action)
            log_probs.append(log_prob)
            values.append(value)
            played = policy.distribution.to_environment(map_tree(Tensor.numpy, action))
            before = clock()
            times.policy_s += before - last
            outcome = self._envs.step(played)
            last = clock()
            times.environment_s += last - before
            times.steps += rows_num
            self._record(block, t, outcome, policy)
            if outcome.lost is not None:
                lost.append((t, outcome.lost.copy()))
            if outcome.results is not None:
                block.results += outcome.results
            seen = outcome.seen
        self._show(block, steps, seen)
        values.append(policy.value(rows.observation[steps], self._state, rows.first[steps]))
        _stack_into(rows.action, actions)
        torch.stack(log_probs, out=rows.log_prob)
        torch.stack(values, out=rows.value)
        block.version[:] = version
        block.origin[:] = self._origin
        self._seen = seen
        self._check_rewards(block)
        self._made += steps
        block.episode_return, block.episode_length = self._tally.take(block, lost)
        times.policy_s += clock() - last

    def _begin(self, policy: Policy) -> None:
        self._seen = self._envs.reset(self._seed)
        self._state = policy.initial_state(self._envs.num)

    def _forget(self) -> None:
        """Environments are somewhere in the middle of a step: they would have to be reset."""
        self._seen = None
        self._first, self._over = np.ones(self._envs.num, np.bool_), np.zeros(self._envs.num, np.bool_)
        self._tally = EpisodeTally(self._envs.num)

    def _show(self, block: Segments, t: int, seen: Seen) -> None:
        try:
            copy_into(_rows(block).shown[t], seen.observation)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(
                f"{self._envs.name} returned an observation that does not fit its space at step {self._made + t}: {error}."
            ) from error
        self._check_seen(_rows(block).shown[t], t, seen)
        block.first[t] = self._first
        if seen.mask is not None:
            np.copyto(block.action_mask[t], seen.mask)
            if self._over.any():
                self._open(block.action_mask[t])
            self._check_choices(block.action_mask[t], t)

    def _open(self, mask: Bools) -> None:
        """Where an episode is over, what was allowed in the end is kept; but there may have been nothing left to do."""
        for part in self._choices:
            closed = self._over & ~mask[:, part].any(axis=1)
            mask[closed, part] = True

    def _check_seen(self, observation: Tree, t: int, seen: Seen) -> None:
        """Nothing that is not a finite number, or not of its category, may reach a network. `seen`: what it was copied from."""
        for path, leaf in leaves(observation):
            if leaf.dtype.kind == "f":
                bad = None if np.isfinite(leaf).all() else ~np.isfinite(leaf)
            elif path in self._categories:
                low, high = self._categories[path]
                bad = (leaf < low) | (leaf >= high)
            else:
                continue
            if bad is not None and bad.any():
                row, *rest = np.argwhere(bad)[0].tolist()
                key = f" {path!r}" if path else ""
                where = f"in its observation{key}{f' (index {rest})' if rest else ''} at step {self._made + t}"
                value = leaf[(row, *rest)]
                if np.isinf(value) and too_large_for_float32(given := seen.returned(row, path, rest)):
                    raise EnvironmentFault(
                        f"Environment {row} of {self._envs.name} returned {given} {where}, which is too large for float32.",
                        "Scale it, or take its logarithm.",
                    )
                raise EnvironmentFault(f"Environment {row} of {self._envs.name} returned {value} {where}.")

    def _check_rewards(self, block: Segments) -> None:
        if not np.isfinite(block.reward).all():
            t, row = np.argwhere(~np.isfinite(block.reward))[0].tolist()
            self._refuse_reward(row, block.reward[t, row], t)

    def _refuse_reward(self, row: int, reward: float, t: int) -> NoReturn:
        why = ", which is too large for float32" if too_large_for_float32(reward) else ""
        raise EnvironmentFault(
            f"Environment {row} of {self._envs.name} returned the reward {reward} at step {self._made + t}{why}."
        )

    def _check_choices(self, mask: Bools, t: int) -> None:
        for part in self._choices:
            possible = mask[:, part].any(axis=1)
            if not possible.all():
                raise EnvironmentFault(
                    f"Environment {int(np.argmin(possible))} of {self._envs.name} forbids every action in its action_mask "
                    f"(options {part.start} to {part.stop - 1}) at step {self._made + t}.",
                    "Leave at least one option of every choice allowed.",
                )

    def _keep_state(self, block: Segments, t: int) -> None:
        every = block.spec.state_every
        if every and t % every == 0:
            for kept, now in zip(block.state, self._state, strict=True):
                kept[t // every] = now.numpy()

    def _record(self, block: Segments, t: int, outcome: Outcome, policy: Policy) -> None:
        try:
            with np.errstate(over="raise"):  # float64, as vector environments have it
                block.reward[t] = outcome.reward
        except FloatingPointError:
            row = int(np.argmax([too_large_for_float32(reward) for reward in outcome.reward]))
            self._refuse_reward(row, outcome.reward[row], t)
        block.terminated[t] = outcome.terminated
        block.truncated[t] = outcome.truncated
        np.logical_not(self._over, out=block.valid[t])
        done = outcome.terminated | outcome.truncated
        if outcome.lost is not None:  # what these rows did has no outcome: the step before bootstraps from what it led to
            block.valid[t] &= ~outcome.lost
        if self._envs.resets_at_once:
            self._first = done
            self._keep_finals(block, t, outcome, policy)
        else:
            self._first = self._over
            self._over = done
        if outcome.lost is not None:
            self._first = self._first | outcome.lost

    def _keep_finals(self, block: Segments, t: int, outcome: Outcome, policy: Policy) -> None:
        """Same-step autoreset: keep the final observation of truncated episodes, with its value."""
        if outcome.final_rows is None or not outcome.final_rows.size:
            return
        cut = np.flatnonzero(outcome.truncated[outcome.final_rows] & ~outcome.terminated[outcome.final_rows])
        room = block.spec.finals - block.finals
        for row in outcome.final_rows[cut[room:]]:  # no room to bootstrap: the step is left out rather than learned wrongly
            block.valid[t, row] = False
        cut = cut[:room]
        if not cut.size:
            return
        rows, at = outcome.final_rows[cut], slice(block.finals, block.finals + cut.size)
        copy_into(map_tree(lambda x: x[at], block.final_observation), map_tree(lambda x: x[cut], outcome.final_observation))
        block.final_at[at, 0], block.final_at[at, 1] = t, rows
        observation = map_tree(lambda x: torch.from_numpy(x[at]), block.final_observation)
        state = tuple(s[torch.from_numpy(rows)] for s in self._state)
        block.final_value[at] = policy.value(observation, state).numpy()
        block.finals += cut.size

    def state(self) -> dict[str, Array]:
        """What a resumed run needs of the sampler; environments restart."""
        return {"generator": self._generator.get_state().numpy()}

    def metrics(self) -> dict[str, float]:
        return {}

    def unlearned_steps(self) -> int:
        return self._discarded

    def load_state(self, state: dict[str, Array]) -> None:
        self._generator.set_state(torch.from_numpy(state["generator"].copy()))


def _stack_into(target: Tree, items: list[Tree]) -> None:
    if isinstance(target, dict):
        for key, leaf in target.items():
            _stack_into(leaf, [item[key] for item in items])
    elif isinstance(target, tuple):
        for i, leaf in enumerate(target):
            _stack_into(leaf, [item[i] for item in items])
    else:
        torch.stack(items, out=target)


class EpisodeTally:
    """Returns and lengths of finished episodes, for whole blocks at once; open episodes carry over to the next block."""

    def __init__(self, rows: int) -> None:
        self._return = np.zeros(rows, np.float64)
        self._length = np.zeros(rows, np.int64)

    def take(self, block: Segments, lost: list[tuple[int, Bools]] | None = None) -> tuple[Floats, Ints]:
        """Of the episodes that ended in this block; those that were lost at a step are forgotten."""
        done = block.terminated | block.truncated
        gone = np.zeros_like(done)
        for at, rows in lost or ():
            gone[at] = rows
        done |= gone
        made = block.valid | (done & ~gone)  # a last step may have been left out of learning; it was made all the same
        rewards = np.cumsum(np.where(made, block.reward, 0.0), axis=0, dtype=np.float64) + self._return
        lengths = np.cumsum(made, axis=0) + self._length
        row, t = np.nonzero(done.T)  # ordered by row, then by time
        returns_at, lengths_at = rewards[t, row], lengths[t, row]
        same = np.zeros(len(row), np.bool_)
        same[1:] = row[1:] == row[:-1]
        returns, counts = returns_at.copy(), lengths_at.copy()
        returns[1:] -= np.where(same[1:], returns_at[:-1], 0.0)
        counts[1:] -= np.where(same[1:], lengths_at[:-1], 0)
        self._return, self._length = rewards[-1].copy(), lengths[-1].copy()
        last = np.ones(len(row), np.bool_)
        last[:-1] = row[1:] != row[:-1]
        self._return[row[last]] -= returns_at[last]
        self._length[row[last]] -= lengths_at[last]
        order = np.argsort(t, kind="stable")
        order = order[~gone[t, row][order]]
        return returns[order].astype(np.float32), counts[order]
