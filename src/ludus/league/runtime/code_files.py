"""Copies of the user's modules in the directory of a league, for learners on machines that do not have them.

<league>/code/opponents.py           a module that the file of the league names, and modules of the project that it imports
<league>/code/model/customnet.py     custom models
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ludus.core import trust
from ludus.io.atomic_file import replace_file
from ludus.models.custom.loader import FOLDER, ModelFiles
from ludus.sampling.league_policies import CODE

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 1 << 20
"""Of the modules of one name."""


def store_code(league: Path, names: Iterable[str], models: Iterable[ModelFiles] = ()) -> None:
    """Copy the modules of all `module:function` that belong to the user's project. Raises OSError."""
    modules = {name.partition(":")[0] for name in names if ":" in name}
    for module in sorted(modules - {"__main__"}):
        if trust.is_in_project(module):
            _write(league, module, _read_module(module))
    for files in models:
        _write(league, files.label(), {f"{FOLDER}/{stem}.py": text.encode() for stem, text in files.texts.items()})


def _write(league: Path, what: str, files: dict[str, bytes]) -> None:
    if sum(map(len, files.values())) > _MAX_BYTES:
        log.warning("%s is not copied to the league: its modules have more than %d bytes", what, _MAX_BYTES)
        return
    for name, data in files.items():
        path = league / CODE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)


def _read_module(module: str) -> dict[str, bytes]:
    """The source files of a module, of its packages, and of those modules it imports that are beside them; by relative path."""
    file = trust.find_module(module, module)
    if file is None or file.suffix != ".py":
        return {}
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    files: dict[str, bytes] = {}
    pending = [module]
    while pending:
        for path in _files_of(root, pending.pop()):
            name = path.relative_to(root).as_posix()
            if name not in files:
                files[name] = path.read_bytes()
                pending += _imported_modules(name, files[name])
    return files


def _files_of(root: Path, module: str) -> list[Path]:
    """Source files below `root` that an import of the module runs: of its packages, and its own."""
    parts = module.split(".")
    packages = [root.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
    own = root.joinpath(*parts[:-1], f"{parts[-1]}.py")
    return [path for path in (*packages, own) if path.is_file()]


def _imported_modules(name: str, text: bytes) -> list[str]:
    """All modules that a source file may import. `name`: its relative path."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError) as error:
        log.warning("the modules that %s imports are not copied to the league: %s", name, error)
        return []
    package = name.split("/")[:-1]
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            found += (
                [origin, *(f"{origin}.{alias.name}" for alias in node.names)] if origin else [alias.name for alias in node.names]
            )
    return found
