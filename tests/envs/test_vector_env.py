"""Environments that we call: how they are found, stepped together, and what happens when they misbehave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from ludus.core import spaces, trust
from ludus.core.types import Segments
from ludus.envs.vector_env import (
    Environments,
    LoopEnvironments,
    VectorEnvironments,
    check_exists,
    make_as_trained,
    make_environments,
    make_one,
    reward_threshold,
    row_info,
    without_central_state,
)
from ludus.errors import ConfigError, EnvironmentFault, MissingExtra, UnknownName, UsageError
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.sampling.sampler import Sampler, segment_spec
from ludus.transport.local import LocalMemory
from tests import environments as tiny


class _Fixed:
    """One policy for ever."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def newest(self) -> tuple[Policy, int]:
        return self._policy, 1


def sample(environments: Environments, steps: int = 6) -> Segments:
    """One block of segments, as training takes it."""
    environments.reset(0)
    torch.manual_seed(0)
    policy = Policy(environments.observation_space, environments.action_space, NetworkConfig(fcnet_hiddens=(8,)))
    memory = LocalMemory(segment_spec(policy, environments, steps), environments.num, 1)
    sampler = Sampler(environments, _Fixed(policy), memory, seed=0)
    assert sampler.step()
    block = memory.take(0)
    assert block is not None
    return block


def loop(*envs: gym.Env[Any, Any]) -> LoopEnvironments:
    return LoopEnvironments("tiny", list(envs))


# -- finding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "offered"), [("CartPol-v1", "CartPole-v1"), ("cartpole-v1", "CartPole-v1"), ("Acrobat-v1", "Acrobot-v1")]
)
def test_an_unknown_environment_is_refused_with_the_nearest_names(asked: str, offered: str) -> None:
    with pytest.raises(UnknownName, match=f"Unknown environment '{asked}'.*Did you mean.*'{offered}'"):
        check_exists(asked)
    with pytest.raises(UnknownName, match=offered):
        make_environments(asked, 2)


@pytest.mark.parametrize("asked", ["Xyzzy-v0", "Xyzzy", "CartPole-v99", "", "no/such/Thing-v0"])
def test_whatever_the_name_the_error_is_ours(asked: str) -> None:
    with pytest.raises(UsageError):
        check_exists(asked)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ("tests.environments:make_cuont", "has no 'make_cuont'.*make_count"),
        ("tests.no_such_module:make", "no module 'tests.no_such_module'"),
        ("tests.environments:", "not of the form"),
    ],
)
def test_an_own_environment_that_cannot_be_imported_is_refused(asked: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_exists(asked)


@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [("HalfCheetah-v5", "mujoco", "mujoco"), ("LunarLander-v3", "Box2D", "box2d")],
)
def test_a_missing_extra_is_named_with_its_pip_line(env: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = (package, f"gymnasium.envs.{extra}")
    for module in [name for name in sys.modules if name.startswith(mine)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it could not be found
    with pytest.raises(MissingExtra, match=rf"{env}.*pip install 'ludus\[{extra}\]'"):
        make_environments(env, 1)


def test_a_missing_package_is_distinguished_from_a_broken_environment() -> None:
    with pytest.raises(MissingExtra, match="a_package_that_nobody_has"):
        make_environments("tests.environments:make_needs_package", 1)
    with pytest.raises(EnvironmentFault, match=r"make_crash raised OSError in its constructor: port 5005 is taken"):
        make_environments("tests.environments:make_crash", 1)


def test_wrong_environment_settings_are_reported() -> None:
    with pytest.raises(EnvironmentFault, match=r"could not be constructed.*lenght.*Check config\.env_config"):
        make_environments("tests.environments:make_count", 1, {"lenght": 3})
    with pytest.raises(EnvironmentFault, match=r"CartPole-v1 could not be constructed.*gravity"):
        make_environments("CartPole-v1", 1, {"gravity": 3})


def test_something_else_than_an_environment_is_refused() -> None:
    trust.allow("tests.environments:make_nothing")
    with pytest.raises(EnvironmentFault, match=r"make_nothing made a str, not a gymnasium\.Env"):
        make_environments("tests.environments:make_nothing", 1)


def test_an_environment_with_its_own_vector_implementation_uses_it() -> None:
    made = make_environments("CartPole-v1", 5)
    assert isinstance(made, VectorEnvironments)
    assert (made.num, made.same_step_autoreset) == (5, False)
    made.close()


def test_an_environment_without_one_is_stepped_in_a_loop() -> None:
    made = make_environments("Acrobot-v1", 3)
    assert isinstance(made, LoopEnvironments)
    assert made.reset(0).observation.shape == (3, 6)
    made.close()
    own = make_environments("tests.environments:make_count", 2, {"length": 7})
    assert isinstance(own, LoopEnvironments)
    assert own.observation_space == tiny.Count().observation_space


def test_a_single_environment_is_made_for_watching() -> None:
    assert make_one("CartPole-v1", {}, "rgb_array").render_mode == "rgb_array"
    own = make_one("tests.environments:make_count", {"length": 3})
    assert isinstance(own, tiny.Count)
    assert own.length == 3


def test_what_exists_only_as_a_vector_is_watched_through_its_one_row() -> None:
    one = make_one("tests.environments:SameStep")
    observation, _ = one.reset(seed=0)
    assert one.observation_space.contains(observation)
    for _ in range(1000):
        before = observation
        observation, reward, terminated, truncated, _ = one.step(one.action_space.sample())
        assert isinstance(reward, float)
        if terminated or truncated:
            break
    else:
        pytest.fail("the episode never ended")
    assert (observation != before).any(), "the final observation, not the first of the next episode"
    assert observation.shape == before.shape


def test_the_solved_return_comes_from_gymnasium() -> None:
    assert reward_threshold("CartPole-v1") == 475.0
    assert reward_threshold("tests.environments:make_count") is None


# -- stepping -----------------------------------------------------------------------------------------------------------


def test_every_copy_has_its_own_seed_and_gets_its_own_action() -> None:
    envs = [tiny.Count(length=50) for _ in range(3)]
    made = loop(*envs)
    made.reset(10)
    made.step(np.array([0, 1, 0]))
    made.step(np.array([1, 1, 0]))
    assert [env.seeds for env in envs] == [[10], [11], [12]]
    assert [[int(a) for a in env.actions] for env in envs] == [[0, 1], [1, 1], [0, 0]]


def test_actions_with_parts_reach_each_copy_in_their_structure() -> None:
    envs = [tiny.make_hybrid(), tiny.make_hybrid()]
    made = loop(*envs)
    made.reset(0)
    action = {"direction": np.array([[2, 1], [0, 0]]), "strength": np.array([[0.5], [-1.5]], np.float32)}
    made.step(action)
    assert envs[0].actions[0]["direction"].tolist() == [2, 1]
    assert envs[1].actions[0]["strength"].tolist() == [-1.5]


@pytest.mark.parametrize("truncates", [False, True])
def test_the_step_after_an_episode_only_resets(truncates: bool) -> None:
    env = tiny.Count(length=2, truncates=truncates)
    made = loop(env, tiny.Count(length=100))
    made.reset(0)
    rows = []
    for _ in range(4):
        outcome = made.step(np.zeros(2, np.int64))
        ended = bool(outcome.truncated[0] if truncates else outcome.terminated[0])
        rows.append((outcome.observations.observation[0].tolist(), float(outcome.reward[0]), ended))
        assert not (outcome.terminated if truncates else outcome.truncated).any()
        assert outcome.final_rows is None
    assert rows == [([1, 1], 1.0, False), ([1, 2], 1.0, True), ([2, 0], 0.0, False), ([2, 1], 1.0, False)]
    assert len(env.actions) == 3, "the action of a reset row must not be played"


def test_a_reset_row_is_in_the_segment_and_is_not_valid() -> None:
    block = sample(loop(tiny.Count(length=2), tiny.Count(length=100)), steps=6)
    assert block.valid[:, 0].tolist() == [True, True, False, True, True, False]
    assert block.valid[:, 1].all()
    assert block.first[:, 0].tolist() == [True, False, False, True, False, False, True]
    assert block.observation[:, 0].tolist() == [[2, 0], [2, 1], [2, 2], [3, 0], [3, 1], [3, 2], [4, 0]]
    assert block.terminated[:, 0].tolist() == [False, True, False, False, True, False]
    assert block.episode_return.tolist() == [2, 2]
    assert block.episode_length.tolist() == [2, 2]


def test_native_cartpole_resets_in_the_next_step_as_well() -> None:
    made = make_environments("CartPole-v1", 8)
    made.reset(3)
    over = np.zeros(8, bool)
    resets = 0
    for _ in range(60):
        outcome = made.step(np.zeros(8, np.int64))
        assert (outcome.reward[over] == 0).all()
        assert not (outcome.terminated | outcome.truncated)[over].any()
        assert (np.abs(outcome.observations.observation[over]) <= 0.05).all(), "the row after an episode shows the next start"
        resets += int(over.sum())
        over = outcome.terminated | outcome.truncated
    assert resets > 8
    made.close()


@pytest.mark.parametrize("stacked", [True, False])
def test_rows_that_reset_at_once_bring_their_final_observations(stacked: bool) -> None:
    made = VectorEnvironments("same-step", tiny.SameStep(3, stacked=stacked))
    assert made.same_step_autoreset
    made.reset(0)
    first = made.step(np.zeros(3, np.int64))
    assert first.final_rows is not None
    assert first.final_rows.size == 0
    second = made.step(np.zeros(3, np.int64))
    assert second.final_rows is not None
    assert second.final_rows.tolist() == [0]
    assert np.asarray(second.final_observation).tolist() == [[1, 2]]
    assert second.observations.observation.tolist() == [[2, 0], [1, 2], [1, 2]]
    for _ in range(2):
        fourth = made.step(np.zeros(3, np.int64))
    assert fourth.final_rows is not None
    assert fourth.final_rows.tolist() == [0, 2]
    assert np.asarray(fourth.final_observation).tolist() == [[2, 2], [1, 4]]


def test_the_final_observation_of_a_cut_episode_is_kept_to_bootstrap_from() -> None:
    block = sample(VectorEnvironments("same-step", tiny.SameStep(3)), steps=6)
    assert block.valid.all()
    cut = [(t, 1) for t in range(6) if block.truncated[t, 1]]
    assert len(cut) == 2
    assert [tuple(at) for at in block.final_at[: block.finals].tolist()] == cut
    assert block.final_observation[: block.finals, 1].tolist() == [3, 3], "the step count at which row 1 was cut"
    assert np.isfinite(block.final_value[: block.finals]).all()
    assert block.final_value[: block.finals].any()


def test_a_vector_that_resets_at_once_without_saying_what_came_before_is_refused() -> None:
    made = VectorEnvironments("same-step", tiny.SameStep(2, tells=False))
    made.reset(0)
    made.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match="same-step has same-step autoreset but returns no 'final_obs'"):
        made.step(np.zeros(2, np.int64))


def test_a_vector_that_never_resets_by_itself_is_refused() -> None:
    env = tiny.SameStep(2)
    env.metadata = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    with pytest.raises(EnvironmentFault, match=r"does not reset by itself.*NEXT_STEP or SAME_STEP"):
        VectorEnvironments("never", env)


@pytest.fixture
def registered() -> Iterator[str]:
    name = "LudusSameStep-v0"
    gym.register(name, entry_point="tests.environments:Count", vector_entry_point="tests.environments:SameStep")
    yield name
    gym.registry.pop(name)


def test_a_registered_vector_implementation_is_used(registered: str) -> None:
    made = make_environments(registered, 4)
    assert isinstance(made, VectorEnvironments)
    assert made.same_step_autoreset
    assert made.num == 4


def test_an_own_function_that_takes_num_envs_makes_the_whole_vector() -> None:
    made = make_environments("tests.environments:SameStep", 4, {"stacked": False})
    assert isinstance(made, VectorEnvironments)
    assert made.reset(0).observation.shape == (4, 2)


def test_closing_closes_every_copy() -> None:
    envs = [tiny.Count(), tiny.Count()]
    loop(*envs).close()
    assert [env.closed for env in envs] == [True, True]


# -- masks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["observation", "infos"])
def test_a_mask_is_found_in_the_observation_or_the_infos(where: str) -> None:
    made = loop(tiny.Masked(where), tiny.Masked(where))
    seen = made.reset(0)
    assert made.masked
    assert made.observation_space == tiny.Count().observation_space, "the network does not see the mask"
    assert seen.mask is not None
    assert seen.mask.tolist() == [[True, False, False]] * 2
    assert seen.observation.tolist() == [[1, 0]] * 2
    outcome = made.step(np.array([0, 0]))
    assert outcome.observations.mask is not None
    assert outcome.observations.mask.tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize("where", ["observation", "infos"])
def test_a_forbidden_action_is_never_played(where: str) -> None:
    block = sample(loop(*(tiny.Masked(where) for _ in range(4))), steps=40)  # a Masked refuses a forbidden action
    assert block.steps > 100
    played = block.action[block.valid]
    allowed = block.action_mask[:-1][block.valid]
    assert allowed[np.arange(len(played)), played].all()
    assert (allowed.sum(axis=1) == 1).all()


class _SilentAtTheEnd(tiny.Masked):
    """Its infos have a mask, but for the last step's."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *outcome, info = super().step(action)
        observation, reward, terminated, truncated = outcome
        return observation, reward, terminated, truncated, {} if terminated or truncated else info


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (tiny.Masked("observation", length=4), [False, True, False]),
        (tiny.Masked("infos", length=4), [False, True, False]),
        (tiny.Masked("infos", length=4, closed_at=4), [True, True, True]),
        (_SilentAtTheEnd("infos", length=4), [True, True, True]),
    ],
    ids=["in the observation", "in the infos", "all forbidden", "not said"],
)
def test_what_was_allowed_in_the_end_is_kept_with_the_last_observation(env: tiny.Masked, expected: list[bool]) -> None:
    """Whoever values that observation must not count on what was forbidden there."""
    block = sample(loop(env), steps=12)
    resets = np.flatnonzero(~block.valid[:, 0])
    assert resets.tolist() == [4, 9]
    assert block.action_mask[resets, 0].tolist() == [expected] * 2


def test_a_vector_may_bring_its_mask_in_the_infos() -> None:
    made = VectorEnvironments("vector", tiny.SameStep(2, masks="always"))
    first = made.reset(0)
    assert made.masked
    assert first.mask is not None
    assert first.mask.tolist() == [[True, False]] * 2
    second = made.step(np.zeros(2, np.int64)).observations
    assert second.mask is not None
    assert second.mask.tolist() == [[False, True]] * 2


@pytest.mark.parametrize("masks", ["at reset", "too long"])
def test_a_vector_whose_mask_is_lost_or_too_long_is_refused(masks: str) -> None:
    made = VectorEnvironments("vector", tiny.SameStep(2, masks=masks))
    made.reset(0)
    with pytest.raises(EnvironmentFault, match=r"vector at step 1 returned no usable action_mask"):
        made.step(np.zeros(2, np.int64))


def test_without_a_mask_there_is_none() -> None:
    made = loop(tiny.Count())
    assert made.reset(0).mask is None
    assert not made.masked
    assert sample(loop(tiny.Count())).spec.mask_size == 0


# -- environments that misbehave ----------------------------------------------------------------------------------------


def test_an_environment_that_raises_in_reset_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"environment 2 of tiny raised RuntimeError in reset .*: no game server"):
        loop(tiny.Count(), tiny.Count(), tiny.Faulty("raises in reset")).reset(0)


def test_an_environment_that_raises_in_step_is_named_with_the_step() -> None:
    with pytest.raises(EnvironmentFault, match=r"environment 1 of tiny raised RuntimeError in step \(step 3\): the game crashed"):
        sample(loop(tiny.Count(), tiny.Faulty("raises in step", at=3)))


def test_an_environment_that_raises_in_a_later_reset_is_named_with_the_step() -> None:
    env = tiny.Faulty(length=2, at=100)
    made = loop(tiny.Count(), env)
    made.reset(0)
    env.fault = "raises in reset"
    for _ in range(2):
        made.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match=r"environment 1 of tiny raised RuntimeError in reset \(step 3\)"):
        made.step(np.zeros(2, np.int64))


def test_what_the_environment_raised_can_still_be_seen() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        loop(tiny.Faulty("raises in reset")).reset(0)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_interface_of_the_old_gym_is_refused_with_the_place() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"environment 0 of tiny at step 3 returned 4 values from step\(\)\. Gymnasium expects"
    ):
        sample(loop(tiny.Faulty("old interface")))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("too long", r"float32\[3\]; its space has float32\[2\]"),
        ("too short", r"float32\[1\]; its space has float32\[2\]"),
        ("a scalar", r"float32\[\]; its space has float32\[2\]"),
        ("one dimension more", r"float32\[1, 2\]; its space has float32\[2\]"),
        ("complex", r"complex64\[2\]; its space has float32\[2\]"),
        ("words", r"<U1\[2\]; its space has float32\[2\]"),
        ("nothing", r"object\[\]; its space has float32\[2\]"),
        ("a dict", "without"),
    ],
)
def test_an_observation_that_does_not_fit_is_named_with_environment_and_step(fault: str, said: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"environment 1 of tiny at step 3 returned .*{said}"):
        sample(loop(tiny.Count(), tiny.Faulty(fault)))


@pytest.mark.parametrize(("fault", "value"), [("nan", "nan"), ("infinite", "inf")])
def test_an_observation_that_is_not_finite_is_named_with_environment_and_step(fault: str, value: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"nvironment 1 of tiny returned {value} in its observation.*at step 3"):
        sample(loop(tiny.Count(), tiny.Faulty(fault)))


@pytest.mark.parametrize(("fault", "value"), [("reward nan", "nan"), ("reward infinite", "inf")])
def test_a_reward_that_is_not_finite_is_named_with_environment_and_step(fault: str, value: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"nvironment 1 of tiny returned the reward {value} at step 2"):
        sample(loop(tiny.Count(), tiny.Faulty(fault)))


def test_a_reward_that_is_no_number_is_named_with_environment_and_step() -> None:
    with pytest.raises(EnvironmentFault, match=r"environment 1 of tiny at step 3 returned the reward \[1\. 1\.\]"):
        sample(loop(tiny.Count(), tiny.Faulty("reward vector")))
    with pytest.raises(EnvironmentFault, match=r"nvironment 1 of tiny returned the reward nan at step 2"):
        sample(loop(tiny.Count(), tiny.Faulty("reward none")))


@pytest.mark.parametrize("key", ["vector", "place.map", "place.room"])
def test_a_missing_part_of_an_observation_is_named(key: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"environment 1 of tiny at step 3 returned an observation without '{key}'"):
        sample(loop(tiny.Rooms(), tiny.Rooms(lacks=key)))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("place.map", r"float32\[3, 3, 1\] for 'place.map'; its space has uint8\[3, 3, 1\]"),
        ("place.room", r"float64\[\] for 'place.room'; its space has int64\[\]"),
    ],
)
def test_a_part_of_the_wrong_type_is_named(key: str, said: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"environment 1 of tiny at step 3 returned {said}"):
        sample(loop(tiny.Rooms(), tiny.Rooms(wrong=key)))


def test_a_part_that_is_not_finite_is_named_with_its_index() -> None:
    with pytest.raises(EnvironmentFault, match=r"nvironment 1 of tiny returned nan in its observation 'vector' \(index \[1\]\)"):
        sample(loop(tiny.Rooms(), tiny.Rooms(wrong="vector")))


@pytest.mark.parametrize("where", ["observation", "infos"])
def test_a_mask_that_forbids_everything_is_named_with_environment_and_step(where: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"nvironment 1 of tiny forbids every action in its action_mask.*step 2"):
        sample(loop(tiny.Masked(where, length=50), tiny.Masked(where, closed_at=2, length=50)))


def test_a_mask_that_forbids_everything_after_the_end_is_no_fault() -> None:
    block = sample(loop(tiny.Masked(closed_at=5, length=5)), steps=12)
    assert block.episode_length.tolist() == [5, 5]


@pytest.mark.parametrize(("where", "fault"), [("observation", "missing"), ("observation", "size"), ("infos", "size")])
def test_a_mask_that_is_missing_or_too_long_is_a_fault_of_that_environment(where: str, fault: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"environment 1 of tiny at step 1 .*action_?\s?mask"):
        sample(loop(tiny.Masked(where, length=50), tiny.Masked(where, fault=fault, length=50)))


def test_a_vector_whose_observation_does_not_fit_is_refused() -> None:
    env = tiny.SameStep(2)
    env.reset = lambda **_: (np.zeros((2, 1), np.float32), {})  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match="wrong returned an observation that does not fit its space"):
        sample(VectorEnvironments("wrong", env))


def test_a_vector_that_raises_is_named_with_the_step() -> None:
    env = tiny.SameStep(2)
    made = VectorEnvironments("wrong", env)
    made.reset(0)
    made.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFault, match=r"wrong raised AssertionError in step \(step 2\): .*7.* is not an action"):
        made.step(np.array([0, 7]))


# -- environments that fail and are made anew


def test_a_failed_environment_is_recreated_and_its_row_is_lost() -> None:
    fresh = [tiny.Count(length=50), tiny.Count(length=50)]
    made = LoopEnvironments("fragile", [tiny.Count(length=4), tiny.Faulty("raises in step", at=3)], fresh.pop)
    made.reset(0)
    lost = []
    for _ in range(4):
        outcome = made.step(np.zeros(2, np.int64))
        lost.append([False, False] if outcome.lost is None else outcome.lost.tolist())
    assert lost == [[False, False], [False, False], [False, True], [False, False]]
    assert made.restarts == 1
    assert len(fresh) == 1
    assert outcome.observations.observation[1].tolist() == [1, 1], "the first step of the first episode of the new one"
    assert outcome.terminated.tolist() == [True, False]


def test_one_that_fails_again_and_again_is_a_fault_all_the_same() -> None:
    made = LoopEnvironments("broken", [tiny.Faulty("raises in step", at=1)], lambda: tiny.Faulty("raises in step", at=1))
    made.reset(0)
    for _ in range(5):
        assert made.step(np.zeros(1, np.int64)).lost is not None
    with pytest.raises(EnvironmentFault, match="the game crashed"):
        made.step(np.zeros(1, np.int64))
    assert made.restarts == 5


def test_one_that_cannot_even_be_reset_again_is_a_fault() -> None:
    made = LoopEnvironments("broken", [tiny.Faulty("raises in step", at=1)], lambda: tiny.Faulty("raises in reset"))
    made.reset(0)
    with pytest.raises(EnvironmentFault, match="no game server"):
        made.step(np.zeros(1, np.int64))


def test_a_vector_that_raises_loses_all_of_its_rows_and_goes_on() -> None:
    class Breaks(tiny.SameStep):
        def step(self, actions: Any) -> Any:
            raise RuntimeError("the server is gone")

    made = VectorEnvironments("vector", Breaks(3), lambda: tiny.SameStep(3))
    made.reset(0)
    outcome = made.step(np.zeros(3, np.int64))
    assert outcome.lost is not None
    assert outcome.lost.all()
    assert outcome.reward.tolist() == [0, 0, 0]
    again = made.step(np.zeros(3, np.int64))
    assert again.lost is None
    assert made.restarts == 1


class _Listens(tiny.Count):
    """Hears how far training has come."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__(length=50)
        self.breaks, self.heard = breaks, list[int]()

    def set_timesteps(self, timesteps: int) -> None:
        self.heard.append(timesteps)

    def step(self, action: Any) -> Any:
        if self.breaks:
            raise RuntimeError("the game crashed")
        return super().step(action)


def test_a_recreated_environment_gets_the_training_progress() -> None:
    fresh = _Listens()
    made = LoopEnvironments("listens", [_Listens(breaks=True)], lambda: fresh)
    made.reset(0)
    made.progress(7_000)
    made.step(np.zeros(1, np.int64))
    assert fresh.heard == [7_000]


def test_a_recreated_vector_environment_gets_the_training_progress() -> None:
    class Breaks(tiny.SameStep):
        def step(self, actions: Any) -> Any:
            raise RuntimeError("the server is gone")

    class Hears(tiny.SameStep):
        heard: ClassVar[list[int]] = []

        def set_timesteps(self, timesteps: int) -> None:
            self.heard.append(timesteps)

    made = VectorEnvironments("vector", Breaks(3), lambda: Hears(3))
    made.reset(0)
    made.progress(7_000)
    made.step(np.zeros(3, np.int64))
    assert Hears.heard == [7_000]


SELF_PLAY = {"opponent": {"self": 0.8, "past": 0.2}}
ARENA = "ludus.games.arena.env.gym_env:ArenaVectorEnv"


def test_a_single_row_has_no_opponent_from_the_past() -> None:
    """It would be played by the same action as the row itself."""
    with pytest.raises(ConfigError, match="earlier version"):
        make_one(ARENA, SELF_PLAY)


@pytest.mark.parametrize(
    ("name", "rows", "config", "has"),
    [
        (ARENA, 16, SELF_PLAY, True),
        (ARENA, 15, {**SELF_PLAY, "mode": "3v3"}, True),
        (ARENA, 16, {"opponent": "medium"}, False),
        ("ludus/Arena-1v1-v0", 16, SELF_PLAY, True),
        ("CartPole-v1", 4, {}, False),
        ("tests.environments:make_crash", 4, {}, False),  # it is not even made
    ],
)
def test_whether_there_would_be_opponents_is_known_before(name: str, rows: int, config: dict[str, Any], has: bool) -> None:
    assert row_info(name, rows, config).has_opponents is has


def test_playing_one_row_of_a_team_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    make_as_trained({"env": ARENA, "config": {"env_config": {"mode": "3v3", "repeat": 0.5, "opponent": "easy"}}})
    assert "One row of a side of 3" in caplog.text
    caplog.clear()
    make_as_trained({"env": "ludus/Arena-1v1-v0", "config": {"env_config": {"opponent": "easy", "matchmaking": "even"}}})
    assert not caplog.text


@pytest.mark.parametrize("name", [ARENA, "ludus/Arena-1v1-v0"])
def test_rollouts_play_whole_matches(name: str, tmp_path: Path) -> None:
    """Training may begin in the middle, and at states that are not there any more."""
    trained = {"env": name, "config": {"env_config": {"repeat": 1.0, "states": str(tmp_path / "gone"), "seconds": 30}}}
    env = make_as_trained(trained)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="not a directory"):
        make_as_trained(trained, env_config={"repeat": 1.0, "states": str(tmp_path / "gone")})


@pytest.mark.parametrize(
    ("name", "config", "group"),
    [
        (ARENA, {"mode": "3v3"}, 3),
        ("ludus/Arena-1v1-v0", {}, 1),
        ("gamecore", {"mode": "3v3"}, 3),
        ("CartPole-v1", {}, 1),
    ],
)
def test_how_many_rows_are_a_side_is_known_before(name: str, config: dict[str, Any], group: int) -> None:
    assert row_info(name, 15, config).group == group


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "own", [gym.spaces.Box(-1, 1, (3,)), gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (3,))})], ids=["box", "dict"]
)
def test_without_central_state_the_player_sees_the_actor_observation(own: gym.Space[Any], masked: bool) -> None:
    class Both(gym.Env[Any, Any]):
        action_space = gym.spaces.Discrete(2)

        def __init__(self) -> None:
            mask = {"action_mask": gym.spaces.MultiBinary(2)} if masked else {}
            self.observation_space = gym.spaces.Dict({"observation": own, "state": gym.spaces.Box(-1, 1, (7,)), **mask})

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return self.observation_space.sample(), {}

    env = without_central_state(Both())
    seen, mask_space = spaces.split_mask(env.observation_space)
    assert seen == own
    assert (mask_space is not None) is masked
    assert env.observation_space.contains(env.reset()[0])


def test_what_was_lost_is_not_learned_from_and_its_episode_is_not_scored() -> None:
    fresh = iter([tiny.Count(length=5)])
    made = LoopEnvironments("fragile", [tiny.Faulty("raises in step", at=4)], lambda: next(fresh))
    block = sample(made, steps=10)
    # 3 steps, the lost one, 5 of the new environment, its reset
    assert block.valid[:, 0].tolist() == [True] * 3 + [False] + [True] * 5 + [False]
    assert np.flatnonzero(block.first[:, 0]).tolist() == [0, 4, 10]
    assert block.observation[3, 0].tolist() == [2, 3], "the step before bootstraps from what it led to"
    assert block.episode_length.tolist() == [5]
    assert block.episode_return.tolist() == [5]


class _Losing(gym.vector.VectorEnv[Any, Any, Any]):
    """Rows that are lost in every other step."""

    def __init__(self) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.steps, self.restarts = 2, 0, 3
        self.beat: Callable[[], None] = lambda: None
        self.single_observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)

    def reset(self, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.steps += 1
        nothing = np.zeros(2, np.bool_)
        infos = {"lost": np.array([False, True])} if self.steps % 2 else {}
        return np.zeros((2, 1), np.float32), np.zeros(2, np.float32), nothing, nothing, infos


def test_a_vector_environment_reports_lost_rows_and_gets_the_heartbeat() -> None:
    inner = _Losing()
    environments = VectorEnvironments("losing", inner)
    environments.reset(0)
    beats = []
    environments.beat = lambda: beats.append(1)
    inner.beat()
    assert beats == [1]
    lost = environments.step(np.zeros(2, np.int64)).lost
    assert lost is not None
    assert lost.tolist() == [False, True]
    assert environments.step(np.zeros(2, np.int64)).lost is None
    assert environments.restarts == 3
