"""What a game of arrays may return, and one match of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import ludus
from ludus.config.schema import PreprocessConfig
from ludus.core.types import Bools, Ints
from ludus.envs.matches.vector_central_state import flatten_rows
from ludus.envs.matches.vector_multi_agent import VectorMatches, VectorMultiAgentEnv, VectorMultiAgentStep
from ludus.envs.pettingzoo import MAX_IDLE_STEPS, Departure, Turn, is_multi_agent, make_match, make_vector_matches
from ludus.errors import ConfigError, EnvironmentFault
from ludus.testing import check_vector_multi_agent_env
from tests.vector_matches import OBSERVATION, VectorCount, VectorHunt

Change = Callable[[VectorMultiAgentStep], None]


class Scripted(VectorHunt):
    """Its results are changed by a function."""

    def __init__(self, num_envs: int, change: Change = lambda result: None) -> None:
        super().__init__(num_envs)
        self._change = change

    def _result(self) -> VectorMultiAgentStep:
        result = super()._result()
        self._change(result)
        return result


def make_hunt(num_envs: int, returning: bool = False) -> VectorHunt:
    return VectorHunt(num_envs, returning)


def undeclared(num_envs: int):  # type: ignore[no-untyped-def]
    return VectorHunt(num_envs)


def too_many(num_envs: int) -> VectorHunt:
    return VectorHunt(num_envs + 1)


def test_classes_and_functions_that_declare_it_are_recognised() -> None:
    assert ludus.VectorMultiAgentEnv is VectorMultiAgentEnv
    for name in ("tests.vector_matches:VectorHunt", f"{__name__}:make_hunt"):
        assert is_multi_agent(name)
        made = make_vector_matches(name, 3, {"returning": True})
        assert made is not None
        assert (made.num, made.rows) == (3, 9)
    assert make_vector_matches("tests.vector_matches:ParallelHunt", 3) is None
    assert not is_multi_agent(f"{__name__}:undeclared")


def test_a_wrong_number_of_matches_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="made one of 4 matches where a VectorMultiAgentEnv of 3 was asked for"):
        make_vector_matches(f"{__name__}:too_many", 3)


def test_wrappers_and_dropped_parts_are_refused() -> None:
    for arguments in ({"wrappers": ["tests.matches:Doubled"]}, {"preprocess": PreprocessConfig(drop=["kind"])}):
        for make in (make_match, lambda name, **given: make_vector_matches(name, 2, **given)):
            with pytest.raises(ConfigError, match=r"do not apply to tests\.vector_matches:VectorHunt"):
                make("tests.vector_matches:VectorHunt", **arguments)


def set_at(name: str, value: Any) -> Change:
    def change(result: VectorMultiAgentStep) -> None:
        getattr(result, name)[1, 2] = value

    return change


def replace_with(name: str, value: Any) -> Change:
    return lambda result: setattr(result, name, value)


def set_place(value: float) -> Change:
    def change(result: VectorMultiAgentStep) -> None:
        result.observation["place"] = result.observation["place"].astype(np.float64)
        result.observation["place"][result.acting] = value

    return change


def set_kind(value: int) -> Change:
    def change(result: VectorMultiAgentStep) -> None:
        result.observation["kind"][result.acting] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_at("reward", np.nan), "'cyd' in match 1 of hunt at step 1 got the reward nan"),
        (set_at("reward", 1e20), "'cyd' in match 1 of hunt at step 1 got the reward 1e[+]20"),
        (replace_with("reward", np.zeros(2)), r"returned reward of shape \[2\] at step 1; it has 2 matches and 3 agents"),
        (replace_with("acting", np.zeros((3, 2))), r"returned acting of shape \[3, 2\]"),
        (replace_with("terminated", False), r"returned terminated of shape \[\]"),
        (set_at("action_mask", False), "'cyd' in match 1 of hunt at step 1 forbids every action .options 0 to 2"),
        (replace_with("action_mask", np.ones((2, 3, 4))), r"action_mask of shape \[2, 3, 4\].* it is \[2, 3, 5\]"),
        (replace_with("observation", {}), "returned no observation for 'flags' at step 1"),
        (set_place(np.inf), "'ada' in match 0 of hunt at step 1 observes a number for 'place' that is not finite"),
        (set_place(1e300), "'ada' in match 0 of hunt at step 1 observes a number for 'place' that is not finite, or too large"),
        (set_kind(3), "categories for 'kind' outside its observation space"),
        (lambda result: result.observation.update(kind=np.zeros((2, 3))), r"float64\[2, 3\] for 'kind'.* is int64\[2, 3\]"),
        (lambda result: result.observation.update(kind=np.zeros((2, 3, 1), int)), r"int64\[2, 3, 1\] for 'kind'"),
    ],
)
def test_results_that_do_not_fit_are_faults_that_name_the_place(change: Change, message: str) -> None:
    env = Scripted(2)
    matches = VectorMatches(env, "hunt")
    env._hunts[0].status[:] = env._hunts[1].status[:] = 0
    matches.reset(np.arange(2), np.array([5, 6]))
    matches.actions[:] = np.where(matches.mask[:, :1], 0, 1)  # type: ignore[index]
    env._change = change
    for hunt in env._hunts:  # all act and none leaves
        hunt.step = lambda actions: None  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match=message):
        matches.step(np.ones(2, np.bool_))


class Quiet(VectorCount):
    """No agent ever acts again after the first step."""

    def step(self, actions: Any, playing: Bools) -> VectorMultiAgentStep:
        result = super().step(actions, playing)
        result.acting[:] = result.terminated[:] = False
        return result


def test_a_match_in_which_no_agent_acts_is_a_fault_in_the_end() -> None:
    matches = VectorMatches(Quiet(1), "quiet")
    matches.reset(np.zeros(1, np.int64), np.zeros(1, np.int64))
    for _ in range(MAX_IDLE_STEPS):
        matches.step(np.ones(1, np.bool_))
    with pytest.raises(EnvironmentFault, match="No agent of quiet has acted for 10000 steps"):
        matches.step(np.ones(1, np.bool_))


class Generous(VectorCount):
    """Pays the last agent in the first step, after it has left, and when it leaves without having acted."""

    def reset(self, seeds: Ints, matches: Ints) -> VectorMultiAgentStep:
        self._clock = 0
        return super().reset(seeds, matches)

    def step(self, actions: Any, playing: Bools) -> VectorMultiAgentStep:
        self._clock += 1
        result = super().step(actions, playing)
        result.terminated[:, 2] |= self._clock == 2
        result.acting[:, 2] = False
        result.acting[:, 0] = ~result.terminated[:, 0]
        result.reward[:, 2] = 1.0
        return result


def test_rewards_without_an_action_are_counted_as_late() -> None:
    matches = VectorMatches(Generous(1), "generous")
    matches.reset(np.zeros(1, np.int64), np.zeros(1, np.int64))
    first = matches.step(np.ones(1, np.bool_))
    assert 2 not in first.departures
    second = matches.step(np.ones(1, np.bool_))
    assert dict(zip(second.departures.tolist(), second.departure_reward.tolist(), strict=True)) == {2: 2.0}
    assert matches.late_rewards == 1
    matches.step(np.ones(1, np.bool_))
    assert matches.late_rewards == 2


def test_one_match_plays_as_the_same_game_of_pettingzoo() -> None:
    vector, single = make_match("tests.vector_matches:VectorHunt"), make_match("tests.vector_matches:ParallelHunt")
    assert type(vector.agents["ada"].observation) is type(single.agents["ada"].observation)
    for seed in range(20):
        steps, random = [vector.reset(seed), single.reset(seed)], np.random.default_rng(seed)
        while True:
            one, other = steps
            assert one.over == other.over
            assert [(t.agent, t.reward) for t in one.turns] == [(t.agent, t.reward) for t in other.turns]
            assert [(d.agent, d.reward, d.terminated, d.truncated) for d in one.departures] == [
                (d.agent, d.reward, d.terminated, d.truncated) for d in other.departures
            ]
            rows: list[list[Turn | Departure]] = [[*step.turns, *step.departures] for step in steps]
            for mine, theirs in zip(*rows, strict=True):
                assert (mine.observation is None) == (theirs.observation is None)
                if mine.observation is not None:
                    for key, value in mine.observation.items():
                        np.testing.assert_array_equal(value, theirs.observation[key])
            if one.over:
                break
            actions = {
                t.agent: np.array([random.choice(np.flatnonzero(t.mask[:3])), random.integers(2)])
                for t in one.turns
                if t.mask is not None
            }
            steps = [vector.step(actions), single.step(actions)]


def test_a_match_that_is_cut_from_outside_gives_every_agent_its_reward() -> None:
    match = make_match("tests.vector_matches:VectorCount", preprocess=PreprocessConfig(max_episode_steps=3))
    step = match.reset(0)
    for _ in range(3):
        step = match.step({step.turns[0].agent: 0})
    assert step.over
    assert {left.agent: (left.truncated, left.observation is None) for left in step.departures} == {
        "ada": (True, False),
        "bob": (True, True),
        "cyd": (True, True),
    }


def test_the_example_of_the_documentation_plays() -> None:
    page = (Path(__file__).parents[2] / "docs" / "multiagent.md").read_text()
    (code,) = (block.partition("```")[0] for block in page.split("```python")[1:] if "VectorMultiAgentEnv" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    check_vector_multi_agent_env(names["Duel"])
    matches = VectorMatches(names["Duel"](2), "duel")
    matches.reset(np.arange(2), np.arange(2))
    matches.actions[:] = [3, 1, 0, 0]
    for _ in range(10):
        step = matches.step(np.ones(2, np.bool_))
    assert matches.over.all()
    assert step.departure_reward.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_rows_are_flattened_as_gymnasium_does() -> None:
    space = gym.spaces.Dict(
        {"seen": OBSERVATION, "more": gym.spaces.Tuple((gym.spaces.Discrete(4, start=2), gym.spaces.MultiDiscrete([2, 3])))}
    )
    space.seed(0)
    values = [space.sample() for _ in range(6)]
    room: Any = gym.vector.utils.create_empty_array(space, len(values))
    rows = gym.vector.utils.concatenate(space, values, room)
    expected = [np.asarray(gym.spaces.utils.flatten(space, value), np.float32) for value in values]
    np.testing.assert_array_equal(flatten_rows(space, rows), expected)
