"""Inspection of what comes from elsewhere: everything that our samplers write passes, and nothing that a learner could choke on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ludus.buffers.segment_validation import SegmentValidator
from ludus.core.spaces import array_spec, mask_size
from ludus.core.tree import map_tree
from ludus.core.types import Segments, SegmentSpec
from ludus.envs.vector_env import Environments, LoopEnvironments, VectorEnvironments
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.sampler import Sampler, segment_spec
from ludus.transport.local import LocalMemory
from ludus.transport.shared_memory import BlockLayout

OBSERVATION = gym.spaces.Dict(
    {
        "vector": gym.spaces.Box(-1, 1, (3,), np.float32),
        "kind": gym.spaces.Discrete(4, start=2),
        "bits": gym.spaces.MultiBinary(2),
        "picture": gym.spaces.Box(0, 255, (2, 2), np.uint8),
    }
)
ACTION = gym.spaces.Tuple(
    (
        gym.spaces.Discrete(3, start=5),
        gym.spaces.Box(-1, 1, (2,), np.float32),
        gym.spaces.MultiDiscrete([2, 4]),
        gym.spaces.MultiBinary(2),
    )
)
SPEC = SegmentSpec(
    steps=4,
    observation=array_spec(OBSERVATION),
    action=array_spec(ACTION),
    mask_size=mask_size(ACTION),
    state=(array_spec(gym.spaces.Box(-1, 1, (5,), np.float32)),),
    state_every=2,
    finals=3,
    results=("won",),
)
INSPECTOR = SegmentValidator(OBSERVATION, ACTION, SPEC)
"""Masks: 0-2 the first choice, 3-4 and 5-8 the next two, 9-10 bits."""


def good() -> Segments:
    block = Segments.empty(SPEC, 2)
    block.observation["kind"][...] = 3
    block.valid[...] = True
    block.truncated[1, 1] = True
    block.final_at[0] = 1, 1
    block.final_observation["kind"][0] = 2
    block.finals = 1
    block.episode_return, block.episode_length = np.ones(1, np.float32), np.ones(1, np.int64)
    return block


def test_a_block_as_it_should_be_passes() -> None:
    assert INSPECTOR.find_error(good()) is None
    assert INSPECTOR.find_error(_at_the_edges(good())) is None


def _at_the_edges(block: Segments) -> Segments:
    block.observation["kind"][...] = 5
    block.action[0][...], block.action[2][...], block.action[3][...] = 2, (1, 3), 1
    block.action[1][...] = -1e30  # unclipped: what the policy chose
    block.reward[...] = 3e38
    block.action_mask[...] = False
    block.action_mask[..., [2, 4, 8, 9, 10]] = True
    block.version[...] = 1 << 40
    return block


def _set(path: str, value: Any, at: Any = ...) -> Callable[[Segments], None]:
    def change(block: Segments) -> None:
        tree: Any = block
        for step in path.split("."):
            tree = tree[int(step)] if step.isdigit() else tree[step] if isinstance(tree, dict) else getattr(tree, step)
        tree[at] = value

    return change


def _byte(path: str) -> Callable[[Segments], None]:
    def change(block: Segments) -> None:
        getattr(block, path).view(np.uint8).reshape(-1)[-1] = 2

    return change


def _count(name: str, value: Any) -> Callable[[Segments], None]:
    return lambda block: setattr(block, name, value)


NAN, INFINITE = float("nan"), float("inf")
LAST = (-1, -1)


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        (_set("observation.vector", NAN, LAST), "observation.vector is not finite"),
        (_set("observation.vector", -INFINITE, (0, 0, 0)), "observation.vector is not finite"),
        (_set("observation.kind", 1, LAST), "observation.kind is out of range"),
        (_set("observation.kind", 6, (0, 0)), "observation.kind is out of range"),
        (_set("observation.bits", 2, LAST), "observation.bits is out of range"),
        (_set("observation.bits", -1, LAST), "observation.bits is out of range"),
        (_set("action.0", 3, LAST), "action.0 is out of range"),
        (_set("action.0", -1, (0, 0)), "action.0 is out of range"),
        (_set("action.1", NAN, LAST), "action.1 is not finite"),
        (_set("action.2", 2, (1, 1, 0)), "action.2 is out of range"),
        (_set("action.2", 4, (1, 1, 1)), "action.2 is out of range"),
        (_set("action.3", 2, (1, 1, 1)), "action.3 is out of range"),
        (_set("reward", NAN, LAST), "reward is not finite"),
        (_set("log_prob", -INFINITE, LAST), "log_prob is not finite"),
        (_set("value", NAN, LAST), "value is not finite"),
        (_set("state.0", NAN, LAST), "state.0 is not finite"),
        (_set("version", -1, LAST), "version is negative"),
        (_byte("terminated"), "terminated contains values other than true and false"),
        (_byte("truncated"), "truncated contains values other than true and false"),
        (_byte("valid"), "valid contains values other than true and false"),
        (_byte("first"), "first contains values other than true and false"),
        (_byte("action_mask"), "action_mask contains values other than true and false"),
        (_set("action_mask", False), "action_mask forbids every action"),
        (_set("action_mask", False, (-1, -1, slice(5, 9))), "action_mask forbids every action"),
        (_set("action_mask", False, (2, 1, 0)), "a forbidden action was taken"),
        (_set("action_mask", False, (2, 1, 5)), "a forbidden action was taken"),
        (_set("final_at", (4, 0), 0), "a final observation belongs to no step"),
        (_set("final_at", (0, 2), 0), "a final observation belongs to no step"),
        (_set("final_at", (-1, 0), 0), "a final observation belongs to no step"),
        (_set("final_at", (0, 0), 0), "a final observation belongs to a step that is not truncated or has another one"),
        (_set("terminated", True, (1, 1)), "a final observation belongs to a step that is not truncated or has another one"),
        (_count("finals", 0), "a truncated step has no final observation"),
        (_set("truncated", True, (0, 0)), "a truncated step has no final observation"),
        (_set("final_value", NAN, 0), "final_value is not finite"),
        (_set("final_observation.vector", NAN, 0), "a final observation is invalid"),
        (_set("final_observation.kind", 6, 0), "a final observation is invalid"),
        (_count("episode_return", np.array([NAN], np.float32)), "episode_return is not finite"),
        (_count("episode_length", np.array([0])), "episode_length is below 1"),
        (_set("results", NAN, LAST), "results are not finite"),
        (_set("results", 1000, LAST), "results have an impossible number of episodes"),
        (_set("results", -1, LAST), "results have an impossible number of episodes"),
    ],
)
def test_an_invalid_block_is_reported_with_its_error(poison: Callable[[Segments], None], said: str) -> None:
    block = good()
    poison(block)
    assert INSPECTOR.find_error(block) == said


def test_two_final_observations_of_one_step_are_one_too_many() -> None:
    block = good()
    block.final_at[1] = block.final_at[0]
    block.final_observation["kind"][1] = 2
    block.finals = 2
    assert INSPECTOR.find_error(block) is not None


def test_a_bit_that_a_mask_keeps_at_zero_is_zero() -> None:
    block = good()
    block.action_mask[..., 10] = False
    assert INSPECTOR.find_error(block) is None
    block.action[3][0, 0, 1] = 1
    assert INSPECTOR.find_error(block) == "a forbidden action was taken"


def test_what_is_not_valid_may_be_anything_that_is_a_number_of_its_kind() -> None:
    block = good()
    block.valid[0, 0] = False
    block.truncated[0, 0] = True
    block.action_mask[0, 0, 0] = False
    assert INSPECTOR.find_error(block) is None
    block.observation["vector"][0, 0] = NAN
    assert INSPECTOR.find_error(block) is not None, "zero times NaN is NaN"


def test_beyond_their_count_final_observations_are_not_looked_at() -> None:
    block = good()
    block.final_at[1:], block.final_value[1:] = -7, NAN
    block.final_observation["kind"][1:] = 99
    assert INSPECTOR.find_error(block) is None


def test_blocks_that_cannot_be_written_to_are_inspected_as_they_are() -> None:
    layout = BlockLayout(SPEC, 2)
    buffer = bytearray(layout.nbytes)
    views = layout.views(memoryview(buffer))
    views.observation["kind"][...] = 3
    views.action_mask[...] = True
    layout.seal(views, memoryview(buffer))
    assert INSPECTOR.find_error(layout.load(memoryview(bytes(buffer)))) is None


class _Game(gym.Env[Any, Any]):
    """Ends by truncation and termination, in turn, and masks its actions."""

    def __init__(self, masked: bool) -> None:
        inner = gym.spaces.Dict({"kind": gym.spaces.Discrete(3, start=1), "vector": gym.spaces.Box(-1, 1, (2,), np.float32)})
        self._masked = masked
        self.observation_space = inner
        if masked:
            self.observation_space = gym.spaces.Dict({**inner.spaces, "action_mask": gym.spaces.MultiBinary(3)})
        self.action_space = gym.spaces.Discrete(3, start=-1)
        self._t = self._games = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self._games = 0, self._games + 1
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert not self._masked or self._seen()["action_mask"][int(action) + 1]
        self._t += 1
        over = self._t >= 3 + self._games % 3
        return self._seen(), 1.0, over and bool(self._games % 2), over and not self._games % 2, {}

    def _seen(self) -> Any:
        seen = {"kind": 1 + self._t % 3, "vector": np.full(2, self._t / 10, np.float32)}
        return seen | ({"action_mask": np.array([self._t % 2, 1, 0], np.int8)} if self._masked else {})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("recurrent", [False, True])
def test_everything_that_a_sampler_writes_passes(masked: bool, same_step: bool, recurrent: bool) -> None:
    def make() -> gym.Env[Any, Any]:
        return _Game(masked)

    environments: Environments
    if same_step:
        environments = VectorEnvironments("game", SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
    else:
        environments = LoopEnvironments("game", [make() for _ in range(3)])
    environments.reset(0)
    torch.manual_seed(0)
    network = NetworkConfig(fcnet_hiddens=(8,), core="lstm" if recurrent else None, cell_size=4, max_seq_len=4)
    policy = Policy(environments.observation_space, environments.action_space, network)
    spec = segment_spec(policy, environments, 9)
    memory = LocalMemory(spec, 3, 1)
    sampler = Sampler(environments, _Source(policy), memory, 0)
    inspector = SegmentValidator(environments.observation_space, environments.action_space, spec)
    finals = 0
    for _ in range(6):
        assert sampler.step()
        block = memory.take(0)
        assert block is not None
        assert inspector.find_error(block) is None
        finals += block.finals
        memory.release(block)
    assert bool(finals) == same_step
    environments.close()


class _Source:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def newest(self) -> tuple[Policy, int]:
        return self._policy, 1


def test_plain_spaces_have_plain_names() -> None:
    observation, action = gym.spaces.Discrete(2), gym.spaces.Discrete(2, start=7)
    spec = SegmentSpec(steps=2, observation=array_spec(observation), action=array_spec(action))
    inspector, block = SegmentValidator(observation, action, spec), Segments.empty(spec, 1)
    assert inspector.find_error(block) is None
    block.action[0, 0] = 2
    assert inspector.find_error(block) == "action is out of range"
    block.observation[0, 0] = 2
    assert inspector.find_error(block) == "observation is out of range"
    assert map_tree(np.shape, block.action_mask) == (3, 1, 0)


def test_steps_that_were_never_written_may_be_zero_and_nothing_else() -> None:
    observation = gym.spaces.Discrete(3, start=5)
    spec = SegmentSpec(steps=3, observation=array_spec(observation), action=array_spec(observation, "action"))
    inspector, block = SegmentValidator(observation, gym.spaces.Discrete(3), spec), Segments.empty(spec, 1)
    block.valid[0], block.observation[:2] = True, 6
    assert inspector.find_error(block) is None
    block.observation[3] = 2
    assert inspector.find_error(block) == "observation is out of range"
    block.observation[3], block.observation[1] = 0, 0  # the bootstrap observation of the step before
    assert inspector.find_error(block) == "observation is out of range"
