"""Lazy import of plugins by name: `"local"` from a table, or `"package.module:Name"`.

The tables of names are next to the protocols that the plugins implement.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ludus.core import trust
from ludus.core.renamed import current_name
from ludus.errors import LudusError, MissingExtra, UnknownName, Untrusted, UsageError, user_frame

Accepts = Callable[[Any, bool], bool]
"""(object, whether it is in the user's project) → whether it is of the required kind."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known names, or with all of them if none is near."""
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


def import_object(path: str, kind: str, accepts: Accepts) -> Any:
    """Import `"package.module:attribute.path"`. Raises UnknownName, Untrusted.

    The name may come from an untrusted stored run: `trust.check` runs before the import, and `accepts` checks the object
    unless the user gave the name. Objects of the standard library (`os:system`) are always rejected.
    """
    path = current_name(path)
    module_name, attribute = _split(path)
    approval = trust.check(path, kind)
    target, parents = _lookup(path, module_name, attribute)
    if not approval.by_user and (not all(isinstance(each, type) for each in parents) or not accepts(target, approval.project)):
        raise Untrusted(
            f"{path!r}, which stored data names, is {_describe(target)}, which is not declared to be of the kind {kind!r}.",
            f"Annotate the return type of a function; if you trust it, add --trust or set {trust.VARIABLE}={path}.",
        )
    return target


def load_object(path: str) -> Any:
    """Import a `"module:Name"` from a built-in table or the command line. Raises UnknownName, MissingExtra."""
    path = current_name(path)
    return _lookup(path, *_split(path))[0]


def is_class(found: Any, _: bool = False) -> bool:
    return isinstance(found, type)


def _split(path: str) -> tuple[str, str]:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UsageError(f"{path!r} is not of the form 'module:Name'.")
    return module_name, attribute


def _lookup(path: str, module_name: str, attribute: str) -> tuple[Any, list[Any]]:
    """Return the object, and the objects between it and its module."""
    found: list[Any] = [import_module(module_name, path)]
    for part in attribute.split("."):
        if not hasattr(found[-1], part):
            known = [n for n in dir(found[-1]) if not n.startswith("_")]
            raise UnknownName(f"{module_name!r} has no {part!r}.", did_you_mean(part, known))
        found.append(getattr(found[-1], part))
    target = found[-1]
    if inspect.isroutine(target) or isinstance(target, type):
        trust.reject_stdlib(path, str(getattr(target, "__module__", "") or ""))
    return target, found[1:-1]


def _describe(target: Any) -> str:
    if isinstance(target, type):
        return f"the class {target.__name__}"
    return "a function" if inspect.isroutine(target) else f"a {type(target).__name__}"


def import_module(module_name: str, path: str) -> ModuleType:
    """Import the module of `path`. Raises UnknownName, MissingExtra, or UsageError if its code raises."""
    trust.reject_stdlib(path, module_name)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            package = "'ray[rllib]'" if module_name.startswith("ray.rllib") else error.name
            raise MissingExtra(f"{path!r} needs the package {error.name!r}.", f"pip install {package}") from error
        raise UnknownName(f"There is no module {module_name!r} (from {path!r}).", "Is it on PYTHONPATH?") from error
    except LudusError:
        raise
    except Exception as error:  # user code may raise anything
        raise UsageError(
            f"Importing {module_name!r} (from {path!r}) raised {type(error).__name__}: {error}{user_frame(error)}."
        ) from error


def add_import_directory(directory: Path) -> None:
    """Search modules in a directory first, in this process and in those that it starts, as Python does for the directory of a script."""
    added = str(directory.resolve())
    if added not in sys.path:
        sys.path.insert(0, added)


def resolve(kind: str, name: str, table: Mapping[str, str], accepts: Accepts = is_class) -> Any:
    """Import `table[name]` (a "module:Class"), or `name` if it is such a path itself. Raises UnknownName, Untrusted."""
    if name in table:
        return load_object(table[name])
    if ":" in name and "://" not in name:
        return import_object(name, kind, accepts)
    raise UnknownName(f"Unknown {kind} {name!r}.", did_you_mean(name, table))


def require(module: str, extra: str, what: str) -> Any:
    """Import an optional dependency. Raises MissingExtra that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{what} needs the package {module!r}.", f"pip install 'ludus[{extra}]'") from error
