"""The shape of the package. `[tool.importlinter]` in pyproject.toml holds imports; this file holds what import statements do not show."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ludus

ROOT = Path(ludus.__file__).parent
PROJECT = Path(__file__).parents[1]
MOST_MODULES = 15

_MODULE_NAME = re.compile(r"ludus(\.[a-z_0-9]+){2,}(:[A-Za-z_][\w.]*)?")
_UPWARD_NAMES = {
    ("envs", "games"),  # the registry of environments names the Arena
    ("envs", "gamecore"),
    ("core", "envs"),  # names that stored data may import
    ("core", "games"),
    ("core", "gamecore"),
    ("core", "models"),
    ("core", "algorithms"),
    ("core", "transport"),
    ("core", "launch"),
    ("core", "storage"),
    ("launch", "cli"),  # a job runs a command
    ("launch", "distributed"),
}
"""(package, package above it): names of modules in strings that are meant to go up."""


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def depths() -> dict[str, int]:
    with open(PROJECT / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {package.strip(): depth for depth, packages in enumerate(layers) for package in packages.split("|")}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def module_names_in_strings(path: Path) -> Iterator[str]:
    """`module:Class` of plugin tables, arguments of `python -m`, and preload lists."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE_NAME.fullmatch(node.value):
            yield node.value


def test_imports_keep_to_the_contracts() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_package_has_a_layer() -> None:
    assert {package_of(path) for path in modules()} - depths().keys() == {"testing", "__init__"}


@pytest.mark.parametrize("path", [p for p in modules() if p.name != "renamed.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_module_names_in_strings_exist_and_go_down(path: Path) -> None:
    depth = depths()
    here = package_of(path)
    for name in module_names_in_strings(path):
        module, _, attribute = name.partition(":")
        found = importlib.util.find_spec(module)
        assert found is not None, f"{path.relative_to(ROOT)} names {name}, which does not exist"
        if attribute and found.origin:
            assert re.search(
                rf"^\s*(class|def|async def) {attribute.split('.')[0]}\b|^{attribute}\b", Path(found.origin).read_text(), re.M
            )
        there = module.split(".")[1]
        if here in depth and there != here and (here, there) not in _UPWARD_NAMES:
            assert depth[there] > depth[here], f"{path.relative_to(ROOT)} names {name}, which is not below it"


def test_folders_are_small() -> None:
    folders: dict[Path, int] = {}
    for path in modules():
        if path.name != "__init__.py":
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > MOST_MODULES} == {}


def test_there_is_no_bag_of_everything() -> None:
    assert [p for p in modules() if p.stem in {"utils", "util", "common", "helpers", "misc"}] == []


def test_nothing_unpickles() -> None:
    """Except a worker process what its parent sends it over a private descriptor."""
    allowed = {ROOT / "process" / "workers" / "supervisor.py", ROOT / "process" / "workers" / "forkserver.py"}
    using = [p for p in modules() if {"pickle", "cloudpickle", "dill", "shelve"} & {n.split(".")[0] for n in imports_of(p)}]
    assert set(using) <= allowed
    assert [p for p in modules() if "torch.load" in p.read_text(encoding="utf-8")] == []


def test_no_function_needs_scrolling() -> None:
    long = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                length = node.end_lineno - node.body[0].lineno  # the options of a command are its signature
                if length > 120:
                    long.append(f"{path.relative_to(ROOT)}:{node.name} has {length} lines")
    assert long == []


def test_no_public_name_is_shadowed_by_a_package() -> None:
    """`import ludus.train` would put the package in place of the function."""
    assert not {package_of(path) for path in modules()} & set(ludus.__all__)


def test_public_names_are_sorted_and_exist() -> None:
    assert ludus.__all__ == sorted(ludus.__all__)
    for name in ludus.__all__:
        assert getattr(ludus, name) is not None
