"""Gymnasium and PettingZoo environments of the Arena."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from ludus.core import spaces
from ludus.core.tree import map_tree
from ludus.envs.pettingzoo import is_multi_agent, make_match
from ludus.envs.registry import spec_of
from ludus.envs.vector_env import make_environments, make_one
from ludus.errors import ConfigError, EnvironmentFault
from ludus.games.arena.engine.heroes import HEROES, IDS
from ludus.games.arena.engine.layout import ALIVE, CORE, HP, LENGTH, OUTER_X, WAVES, X, structure_slot
from ludus.games.arena.engine.observations import FEATURES, SCALAR_FEATURES, SCALARS
from ludus.games.arena.env.gym_env import ArenaEnv, ArenaVectorEnv
from ludus.games.arena.env.pettingzoo_env import parallel_env
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own environments
    from pettingzoo.test import parallel_api_test, parallel_seed_test

NAME = "ludus/Arena-1v1-v0"
TEAMS = "ludus/Arena-3v3-v0"


def sample_heads(space: Any, mask: tuple[Any, ...], random: np.random.Generator) -> Any:
    """Sample each head independently: [N, heads]."""
    return np.stack([np.argmax(random.random(part.shape) * part, axis=-1) for part in mask], axis=-1)


def equal_trees(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_trees(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(equal_trees(a, b) for a, b in zip(one, other, strict=True))
    return np.array_equal(one, other)


def nearly_destroy_base(env: Any, m: int, camp: int) -> None:
    """Destroy the towers of a camp and leave its base with little health."""
    units = env.seats.arena.units[m]
    for which in range(CORE):
        units[ALIVE, structure_slot(1, camp, which)] = units[HP, structure_slot(1, camp, which)] = 0
    units[HP, structure_slot(1, camp, CORE)] = 0


# -- one match --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_the_single_environment_passes_gymnasiums_checker() -> None:
    check_env(gym.make(NAME, seconds=4, render_mode="rgb_array", render_width=320).unwrapped)


def test_observations_are_in_their_space_during_a_whole_match() -> None:
    env = ArenaEnv(seconds=60, lineup="random", opponent="random")
    random = np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    assert observation["entities"].shape[1] == FEATURES
    assert observation["scalars"].shape == (SCALARS,)
    steps, over = 0, False
    while not over:
        assert env.observation_space.contains(observation)
        action = sample_heads(env.action_space, observation["action_mask"], random)
        observation, reward, terminated, truncated, info = env.step(action)
        steps, over = steps + 1, terminated or truncated
        assert np.isfinite(reward)
    assert (terminated, truncated) == (False, True)
    assert steps == 60 * 5
    assert info["won"] == 0
    assert info["illegal"] == 0
    assert env.observation_space.contains(observation)


def test_masks_work_with_gymnasiums_sample() -> None:
    env = ArenaEnv(seconds=5)
    env.action_space.seed(0)
    observation, _ = env.reset(seed=0)
    for _ in range(20):
        observation, *_, info = env.step(env.action_space.sample(mask=observation["action_mask"]))
    assert info["illegal"] == 0


def test_illegal_actions_are_counted() -> None:
    env = ArenaEnv(seconds=5)
    env.reset(seed=0)
    *_, info = env.step(np.array([7, 0, 0, 0]))  # recall at home is illegal
    assert info["illegal"] == 1


@pytest.mark.parametrize("camp", [0, 1])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_destroyed_base_terminates_the_match_with_a_winner(camp: int, lost: int) -> None:
    env = ArenaEnv(side=camp, opponent="nearest", sparse=True)
    env.reset(seed=0)
    nearly_destroy_base(env, 0, lost)
    observation, reward, terminated, truncated, info = env.step(np.zeros(4, np.int64))
    assert (terminated, truncated) == (True, False)
    won = 1 if lost != camp else -1
    assert info["won"] == won
    assert info["camp"] == camp
    assert np.sign(reward) == won
    assert env.observation_space.contains(observation)


def test_the_side_can_be_fixed_or_random() -> None:
    drawn = ArenaEnv(side="random")
    sides = set()
    for seed in range(12):
        sides.add(drawn.reset(seed=seed)[1]["camp"])
    assert sides == {0, 1}
    for camp in (0, 1):
        env = ArenaEnv(side=camp)
        assert {env.reset(seed=seed)[1]["camp"] for seed in range(6)} == {camp}


@pytest.mark.parametrize("camp", [0, 1])
def test_a_line_up_names_the_own_side_first(camp: int) -> None:
    env = ArenaEnv(side=camp, lineup=[["mage"], [117]])
    env.reset(seed=0)
    arena = env.seats.arena
    assert HEROES[arena.lineup[0, camp]].archetype == "mage"
    assert HEROES[arena.lineup[0, 1 - camp]].id == 117


def test_line_ups_can_be_drawn_from_a_list_or_from_all_heroes() -> None:
    listed = ArenaEnv(side=0, lineup=[[["mage"], ["tank"]], [["tank"], ["mage"]]])
    random_heroes = ArenaEnv(side=0, lineup="random")
    pairs, heroes = set(), set()
    for seed in range(40):
        listed.reset(seed=seed)
        random_heroes.reset(seed=seed)
        pairs.add(tuple(HEROES[row].archetype for row in listed.seats.arena.lineup[0]))
        heroes |= {HEROES[row].id for row in random_heroes.seats.arena.lineup[0]}
    assert pairs == {("mage", "tank"), ("tank", "mage")}
    assert heroes == set(IDS)


def test_a_match_can_start_in_the_lane() -> None:
    env = ArenaEnv(start="lane", side=1)
    env.reset(seed=0)
    units = env.seats.arena.units[0]
    assert units[X, 0] + units[X, 1] == LENGTH
    assert units[X, 0] > OUTER_X
    assert env.step(np.array([1, 0, 0, 0]))[0]["scalars"][SCALAR_FEATURES.index("x")] * LENGTH > OUTER_X


def test_matches_start_at_home_or_in_the_lane_by_shares() -> None:
    env = ArenaVectorEnv(64, start={"home": 1, "lane": 3}, side=0)
    env.reset(seed=0)
    where = env.seats.arena.units[:, X, 0]
    assert 36 <= (where > OUTER_X).sum() <= 59
    env.reset(seed=0)
    assert (env.seats.arena.units[:, X, 0] == where).all()


def test_decision_length_and_time_limit_can_be_set() -> None:
    env = ArenaEnv(seconds=2, every=5)
    env.reset(seed=0)
    outcomes = [env.step(np.zeros(4, np.int64))[3] for _ in range(6)]
    assert outcomes == [False] * 5 + [True]
    assert env.metadata["render_fps"] == 3


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"opponent": "mediun"}, "no opponent 'mediun'.*medium"),
        ({"opponent": []}, "there is no opponent"),
        ({"side": 2}, "side is 2"),
        ({"start": "river"}, "start is 'river'"),
        ({"start": {"lane": 1, "river": 1}}, "start is .*lane: 0.9, home: 0.1"),
        ({"start": {"lane": 0}}, "start is"),
        ({"start": {"lane": "all"}}, "start is"),
        ({"start": ["lane"]}, "start is"),
        ({"lineup": "mage"}, "lineup is 'mage'"),
        ({"lineup": [["mage"]]}, "does not fit 1v1"),
        ({"lineup": [["mage"], ["wizard"]]}, "no hero 'wizard'"),
        ({"seconds": 0}, "match is 0 seconds"),
        ({"every": 99}, "every 99 ticks"),
        ({"weights": {"golds": 1}}, "no part 'golds'.*gold"),
        ({"render_mode": "human"}, "no render_mode 'human'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_invalid_options_are_rejected_by_name(keywords: dict[str, Any], sentence: str) -> None:
    for make in (ArenaEnv, ArenaVectorEnv):
        with pytest.raises(ConfigError, match=sentence):
            make(**keywords)


# -- many matches -----------------------------------------------------------------------------------------------------


def test_rows_equal_single_environments_with_the_same_seeds() -> None:
    keywords: dict[str, Any] = {"opponent": ["random", "easy"], "lineup": "random", "seconds": 12}
    many = ArenaVectorEnv(3, **keywords)
    ones = [ArenaEnv(**keywords) for _ in range(3)]
    random = np.random.default_rng(0)
    seen, _ = many.reset(seed=5)
    alone = [one.reset(seed=5 + i)[0] for i, one in enumerate(ones)]
    over = [False] * 3
    for _ in range(150):
        actions = sample_heads(many.single_action_space, seen["action_mask"], random)
        seen, reward, terminated, truncated, _ = many.step(actions)
        for i, one in enumerate(ones):
            if over[i]:
                alone[i], over[i] = one.reset()[0], False
                assert (reward[i], terminated[i], truncated[i]) == (0, False, False)
            else:
                alone[i], earned, fell, cut, _ = one.step(actions[i])
                assert (earned, fell, cut) == (reward[i], terminated[i], truncated[i])
                over[i] = fell or cut
            assert equal_trees(alone[i], {k: tuple(p[i] for p in v) if isinstance(v, tuple) else v[i] for k, v in seen.items()})
    assert many.seats.arena.match[:, WAVES].max() <= 1


def test_the_step_after_the_end_only_starts_the_next_match() -> None:
    env = ArenaVectorEnv(2, seconds=480, side=0)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    env.reset(seed=0)
    nothing = np.zeros((2, 4), np.int64)
    for _ in range(3):
        env.step(nothing)
    nearly_destroy_base(env, 1, 1)
    seen, reward, terminated, truncated, infos = env.step(nothing)
    assert terminated.tolist() == [False, True]
    assert truncated.tolist() == [False, False]
    assert reward[1] > reward[0]
    assert (infos["won"].tolist(), infos["_won"].tolist()) == ([0, 1], [False, True])
    assert seen["scalars"][1, 0] > 0  # of the finished match
    seen, reward, terminated, _, infos = env.step(nothing)
    assert seen["scalars"][1, 0] == 0
    assert seen["scalars"][0, 0] > 0
    assert (reward[1], terminated[1], infos) == (0, False, {})
    assert env.step(nothing)[0]["scalars"][1, 0] > 0


def test_a_seed_determines_all_matches() -> None:
    def played(seed: int) -> list[Any]:
        env = ArenaVectorEnv(4, opponent="random", lineup="random", seconds=4)
        random, found = np.random.default_rng(0), [env.reset(seed=seed)[0]]
        for _ in range(50):
            found.append(env.step(sample_heads(None, found[-1]["action_mask"], random))[0])
        return found

    first, again, other = played(1), played(1), played(2)
    assert all(equal_trees(a, b) for a, b in zip(first, again, strict=True))
    assert not equal_trees(first[-1], other[-1])


def test_observations_are_not_changed_by_later_steps() -> None:
    env = ArenaVectorEnv(2)
    before, _ = env.reset(seed=0)
    kept = {key: np.copy(part) for key, part in before.items() if not isinstance(part, tuple)}
    for _ in range(5):
        env.step(np.tile([1, 0, 0, 0], (2, 1)))
    assert all(np.array_equal(kept[key], before[key]) for key in kept)


def test_with_self_two_rows_play_each_other() -> None:
    env = ArenaVectorEnv(4, opponent="self", lineup="random")
    env.reset(seed=1)
    seats = env.seats
    assert seats.arena.matches == 2
    assert seats.match_of.tolist() == [0, 0, 1, 1]
    assert (seats.hero_of[0::2] != seats.hero_of[1::2]).all()
    random = np.random.default_rng(0)
    seen, *_ = env.step(np.zeros((4, 4), np.int64))
    for _ in range(300):
        seen, reward, *_ = env.step(sample_heads(None, seen["action_mask"], random))
        assert reward[0::2] == pytest.approx(-reward[1::2], abs=1e-6)
    moves = np.zeros((4, 4), np.int64)
    moves[1, 0] = 1
    before = seats.arena.units[0, X, :2].copy()
    env.reset(seed=1)
    before = seats.arena.units[0, X, :2].copy()
    env.step(moves)
    after = seats.arena.units[0, X, :2]
    assert (after != before).tolist() == [hero == seats.hero_of[1] for hero in (0, 1)]


def test_an_odd_row_plays_against_a_bot_when_the_others_play_each_other() -> None:
    env = ArenaVectorEnv(3, opponent="self")
    env.reset(seed=0)
    assert env.seats.arena.matches == 2
    assert env.step(np.zeros((3, 4), np.int64))[1].shape == (3,)


def test_max_episode_steps_shortens_a_match() -> None:
    environments = make_environments(NAME, 2, {"max_episode_steps": 7})
    environments.reset(0)
    outcomes = [bool(environments.step(np.zeros((2, 4), np.int64)).truncated.all()) for _ in range(7)]
    assert outcomes == [False] * 6 + [True]


def test_every_row_can_be_rendered() -> None:
    env = ArenaVectorEnv(2, render_mode="rgb_array", render_width=320)
    env.reset(seed=0)
    frames = env.render()
    assert frames is not None
    assert [frame.shape[2] for frame in frames] == [3, 3]
    assert frames[0].dtype == np.uint8


# -- teams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{}, {"opponent": "nearest", "side": "red"}], ids=["both camps", "one camp"])
def test_team_environments_pass_pettingzoos_tests(keywords: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    parallel_api_test(parallel_env("3v3", seconds=4, **keywords), num_cycles=60)
    parallel_seed_test(lambda: parallel_env("2v2", seconds=4, lineup="random", **keywords), num_cycles=25)
    assert "Passed" in capsys.readouterr().out


def test_agents_are_named_by_camp_and_bots_are_no_agents() -> None:
    assert parallel_env("2v2").possible_agents == ["blue_0", "blue_1", "red_0", "red_1"]
    assert parallel_env("2v2", side=1).possible_agents == ["blue_0", "blue_1", "red_0", "red_1"]
    assert parallel_env("2v2", opponent="easy").possible_agents == ["blue_0", "blue_1"]
    red = parallel_env("2v2", opponent="easy", side="red", lineup=[["mage", "tank"], ["support", "support"]])
    assert red.possible_agents == ["red_0", "red_1"]
    _, infos = red.reset(seed=0)
    assert [info["camp"] for info in infos.values()] == [1, 1]
    assert [HEROES[row].archetype for row in red.seats.arena.lineup[0]] == ["support", "support", "mage", "tank"]


def test_each_agent_moves_its_own_hero() -> None:
    env = parallel_env("3v3", side="red")
    env.reset(seed=0)
    for h, agent in enumerate(env.possible_agents):
        before = env.seats.arena.units[0, X, :6].copy()
        env.step({agent: np.array([1, 0, 0, 0])})
        assert np.flatnonzero(env.seats.arena.units[0, X, :6] != before).tolist() == [h], agent


def test_a_team_match_ends_for_all_agents_at_once() -> None:
    env = parallel_env("2v2", seconds=1)
    env.reset(seed=0)
    for _ in range(5):
        assert env.agents == env.possible_agents
        seen, _, terminations, truncations, infos = env.step({})
    assert env.agents == []
    assert set(truncations.values()) == {True}
    assert set(terminations.values()) == {False}
    assert seen.keys() == infos.keys() == set(env.possible_agents)
    assert env.step({}) == ({}, {}, {}, {}, {})


def test_team_spirit_shares_rewards_and_zero_sum_subtracts_them_from_the_enemy() -> None:
    env = parallel_env("3v3", team_spirit=1.0)
    random = np.random.default_rng(0)
    env.reset(seed=0)
    env.seats.arena.units[0, X, :6] = LENGTH // 2 + np.array([-500, -500, -500, 500, 500, 500])
    seen, *_ = env.step({})
    earned = []
    for _ in range(50):
        actions = {agent: sample_heads(None, part["action_mask"], random) for agent, part in seen.items()}
        seen, rewards, *_ = env.step(actions)
        red, blue = ([rewards[f"{camp}_{i}"] for i in range(3)] for camp in ("red", "blue"))
        assert np.ptp(red) < 1e-6
        assert np.ptp(blue) < 1e-6
        assert red[0] == pytest.approx(-blue[0], abs=1e-6)
        earned.append(red[0])
    assert np.any(earned)


def test_the_state_hides_nothing() -> None:
    env = parallel_env("3v3")
    env.reset(seed=0)
    assert env.state_space.contains(env.state())
    slots = env.seats.arena.slots
    whole = env.state()[: slots * FEATURES].reshape(slots, FEATURES)
    shown = env.seats.observe()["entities"][0]
    assert whole[:6, 0].tolist() == [1] * 6  # all heroes are visible
    assert shown[:6, 0].tolist() == [1] * 3 + [0] * 3  # enemies are at home, out of sight
    before = env.state()
    env.step({"red_1": np.array([1, 0, 0, 0])})
    assert not np.array_equal(before, env.state())


def test_a_team_environment_can_be_rendered() -> None:
    env = parallel_env("3v3", render_mode="rgb_array", render_width=320)
    env.reset(seed=0)
    assert env.render().shape[1:] == (320, 3)


# -- by name ----------------------------------------------------------------------------------------------------------


def test_registered_names_give_a_1v1_vector_and_multi_agent_teams() -> None:
    assert spec_of(NAME).vector_entry_point is not None
    assert not is_multi_agent(NAME)
    environments = make_environments(NAME, 3, {"opponent": "nearest", "seconds": 30})
    assert type(environments).__name__ == "VectorEnvironments"
    seen = environments.reset(0)
    assert seen.mask is not None
    assert seen.mask.shape == (3, spaces.mask_size(environments.action_space))
    assert is_multi_agent(TEAMS)
    match = make_match(TEAMS, {"seconds": 30})
    assert list(match.agents) == [f"{camp}_{i}" for camp in ("blue", "red") for i in range(3)]
    turns = match.reset(0).turns
    assert [turn.agent for turn in turns] == list(match.agents)
    assert all(turn.mask is not None for turn in turns)
    one = make_one(NAME, {"seconds": 30})
    assert one.observation_space["entities"].shape == (32, FEATURES)  # type: ignore[index]


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(EnvironmentFault, match="secnds"):
        make_environments(NAME, 2, {"secnds": 30})


def test_a_policy_can_play_it() -> None:
    environments = make_environments(NAME, 4, {"opponent": "random", "seconds": 10})
    policy = Policy(environments.observation_space, environments.action_space, NetworkConfig())
    seen, generator = environments.reset(0), torch.Generator().manual_seed(0)
    with policy.acting():
        for _ in range(60):
            assert seen.mask is not None
            observation = map_tree(lambda x: torch.from_numpy(np.ascontiguousarray(x)), seen.observation)
            noise = policy.distribution.noise((4,), generator)
            first, mask = torch.zeros(4, dtype=torch.bool), torch.from_numpy(seen.mask)
            action, *_ = policy.step(observation, policy.initial_state(4), first, mask, noise)
            seen = environments.step(action.numpy()).observations
    assert environments._env.seats.result()["illegal"].sum() == 0  # type: ignore[attr-defined]


_WITHOUT_NUMBA = """
import sys
import ludus, ludus.envs.registry, ludus.envs.vector_env, ludus.envs.pettingzoo
assert not {"numba", "pettingzoo"} & set(sys.modules)
sys.modules["numba"] = None
from ludus.errors import MissingExtra
for make in (lambda: ludus.envs.vector_env.make_environments("ludus/Arena-1v1-v0", 1),
             lambda: ludus.envs.pettingzoo.make_match("ludus/Arena-3v3-v0")):
    try:
        make()
    except MissingExtra as error:
        assert "ludus[arena]" in str(error.hint), error.hint
    else:
        sys.exit("made without numba")
"""


def test_numba_is_required_only_when_the_arena_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_NUMBA], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rotating_line_ups_pair_every_hero_with_every_other() -> None:
    listed = [(107, 190), (107, 117), (173, 141)]
    turns = ArenaVectorEnv(2, opponent="easy", side=0, lineup={"cycle": [[[own], [other]] for own, other in listed]})

    def met() -> list[tuple[int, ...]]:
        return [tuple(HEROES[row].id for row in turns.seats.arena.lineup[m]) for m in (0, 1)]

    turns.reset(seed=0)
    first = met()
    turns.seats.begin()
    begun = listed.index((first[0][0], first[0][1]))
    assert first + met() == [listed[(begun + k) % 3] for k in range(4)]
    turns.reset(seed=0)
    assert met() == first
    begins = set()
    for worker in range(12):  # with seeds one vector apart
        turns.reset(seed=96 * worker)
        begins.add(met()[0])
    assert begins == set(listed)
    env = ArenaVectorEnv(36, opponent="easy", side=0, lineup="roundrobin")
    env.reset(seed=0)
    assert {tuple(pair) for pair in env.seats.arena.lineup.tolist()} == {(a, b) for a in range(6) for b in range(6)}
    with pytest.raises(ConfigError, match="no hero 'wizard'"):
        ArenaVectorEnv(2, lineup={"random": [107, "wizard"]})


@pytest.mark.parametrize("mode", ["1v1", "3v3"])
def test_observation_bounds_hold_and_are_tight(mode: str) -> None:
    """Exports are verified on samples of the space, which must be realistic."""
    rows = 12
    env = ArenaVectorEnv(rows, mode=mode, opponent=["easy", "hard"], lineup="random", whole=True)
    seen, _ = env.reset(seed=5)
    highest: dict[str, Any] = {"entities": -np.inf, "scalars": -np.inf}
    idle = np.zeros((rows, 4), np.int64)
    for _ in range(1500):
        seen, *_ = env.step(idle)
        assert env.observation_space.contains(seen)
        for name, before in highest.items():
            highest[name] = np.maximum(before, seen["observation"][name])
    assert isinstance(env.single_observation_space, gym.spaces.Dict)
    own = env.single_observation_space["observation"]
    assert isinstance(own, gym.spaces.Dict)
    for name, found in highest.items():
        space = own[name]
        assert isinstance(space, gym.spaces.Box)
        features = space.shape[-1]
        needed = np.maximum(found.reshape(-1, features).max(axis=0), 0.1)
        assert np.median(space.high.reshape(-1, features).max(axis=0) / needed) <= 1.5
    env.close()
