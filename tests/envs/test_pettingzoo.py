"""Environments with several agents, as a match shows them."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ludus.envs.pettingzoo import CentralState, MatchStep, MultiAgentMatch, is_multi_agent, make_match, match_of, sample_action
from ludus.errors import EnvironmentFault, LudusError, UnknownName
from tests.matches import NAMES, Books, ScriptParallel, ScriptTurns, Simple, make_parallel, make_turns


def played(match: MultiAgentMatch, seed: int, choose: Any) -> tuple[dict[str, float], list[MatchStep]]:
    """One match; returns by agent, and all that was said."""
    moved = match.reset(seed)
    told = [moved]
    returns = dict.fromkeys(match.agents, 0.0)
    while not moved.over:
        moved = match.step({turn.agent: choose(turn) for turn in moved.turns})
        told.append(moved)
        for turn in moved.turns:
            returns[turn.agent] += turn.reward
        for left in moved.departures:
            returns[left.agent] += left.reward
    return returns, told


def randomly(seed: int) -> Any:
    random = np.random.default_rng(seed)

    def choose(turn: Any) -> int:
        return int(random.integers(4)) if turn.mask is None else int(random.choice(np.flatnonzero(turn.mask)))

    return choose


# -- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("mpe2/simple_spread_v3", True),
        ("pettingzoo/tictactoe_v3", True),
        ("tests.matches:make_parallel", True),
        ("tests.matches:ScriptTurns", True),
        ("tests.matches:undeclared", True),
        ("CartPole-v1", False),
        ("ALE/Pong-v5", False),
        ("external", False),
        ("tests.environments:make_count", False),
        ("tests.games:endless", False),
        ("tests.nowhere:nothing", False),
    ],
)
def test_an_environment_tells_whether_it_has_several_agents(name: str, several: bool) -> None:
    assert is_multi_agent(name, {}) is several


_made: list[dict[str, Any]] = []


def counted(**settings: Any):  # type: ignore[no-untyped-def] # as users write it: nothing is declared
    _made.append(settings)
    return Simple(**settings)


def broken(**settings: Any):  # type: ignore[no-untyped-def]
    raise RuntimeError("no licence")


def test_what_an_undeclared_function_makes_is_looked_at_once_for_each_config() -> None:
    _made.clear()
    for _ in range(3):
        assert is_multi_agent(f"{__name__}:counted", {"length": 3})
        assert is_multi_agent(f"{__name__}:counted", {"length": 4})
    assert _made == [{"length": 3}, {"length": 4}]


def test_an_undeclared_function_that_fails_is_not_taken_for_one_agent() -> None:
    with pytest.raises(EnvironmentFault, match=r"broken raised RuntimeError in its constructor: no licence"):
        is_multi_agent(f"{__name__}:broken", {})


def test_a_misspelt_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="mpe2/simple_spread_v3"):
        make_match("mpe2/simple_spred_v3")
    with pytest.raises(UnknownName, match="pettingzoo/tictactoe_v3"):
        make_match("pettingzoo/tictactoe_v4")


def test_unknown_environment_keywords_are_reported() -> None:
    with pytest.raises(EnvironmentFault, match="env_config"):
        make_match("mpe2/simple_spread_v3", {"agents": 3})


def test_an_environment_with_one_agent_is_refused() -> None:
    with pytest.raises(LudusError, match="possible_agents"):
        make_match("tests.environments:make_count")


def test_tictactoe_is_played_in_turns_with_masks_to_its_end() -> None:
    match = make_match("pettingzoo/tictactoe_v3")
    taken: set[int] = set()
    moved, players = match.reset(0), []
    while not moved.over:
        (turn,) = moved.turns
        assert turn.mask is not None
        assert set(np.flatnonzero(turn.mask)) == set(range(9)) - taken
        players.append(turn.agent)
        taken.add(int(np.flatnonzero(turn.mask)[0]))  # 0, 1, 2 … in turn: the first player fills 2, 4, 6
        moved = match.step({turn.agent: int(np.flatnonzero(turn.mask)[0])})
    assert players == ["player_1", "player_2"] * 3 + ["player_1"]
    assert {left.agent: (left.reward, left.terminated) for left in moved.departures} == {
        "player_1": (1, True),
        "player_2": (-1, True),
    }


# -- against the books of the game --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ScriptParallel, ScriptTurns])
@pytest.mark.parametrize("masked", ["", "observation", "info"])
def test_every_agent_step_is_returned_once_and_in_order(kind: Any, masked: str) -> None:
    env = kind(masked=masked)
    match = match_of(env, "script")
    for seed in range(30):
        returns, told = played(match, seed, randomly(seed))
        books: Books = env.history[-1]
        assert not books.open, "somebody was not heard of any more"
        assert sum(returns.values()) == pytest.approx(books.paid, abs=1e-5)
        for agent in NAMES:
            acted = [did for life in books.lives if life.agent == agent for did in life.steps]
            turns = [turn for moved in told for turn in moved.turns if turn.agent == agent]
            assert len(turns) == len(acted)
            for turn, did in zip(turns, acted, strict=True):
                np.testing.assert_array_equal(turn.observation, did.seen)
                assert (None if turn.mask is None else turn.mask.tolist()) == did.allowed
            ends = [left for moved in told for left in moved.departures if left.agent == agent]
            lives = [life for life in books.lives if life.agent == agent]
            by_end = [("terminated" if left.terminated else "truncated") for left in ends]
            assert by_end == [life.end for life in lives]


@pytest.mark.parametrize("make", [make_parallel, make_turns])
def test_the_same_seed_is_the_same_match(make: Any) -> None:
    one, two = match_of(make(), "one"), match_of(make(), "two")
    for match in (one, two):
        match.reset(5)  # the second one has a history
    first, again = played(one, 3, randomly(1))[1], played(two, 3, randomly(1))[1]
    assert [[t.agent for t in m.turns] for m in first] == [[t.agent for t in m.turns] for m in again]
    assert [t.reward for m in first for t in m.turns] == [t.reward for m in again for t in m.turns]


def test_rewards_of_departed_agents_are_counted_only() -> None:
    match = match_of(Simple("gone", at=2), "simple")
    returns, _ = played(match, 0, lambda turn: 1)
    assert returns == {"a": 2 + 2 + 1 + 1 + 1, "b": 2 + 2}
    assert match.late_rewards == 3


def test_agents_that_all_vanish_at_once_have_left_without_an_end() -> None:
    _, told = played(match_of(Simple("vanish"), "simple"), 0, lambda turn: 0)
    assert told[-1].over
    assert [(left.agent, left.terminated, left.truncated, left.observation) for left in told[-1].departures] == [
        ("a", False, False, None),
        ("b", False, False, None),
    ]


def test_an_agent_may_appear_for_the_first_time_late() -> None:
    match = match_of(Simple("late", at=500, length=502), "simple")
    _, told = played(match, 0, lambda turn: 1)
    assert [number for number, moved in enumerate(told) if "late" in [turn.agent for turn in moved.turns]] == [500, 501]
    assert {left.agent for left in told[-1].departures} == {"a", "b", "late"}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stranger", "'stranger' of simple appeared at step 3 but is not one of its possible_agents"),
        ("nan", "step 3, agent 'b': the observation of b contains nan"),
        ("shape", r"agent 'b': the observation of b has shape \[3\]"),
        ("reward", "gave 'a' the reward inf at step 3"),
        ("raises", "raised RuntimeError in step"),
    ],
)
def test_errors_name_the_agent_and_the_step(fault: str, words: str) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        played(match_of(Simple(fault), "simple"), 0, lambda turn: 0)


def test_a_mask_that_forbids_everything_is_a_fault() -> None:
    class Forbidding(ScriptParallel):
        def _view(self, agent: str) -> tuple[Any, dict[str, Any]]:
            seen, _ = super()._view(agent)
            return seen, {"action_mask": np.zeros(4, np.int8)}

    with pytest.raises(EnvironmentFault, match="forbids every action of"):
        match_of(Forbidding(), "script").reset(0)


def test_endless_steps_without_an_acting_agent_are_a_fault() -> None:
    class Silent(Simple):
        def step(self, actions: dict[str, Any]) -> Any:
            return {}, {}, {}, {}, {}

    match = match_of(Silent(), "silent")
    moved = match.reset(0)
    moved = match.step({turn.agent: 0 for turn in moved.turns})
    with pytest.raises(EnvironmentFault, match="No agent of silent has acted"):
        deque(match.step({}) for _ in range(20_000))


# -- the whole ----------------------------------------------------------------------------------------------------------


def test_the_central_state_is_all_observations_with_zeros_for_absent_agents() -> None:
    match = match_of(Simple("gone", at=2), "simple")
    whole = CentralState(match.agents, match.state_space)
    moved = match.reset(0)
    whole.update(moved)
    np.testing.assert_allclose(whole.shared_state(match), [0.0, 0.0, 0.0, 0.25])
    for _ in range(2):
        moved = match.step({turn.agent: 0 for turn in moved.turns})
        whole.update(moved)
        whole.remove_departed(moved)
    np.testing.assert_allclose(whole.shared_state(match), [0.4, 0.0, 0.0, 0.0])
    shown = whole.combine("a", moved.turns[0].observation, whole.shared_state(match))
    assert shown["state"]["agent"].tolist() == [1.0, 0.0]
    assert whole.space.contains(shown["state"])


def test_the_whole_of_an_environment_that_has_a_view_of_it_is_that() -> None:
    match = make_match("tests.matches:make_roles")
    whole = CentralState(match.agents, match.state_space)
    moved = match.reset(1)
    whole.update(moved)
    assert whole.shared_state(match).tolist() == [moved.turns[0].observation, 0.0]


def test_agents_that_are_numbered_are_called_by_their_numbers() -> None:
    class Numbered(ScriptParallel):
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = [0, 1]  # type: ignore[list-item]

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self.agents = [0, 1]  # type: ignore[list-item]
            return {0: np.zeros(3), 1: np.ones(3)}, {}

        def step(self, actions: Any) -> Any:
            self.agents = []
            done = dict.fromkeys(actions, True)
            return {0: np.zeros(3), 1: np.ones(3)}, {0: float(actions[0]), 1: float(actions[1])}, done, {}, {}

    match = match_of(Numbered(), "numbered")
    assert [turn.agent for turn in match.reset(0).turns] == ["0", "1"]
    moved = match.step({"0": 2, "1": 3})
    assert {left.agent: left.reward for left in moved.departures} == {"0": 2.0, "1": 3.0}


# -- acting without knowing anything ------------------------------------------------------------------------------------


def drawn(space: gym.Space[Any], mask: Any, n: int = 4000) -> list[Any]:
    random = np.random.default_rng(1)
    found = [sample_action(space, None if mask is None else np.array(mask, bool), random) for _ in range(n)]
    assert all(space.contains(action) for action in found)
    return found


def test_random_choices_are_equally_likely_among_what_is_allowed() -> None:
    for mask, allowed in ((None, [3, 4, 5, 6]), ([0, 1, 0, 1], [4, 6]), ([0, 0, 1, 0], [5])):
        counts = Counter(int(x) for x in drawn(gym.spaces.Discrete(4, start=3), mask))
        assert sorted(counts) == allowed
        share = 4000 / len(allowed)  # bounds: six standard deviations of a binomial
        assert all(abs(count - share) <= 6 * np.sqrt(share) for count in counts.values())


def test_random_actions_of_several_parts_are_drawn_part_by_part_with_their_own_mask() -> None:
    space = gym.spaces.Dict(
        {
            "b": gym.spaces.Tuple(
                (gym.spaces.MultiDiscrete(np.array([[2, 3]]), start=np.array([[1, 5]])), gym.spaces.MultiBinary(3))
            ),
            "a": gym.spaces.Discrete(3),
            "c": gym.spaces.Box(-1, 1, (2,)),
        }
    )
    mask = [0, 1, 1, *(1, 1), *(1, 0, 1), *(1, 0, 1)]
    found = drawn(space, mask)
    assert {int(x["a"]) for x in found} == {1, 2}
    assert Counter(tuple(x["b"][0][0].tolist()) for x in found).keys() == {(1, 5), (1, 7), (2, 5), (2, 7)}
    bits = np.array([x["b"][1] for x in found])
    assert bits[:, 1].max() == 0
    assert all(abs(bits[:, bit].sum() - 2000) <= 6 * np.sqrt(1000) for bit in (0, 2))
    free = np.array([x["b"][1] for x in drawn(space, None)])
    assert abs(free[:, 1].sum() - 2000) <= 6 * np.sqrt(1000)


def test_random_points_fill_a_box_evenly_and_touch_its_edges_no_more_than_elsewhere() -> None:
    found = np.array(drawn(gym.spaces.Box(np.array([-2.0, 10.0], np.float32), np.array([6.0, 10.5], np.float32)), None))
    for column, (low, high) in zip(found.T, ((-2.0, 6.0), (10.0, 10.5)), strict=True):
        counts, _ = np.histogram(column, 8, (low, high))
        assert (np.abs(counts - 500) <= 6 * np.sqrt(500)).all()
        assert len(np.unique(column)) > 3900  # nothing is piled up at the bounds


def test_random_points_where_a_box_has_no_bounds_are_finite_numbers() -> None:
    low, high = np.array([-np.inf, 1, -np.inf, -3e38], np.float32), np.array([np.inf, np.inf, 5, 3e38], np.float32)
    found = np.array(drawn(gym.spaces.Box(low, high), None, 500))
    assert np.isfinite(found).all()
    assert found[:, 0].std() > 0.5
    assert np.abs(found[:, 3]).max() > 1e38
