"""From a name to an object: `"local"`, or `"package.module:Name"`, imported only when asked for.

One table per kind of plugin stands next to the protocol it serves; this module only resolves.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from ludus.errors import LudusError, MissingExtra, UnknownName, UsageError, place_of


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the nearest known names, or with all of them when none is near."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    lowered = {n.lower(): n for n in names}
    if name.lower() in lowered:
        close = [lowered[name.lower()]]
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    if not names:
        return ""
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"Known: {shown}."


def import_object(path: str) -> Any:
    """`"package.module:attribute.path"` → the object. Raises UnknownName with what is missing.

    Names also come from configurations and checkpoints of others; what Python itself brings (`os:system`) is never meant.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UsageError(f"{path!r} is not of the form 'module:Name'.")
    module = import_module(module_name, path)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise UnknownName(
                f"{module_name!r} has no {part!r}.", did_you_mean(part, [n for n in dir(target) if not n.startswith("_")])
            )
        target = getattr(target, part)
    if inspect.isroutine(target) or isinstance(target, type):
        _refuse_pythons_own(path, str(getattr(target, "__module__", "") or ""))
    return target


def import_module(module_name: str, path: str) -> ModuleType:
    """The module that `path` names before its colon. Raises UnknownName, MissingExtra, UsageError when its code fails."""
    _refuse_pythons_own(path, module_name)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            package = "'ray[rllib]'" if module_name.startswith("ray.rllib") else error.name
            raise MissingExtra(f"{path!r} needs the package {error.name!r}.", f"pip install {package}") from error
        raise UnknownName(f"There is no module {module_name!r} (from {path!r}).", "Is it on PYTHONPATH?") from error
    except LudusError:
        raise
    except Exception as error:
        raise UsageError(
            f"Importing {module_name!r} (from {path!r}) raised {type(error).__name__}: {error}{place_of(error)}."
        ) from error


def _refuse_pythons_own(path: str, module_name: str) -> None:
    top = module_name.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        raise UnknownName(f"{path!r} is a part of Python itself, which is not what is meant here.", "Name one of your own.")


def resolve(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """Look `name` up in `table` (name → "module:Class"), or import it when it is a path itself."""
    if name in table:
        return import_object(table[name])
    if ":" in name and "://" not in name:
        return import_object(name)
    raise UnknownName(f"Unknown {kind} {name!r}.", did_you_mean(name, table))


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{what} needs the package {module!r}.", f"pip install 'ludus[{extra}]'") from error
