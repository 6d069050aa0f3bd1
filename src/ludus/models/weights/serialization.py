"""A model as bytes: safetensors for arrays, JSON for how to build it. Reading a policy runs no code but ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from ludus.core.renamed import current_name
from ludus.core.tree import Array
from ludus.errors import Damaged, IncompatibleCheckpoint, LudusError, Untrusted, UsageError
from ludus.models.network_size import check_network_size
from ludus.models.policy import Policy, Weights
from ludus.models.weights import module_spec
from ludus.storage.safe_read import parse_json

POLICY = "ludus.models.policy:Policy"


def encode_weights(weights: Mapping[str, Array], meta: Mapping[str, str] | None = None) -> bytes:
    # An empty dict as metadata beside no arrays at all would be written as a header that cannot be read (safetensors 0.8.0).
    return save({name: np.asarray(array, order="C") for name, array in weights.items()}, dict(meta) if meta else None)


def decode_weights(data: bytes, where: str) -> tuple[Weights, dict[str, Any]]:
    """Arrays and metadata. Raises Damaged."""
    try:
        arrays = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], f"The header of {where}")
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise Damaged(f"{where} is not a readable safetensors file: {error}.") from error
    return arrays, dict(header.get("__metadata__", {}))


def model_from(description: bytes | Mapping[str, Any], cls: type[nn.Module] | None = None) -> nn.Module:
    """Build the model that a `model.json` describes, with fresh weights: a policy of ours, or the user's own module.

    Raises Damaged when it is not a description; UsageError when the class cannot be found or built.
    """
    try:
        data = parse_json(description, "This model.json") if isinstance(description, bytes) else description
        str(data["class"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"This model.json does not describe a model: {error}.") from error
    try:
        return module_spec.build(data, cls)
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise Damaged(f"This model.json does not describe a {data['class']}: {error}.") from error


def check_description(data: Mapping[str, Any]) -> str | None:
    """Whether this can describe a policy that fits into this machine; returns the name of its custom model. Raises Damaged.

    Nothing is imported, and no memory is taken for weights.
    """
    try:
        if current_name(str(data["class"])) != POLICY:
            raise Damaged(f"the class {data['class']!r} is not {POLICY}")
        custom = data["network"].get("custom_model")
        if custom is not None and not isinstance(custom, str):
            raise Damaged(f"custom_model is {custom!r}")
        if custom is None:
            check_network_size(data)
    except Exception as error:  # whatever our own constructors raise for values that none of them expects
        raise Damaged(f"This model.json does not describe a policy: {str(error)[:500]}.") from error
    return custom


def policy_from(description: bytes | Mapping[str, Any]) -> Policy:
    """The policy of a checkpoint or version. Raises Damaged, and IncompatibleCheckpoint when its custom model is not to be found.

    Only our own class is built: a checkpoint may come from anywhere, and importing what it names would run anybody's code. A
    custom model that it names is looked for where the user keeps models (`custom_class`), and nowhere else.
    """
    data = parse_json(description, "This model.json") if isinstance(description, bytes) else description
    custom = check_description(data)
    try:
        return Policy.from_description(data)
    except Untrusted:
        raise
    except UsageError as error:
        if custom is None:
            raise Damaged(f"This model.json does not describe a policy: {error}.") from error
        raise IncompatibleCheckpoint(f"It was made with the custom model {custom!r}. {error.message}", error.hint) from error
    except Exception as error:
        if custom is not None and not isinstance(error, (ValueError, KeyError, TypeError, LudusError)):
            raise  # the user's own code
        raise Damaged(f"This model.json does not describe a policy: {str(error)[:500]}.") from error
