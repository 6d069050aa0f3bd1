"""Size check of a described network before its memory is allocated; a description may come from an untrusted source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ludus.core import spaces
from ludus.errors import Damaged
from ludus.models.policy import Policy
from ludus.storage.safe_read import max_file_bytes

_SMALL_BYTES = 1 << 30
_MAX_LAYER_SIZES = 10_000
_MAX_ACTIONS = 1 << 24
_FLOAT_BYTES = 4


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
