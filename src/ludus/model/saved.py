"""A model as bytes: safetensors for arrays, JSON for how to build it. Nothing that is read here can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ludus.errors import Damaged, LudusError
from ludus.model.policy import Policy, Weights
from ludus.tree import Array

CLASS = "ludus.model.policy:Policy"


def encode_weights(weights: Mapping[str, Array], meta: Mapping[str, str] | None = None) -> bytes:
    return save({name: np.asarray(array, order="C") for name, array in weights.items()}, dict(meta or {}))


def decode_weights(data: bytes, where: str) -> tuple[Weights, dict[str, Any]]:
    """Arrays and metadata. Raises Damaged."""
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise Damaged(f"{where} is not a readable safetensors file: {error}.") from error
    return arrays, dict(header.get("__metadata__", {}))


def policy_from(description: bytes | Mapping[str, Any]) -> Policy:
    """Build the policy that a `model.json` describes, with fresh weights. Raises Damaged."""
    try:
        data = json.loads(description) if isinstance(description, bytes) else description
        if data["class"] != CLASS:
            raise Damaged(f"the class {data['class']!r} is not known")
        return Policy.from_description(data)
    except (ValueError, KeyError, TypeError, LudusError) as error:
        raise Damaged(f"This model.json does not describe a model: {error}.") from error
