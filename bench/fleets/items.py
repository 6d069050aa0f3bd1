"""What travels in every way that is measured: a record of a real game, filled in by the writer as a sampler fills it.

4 KB are 64 steps of CartPole, 96 KB are 13 frames of Pong, 1 MB are 145 of them; all played by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import ArraySpec
from ludus.core.types import OVER_STEPS, OVER_STEPS_AND_AFTER, Segments, SegmentSpec
from ludus.transport.shared_memory import BlockLayout

_ACTION = ArraySpec((), np.dtype(np.int64))
_POLE = ArraySpec((4,), np.dtype(np.float32))
_SERVED = 100  # steps until there is something to be seen
_FRAME = ArraySpec((84, 84, 1), np.dtype(np.uint8))
SPECS = {
    "4 KB": SegmentSpec(steps=64, observation=_POLE, action=_ACTION),
    "96 KB": SegmentSpec(steps=13, observation=_FRAME, action=_ACTION),
    "1 MB": SegmentSpec(steps=145, observation=_FRAME, action=_ACTION),
}
FIELDS = tuple(name for name in (*OVER_STEPS, *OVER_STEPS_AND_AFTER) if name != "action_mask")
"""The arrays that a learner reads; these specs have no masks."""


class Item:
    """The record of one size: what the writer copies from, and where the reader ends."""

    def __init__(self, size: str, record: np.ndarray) -> None:
        self.size, self.layout = size, BlockLayout(SPECS[size], 1)
        self.source = self.layout.load(record.data)
        self._from = [getattr(self.source, name) for name in FIELDS]

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def spaces(self) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Of the game: of what is seen, and of what is done."""
        seen = self.layout.spec.observation
        if seen is _FRAME:
            return gym.spaces.Box(0, 255, seen.shape, np.uint8), gym.spaces.Discrete(6)
        return gym.spaces.Box(-np.inf, np.inf, seen.shape, np.float32), gym.spaces.Discrete(2)

    def write(self, block: Segments, number: int) -> None:
        """The sampler's part: every array of a block, wherever it lies. The number is its version."""
        for name, array in zip(FIELDS, self._from, strict=True):
            np.copyto(getattr(block, name), array)
        block.version.fill(number)


class Draft:
    """Where a writer without a room of its own makes its items: a sealed record in memory of its own."""

    def __init__(self, item: Item) -> None:
        self._item = item
        self.record = np.zeros(item.nbytes, np.uint8)
        self._block = item.layout.views(self.record.data)

    def made(self, number: int) -> memoryview:
        self._item.write(self._block, number)
        self._item.layout.seal(self._block, self.record.data)
        return self.record.data


class Batch:
    """The reader's part: every item is copied to its place in a batch of sixteen, and must be the same number at both ends."""

    SLOTS = 16

    def __init__(self, item: Item) -> None:
        self._records = np.zeros((self.SLOTS, item.nbytes), np.uint8)
        self.blocks = [item.layout.views(record.data) for record in self._records]
        self._targets = [[getattr(block, name) for name in FIELDS] for block in self.blocks]
        self._taken = 0

    def bytes(self, data: Any) -> int:
        slot = self._taken % self.SLOTS
        np.copyto(self._records[slot], np.frombuffer(data, np.uint8))
        return self._number(slot)

    def segments(self, block: Segments) -> int:
        slot = self._taken % self.SLOTS
        for target, name in zip(self._targets[slot], FIELDS, strict=True):
            np.copyto(target, getattr(block, name))
        return self._number(slot)

    def episode(self, episode: Episode) -> int:
        slot = self._taken % self.SLOTS
        block, steps = self.blocks[slot], episode.transitions
        for t, step in enumerate(steps):
            block.observation[t, 0] = step.state["observation"]
        block.observation[-1, 0] = steps[-1].next_state["observation"]
        block.action[:, 0] = [step.action for step in steps]
        block.reward[:, 0] = [step.reward for step in steps]
        block.terminated[:, 0] = [step.game_over for step in steps]
        block.log_prob[:, 0] = [step.info["all_action_probabilities"][step.action] for step in steps]
        block.value[:-1, 0] = [step.info["state_value"] for step in steps]
        block.version[:, 0] = [step.info["version"] for step in steps]
        return self._number(slot)

    def _number(self, slot: int) -> int:
        version = self.blocks[slot].version
        first, last = int(version[0, 0]), int(version[-1, 0])
        if first != last:
            raise AssertionError(f"item {first} did not arrive whole: it ends as {last}")
        self._taken += 1
        return first


# -- the same as Python objects -----------------------------------------------------------------------------------------


@dataclass
class Transition:
    """A step as the seed's system keeps it: what its learner of PPO needs is in `info`."""

    state: dict[str, np.ndarray]
    action: int
    reward: float
    n_step_discounted_rewards: float
    next_state: dict[str, np.ndarray]
    game_over: bool
    info: dict[str, Any]


@dataclass
class Episode:
    transitions: list[Transition]


class EpisodeDraft:
    """The steps of an item as objects, made once: their making belongs to playing, not to sending.

    Two of them share each observation, as they do where a game hands it out: it is pickled once.
    """

    def __init__(self, item: Item) -> None:
        block, game = item.source, item.spaces[1]
        assert isinstance(game, gym.spaces.Discrete)
        self._choices = int(game.n)
        seen = [{"observation": np.array(frame[0])} for frame in block.observation]
        self._episode = Episode([self._step(block, seen, t) for t in range(item.layout.spec.steps)])

    def _step(self, block: Segments, seen: list[dict[str, np.ndarray]], t: int) -> Transition:
        action = int(block.action[t, 0])
        probabilities = np.full(self._choices, 1 / self._choices, np.float32)
        probabilities[action] = block.log_prob[t, 0]
        info = {
            "action": action,
            "all_action_probabilities": probabilities,
            "action_value": 0.0,
            "state_value": float(block.value[t, 0]),
            "max_action_value": 0.0,
            "version": 0,
        }
        return Transition(seen[t], action, float(block.reward[t, 0]), 0.0, seen[t + 1], bool(block.terminated[t, 0]), info)

    def made(self, number: int) -> Episode:
        for step in self._episode.transitions:
            step.info["version"] = number
        return self._episode


# -- made once ----------------------------------------------------------------------------------------------------------


def play(size: str) -> np.ndarray:
    """A sealed record of so many steps of the game, by chance."""
    spec = SPECS[size]
    layout, rng = BlockLayout(spec, 1), np.random.default_rng(0)
    record = np.zeros(layout.nbytes, np.uint8)
    block = layout.views(record.data)
    env = _pong() if spec.observation is _FRAME else gym.make("CartPole-v1")
    env.action_space.seed(0)
    seen, _ = env.reset(seed=0)
    if spec.observation is _FRAME:
        for _ in range(_SERVED):
            seen, *_ = env.step(env.action_space.sample())
    for t in range(spec.steps):
        action = env.action_space.sample()
        block.observation[t, 0] = np.reshape(seen, spec.observation.shape)
        seen, reward, terminated, truncated, _ = env.step(action)
        block.action[t, 0], block.reward[t, 0] = action, reward
        block.terminated[t, 0], block.truncated[t, 0], block.first[t + 1, 0] = terminated, truncated, terminated or truncated
        if terminated or truncated:
            seen, _ = env.reset()
    block.observation[-1, 0] = np.reshape(seen, spec.observation.shape)
    block.valid.fill(True)
    np.copyto(block.log_prob, -np.abs(rng.standard_normal(block.log_prob.shape, np.float32)))
    np.copyto(block.value, rng.standard_normal(block.value.shape, np.float32))
    env.close()
    layout.seal(block, record.data)
    return record


def _pong() -> gym.Env[Any, Any]:
    import ale_py

    gym.register_envs(ale_py)
    return gym.wrappers.AtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1), noop_max=0)


def prepare(directory: Path, sizes: list[str]) -> None:
    """One file of each size, so that processes that measure need not play."""
    for size in sizes:
        np.save(directory / f"{size}.npy", play(size))


def load(directory: Path, size: str) -> Item:
    return Item(size, np.load(directory / f"{size}.npy"))
