"""Models as bytes: safetensors for arrays, JSON for the description. Reading a policy runs no foreign code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from ludus.core import spaces
from ludus.core.renamed import current_name
from ludus.core.tree import Array
from ludus.errors import Damaged, IncompatibleCheckpoint, LudusError, Untrusted, UsageError
from ludus.models.policy import Policy, Weights
from ludus.storage.safe_read import max_file_bytes, parse_json

POLICY = "ludus.models.policy:Policy"
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError, MemoryError)
"""Errors of constructors for unexpected values."""

_SMALL_BYTES = 1 << 30
_MAX_LAYER_SIZES = 10_000
_MAX_ACTIONS = 1 << 24
_FLOAT_BYTES = 4


def encode_weights(weights: Mapping[str, Array], meta: Mapping[str, str] | None = None) -> bytes:
    # safetensors 0.8.0 writes an unreadable header for an empty metadata dict without arrays.
    return save({name: np.asarray(array, order="C") for name, array in weights.items()}, dict(meta) if meta else None)


def decode_weights(data: bytes, where: str) -> tuple[Weights, dict[str, Any]]:
    """Return arrays and metadata. Raises Damaged."""
    try:
        arrays = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], f"The header of {where}")
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise Damaged(f"{where} is not a readable safetensors file: {error}.") from error
    return arrays, dict(header.get("__metadata__", {}))


def model_from(description: bytes | Mapping[str, Any], cls: type[nn.Module] | None = None) -> nn.Module:
    """Build the model of a `model.json` with initial weights: a built-in policy, or a user's module.

    Raises Damaged if it is not a description; UsageError if the class cannot be found or built.
    """
    try:
        data = parse_json(description, "This model.json") if isinstance(description, bytes) else description
        str(data["class"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"This model.json does not describe a model: {error}.") from error
    from ludus.models.weights import module_spec

    try:
        return module_spec.build(data, cls)
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise Damaged(f"This model.json does not describe a {data['class']}: {error}.") from error


def check_description(data: Mapping[str, Any]) -> str | None:
    """Check that the data describes a policy that fits into this machine; return the name of its custom model. Raises Damaged.

    Nothing is imported, and no memory is allocated for weights.
    """
    try:
        if current_name(str(data["class"])) != POLICY:
            raise Damaged(f"the class {data['class']!r} is not {POLICY}")
        custom = data["network"].get("custom_model")
        if custom is not None and not isinstance(custom, str):
            raise Damaged(f"custom_model is {custom!r}")
        if custom is None:
            check_network_size(data)
    except (*_MALFORMED, LudusError) as error:
        raise Damaged(f"This model.json does not describe a policy: {str(error)[:500]}.") from error
    return custom


def policy_from(description: bytes | Mapping[str, Any]) -> Policy:
    """Build the policy of a checkpoint or version. Raises Damaged, and IncompatibleCheckpoint if its custom model is not found.

    Only the built-in class is built: a checkpoint may come from an untrusted source, and importing what it names would run foreign code.
    A custom model is looked up only where the user keeps models (`models/custom/loader.py`).
    """
    data = parse_json(description, "This model.json") if isinstance(description, bytes) else description
    custom = check_description(data)
    malformed = (*_MALFORMED, LudusError) if custom is None else (ValueError, KeyError, TypeError, LudusError)
    try:
        return Policy.from_description(data)
    except Untrusted:
        raise
    except UsageError as error:
        if custom is None:
            raise Damaged(f"This model.json does not describe a policy: {error}.") from error
        raise IncompatibleCheckpoint(f"It was made with the custom model {custom!r}. {error.message}", error.hint) from error
    except malformed as error:
        raise Damaged(f"This model.json does not describe a policy: {str(error)[:500]}.") from error


# -- size of a network --------------------------------------------------------------------------------------------------


def check_network_size(description: Mapping[str, Any]) -> None:
    """Raise Damaged if the weights of a policy would not fit into this machine. Custom models are not checked."""
    numbers = [number for number in _integers(description["network"]) if number > 0]
    numbers += [_elements(spaces.from_json(description[key])) for key in ("observation_space", "action_space")]
    if len(numbers) > _MAX_LAYER_SIZES:
        raise Damaged(f"a network of {len(numbers):,} numbers")
    largest, second = sorted([*numbers, 1, 1])[-1:-3:-1]
    if largest * _FLOAT_BYTES > max_file_bytes() or numbers[-1] > _MAX_ACTIONS:
        raise Damaged(f"a network of a size of {largest:,}")
    if largest * second * len(numbers) * _FLOAT_BYTES <= _SMALL_BYTES:  # upper bound; exact counting is slower
        return
    with torch.device("meta"):  # shapes without memory
        policy = Policy.from_description(description)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in policy.state_dict().values())
    if needed > max_file_bytes():
        raise Damaged(f"a network whose weights take {needed:,} bytes, which is more than half of this machine's memory")


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _integers(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _integers(item)


def _elements(space: Any) -> int:
    """Number of inputs or outputs that a network has for a space."""
    if hasattr(space, "spaces"):
        inner = space.spaces.values() if isinstance(space.spaces, Mapping) else space.spaces
        return sum(_elements(each) for each in inner)
    if hasattr(space, "nvec"):
        return int(space.nvec.sum())
    return int(space.n) if hasattr(space, "n") and not space.shape else math.prod(space.shape)
