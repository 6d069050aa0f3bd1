"""DQN: its targets and loss against a plain restatement, a small game that is solved exactly, and what a run needs of it."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from ludus.algorithms.dqn import DQN, DQNConfig, ReplayBatch
from ludus.config.validation import dump_config, parse_algorithm_config
from ludus.core.types import Segments
from ludus.envs.vector_env import make_environments
from ludus.errors import ConfigError, TrainingDiverged
from ludus.models.devices import copy_for_acting
from ludus.models.distributions import EpsilonGreedy
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import VALUES, Policy
from ludus.sampling.sampler import Sampler, segment_spec
from ludus.transport.local import LocalMemory
from tests.algorithms import mdp

UNIFORM = {"replay_buffer_config": {"type": "ReplayBuffer", "capacity": 5000}}


class Playing:
    """Blocks of an environment by the policy that learns, and the algorithm."""

    def __init__(
        self, env: str, steps: Any = 4, rows: Any = 8, hiddens: Any = (16,), activation: Any = "tanh", **settings: Any
    ) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self._environments = make_environments(env, rows)
        self._environments.reset(0)
        shared = {"learner_threads": 1, "num_envs_per_worker": rows, "rollout_fragment_length": steps, "training_intensity": 8}
        config = parse_algorithm_config(DQNConfig, shared | settings)
        assert isinstance(config, DQNConfig)
        spaces = (self._environments.observation_space, self._environments.action_space)
        network = NetworkConfig(
            fcnet_hiddens=hiddens, fcnet_activation=activation, dueling=config.dueling, head_hiddens=tuple(config.hiddens)
        )
        self.policy = Policy(*spaces, network, kind=VALUES)
        self.algorithm = DQN(self.policy, config, 5)
        self._memory = LocalMemory(segment_spec(self.policy, self._environments, steps), rows, 1)
        self._sampler = Sampler(self._environments, self, self._memory, 0)
        self._block: Segments | None = None
        self.timestep = 0

    def newest(self) -> tuple[Policy, int]:
        return self.policy, 0

    def block(self) -> Segments:
        if self._block is not None:
            self._memory.release(self._block)
        assert self._sampler.step()
        self._block = self._memory.take(0)
        assert self._block is not None
        return self._block

    def learn(self) -> dict[str, float]:
        block = self.block()
        numbers = self.algorithm.learn(block, self.timestep)
        self.timestep += block.steps
        return numbers

    def until(self, timestep: int) -> dict[str, float]:
        numbers: dict[str, float] = {}
        while self.timestep < timestep:
            numbers = self.learn()
        self._environments.close()
        return numbers


# -- targets and loss


def drawn(playing: Playing, count: int = 64) -> ReplayBatch:
    return ReplayBatch.from_transitions(
        playing.algorithm.replay.sample(count, np.random.default_rng(0).random, 0.7), torch.device("cpu")
    )


def apart(policy: Policy, amount: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=amount)


@pytest.mark.parametrize("env", ["CartPole-v1", "tests.algorithms.mdp:make_masked_mdp"])
@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("loss_fn", ["huber", "mse"])
def test_the_loss_is_what_the_papers_say(env: str, double_q: bool, dueling: bool, loss_fn: str) -> None:
    """Sample by sample in plain Python, from the outputs of the two networks; masks where there are some."""
    playing = Playing(env, double_q=double_q, dueling=dueling, td_error_loss_fn=loss_fn, n_step=3)
    for _ in range(20):
        playing.algorithm.replay.add(playing.block())
    apart(playing.policy, 0.3, 1)
    playing.algorithm.target.update(0.5)  # half of the way, so that the two networks differ
    batch = drawn(playing)
    loss, numbers = playing.algorithm.loss(playing.policy, batch, diagnose=True)
    with torch.no_grad():
        now, chooser = (playing.policy.network(o, (), None)[0].tolist() for o in (batch.observation, batch.next_observation))
        target_policy = copy.deepcopy(playing.algorithm.target.policy)
        target_policy.network.thaw()
        judge = target_policy.network(batch.next_observation, (), None)[0].tolist()
    total, errors = 0.0, []
    for i in range(64):
        allowed = [True] * len(now[i]) if batch.next_mask is None else batch.next_mask[i].tolist()
        options = [a for a in range(len(now[i])) if allowed[a]]
        by = chooser[i] if double_q else judge[i]
        best = max(options, key=lambda a: by[a])
        error = now[i][int(batch.action[i])] - (float(batch.reward[i]) + float(batch.discount[i]) * judge[i][best])
        huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
        total += float(batch.weight[i]) * (huber if loss_fn == "huber" else error**2)
        errors.append(error)
    assert float(loss.detach()) == pytest.approx(total / 64, rel=1e-4)
    assert batch.td_error.tolist() == pytest.approx(errors, abs=1e-4)
    assert float(numbers["td_error_mean"]) == pytest.approx(np.abs(errors).mean(), rel=1e-4)


def test_a_dueling_network_is_value_plus_centred_advantage() -> None:
    playing = Playing("CartPole-v1", dueling=True, hiddens=(8,))
    network: Any = playing.policy.network
    seen = torch.randn(5, 4)
    features = network.trunk(seen, seen)
    advantage, value = network.head(features), network.value_head(features)
    expected = value + advantage - advantage.mean(dim=1, keepdim=True)
    assert torch.allclose(playing.policy.action_values(seen), expected, atol=1e-6)
    assert torch.allclose(playing.policy.value(seen), expected.amax(dim=1), atol=1e-6)


@pytest.mark.parametrize("share", [None, False])
@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("head", [(), (7,)])
def test_the_frozen_form_gives_the_same_q_values(
    share: bool | None, activation: str, dueling: bool, head: tuple[int, ...]
) -> None:
    config = NetworkConfig(
        fcnet_hiddens=(9, 5), fcnet_activation=activation, vf_share_layers=share, dueling=dueling, head_hiddens=head
    )
    torch.manual_seed(1)
    policy = Policy(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3), config, normalise_observations=True, kind=VALUES)
    apart(policy, 0.3, 2)
    seen = torch.randn(6, 4)
    with torch.no_grad():
        expected = policy.action_values(seen)
    with policy.acting():
        assert torch.allclose(policy.action_values(seen), expected, atol=1e-5)
        _, _, value, _ = policy.step(seen)
    assert torch.allclose(value, expected.amax(dim=1), atol=1e-5)


def test_several_threads_and_pieces_make_the_same_step_and_the_same_priorities() -> None:
    after = []
    for threads, pieces in ((1, 1), (2, 1), (1, 4)):
        more = {"learner_threads": threads, "gradient_accumulation": pieces}
        playing = Playing("CartPole-v1", num_steps_sampled_before_learning_starts=64, training_intensity=4, **more)
        playing.until(200)
        places = np.flatnonzero(playing.algorithm.replay.ready)
        tree = playing.algorithm.replay._tree
        assert tree is not None
        after.append((playing.policy.weights(), tree[places]))
        playing.algorithm.close()
    for weights, priorities in after[1:]:
        assert priorities == pytest.approx(after[0][1], abs=1e-3)
        for name, value in after[0][0].items():
            assert weights[name] == pytest.approx(value, abs=1e-4), name


def test_several_learners_know_all_errors() -> None:
    """Each computes those of its part; what is summed over the group is the whole."""
    playing = Playing("CartPole-v1")

    class Other:
        """The second of two learners, as the first one sees it: it adds what it found in its half."""

        rank, size = 0, 2
        theirs = torch.tensor([0.0] * 16 + [7.0] * 16)

        def sum_(self, tensor: torch.Tensor) -> None:
            tensor += self.theirs

        def close(self) -> None: ...

    playing.algorithm.optimizer.group = Other()
    error = torch.arange(32.0)
    playing.algorithm._allreduce_td_errors(error)
    assert error.tolist() == [*range(16), *[7.0] * 16]


# -- a game that is solved exactly


@pytest.mark.parametrize(
    ("masked", "settings"),
    [
        pytest.param(False, {"double_q": False, "dueling": False, **UNIFORM}, marks=pytest.mark.long),
        (False, {"double_q": True, "dueling": True, "replay_buffer_config": {"type": "PrioritizedReplayBuffer", "beta": 1.0}}),
        (True, {"double_q": True, "dueling": False, **UNIFORM}),
    ],
    ids=["plain", "double, dueling, by priority", "masked"],
)
def test_a_small_game_is_solved(masked: bool, settings: dict[str, Any]) -> None:
    """Value iteration is the oracle. Episodes are cut after seven steps, which is no end: nothing else would come out right."""
    name = "tests.algorithms.mdp:make_masked_mdp" if masked else "tests.algorithms.mdp:make_mdp"
    common = {"gamma": mdp.GAMMA, "epsilon": 1.0, "training_intensity": 12, "num_steps_sampled_before_learning_starts": 200}
    rates = {"lr": [[0, 0.05], [2400, 0.001]], "target_network_update_freq": 32, "grad_clip": None}
    playing = Playing(name, hiddens=(), rows=8, **common, **rates, **settings)
    playing.until(2600)
    with torch.no_grad():
        found = playing.policy.action_values(torch.arange(mdp.STATES)).numpy()
    expected = mdp.solved(masked)
    seen = mdp.ALLOWED if masked else np.ones_like(mdp.ALLOWED)  # of what is never done nothing is known
    assert np.abs(found - expected)[seen].max() < 0.15
    assert (np.where(seen, found, -np.inf).argmax(1) == np.where(seen, expected, -np.inf).argmax(1)).all()


@pytest.mark.parametrize("double_q", [True, False])
def test_masked_actions_do_not_count_at_a_truncation(double_q: bool) -> None:
    """The next-step row that only resets shows the last observation with its mask."""
    playing = Playing("tests.algorithms.mdp:make_masked_mdp", rows=8, double_q=double_q, gamma=mdp.GAMMA)
    for _ in range(20):
        playing.algorithm.replay.add(playing.block())
    replay = playing.algorithm.replay
    places = np.flatnonzero(replay.ready)
    found = replay.gather(places, np.ones(len(places), np.float32))
    goes_on = found.discount > 0
    assert found.next_mask is not None
    assert np.array_equal(found.next_mask[goes_on], mdp.ALLOWED[found.next_observation[goes_on]])


# -- exploring


def test_epsilon_follows_its_schedule_and_reaches_the_acting_policy() -> None:
    playing = Playing("CartPole-v1", epsilon=[[0, 1.0], [320, 0.25]], num_steps_sampled_before_learning_starts=10_000)
    acting = copy_for_acting(playing.policy, torch.device("cpu"))
    assert epsilon_of(acting) == 1.0
    while playing.timestep < 160:
        playing.learn()
    assert epsilon_of(playing.policy) == pytest.approx(1 - 0.75 * playing.timestep / 320)
    playing.until(400)
    other = Policy.from_description(playing.policy.description())
    other.load_weights(playing.policy.weights())
    assert epsilon_of(other) == 0.25


def epsilon_of(policy: Policy) -> float:
    assert isinstance(policy.distribution, EpsilonGreedy)
    return float(policy.distribution.epsilon)


def test_an_epsilon_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="a probability is at most 1"):
        parse_algorithm_config(DQNConfig, {"epsilon": [[0, 2.0], [10, 0.1]]})


# -- the schedule of updates


def test_training_intensity_sets_the_number_of_gradient_steps() -> None:
    """3 steps learned from for every one sampled, 32 at a time: what is left over is made up for."""
    playing = Playing("CartPole-v1", steps=1, training_intensity=3, num_steps_sampled_before_learning_starts=100)
    began = sampled = 0
    for _ in range(60):
        block = playing.block()
        playing.algorithm.learn(block, playing.timestep)
        playing.timestep += block.steps
        if playing.timestep >= 100:
            sampled += block.steps
            began = began or playing.algorithm.optimizer.updates + 1
        else:
            assert playing.algorithm.optimizer.updates == 0
    assert playing.algorithm.optimizer.updates == int(sampled * 3 / 32)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 8.0),
        ({"num_envs_per_worker": 16, "num_workers": 2}, 8.0),
        ({"train_batch_size": 64}, 16.0),  # RLlib has one environment in a worker, unless more are asked for
        ({"rollout_fragment_length": 1}, 32.0),
        ({"train_batch_size": 32, "num_envs_per_worker": 8}, 1.0),
        ({"train_batch_size": 256, "rollout_fragment_length": 4, "num_envs_per_env_runner": 2, "num_env_runners": 4}, 8.0),
        ({"train_batch_size": 64, "rollout_fragment_length": None, "num_workers": "auto"}, 16.0),
        ({"train_batch_size": 64, "training_intensity": None}, 16.0),
        ({"training_intensity": None, "num_envs_per_worker": 4}, 2.0),
        ({"train_batch_size": 64, "training_intensity": 3}, 3.0),
        ({"train_batch_size": 64.0, "num_workers": "2"}, 8.0),
    ],
)
def test_an_intensity_that_is_not_given_is_rllibs(given: dict[str, Any], expected: float) -> None:
    """There: one minibatch for what all workers sample in one round."""
    config = parse_algorithm_config(DQNConfig, given)
    assert isinstance(config, DQNConfig)
    assert config.training_intensity == expected
    again = parse_algorithm_config(DQNConfig, {**dump_config(config), "num_workers": 5})
    assert isinstance(again, DQNConfig)
    assert again.training_intensity == expected, "it is saved with the run"


def test_a_wrong_number_without_intensity_is_the_only_error() -> None:
    for key in ("train_batch_size", "num_envs_per_worker"):
        for wrong in (0, -1, "many", None, float("inf")):
            with pytest.raises(ConfigError) as complaint:
                parse_algorithm_config(DQNConfig, {key: wrong, "training_intensity": None})
            assert key in complaint.value.message
            assert "training_intensity" not in complaint.value.message


def test_the_target_network_follows_when_it_should() -> None:
    playing = Playing("CartPole-v1", target_network_update_freq=96, num_steps_sampled_before_learning_starts=0, dueling=False)
    followed = []
    for _ in range(30):
        before = playing.algorithm.target.weights()
        numbers = playing.learn()
        now = playing.algorithm.target.weights()
        if not np.array_equal(before, now):
            followed.append(playing.timestep)
            assert np.array_equal(now, playing.algorithm.optimizer.flat.numpy()) or numbers["gradient_steps_this_iteration"] > 1
    assert len(followed) == int(numbers["target_updates"]) > 5
    assert min(np.diff(followed)) >= 64  # blocks of 32 steps, less those that only reset


def test_a_target_may_follow_slowly() -> None:
    playing = Playing("CartPole-v1", tau=0.25)
    apart(playing.policy, 0.5, 3)
    before, there = playing.algorithm.target.weights(), playing.algorithm.optimizer.flat.clone().numpy()
    playing.algorithm.target.update(0.25)
    assert playing.algorithm.target.weights() == pytest.approx(0.75 * before + 0.25 * there, abs=1e-6)


# -- what goes wrong


@pytest.mark.parametrize("space", [gym.spaces.Box(-1, 1, (2,)), gym.spaces.MultiDiscrete([2, 3])])
def test_actions_that_are_not_discrete_are_refused(space: gym.Space[Any]) -> None:
    with pytest.raises(ConfigError, match="needs Discrete actions"):
        Policy(gym.spaces.Box(-1, 1, (4,)), space, kind=VALUES)


def test_a_recurrent_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="single steps"):
        parse_algorithm_config(DQNConfig, {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match="single steps"):
        Policy(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), NetworkConfig(core="gru"), kind=VALUES)


def test_divergence_stops_the_run_and_describes_the_batch() -> None:
    playing = Playing("CartPole-v1", num_steps_sampled_before_learning_starts=0, td_error_loss_fn="mse")
    block = playing.block()
    block.reward[:] = np.inf
    with pytest.raises(TrainingDiverged, match=r"Batch: reward min inf"):
        playing.algorithm.learn(block, 0)


# -- resuming


@pytest.mark.parametrize("stored", [False, True])
def test_a_resumed_run_goes_on_where_it_was(stored: bool) -> None:
    settings = {"num_steps_sampled_before_learning_starts": 64, "store_buffer_in_checkpoints": stored, "training_intensity": 5}
    one = Playing("CartPole-v1", **settings)
    one.until(300)
    arrays, plain = one.algorithm.state()
    two = Playing("CartPole-v1", **settings)
    two.policy.load_weights(one.policy.weights())
    two.algorithm.load_state({name: array.copy() for name, array in arrays.items()}, plain)
    assert np.array_equal(two.algorithm.target.weights(), one.algorithm.target.weights())
    two.timestep = one.timestep
    if stored:
        assert len(two.algorithm.replay) == len(one.algorithm.replay)
    else:  # it fills the buffer again before it learns
        assert len(two.algorithm.replay) == 0
        before = two.algorithm.optimizer.updates
        two.learn()
        assert two.algorithm.optimizer.updates == before == one.algorithm.optimizer.updates
    two.until(one.timestep + 100)
    assert two.algorithm.optimizer.updates > one.algorithm.optimizer.updates


@pytest.mark.parametrize("begins_at", [0, 64])
def test_the_target_network_is_updated_after_the_step_count_restarts(begins_at: int) -> None:
    """As with --restore, where it begins at 0; and where a trial takes over the weights of one that is ahead."""
    settings = {"num_steps_sampled_before_learning_starts": 32, "target_network_update_freq": 96, "training_intensity": 2}
    one = Playing("CartPole-v1", **settings)
    one.until(2000)
    two = Playing("CartPole-v1", **settings)
    two.policy.load_weights(one.policy.weights())
    two.algorithm.load_state(*one.algorithm.state())
    two.timestep = begins_at
    before = two.learn()["target_updates"]
    after = two.until(begins_at + 500)["target_updates"]
    assert before == one.algorithm.state()[1]["dqn"]["target_updates"]
    assert 3 <= after - before <= 5, "once in 96 steps, in 500"


def test_a_checkpoint_with_the_buffer_is_announced_with_its_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="ludus.algorithms.dqn"):
        Playing("CartPole-v1")
        assert not caplog.messages
        playing = Playing("CartPole-v1", store_buffer_in_checkpoints=True, replay_buffer_config={"capacity": 100_000})
        playing.algorithm.state()
        playing.algorithm.state()
    each = 16 + 8 + 4 + 3 + 8 + 8  # observation, action, reward, three flags, the next place, a priority
    assert len(caplog.messages) == 1
    assert f"{each / 10:.1f} MB" in caplog.messages[0]


# -- learning


def greedy_return(policy: Policy, episodes: int = 20) -> float:
    """The mean return of whole episodes by the best actions."""
    environments = make_environments("CartPole-v1", episodes)
    seen, total, over = environments.reset(1000), np.zeros(episodes), np.zeros(episodes, np.bool_)
    with policy.acting():
        while not over.all():
            action, _, _, _ = policy.step(torch.from_numpy(np.asarray(seen.observation)))
            outcome = environments.step(policy.distribution.to_environment(action.numpy()))
            total += np.where(over, 0.0, outcome.reward)
            over |= outcome.terminated | outcome.truncated
            seen = outcome.observations
    environments.close()
    return float(total.mean())


CARTPOLE: dict[str, Any] = {
    "hiddens": (128, 128),
    "gamma": 0.99,
    "n_step": 3,
    "dueling": False,
    "train_batch_size": 128,
    "training_intensity": 32,
    "epsilon": [[0, 1.0], [8000, 0.05]],
    "grad_clip": 10.0,
}


def test_a_pole_is_balanced_far_better_than_by_chance() -> None:
    """Chance keeps it up for 22 steps."""
    quick = CARTPOLE | {"hiddens": (64, 64), "train_batch_size": 64, "training_intensity": 16, "epsilon": [[0, 1.0], [3000, 0.1]]}
    playing = Playing("CartPole-v1", lr=2e-3, **quick, **UNIFORM)
    playing.until(5000)
    assert greedy_return(playing.policy) >= 60


@pytest.mark.long
def test_a_pole_is_balanced_in_fifty_thousand_steps() -> None:
    """With the settings of the preset, which came to 500, 499, 500, 500, 476 and 500 with six seeds."""
    as_preset = CARTPOLE | {"hiddens": (256, 256), "activation": "relu", "n_step": 10, "target_network_update_freq": 250}
    rate = [[0, 2e-3], [50_000, 1e-5]]
    playing = Playing("CartPole-v1", lr=rate, **as_preset, replay_buffer_config={"type": "ReplayBuffer", "capacity": 50_000})
    playing.until(50_000)
    assert greedy_return(playing.policy) >= 400
