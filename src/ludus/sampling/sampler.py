"""The sampler of vectorised environments: steps N environments with one batched forward pass per step and writes segments in place."""

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
from ludus.envs.vector_env import Environments, Observations, StepResult, too_large_for_float32
from ludus.errors import EnvironmentFault, Interrupted
from ludus.models.policy import Policy
from ludus.models.weights.version_store import PolicySource
from ludus.transport.base import SegmentWriter

_STEPS_PER_FINAL = 4  # space for final observations: one per row, or one per four steps, whichever is more


class EnvShape(Protocol):
    """Number of rows, spaces and reset mode of environments, in this process or another."""

    num: int
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    same_step_autoreset: bool

    @property
    def masked(self) -> bool: ...

    @property
    def results(self) -> tuple[str, ...]: ...


def segment_spec(policy: Policy, environments: EnvShape, steps: int, model: str = DEFAULT_MODEL) -> SegmentSpec:
    """Return the spec of the segments that the sampler writes."""
    n = environments.num
    every = min(steps, policy.config.max_seq_len) if policy.recurrent else 0
    return SegmentSpec(
        steps=steps,
        observation=spaces.array_spec(environments.observation_space),
        action=action_spec(policy),
        mask_size=spaces.mask_size(environments.action_space) if environments.masked else 0,
        state=policy.state_spec(),
        state_every=every,
        finals=max(n, steps * n // _STEPS_PER_FINAL) if environments.same_step_autoreset else 0,
        model=model,
        results=environments.results,
    )


def action_spec(policy: Policy) -> Tree:
    """Actions are stored as the policy chose them: continuous ones unscaled, in float32."""
    return spaces.array_spec(policy.action_space, "action")


@dataclass
class _StepViews:
    """Per-step tensor views of a block, created once per block."""

    observation: list[Tree]
    arrays: list[Tree]  # the observation rows as NumPy arrays
    first: tuple[Tensor, ...]
    mask: tuple[Tensor, ...] | None
    action: Tree  # whole tensors, written at the end of a segment
    log_prob: Tensor
    value: Tensor


def _step_views(block: Segments) -> _StepViews:
    if "rows" not in block.cache:
        steps = block.spec.steps
        block.cache["rows"] = _StepViews(
            [map_tree(lambda x, t=t: torch.from_numpy(x[t]), block.observation) for t in range(steps + 1)],
            [map_tree(lambda x, t=t: x[t], block.observation) for t in range(steps + 1)],
            torch.from_numpy(block.first).unbind(0),
            torch.from_numpy(block.action_mask).unbind(0) if block.spec.mask_size else None,
            map_tree(torch.from_numpy, block.action),
            torch.from_numpy(block.log_prob),
            torch.from_numpy(block.value),
        )
    rows: _StepViews = block.cache["rows"]
    return rows


@dataclass
class SamplerTimes:
    """Steps and time spent of a sampler, in seconds since it started. Updated at every step."""

    environment_s: float = 0.0
    policy_s: float = 0.0
    steps: int = 0
    """Over all rows."""


@dataclass(frozen=True)
class VersionClock:
    """Estimates the timestep at which a version was published: every update learns from the same number of steps."""

    first_version: int
    """First version of this part of the run, which started after `begun` timesteps."""
    begun: int
    per_version: int

    def timesteps(self, version: int) -> int:
        return self.begun + max(0, version - self.first_version) * self.per_version


@dataclass(frozen=True)
class Interruption:
    """How a sampler can be interrupted; an interrupted step discards what it has sampled."""

    beat: Callable[[], None] = lambda: None
    """Called before every call of an environment; may raise Interrupted."""
    interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Entered while environments are called; inside it, Interrupted may be raised at any point."""


NOT_INTERRUPTED = Interruption()


class Sampler:
    """Fills one block per `step()`. Reproducible: all randomness comes from `seed`."""

    def __init__(
        self,
        environments: Environments,
        source: PolicySource,
        memory: SegmentWriter,
        seed: int,
        *,
        first_row: int = 0,
        explore: bool = True,
        timesteps: Callable[[int], int] | None = None,
        interruption: Interruption = NOT_INTERRUPTED,
    ) -> None:
        """Without `explore` the most probable action is taken. `timesteps`: version → timestep at which it was published,
        reported to the environments.
        """
        self._explore, self._timesteps, self._interruption = explore, timesteps, interruption
        self._envs, self._source, self._memory = environments, source, memory
        self.times = SamplerTimes()
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._origin = np.arange(first_row, first_row + environments.num)
        self._state: tuple[Tensor, ...] = ()
        self._choices = spaces.choices(environments.action_space)
        self._categories = spaces.categories(environments.observation_space)
        self._steps_before = 0  # steps of earlier segments
        self._discarded = 0  # steps of interrupted blocks
        self._forget_episodes()

    def _forget_episodes(self) -> None:
        """Before the first step, and when environments were interrupted during a step: they have to be reset."""
        rows = self._envs.num
        self._observations: Observations | None = None
        self._first = np.ones(rows, np.bool_)
        self._over = np.zeros(rows, np.bool_)  # rows that only reset in the next step
        self._tally = EpisodeTally(rows)

    def step(self, timeout_s: float = 0.0) -> bool:
        """Sample one block, or until an interruption; return False if the memory has no free block within `timeout_s`."""
        block = self._memory.reserve(timeout_s)
        if block is None:
            return False
        policy, version = self._source.newest()
        if self._timesteps is not None:
            self._envs.progress(self._timesteps(version))
        before = self.times.steps
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.abandon, block)
            try:
                with policy.acting(), self._interruption.interruptible():
                    self.fill(block, policy, version)
            except Interrupted:
                self._discarded += self.times.steps - before
                self._forget_episodes()
                return True
            undo.pop_all()
        self._memory.commit(block)
        return True

    def fill(self, block: Segments, policy: Policy, version: int) -> None:
        """Sample one segment of every row with one policy, inside `policy.acting()`."""
        if self._observations is None:
            self._observations = self._envs.reset(self._seed)
            self._state = policy.initial_state(self._envs.num)
        observations, rows, steps = self._observations, _step_views(block), block.spec.steps
        noise: Sequence[Tensor | None] = [None] * steps
        if self._explore:
            noise = policy.distribution.noise((steps, self._envs.num), self._generator).unbind(0)
        actions: list[Tree] = []
        log_probs: list[Tensor] = []
        values: list[Tensor] = []
        lost: list[tuple[int, Bools]] = []
        block.finals = 0
        block.results.fill(0)
        clock, times, every, last = time.perf_counter, self.times, block.spec.state_every, time.perf_counter()
        for t in range(steps):
            self._interruption.beat()
            self._store_observation(block, t, observations)
            if every and t % every == 0:
                for stored, now in zip(block.state, self._state, strict=True):
                    stored[t // every] = now.numpy()
            mask = rows.mask[t] if rows.mask is not None else None
            action, log_prob, value, self._state = policy.step(rows.observation[t], self._state, rows.first[t], mask, noise[t])
            actions.append(action)
            log_probs.append(log_prob)
            values.append(value)
            env_action = policy.distribution.to_environment(map_tree(Tensor.numpy, action))
            before = clock()
            times.policy_s += before - last
            outcome = self._envs.step(env_action)
            last = clock()
            times.environment_s += last - before
            times.steps += self._envs.num
            self._record(block, t, outcome, policy)
            if outcome.lost is not None:
                lost.append((t, outcome.lost.copy()))
            if outcome.results is not None:
                block.results += outcome.results
            observations = outcome.observations
        self._store_observation(block, steps, observations)
        values.append(policy.value(rows.observation[steps], self._state, rows.first[steps]))
        _stack_into(rows.action, actions)
        torch.stack(log_probs, out=rows.log_prob)
        torch.stack(values, out=rows.value)
        block.version[:] = version
        block.origin[:] = self._origin
        self._observations = observations
        if not np.isfinite(block.reward).all():
            t, row = np.argwhere(~np.isfinite(block.reward))[0].tolist()
            self._raise_for_reward(row, block.reward[t, row], t)
        self._steps_before += steps
        block.episode_return, block.episode_length = self._tally.take(block, lost)
        times.policy_s += clock() - last

    def _store_observation(self, block: Segments, t: int, observations: Observations) -> None:
        try:
            copy_into(_step_views(block).arrays[t], observations.observation)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(
                f"{self._envs.name} returned an observation that does not fit its space at step {self._steps_before + t}: {error}."
            ) from error
        self._check_observation(_step_views(block).arrays[t], t, observations)
        block.first[t] = self._first
        if observations.mask is not None:
            np.copyto(block.action_mask[t], observations.mask)
            self._check_choices(block.action_mask[t], t)

    def _check_observation(self, observation: Tree, t: int, observations: Observations) -> None:
        """Reject non-finite numbers and invalid categories. `observations`: the source of `observation`."""
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
                where = f"in its observation{key}{f' (index {rest})' if rest else ''} at step {self._steps_before + t}"
                value = leaf[(row, *rest)]
                if np.isinf(value) and too_large_for_float32(given := observations.raw_value(row, path, rest)):
                    raise EnvironmentFault(
                        f"Environment {row} of {self._envs.name} returned {given} {where}, which is too large for float32.",
                        "Scale it, or take its logarithm.",
                    )
                raise EnvironmentFault(f"Environment {row} of {self._envs.name} returned {value} {where}.")

    def _raise_for_reward(self, row: int, reward: float, t: int) -> NoReturn:
        why = ", which is too large for float32" if too_large_for_float32(reward) else ""
        raise EnvironmentFault(
            f"Environment {row} of {self._envs.name} returned the reward {reward} at step {self._steps_before + t}{why}."
        )

    def _check_choices(self, mask: Bools, t: int) -> None:
        for part in self._choices:
            possible = mask[:, part].any(axis=1)
            if not possible.all():  # at the end of an episode the last mask is kept, which may forbid everything: allow all
                mask[self._over & ~possible, part] = True
                possible |= self._over
            if not possible.all():
                raise EnvironmentFault(
                    f"Environment {int(np.argmin(possible))} of {self._envs.name} forbids every action in its action_mask "
                    f"(options {part.start} to {part.stop - 1}) at step {self._steps_before + t}.",
                    "Leave at least one option of every choice allowed.",
                )

    def _record(self, block: Segments, t: int, outcome: StepResult, policy: Policy) -> None:
        try:
            with np.errstate(over="raise"):  # vector environments return float64
                block.reward[t] = outcome.reward
        except FloatingPointError:
            row = int(np.argmax([too_large_for_float32(reward) for reward in outcome.reward]))
            self._raise_for_reward(row, outcome.reward[row], t)
        block.terminated[t] = outcome.terminated
        block.truncated[t] = outcome.truncated
        np.logical_not(self._over, out=block.valid[t])
        done = outcome.terminated | outcome.truncated
        if outcome.lost is not None:  # the outcome is unknown; the step before bootstraps
            block.valid[t] &= ~outcome.lost
        if self._envs.same_step_autoreset:
            self._first = done
            self._store_finals(block, t, outcome, policy)
        else:
            self._first = self._over
            self._over = done
        if outcome.lost is not None:
            self._first = self._first | outcome.lost

    def _store_finals(self, block: Segments, t: int, outcome: StepResult, policy: Policy) -> None:
        """Same-step autoreset: store the final observation of truncated episodes, with its value."""
        if outcome.final_rows is None or not outcome.final_rows.size:
            return
        cut = np.flatnonzero(outcome.truncated[outcome.final_rows] & ~outcome.terminated[outcome.final_rows])
        space = block.spec.finals - block.finals
        for row in outcome.final_rows[cut[space:]]:  # no space to bootstrap from: leave the step out
            block.valid[t, row] = False
        cut = cut[:space]
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
        """State for a resumed run; environments restart."""
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
    """Returns and lengths of finished episodes of whole blocks; open episodes carry over to the next block."""

    def __init__(self, rows: int) -> None:
        self._return = np.zeros(rows, np.float64)
        self._length = np.zeros(rows, np.int64)

    def take(self, block: Segments, lost: list[tuple[int, Bools]] | None = None) -> tuple[Floats, Ints]:
        """Return those of the episodes that ended in this block; episodes lost at a step are dropped."""
        done = block.terminated | block.truncated
        dropped = np.zeros_like(done)
        for at, rows in lost or ():
            dropped[at] = rows
        done |= dropped
        counted = block.valid | (done & ~dropped)  # a last step that is left out of learning still counts
        rewards = np.cumsum(np.where(counted, block.reward, 0.0), axis=0, dtype=np.float64) + self._return
        lengths = np.cumsum(counted, axis=0) + self._length
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
        order = order[~dropped[t, row][order]]
        return returns[order].astype(np.float32), counts[order]
