"""`-p path.py[:object]`: a Python file that makes an experiment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ludus.compat.coach import preset_file
from ludus.errors import UsageError


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_mapping_called_preset_is_an_experiment_with_the_name_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "preset = {'env': 'CartPole-v1', 'config': {'lr': 1e-3, 'model': {'fcnet_hiddens': (8, 8)}}}")
    found = preset_file.load(str(path))
    assert found == (path, {"mine": {"env": "CartPole-v1", "config": {"lr": 1e-3, "model": {"fcnet_hiddens": [8, 8]}}}})


def test_a_function_makes_one_and_a_mapping_of_several_has_their_names(tmp_path: Path) -> None:
    written(tmp_path, "LR = 0.5", "beside_it.py")
    path = written(
        tmp_path,
        "from beside_it import LR\n"
        "def one(seed=3):\n    return {'name': 'named', 'env': 'A', 'config': {'lr': LR, 'seed': seed}}\n"
        "both = {'a': {'env': 'A'}, 'b': {'env': 'B'}}\n",
    )
    before = list(sys.path)
    assert preset_file.load(f"{path}:one")[1] == {"named": {"env": "A", "config": {"lr": 0.5, "seed": 3}}}
    assert preset_file.load(f"{path}:both")[1] == {"a": {"env": "A"}, "b": {"env": "B"}}
    assert sys.path == before


def test_a_function_may_import_modules_of_its_directory_when_called(tmp_path: Path) -> None:
    written(tmp_path, "LR = 0.25", "beside_the_function.py")
    path = written(
        tmp_path, "def preset():\n    from beside_the_function import LR\n    return {'env': 'A', 'config': {'lr': LR}}\n"
    )
    assert preset_file.load(str(path))[1] == {"mine": {"env": "A", "config": {"lr": 0.25}}}


@pytest.mark.parametrize(
    ("text", "suffix", "words"),
    [
        ("preset = {", "", r"mine\.py is not Python: line 1"),
        ("x = 1\nraise ValueError('no luck')", "", r"mine\.py raised ValueError: no luck \(line 2\)"),
        ("import not_there_at_all", "", r"needs 'not_there_at_all', which is not installed"),
        ("from rl_coach.agents import x\n", "", r"builds a preset from classes of Coach"),
        ("graph_manager = 1", "", r"builds a preset from classes of Coach"),
        ("presets = {}", "", r"has no 'preset'\. Did you mean 'presets'"),
        ("preset = 3", "", r":preset is a value of the type int"),
        ("class preset: pass", "", r":preset is a class"),
        ("def preset(a, b=1): pass", "", r":preset needs a; it is called without arguments"),
        ("def preset(): return [1]", "", r":preset\(\) returned a value of the type list"),
        ("def preset():\n    return 1 / 0", "", r":preset\(\) raised ZeroDivisionError: division by zero \(line 2\)"),
        ("preset = {'env': print}", "", r"cannot be saved as JSON.*'module:Name'"),
        ("preset = {'config': {'lr': float('nan')}}", "", r"cannot be saved as JSON"),
        ("preset = {}", ":", r"is not of the form path\.py:object"),
        ("preset = {}", ":a.b", r"is not of the form path\.py:object"),
    ],
)
def test_errors_in_a_file_are_reported(tmp_path: Path, text: str, suffix: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=words):
        preset_file.load(f"{path}{suffix}")


def test_a_directory_may_be_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "agents.py.d" / "old.py").mkdir(parents=True)
    path = written(tmp_path / "agents.py.d" / "old.py", "preset = {'env': 'A'}\nother = {'env': 'B'}")
    assert preset_file.load(str(path)) == (path, {"mine": {"env": "A"}})
    assert preset_file.load(f"{path}:other") == (path, {"mine": {"env": "B"}})
    assert preset_file.split(str(tmp_path / "agents.py.d" / "x.yaml")) is None


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no file .*none\.py"):
        preset_file.load(str(tmp_path / "none.py"))
