"""Copies of the user's modules in the directory of a league, for learners on machines that do not have them.

<league>/code/opponents.py           a module that the file of the league names, and modules of the project that it imports
<league>/code/model/customnet.py     custom models
"""

from __future__ import annotations

import logging
import modulefinder
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ludus.core import trust
from ludus.errors import UnknownName
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
    finder = modulefinder.ModuleFinder(path=[str(root)])
    try:
        finder.import_hook(module)
    except (ImportError, SyntaxError, UnknownName) as error:
        log.warning("the modules that %s imports are not copied to the league: %s", module, error)
        return {file.relative_to(root).as_posix(): file.read_bytes()}
    paths = [Path(file) for found in finder.modules.values() if (file := getattr(found, "__file__", None)) is not None]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths if path.suffix == ".py"}
