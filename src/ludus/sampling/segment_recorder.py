"""Recording of one seat's steps into segments, in the format that learners take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ludus.core.spaces import array_spec, mask_size
from ludus.core.tree import Tree, map_tree
from ludus.core.types import DEFAULT_MODEL, Bools, Segments, SegmentSpec
from ludus.models.inference.batched_policy import ActingPolicy, Decision
from ludus.models.policy import Policy
from ludus.transport.base import SegmentWriter

_NONE_F, _NONE_I = np.zeros(0, np.float32), np.zeros(0, np.int64)


def session_spec(policy: Policy, steps: int, model: str = DEFAULT_MODEL) -> SegmentSpec:
    """Return the spec of the segments that a session records for `policy`. A mask is always stored: a game may send one at any time."""
    return acting_policy_spec(policy, steps, policy.config.max_seq_len, model)


def acting_policy_spec(policy: ActingPolicy, steps: int, max_seq_len: int, model: str = DEFAULT_MODEL) -> SegmentSpec:
    """Return the same for any acting policy; `max_seq_len` is that of the policy that will learn from it."""
    every = min(steps, max_seq_len) if policy.recurrent else 0
    return SegmentSpec(
        steps=steps,
        observation=array_spec(policy.observation_space),
        action=array_spec(policy.action_space, "action"),
        mask_size=mask_size(policy.action_space),
        state=policy.state_spec(),
        state_every=every,
        model=model,
    )


@dataclass
class RecorderStats:
    discarded: int = 0
    """Last steps of interrupted episodes, whose outcome is unknown."""
    unrecorded: int = 0
    """Steps for which the memory had no free segment."""


class SegmentRecorder:
    """Records the episodes of one seat, one after the other. A segment ends when it is full, when its episode ends, or when the
    weights change, so that one version acts within a segment. Segments of a recurrent model continue across versions: shorter sequences
    would be of little use, and every step stores its version.
    """

    def __init__(self, memory: SegmentWriter, origin: int, stats: RecorderStats) -> None:
        self._memory, self._origin, self._stats = memory, origin, stats
        self._block: Segments | None = None
        self._t = 0  # steps in the block
        self._version = 0
        self._acted = False  # an action of this episode is waiting for its reward
        self._before: Tree = ()  # the recurrent state before that action
        self._return, self._length = 0.0, 0

    @property
    def open(self) -> bool:
        """Whether an action was chosen whose outcome is still pending."""
        return self._acted

    def step(self, observation: Tree, mask: Bools | None, decision: Decision, reward: float, state: Tree) -> None:
        """Record an observation, the decision, and the reward of the previous action. `state` is the state before the decision."""
        self._store_reward(reward)
        block, t = self._block, self._t
        if block is not None and (t == block.spec.steps or (decision.version != self._version and not block.spec.state_every)):
            self._store_observation(block, t, observation, mask)
            block.value[t, 0] = decision.value
            self._commit(block)
            block = None
        first = not self._acted
        self._acted, self._length = True, self._length + 1
        if block is None:
            block, t = self._memory.reserve(0), 0
            self._block, self._t, self._version = block, 0, decision.version
            if block is None:
                self._stats.unrecorded += 1
                return
            self._clear(block)
        self._store_observation(block, t, observation, mask)
        block.first[t, 0] = first
        _set_row(block.action, t, decision.chosen)
        block.log_prob[t, 0] = decision.log_prob
        block.value[t, 0] = decision.value
        block.version[t, 0] = decision.version
        block.valid[t, 0] = True
        every = block.spec.state_every
        if every and t % every == 0:
            for stored, now in zip(block.state, state, strict=True):
                stored[t // every, 0] = now
        self._t, self._before = t + 1, state

    def cut(self, reward: float, observation: Tree, mask: Bools | None, value: float) -> None:
        """Commit the segment because a batch is complete; the observation to be acted on next is its bootstrap.

        `reward` is that of the last action; the next `step` brings none for it.
        """
        self._store_reward(reward)
        block, t = self._block, self._t
        if block is not None and t:
            self._store_observation(block, t, observation, mask)
            block.value[t, 0] = value
            self._commit(block)

    def cut_before_pending(self) -> None:
        """Commit all steps before the pending action because a batch is complete.

        The pending action starts the next segment; its observation is the bootstrap of this one.
        """
        block, last = self._block, self._t - 1
        fresh = self._memory.reserve(0) if block is not None and last > 0 else None
        if block is None or fresh is None:  # no step before it, or no free segment: commit later
            return
        self._clear(fresh)
        for target, source in ((fresh.observation, block.observation), (fresh.action, block.action)):
            _set_row(target, 0, map_tree(lambda x: x[last, 0], source))
        for name in ("action_mask", "first", "log_prob", "value", "version", "valid"):
            getattr(fresh, name)[0, 0] = getattr(block, name)[last, 0]
        for stored, now in zip(fresh.state, self._before if fresh.spec.state_every else (), strict=True):
            stored[0, 0] = now
        block.valid[last, 0] = False
        self._commit(block)
        self._block, self._t = fresh, 1

    def finish(
        self, reward: float, *, terminated: bool, truncated: bool = False, observation: Tree = None, value: float | None = None
    ) -> None:
        """End the episode. A truncated one needs the final observation and its value to be recorded to its end."""
        if not self._acted:
            return
        if not terminated and value is None:
            self.discard_pending()
            return
        self._store_reward(reward)
        block, t = self._block, self._t
        if block is not None:
            block.terminated[t - 1, 0], block.truncated[t - 1, 0] = terminated, truncated and not terminated
            if value is not None and observation is not None:
                self._store_observation(block, t, observation, None)
                block.value[t, 0] = value
            block.episode_return = np.array([self._return], np.float32)
            block.episode_length = np.array([self._length], np.int64)
            self._commit(block)
        self._reset_episode()

    def discard_pending(self) -> None:
        """End an interrupted episode: drop the last action, whose outcome is unknown, and commit the steps before it."""
        if not self._acted:
            return
        self._stats.discarded += 1
        block, t = self._block, self._t
        if block is not None:
            if t > 1:
                block.valid[t - 1, 0] = False  # its observation and value stay as the bootstrap of the step before
                block.truncated[t - 2, 0] = True
                self._commit(block)
            else:
                self._memory.abandon(block)
        self._reset_episode()

    def _store_reward(self, reward: float) -> None:
        self._return += reward
        if self._block is not None and self._acted:
            self._block.reward[self._t - 1, 0] = reward

    def _store_observation(self, block: Segments, t: int, observation: Tree, mask: Bools | None) -> None:
        _set_row(block.observation, t, observation)
        if mask is None:
            block.action_mask[t, 0] = True
        else:
            block.action_mask[t, 0] = mask

    def _clear(self, block: Segments) -> None:
        for array in (block.valid, block.terminated, block.truncated, block.first):
            array.fill(False)
        for numbers in (block.reward, block.value, block.log_prob):
            numbers.fill(0)
        block.version.fill(self._version)
        block.origin[0] = self._origin
        block.episode_return, block.episode_length = _NONE_F, _NONE_I

    def _commit(self, block: Segments) -> None:
        self._memory.commit(block)
        self._block, self._t = None, 0

    def _reset_episode(self) -> None:
        self._block, self._t, self._acted = None, 0, False
        self._return, self._length = 0.0, 0


def _set_row(target: Tree, t: int, row: Tree) -> None:
    if isinstance(target, np.ndarray):
        target[t, 0] = row
    else:
        map_tree(lambda x, part: x.__setitem__((t, 0), part), target, row)
