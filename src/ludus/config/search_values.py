"""Search values in a config: mappings such as `{grid_search: […]}` or `{uniform: [a, b]}` from which a sweep chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEARCHES = ("grid_search", "choice", "uniform", "quniform", "loguniform", "qloguniform", "randint", "qrandint", "randn")
"""The only key of a mapping that is a search value."""


def is_search(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in SEARCHES


def has_search(value: Any) -> bool:
    """Whether a value is or contains a search value."""
    if isinstance(value, Mapping):
        return is_search(value) or any(map(has_search, value.values()))
    return isinstance(value, list) and any(map(has_search, value))
