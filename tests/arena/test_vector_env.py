"""Vector environment of the Arena: teams, opponents, results, start states and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest

from ludus.config.schema import SelfPlayConfig
from ludus.envs.opponents.opponent_rows import OpponentRows
from ludus.envs.vector_env import VectorEnvironments, training_env_config
from ludus.errors import ConfigError
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.engine.heroes import row_of
from ludus.games.arena.engine.layout import ALIVE, CORE, HP, TICK, WINNER, structure_slot
from ludus.games.arena.engine.observations import FEATURES, SCALARS
from ludus.games.arena.engine.saved_state import write_state
from ludus.games.arena.env.gym_env import ArenaVectorEnv
from ludus.games.arena.env.seats import state_space
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.self_play import with_past_opponents

SEEN_BY_THE_ENEMY = 33
SHORT: dict[str, Any] = {"seconds": 4, "every": 15}


def nothing(env: ArenaVectorEnv) -> Any:
    return np.zeros((env.num_envs, 4), np.int64)


def played(env: ArenaVectorEnv, steps: int) -> list[dict[str, Any]]:
    """Return the infos of `steps` steps without actions."""
    return [env.step(nothing(env))[4] for _ in range(steps)]


@pytest.mark.parametrize(
    ("rows", "mode", "opponent", "matches", "others"),
    [
        (4, "1v1", "self", 2, 0),
        (5, "1v1", "self", 3, 0),
        (4, "1v1", "easy", 4, 0),
        (10, "1v1", {"self": 0.4, "past": 0.3, "easy": 0.3}, 2 + 3 + 3, 3),
        (12, "3v3", "self", 2, 0),
        (12, "3v3", {"past": 0.5, "hard": 0.5}, 4, 6),
        (13, "3v3", "medium", 5, 0),
        (1, "3v3", {"self": 0.8, "past": 0.2}, 1, 0),
    ],
)
def test_rows_are_assigned_by_shares(
    rows: int, mode: str, opponent: str | Mapping[str, float], matches: int, others: int
) -> None:
    env = ArenaVectorEnv(rows, mode=mode, opponent=opponent)
    assert env.seats.arena.matches == matches
    assert env.num_envs == rows + others
    assert env.opponent_rows.tolist() == [False] * rows + [True] * others
    env.reset(seed=0)
    size, heroes = env.seats.size, env.seats.hero_of
    places = list(zip(env.seats.match_of.tolist(), heroes.tolist(), strict=True))
    assert len(set(places)) == len(places), "a hero has two rows"
    for m in set(env.seats.match_of[env.opponent_rows].tolist()):
        mine = {h // size for (match, h), past in zip(places, env.opponent_rows, strict=True) if match == m and not past}
        theirs = {h // size for (match, h), past in zip(places, env.opponent_rows, strict=True) if match == m and past}
        assert len(mine) == len(theirs) == 1
        assert mine != theirs


def test_the_rows_of_a_team_are_adjacent_and_of_one_camp() -> None:
    env = ArenaVectorEnv(9, mode="3v3", opponent="easy")
    env.reset(seed=3)
    camps = env.seats.hero_of // 3
    assert [set(camps[i : i + 3].tolist()) for i in (0, 3, 6)] == [{c} for c in camps[::3].tolist()]


def test_names_of_results_do_not_depend_on_the_number_of_rows() -> None:
    opponent = {"self": 0.7, "past": 0.2, "easy": 0.1}
    assert ArenaVectorEnv(1, opponent=opponent).result_names == ArenaVectorEnv(40, opponent=opponent).result_names
    assert ArenaVectorEnv(1, opponent=opponent).result_names[:6] == (
        *("win/past", "loss/past", "win/easy", "loss/easy"),
        *("win/latest", "loss/latest"),
    )


def nearly_destroy_base(env: ArenaVectorEnv, m: int, camp: int) -> None:
    """Leave the base of this camp with little health."""
    units = env.seats.arena.units[m]
    for which in range(CORE):
        units[ALIVE, structure_slot(env.seats.size, camp, which)] = 0
    units[HP, structure_slot(env.seats.size, camp, CORE)] = 0


def test_a_win_is_reported_once_by_its_team() -> None:
    env = ArenaVectorEnv(6, mode="3v3", opponent={"easy": 0.5, "past": 0.5}, side=0)
    env.reset(seed=0)
    by_script = int(np.flatnonzero([kind == "" for kind in env.kinds])[0])
    nearly_destroy_base(env, by_script, camp=1)
    infos = env.step(nothing(env))[4]
    rows = np.flatnonzero(env.seats.match_of == by_script)
    assert infos["_win/easy"].nonzero()[0].tolist() == [rows[0]]
    assert infos["win/easy"][rows[0]] == 1
    assert infos["loss/easy"][rows[0]] == 0
    assert not infos["_win/past"].any()
    assert infos["_kills"].nonzero()[0].tolist() == rows.tolist()


def test_a_match_at_the_time_limit_is_neither_won_nor_lost() -> None:
    env = ArenaVectorEnv(2, opponent="easy", **SHORT)
    env.reset(seed=0)
    told = [infos for infos in played(env, 6) if infos]
    assert len(told) == 1
    assert told[0]["_win/easy"].all()
    assert not told[0]["win/easy"].any()
    assert not told[0]["loss/easy"].any()
    assert told[0]["seconds"].tolist() == [4.0, 4.0]


def test_the_central_state_has_no_fog_of_war_and_the_own_hero_first() -> None:
    env = ArenaVectorEnv(6, mode="3v3", opponent="self", whole=True)
    seen, _ = env.reset(seed=0)
    assert isinstance(env.single_observation_space, gym.spaces.Dict)
    assert env.single_observation_space["state"] == state_space(3)
    assert env.observation_space.contains(seen)
    own, state = seen["observation"], seen["state"]
    slots = env.seats.arena.slots
    entities = state[:, : slots * FEATURES].reshape(6, slots, FEATURES)
    scalars = state[:, slots * FEATURES :].reshape(6, 6, SCALARS)
    other = np.arange(SCALARS) != SEEN_BY_THE_ENEMY
    np.testing.assert_array_equal(scalars[:, 0][:, other], own["scalars"][:, other])
    present = own["entities"][:, :, 0] > 0
    assert (entities[present] == own["entities"][present]).mean() > 0.99, "what is seen is the same, but for who sees it"
    hidden = (entities[:, 3:6, 0] > 0) & ~present[:, 3:6]
    assert hidden.any(), "no enemy was hidden"


def test_matches_start_from_states_of_earlier_ones() -> None:
    env = ArenaVectorEnv(16, opponent="self", repeat=1.0, seconds=20)
    env.reset(seed=0)
    played(env, 400)
    states = env.seats._mid_game_starts
    assert states is not None
    assert len(states._recent) > 5
    env.seats.begin()
    assert (env.seats.arena.match[:, TICK] > 0).all()
    assert {env.seats.arena.save(m) for m in range(env.seats.arena.matches)} <= set(states._recent)


def test_matches_start_from_saved_states(tmp_path: Path) -> None:
    source = ArenaVectorEnv(1, opponent="medium")
    source.reset(seed=5)
    played(source, 30)
    moment = source.seats.arena.save(0)
    write_state(tmp_path / "moment", moment)
    env = ArenaVectorEnv(4, opponent="easy", states=str(tmp_path), repeat=1.0)
    env.reset(seed=0)
    assert {env.seats.arena.save(m) for m in range(4)} == {moment}


def test_a_mid_game_start_keeps_the_time_limit(tmp_path: Path) -> None:
    source = ArenaVectorEnv(1, opponent="medium", every=15)
    source.reset(seed=5)
    played(source, 3)
    write_state(tmp_path / "moment", source.seats.arena.save(0))
    env = ArenaVectorEnv(2, opponent="easy", states=str(tmp_path), repeat=1.0, seconds=5, every=15)
    env.reset(seed=0)
    told = [infos["seconds"].tolist() for infos in played(env, 3) if infos]
    assert told == [[5.0, 5.0]]


def test_states_of_finished_matches_are_rejected(tmp_path: Path) -> None:
    source = ArenaVectorEnv(1, opponent="medium", every=15, side=0)
    source.reset(seed=5)
    played(source, 3)
    write_state(tmp_path / "late", source.seats.arena.save(0))
    with pytest.raises(ConfigError, match="finished matches, or later than 2 s"):
        ArenaVectorEnv(1, opponent="easy", states=str(tmp_path), repeat=1.0, seconds=2)
    nearly_destroy_base(source, 0, camp=1)
    played(source, 1)
    write_state(tmp_path / "late", source.seats.arena.save(0))
    with pytest.raises(ConfigError, match="finished matches, or later than"):
        ArenaVectorEnv(1, opponent="easy", states=str(tmp_path), repeat=1.0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"repeat": 1.5}, "repeat is 1.5"),
        ({"states": "."}, "repeat is 0"),
        ({"states": "/no/such/place", "repeat": 0.5}, "not a directory"),
        ({"weights": {"gold": [[0, 1], [0, 2]]}}, "weight of gold"),
        ({"weights": {"gold": []}}, "weight of gold"),
        ({"weights": {"gold": [[0, 1, 2]]}}, "weight of gold"),
        ({"team_spirit": [[0, 0.5], [10, 1.5]]}, "team_spirit"),
        ({"opponent": {"self": -1}}, "share of opponent 'self'"),
        ({"opponent": {"meduim": 1}}, "medium"),
    ],
    ids=str,
)
def test_invalid_options_are_explained(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ArenaVectorEnv(4, **keywords)


def test_the_error_for_a_missing_mode_lists_the_modes_in_the_directory(tmp_path: Path) -> None:
    source = ArenaVectorEnv(1, opponent="medium")
    source.reset(seed=5)
    write_state(tmp_path / "moment", source.seats.arena.save(0))
    with pytest.raises(ConfigError, match=r"no state of 3v3 .*1v1"):
        ArenaVectorEnv(3, mode="3v3", opponent="easy", states=str(tmp_path), repeat=1.0)


def test_weights_of_rewards_follow_their_schedule() -> None:
    weights = {"gold": [[0, 1.0], [1000, 3.0]]} | dict.fromkeys(
        ("experience", "health", "kill", "death", "assist", "last_hit", "damage", "healing", "towers", "win"), 0
    )
    env = ArenaVectorEnv(1, opponent="easy", weights=weights, zero_sum=False, every=15, side=0)

    def earned() -> float:
        env.reset(seed=0)
        return float(sum(env.step(nothing(env))[1][0] for _ in range(30)))

    first = earned()
    env.set_timesteps(500)
    second = earned()
    env.set_timesteps(10**9)
    third = earned()
    assert first > 0
    assert second == pytest.approx(2 * first, rel=1e-4)
    assert third == pytest.approx(3 * first, rel=1e-4)


def test_even_matchmaking_prefers_bots_with_even_results() -> None:
    """An idle player loses to all bots, so the shares stay; then some wins against `easy` are recorded."""
    env = ArenaVectorEnv(32, opponent={"easy": 0.5, "hard": 0.5}, matchmaking="even", seconds=30)
    env.reset(seed=2)
    idle = np.zeros((32, 4), np.int64)
    for _ in range(800):
        _, _, terminated, truncated, _ = env.step(idle)
        ended = np.flatnonzero(terminated | truncated)
        easy = env.seats.bot_of[ended] == BOTS.index("easy")
        env.seats.arena.match[ended[easy][::2], WINNER] = env.seats.hero_of[ended[easy][::2]]
    met = [BOTS[int(bot)] for bot in env.seats.bot_of]
    assert met.count("easy") >= 20, met
    assert env.seats.opponents.probabilities[0, 1] < 0.2


def test_even_matchmaking_prefers_line_ups_that_lose() -> None:
    """An idle player always loses; wins are recorded for the first line-up."""
    first, second = [[107], [190]], [[190], [107]]
    env = ArenaVectorEnv(32, opponent="easy", matchmaking="even", lineup=[first, second], seconds=30)
    env.reset(seed=2)
    idle = np.zeros((32, 4), np.int64)

    def own() -> npt.NDArray[np.int32]:
        return env.seats.arena.lineup[np.arange(32), env.seats.hero_of]

    strong = row_of(107)
    for _ in range(800):
        _, _, terminated, truncated, _ = env.step(idle)
        ended = np.flatnonzero(terminated | truncated)
        chosen = ended[own()[ended] == strong]
        env.seats.arena.match[chosen, WINNER] = env.seats.hero_of[chosen]
    assert np.count_nonzero(own() == strong) <= 10
    assert env.seats.opponents.probabilities[0, 0] < 0.2


# -- self-play ----------------------------------------------------------------------------------------------------------


class ManyVersions:
    """Every request gets the next version."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._version = policy, 0

    def newest(self) -> tuple[Policy, int]:
        self._version += 1
        return self._policy, self._version


@pytest.mark.parametrize("swap_sides", [True, False])
def test_an_opponent_keeps_its_version_and_its_side_for_a_match(swap_sides: bool) -> None:
    settings = SelfPlayConfig(opponents="past", every=1, keep=50, period=1, swap_sides=swap_sides)
    given = training_env_config("ludus/Arena-1v1-v0", {"mode": "2v2", **SHORT}, settings)
    env = ArenaVectorEnv(6, **given)
    environments = OpponentRows(VectorEnvironments("arena", env), env.opponent_rows, env.match_of_row)
    spaces = environments.observation_space, environments.action_space
    source = ManyVersions(Policy(*spaces, NetworkConfig(fcnet_hiddens=(4,))))
    environments.reset(0)
    facing = with_past_opponents(environments, source, settings, 0)
    player = environments.player
    assert player is not None
    found: dict[int, set[tuple[tuple[int, ...], int]]] = {}
    numbers, camps, over = np.array([0, 100, 200]), set(), np.zeros(3, np.bool_)
    for _ in range(80):
        facing.newest()
        camp = (env.seats.hero_of // env.seats.size)[:6:2]
        outcome = environments.step(np.zeros((6, 4), np.int64))
        versions = player.versions.reshape(3, 2)
        for match in np.flatnonzero(~over):  # otherwise the step only begins the next match
            found.setdefault(int(numbers[match]), set()).add((tuple(versions[match].tolist()), int(camp[match])))
        numbers, over = numbers + over, (outcome.terminated | outcome.truncated)[::2]
        camps |= set(camp.tolist())
    assert len(found) > 12
    assert all(len(played) == 1 for played in found.values()), "one version and one side in every match"
    assert all(len(set(versions)) == 1 for played in found.values() for versions, _ in played), "one version for both heroes"
    assert len({versions for played in found.values() for versions, _ in played}) > 6
    assert camps == ({0, 1} if swap_sides else {0})
