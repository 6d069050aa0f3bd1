"""Which names may be imported: the user's own, those of the user's project, and those that exist to be named."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from ludus.config.schema import PreprocessConfig
from ludus.core import plugins, trust
from ludus.distributed.code_bundle import CodeBundle
from ludus.envs.registry import makes_environment, spec_of
from ludus.envs.vector_env import make_environments
from ludus.errors import UnknownName, Untrusted

CANARY = """from pathlib import Path
import gymnasium as gym
Path({mark!r}).touch()
class Game(gym.Env):
    def __init__(self, **keywords): Path({mark!r} + "-called").touch()
def make(**keywords) -> gym.Env: return Game()
def plain(**keywords): return Game()
def other(**keywords) -> int: return 1
"""


def write_module(directory: Path, name: str, mark: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.py").write_text(CANARY.format(mark=str(mark)))


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixtures of other modules may have given names in this process."""
    monkeypatch.setenv(trust.VARIABLE, "")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with what is below it importable."""
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = set(sys.modules)
    yield root
    for name in set(sys.modules) - before:
        del sys.modules[name]


def environment(name: str) -> Any:
    return plugins.import_object(name, "environment", makes_environment)


def test_a_module_of_the_project_is_imported(project: Path) -> None:
    write_module(project / "envs", "trust_game_a", project / "mark")
    assert issubclass(environment("envs.trust_game_a:Game"), gym.Env)
    assert environment("envs.trust_game_a:make") is not None
    assert environment("envs.trust_game_a:plain") is not None


def test_a_function_that_declares_something_else_is_not_called_an_environment(project: Path) -> None:
    write_module(project, "trust_game_b", project / "mark")
    with pytest.raises(Untrusted, match="is a function, which is not declared to be of the kind 'environment'"):
        environment("trust_game_b:other")
    with pytest.raises(Untrusted, match="is the class Env, which is not declared"):
        environment("trust_game_b:gym.Env")  # through a module that it imports
    trust.allow("trust_game_b:other")
    assert environment("trust_game_b:other")() == 1


@pytest.mark.parametrize("place", ["site-packages", "elsewhere"])
def test_a_module_outside_of_the_project_is_not_even_imported(project: Path, tmp_path: Path, place: str) -> None:
    there = tmp_path / place if place == "elsewhere" else project / ".venv" / "lib" / place
    write_module(there, "trust_canary", tmp_path / "mark")
    sys.path.append(str(there))
    with pytest.raises(Untrusted, match=r"Nothing was imported.*--trust.*--env trust_canary:make"):
        environment("trust_canary:make")
    with pytest.raises(Untrusted):
        spec_of("trust_canary:Game-v0")
    assert not (tmp_path / "mark").exists()
    trust.allow({"config": {"wrappers": [{"trust_canary:make": {}}]}})
    assert environment("trust_canary:make") is not None
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name",
    [
        "torch.utils.collect_env:run",
        "ludus.launch.supervisor:main",
        "numpy:load",
        "ludus.envs.toy_envs:gym.make",
        "torch.hub:load",
    ],
)
def test_functions_of_installed_packages_are_no_environments(name: str) -> None:
    with pytest.raises(Untrusted):
        environment(name)


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "builtins:exec", "no_such_module_at_all:x"])
def test_parts_of_python_and_missing_modules_are_unknown_names(name: str) -> None:
    with pytest.raises(UnknownName):
        environment(name)


@pytest.mark.parametrize(
    "name",
    [
        "gymnasium.envs.classic_control:CartPoleEnv",
        "ludus.envs.toy_envs:cartpole_without_velocities",
        "ludus.games.arena.env.gym_env:ArenaEnv",
    ],
)
def test_environments_that_exist_to_be_named_need_no_consent(name: str) -> None:
    assert environment(name) is not None


def test_a_wrapper_that_writes_files_needs_consent() -> None:
    assert plugins.import_object("gymnasium.wrappers:TimeLimit", "wrapper", makes_environment) is gym.wrappers.TimeLimit
    with pytest.raises(Untrusted):
        plugins.import_object("gymnasium.wrappers:RecordVideo", "wrapper", makes_environment)


def test_an_id_whose_environment_imports_its_argument_needs_consent() -> None:
    with pytest.raises(Untrusted, match="imports what env_config names"):
        spec_of("GymV21Environment-v0")
    trust.allow({"env": "GymV21Environment-v0"})
    assert spec_of("GymV21Environment-v0").id == "GymV21Environment-v0"


def test_a_settings_file_of_an_engine_needs_consent(tmp_path: Path) -> None:
    """ViZDoom's *.cfg can name the program that is started as its engine."""
    file = str(tmp_path / "evil.cfg")
    make = partial(
        make_environments, "VizdoomBasic-v1", 1, {"scenario_config_file": file}, preprocess=PreprocessConfig(standard=False)
    )
    with pytest.raises(Untrusted, match="settings file"):
        make()
    trust.check_config_files({"scenario_config_file": "basic.cfg"})
    trust.allow({"env_config": {"scenario_config_file": file}})
    trust.check_config_files({"scenario_config_file": file})


def make_run(directory: Path) -> None:
    (directory / "checkpoints" / "000001").mkdir(parents=True)
    (directory / "checkpoints" / "000001" / "state.json").write_text("{}")


@pytest.mark.parametrize("noted", ["", "checkpoints/000001", "best"])
def test_code_in_a_run_is_not_of_the_project_even_where_one_stands_in_it(project: Path, tmp_path: Path, noted: str) -> None:
    make_run(project)
    write_module(project, "trust_inside", tmp_path / "mark")
    trust.note_run(project / noted)
    with pytest.raises(Untrusted):
        environment("trust_inside:make")
    assert not (tmp_path / "mark").exists()


def test_code_next_to_a_run_is_not_part_of_the_project(project: Path, tmp_path: Path) -> None:
    """An archive with a run and a module in it, unpacked below the working directory."""
    make_run(project / "shared" / "agent" / "run")
    write_module(project / "shared" / "agent", "trust_beside", tmp_path / "mark")
    write_module(project / "mine", "trust_mine", tmp_path / "own")
    trust.note_run(project / "shared" / "agent" / "run")
    with pytest.raises(Untrusted):
        environment("shared.agent.trust_beside:make")
    assert not (tmp_path / "mark").exists()
    assert environment("mine.trust_mine:make") is not None


def test_a_link_into_a_run_is_no_way_around(project: Path, tmp_path: Path) -> None:
    make_run(project / "run")
    write_module(project / "run", "trust_linked", tmp_path / "mark")
    trust.note_run(project / "run")
    (project / "trust_link.py").symlink_to(project / "run" / "trust_linked.py")
    with pytest.raises(Untrusted):
        environment("run.trust_linked:make")


def test_consent_of_a_call_ends_with_it() -> None:
    with trust.consent(True):
        assert trust.is_allowed("any.module:name")
    assert not trust.is_allowed("any.module:name")


def test_what_the_user_gave_reaches_processes_that_do_not_inherit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trust.allow({"env": "some.package:make"}, "a plain word", 3, None)
    packed = CodeBundle.of("CartPole-v1")
    monkeypatch.setenv(trust.VARIABLE, "")
    packed.unpack()
    assert trust.is_allowed("some.package:make")
    assert os.environ[trust.VARIABLE] == "some.package:make"


def test_names_are_found_in_a_document_wherever_they_are() -> None:
    document = {
        "a": [{"b:C": {"x": "d.e:F"}}],
        "model": {"custom_model": "net"},
        "url": "redis://host:6379",
        "s": "my.store:S://x",
    }
    trust.allow(json.loads(json.dumps(document)))
    names = os.environ[trust.VARIABLE].split(",")
    assert names == ["b:C", "d.e:F", "model/net.py:CustomModel", "my.store:S"]


@pytest.mark.parametrize(
    ("made", "in_project", "accepted"),
    [
        (gym.Env, False, True),
        (dict, True, False),
        (functools.partial(gym.make, "CartPole-v1"), False, True),
        (json.dumps, True, False),
    ],
)
def test_what_counts_as_an_environment(made: Callable[..., Any], in_project: bool, accepted: bool) -> None:
    assert makes_environment(made, in_project) is accepted
