"""The recorder: one seat's steps written into segments, in the form in which every learner takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ludus.core.spaces import array_spec, mask_size
from ludus.core.tree import Tree, map_tree
from ludus.core.types import DEFAULT_MODEL, Bools, Segments, SegmentSpec
from ludus.models.inference.batched_policy import Acts, Decision
from ludus.models.policy import Policy
from ludus.transport.base import Room

_NONE_F, _NONE_I = np.zeros(0, np.float32), np.zeros(0, np.int64)


def session_spec(policy: Policy, steps: int, model: str = DEFAULT_MODEL) -> SegmentSpec:
    """The shape of what a session records for `policy`: a mask is always kept, for a game may send one at any time."""
    return played_spec(policy, steps, policy.config.max_seq_len, model)


def played_spec(player: Acts, steps: int, max_seq_len: int, model: str = DEFAULT_MODEL) -> SegmentSpec:
    """The same for whoever acts; `max_seq_len` is that of the policy which will learn from it."""
    every = min(steps, max_seq_len) if player.recurrent else 0
    return SegmentSpec(
        steps=steps,
        observation=array_spec(player.observation_space),
        action=array_spec(player.action_space, "action"),
        mask_size=mask_size(player.action_space),
        state=player.state_spec(),
        state_every=every,
        model=model,
    )


@dataclass
class RecorderStats:
    discarded: int = 0
    """Last steps of episodes that broke off: what came of them is not known."""
    unrecorded: int = 0
    """Steps for which the memory had no room."""


class Recorder:
    """Episodes of one seat, one after the other. A segment ends when it is full, when its episode ends, or when the weights
    change: within a segment one version acts. Only a recurrent model goes on: its sequences would become too short to learn
    from, and every step is stamped with the version that acted."""

    def __init__(self, memory: Room, origin: int, stats: RecorderStats) -> None:
        self._memory, self._origin, self._stats = memory, origin, stats
        self._block: Segments | None = None
        self._t = 0  # steps in the block
        self._version = 0
        self._acted = False  # an action of this episode waits for its reward
        self._before: Tree = ()  # the state in which it was chosen
        self._return, self._length = 0.0, 0

    @property
    def open(self) -> bool:
        """An episode has begun: an action was chosen whose outcome is still to come."""
        return self._acted

    def step(self, observation: Tree, mask: Bools | None, decision: Decision, reward: float, state: Tree) -> None:
        """What was seen, what was decided, and the reward of the action before. `state` is the one that was decided in."""
        self._settle(reward)
        block, t = self._block, self._t
        if block is not None and (t == block.spec.steps or (decision.version != self._version and not block.spec.state_every)):
            self._show(block, t, observation, mask)
            block.value[t, 0] = decision.value
            self._hand_in(block)
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
        self._show(block, t, observation, mask)
        block.first[t, 0] = first
        _put(block.action, t, decision.chosen)
        block.log_prob[t, 0] = decision.log_prob
        block.value[t, 0] = decision.value
        block.version[t, 0] = decision.version
        block.valid[t, 0] = True
        every = block.spec.state_every
        if every and t % every == 0:
            for kept, now in zip(block.state, state, strict=True):
                kept[t // every, 0] = now
        self._t, self._before = t + 1, state

    def cut(self, reward: float, observation: Tree, mask: Bools | None, value: float) -> None:
        """A batch is complete: hand in what was done, with the observation that is to be acted on next as its bootstrap.

        The reward is that of the last action, which has it now: the next `step` brings none for it.
        """
        self._settle(reward)
        block, t = self._block, self._t
        if block is not None and t:
            self._show(block, t, observation, mask)
            block.value[t, 0] = value
            self._hand_in(block)

    def hold_back(self) -> None:
        """A batch is complete, and what came of the last action is not known yet: hand in all before it.

        It begins the next segment; what it was chosen from is the bootstrap of this one.
        """
        block, last = self._block, self._t - 1
        fresh = self._memory.reserve(0) if block is not None and last > 0 else None
        if block is None or fresh is None:  # nothing is before it, or there is no room: all of it comes later
            return
        self._clear(fresh)
        for whole, own in ((fresh.observation, block.observation), (fresh.action, block.action)):
            _put(whole, 0, map_tree(lambda x: x[last, 0], own))
        for name in ("action_mask", "first", "log_prob", "value", "version", "valid"):
            getattr(fresh, name)[0, 0] = getattr(block, name)[last, 0]
        for kept, now in zip(fresh.state, self._before if fresh.spec.state_every else (), strict=True):
            kept[0, 0] = now
        block.valid[last, 0] = False
        self._hand_in(block)
        self._block, self._t = fresh, 1

    def finish(
        self, reward: float, *, terminated: bool, truncated: bool = False, observation: Tree = None, value: float | None = None
    ) -> None:
        """The episode is over. A truncated one needs the last observation and its value to be learned from to its end."""
        if not self._acted:
            return
        if not terminated and value is None:
            self.break_off()
            return
        self._settle(reward)
        block, t = self._block, self._t
        if block is not None:
            block.terminated[t - 1, 0], block.truncated[t - 1, 0] = terminated, truncated and not terminated
            if value is not None and observation is not None:
                self._show(block, t, observation, None)
                block.value[t, 0] = value
            block.episode_return = np.array([self._return], np.float32)
            block.episode_length = np.array([self._length], np.int64)
            self._hand_in(block)
        self._forget_episode()

    def break_off(self) -> None:
        """The game fell silent: what came of the last action is not known, so it is left out; what was before counts."""
        if not self._acted:
            return
        self._stats.discarded += 1
        block, t = self._block, self._t
        if block is not None:
            if t > 1:
                block.valid[t - 1, 0] = False  # its observation and value remain, as those after the step before
                block.truncated[t - 2, 0] = True
                self._hand_in(block)
            else:
                self._memory.abandon(block)
        self._forget_episode()

    def _settle(self, reward: float) -> None:
        self._return += reward
        if self._block is not None and self._acted:
            self._block.reward[self._t - 1, 0] = reward

    def _show(self, block: Segments, t: int, observation: Tree, mask: Bools | None) -> None:
        _put(block.observation, t, observation)
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

    def _hand_in(self, block: Segments) -> None:
        self._memory.commit(block)
        self._block, self._t = None, 0

    def _forget_episode(self) -> None:
        self._block, self._t, self._acted = None, 0, False
        self._return, self._length = 0.0, 0


def _put(whole: Tree, t: int, row: Tree) -> None:
    if isinstance(whole, np.ndarray):
        whole[t, 0] = row
    else:
        map_tree(lambda x, part: x.__setitem__((t, 0), part), whole, row)
