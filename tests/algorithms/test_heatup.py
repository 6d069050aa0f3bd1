"""The heat-up: steps before the first update. Nothing is learned from them, and statistics take them in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ludus.algorithms.appo import APPO, APPOConfig
from ludus.algorithms.dqn import DQN, DQNConfig
from ludus.algorithms.impala import IMPALA, IMPALAConfig
from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.core.types import Segments
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import VALUES, Policy
from tests.experiments import small

KINDS: list[tuple[Any, Any]] = [(PPO, PPOConfig), (IMPALA, IMPALAConfig), (APPO, APPOConfig)]
STEPS = 32  # of a block: 8 steps of 4 rows


def made(kind: Any, config: Any, **settings: Any) -> Any:
    policy = Policy(small.OBSERVATION, small.ACTION, NetworkConfig(fcnet_hiddens=(8,)), True)
    return kind(policy, config(num_epochs=1, **settings), 0)


def parameters(algorithm: Any) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in algorithm.policy.parameters())


def with_ends(seed: int, ends: int) -> Segments:
    block = small.make_segments(seed)
    block.terminated[3, :ends] = True
    return block


def changes(algorithm: Any, blocks: list[Segments]) -> list[bool]:
    """Whether each block in turn changed what is learned."""
    out = []
    for k, block in enumerate(blocks):
        before = parameters(algorithm)
        algorithm.learn(block, k * STEPS)
        out.append(parameters(algorithm) != before)
    return out


@pytest.mark.parametrize(("kind", "config"), KINDS)
@pytest.mark.parametrize(
    ("steps", "learned"), [(0, [True] * 4), (1, [False, True, True, True]), (64, [False, False, True, True])]
)
def test_batches_that_begin_in_the_heat_up_are_not_learned_from(kind: Any, config: Any, steps: int, learned: list[bool]) -> None:
    algorithm = made(kind, config, num_steps_sampled_before_learning_starts=steps)
    assert changes(algorithm, [small.make_segments(k) for k in range(4)]) == learned


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_a_heat_up_by_episodes_ends_with_the_batch_in_which_the_last_one_ends(kind: Any, config: Any) -> None:
    algorithm = made(kind, config, heatup_episodes=3)
    assert changes(algorithm, [with_ends(k, ends) for k, ends in enumerate([0, 2, 1, 0, 0])]) == [False] * 3 + [True] * 2


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_statistics_of_observations_and_rewards_take_the_heat_up_in(kind: Any, config: Any) -> None:
    heated = made(kind, config, num_steps_sampled_before_learning_starts=STEPS, normalize_reward=True)
    learned = made(kind, config, normalize_reward=True)
    block = small.make_segments(0)
    for algorithm in (heated, learned):
        algorithm.learn(block, 0)
    seen = block.observation[:8].reshape(-1, 4)
    statistics = {name: array for name, array in heated.policy.weights().items() if "norm" in name}
    assert any(np.allclose(array, seen.mean(0), atol=1e-4) for array in statistics.values())
    assert {name: array.tobytes() for name, array in statistics.items()} == {
        name: array.tobytes() for name, array in learned.policy.weights().items() if "norm" in name
    }
    assert heated.reward_scale.state() == learned.reward_scale.state()


def test_warm_up_episodes_survive_a_resume_and_reset_in_a_new_run() -> None:
    first = made(PPO, PPOConfig, heatup_episodes=3)
    assert changes(first, [with_ends(0, 2)]) == [False]
    resumed, new = made(PPO, PPOConfig, heatup_episodes=3), made(PPO, PPOConfig, heatup_episodes=3)
    for other in (resumed, new):
        other.load_state(*first.state())
    before = parameters(resumed)
    resumed.learn(with_ends(1, 1), STEPS)
    assert parameters(resumed) == before
    resumed.learn(with_ends(2, 0), 2 * STEPS)
    assert parameters(resumed) != before
    assert changes(new, [with_ends(0, 2), with_ends(1, 1), with_ends(2, 0)]) == [False, False, True]


def test_dqn_stores_what_the_heat_up_brings() -> None:
    policy = Policy(small.OBSERVATION, small.ACTION, NetworkConfig(fcnet_hiddens=(8,)), False, VALUES)
    config = DQNConfig(num_steps_sampled_before_learning_starts=0, heatup_episodes=2, training_intensity=1, train_batch_size=16)
    algorithm = DQN(policy, config, 0)
    assert changes(algorithm, [with_ends(0, 1), with_ends(1, 1), with_ends(2, 0)]) == [False, False, True]
    assert algorithm.replay.added >= 2 * STEPS
