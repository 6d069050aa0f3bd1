"""PPO: its batch, its loss against a plain restatement, and that it learns games with known answers."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import ludus
from ludus.algorithms.ppo import PPO, PPOConfig
from ludus.algorithms.trajectories import Trajectories
from ludus.config.validation import parse_algorithm_config
from ludus.core.spaces import ArraySpec
from ludus.core.types import Segments, SegmentSpec
from ludus.errors import ConfigError, TrainingDiverged
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from tests.algorithms.sampled import Sampled, disturbed, made
from tests.algorithms.test_returns import vtrace_by_definition

OBSERVATIONS = gym.spaces.Box(-5, 5, (3,), np.float32)
ACTIONS = gym.spaces.Discrete(4)


def policy_for(core: str | None = None) -> Policy:
    torch.manual_seed(3)
    return Policy(OBSERVATIONS, ACTIONS, NetworkConfig(core=core, cell_size=8))


def ppo(policy: Policy, **settings: Any) -> PPO:
    config = parse_algorithm_config(PPOConfig, settings)
    assert isinstance(config, PPOConfig)
    return PPO(policy, config.model_copy(update={"learner_threads": settings.get("learner_threads", 1)}), seed=5)


def segments(policy: Policy, steps: int, rows: int, masked: bool = False, seed: int = 0) -> Segments:
    """Random experience with the policy's own probabilities and values."""
    rng = np.random.default_rng(seed)
    every = 4 if policy.recurrent else 0
    spec = SegmentSpec(
        steps,
        ArraySpec((3,), np.dtype(np.float32)),
        ArraySpec((), np.dtype(np.int64)),
        4 if masked else 0,
        policy.state_spec(),
        every,
    )
    block = Segments.empty(spec, rows)
    block.observation[:] = rng.normal(size=(steps + 1, rows, 3))
    block.reward[:] = rng.normal(size=(steps, rows))
    block.valid[:] = True
    block.terminated[:] = rng.random((steps, rows)) < 0.1
    block.first[1:] = block.terminated
    if masked:
        block.action_mask[:] = rng.random((steps + 1, rows, 4)) < 0.7
        block.action_mask[..., 0] = True
    state = policy.initial_state(rows)
    with torch.no_grad():
        for t in range(steps + 1):
            if every and t % every == 0 and t < steps:
                for kept, now in zip(block.state, state, strict=True):
                    kept[t // every] = now.numpy()
            mask = torch.from_numpy(block.action_mask[t]) if masked else None
            noise = policy.distribution.noise((rows,), torch.Generator().manual_seed(t))
            action, log_prob, value, state = policy.step(
                torch.from_numpy(block.observation[t]), state, torch.from_numpy(block.first[t]), mask, noise
            )
            block.value[t] = value
            if t < steps:
                block.action[t], block.log_prob[t] = action, log_prob
    return block


def padded(block: Segments, extra: int) -> Segments:
    """The same experience in longer segments whose tails are not valid and full of rubbish."""
    spec = SegmentSpec(**{**block.spec.__dict__, "steps": block.spec.steps + extra})
    out = Segments.empty(spec, block.rows)
    rng = np.random.default_rng(9)
    t = block.spec.steps
    rubbish = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    out.observation[:] = rng.choice(rubbish, out.observation.shape)
    out.reward[:], out.value[:], out.log_prob[:] = np.nan, np.inf, -np.inf
    out.action_mask[:] = False
    for name in ("action", "reward", "terminated", "truncated", "valid", "log_prob", "version"):
        getattr(out, name)[:t] = getattr(block, name)
    out.observation[: t + 1], out.value[: t + 1] = block.observation, block.value
    out.first[: t + 1], out.action_mask[: t + 1] = block.first, block.action_mask
    for mine, theirs in zip(out.state, block.state, strict=True):
        mine[: len(theirs)] = theirs
    return out


@pytest.mark.parametrize("core", [None, "lstm", "gru"])
@pytest.mark.parametrize("extra", [8, 5])
def test_padding_changes_nothing(core: str | None, extra: int) -> None:
    results = []
    for more in (0, extra):
        policy = policy_for(core)
        block = segments(policy, 12, 6)
        ppo(policy, minibatch_size=10_000, num_epochs=3).learn(padded(block, more) if more else block, 0)
        results.append(policy.weights())
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("core", [None, "lstm"])
def test_threads_share_a_gradient_without_changing_it(core: str | None) -> None:
    results = []
    for threads in (1, 3):
        policy = policy_for(core)
        ppo(policy, minibatch_size=40, num_epochs=2, learner_threads=threads).learn(segments(policy, 12, 7), 0)
        results.append(policy.weights())
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, abs=1e-5), name


def test_loss_is_the_papers_clipped_surrogate_sample_by_sample() -> None:
    policy = policy_for()
    algorithm = ppo(policy, clip_param=0.1, vf_loss_coeff=0.7, vf_clip_param=0.3, normalize_advantage=False)
    batch, _ = algorithm.prepare(segments(policy, 10, 4, masked=True))
    batch.log_prob += torch.linspace(-0.5, 0.5, batch.log_prob.shape[0])  # as if the policy had moved
    loss, numbers = algorithm.loss(policy, batch, 0.05, diagnose=True)
    total = 0.0
    with torch.no_grad():
        outputs, value, _ = policy.network(batch.observation, (), None)
        assert batch.mask is not None
        for i in range(len(value)):
            d = torch.distributions.Categorical(logits=torch.where(batch.mask[i], outputs[i], -torch.inf))
            ratio = math.exp(float(d.log_prob(batch.action[i])) - float(batch.log_prob[i]))
            a = float(batch.advantage[i])
            gain = min(ratio * a, min(max(ratio, 0.9), 1.1) * a)
            v, target = float(value[i]), float(batch.target[i])
            probabilities = d.probs[batch.mask[i]]
            entropy = -float((probabilities * probabilities.log()).sum())
            total += -gain + 0.7 * min((v - target) ** 2, 0.3) - 0.05 * entropy
    assert float(loss.detach()) == pytest.approx(total / len(value), rel=1e-5)
    assert float(numbers["kl"]) > 0


@pytest.mark.parametrize("core", [None, "lstm"])
def test_a_block_without_a_valid_step_teaches_nothing(core: str | None) -> None:
    policy = policy_for(core)
    block = segments(policy, 8, 3)
    block.valid[:] = False
    before = policy.weights()
    assert ppo(policy).learn(block, 0) == {"epochs": 0.0}
    assert all((before[name] == value).all() for name, value in policy.weights().items())


def test_first_pass_over_fresh_data_has_a_ratio_of_one() -> None:
    for core in (None, "lstm"):
        policy = policy_for(core)
        metrics = ppo(policy, minibatch_size=10_000, num_epochs=1, lr=1e-9).learn(segments(policy, 8, 5), 0)
        assert metrics["kl"] == pytest.approx(0, abs=1e-6)
        assert metrics["clip_fraction"] == 0


def test_epochs_stop_when_the_policy_has_moved_too_far() -> None:
    policy = policy_for()
    eager = ppo(policy, num_epochs=20, lr=0.05, minibatch_size=16, stop_kl=0.015)
    assert eager.learn(segments(policy, 16, 8), 0)["epochs"] < 20


def test_the_penalty_on_divergence_adapts_as_rllib_users_know_it() -> None:
    policy = policy_for()
    assert "kl_coeff" not in ppo(policy).learn(segments(policy, 8, 4), 0), "no penalty unless it is asked for"
    eager = ppo(policy, num_epochs=20, lr=0.05, minibatch_size=16, kl_target=1e-4)
    assert eager.learn(segments(policy, 16, 8), 0)["kl_coeff"] == pytest.approx(0.3), "0.2 to begin with, and 1.5 times that"
    lazy = ppo(policy, lr=1e-9, kl_target=0.01, kl_coeff=1.0)
    assert lazy.learn(segments(policy, 8, 4), 0)["kl_coeff"] == 0.5
    again = ppo(policy, kl_target=0.01, kl_coeff=1.0)
    again.load_state(*lazy.state())
    assert again.penalty.coeff == 0.5


@pytest.mark.parametrize("coeff", [0.0, 0.2, 5.0])
def test_a_reconfigured_penalty_overrides_the_checkpoint(coeff: float) -> None:
    policy = policy_for()
    before = ppo(policy, lr=1e-9, kl_coeff=1.0)
    before.learn(segments(policy, 8, 4), 0)
    after = ppo(policy, kl_coeff=coeff)
    after.load_state(*before.state())
    assert before.penalty.coeff == 0.5
    assert after.penalty.coeff == coeff


def test_a_penalty_keeps_the_policy_near() -> None:
    moved = []
    for coeff in (0.0, 50.0):
        policy = policy_for()
        algorithm = ppo(policy, num_epochs=10, lr=0.01, minibatch_size=16, kl_coeff=coeff, clip_param=10.0)
        moved.append(algorithm.learn(segments(policy, 16, 8), 0)["kl"])
    assert moved[1] < 0.2 * moved[0]


def test_schedules_follow_the_timesteps() -> None:
    policy = policy_for()
    algorithm = ppo(policy, lr=[[0, 1.0e-3], [1000, 0.0]])
    assert algorithm.learn(segments(policy, 8, 4), 500)["lr"] == pytest.approx(5e-4)
    before = policy.weights()
    algorithm.learn(segments(policy, 8, 4), 2000)
    after = policy.weights()
    assert all((before[name] == after[name]).all() for name in before), "a learning rate of 0 changes nothing"


def test_not_a_number_stops_the_update_with_the_statistics_of_the_batch() -> None:
    policy = policy_for()
    block = segments(policy, 8, 4)
    block.value[3, 2] = np.nan
    before = policy.weights()
    with pytest.raises(TrainingDiverged, match=r"gradient became nan.*advantage min.*not finite.*Lower lr"):
        ppo(policy).learn(block, 0)
    after = policy.weights()
    assert all((before[name] == after[name]).all() for name in before)


def test_normalised_observations_follow_the_valid_rows_only() -> None:
    policy = Policy(OBSERVATIONS, ACTIONS, normalise_observations=True)
    block = segments(policy, 8, 4)
    block.valid[5:, 1] = False
    block.observation[5:8, 1] = 1e6
    ppo(policy).learn(block, 0)
    norm = policy.network.norm
    assert norm is not None
    assert norm.mean.numpy() == pytest.approx(block.observation[:-1][block.valid].mean(axis=0), abs=1e-5)
    assert float(norm.count) == block.steps


# -- experience of older versions ----------------------------------------------------------------------------------------


def test_ones_own_steps_are_not_corrected_whatever_is_known_of_versions() -> None:
    """Bit by bit: who samples and learns in turns gets what the plain algorithm computes."""
    results = []
    for known in (None, 0):
        policy = policy_for()
        algorithm = ppo(policy, minibatch_size=40)
        algorithm.version = known
        assert "rho_mean" not in algorithm.learn(segments(policy, 12, 7), 0)
        results.append(policy.weights())
    assert all((results[1][name] == value).all() for name, value in results[0].items())


@pytest.mark.parametrize("core", [None, "lstm"])
def test_a_correction_of_what_needs_none_changes_nothing(core: str | None) -> None:
    results = []
    for known in (0, 1):
        policy = policy_for(core)
        algorithm = ppo(policy, minibatch_size=40)
        algorithm.version = known
        metrics = algorithm.learn(padded(segments(policy, 12, 7), 3), 0)
        results.append(policy.weights())
    assert metrics["rho_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["rho_clipped"] == 0
    for name, value in results[0].items():
        assert results[1][name] == pytest.approx(value, abs=2e-5), name


def test_old_steps_are_weighted_and_clipped_around_the_policy_that_learns() -> None:
    """The decoupled objective (Hilton et al. 2021), step by step in plain Python."""
    policy = policy_for()
    block = segments(policy, 6, 2)
    disturbed(policy, 0.2)
    settings: dict[str, Any] = {"gamma": 0.9, "lambda": 0.8, "normalize_advantage": False, "sampling": "pipelined"}
    batch, metrics = ppo(policy, **settings).prepare(block)
    with torch.no_grad():
        outputs, value, _ = policy.network(torch.from_numpy(block.observation), (), None)
    near = outputs[:-1].log_softmax(-1).gather(-1, torch.from_numpy(block.action[..., None])).squeeze(-1)
    rho = np.exp(near.numpy() - block.log_prob)
    for b in range(2):
        ends = [*np.flatnonzero(block.terminated[:, b]).tolist(), 5]
        begin = 0
        for end in sorted({*ends}):
            own = slice(begin, end + 1)
            known = (rho[own, b].tolist(), block.reward[own, b].tolist(), [*value[own, b].tolist(), float(value[end + 1, b])])
            target, advantage = vtrace_by_definition(*known, bool(block.terminated[end, b]), 0.9, 0.8, (1.0, 1.0))
            expected = np.minimum(rho[own, b], 1) * np.array(advantage)
            np.testing.assert_allclose(batch.target.reshape(6, 2)[own, b], target, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(batch.advantage.reshape(6, 2)[own, b], expected, rtol=1e-4, atol=1e-5)
            begin = end + 1
    np.testing.assert_allclose(batch.log_prob.reshape(6, 2), near, atol=1e-6)
    assert metrics["rho_mean"] == pytest.approx(float(rho.mean()), rel=1e-5)


def test_steps_more_than_one_version_old_are_clipped_around_the_policy_that_acted() -> None:
    policy = policy_for()
    block = segments(policy, 6, 2)
    block.version[:] = 9
    block.version[2:4, 1] = 8
    block.version[4:, 1] = 7
    disturbed(policy, 0.2)
    algorithm = ppo(policy, normalize_advantage=False)
    algorithm.version = 9
    batch, _ = algorithm.prepare(block)
    now = Trajectories.from_segments(block).evaluate_grids(policy, 1000)
    found = batch.log_prob.reshape(6, 2).numpy()
    old = block.version == 7
    np.testing.assert_array_equal(found[old], block.log_prob[old])
    np.testing.assert_allclose(found[~old], now.log_prob[~old], atol=1e-6)
    assert not np.allclose(now.log_prob, block.log_prob, atol=1e-3)


def test_one_old_step_is_enough_for_a_correction() -> None:
    policy = policy_for()
    block = segments(policy, 8, 4)
    block.version[:] = 5
    block.version[3, 2] = 4
    assert "rho_mean" in ppo(policy).learn(block, 0)
    block.valid[3, 2] = False
    assert "rho_mean" not in ppo(policy).learn(block, 0)


def test_samplers_that_never_wait_are_refused_with_the_algorithm_to_use() -> None:
    assert parse_algorithm_config(PPOConfig, {"sampling": "pipelined"}).sampling == "pipelined"
    with pytest.raises(ConfigError, match=r"config.sampling is 'async'.*one version.*run: APPO"):
        parse_algorithm_config(PPOConfig, {"sampling": "async"})


def test_experience_of_the_version_before_is_learned_from() -> None:
    source = Sampled("CartPole-v1", 32, 32, seed=1, lag=1)
    algorithm = made("PPO", source.policy, lr=1e-3, minibatch_size=256)
    for _ in range(80):
        block = source.block()
        algorithm.version = source.version
        metrics = algorithm.learn(block, 0)
        source.published()
    assert metrics["rho_mean"] != 1
    assert np.mean(source.returns) >= 195
    source.close()


# -- learning -----------------------------------------------------------------------------------------------------------


def trained(tmp_path: Any, env: str, timesteps: int, **settings: Any) -> ludus.Result:
    defaults = {"seed": 1, "num_envs": 32, "evaluation_duration": 100, "lr": 3e-3}
    return ludus.train(env, stop={"timesteps": timesteps}, local_dir=tmp_path, **(defaults | settings))


@pytest.mark.parametrize("env", ["tests.games:endless", "tests.games:endless_same_step"])
def test_values_bootstrap_through_truncation(tmp_path: Any, env: str) -> None:
    """Reward 1 for ever is worth 1/(1−0.9) = 10; to learn 'truncated = over' would give about 3, 'terminated' exactly that."""
    result = trained(tmp_path, env, 60_000, gamma=0.9, train_batch_size=1024, minibatch_size=256, evaluation_duration=0)
    with torch.inference_mode():
        values = result.agent.policy.value(torch.rand(64, 2) * 2 - 1)
    assert float(values.mean()) == pytest.approx(10.0, abs=0.5)


def test_cartpole_reaches_475_and_keeps_it_in_fresh_episodes(tmp_path: Any) -> None:
    result = ludus.train(
        "CartPole-v1",
        stop={"episode_return_mean": 475, "timesteps": 1_000_000},
        local_dir=tmp_path,
        lr=1e-3,
        evaluation_duration=20,
    )
    assert result.stopped_by == "episode_return_mean"
    assert result.metrics["evaluation/return_mean"] >= 450


@pytest.mark.parametrize("core", ["lstm", pytest.param("gru", marks=pytest.mark.long)])
def test_masks_memory_and_hybrid_actions_work_in_one_policy(tmp_path: Any, core: str) -> None:
    """Guessing the door gives 0.5 and the aim at most 0.5 without memory: 1.8 of 2 needs all three."""
    result = trained(
        tmp_path,
        "tests.games:remember_and_aim",
        80_000,
        gamma=1.0,
        train_batch_size=2048,
        minibatch_size=512,
        model={"core": core, "cell_size": 32, "max_seq_len": 8},
    )
    assert result.metrics["evaluation/return_mean"] >= 1.8


def test_pictures_and_shifted_actions_are_learned(tmp_path: Any) -> None:
    result = trained(tmp_path, "tests.games:BrightSide", 12_000, train_batch_size=512, minibatch_size=128, lr=1e-3)
    assert result.metrics["evaluation/return_mean"] >= 0.98


@pytest.mark.long
def test_lists_of_entities_and_bits_are_learned(tmp_path: Any) -> None:
    """A guess is right in a quarter of the cases, the majority group of those present in far fewer than 9 of 10."""
    result = trained(tmp_path, "tests.games:Nearest", 50_000, train_batch_size=1024, minibatch_size=256, lr=2e-3)
    assert result.metrics["evaluation/return_mean"] >= 0.9


@pytest.mark.long
def test_continuous_control_is_learned_with_normalised_observations_and_rewards(tmp_path: Any) -> None:
    """Pendulum: doing nothing is worth about −1,200, swinging up about −150 to −250 (SB3's tuned PPO: −172)."""
    result = trained(
        tmp_path,
        "Pendulum-v1",
        250_000,
        num_envs=16,
        train_batch_size=2048,
        minibatch_size=256,
        num_epochs=10,
        gamma=0.95,
        lr=1e-3,
        normalize_reward=True,
        observation_filter="MeanStdFilter",
        evaluation_duration=32,
    )
    assert result.metrics["evaluation/return_mean"] >= -400
