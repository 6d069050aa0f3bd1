"""Which code the names in a configuration may import (`module:Name`, `package:Id-v0`, `model/NAME.py`).

A stored run (config.yaml, state.json, model.json, the orders of a fleet …) may come from anybody. So every name is treated as one
from a stored run, and is imported only

- when the user gave it: on the command line, in a file of theirs, as an argument of the Python API (`allow`), or
- when the user consented to all names of this command: `--trust`, `trust=True` (`consent`), or
- when its module belongs to the user's project: below the working directory or the directory of the running script, not among
  installed packages, and not in the directory of a run or beside it, or
- when it is in `MEANT`: modules of Gymnasium, PettingZoo, torch and Ludus that exist to be named so, and it is of the right type.

`plugins.import_object` asks here before it imports anything. Environment variables carry the answer to child processes; what is
in the directory of a run never does. See docs/security.md.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
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
"""Names that the user gave, separated by commas or line ends; `*`: every name."""

PROJECTS = "LUDUS_PROJECT_PATH"
"""Further directories of the user's own code, separated as in PATH."""

EVERYTHING = "*"

MEANT: Mapping[str, tuple[str, ...]] = {
    "environment": (
        "gymnasium.envs", "ludus.envs.toy_envs", "ludus.games.arena.env.gym_env", "ludus.games.arena.env.pettingzoo_env", "ludus.gamecore.vector_env",
    ),
    "wrapper": ("gymnasium.wrappers", "pettingzoo.utils.wrappers"),
    "model": ("torch.nn.modules", "torch.nn", "ludus.models.policy"),
    "algorithm": ("ludus.algorithms",),
    "memory": ("ludus.transport",),
}  # fmt: skip
"""Kind of name → modules (with those below them) that a stored run may name. What they define must be of that kind."""

_WRITES_FILES = ("RecordVideo",)
"""Wrappers of Gymnasium that write where their arguments say."""

_INSTALLED = ("site-packages", "dist-packages")
_LONGEST = 500
_NAME = re.compile(r"(?:[^\W\d][\w.]*|[^,\n]+\.py):[^\W\d][\w./-]*|GymV\d+Environment-v\d+|[^,\n]+\.cfg")
"""Of what can be imported or run; also of environments that import what their arguments say, and of files that name programs."""

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*){2,}")
"""`package.module.Class`: how RLlib's files write `package.module:Class`."""

_runs: set[Path] = set()


# -- what the user said -------------------------------------------------------------------------------------------------


def allow(*given: Any) -> None:
    """Take every name in a value of the user's own (a word, a mapping, a whole configuration) as trusted, here and in children."""
    found = {text.partition("://")[0] for value in given for text in _strings(value) if len(text) <= _LONGEST}
    adopt(text for text in found if _NAME.fullmatch(text))


def allow_everything() -> None:
    """The user trusts all names of this command: `--trust`."""
    adopt([EVERYTHING])


@contextlib.contextmanager
def consent(trust: bool, *given: Any) -> Iterator[None]:
    """For a call of the Python API: `given` names, with `trust` all, are trusted for as long as it takes."""
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
    """The user's own code is there, too: beside the file of an experiment, say."""
    there = str(directory.resolve())
    os.environ[PROJECTS] = os.pathsep.join([there, *(entry for entry in _named_projects() if entry != there)])


def note_run(directory: Path) -> None:
    """A run or checkpoint there is being read: code in or beside the run is not the user's own."""
    place = directory.expanduser().absolute()
    if "checkpoints" in place.parts[1:]:
        place = next(parent.parent for parent in (place, *place.parents) if parent.name == "checkpoints")
    _runs.add(place.parent if place.name in ("best", "latest") else place)


def is_allowed(name: str) -> bool:
    """Whether the user gave the name, or trusts all of them."""
    allowed = _allowed()
    return name in allowed or EVERYTHING in allowed


def trusted_here(*names: str) -> tuple[str, ...]:
    """What a process of this run on another machine may import because this one may: all that the user gave, and those of `names`
    that are in the user's project."""
    own = {name for name in names if ":" in name and is_in_project(name.partition(":")[0])}
    return tuple(sorted(_allowed() | own))


def adopt(names: Iterable[str]) -> None:
    """Trust what the process that started this one trusts: `trusted_here`."""
    fresh = set(names) - _allowed()
    if fresh:
        os.environ[VARIABLE] = ",".join(sorted(_allowed() | fresh))


def _allowed() -> set[str]:
    return {entry.strip() for entry in re.split(r"[,\n]", os.environ.get(VARIABLE, "")) if entry.strip()}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
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


# -- what may be imported -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Why a name may be imported: the user gave it, or its module is in the user's project; neither: it is in `MEANT`."""

    given: bool = False
    project: bool = False


def check(name: str, kind: str) -> Verdict:
    """Decide on `module:attribute` before anything is imported. Raises Untrusted, UnknownName.

    `kind`: what it is to be, in the words of `MEANT`.
    """
    module, _, attribute = name.partition(":")
    refuse_python(name, module)
    if is_allowed(name):
        return Verdict(given=True)
    top = module.partition(".")[0]
    if _is_below(module, MEANT.get(kind, ())) and attribute not in _WRITES_FILES:
        return Verdict()
    if top == "__main__" and (_file_of_main() is None or _is_project_file(_file_of_main())):  # a notebook has no file
        return Verdict(project=True)
    if top not in ("ludus", "__main__") and _is_project_file(_find(module, name)):
        return Verdict(project=True)
    raise refusal(name, kind)


def refuse_python(name: str, module: str) -> None:
    """Raises UnknownName for what Python itself brings (`os:system`), whoever names it."""
    if module.partition(".")[0] in (sys.stdlib_module_names | set(sys.builtin_module_names)) - {"__main__"}:
        raise UnknownName(f"{name!r} is a part of Python itself, which is not what is meant here.", "Name one of your own.")


def check_file(path: Path, name: str, kind: str) -> None:
    """Decide on a file of Python that `name` means, before it is run. Raises Untrusted."""
    if not is_allowed(name) and not _is_project_file(path):
        raise refusal(name, kind, f"{path} is not in your project directory")


def check_config_files(env_config: Any) -> None:
    """Refuse a file of settings for an engine (`*.cfg` of ViZDoom) that stored data names: it can name a program to start.

    Scenarios that come with the engine (a name without a directory), files of the user's project and what the user gave are fine.
    Raises Untrusted.
    """
    for text in _strings(env_config):
        if text.endswith(".cfg") and Path(text).name != text and not is_allowed(text) and not _is_project_file(Path(text)):
            raise refusal(text, "settings file", f"{text} is not in your project directory")


def refusal(name: str, kind: str, why: str = "") -> Untrusted:
    why = why or f"{name.partition(':')[0]} is not in your project directory ({_shown_roots()})"
    option = f", name it yourself (--env {name})" if kind == "environment" else ""
    return Untrusted(
        f"The {kind} {name!r} comes from stored data and would run code that you did not name: {why}. Nothing was imported.",
        f"If you trust it, add --trust{option}, or set {VARIABLE}={name}; from Python: trust=True. docs/security.md has the rules.",
    )


def is_in_project(module: str) -> bool:
    """Whether a module is a file of the user's project. Finds it without importing it or a package around it."""
    try:
        file = _find(module, module)
    except UnknownName:
        return False
    return file is not None and _is_project_file(file)


def _is_below(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def _find(module: str, name: str) -> Path | None:
    """The file of a module, or the directory of a package without `__init__.py`. Raises UnknownName when there is no such module."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return _place_of(getattr(loaded, "__spec__", None)) or _file_of(loaded)
    path: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module.split(".")
    for i in range(len(parts)):
        spec = _spec(".".join(parts[: i + 1]), path)
        path = None if spec is None else _search_path(spec)
        if spec is None or (path is None and i < len(parts) - 1):
            raise UnknownName(f"There is no module {module!r} (from {name!r}).", "Is it on PYTHONPATH?")
    return _place_of(spec)


def _search_path(spec: importlib.machinery.ModuleSpec) -> list[str] | None:
    """Of a package; that of one without `__init__.py` would ask for the packages around it, which are not imported."""
    found = spec.submodule_search_locations
    return None if found is None else list(getattr(found, "_path", found))


def _spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """As the import system would find it; finders of editable installs are asked as well. None of them imports anything."""
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # a finder that somebody installed
            found = finder.find_spec(name, path)
            if found is not None:
                return found
    # PathFinder needs the packages around one without `__init__.py`, which are not to be imported.
    folders = [Path(entry) / name.rpartition(".")[2] for entry in (path or ()) if isinstance(entry, str)]
    found = importlib.machinery.ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return found if found.submodule_search_locations else None


def _place_of(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return Path(spec.origin).absolute()
    places = _search_path(spec) or []
    return Path(places[0]).absolute() if len(places) == 1 else None


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
    return any(_belongs(form, root) for form in forms for root in _roots())


def _is_installed(path: Path) -> bool:
    if set(path.parts) & set(_INSTALLED):
        return True
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return any(path.is_relative_to(place) for place in libraries if place)


def _belongs(path: Path, root: Path) -> bool:
    """Below a root, and neither in the directory of a run nor in the folder of the project that holds one."""
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
    """Whether a directory is, or is in, that of a run."""
    return any(_looks_like_run(each) for each in (directory, *directory.parents))


def _looks_like_run(directory: Path) -> bool:
    names = ("config.yaml", "meta.json"), ("state.json", "manifest.json"), ("checkpoints", "config.yaml")
    if any(all((directory / name).exists() for name in each) for each in names):
        return True
    return any((directory / "checkpoints").glob("*/state.json")) or any((directory / "models").glob("*/model.json"))


def _roots() -> list[Path]:
    """Directories of the user's own code; the root of the file system is none."""
    found = [Path(entry) for entry in _named_projects()]
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        found.append(Path.cwd())
    main = _file_of_main()
    if main is not None and not _is_installed(main.resolve()):
        found.append(main.parent)
    return [root.resolve() for root in found if len(root.resolve().parts) > 1]


def _named_projects() -> list[str]:
    return [entry for entry in os.environ.get(PROJECTS, "").split(os.pathsep) if entry]


def _shown_roots() -> str:
    return ", ".join(dict.fromkeys(str(root) for root in _roots())) or "there is none"
