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

from ludus.config.schema import SelfPlayConfig
from ludus.envs.opponents.opponent_rows import OpponentRows
from ludus.envs.vector_env import Environments, VectorEnvironments
from ludus.errors import ConfigError
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.sampling.sampler import Sampler, VersionClock, segment_spec
from ludus.sampling.self_play import OpponentPlayer, PolicyHistory, RecordedSource, with_past_opponents
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
        self.match_of_row = np.array([0, 1, 2, 0, 1])
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
    return OpponentRows(VectorEnvironments("rows", env), env.opponent_rows, env.match_of_row)


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


def test_the_opponent_is_an_earlier_version_until_its_match_is_over(
    environments: Environments, env: Rows, source: Versions
) -> None:
    source.always(2, version=1)
    sampler, memory = sampler_of(environments, source, 3, every=1, keep=1, period=1)
    played = []
    for version in range(2, 22):
        action = version % 5
        source.always(action, version)
        assert sampler.step()
        block = memory.take(0)
        assert block is not None
        memory.release(block)
        assert (block.action == action).all()
        played += [action] * 3
    theirs = np.stack(env.actions)[:, OWN:]
    assert len(set(theirs[:, 0].tolist())) >= 3
    for begin in range(0, len(theirs) - LENGTH, LENGTH + 1):  # the step after the end of a match only resets
        assert (theirs[begin : begin + LENGTH] == played[begin]).all(), "the newest that was kept when the match began"


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
    assert isinstance(environments.player, OpponentPlayer)
    history = environments.player._draw._history
    met = {history.draw(np.random.default_rng(seed))[0] for seed in range(80)}
    assert met == {23, 18, 8, 3}  # and of 13 the log says why not
    assert "version 13 is no longer used as an opponent" in caplog.text
    (tmp_path / "models" / "model" / "000018.safetensors").unlink()  # while it may be drawn
    assert {history.draw(np.random.default_rng(seed))[0] for seed in range(80)} == {23, 8, 3}
    for version in (24, 25):
        source.version = 20 + 5 * (version - 20)
        history.add(*source.newest())
    assert {history.draw(np.random.default_rng(seed))[0] for seed in range(80)} == {23, 40, 45, 8}
    for seed in range(20):
        version, weights = history.draw(np.random.default_rng(seed))
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


# -- matches of different lengths, drawn opponents ------------------------------------------------------------------------


class Matches(gym.vector.VectorEnv[Any, Any, Any]):
    """Match m lasts 3 + m steps; row m is learned from, the opponent has `team` rows. The observation is the step of the match and a
    random number. A match is always won.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium declares it so
    result_names = ("win/past", "loss/past", "win/latest", "loss/latest", "past_version")

    def __init__(self, num_envs: int = 4, team: int = 1) -> None:
        self.matches, self.num_envs = num_envs, num_envs * (1 + team)
        self.opponent_rows = np.arange(self.num_envs) >= num_envs
        self.match_of_row = np.concatenate([np.arange(num_envs), np.arange(num_envs).repeat(team)])
        self.single_observation_space = gym.spaces.Box(-1e3, 1e3, (2,), np.float32)
        self.single_action_space = gym.spaces.Discrete(5)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.lengths = 3 + np.arange(num_envs)
        self.seen: list[np.ndarray[Any, Any]] = []
        """Observations, and actions, by step."""
        self.actions: list[np.ndarray[Any, Any]] = []
        self.over: list[np.ndarray[Any, Any]] = []

    def _observe(self) -> Any:
        numbers = self._random.uniform(-1, 1, self.num_envs)
        self.seen.append(np.stack([self._step[self.match_of_row], numbers], axis=1).astype(np.float32))
        return self.seen[-1]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._random = np.random.default_rng(seed)
        self._step = np.zeros(self.matches, np.int64)
        self.seen, self.actions, self.over = [], [], []
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.actions.append(np.array(actions))
        self._step = np.where(self._step == self.lengths, 0, self._step + 1)  # after the end: the next match
        over = (self._step == self.lengths)[self.match_of_row]
        self.over.append(over)
        ones, learned = np.ones(self.num_envs), over & ~self.opponent_rows
        infos = dict.fromkeys(self.result_names, ones) | {
            "_win/past": learned, "_past_version": learned, "loss/past": 0 * ones, "_loss/past": learned,
            "_win/latest": over & False, "_loss/latest": over & False,
        }  # fmt: skip
        return self._observe(), ones, over, np.zeros_like(over), infos if over.any() else {}

    def opponents_of_matches(self, row: int) -> list[list[int]]:
        """The actions of an opponent row, by match."""
        found: list[list[int]] = [[]]
        for t, actions in enumerate(self.actions):
            if self.seen[t][row, 0] < self.lengths[self.match_of_row[row]]:  # otherwise the action is ignored
                found[-1].append(int(actions[row]))
            else:
                found.append([])
        return found


def played(
    env: Matches, versions: int = 60, block: int = 4, **settings: Any
) -> tuple[OpponentPlayer, list[dict[str, tuple[float, float]]]]:
    """Sample a block with each version; version v always takes action v % 5. Returns the player, and the results by block."""
    environments = OpponentRows(VectorEnvironments("matches", env), env.opponent_rows, env.match_of_row)
    torch.manual_seed(0)
    source = Versions(Policy(env.single_observation_space, env.single_action_space, NetworkConfig(fcnet_hiddens=(8,))))
    source.always(1, 1)
    environments.reset(0)
    facing = with_past_opponents(environments, source, SelfPlayConfig(**settings), 0)
    memory = LocalMemory(segment_spec(source.policy, environments, block), environments.num, 1)
    sampler, results = Sampler(environments, facing, memory, 0), []
    for version in range(1, versions + 1):
        source.always(version % 5, version)
        assert sampler.step()
        taken = memory.take(0)
        assert taken is not None
        memory.release(taken)
        sums = taken.results.sum(axis=0).tolist()
        results.append(dict(zip(taken.spec.results, map(tuple, sums), strict=True)))
    assert isinstance(environments.player, OpponentPlayer)
    return environments.player, results


def test_no_opponent_changes_within_a_match() -> None:
    env = Matches()
    played(env, opponents="past", every=1, keep=20, period=1)
    for row in range(4, 8):
        matches = env.opponents_of_matches(row)
        assert len(matches) > 20
        assert all(len(set(match)) <= 1 for match in matches), "the version that it began with"
        assert len({match[0] for match in matches if match}) == 5, "and another in the next match"


def test_matches_have_opponents_of_their_own() -> None:
    env = Matches(6)
    played(env, opponents="past", every=1, keep=20, period=1)
    at_once = [len(set(actions[6:].tolist())) for actions in env.actions[40:]]
    assert max(at_once) >= 3


def test_the_rows_of_a_side_have_one_opponent() -> None:
    env = Matches(3, team=3)
    played(env, opponents="past", every=1, keep=20, period=1)
    for actions in env.actions:
        for match in range(3):
            rows = env.opponent_rows & (env.match_of_row == match)
            assert len(set(actions[rows].tolist())) == 1


def test_few_versions_are_loaded_at_a_time() -> None:
    env = Matches(40)
    player, _ = played(env, 100, opponents="past", every=1, keep=100, period=1)
    assert len(player._draw.active) == 4
    assert len(np.unique(player.versions)) <= len(player._past) <= 8


def test_the_newest_version_follows_the_learner_and_is_not_learned_from() -> None:
    env = Matches()
    _, results = played(env, 30, block=4, opponents="latest")
    for t, actions in enumerate(env.actions):
        assert (actions == (1 + t // 4) % 5).all(), "all rows have the version of the block"
    assert sum(block["win/latest"][1] for block in results) > 20
    assert not any(block[name][1] for block in results for name in ("win/past", "past_version"))


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_mix_has_its_share_of_matches_against_the_newest_version(share: float) -> None:
    env = Matches(20)
    _, results = played(env, 100, opponents="mix", latest=share, every=1, keep=10)
    latest, past = (sum(block[f"win/{kind}"][1] for block in results) for kind in ("latest", "past"))
    assert latest + past == sum(over[:20].sum() for over in env.over)
    assert abs(latest / (latest + past) - share) < 4 * (share * (1 - share) / (latest + past)) ** 0.5
    assert sum(block["past_version"][1] for block in results) == past


def test_without_opponents_all_matches_are_against_the_past() -> None:
    _, results = played(Matches(), every=1, keep=10)
    assert not any(block["win/latest"][1] for block in results)
    assert sum(block["win/past"][1] for block in results) > 20


def test_results_name_the_version_that_played() -> None:
    """Of matches that are longer than a block: the version at the end is not that of the beginning."""
    env = Matches(1)
    env.lengths = np.array([9])
    _, results = played(env, 40, block=3, opponents="past", every=1, keep=1, period=1)
    versions = [block["past_version"][0] for block in results if block["past_version"][1]]
    begins = [t for t, seen in enumerate(env.seen[:-1]) if seen[0, 0] == 0]
    assert versions == [1 + t // 3 for t in begins][: len(versions)]
    assert len(versions) > 8


def test_recurrent_opponents_keep_a_state_of_their_own_for_every_match() -> None:
    """The states of all rows equal those of the same version stepped for that match alone."""
    env = Matches(5)
    torch.manual_seed(0)
    policy = Policy(
        env.single_observation_space, env.single_action_space, NetworkConfig(fcnet_hiddens=(8,), core="lstm", cell_size=6)
    )
    source = Versions(policy)
    settings = SelfPlayConfig(opponents="mix", latest=0.3, every=1, keep=10, period=3)
    history = PolicyHistory(settings)
    recorded = RecordedSource(source, history)
    player = OpponentPlayer(recorded, history, settings, np.arange(5), 0)
    env.reset(seed=0)
    weights = {1: policy.weights()}
    expected: list[Any] = [None] * 5
    first, over, met = np.ones(5, np.bool_), np.zeros(5, np.bool_), set()
    for t in range(60):
        seen = env.seen[-1][5:]
        player.play(seen, None, first)
        for row, version in enumerate(player.versions.tolist()):
            met.add((bool(player.latest[row]), version))
            alone = Policy(policy.observation_space, policy.action_space, policy.config)
            alone.load_weights(weights[version])
            state = alone.initial_state(1) if first[row] else expected[row]
            expected[row] = alone.step(torch.from_numpy(seen[row : row + 1].copy()), state)[3]
            for part, own in zip(player._state, expected[row], strict=True):
                np.testing.assert_allclose(part[row], own[0].detach().numpy(), atol=1e-6)
        env.step(np.zeros(10, np.int64))
        first, over = over, env.over[-1][5:]
        if t % 10 == 9:
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            source.version += 1
            weights[source.version] = policy.weights()
            recorded.newest()
    assert len(met) > 6


def player_of(source: Versions, seed: int = 0) -> OpponentPlayer:
    history = PolicyHistory(SelfPlayConfig())
    return OpponentPlayer(RecordedSource(source, history), history, SelfPlayConfig(), np.arange(2), seed)


def test_an_opponent_is_shown_the_numbers_of_the_kind_that_the_learner_is(source: Versions) -> None:
    """Environments may say more exactly than networks are told."""
    assert player_of(source).play(np.zeros((2, 2), np.float64), None, np.ones(2, np.bool_)).shape == (2,)


def test_chance_of_the_opponent_is_not_that_of_the_learner(source: Versions) -> None:
    mine = source.policy.draw_noise(4, torch.Generator().manual_seed(7))
    assert not np.isclose(mine, source.policy.draw_noise(4, player_of(source, 7)._generator)).any()


def test_without_past_versions_the_error_names_the_remedy(environments: Environments) -> None:
    environments.reset(0)
    with pytest.raises(ConfigError, match=r"none are available here.*set the opponent to a script"):
        environments.step(np.zeros(OWN, np.int64))
