"""Lookup of a user's network class by name: `customnet` is model/customnet.py, or `module:Class`.

A checkpoint contains that name, never code or a path. It may come from an untrusted source, so a name is looked up only where the user
keeps code (`trust`), the source is parsed before it is run, and the result must be a torch module.
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
from collections.abc import Iterator, Mapping, Sequence
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
"""Directories that contain `model/`, or the files themselves, separated as in PATH."""

FINDABLE = f"Run it from the project's directory (the one that holds {FOLDER}/), or name that directory in {VARIABLE}."

_FILE = re.compile(r"(?!__)[A-Za-z_]\w{0,99}", re.ASCII)
_MODULE = re.compile(r"(__main__|(?!__)[A-Za-z_]\w*(\.(?!__)[A-Za-z_]\w*)*):(?!__)[A-Za-z_]\w*", re.ASCII)
_MAX_BYTES = 1 << 20  # of one file, and of all files of its directory together
_PACKAGE = "ludus_models_"


@dataclass(frozen=True)
class ModelFiles:
    """A file of `model/` and its siblings as text, so that it can run on another machine."""

    name: str
    directory: str
    texts: Mapping[str, str]
    """File name without .py → source text."""

    @property
    def package(self) -> str:
        """Name of the package of these modules. It depends on the texts, so an edited file is a new module."""
        digest = hashlib.sha256(self.directory.encode())
        for stem in sorted(self.texts):
            digest.update(f"\0{stem}\0{self.texts[stem]}".encode())
        return _PACKAGE + digest.hexdigest()[:16]

    def label(self) -> str:
        return f"{Path(self.directory).name}/{self.name}.py"


_registered: dict[str, ModelFiles] = {}


def register_files(files: ModelFiles) -> None:
    """Use these files for that name in this process; they come from the machine that started the run."""
    _registered[files.name] = files


def add_search_directory(directory: Path) -> None:
    """Make this process and its children search models there first, for example next to an experiment file."""
    resolved = str(directory.resolve())
    trust.add_project(directory)
    os.environ[VARIABLE] = os.pathsep.join([resolved, *(entry for entry in _search_path() if entry != resolved)])


def find_class(name: str) -> type[nn.Module]:
    """Return the class that `custom_model` names. Raises UnknownName with the searched places, ConfigError if it is not a model."""
    if ":" in name:
        check_name(name)
        trust.check(name, "model")
        found, label = _load_from_module(name), name
    else:
        files = files_of(name)
        label = files.label()
        _check_text(files)
        found = getattr(_run(files), CLASS, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        what = found.__name__ if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"{label}: {what} is not a torch.nn.Module.", f"Write  class {CLASS}(nn.Module):")
    if found is nn.Module:
        raise ConfigError(f"{label}: that is torch.nn.Module itself.", f"Write  class {CLASS}(nn.Module):")
    return found


def check_name(name: str) -> None:
    """Raise ConfigError for anything but the name of a file in `model/`, or `module:Class`."""
    if _FILE.fullmatch(name) or _MODULE.fullmatch(name):
        return
    stem = Path(name.replace("\\", "/")).name.removesuffix(".py")
    file = f"A file is named without its directory and .py: custom_model: {stem if _FILE.fullmatch(stem) else 'customnet'}"
    raise ConfigError(f"model.custom_model is {name!r}, which is not the name of a model.", f"{file}; a class is module:Class.")


# -- files --------------------------------------------------------------------------------------------------------------


def files_of(name: str) -> ModelFiles:
    """Return the files of a plain name. Raises UnknownName, ConfigError."""
    check_name(name)
    if name in _registered:
        return _registered[name]
    named = {str(place) for root in _search_path() for place in (Path(root), Path(root) / FOLDER)}  # by the user: trusted
    for directory in _directories():
        path = directory / f"{name}.py"
        if path.is_file():
            if str(directory) not in named:
                trust.check_file(path, trust.model_file(name), "model")
            return _read(name, path)
    known = {path.stem for place in _directories() for path in place.glob("*.py")}
    near = did_you_mean(name, [stem for stem in known if _FILE.fullmatch(stem)])
    looked = ", ".join([*_search_path(), str(Path.cwd())])
    raise UnknownName(f"There is no {FOLDER}/{name}.py in {looked} nor along sys.path.", f"{near} {FINDABLE}".strip())


def _directories() -> list[Path]:
    """Search directories: LUDUS_MODEL_PATH, then `model/` here, then `model/` along Python's path."""
    found = [place for root in _search_path() for place in (Path(root) / FOLDER, Path(root))]
    found += [Path(root) / FOLDER for root in ("", *(entry for entry in sys.path if isinstance(entry, str)))]
    return list(dict.fromkeys(path for path in found if path.is_dir()))


def _search_path() -> list[str]:
    return [entry for entry in os.environ.get(VARIABLE, "").split(os.pathsep) if entry]


def _read(name: str, path: Path) -> ModelFiles:
    """Read the file and, up to the size limit, its siblings, which it may import as `from .blocks import Block`."""
    texts = {name: _text(path)}
    remaining = _MAX_BYTES - len(texts[name])
    for other in sorted(path.parent.glob("*.py")):
        if other.stem not in texts and other.is_file() and (remaining := remaining - other.stat().st_size) >= 0:
            with contextlib.suppress(ConfigError):  # it may be unused; importing it reports the error
                texts[other.stem] = _text(other)
    return ModelFiles(name, str(path.parent.resolve()), texts)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path.name} has more than {_MAX_BYTES} bytes, too many for a model.", "Keep weights out of it.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path.parent.name}/{path.name}: {error}.") from error


class _SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports modules from source texts as a package, so that the files of `model/` find each other on any machine."""

    def __init__(self) -> None:
        self.packages: dict[str, ModelFiles] = {}

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


_finder = _SourceFinder()


def _run(files: ModelFiles) -> ModuleType:
    """Import the module of a file. Raises ConfigError with the wrong line."""
    name = f"{files.package}.{files.name}"
    if name in sys.modules:
        return sys.modules[name]
    _finder.packages[files.package] = files
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)  # before the file finders: the files may have changed since
    root = str(Path(files.directory).parent)
    along = root not in sys.path
    if along:  # for `from model.blocks import Block`
        sys.path.append(root)
    try:
        with translate_user_errors(f"{files.label()} cannot be imported", "Correct the file."):
            return importlib.import_module(name)
    finally:
        if along:
            sys.path.remove(root)


def _check_text(files: ModelFiles) -> None:
    """Do not run a file without such a class: a checkpoint may name any file."""
    statements = _parse(files.texts[files.name], files.label())
    if CLASS in {name for node in statements for name in _class_names(node)}:
        return
    own = [node.name for node in statements if isinstance(node, ast.ClassDef) and node.bases]
    remedy = f"It has {', '.join(own)}: call the model {CLASS}." if own else f"Write  class {CLASS}(nn.Module):"
    raise ConfigError(f"{files.label()} has no class {CLASS}.", remedy)


def _parse(text: str, label: str) -> list[ast.stmt]:
    with translate_user_errors(f"{label} cannot be imported", "Correct the file."):
        return ast.parse(text).body


# -- modules ------------------------------------------------------------------------------------------------------------


def _load_from_module(path: str) -> Any:
    """Use a module that is already loaded; parse any other first, and import it only if it defines the name."""
    module_name, _, name = path.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        _check_source(module_name, name)
        with translate_user_errors(f"{module_name!r} cannot be imported", "Correct it."):
            module = importlib.import_module(module_name)
    if not hasattr(module, name):
        near = did_you_mean(name, [n for n, item in vars(module).items() if inspect.isclass(item)])
        raise UnknownName(f"{module_name!r} has no class {name!r}.", near)
    return getattr(module, name)


def _check_source(module_name: str, name: str) -> None:
    """Only a Python source file that defines the name is imported: a checkpoint may name any module."""
    file = trust.find_module(module_name, f"{module_name}:{name}")
    if file is None or file.suffix != ".py":
        raise UnknownName(f"{module_name!r} is not a Python file.", "Name the module that defines the class.")
    names = {found for node in _parse(_text(file), repr(module_name)) for found in _class_names(node)}
    if name not in names:
        raise UnknownName(f"{module_name!r} has no class {name!r}.", did_you_mean(name, names))


def _class_names(node: ast.stmt) -> list[str]:
    """Names of classes that a statement may define in a module."""
    if isinstance(node, ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, (ast.If, ast.Try)):
        inner = [*node.body, *node.orelse, *(s for h in getattr(node, "handlers", []) for s in h.body)]
        return [name for item in inner for name in _class_names(item)]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


# -- errors of the user's code ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def translate_user_errors(what: str, hint: str = "") -> Iterator[None]:
    """Raise an error of the user's code as a ConfigError: one sentence, with the line of that code."""
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"{what}: line {error.lineno}: {error.msg}.", hint) from error
    except (Exception, SystemExit) as error:  # user code may raise anything
        first_line = (str(error).strip().splitlines() or [""])[0]
        sentence = f"{what}: {own_line(error)}{type(error).__name__}{': ' if first_line else ''}{first_line}"
        hint = "Call super().__init__() first." if "before Module.__init__() call" in first_line else hint
        raise ConfigError(sentence if sentence.endswith((".", "!", "?")) else f"{sentence}.", hint) from error


def own_line(error: BaseException) -> str:
    """Return the innermost line of the traceback outside torch and ludus."""
    ours = (str(Path(__file__).parents[2]), str(Path(nn.__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*ours, "<")) and "importlib" not in frame.filename:
            return f"{Path(frame.filename).name}, line {frame.lineno}: "
    return ""
