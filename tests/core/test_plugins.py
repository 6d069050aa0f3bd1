from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ludus.core import plugins, trust
from ludus.errors import MissingExtra, UnknownName, UsageError


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("gama", "Did you mean 'gamma' or 'lambda'?"),
        ("lamda", "Did you mean 'lambda' or 'gamma'?"),
        ("GAMMA", "Did you mean 'gamma'?"),
        ("zzz", "Known: gamma, lambda, lr."),
    ],
)
def test_the_nearest_names_are_suggested_nearest_first(name: str, suggestion: str) -> None:
    assert plugins.did_you_mean(name, ["lr", "lambda", "gamma"]) == suggestion


def test_a_long_list_of_known_names_is_cut_short() -> None:
    sentence = plugins.did_you_mean("zzz", [f"name{i:02}" for i in range(13)])
    assert sentence.endswith("name11, ….")
    assert plugins.did_you_mean("zzz", []) == ""


def test_a_path_leads_to_the_object_through_attributes() -> None:
    assert plugins.load_object("numpy:linalg.norm") is np.linalg.norm
    assert plugins.load_object("gymnasium.envs.classic_control:CartPoleEnv").metadata["render_fps"] == 50


@pytest.mark.parametrize(
    "name", ["os:system", "subprocess:Popen", "builtins:exec", "sly_game:os.system", "sly_game:run", "sys:exit"]
)
def test_what_python_itself_brings_is_never_meant(modules: Path, name: str) -> None:
    (modules / "sly_game.py").write_text("import os\nfrom subprocess import run\n")
    with pytest.raises(UnknownName, match="belongs to Python's standard library"):
        plugins.load_object(name)


def test_a_partial_function_of_ones_own_is_fine(modules: Path) -> None:
    (modules / "own_game.py").write_text("from functools import partial\nmake = partial(dict, size=3)\n")
    assert plugins.load_object("own_game:make")() == {"size": 3}


@pytest.mark.parametrize("path", ["", ":", "math", "math:", ":pi", ".relative:x", "..:x"])
def test_what_is_not_a_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="not of the form 'module:Name'"):
        plugins.load_object(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:x", "no module 'no_such_module'"),
        ("numpy.nothing:x", r"no module 'numpy\.nothing'"),
        ("ludus.nothing.deeper:x", r"no module 'ludus\.nothing\.deeper'"),
        ("numpy:eular_gamma", "'numpy' has no 'eular_gamma'. Did you mean 'euler_gamma'"),
        ("numpy:pi.nothing", "has no 'nothing'"),
        ("numpy:linalg.nrm", "Did you mean 'norm'"),
    ],
)
def test_what_is_not_there_is_named_with_its_neighbours(path: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        plugins.load_object(path)


@pytest.mark.parametrize("file", ["my_game", "absent_game"])
def test_a_module_with_a_missing_dependency_differs_from_a_missing_module(modules: Path, file: str) -> None:
    (modules / f"{file}.py").write_text("import absent\n")
    with pytest.raises(MissingExtra, match=r"needs the package 'absent'\. pip install absent"):
        plugins.load_object(f"{file}:Game")


def test_an_error_inside_the_users_module_is_not_hidden(modules: Path) -> None:
    (modules / "broken_game.py").write_text("1 / 0\n")
    with pytest.raises(UsageError, match=r"raised ZeroDivisionError: .*broken_game\.py:1, in <module>\)") as raised:
        plugins.load_object("broken_game:Game")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_name_of_the_table_wins_and_a_path_is_imported() -> None:
    table = {"circle": "numpy:pi", "a:b": "numpy:e"}
    assert plugins.resolve("number", "circle", table) is np.pi
    assert plugins.resolve("number", "a:b", table) is np.e
    trust.allow("numpy:euler_gamma")
    assert plugins.resolve("number", "numpy:euler_gamma", table) is np.euler_gamma


@pytest.mark.parametrize("name", ["circel", "s3://bucket/key", "no_such_number"])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(UnknownName, match=f"Unknown number '{name}'.*circle"):
        plugins.resolve("number", name, {"circle": "numpy:pi"})


def test_a_missing_dependency_names_its_extra() -> None:
    assert plugins.require("numpy", "maths", "Sums") is np
    with pytest.raises(MissingExtra, match=r"Sums needs the package 'absent'. pip install 'ludus\[maths\]'"):
        plugins.require("absent", "maths", "Sums")


def test_class_names_of_earlier_releases_are_found() -> None:
    assert plugins.load_object("ludus.cluster.slurm:SlurmReach").__name__ == "SlurmStarter"
