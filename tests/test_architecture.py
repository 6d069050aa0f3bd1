"""The shape of the package: imports go down only, Ray stays in one folder, no rooms without a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ludus

ROOT = Path(ludus.__file__).parent

LAYERS = [
    {"cli", "api"},
    {"experiment", "remote"},
    {"cluster"},
    {"runtime"},
    {"serve", "gamecore"},
    {"actor"},
    {"training", "league"},
    {"model", "buffer"},
    {"games"},
    {"game", "memory", "store"},
    {
        "types",
        "tree",
        "spaces",
        "errors",
        "formatting",
        "config",
        "plugins",
        "metrics",
        "documents",
        "spellings",
        "sb3_cleanrl",
        "rllib_values",
        "batch_shape",
        "complaint",
        "statistics",
        "logfile",
        "regular_files",
        "pids",
        "repeats",
        "sockets",
        "schedule",
        "trust",
    },
]
"""From top to bottom; a module may import from its own room and from below. `testing` is outside: it tests them all."""

LEVEL = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Full names of what a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            if node.module == "ludus":
                yield from (f"ludus.{alias.name}" for alias in node.names)


def test_every_room_has_a_place_in_the_order() -> None:
    unplaced = {room(path) for path in modules()} - LEVEL.keys() - {"testing", "__init__"}
    assert not unplaced


@pytest.mark.parametrize("path", [p for p in modules() if room(p) in LEVEL], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path: Path) -> None:
    here = LEVEL[room(path)]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "ludus" and len(parts) > 1 and parts[1] in LEVEL and parts[1] != room(path):
            values = here == LEVEL[parts[1]] == len(LAYERS) - 1  # the values are one room of many files
            assert values or LEVEL[parts[1]] > here, f"{path.relative_to(ROOT)} imports {name}, which is not below it"


def test_ray_is_imported_in_runtime_alone() -> None:
    guilty = [p for p in modules() if room(p) != "runtime" and any(n.split(".")[0] == "ray" for n in imported(p))]
    assert guilty == []


def test_there_is_no_bag_of_everything() -> None:
    assert [p for p in modules() if p.stem in {"utils", "util", "common", "helpers", "misc"}] == []


def test_nothing_unpickles() -> None:
    ours = {ROOT / "runtime" / "processes.py", ROOT / "runtime" / "forkserver.py"}  # to its own worker, over a private descriptor
    guilty = [p for p in modules() if {"pickle", "cloudpickle", "dill", "shelve"} & {n.split(".")[0] for n in imported(p)}]
    assert set(guilty) <= ours
    assert [p for p in modules() if "torch.load" in p.read_text(encoding="utf-8")] == []


def test_no_function_needs_scrolling() -> None:
    long = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                length = node.end_lineno - node.lineno
                if length > 120:
                    long.append(f"{path.relative_to(ROOT)}:{node.name} has {length} lines")
    assert long == []


def test_no_public_name_is_shadowed_by_a_room() -> None:
    """`import ludus.train` would put the folder in place of the function."""
    rooms = {room(path) for path in modules()}
    assert not rooms & set(ludus.__all__)


def test_public_names_are_sorted_and_exist() -> None:
    assert ludus.__all__ == sorted(ludus.__all__)
    for name in ludus.__all__:
        assert getattr(ludus, name) is not None
