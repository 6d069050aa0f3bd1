"""The sampler writes what happened, where it belongs, and nothing else."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from ludus.core.types import Segments, SegmentSpec
from ludus.envs.vector_env import Environments, LoopEnvironments, VectorEnvironments
from ludus.errors import EnvironmentFault
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.sampler import EpisodeTally, Sampler, segment_spec
from ludus.transport.local import LocalMemory

NEXT, SAME = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


class Counter(gym.Env[Any, Any]):
    """Shows (episode, step); rewards the step number; ends after 2, 3, 4, … steps, by truncation when that is odd."""

    observation_space = gym.spaces.Box(0, 1000, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self) -> None:
        self.episode, self.t = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == 2 + self.episode
        odd = self.episode % 2 == 1
        return np.array([self.episode, self.t], np.float32), float(self.t), over and not odd, over and odd, {}


class Fixed:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def newest(self) -> tuple[Policy, int]:
        return self.policy, 7


def sampled(environments: Environments, steps: int, blocks: int = 1, **network: Any) -> tuple[list[Segments], Policy]:
    policy = Policy(environments.observation_space, environments.action_space, NetworkConfig(**network))
    environments.reset(0)
    spec = segment_spec(policy, environments, steps)
    memory = LocalMemory(spec, environments.num, blocks)
    sampler = Sampler(environments, Fixed(policy), memory, seed=0)
    for _ in range(blocks):
        assert sampler.step()
    assert not sampler.step(), "a full memory pushes back"
    taken = [memory.take(0) for _ in range(blocks)]
    return [block for block in taken if block is not None], policy


def counters(mode: AutoresetMode | None) -> Environments:
    if mode is None:
        return LoopEnvironments("counters", [Counter() for _ in range(2)])
    return VectorEnvironments("counters", SyncVectorEnv([Counter, Counter], autoreset_mode=mode))


@pytest.mark.parametrize("mode", [None, NEXT, SAME])
def test_valid_rows_are_the_steps_that_the_environment_made(mode: AutoresetMode | None) -> None:
    (block,), _ = sampled(counters(mode), 20)
    kept = block.valid[:, 0]
    episode, step = block.observation[:-1, 0][kept].T
    starts = 1 if mode is not None else 2  # the sampler reset once more than the first look at the environment
    length = 0
    for i, reward in enumerate(block.reward[:, 0][kept]):
        assert reward == step[i] + 1, "a reward stands in the row of the action that earned it"
        assert step[i] == length
        length = 0 if block.terminated[:, 0][kept][i] or block.truncated[:, 0][kept][i] else length + 1
    assert episode[0] == starts or episode[0] == 1
    assert (np.diff(episode) >= 0).all()
    assert block.version[0, 0] == 7


@pytest.mark.parametrize("mode", [None, NEXT])
def test_the_row_in_which_an_environment_resets_is_not_valid_and_earns_nothing(mode: AutoresetMode | None) -> None:
    (block,), _ = sampled(counters(mode), 20)
    over = block.terminated | block.truncated
    assert (~block.valid[1:] == over[:-1]).all()
    assert (block.reward[~block.valid] == 0).all()
    assert (block.first[1:] == ~block.valid).all(), "the row after a reset row starts an episode"
    assert block.finals == 0


def test_same_step_resets_keep_the_final_observation_of_truncated_episodes_only() -> None:
    (block,), policy = sampled(counters(SAME), 20)
    assert block.valid.all()
    cut = np.argwhere(block.truncated)
    assert sorted(map(tuple, block.final_at[: block.finals].tolist())) == sorted(map(tuple, cut.tolist()))
    for (t, b), observation, value in zip(
        block.final_at, block.final_observation, block.final_value[: block.finals], strict=False
    ):
        assert observation[1] == block.observation[t, b][1] + 1, "the state after the last action, not the next episode's first"
        with torch.inference_mode():
            assert value == pytest.approx(float(policy.value(torch.from_numpy(observation[None]))), abs=1e-5)


def test_episodes_are_counted_across_blocks() -> None:
    blocks, _ = sampled(counters(None), 7, blocks=6)
    returns = np.concatenate([b.episode_return for b in blocks])
    lengths = np.concatenate([b.episode_length for b in blocks])
    expected = (
        [2 + e for e in range(2, 2 + len(lengths) // 2)] if lengths[0] == 4 else [2 + e for e in range(1, 1 + len(lengths) // 2)]
    )
    assert sorted(lengths.tolist()) == sorted(expected * 2)
    assert returns.tolist() == [n * (n + 1) / 2 for n in lengths]


def test_tally_agrees_with_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    spec = SegmentSpec(9, observation=(), action=())
    tally, running, length = EpisodeTally(5), np.zeros(5), np.zeros(5, int)
    for _ in range(8):
        block = Segments.empty(spec, 5)
        block.reward[:] = rng.normal(size=(9, 5))
        block.valid[:] = rng.random((9, 5)) < 0.8
        block.terminated[:] = (rng.random((9, 5)) < 0.2) & block.valid
        expected: list[tuple[int, float, int]] = []
        for t in range(9):
            for b in range(5):
                running[b] += block.reward[t, b] * block.valid[t, b]
                length[b] += block.valid[t, b]
                if block.terminated[t, b]:
                    expected.append((t, running[b], length[b]))
                    running[b], length[b] = 0.0, 0
        returns, lengths = tally.take(block)
        assert returns == pytest.approx([r for _, r, _ in expected], abs=1e-5)
        assert lengths.tolist() == [n for _, _, n in expected]


def test_recorded_log_probabilities_and_values_are_those_of_the_policy() -> None:
    (block,), policy = sampled(counters(None), 12)
    observation = torch.from_numpy(block.observation[:-1]).flatten(0, 1)
    log_prob, _, value = policy.evaluate(observation, torch.from_numpy(block.action).flatten())
    assert log_prob.detach().numpy() == pytest.approx(block.log_prob.reshape(-1), abs=1e-5)
    assert value.detach().numpy() == pytest.approx(block.value[:-1].reshape(-1), abs=1e-5)
    last = policy.value(torch.from_numpy(block.observation[-1]))
    assert block.value[-1] == pytest.approx(last.detach().numpy(), abs=1e-5)


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("mode", [None, SAME])
def test_recurrent_state_is_kept_where_sequences_start(core: str, mode: AutoresetMode | None) -> None:
    blocks, policy = sampled(counters(mode), 12, blocks=2, core=core, cell_size=8, max_seq_len=4)
    for block in blocks:
        for s in range(3):
            rows = slice(4 * s, 4 * s + 4)
            log_prob, _, value = policy.evaluate(
                torch.from_numpy(block.observation[rows]),
                torch.from_numpy(block.action[rows]),
                state=tuple(torch.from_numpy(x[s]) for x in block.state),
                first=torch.from_numpy(block.first[rows]),
            )
            assert value.detach().numpy() == pytest.approx(block.value[rows], abs=1e-5)
            assert log_prob.detach().numpy() == pytest.approx(block.log_prob[rows], abs=1e-5)


def test_a_truncated_episode_that_finds_no_room_is_left_out_of_the_valid_steps() -> None:
    environments = counters(SAME)
    policy = Policy(environments.observation_space, environments.action_space)
    environments.reset(0)
    spec = segment_spec(policy, environments, 30)
    tight = SegmentSpec(**{**spec.__dict__, "finals": 1})
    memory = LocalMemory(tight, 2, 1)
    Sampler(environments, Fixed(policy), memory, seed=0).step()
    block = memory.take(0)
    assert block is not None
    assert block.finals == 1
    assert int((~block.valid).sum()) == int(block.truncated.sum()) - 1
    assert block.truncated[~block.valid].all()


class Broken(Counter):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return np.array([np.nan, 0], np.float32) if self.episode == 2 else observation, reward, *rest  # type: ignore[return-value]


def test_not_a_number_in_an_observation_names_environment_and_step() -> None:
    environments = LoopEnvironments("broken", [Counter(), Broken()])
    with pytest.raises(EnvironmentFault, match=r"Environment 1 of broken returned nan in its observation.*step \d+"):
        sampled(environments, 20)


class Huge(gym.Env[Any, Any]):
    """Shows and pays finite float64 numbers, of which one is too large for float32 after the first step."""

    def __init__(self, seen: float = 0.0, reward: float = 0.0) -> None:
        self.observation_space = gym.spaces.Dict({"speed": gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)})
        self.action_space = gym.spaces.Discrete(2)
        self._seen, self._reward = seen, reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {"speed": np.zeros(2)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"speed": np.array([0.0, self._seen])}, self._reward, False, False, {}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("huge", "said"),
    [
        (
            {"seen": 1e300},
            r"nvironment 1 of huge returned 1e\+300 in its observation 'speed' \(index \[1\]\) at step 1, .*too large",
        ),
        ({"seen": float("inf")}, r"nvironment 1 of huge returned inf in its observation 'speed' \(index \[1\]\) at step 1\."),
        ({"reward": -1e300}, r"nvironment 1 of huge.* returned the reward -1e\+300.*too large for float32"),
        ({"reward": float("inf")}, "nvironment 1 of huge.* returned the reward inf at step 0\\."),
    ],
)
@pytest.mark.parametrize("vector", [False, True])
def test_a_finite_number_too_large_for_float32_is_named_with_its_value(huge: Any, said: str, vector: bool) -> None:
    envs: Any = [Huge, lambda: Huge(**huge)]
    environments: Any = (
        VectorEnvironments("huge", gym.vector.SyncVectorEnv(envs))
        if vector
        else LoopEnvironments("huge", [make() for make in envs])
    )
    with pytest.raises(EnvironmentFault, match=said):
        sampled(environments, 5)


def test_a_reward_too_large_for_any_float_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="environment 0 of huge at step 1 returned the reward 1000"):
        sampled(LoopEnvironments("huge", [Huge(reward=10**400)]), 5)


def test_a_failing_environment_does_not_keep_its_block() -> None:
    environments = LoopEnvironments("broken", [Broken()])
    policy = Policy(environments.observation_space, environments.action_space)
    environments.reset(0)
    memory = LocalMemory(segment_spec(policy, environments, 20), 1, 1)
    with pytest.raises(EnvironmentFault):
        Sampler(environments, Fixed(policy), memory, seed=0).step()
    assert memory.take(0) is None
    assert memory.reserve(0) is not None


class Rooms(Counter):
    """Says it is in one of three rooms, and once that it is in the eighth."""

    observation_space = gym.spaces.Discrete(3)  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return 7 if self.episode == 3 else 1, *rest  # type: ignore[return-value]


def test_a_category_that_does_not_exist_is_named_before_it_reaches_a_network() -> None:
    with pytest.raises(EnvironmentFault, match=r"Environment 0 of rooms returned 7 in its observation at step \d+"):
        sampled(LoopEnvironments("rooms", [Rooms()]), 20)
