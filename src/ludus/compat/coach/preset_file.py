"""`-p path.py[:object]`: experiments defined by a Python file of the user, which is executed."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError, LudusError, UnknownName, UsageError

DEFAULT = "preset"
_COACH = "graph_manager"
_MODULE = "ludus_preset_file"
_FORM = re.compile(r"(.+\.py)(:[^/:]*)?", re.DOTALL)


def split(preset: str) -> tuple[Path, str] | None:
    """Return the file and the rest (":object" or ""), or None if it is not a Python file."""
    found = _FORM.fullmatch(preset)
    return None if found is None else (Path(found[1]), found[2] or "")


def load(preset: str) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Run the file; return its path, and its experiments by name, not yet validated. Raises UsageError."""
    found = split(preset)
    if found is None or (found[1] and not found[1][1:].isidentifier()):
        raise UsageError(f"-p {preset} is not of the form path.py:object.", f"Without :object it is {DEFAULT!r}.")
    path, rest = found
    with _import_siblings(path):
        return path, _experiments(_build_preset(_run_file(path), path, rest[1:] or DEFAULT), path)


@contextlib.contextmanager
def _import_siblings(path: Path) -> Iterator[None]:
    """Let the file import modules of its directory."""
    folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"There is no file {path}.")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _report_errors(path, ""):
        try:
            spec.loader.exec_module(module)
        except SyntaxError as error:
            raise ConfigError(f"{path} is not Python: line {error.lineno}: {error.msg}.") from error
        except ModuleNotFoundError as error:
            if error.name and error.name.partition(".")[0] == "rl_coach":
                raise _coach_preset_error(path) from error
            raise ConfigError(f"{path} needs {error.name!r}, which is not installed.", f"pip install {error.name}") from error
    return module


@contextlib.contextmanager
def _report_errors(path: Path, where: str) -> Iterator[None]:
    """Raise ConfigError for any exception of the user's code, with its line. `where`: the function of the file."""
    try:
        yield
    except LudusError:
        raise
    except Exception as error:  # user code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        line = f" (line {lines[-1]})" if lines else ""
        raise ConfigError(f"{path} {where}raised {type(error).__name__}: {error}{line}.") from error


def _coach_preset_error(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} builds a preset from classes of Coach, which are not available.",
        "Write  preset = {'env': …, 'run': …, 'config': {…}}  instead; `ludus presets list` shows the known names of Coach.",
    )


def _build_preset(module: ModuleType, path: Path, attribute: str) -> Any:
    if not hasattr(module, attribute):
        if attribute == DEFAULT and hasattr(module, _COACH):
            raise _coach_preset_error(path)
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UnknownName(f"{path} has no {attribute!r}.", f"{did_you_mean(attribute, public)} -p {path}:NAME names it.".strip())
    found = getattr(module, attribute)
    if isinstance(found, Mapping):
        return found
    if not callable(found) or isinstance(found, type):
        raise UsageError(
            f"{path}:{attribute} is {_describe_type(found)}.",
            "It is a mapping {'env': …, 'config': …}, or a function without arguments.",
        )
    needed = [
        p.name
        for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(f"{path}:{attribute} needs {', '.join(needed)}; it is called without arguments.", "Give them defaults.")
    with _report_errors(path, f":{attribute}() "):
        made = found()
    if not isinstance(made, Mapping):
        raise UsageError(
            f"{path}:{attribute}() returned {_describe_type(made)}.", "It returns a mapping {'env': …, 'config': …}."
        )
    return made


def _describe_type(value: Any) -> str:
    return "a class" if isinstance(value, type) else f"a value of the type {type(value).__name__}"


def _experiments(found: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Return the experiments by name; a single experiment gets the name of the file."""
    several = bool(found) and all(isinstance(value, Mapping) and "env" in value for value in found.values())
    named = dict(found) if several else {str(found.get("name", path.stem)): {k: v for k, v in found.items() if k != "name"}}
    try:
        plain = json.loads(json.dumps(named, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} contains a value that cannot be saved as JSON: {error}.",
            "Use numbers, words, booleans, lists and mappings; classes and functions by name: 'module:Name'.",
        ) from error
    return dict(plain)
