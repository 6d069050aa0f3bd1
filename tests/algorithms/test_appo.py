"""APPO: its surrogate, its target policy, what a resumed run needs, and that it learns from experience several versions old."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import ludus
from ludus.algorithms.appo import APPO, APPOConfig
from ludus.algorithms.impala import LossCoefficients
from ludus.config.validation import parse_algorithm_config
from ludus.core.types import Segments
from tests.algorithms.sampled import Sampled, disturbed, made
from tests.algorithms.test_impala import assert_same, weights_after
from tests.algorithms.test_returns import vtrace_by_definition


def appo(source: Sampled, **settings: Any) -> APPO:
    algorithm = made("APPO", source.policy, **settings)
    assert isinstance(algorithm, APPO)
    return algorithm


def log_probs(source: Sampled, block: Segments) -> tuple[Any, Any, Any]:
    """(log-probability of what was done, value, entropy) [T, B] by the plain definition."""
    with torch.no_grad():
        outputs, value, _ = source.policy.network(torch.from_numpy(block.observation), (), None)
    log_p = outputs[:-1].log_softmax(-1)
    taken = log_p.gather(-1, torch.from_numpy(block.action[..., None])).squeeze(-1)
    return taken.numpy(), value.numpy(), -(log_p.exp() * log_p).sum(-1).numpy()


def test_the_loss_is_the_surrogate_around_the_target_step_by_step() -> None:
    source = Sampled("CartPole-v1", 2, 6)
    block = source.block()
    settings: dict[str, Any] = {"gamma": 0.9, "lambda": 0.8, "clip_param": 0.1, "vf_loss_coeff": 0.7, "use_kl_loss": True}
    disturbed(source.policy, 0.1, seed=1)
    algorithm = appo(source, target_network_update_freq=3, normalize_advantage=False, kl_coeff=0.3, **settings)
    near, _, _ = log_probs(source, block)  # the target is the policy as it was when the algorithm began …
    disturbed(source.policy, 0.1, seed=2)  # … and has learned since
    now, value, entropy = log_probs(source, block)
    loss, numbers = algorithm.loss(source.policy, algorithm.batch(block), LossCoefficients(entropy_coeff=0.05))
    total, clipped = 0.0, 0
    for b in range(2):
        rho = np.exp(near[:, b] - block.log_prob[:, b]).tolist()
        over = bool(block.terminated[-1, b])
        known = (rho, block.reward[:, b].tolist(), value[:, b].tolist(), over)
        target, advantage = vtrace_by_definition(*known, 0.9, 0.8, (1.0, 1.0))
        for t in range(6):
            ratio, a = math.exp(now[t, b] - near[t, b]), min(1.0, rho[t]) * advantage[t]
            total += -min(ratio * a, min(max(ratio, 0.9), 1.1) * a)
            total += 0.7 * (target[t] - value[t, b]) ** 2 - 0.05 * entropy[t, b]
            total += 0.3 * (ratio - 1 - math.log(ratio))
            clipped += not 0.9 <= ratio <= 1.1
    assert float(loss.detach()) == pytest.approx(total / 12, rel=1e-4)
    assert float(numbers["clip_fraction"]) == pytest.approx(clipped / 12)
    assert clipped > 0
    source.close()


def test_a_single_on_policy_pass_is_never_clipped_and_needs_no_target() -> None:
    source = Sampled("CartPole-v1", 6, 12)
    metrics = appo(source).learn(source.block(), 0)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["rho_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["rho_clipped"] == metrics["clip_fraction"] == metrics["target_kl"] == 0
    source.close()


def test_a_target_that_is_the_policy_itself_changes_nothing() -> None:
    """Frequency 1 takes the first pass for the target's; a copy of the policy, refreshed in time, must say the same."""
    source = Sampled("CartPole-v1", 6, 12)
    block = source.block()
    disturbed(source.policy)
    for settings in ({}, {"num_epochs": 3, "minibatch_size": 24}):
        implied = weights_after("APPO", source, block, **settings)
        explicit = weights_after("APPO", source, block, target_network_update_freq=100, **settings)
        assert_same(implied, explicit, 1e-6)
    source.close()


def test_the_target_is_updated_at_its_frequency_by_tau() -> None:
    source = Sampled("CartPole-v1", 4, 8, normalise=True)
    algorithm = appo(source, target_network_update_freq=2, tau=0.5)
    target = algorithm.target
    assert target is not None
    begun = target.weights()
    seen = []
    for expected_same in (True, True, False):
        block = source.block()
        seen.append(block.steps)
        algorithm.learn(block, 0)
        same = all((target.weights()[name] == value).all() for name, value in begun.items())
        assert same == expected_same
    norm = target.network.norm
    assert norm is not None
    assert float(norm.count) == seen[0] + seen[1], "the filter is the policy's, as of the refreshment"
    source.close()


def test_the_target_moves_half_the_way_with_a_tau_of_one_half() -> None:
    source = Sampled("CartPole-v1", 4, 8)
    algorithm = appo(source, tau=0.5)
    before = source.policy.weights()
    algorithm.learn(source.block(), 0)
    after = source.policy.weights()
    algorithm.learn(source.block(), 0)
    assert algorithm.target is not None
    for name, value in algorithm.target.weights().items():
        assert value == pytest.approx((before[name] + after[name]) / 2, abs=1e-6), name
    source.close()


def test_without_vtrace_all_steps_count_as_on_policy() -> None:
    source = Sampled("CartPole-v1", 6, 12)
    block = source.block()
    disturbed(source.policy, 0.3)
    metrics = appo(source, vtrace=False, clip_param=0.1).learn(block, 0)
    assert metrics["rho_mean"] == 1.0
    assert metrics["kl"] == pytest.approx(metrics["target_kl"], rel=1e-4), "the policy that acted is the one to stay near"
    assert metrics["clip_fraction"] > 0
    source.close()


def test_the_weight_of_the_penalty_follows_the_divergence() -> None:
    source = Sampled("CartPole-v1", 6, 12)
    eager = appo(source, use_kl_loss=True, num_epochs=10, lr=0.03, kl_target=1e-3)
    assert eager.learn(source.block(), 0)["kl_coeff"] == 1.5
    lazy = appo(source, use_kl_loss=True, num_epochs=2, lr=1e-6, kl_target=1e-3)
    assert lazy.learn(source.block(), 0)["kl_coeff"] == 0.5
    source.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"use_kl_loss": True}, 0.5), ({"use_kl_loss": True, "kl_coeff": 3.0}, 3.0), ({"use_kl_loss": False}, 0.0)],
    ids=["the same", "another weight", "none"],
)
def test_a_penalty_goes_on_only_if_it_is_configured_as_before(settings: dict[str, Any], expected: float) -> None:
    source = Sampled("CartPole-v1", 6, 12)
    before = appo(source, use_kl_loss=True, lr=1e-9)
    before.learn(source.block(), 0)
    after = appo(source, **settings)
    after.load_state(*before.state())
    assert before.penalty.coeff == 0.5
    assert after.penalty.coeff == expected
    source.close()


@pytest.mark.parametrize("network", [{}, {"core": "lstm", "cell_size": 8, "max_seq_len": 4}], ids=["mlp", "lstm"])
def test_a_resumed_run_goes_on_exactly_where_it_was(network: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"target_network_update_freq": 3, "tau": 0.7, "use_kl_loss": True, "num_epochs": 2}
    settings |= {"minibatch_size": 24, "normalize_reward": True}
    one, other = (Sampled("CartPole-v1", 6, 12, normalise=True, **network) for _ in range(2))
    first, blocks = appo(one, **settings), []
    for _ in range(4):
        first.learn(one.block(), 0)
    arrays, plain = first.state()
    other.policy.load_weights(one.policy.weights())
    second = appo(other, **settings)
    second.load_state({name: value.copy() for name, value in arrays.items()}, plain)
    assert first.reward_scale is not None
    first.reward_scale.load_state(plain["reward_scale"])  # environments begin anew, and their running returns with them
    for _ in range(5):
        blocks.append(one.block())
        metrics = [algorithm.learn(blocks[-1], 0) for algorithm in (first, second)]
        assert metrics[0] == metrics[1]
        assert_same(one.policy.weights(), other.policy.weights(), 0.0)
    for source in (one, other):
        source.close()


def test_a_run_that_had_no_target_gets_one_when_it_is_resumed_with_another_frequency() -> None:
    source = Sampled("CartPole-v1", 4, 8)
    first = appo(source)
    first.learn(source.block(), 0)
    second = appo(source, target_network_update_freq=4)
    disturbed(source.policy)
    second.load_state(*first.state())
    assert second.target is not None
    assert_same(source.policy.weights(), second.target.weights(), 0.0)
    source.close()


def test_keys_have_the_names_that_rllib_users_know() -> None:
    given = {"num_sgd_iter": 2, "vtrace": True, "vtrace_clip_rho_threshold": 1.0, "vtrace_clip_pg_rho_threshold": 1.0}
    given |= {"clip_param": 0.4, "use_kl_loss": True, "kl_coeff": 0.5, "kl_target": 0.02, "tau": 0.9, "grad_clip": 40.0}
    given |= {"target_network_update_freq": 4, "replay_proportion": 0.5, "replay_buffer_num_slots": 10, "lr": 5e-4}
    given |= {"entropy_coeff": 0.01, "vf_loss_coeff": 0.5}
    config = parse_algorithm_config(APPOConfig, given)
    assert isinstance(config, APPOConfig)
    assert (config.num_epochs, config.target_network_update_freq, config.sampling) == (2, 4, "async")


# -- learning -----------------------------------------------------------------------------------------------------------


def test_masks_memory_and_hybrid_actions_work_in_one_policy(tmp_path: Any) -> None:
    """Guessing the door gives 0.5 and the aim at most 0.5 without memory: 1.8 of 2 needs all three."""
    result = ludus.train(
        "tests.games:remember_and_aim",
        run="APPO",
        stop={"timesteps": 60_000},
        local_dir=tmp_path,
        seed=1,
        num_envs=32,
        gamma=1.0,
        lr=3e-3,
        train_batch_size=1024,
        minibatch_size=256,
        num_epochs=2,
        evaluation_duration=100,
        model={"core": "lstm", "cell_size": 32, "max_seq_len": 8},
    )
    assert result.metrics["evaluation/return_mean"] >= 1.8


def test_pictures_and_shifted_actions_are_learned(tmp_path: Any) -> None:
    result = ludus.train(
        "tests.games:BrightSide",
        run="APPO",
        stop={"timesteps": 12_000},
        local_dir=tmp_path,
        seed=1,
        num_envs=32,
        train_batch_size=128,
        lr=1e-3,
        evaluation_duration=100,
    )
    assert result.metrics["evaluation/return_mean"] >= 0.98


@pytest.mark.parametrize("run", ["APPO", "IMPALA"])
def test_experience_that_is_three_versions_old_is_learned_from(run: str) -> None:
    """The cart is balanced for 195 steps although every block was made by the policy of three updates ago."""
    source = Sampled("CartPole-v1", 32, 16, seed=1, lag=3)
    algorithm = made(run, source.policy, lr=2e-3)
    lags = []
    for update in range(250):
        block = source.block()
        lags.append(source.version - int(block.version.max()))
        algorithm.version = source.version
        metrics = algorithm.learn(block, 0)
        source.published()
        if update > 50 and np.mean(source.returns) >= 195:
            break
    assert set(lags[3:]) == {3}
    assert metrics["kl"] > 0
    assert np.mean(source.returns) >= 195
    source.close()


def test_a_checkpoint_holds_the_target(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"target_network_update_freq": 3, "observation_filter": "MeanStdFilter", "num_envs": 4}
    result = ludus.train(
        "CartPole-v1",
        run="APPO",
        stop={"iterations": 4},
        local_dir=tmp_path,
        train_batch_size=64,
        evaluation_duration=0,
        **settings,
    )
    again = ludus.resume(result.run_dir, stop={"iterations": 8})
    assert again.metrics["iterations"] == 8
    kept = sorted((result.run_dir / "checkpoints").glob("*/*.optimizer.safetensors"))
    with safe_open(kept[-1], framework="np") as file:
        names = set(file.keys())
    assert {f"target.{name}" for name in again.agent.policy.weights()} <= names
