"""Policies that choose by what actions are worth: exploring, masks, exporting."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.models.distributions import EpsilonGreedy, make_q_distribution
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import VALUES, Policy


def greedy(epsilon: float, n: int = 4) -> EpsilonGreedy:
    made = EpsilonGreedy(n)
    made.epsilon.fill_(epsilon)
    return made


def test_without_noise_the_best_allowed_action_is_taken() -> None:
    worth = torch.tensor([[1.0, 3.0, 2.0, 0.0], [5.0, 1.0, 2.0, 3.0]])
    mask = torch.tensor([[True, False, True, True], [True, True, True, True]])
    for noise in (None, torch.zeros(2, 5)):
        assert greedy(1.0).sample(worth, None, noise)[0].tolist() == [1, 0]
        assert greedy(1.0).sample(worth, mask, noise)[0].tolist() == [2, 0]


def test_action_frequencies_match_their_log_probability() -> None:
    """20,000 draws for each of two rows, one of them masked: within five deviations of ε/n, and 1 − ε + ε/n for the best."""
    chooser, draws = greedy(0.3), 20_000
    worth = torch.tensor([[0.0, 2.0, 1.0, -1.0], [9.0, 1.0, 5.0, 3.0]]).repeat_interleave(draws, 0)
    mask = torch.tensor([[True] * 4, [False, True, True, True]]).repeat_interleave(draws, 0)
    noise = chooser.noise((2 * draws,), torch.Generator().manual_seed(0))
    action, log_prob = chooser.sample(worth, mask, noise)
    again, entropy = chooser.evaluate(worth, action, mask)
    assert torch.equal(log_prob, again)
    for row, (best, options) in enumerate([(1, [0, 1, 2, 3]), (2, [1, 2, 3])]):
        taken, said = action[row * draws : (row + 1) * draws], log_prob[row * draws : (row + 1) * draws]
        shares = np.bincount(taken.numpy(), minlength=4) / draws
        expected = np.array([0.3 / len(options) if a in options else 0.0 for a in range(4)])
        expected[best] += 0.7
        assert shares == pytest.approx(expected, abs=5 * math.sqrt(0.25 / draws))
        assert said.exp().numpy() == pytest.approx(expected[taken.numpy()], rel=1e-5)
        assert float(entropy[row * draws]) == pytest.approx(-sum(p * math.log(p) for p in expected if p), rel=1e-5)


def test_less_noise_explores_less() -> None:
    """As a temperature does: half of it leaves half a chance of nothing, since what is above 1 − ε is rare."""
    chooser = greedy(0.5)
    worth = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(20_000, 4)
    noise = chooser.noise((20_000,), torch.Generator().manual_seed(0))
    wandered = [float((chooser.sample(worth, None, noise * t)[0] != 0).float().mean()) for t in (0.0, 0.6, 1.0)]
    assert wandered[0] == 0.0
    assert wandered[0] < wandered[1] < wandered[2] == pytest.approx(0.375, abs=0.02)


def test_a_greedy_policy_has_finite_log_probabilities() -> None:
    _, log_prob = greedy(0.0).sample(torch.randn(5, 4), None, None)
    other, _ = greedy(0.0).evaluate(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([2]), None)
    assert log_prob.tolist() == [0.0] * 5
    assert torch.isfinite(other).all()


def test_actions_are_shifted_to_where_their_space_begins() -> None:
    chooser = make_q_distribution(gym.spaces.Discrete(3, start=-1))
    assert chooser.to_environment(np.array([0, 2])).tolist() == [-1, 1]


def test_the_state_value_is_that_of_the_best_allowed_action() -> None:
    policy = Policy(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3), NetworkConfig(dueling=True), kind=VALUES)
    seen, mask = torch.randn(7, 4), torch.tensor([[True, False, True]]).expand(7, 3)
    worth = policy.action_values(seen)
    _, _, value, _ = policy.step(seen, mask=mask)
    assert torch.allclose(value, torch.where(mask, worth, -torch.inf).amax(1))
    assert torch.allclose(policy.value(seen), worth.amax(1))


@pytest.mark.parametrize("dueling", [True, pytest.param(False, marks=pytest.mark.long)])
def test_an_exported_policy_decides_the_same(dueling: bool) -> None:
    """Greedily without noise, and exploring as often with it: ε is a weight like any other."""
    pytest.importorskip("onnxruntime")
    from ludus.models.export.onnx_export import export_policy, with_weights
    from ludus.models.export.parity import verify
    from ludus.models.inference.onnx_policy import OnnxPolicy

    torch.manual_seed(0)
    policy = Policy(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3), NetworkConfig(dueling=dueling), kind=VALUES)
    assert isinstance(policy.distribution, EpsilonGreedy)
    policy.distribution.epsilon.fill_(0.4)
    data = export_policy(policy)
    report = verify(policy, data)
    assert report.passed, report
    exported = OnnxPolicy(data)
    noise = exported.draw_noise(64, torch.Generator().manual_seed(1))
    seen = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    assert exported.act(seen, (), None, noise).action.tolist() == policy.act(seen, (), None, noise).action.tolist()
    policy.distribution.epsilon.fill_(0.0)
    newer = OnnxPolicy(with_weights(data, policy.weights()))
    assert newer.act(seen, (), None, noise).action.tolist() == exported.act(seen).action.tolist()
