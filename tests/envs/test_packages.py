"""Environments of other packages: `package:Name-v0`, and bare ids of packages that are known but not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import ludus
from ludus.core import trust
from ludus.envs import packages
from ludus.envs.vector_env import check_exists, make_environments, make_one, reward_threshold
from ludus.errors import EnvironmentFault, MissingExtra, UnknownName, UsageError

_GAMES = """
import gymnasium as gym
import numpy as np

gym.register("LudusTestWalk-v0", entry_point="ludus_test_games:Walk", max_episode_steps=9, reward_threshold=3.5)


class Walk(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.ones(3, np.float32), float(action), False, False, {}
"""


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in which importing registers an environment, as third parties write them."""
    (tmp_path / "ludus_test_games.py").write_text(_GAMES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(trust.PROJECTS, str(tmp_path))
    before = set(gym.registry)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("ludus_test_")]:
        del sys.modules[name]
    for name in set(gym.registry) - before:
        del gym.registry[name]


def test_the_package_before_the_colon_is_imported(games: Path) -> None:
    check_exists("ludus_test_games:LudusTestWalk-v0")
    assert reward_threshold("ludus_test_games:LudusTestWalk-v0") == 3.5
    assert make_one("ludus_test_games:LudusTestWalk-v0").spec.max_episode_steps == 9  # type: ignore[union-attr]
    environments = make_environments("ludus_test_games:LudusTestWalk-v0", 2)
    assert environments.reset(0).observation.shape == (2, 3)


def test_such_an_environment_is_trained_on_and_its_agent_loaded(games: Path) -> None:
    settings: dict[str, Any] = {"num_envs": 2, "train_batch_size": 32, "minibatch_size": 16}
    result = ludus.train("ludus_test_games:LudusTestWalk-v0", stop={"timesteps": 32}, local_dir=games, **settings)
    assert ludus.load(result.run_dir).policy.observation_space.shape == (3,)


def test_a_name_that_the_package_does_not_register_is_compared_with_its_own(games: Path) -> None:
    with pytest.raises(UnknownName, match=r"registers no environment 'LudusTestWlak-v0'\. Did you mean 'LudusTestWalk-v0'\?"):
        check_exists("ludus_test_games:LudusTestWlak-v0")


def test_a_package_that_is_not_there_and_what_to_install() -> None:
    with pytest.raises(UnknownName, match=r"There is no module 'ludus_test_missing' \(from 'ludus_test_missing:Game-v0'\)"):
        check_exists("ludus_test_missing:Game-v0")
    with pytest.raises(MissingExtra, match=r"There is no module 'sumo_rl' .*pip install sumo-rl"):
        check_exists("sumo_rl:sumo-rl-v0")
    with pytest.raises(UnknownName, match="belongs to Python's standard library"):
        check_exists("os:Game-v0")


def test_a_package_that_fails_to_import_is_named_with_the_line(games: Path) -> None:
    (games / "ludus_test_broken.py").write_text("size = 3\nscale = 1 / (size - 3)\n")
    (games / "ludus_test_unreadable.py").write_text("def make(:\n")
    with pytest.raises(
        UsageError, match=r"raised ZeroDivisionError: division by zero \(.*ludus_test_broken\.py:2, in <module>\)"
    ):
        check_exists("ludus_test_broken:Game-v0")
    with pytest.raises(UsageError, match=r"raised SyntaxError: .*ludus_test_unreadable\.py:1\)"):
        check_exists("ludus_test_unreadable:make")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("highway-v0", "highway-env"),
        ("MiniGrid-Empty-5x5-v0", "minigrid"),
        ("BabyAI-GoToObj-v0", "minigrid"),
        ("FetchReach-v4", "gymnasium-robotics"),
        ("AntMaze_UMaze-v5", "gymnasium-robotics"),
        ("sumo-rl-v0", "sumo-rl"),
        ("dm_control/cartpole-swingup-v0", "shimmy"),
        ("CrafterReward-v1", "crafter"),
        ("Airstriker-Genesis-v0", "stable-retro"),
        ("procgen-coinrun-v0", "procgen"),
    ],
)
def test_an_id_of_a_known_package_names_it(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages.package_of_id(name)
    assert found is not None
    monkeypatch.setitem(sys.modules, found.module, None)  # as if it were not installed
    with pytest.raises((UnknownName, MissingExtra)) as raised:
        check_exists(name)
    assert f"{name!r} is an environment of " in raised.value.message
    assert package in raised.value.message
    assert ("pip install" if found.registers else "module:function") in raised.value.hint


def test_ids_of_gymnasium_and_of_ludus_belong_to_no_other_package() -> None:
    taken = [name for name in gym.registry if packages.package_of_id(name) is not None]
    assert [name for name in taken if str(gym.registry[name].entry_point).startswith(("gymnasium.", "ludus", "ale_py"))] == []


def test_a_known_package_that_is_installed_is_imported_for_a_bare_id(games: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = packages.Package(r"LudusTest", "ludus-test-games", "ludus_test_games")
    monkeypatch.setattr(packages, "PACKAGES", (walk,))
    check_exists("LudusTestWalk-v0")
    with pytest.raises(UnknownName, match="is installed but registers no environment 'LudusTestRun-v0'"):
        check_exists("LudusTestRun-v0")


def test_a_constructor_that_fails_is_reported_with_its_line(games: Path) -> None:
    lines = ["import gymnasium as gym", "class Game(gym.Env):", "    def __init__(self):", "        self.port = int('x')"]
    lines += ["def many(num_envs: int) -> gym.vector.VectorEnv:", "    return []", ""]
    (games / "ludus_test_fails.py").write_text("\n".join(lines))
    with pytest.raises(EnvironmentFault, match=r"raised ValueError in its constructor: .*ludus_test_fails\.py:4, in __init__\)"):
        make_environments("ludus_test_fails:Game", 1)
    with pytest.raises(EnvironmentFault, match=r"takes num_envs and made a list, not a gymnasium\.vector\.VectorEnv"):
        make_environments("ludus_test_fails:many", 1)
