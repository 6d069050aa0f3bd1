from __future__ import annotations

import math
from pathlib import Path

import pytest

from ludus import plugins
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
    assert plugins.import_object("math:pi") is math.pi
    assert plugins.import_object("pathlib:Path.home") == Path.home


@pytest.mark.parametrize("path", ["", ":", "math", "math:", ":pi", ".relative:x", "..:x"])
def test_what_is_not_a_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="not of the form 'module:Name'"):
        plugins.import_object(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:x", "no module 'no_such_module'"),
        ("math.nothing:x", r"no module 'math\.nothing'"),
        ("ludus.nothing.deeper:x", r"no module 'ludus\.nothing\.deeper'"),
        ("math:tua", "'math' has no 'tua'. Did you mean 'tau'"),
        ("math:pi.nothing", "has no 'nothing'"),
        ("pathlib:Path.hom", "Did you mean 'home'"),
    ],
)
def test_what_is_not_there_is_named_with_its_neighbours(path: str, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        plugins.import_object(path)


@pytest.mark.parametrize("file", ["my_game", "absent_game"])
def test_a_module_that_lacks_a_package_is_told_from_a_missing_module(modules: Path, file: str) -> None:
    (modules / f"{file}.py").write_text("import absent\n")
    with pytest.raises(MissingExtra, match=r"needs the package 'absent'\. pip install absent"):
        plugins.import_object(f"{file}:Game")


def test_an_error_inside_the_users_module_is_not_hidden(modules: Path) -> None:
    (modules / "broken_game.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        plugins.import_object("broken_game:Game")


def test_a_name_of_the_table_wins_and_a_path_is_imported() -> None:
    table = {"circle": "math:pi", "a:b": "math:e"}
    assert plugins.resolve("number", "circle", table) is math.pi
    assert plugins.resolve("number", "a:b", table) is math.e
    assert plugins.resolve("number", "math:tau", table) is math.tau


@pytest.mark.parametrize("name", ["circel", "s3://bucket/key", "no_such_number"])
def test_an_unknown_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(UnknownName, match=f"Unknown number '{name}'.*circle"):
        plugins.resolve("number", name, {"circle": "math:pi"})


def test_a_missing_dependency_names_its_extra() -> None:
    assert plugins.require("math", "maths", "Sums") is math
    with pytest.raises(MissingExtra, match=r"Sums needs the package 'absent'. pip install 'ludus\[maths\]'"):
        plugins.require("absent", "maths", "Sums")
