"""IMPALA: its loss against a plain restatement, that nothing but experience changes it, and that it learns from old experience."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ludus
from ludus.algorithms.impala import IMPALA, IMPALAConfig, LossCoefficients
from ludus.algorithms.trajectories import Trajectories
from ludus.buffers.block_replay import BlockReplay
from ludus.config.validation import parse_algorithm_config
from ludus.core.types import Segments
from ludus.errors import ConfigError, TrainingDiverged
from tests.algorithms.sampled import Sampled, disturbed, made, padded
from tests.algorithms.test_returns import vtrace_by_definition
from tests.tools import network_of

LSTM = {"core": "lstm", "cell_size": 8, "max_seq_len": 4}


def weights_after(run: str, source: Sampled, block: Segments, **settings: Any) -> dict[str, Any]:
    """What the policy would be after one update from a block; it is left as it was."""
    before = source.policy.weights()
    algorithm = made(run, source.policy, **settings)
    algorithm.learn(block, 0)
    after = source.policy.weights()
    source.policy.load_weights(before)
    return after


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-6) -> None:
    for name, value in one.items():
        assert other[name] == pytest.approx(value, abs=tolerance), name


def test_the_loss_is_the_papers_sum_over_steps() -> None:
    """Two episodes side by side, one cut off, one over: all numbers worked out step by step in plain Python."""
    source = Sampled("CartPole-v1", 2, 6)
    block = source.block()
    block.terminated[5, 1] = True
    disturbed(source.policy, 0.2)
    settings = {"vtrace_clip_rho_threshold": 1.1, "vtrace_clip_c_threshold": 0.9, "vtrace_clip_pg_rho_threshold": 1.3}
    algorithm = made("IMPALA", source.policy, normalize_advantage=False, gamma=0.9, vf_loss_coeff=0.7, **settings)
    assert isinstance(algorithm, IMPALA)
    loss, numbers = algorithm.loss(source.policy, Trajectories.from_segments(block), LossCoefficients(entropy_coeff=0.05))
    total, ratios = 0.0, []
    with torch.no_grad():
        outputs, value, _ = source.policy.network(torch.from_numpy(block.observation), (), None)
    for b in range(2):
        log_p = outputs[:6, b].log_softmax(-1)
        taken = log_p.gather(-1, torch.from_numpy(block.action[:, b, None])).squeeze(-1)
        ratio = (taken - torch.from_numpy(block.log_prob[:, b])).exp().tolist()
        known = (ratio, block.reward[:, b].tolist(), value[:, b].tolist(), b == 1)
        target, advantage = vtrace_by_definition(*known, 0.9, 1.0, (1.1, 0.9))
        for t in range(6):
            entropy = -float((log_p[t].exp() * log_p[t]).sum())
            total += -min(1.3, ratio[t]) * float(taken[t]) * advantage[t]
            total += 0.7 * (target[t] - float(value[t, b])) ** 2 - 0.05 * entropy
        ratios += ratio
    assert float(loss.detach()) == pytest.approx(total / 12, rel=1e-4)
    assert float(numbers["rho_mean"]) == pytest.approx(np.mean(ratios), rel=1e-5)
    assert float(numbers["rho_clipped"]) == pytest.approx(np.mean(np.array(ratios) > 1.1))
    assert max(ratios) > 1.3, "every bound was reached"
    source.close()


@pytest.mark.parametrize("run", ["IMPALA", "APPO"])
@pytest.mark.parametrize("network", [{}, LSTM], ids=["mlp", "lstm"])
@pytest.mark.parametrize("extra", [3, 4])
def test_padding_changes_nothing(run: str, network: dict[str, Any], extra: int) -> None:
    source = Sampled("CartPole-v1", 6, 12, **network)
    source.block()
    block = source.block()
    block.valid[7:, 3] = False
    block.terminated[6, 3] = block.truncated[6, 3] = False
    disturbed(source.policy)
    settings = {"num_epochs": 2}
    assert_same(weights_after(run, source, block, **settings), weights_after(run, source, padded(block, extra), **settings), 2e-6)
    source.close()


@pytest.mark.parametrize("run", ["IMPALA", "APPO"])
@pytest.mark.parametrize("network", [{}, LSTM], ids=["mlp", "lstm"])
def test_threads_share_a_gradient_without_changing_it(run: str, network: dict[str, Any]) -> None:
    source = Sampled("tests.games:endless_same_step", 7, 12, **network)
    block = source.block()
    disturbed(source.policy)
    settings = {"num_epochs": 2, "minibatch_size": 48}
    one, three = (weights_after(run, source, block, learner_threads=n, **settings) for n in (1, 3))
    assert_same(one, three, 1e-5)
    assert any((value != source.policy.weights()[name]).any() for name, value in one.items())
    source.close()


@pytest.mark.parametrize("run", ["IMPALA", "APPO"])
@pytest.mark.parametrize("network", [{}, LSTM], ids=["mlp", "lstm"])
def test_a_block_without_a_valid_step_teaches_nothing(run: str, network: dict[str, Any]) -> None:
    source = Sampled("CartPole-v1", 3, 8, **network)
    block = source.block()
    block.valid[:] = False
    before = source.policy.weights()
    assert made(run, source.policy).learn(block, 0) == {"epochs": 0.0}
    assert_same(before, source.policy.weights(), 0.0)
    source.close()


@pytest.mark.parametrize("run", ["IMPALA", "APPO"])
def test_not_a_number_stops_the_update_before_it_changes_anything(run: str) -> None:
    source = Sampled("CartPole-v1", 4, 8)
    block = source.block()
    block.reward[3, 2] = np.nan
    before = source.policy.weights()
    with pytest.raises(TrainingDiverged, match=r"gradient became nan.*reward min.*not finite.*Lower lr"):
        made(run, source.policy).learn(block, 0)
    assert_same(before, source.policy.weights(), 0.0)
    source.close()


def test_the_scale_of_rewards_leaves_the_policy_gradient_alone() -> None:
    """Advantages are brought to one scale, by the values that were recorded: of ten times the rewards no more is heard."""
    source = Sampled("CartPole-v1", 8, 16)
    block = source.block()
    disturbed(source.policy, 0.3)
    losses = []
    for scale in (1.0, 10.0):
        block.reward *= scale
        block.value *= scale
        algorithm = made("IMPALA", source.policy, vf_loss_coeff=0.0, lr=0.0)
        with torch.no_grad():
            network_of(source.policy).value_head.weight.mul_(scale)
            network_of(source.policy).value_head.bias.mul_(scale)
        losses.append(algorithm.learn(block, 0)["policy_loss"])
    assert abs(losses[0]) > 0.01
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    source.close()


def test_filters_follow_the_fresh_observations_only() -> None:
    source = Sampled("Pendulum-v1", 4, 8, normalise=True)
    algorithm = made("IMPALA", source.policy, replay_proportion=2.0, normalize_reward=True)
    seen = []
    for _ in range(3):
        block = source.block()
        seen.append(block.observation[:-1][block.valid])
        algorithm.learn(block, 0)
    norm = source.policy.network.norm
    assert norm is not None
    assert norm.mean.numpy() == pytest.approx(np.concatenate(seen).mean(axis=0), abs=1e-5)
    assert float(norm.count) == sum(map(len, seen))
    source.close()


# -- replay -------------------------------------------------------------------------------------------------------------


def test_replay_proportion_sets_the_number_of_replayed_batches() -> None:
    source = Sampled("CartPole-v1", 4, 8)
    algorithm = made("IMPALA", source.policy, replay_proportion=1.5, replay_buffer_num_slots=2)
    assert isinstance(algorithm, IMPALA)
    blocks, updates = [], []
    for _ in range(5):
        block = source.block()
        blocks.append(block.steps)
        metrics = algorithm.learn(block, 0)
        updates.append(algorithm.optimizer.updates)
    assert np.diff([0, *updates]).tolist() == [1, 2, 3, 2, 3], "one for the batch itself, and 1.5 on average for old ones"
    assert metrics["replayed"] > 0
    replay = algorithm.replay
    assert replay is not None
    assert (len(replay), replay.added, replay.evicted) == (2, 5, 3)
    assert metrics["replay_bytes"] == replay.nbytes
    source.close()


def test_a_replay_buffer_keeps_copies_within_its_bytes() -> None:
    source = Sampled("CartPole-v1", 4, 8)
    block = source.block()
    size = block.nbytes
    replay = BlockReplay(10, int(2.5 * size))
    for number in range(4):
        block.reward[:] = number
        assert replay.add(block)
    assert [float(kept.reward[0, 0]) for kept in (replay[0], replay[1])] == [2.0, 3.0]
    assert len(replay) == 2
    assert replay.nbytes <= 2.5 * size
    small = BlockReplay(10, size - 1)
    assert not small.add(block)
    assert (len(small), small.refused, small.nbytes) == (0, 1, 0)
    source.close()


# -- config -------------------------------------------------------------------------------------------------------------


def test_samplers_do_not_wait_by_default() -> None:
    config = parse_algorithm_config(IMPALAConfig, {})
    assert config.sampling == "async"
    assert parse_algorithm_config(IMPALAConfig, {"sampling": "sync"}).sampling == "sync"
    with pytest.raises(ConfigError, match="vtrace_clip_rho_threshold"):
        parse_algorithm_config(IMPALAConfig, {"vtrace_clip_rho_treshold": 1.0})


# -- learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("run", ["IMPALA", "APPO"])
def test_cartpole_is_balanced(tmp_path: Any, run: str, seed: int) -> None:
    result = ludus.train(
        "CartPole-v1",
        run=run,
        stop={"timesteps": 100_000},
        local_dir=tmp_path,
        seed=seed,
        num_envs=32,
        train_batch_size=512,
        lr=2e-3,
        evaluation_duration=20,
    )
    assert result.metrics["episode_return_mean"] >= 195
    assert result.metrics["evaluation/return_mean"] >= 195
