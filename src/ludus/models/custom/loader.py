"""The class of a network of the user's own, found by its name: `customnet` is model/customnet.py, or `module:Class`.

A checkpoint holds that name and never code or a path. It may come from anybody, so a name is only ever looked up where the
user keeps code (`trust`), is read before it is run, and yields a torch module or nothing.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ludus.core import trust
from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError, UnknownName

FOLDER, CLASS = "model", "CustomModel"
VARIABLE = "LUDUS_MODEL_PATH"
"""Directories with a `model/` in them, or that hold the files themselves, separated as in PATH."""

FINDABLE = f"Run it from the project's directory (the one that holds {FOLDER}/), or name that directory in {VARIABLE}."

_FILE = re.compile(r"(?!__)[A-Za-z_]\w{0,99}", re.ASCII)
_MODULE = re.compile(r"(__main__|(?!__)[A-Za-z_]\w*(\.(?!__)[A-Za-z_]\w*)*):(?!__)[A-Za-z_]\w*", re.ASCII)
_MOST_BYTES = 1 << 20  # of one file, and of all files that go along with it
_PACKAGE = "ludus_models_"


@dataclass(frozen=True)
class Files:
    """A file of `model/` and those beside it, as text: enough to run it where they are not."""

    name: str
    directory: str
    texts: Mapping[str, str]
    """Name of a file, without .py → what it says."""

    @property
    def package(self) -> str:
        """Of the modules that are made of them. Other texts are other modules: who edits a file gets what it says now."""
        digest = hashlib.sha256(self.directory.encode())
        for stem in sorted(self.texts):
            digest.update(f"\0{stem}\0{self.texts[stem]}".encode())
        return _PACKAGE + digest.hexdigest()[:16]

    def shown(self) -> str:
        return f"{Path(self.directory).name}/{self.name}.py"


_carried: dict[str, Files] = {}


def carry(files: Files) -> None:
    """From now on that name means these files in this process, wherever it runs: they came from where the run was started."""
    _carried[files.name] = files


def look_in(directory: Path) -> None:
    """Have this process, and those that it starts, look for models there first: beside the file of an experiment, say."""
    there = str(directory.resolve())
    trust.add_project(directory)
    os.environ[VARIABLE] = os.pathsep.join([there, *(entry for entry in _named_path() if entry != there)])


def find_class(name: str) -> type[nn.Module]:
    """The class that `custom_model` names. Raises UnknownName with where it was looked for, ConfigError when it is none."""
    if ":" in name:
        check_name(name)
        trust.check(name, "model")
        found, shown = _of_module(name), name
    else:
        files = files_of(name)
        shown = files.shown()
        _check_text(files)
        found = getattr(_run(files), CLASS, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigError(f"{shown}: {_named(found)} is not a torch.nn.Module.", f"Write  class {CLASS}(nn.Module):")
    if found is nn.Module:
        raise ConfigError(f"{shown}: that is torch.nn.Module itself.", f"Write  class {CLASS}(nn.Module):")
    return found


def check_name(name: str) -> None:
    """Raises ConfigError for anything but the name of a file in `model/`, or `module:Class`."""
    if _FILE.fullmatch(name) or _MODULE.fullmatch(name):
        return
    stem = Path(name.replace("\\", "/")).name.removesuffix(".py")
    file = f"A file is named without its directory and .py: custom_model: {stem if _FILE.fullmatch(stem) else 'customnet'}"
    raise ConfigError(f"model.custom_model is {name!r}, which names no model.", f"{file}; a class is module:Class.")


def _named(found: Any) -> str:
    return found.__name__ if isinstance(found, type) else f"a {type(found).__name__}"


# -- files --------------------------------------------------------------------------------------------------------------


def files_of(name: str) -> Files:
    """The file that a plain name means, found by the rule. Raises UnknownName, ConfigError."""
    check_name(name)
    if name in _carried:
        return _carried[name]
    named = {str(place) for root in _named_path() for place in (Path(root), Path(root) / FOLDER)}  # by the user
    for directory in _directories():
        path = directory / f"{name}.py"
        if path.is_file():
            if str(directory) not in named:
                trust.check_file(path, trust.model_file(name), "model")
            return _read(name, path)
    known = {path.stem for place in _directories() for path in place.glob("*.py")}
    near = did_you_mean(name, [stem for stem in known if _FILE.fullmatch(stem)])
    looked = ", ".join([*_named_path(), str(Path.cwd())])
    raise UnknownName(f"There is no {FOLDER}/{name}.py in {looked} nor along sys.path.", f"{near} {FINDABLE}".strip())


def _directories() -> list[Path]:
    """Where files of models may be: what LUDUS_MODEL_PATH says, then `model/` here, then `model/` along Python's path."""
    found = [place for root in _named_path() for place in (Path(root) / FOLDER, Path(root))]
    found += [Path(root) / FOLDER for root in ("", *(entry for entry in sys.path if isinstance(entry, str)))]
    return list(dict.fromkeys(path for path in found if path.is_dir()))


def _named_path() -> list[str]:
    return [entry for entry in os.environ.get(VARIABLE, "").split(os.pathsep) if entry]


def _read(name: str, path: Path) -> Files:
    """The file and, while they are small, those beside it, which it may import as `from .blocks import Block`."""
    texts = {name: _text(path)}
    room = _MOST_BYTES - len(texts[name])
    for other in sorted(path.parent.glob("*.py")):
        if other.stem not in texts and other.is_file() and (room := room - other.stat().st_size) >= 0:
            with contextlib.suppress(ConfigError):  # it need not matter; whoever imports it is told
                texts[other.stem] = _text(other)
    return Files(name, str(path.parent.resolve()), texts)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path.name} has more than {_MOST_BYTES} bytes; that is no model.", "Are weights in it?")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path.parent.name}/{path.name}: {error}.") from error


class _Texts(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Modules made of texts, as a package: the files of `model/` find each other wherever they are run."""

    def __init__(self) -> None:
        self.packages: dict[str, Files] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, stem = fullname.partition(".")
        files = self.packages.get(package)
        if files is None or (stem and stem not in files.texts):
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=files.directory, is_package=not stem)
        if not stem:
            spec.submodule_search_locations = [files.directory]
        else:
            spec.origin, spec.has_location = str(Path(files.directory) / f"{stem}.py"), True
        return spec

    def get_source(self, fullname: str) -> str:
        package, _, stem = fullname.partition(".")
        return self.packages[package].texts.get(stem or "__init__", "")

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self.get_source(module.__name__), module.__spec__.origin or "", "exec")  # type: ignore[union-attr]
        exec(code, module.__dict__)  # noqa: S102 - the user's own model


_texts = _Texts()


def _run(files: Files) -> ModuleType:
    """The module of a file. Raises ConfigError with the line that is wrong."""
    name = f"{files.package}.{files.name}"
    if name in sys.modules:
        return sys.modules[name]
    _texts.packages[files.package] = files
    if _texts not in sys.meta_path:
        sys.meta_path.insert(0, _texts)  # before what looks for files: those may have been edited since
    root = str(Path(files.directory).parent)
    along = root not in sys.path
    if along:  # for `from model.blocks import Block`
        sys.path.append(root)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # anything can be wrong in a file of the user's
        raise told(f"{files.shown()} cannot be imported", error, "Correct the file.") from error
    finally:
        if along:
            sys.path.remove(root)


def _check_text(files: Files) -> None:
    """A file that has no such class is not run: a checkpoint may name any file there is."""
    statements = _parsed(files.texts[files.name], files.shown())
    if CLASS in {name for node in statements for name in _bound(node)}:
        return
    own = [node.name for node in statements if isinstance(node, ast.ClassDef) and node.bases]
    remedy = f"It has {', '.join(own)}: call the model {CLASS}." if own else f"Write  class {CLASS}(nn.Module):"
    raise ConfigError(f"{files.shown()} has no class {CLASS}.", remedy)


def _parsed(text: str, shown: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # what Python's parser raises for rubbish
        raise told(f"{shown} cannot be imported", error, "Correct the file.") from error


# -- modules ------------------------------------------------------------------------------------------------------------


def _of_module(path: str) -> Any:
    """A module that is loaded already is only looked into; any other is read first, and imported if it has that name."""
    module_name, _, name = path.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        _check_source(module_name, name)
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # the user's module may raise anything
            raise told(f"{module_name!r} cannot be imported", error, "Correct it.") from error
    if not hasattr(module, name):
        near = did_you_mean(name, [n for n, item in vars(module).items() if inspect.isclass(item)])
        raise UnknownName(f"{module_name!r} has no class {name!r}.", near)
    return getattr(module, name)


def _check_source(module_name: str, name: str) -> None:
    """Only what is Python text on the path and has the name is imported: a checkpoint may name any module there is."""
    top = module_name.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        raise UnknownName(f"{module_name!r} is a module of Python itself and has no model.", "Name one of yours.")
    path: Sequence[str] | None = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module_name.split(".")
    for i in range(len(parts)):  # not importlib.util.find_spec, which would import the packages around it
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: i + 1]), path)
        path = None if spec is None else spec.submodule_search_locations
        if spec is None or (path is None and i < len(parts) - 1):
            raise UnknownName(f"There is no module {module_name!r} (from {module_name}:{name}).", FINDABLE)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UnknownName(f"{module_name!r} is not a Python file.", "Name the module in which the class stands.")
    names = {found for node in _parsed(_text(Path(spec.origin)), repr(module_name)) for found in _bound(node)}
    if name not in names:
        raise UnknownName(f"{module_name!r} has no class {name!r}.", did_you_mean(name, names))


def _bound(node: ast.stmt) -> list[str]:
    """Names of classes that a statement may bring into a module."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, (ast.If, ast.Try)):
        inner = [*node.body, *node.orelse, *(s for h in getattr(node, "handlers", []) for s in h.body)]
        return [name for item in inner for name in _bound(item)]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


# -- what the user's code raises ----------------------------------------------------------------------------------------


def told(what: str, error: BaseException, hint: str = "") -> ConfigError:
    """An error of the user's code in a sentence, with the line of theirs in which it came up."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, SyntaxError):
        return ConfigError(f"{what}: line {error.lineno}: {error.msg}.", hint)
    where = own_line(error)
    said = str(error).strip().splitlines()
    sentence = f"{what}: {where}{type(error).__name__}{': ' + said[0] if said else ''}"
    return ConfigError(sentence if sentence.endswith((".", "!", "?")) else f"{sentence}.", hint)


def own_line(error: BaseException) -> str:
    """The innermost line that is neither torch's nor ours."""
    ours = (str(Path(__file__).parents[2]), str(Path(nn.__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*ours, "<")) and "importlib" not in frame.filename:
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""
