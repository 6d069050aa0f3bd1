"""Playing against one's own past: whose rows are learned from, who plays the others, and with which version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import nn

from ludus.config.schema import SelfPlayConfig
from ludus.envs.opponents.opponent_rows import OpponentRows
from ludus.envs.vector_env import Environments, VectorEnvironments
from ludus.errors import ConfigError
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import BatchDecision, Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.sampling.sampler import Sampler, VersionClock, segment_spec
from ludus.sampling.self_play import PastPlayer, PolicyHistory, with_past_opponents
from ludus.storage.local import LocalStore
from ludus.transport.local import LocalMemory

OWN, THEIRS, LENGTH = 3, 2, 4


class Rows(gym.vector.VectorEnv[Any, Any, Any]):
    """Row i shows i and the step; the reward is what the first opponent did. Episodes last LENGTH steps, the result is i."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium declares it so
    result_names = ("row", "win/past", "past_version")

    def __init__(self) -> None:
        self.num_envs = OWN + THEIRS
        self.opponent_rows = np.arange(self.num_envs) >= OWN
        self.single_observation_space = gym.spaces.Box(-1e3, 1e3, (2,), np.float32)
        self.single_action_space = gym.spaces.Discrete(5)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.actions: list[np.ndarray[Any, Any]] = []
        self.told: list[int] = []
        self._step = 0

    def set_timesteps(self, timesteps: int) -> None:
        self.told.append(timesteps)

    def _seen(self) -> Any:
        return np.stack([np.arange(self.num_envs), np.full(self.num_envs, self._step)], axis=1).astype(np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._step = 0
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        self.actions.append(np.array(actions))
        self._step += 1
        over = np.full(self.num_envs, self._step % (LENGTH + 1) == LENGTH)
        infos = {"row": np.arange(self.num_envs), "_row": over, "win/past": np.ones(self.num_envs), "_win/past": over & False}
        infos |= {"past_version": np.zeros(self.num_envs), "_past_version": over & (np.arange(self.num_envs) == 1)}
        reward = np.full(self.num_envs, actions[OWN], np.float32)
        return self._seen(), reward, over, np.zeros_like(over), infos if over.any() else {}


class Versions:
    """A policy whose version and weights a test changes."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.version = policy, 1

    def newest(self) -> tuple[Policy, int]:
        return self.policy, self.version

    def always(self, action: int, version: int) -> None:
        """From this version on, this action is all but certain."""
        with torch.no_grad():
            network: Any = self.policy.network
            network.head.weight.zero_()
            network.head.bias.zero_()
            network.head.bias[action] = 50.0
        self.version = version


@pytest.fixture
def env() -> Rows:
    return Rows()


@pytest.fixture
def environments(env: Rows) -> Environments:
    return OpponentRows(VectorEnvironments("rows", env), env.opponent_rows)


@pytest.fixture
def source(env: Rows) -> Versions:
    torch.manual_seed(0)
    return Versions(Policy(env.single_observation_space, env.single_action_space, NetworkConfig(fcnet_hiddens=(8,))))


def sampler_of(environments: Environments, source: Versions, steps: int, **settings: int) -> tuple[Sampler, LocalMemory]:
    environments.reset(0)
    facing = with_past_opponents(environments, source, SelfPlayConfig(**settings), 0)
    memory = LocalMemory(segment_spec(source.policy, environments, steps), environments.num, 1)
    return Sampler(environments, facing, memory, 0, timesteps=VersionClock(1, 1_000, 60).timesteps), memory


def test_only_own_rows_are_shown_and_learned_from(environments: Environments, env: Rows, source: Versions) -> None:
    sampler, memory = sampler_of(environments, source, 10)
    assert environments.num == OWN
    assert sampler.step()
    block = memory.take(0)
    assert block is not None
    assert block.rows == OWN
    assert set(block.observation[:, :, 0].reshape(-1).tolist()) == set(range(OWN))
    assert all(len(actions) == OWN + THEIRS for actions in env.actions)


def test_own_actions_reach_own_rows(environments: Environments, env: Rows, source: Versions) -> None:
    sampler, memory = sampler_of(environments, source, 10)
    assert sampler.step()
    block = memory.take(0)
    assert block is not None
    np.testing.assert_array_equal(np.stack(env.actions)[:, :OWN], block.action)
    np.testing.assert_array_equal(block.reward[:, 0], np.stack(env.actions)[:, OWN])


def test_the_opponent_is_an_earlier_version_until_another_is_drawn(
    environments: Environments, env: Rows, source: Versions
) -> None:
    source.always(2, version=1)
    sampler, memory = sampler_of(environments, source, 10, every=1, keep=1, period=20)
    for version, action in ((2, 4), (3, 1), (4, 3)):
        source.always(action, version)
        assert sampler.step()
        block = memory.take(0)
        assert block is not None
        memory.release(block)
        assert (block.action == action).all()
    theirs = np.stack(env.actions)[:, OWN:]
    assert (theirs[:20] == 4).all(), "the newest that was kept when the first step was made, for a whole period"
    assert (theirs[20:] == 3).all()


def test_a_history_keeps_some_and_forgets_the_oldest(source: Versions) -> None:
    history = PolicyHistory(SelfPlayConfig(every=5, keep=3))
    for version in range(1, 41):
        source.always(version % 5, version)
        history.add(*source.newest())
    drawn = {history.draw(np.random.default_rng(seed))[0] for seed in range(60)}
    assert drawn == {26, 31, 36}
    version, weights = history.draw(np.random.default_rng(0))
    assert weights["network.head.bias"].argmax() == version % 5, "as it was then, not as it is now"


def test_results_of_own_rows_are_reported_once_per_episode(environments: Environments, source: Versions) -> None:
    sampler, memory = sampler_of(environments, source, 2 * (LENGTH + 1))
    assert sampler.step()
    block = memory.take(0)
    assert block is not None
    assert block.spec.results == ("row", "win/past", "past_version")
    np.testing.assert_array_equal(block.results[:, 0], [(2 * row, 2) for row in range(OWN)])
    np.testing.assert_array_equal(block.results[:, 1], np.zeros((OWN, 2)))
    np.testing.assert_array_equal(block.results[:, 2], [(0, 0), (2 * source.version, 2), (0, 0)])  # who plays against it tells it


def test_a_later_sampler_uses_the_versions_stored_by_the_run(
    environments: Environments, env: Rows, source: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = LocalVersionStore(LocalStore(tmp_path))
    pool.add("model", source.policy)
    for version in range(2, 24):
        source.always(version % 5, version)
        pool.publish("model", version)
        pool.keep("model")
    pool.close()
    (tmp_path / "models" / "model" / "000013.safetensors").write_bytes(b"damaged")
    source.always(0, 23)
    environments.reset(0)
    with_past_opponents(environments, source, SelfPlayConfig(every=5, keep=4), 0, tmp_path)
    assert isinstance(environments, OpponentRows)
    player = environments.player
    assert isinstance(player, PastPlayer)
    met = {player._history.draw(np.random.default_rng(seed))[0] for seed in range(80)}
    assert met == {23, 18, 8, 3}  # and of 13 the log says why not
    assert "version 13 is no longer used as an opponent" in caplog.text
    (tmp_path / "models" / "model" / "000018.safetensors").unlink()  # while it may be drawn
    assert {player._history.draw(np.random.default_rng(seed))[0] for seed in range(80)} == {23, 8, 3}
    for version in (24, 25):
        source.version = 20 + 5 * (version - 20)
        player._history.add(*source.newest())
    assert {player._history.draw(np.random.default_rng(seed))[0] for seed in range(80)} == {23, 40, 45, 8}
    for seed in range(20):
        version, weights = player._history.draw(np.random.default_rng(seed))
        assert version != 8 or weights["network.head.bias"].argmax() == 8 % 5


def test_where_the_run_cannot_be_read_nothing_is_recalled(tmp_path: Path) -> None:
    for run in (tmp_path / "elsewhere", tmp_path / ("long" * 100)):  # the second cannot even be asked for
        history = PolicyHistory(SelfPlayConfig())
        history.load_from_run(run, 100)
        assert not history._stored


def test_environments_hear_how_far_training_has_come(environments: Environments, env: Rows, source: Versions) -> None:
    sampler, memory = sampler_of(environments, source, 5)
    for version in (1, 2, 7):
        source.version = version
        assert sampler.step()
        block = memory.take(0)
        assert block is not None
        memory.release(block)
    assert env.told == [1_000, 1_060, 1_360]


def test_a_recurrent_opponent_is_reset_with_every_match(environments: Environments, env: Rows) -> None:
    torch.manual_seed(0)
    recurrent = Policy(env.single_observation_space, env.single_action_space, NetworkConfig(fcnet_hiddens=(8,), core="lstm"))
    source = Versions(recurrent)
    sampler, _ = sampler_of(environments, source, 3 * (LENGTH + 1))
    player: Any = environments.player  # type: ignore[attr-defined]
    states: list[tuple[bool, bool]] = []
    act = player._policy.act

    def seen(observation: Any, state: Any, mask: Any, noise: Any) -> Any:
        states.append((bool((state[0] == 0).all()), bool(observation[0, 1] % (LENGTH + 1) == 0)))
        return act(observation, state, mask, noise)

    player._policy.act = seen
    assert sampler.step()
    assert [fresh for fresh, _ in states] == [begins for _, begins in states]


class Remembers(nn.Module):
    """Stands in for a policy: says with which states it was asked."""

    recurrent = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def initial_state(self, rows: int) -> tuple[torch.Tensor, ...]:
        return (torch.full((rows, 2, 3), 5.0),)

    def draw_noise(self, rows: int, generator: torch.Generator) -> Any:
        return None

    def act(self, observation: Any, state: Any, mask: Any, noise: Any) -> BatchDecision:
        self.asked.append(state[0][:, 0, 0].tolist())
        n = len(observation)
        return BatchDecision(np.zeros(n, np.int64), None, np.zeros(n), np.zeros(n), (state[0] + 1,))


def test_states_of_any_shape_start_at_the_initial_state(source: Versions) -> None:
    history = PolicyHistory(SelfPlayConfig())
    history.add(*source.newest())
    player: Any = PastPlayer(source.policy, history, SelfPlayConfig(), 0)
    player._policy = Remembers()
    for first in ([True, True], [False, False], [False, True]):
        player.play(np.zeros((2, 2), np.float32), None, np.array(first))
    assert player._policy.asked == [[5, 5], [6, 6], [7, 5]]


def test_an_opponent_is_shown_the_numbers_of_the_kind_that_the_learner_is(source: Versions) -> None:
    """Environments may say more exactly than networks are told."""
    history = PolicyHistory(SelfPlayConfig())
    history.add(*source.newest())
    player = PastPlayer(source.policy, history, SelfPlayConfig(), 0)
    assert player.play(np.zeros((2, 2), np.float64), None, np.ones(2, np.bool_)).shape == (2,)


def test_chance_of_the_opponent_is_not_that_of_the_learner(source: Versions) -> None:
    history = PolicyHistory(SelfPlayConfig())
    player: Any = PastPlayer(source.policy, history, SelfPlayConfig(), 7)
    mine = source.policy.draw_noise(4, torch.Generator().manual_seed(7))
    assert not np.isclose(mine, source.policy.draw_noise(4, player._generator)).any()


def test_without_past_versions_the_error_names_the_remedy(environments: Environments) -> None:
    environments.reset(0)
    with pytest.raises(ConfigError, match=r"none are available here.*set the opponent to a script"):
        environments.step(np.zeros(OWN, np.int64))
