"""Environment names of older files, and the current environments that they refer to."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

import gymnasium as gym

from ludus.core import renamed
from ludus.envs.registry import registered_envs, spec_of, version_notice
from ludus.errors import MissingExtra, UnknownName

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_VERSIONED = re.compile(r"(?P<stem>[\w:./-]+)-v(?P<version>\d+)")
_FIXED_SKIP = re.compile(r"(?P<game>\w+)Deterministic-v\d+")
_MOVED_MODULES = {"ray.rllib.examples.env.": "ray.rllib.examples.envs.classes."}
"""Modules of RLlib's examples, before and since Ray 2.11."""


@dataclass(frozen=True)
class CurrentName:
    """The current name of an environment, and a notice for the user if it differs."""

    name: str
    notice: str = ""


def current_name(name: str) -> CurrentName:
    """Return the name itself if the environment exists or has no known successor; otherwise the successor's name.

    `package.module.Class`, as in RLlib's files, becomes `package.module:Class`. Never raises: an unknown name is returned unchanged.
    """
    if name in registered_envs():
        return CurrentName(name)
    if ":" in name:
        return CurrentName(renamed.current_name(name))
    if _DOTTED.fullmatch(name):
        for before, since in _MOVED_MODULES.items():
            if name.startswith(before):
                name = since + name.removeprefix(before)
        module, _, attribute = name.rpartition(".")
        return CurrentName(renamed.current_name(f"{module}:{attribute}"))
    try:
        notice = version_notice(name)
        if not _is_removed(name):
            return CurrentName(name, notice)
    except (UnknownName, MissingExtra):
        pass
    successor = _successor(name)
    if successor is None:
        return CurrentName(name)
    return CurrentName(successor, f"env: {name} no longer exists; {successor} is used instead.")


def _is_removed(name: str) -> bool:
    """MuJoCo's v2 and v3 are registered only to raise an error."""
    return getattr(spec_of(name).entry_point, "__name__", "") == "_raise_mujoco_py_error"


def _successor(name: str) -> str | None:
    fixed = _FIXED_SKIP.fullmatch(name)
    if fixed is not None:  # a fixed frame skip of 4 is the standard preprocessing
        with contextlib.suppress(UnknownName, MissingExtra):
            return spec_of(f"{fixed['game']}NoFrameskip-v4").id
        return None
    parts = _VERSIONED.fullmatch(name)
    if parts is None:
        return None
    same = [spec for spec in gym.registry.values() if spec.id.rpartition("-v")[0] == parts["stem"]]
    later = [spec for spec in same if (spec.version or 0) > int(parts["version"]) and not _is_removed(spec.id)]
    return max(later, key=lambda spec: spec.version or 0).id if later else None
