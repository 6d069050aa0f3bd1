"""Description of a user's torch module as data: class, arguments and inputs. This is the content of `model.json`.

described = describe(AtariModel(), inputs=inputs_of((image,), {}))
copy = build(described.description)          # in any process, with initial weights
load_weights(copy, weights_of(described.module))
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ludus.core import plugins, trust
from ludus.core.renamed import current_name
from ludus.core.spaces import ArraySpec
from ludus.core.tree import Array, Tree, map_tree
from ludus.errors import IncompatibleCheckpoint, LudusError, UnknownName, UsageError

Weights = dict[str, Array]
Description = dict[str, Any]

_loading = threading.local()


@dataclass(frozen=True)
class DescribedModule:
    """A module, and the JSON values from which another process rebuilds it."""

    module: nn.Module
    description: Description


def describe(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    main_file: str | None = None,
) -> DescribedModule:
    """Check that `model` (an instance, or a class with its arguments) can be rebuilt elsewhere, by rebuilding it here.

    `main_file`: the script whose classes have the module `__main__`; by default the one that runs in this process. Raises UsageError with
    the remedy.
    """
    cls = model if isinstance(model, type) else type(model)
    if not issubclass(cls, nn.Module):
        raise UsageError(
            f"model={model!r} is not a torch module.", "Give a torch.nn.Module instance, or its class with model_args."
        )
    if hasattr(model, "description") and hasattr(cls, "from_description"):
        return _describe_self(model, cls, inputs)
    plain_args, plain_kwargs = _plain("model_args", list(args)), _plain("model_kwargs", dict(kwargs or {}))
    path = _class_path(cls, main_file)
    trust.allow(path)  # the caller passed an object of this class
    description = {"class": path, "args": plain_args, "kwargs": plain_kwargs, "inputs": dict(inputs or {})}
    rebuilt = _construct(cls, plain_args, plain_kwargs)
    if isinstance(model, type):
        return DescribedModule(rebuilt, description)
    _check_rebuilt(model, rebuilt, cls)
    return DescribedModule(model, description)


def _describe_self(model: Any, cls: type[nn.Module], inputs: Mapping[str, Any] | None) -> DescribedModule:
    description = dict(model.description()) | ({"inputs": dict(inputs)} if inputs else {})
    trust.allow(str(description["class"]))
    if find_class(str(description["class"])) is not cls:
        raise UsageError(
            f"{cls.__qualname__} describes itself as {description['class']!r}, which is another class.",
            "Override description() to name the subclass, or give a plain torch module.",
        )
    _check_rebuilt(model, build(description, cls), cls)
    return DescribedModule(model, description)


def build(description: Mapping[str, Any], cls: type[nn.Module] | None = None) -> nn.Module:
    """Build the module of a description with initial weights; `cls` if the class is already known. Raises UsageError.

    The class is imported by the name in the description, which may come from a stored run. Raises Untrusted.
    """
    module_class = find_class(str(description["class"])) if cls is None else cls
    if not isinstance(module_class, type) or not issubclass(module_class, nn.Module):
        raise UsageError(f"{description['class']!r} is not a torch module class.")
    if hasattr(module_class, "from_description"):
        return cast(nn.Module, module_class.from_description(description))
    return _construct(module_class, description["args"], description["kwargs"])


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two descriptions mean the same model. Inputs are compared only if both declare them."""
    a, b = dict(one), dict(other)
    first, second = a.pop("inputs", None), b.pop("inputs", None)
    for each in (a, b):  # it may have been written by an earlier release
        each["class"] = current_name(str(each.get("class")))
    return bool(json.loads(json.dumps(a)) == json.loads(json.dumps(b)) and (not first or not second or first == second))


# -- finding classes ----------------------------------------------------------------------------------------------------


def find_class(path: str) -> Any:
    """Find `"package.module:Class"`, or `"/where/script.py:Class"` for a class of a script. Raises UnknownName, UsageError."""
    where, _, name = path.rpartition(":")
    if not where.endswith(".py"):
        return plugins.import_object(path, "model", lambda found, _: isinstance(found, type) and issubclass(found, nn.Module))
    trust.check_file(Path(where), path, "model")
    main = sys.modules.get("__main__")
    if main is not None and main_script() == where and _attribute(main, name) is not None:
        return _attribute(main, name)
    found = _attribute(_load_script(where), name)
    if found is None:
        raise UnknownName(f"{where} has no class {name!r} (any more).", "Was it renamed since the model was made?")
    return found


def main_script() -> str | None:
    """Return the absolute path of the program that runs in this process, if it is a file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve()) if file else None


def forbid_while_loading(what: str) -> None:
    """Raise UsageError while a script is imported only to find a class in it."""
    script = getattr(_loading, "script", None)
    if script is not None:
        raise UsageError(
            f"{what} was called while {script} was imported to find a model class in it.",
            'Put the code that launches things under `if __name__ == "__main__":`, or the class into a module of its own.',
        )


def _load_script(path: str) -> ModuleType:
    """Import the script as a module with a generated name, once per process."""
    name = f"ludus_script_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise UnknownName(
            f"The script {path}, which has the model's class, no longer exists.", "Restore it, or give the model another class."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = getattr(_loading, "script", None)
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, name)
        _loading.script = path
        try:
            spec.loader.exec_module(module)
        finally:
            _loading.script = before
        undo.pop_all()
    return module


def _attribute(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part, None)
    return root


def _class_path(cls: type, main_file: str | None) -> str:
    """Return how another process finds the class. Raises UsageError if it cannot."""
    name, module = cls.__qualname__, cls.__module__
    if "<" in name:
        raise UsageError(
            f"The class {name} is made inside a function, where no other process can find it.",
            "Move the class to the top level of a file.",
        )
    if module == "__main__":
        file = main_file or main_script()
        if file is None or not Path(file).is_file():
            raise UsageError(f"The class {name} belongs to a session that is not a file.", "Put the class into a .py file.")
        return f"{Path(file).resolve()}:{name}"
    if module.startswith("ludus_script_"):
        return f"{sys.modules[module].__file__}:{name}"
    path = f"{module}:{name}"
    try:
        found = plugins.load_object(path)
    except LudusError as error:
        raise UsageError(f"The class {name} cannot be imported as {path!r}: {error}", "Move it to a module.") from error
    if found is not cls:
        raise UsageError(f"{path!r} is another object than the class of the given model.", "Give the class a name of its own.")
    return path


# -- building -----------------------------------------------------------------------------------------------------------


def _construct(cls: type[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> nn.Module:
    try:
        return cls(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"{cls.__qualname__} cannot be built from model_args={list(args)!r}, model_kwargs={dict(kwargs)!r}: {error}.",
            f"Give the arguments as plain values: RemoteModel(…, model={cls.__qualname__}, model_args=(…)), or defaults to all.",
        ) from error


def _plain(what: str, value: Any) -> Any:
    """Convert tuples to lists; reject values that JSON cannot represent."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} = {value!r} cannot be stored as JSON: {error}.", "Use numbers, strings, booleans, lists and dicts."
        ) from error


def _check_rebuilt(model: nn.Module, rebuilt: nn.Module, cls: type) -> None:
    own, other = shapes_of(model), shapes_of(rebuilt)
    if own != other:
        differing = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        raise UsageError(
            f"{cls.__qualname__} built again is another network: {', '.join(differing[:3])} differ.",
            "Give every constructor argument that matters in model_args or model_kwargs.",
        )


# -- weights ------------------------------------------------------------------------------------------------------------

Shapes = dict[str, tuple[tuple[int, ...], str]]


def shapes_of(model: nn.Module) -> Shapes:
    """Return name → (shape, dtype) of all parameters and buffers."""
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in _state(model).items()}


def shapes_in(weights: Mapping[str, Array]) -> Shapes:
    return {name: (tuple(array.shape), str(array.dtype)) for name, array in weights.items()}


def weights_of(model: nn.Module) -> Weights:
    """Copy all parameters and buffers to NumPy arrays by name; of the inner module if it is wrapped in DistributedDataParallel.

    weights = ludus.get_torch_model_weights(model)
    remote_model.publish_weights(weights)
    """
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in _state(model).items()}


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy weights into a module in place. Raises IncompatibleCheckpoint without changing anything."""
    arrays = as_arrays(weights)
    check_fit(shapes_of(model), shapes_in(arrays))
    with torch.no_grad():
        for name, tensor in _state(model).items():
            if tensor.device.type == "cpu":
                np.copyto(tensor.detach().numpy(), arrays[name])  # works from a read-only mapping too
            else:
                tensor.copy_(torch.from_numpy(arrays[name].copy()))


def as_arrays(weights: Mapping[str, Any]) -> Weights:
    """Convert tensors among the values to arrays."""
    return {name: w.detach().cpu().numpy() if isinstance(w, torch.Tensor) else np.asarray(w) for name, w in weights.items()}


def check_fit(own: Shapes, given: Shapes) -> None:
    """Raise IncompatibleCheckpoint if weights do not fit the model."""
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or extra:
        raise IncompatibleCheckpoint(f"The weights do not fit this model: missing {missing[:3]}, unexpected {extra[:3]}.")
    for name, (shape, dtype) in own.items():
        if given[name] != (shape, dtype):
            raise IncompatibleCheckpoint(
                f"The weights do not fit this model: {name} is {given[name][1]}{list(given[name][0])}, not {dtype}{list(shape)}."
            )


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    state: dict[str, Any] = inner.state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bfloat16 or value.is_complex():
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(f"{name} of {type(inner).__name__} is {kind}, which cannot be stored.", "Use float32 tensors.")
    return state


# -- inputs -------------------------------------------------------------------------------------------------------------


def inputs_of(args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> dict[str, Any]:
    """Return shapes and dtypes of example inputs without a batch dimension, as JSON values."""
    return {"args": [_spec(arg, f"forward_args[{i}]") for i, arg in enumerate(args)]} | {
        "kwargs": {key: _spec(arg, f"forward_kwargs[{key!r}]") for key, arg in kwargs.items()}
    }


def _spec(tree: Tree, where: str) -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {"dict": {str(key): _spec(item, f"{where}.{key}") for key, item in tree.items()}}
    if isinstance(tree, (tuple, list)):
        return {"tuple": [_spec(item, f"{where}.{i}") for i, item in enumerate(tree)]}
    array = np.asarray(tree)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{where} is {array.dtype}, not an array of numbers.")
    return {"array": [str(array.dtype), list(array.shape)]}


def array_specs(spec: Mapping[str, Any]) -> Tree:
    """Return the ArraySpecs of an input that `inputs_of` described."""
    if "dict" in spec:
        return {key: array_specs(item) for key, item in spec["dict"].items()}
    if "tuple" in spec:
        return tuple(map(array_specs, spec["tuple"]))
    dtype, shape = spec["array"]
    return ArraySpec(tuple(shape), np.dtype(dtype))


def example_of(spec: Mapping[str, Any], *leading: int) -> Tree:
    """Return zeros with the shapes of a spec."""
    return map_tree(lambda array: array.zeros(*leading), array_specs(spec))
