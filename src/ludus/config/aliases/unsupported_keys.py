"""Keys of other libraries that have no equivalent here. `unsupported_keys.yaml` lists them with the reasons."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class UnsupportedKey:
    """Why a key is not supported. The values `same` match our behaviour and are accepted.

    `ignored`: other values are accepted with a notice, since they do not change the training.
    """

    why: str
    same: tuple[Any, ...] = ()
    ignored: bool = False

    def matches_default(self, value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in self.same) or (
            type(value) is int and any(type(one) is float and value == one for one in self.same)
        )


@functools.cache
def unsupported_keys() -> Mapping[str, Mapping[str, UnsupportedKey]]:
    """Section of an experiment → key → why it is not supported."""
    tables = dict(_read_tables())
    tables[""] = tables.pop("experiment")
    tables["config"] = {**tables["config"], **tables.pop("other_libraries")}
    return tables


def keys_of_other_libraries() -> frozenset[str]:
    """The unsupported keys of Stable-Baselines3, CleanRL and ML-Agents."""
    return frozenset(_read_tables()["other_libraries"])


@functools.cache
def _read_tables() -> Mapping[str, Mapping[str, UnsupportedKey]]:
    import yaml  # late: `ludus --help` does not need it

    text = resources.files(__package__).joinpath("unsupported_keys.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 # both are safe, the first is faster
    return {
        section: {
            key: UnsupportedKey(row["why"], tuple(row.get("same", ())), row.get("ignored", False))
            for row in rows
            for key in row["keys"]
        }
        for section, rows in data.items()
    }
