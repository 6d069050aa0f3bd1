"""Decides which code the names in a configuration may import (`module:Name`, `package:Id-v0`, `model/NAME.py`).

A stored run (config.yaml, state.json, model.json, messages of a fleet …) is untrusted input. Every name is treated as one from
a stored run, and is imported only

- if the user gave it: on the command line, in an experiment file, as an argument of the Python API (`allow`), or
- if the user trusts all names of this command: `--trust`, `trust=True` (`consent`), or
- if its module belongs to the user's project: below the working directory or the directory of the running script, not an
  installed package, and not in or next to the directory of a run, or
- if it is in `PLUGIN_MODULES`: modules of Gymnasium, PettingZoo, torch and Ludus meant for it, and has the right type.

`plugins.import_object` calls `check` before it imports anything. The same variable holds the tokens that may be sent
(`allow_token`). Environment variables pass the permissions to child processes; files of a run directory never grant any. See docs/security.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from ludus.errors import UnknownName, Untrusted

VARIABLE = "LUDUS_TRUST"
"""Names that the user gave, separated by commas or newlines; `*` = every name."""

PROJECTS = "LUDUS_PROJECT_PATH"
"""Additional directories of the user's code, separated as in PATH."""

EVERYTHING = "*"

PLUGIN_MODULES: Mapping[str, tuple[str, ...]] = {
    "environment": (
        "gymnasium.envs", "ludus.envs.toy_envs", "ludus.games.arena.env.gym_env", "ludus.games.arena.env.pettingzoo_env", "ludus.gamecore.vector_env",
    ),
    "wrapper": ("gymnasium.wrappers", "pettingzoo.utils.wrappers"),
    "model": ("torch.nn.modules", "torch.nn", "ludus.models.policy"),
    "algorithm": ("ludus.algorithms",),
    "memory": ("ludus.transport",),
}  # fmt: skip
"""Kind of name → modules (and their submodules) that a stored run may name. The object must be of that kind."""

_WRITES_FILES = ("RecordVideo",)
"""Wrappers of Gymnasium that write files at a path from their arguments."""

_INSTALLED = ("site-packages", "dist-packages")
_MAX_LENGTH = 500
_NAME = re.compile(r"(?:[^\W\d][\w.]*|[^,\n]+\.py):[^\W\d][\w./-]*|GymV\d+Environment-v\d+|[^,\n]+\.cfg")
"""Names that can be imported; environments whose arguments name modules; config files that name programs."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*){2,}")
"""`package.module.Class`: RLlib's form of `package.module:Class`."""

SCRIPT = "script:"
"""Prefix of a player of a league or battle that is a function: `script:module:function`."""

_runs: set[Path] = set()


# -- permissions of the user --------------------------------------------------------------------------------------------


def allow(*given: Any) -> None:
    """Trust every name in a value that the user gave (a string, a mapping, a whole config), here and in child processes."""
    names = {text.partition("://")[0] for value in given for text in _strings(value) if len(text) <= _MAX_LENGTH}
    adopt(text for text in names if _NAME.fullmatch(text))


def allow_everything() -> None:
    """Trust all names (`--trust`)."""
    adopt([EVERYTHING])


@contextlib.contextmanager
def consent(trust: bool, *given: Any) -> Iterator[None]:
    """Trust the `given` names, or with `trust` all names, inside the `with` block."""
    before = os.environ.get(VARIABLE)
    allow(*given)
    if trust:
        allow_everything()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def add_project(directory: Path) -> None:
    """Add a directory of the user's code, such as that of an experiment file."""
    added = str(directory.resolve())
    os.environ[PROJECTS] = os.pathsep.join([added, *(entry for entry in _extra_projects() if entry != added)])


def note_run(directory: Path) -> None:
    """Record that a run or checkpoint is read from a directory: code in or next to it is not part of the project."""
    run = directory.expanduser().absolute()
    if "checkpoints" in run.parts[1:]:
        run = next(parent.parent for parent in (run, *run.parents) if parent.name == "checkpoints")
    _runs.add(run.parent if run.name in ("best", "latest") else run)


def allow_token(address: str, file: str) -> None:
    """Let the token in a file be sent to an address, here and in child processes: the user gave both together."""
    adopt([_token_entry(address, file)])


def check_token(address: str, file: str) -> None:
    """Decide whether the token in a file may be sent to an address. Raises Untrusted."""
    if not is_token_allowed(address, file):
        raise Untrusted(
            f"Stored data names both {address} and the file {file}, whose content would be sent there as a token. Nothing was sent.",
            "If you trust it, add --trust, or name address and token_file in the file of the league. docs/security.md has the rules.",
        )


def is_token_allowed(address: str, file: str) -> bool:
    """Whether the user gave address and file together, or trusts all names."""
    return is_allowed(_token_entry(address, file))


def _token_entry(address: str, file: str) -> str:
    """The entry of `VARIABLE` for a pair: paths and addresses may contain its separators."""
    return f"token-{hashlib.sha256(json.dumps([address, file]).encode()).hexdigest()}"


def is_allowed(name: str) -> bool:
    """Whether the user gave the name, or trusts all names."""
    allowed = _names_in_variable()
    return name in allowed or EVERYTHING in allowed


def names_to_trust(*names: str) -> tuple[str, ...]:
    """Return what a process of this run on another machine may import: names that the user gave, and those of `names` that are
    in the user's project here."""
    own = {name for name in names if ":" in name and is_in_project(name.partition(":")[0])}
    return tuple(sorted(_names_in_variable() | own))


def adopt(names: Iterable[str]) -> None:
    """Trust names, as returned by `names_to_trust` in the process that started this one."""
    fresh = set(names) - _names_in_variable()
    if fresh:
        os.environ[VARIABLE] = ",".join(sorted(_names_in_variable() | fresh))


def _names_in_variable() -> set[str]:
    return {entry.strip() for entry in re.split(r"[,\n]", os.environ.get(VARIABLE, "")) if entry.strip()}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.removeprefix(SCRIPT)
        if _DOTTED.fullmatch(value):
            yield ":".join(value.rsplit(".", 1))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
            if key == "custom_model" and isinstance(item, str) and ":" not in item:
                yield model_file(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, (type, FunctionType)):
        yield f"{value.__module__}:{value.__qualname__}"


def model_file(name: str) -> str:
    """By which a custom model that is a file of `model/` is allowed: `custom_model: NAME`."""
    return f"model/{name}.py:CustomModel"


# -- decisions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportApproval:
    """Why a name may be imported: given by the user, or in the user's project; neither: it is in `PLUGIN_MODULES`."""

    by_user: bool = False
    project: bool = False


def check(name: str, kind: str) -> ImportApproval:
    """Decide whether `module:attribute` may be imported. Raises Untrusted, UnknownName.

    `kind`: expected kind of object, a key of `PLUGIN_MODULES`.
    """
    module, _, attribute = name.partition(":")
    reject_stdlib(name, module)
    if is_allowed(name):
        return ImportApproval(by_user=True)
    top = module.partition(".")[0]
    if f"{module}.".startswith(tuple(f"{parent}." for parent in PLUGIN_MODULES.get(kind, ()))) and attribute not in _WRITES_FILES:
        return ImportApproval()
    if top == "__main__" and (_file_of_main() is None or _is_project_file(_file_of_main())):  # a notebook has no file
        return ImportApproval(project=True)
    if top not in ("ludus", "__main__") and _is_project_file(find_module(module, name)):
        return ImportApproval(project=True)
    raise untrusted_error(name, kind)


def reject_stdlib(name: str, module: str) -> None:
    """Raise UnknownName for a module of Python itself (`os:system`), even if the user gave it."""
    if module.partition(".")[0] in (sys.stdlib_module_names | set(sys.builtin_module_names)) - {"__main__"}:
        raise UnknownName(f"{name!r} belongs to Python's standard library, which is not allowed here.", "Name your own code.")


def check_file(path: Path, name: str, kind: str) -> None:
    """Decide whether the Python file of `name` may be run. Raises Untrusted."""
    if not is_allowed(name) and not _is_project_file(path):
        raise untrusted_error(name, kind, f"{path} is not in your project directory")


def check_config_files(env_config: Any) -> None:
    """Reject config files of a game engine (`*.cfg` of ViZDoom) that stored data names: they can name programs to start.

    Allowed are scenarios of the engine (a name without a directory), files of the user's project, and files that the user
    gave. Raises Untrusted.
    """
    for text in _strings(env_config):
        if text.endswith(".cfg") and Path(text).name != text and not is_allowed(text) and not _is_project_file(Path(text)):
            raise untrusted_error(text, "settings file", f"{text} is not in your project directory")


def untrusted_error(name: str, kind: str, why: str = "") -> Untrusted:
    """Return the error for a name that may not be imported."""
    roots = ", ".join(dict.fromkeys(map(str, _roots()))) or "there is none"
    why = why or f"{name.partition(':')[0]} is not in your project directory ({roots})"
    option = f", name it yourself (--env {name})" if kind == "environment" else ""
    return Untrusted(
        f"The {kind} {name!r} comes from stored data and would run code that you did not name: {why}. Nothing was imported.",
        f"If you trust it, add --trust{option}, or set {VARIABLE}={name}; from Python: trust=True. docs/security.md has the rules.",
    )


def is_in_project(module: str) -> bool:
    """Whether a module is a file of the user's project. Imports neither it nor its parent packages."""
    try:
        return _is_project_file(find_module(module, module))
    except UnknownName:
        return False


def find_module(module: str, name: str) -> Path | None:
    """Return the file of a module, or the directory of a namespace package, without importing it or its parent packages.

    `name`: what refers to it, for the message. Raises UnknownName if it does not exist.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        return _origin_of(getattr(loaded, "__spec__", None)) or _file_of(loaded)
    path: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module.split(".")
    for i in range(len(parts)):
        spec = _find_spec(".".join(parts[: i + 1]), path)
        path = None if spec is None else _search_path(spec)
        if spec is None or (path is None and i < len(parts) - 1):
            raise UnknownName(f"There is no module {module!r} (from {name!r}).", "Is it on PYTHONPATH?")
    return _origin_of(spec)


def _search_path(spec: importlib.machinery.ModuleSpec) -> list[str] | None:
    """Return the search path of a package. That of a namespace package is read without importing its parents."""
    locations = spec.submodule_search_locations
    return None if locations is None else list(getattr(locations, "_path", locations))


def _find_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """Find a spec as the import system does, including finders of editable installs, without importing anything."""
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # third-party finders may raise anything
            found = finder.find_spec(name, path)
            if found is not None:
                return found
    # PathFinder would import the parents of a namespace package.
    folders = [Path(entry) / name.rpartition(".")[2] for entry in (path or ()) if isinstance(entry, str)]
    found = importlib.machinery.ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return found if found.submodule_search_locations else None


def _origin_of(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return Path(spec.origin).absolute()
    folders = _search_path(spec) or []
    return Path(folders[0]).absolute() if len(folders) == 1 else None


def _file_of(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).absolute()


def _file_of_main() -> Path | None:
    return _file_of(sys.modules.get("__main__"))


def _is_project_file(path: Path | None) -> bool:
    if path is None:
        return False
    forms = {path.absolute(), path.resolve()}
    if any(_is_installed(form) for form in forms):
        return False
    return any(_belongs_to(form, root) for form in forms for root in _roots())


def _is_installed(path: Path) -> bool:
    if set(path.parts) & set(_INSTALLED):
        return True
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return any(path.is_relative_to(library) for library in libraries if library)


def _belongs_to(path: Path, root: Path) -> bool:
    """Whether a path is below a root, and neither in a run directory nor in a top-level folder that contains a recorded run."""
    if not path.is_relative_to(root):
        return False
    above = [parent for parent in path.parents if parent.is_relative_to(root)]
    if any(_looks_like_run(parent) for parent in above):
        return False
    for run in {form for noted in _runs for form in (noted, noted.resolve())}:
        if root.is_relative_to(run):
            return False
        if run.is_relative_to(root) and path.relative_to(root).parts[0] == run.relative_to(root).parts[0]:
            return False
    return True


def is_in_run(directory: Path) -> bool:
    """Whether a directory is that of a run or a league, or inside one."""
    return any(_looks_like_run(each) for each in (directory, *directory.parents))


def _looks_like_run(directory: Path) -> bool:
    names = (
        ("config.yaml", "meta.json"),
        ("state.json", "manifest.json"),
        ("checkpoints", "config.yaml"),
        ("league.yaml", "journal"),
    )
    if any(all((directory / name).exists() for name in each) for each in names):
        return True
    return any((directory / "checkpoints").glob("*/state.json")) or any((directory / "models").glob("*/model.json"))


def _roots() -> list[Path]:
    """Return the directories of the user's code; the root of the file system never counts."""
    roots = [Path(entry) for entry in _extra_projects()]
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        roots.append(Path.cwd())
    main = _file_of_main()
    if main is not None and not _is_installed(main.resolve()):
        roots.append(main.parent)
    return [root.resolve() for root in roots if len(root.resolve().parts) > 1]


def _extra_projects() -> list[str]:
    return [entry for entry in os.environ.get(PROJECTS, "").split(os.pathsep) if entry]
