"""Players of a league in opponent rows: who plays, for how long, what is reported, and that the Arena's scripts play as they always do."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from ludus.config.schema import SelfPlayConfig
from ludus.core import trust
from ludus.envs.opponents.opponent_rows import OpponentRows
from ludus.envs.vector_env import VectorEnvironments, make_environments
from ludus.errors import ConfigError
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.sampling import league_opponents
from ludus.sampling.league_files import (
    LeagueOpponent,
    Matchmaking,
    PairReport,
    SpoolReader,
    SpoolReport,
    UnusableModel,
    write_matchmaking,
)
from ludus.sampling.league_rows import LeagueRowPlayer
from ludus.sampling.sampler import Sampler, VersionClock, segment_spec
from ludus.sampling.self_play import FollowedSource, with_past_opponents
from ludus.storage.local import LocalStore
from ludus.transport.local import LocalMemory

ACTIONS = 12
MATCHES, SIZE = 3, 2
OWN = MATCHES * SIZE
SCRIPT_ACTION = 7


class Duels(gym.vector.VectorEnv[Any, Any, Any]):
    """Teams of two. The team whose first action of a match is higher wins; match m lasts m + 3 steps."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - Gymnasium declares it so
    result_names: tuple[str, ...] = ("win/past", "loss/past", "win/latest", "loss/latest", "past_version")
    script_names = ("seven",)

    def __init__(self) -> None:
        self.num_envs = 2 * OWN
        self.opponent_rows = np.arange(self.num_envs) >= OWN
        self.match_of_row = np.arange(self.num_envs) // SIZE % MATCHES
        self.single_observation_space = gym.spaces.Box(-1e3, 1e3, (2,), np.float32)
        self.single_action_space = gym.spaces.Discrete(ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.played: list[list[Any]] = [[] for _ in range(MATCHES)]
        """By match: the actions of the match that is played now."""
        self.finished: list[list[Any]] = []
        """Actions [steps, 4] of matches that are over: own team, then the other."""
        self._over = np.zeros(MATCHES, np.bool_)

    def _seen(self) -> Any:
        return np.zeros((self.num_envs, 2), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._seen(), {}

    def script_actions(self, rows: Any, scripts: Any) -> Any:
        assert list(scripts) == ["seven"] * len(rows)
        assert self.opponent_rows[rows].all()
        return np.full(len(rows), SCRIPT_ACTION)

    def step(self, actions: Any) -> Any:
        actions = np.asarray(actions)
        ended, won = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs)
        for match in range(MATCHES):
            rows = np.flatnonzero(self.match_of_row == match)
            if self._over[match]:
                self.played[match] = []
            else:
                self.played[match].append(actions[rows].tolist())
            self._over[match] = len(self.played[match]) == match + 3
            if self._over[match]:
                self.finished.append(self.played[match])
                ended[rows] = True
                first = self.played[match][0]
                won[rows[0]] = np.sign(first[0] - first[SIZE])
        reports = ended & ~self.opponent_rows & (np.arange(self.num_envs) % SIZE == 0)
        infos = {"win/past": won == 1, "loss/past": won == -1, "past_version": np.zeros(self.num_envs)}
        infos |= {f"_{name}": reports for name in list(infos)}
        return self._seen(), np.zeros(self.num_envs), ended, np.zeros_like(ended), infos if ended.any() else {}


class Learner:
    """A policy source whose policy always takes one action."""

    def __init__(self, action: int, lstm: bool = False) -> None:
        torch.manual_seed(0)
        network = NetworkConfig(fcnet_hiddens=(4,), core="lstm" if lstm else None, cell_size=4)
        self.policy = Policy(gym.spaces.Box(-1e3, 1e3, (2,), np.float32), gym.spaces.Discrete(ACTIONS), network)
        self.policy.load_weights(choosing(self.policy, action))

    def newest(self) -> tuple[Policy, int]:
        return self.policy, 1


def choosing(policy: Policy, action: int) -> dict[str, Any]:
    """Weights with which a policy always takes one action."""
    weights = {name: np.zeros_like(value) for name, value in policy.weights().items()}
    bias = next(name for name, value in weights.items() if value.shape == (ACTIONS,))
    weights[bias][action] = 100.0
    return weights


def store(league: Path, name: str, action: int, *, lstm: bool = False) -> str:
    """Store a player that always takes one action; returns its model."""
    policy, target = Learner(action, lstm).policy, LocalStore(league / "players" / name)
    target.put("models/model/model.json", json.dumps(policy.description()).encode())
    target.put("models/model/000001.safetensors", serialization.encode_weights(policy.weights()))
    return f"players/{name}@1"


def publish(league: Path, *opponents: tuple[str, str, float]) -> None:
    write_matchmaking(league, Matchmaking("main", 0, tuple(LeagueOpponent(*one) for one in opponents)))


def settings(league: Path) -> SelfPlayConfig:
    return SelfPlayConfig(opponents="league", league=str(league), player="main", period=1)


def reports(league: Path) -> list[SpoolReport]:
    return [report for path in sorted((league / "results").glob("*.jsonl")) for report in SpoolReader(path).read()]


def play(league: Path, env: gym.vector.VectorEnv[Any, Any, Any], blocks: int, learner: Learner) -> Any:
    """Sample blocks of ten steps; returns their results [names, 2]: sum and count."""
    unwrapped: Any = env
    environments = OpponentRows(VectorEnvironments("duels", env), unwrapped.opponent_rows, unwrapped.match_of_row)
    environments.reset(0)
    source = with_past_opponents(environments, learner, settings(league), 0)
    memory = LocalMemory(segment_spec(learner.policy, environments, 10), environments.num, 1)
    sampler = Sampler(environments, source, memory, 0, timesteps=VersionClock(1, 0, 60).timesteps)
    totals = np.zeros((len(environments.results), 2))
    for _ in range(blocks):
        assert sampler.step()
        block = memory.take(0)
        assert block is not None
        assert block.rows == OWN
        totals += block.results.sum(axis=0)
        memory.release(block)
    environments.close()
    return totals


def test_opponents_play_whole_matches_and_results_are_those_of_the_game(tmp_path: Path) -> None:
    low, high = store(tmp_path, "low", 1), store(tmp_path, "high", 9, lstm=True)
    publish(tmp_path, ("low", low, 0.3), ("high", high, 0.3), ("seven", "rule:seven", 0.2), ("main", "", 0.2))
    env = Duels()
    totals = play(tmp_path, env, 40, Learner(5))
    names = {1: "low", 9: "high", SCRIPT_ACTION: "seven", 5: "main"}
    met = Counter[str]()
    for match in env.finished:
        actions = np.array(match)
        assert (actions[:, :SIZE] == 5).all(), "the learner plays its side"
        theirs = set(actions[:, SIZE:].reshape(-1).tolist())
        assert len(theirs) == 1, "one opponent plays all rows of a match from its first step to its last"
        met[names[theirs.pop()]] += 1
    assert min(met[name] for name in names.values()) > 5
    counted = {name: Counter[str]() for name in names.values()}
    gains = Counter[str]()
    for one in reports(tmp_path):
        assert isinstance(one, PairReport)
        counted[one.opponent] += Counter(wins=one.wins, draws=one.draws, losses=one.losses)
        gains[one.opponent] += round(one.gain)
    assert counted == {
        "low": {"wins": met["low"]},
        "high": {"losses": met["high"]},
        "seven": {"losses": met["seven"]},
        "main": {"draws": met["main"]},
    }
    assert (gains["low"], gains["high"], gains["main"]) == (met["low"], -met["high"], 0)
    # In metrics, matches against itself are apart, and players have no version numbers.
    won_past, _, _, lost_latest, versions = totals.tolist()
    assert won_past == [met["low"], met["low"] + met["high"] + met["seven"]]
    assert lost_latest == [0, met["main"]]
    assert versions == [0, 0]


def test_loaded_opponents_are_bounded_and_share_forward_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(league_opponents, "_KEPT", 10)
    publish(tmp_path, *((f"p{n}", store(tmp_path, f"p{n}", n % ACTIONS), 1 / 14) for n in range(14)))
    env, learner = Duels(), Learner(5)
    environments = OpponentRows(VectorEnvironments("duels", env), env.opponent_rows, env.match_of_row)
    environments.reset(0)
    player = LeagueRowPlayer(environments, FollowedSource(learner), settings(tmp_path), 0)
    seen, first = np.zeros((OWN, 2), np.float32), np.ones(OWN, np.bool_)
    acted = list[int]()
    act = Policy.act

    def count(policy: Policy, observation: Any, *more: Any) -> Any:
        acted.append(len(observation))
        return act(policy, observation, *more)

    monkeypatch.setattr(Policy, "act", count)
    models = set[str | None]()
    for _ in range(80):
        acted.clear()
        player.play(seen, None, first)
        playing = {opponent.model for opponent in player._opponents}
        assert (len(acted), sum(acted)) == (len(playing), OWN)
        assert len(player._policies) <= 10
        models |= playing
    assert len(models) == 14
    player.close()


def test_unknown_scripts_and_damaged_models_are_reported_and_left_out(tmp_path: Path) -> None:
    good, damaged = store(tmp_path, "good", 1), store(tmp_path, "damaged", 2)
    (tmp_path / "players/damaged/models/model/000001.safetensors").write_bytes(b"\x00" * 100)
    bad = {"damaged": damaged, "eight": "rule:eight"}
    publish(tmp_path, ("good", good, 0.1), *((name, model, 0.45) for name, model in bad.items()))
    env = Duels()
    play(tmp_path, env, 5, Learner(5))
    assert {action for match in env.finished for action in np.array(match)[:, SIZE:].reshape(-1).tolist()} == {1}
    assert {one.player: one.model for one in reports(tmp_path) if isinstance(one, UnusableModel)} == bad


def test_random_actions_where_the_environment_has_no_script_for_them(tmp_path: Path) -> None:
    publish(tmp_path, ("random", "rule:random", 1.0))
    env = Duels()
    play(tmp_path, env, 10, Learner(5))
    drawn = Counter(action for match in env.finished for action in np.array(match)[:, SIZE:].reshape(-1).tolist())
    assert set(drawn) == set(range(ACTIONS))


def fails(observation: Any, mask: Any) -> int:
    raise RuntimeError("no more")


def test_matches_of_a_script_that_fails_are_played_to_their_end_and_do_not_count(tmp_path: Path) -> None:
    model = f"script:{__name__}:fails"
    trust.allow(f"{__name__}:fails")
    publish(tmp_path, ("bad", model, 0.5), ("low", store(tmp_path, "low", 1), 0.5))
    env = Duels()
    play(tmp_path, env, 10, Learner(5))
    found = reports(tmp_path)
    assert [one.player for one in found if isinstance(one, UnusableModel)] == ["bad"]
    counted = [one for one in found if isinstance(one, PairReport)]
    assert {one.opponent for one in counted} == {"low"}
    random = [match for match in env.finished if set(np.array(match)[:, SIZE:].reshape(-1).tolist()) != {1}]
    assert random, "the matches in which it failed"
    assert sum(one.wins for one in counted) == len(env.finished) - len(random)


class OrderedDuels(Duels):
    """Orders its matches in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.current_matches = [""] * MATCHES
        self.choose_script: Any = None


def test_a_match_can_be_ordered_while_the_next_opponent_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing may read a model from disk or ask a server; meanwhile a match is lost, and another thread orders it again."""
    publish(tmp_path, ("low", store(tmp_path, "low", 1), 1.0))
    env = OrderedDuels()
    environments = OpponentRows(VectorEnvironments("duels", env), env.opponent_rows, env.match_of_row)
    environments.reset(0)
    player = LeagueRowPlayer(environments, FollowedSource(Learner(5)), settings(tmp_path), 0)
    seen, first = np.zeros((OWN, 2), np.float32), np.zeros(OWN, np.bool_)
    player.play(seen, None, first)
    for match in range(MATCHES):
        env.choose_script(match, f"{match}-0")
    choose, ordered = player._chooser.choose, list[str | None]()

    with ThreadPoolExecutor(1) as scheduler:

        def choose_slowly(*given: Any) -> Any:
            for match in range(MATCHES):
                ordered.append(scheduler.submit(env.choose_script, match, f"{match}-{1 + len(ordered)}").result(10))
            return choose(*given)

        monkeypatch.setattr(player._chooser, "choose", choose_slowly)
        env.current_matches = [f"{match}-0" for match in range(MATCHES)]
        player.play(seen, None, first)
        assert len(ordered) == MATCHES**2
        env.current_matches = [f"{match}-{1 + 2 * MATCHES + match}" for match in range(MATCHES)]
        player.play(seen, None, first)  # the matches that were ordered last begin
    assert all(opponent.model == "league players/low@1" for opponent in player._opponents)
    player.close()


def test_an_environment_that_does_not_report_who_has_won_is_refused(tmp_path: Path) -> None:
    env = Duels()
    env.result_names = ("past_version",)
    with pytest.raises(ConfigError, match="does not report who has won"):
        play(tmp_path, env, 1, Learner(5))


@pytest.mark.parametrize("mode", ["1v1", "3v3"])
def test_a_script_of_the_arena_plays_as_if_the_environment_had_it_as_opponent(tmp_path: Path, mode: str) -> None:
    publish(tmp_path, ("hard", "rule:hard", 1.0))
    name, size = "ludus.games.arena.env.gym_env:ArenaVectorEnv", int(mode[0])
    common: dict[str, Any] = {"mode": mode, "seconds": 60}
    by_league = make_environments(name, 2 * size, common | {"opponent": "past"})
    by_env = make_environments(name, 2 * size, common | {"opponent": "hard"})
    assert isinstance(by_league, OpponentRows)
    left, right = by_league.reset(3), by_env.reset(3)
    network = NetworkConfig(fcnet_hiddens=(4,), entity_dim=4)
    policy = Policy(by_league.observation_space, by_league.action_space, network)

    class Source:
        def newest(self) -> tuple[Policy, int]:
            return policy, 1

    with_past_opponents(by_league, Source(), settings(tmp_path), 0)
    random = np.random.default_rng(0)
    ended = 0
    for _ in range(700):
        np.testing.assert_array_equal(left.observation["entities"], right.observation["entities"])
        action = np.stack([random.integers(space) for space in by_env.action_space.nvec for _ in range(2 * size)])  # type: ignore[attr-defined]
        action = action.reshape(-1, 2 * size).T
        one, other = by_league.step(action), by_env.step(action)
        np.testing.assert_array_equal(one.reward, other.reward)
        ended += int((one.terminated | one.truncated).sum()) // size
        left, right = one.observations, other.observations
    by_league.close()
    by_env.close()
    assert ended >= 2
    found = [one for one in reports(tmp_path) if isinstance(one, PairReport)]
    assert sum(one.wins + one.draws + one.losses for one in found) == ended
