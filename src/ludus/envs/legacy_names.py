"""Names of environments in older files, and the environments that are meant by them today."""

from __future__ import annotations

import re
from dataclasses import dataclass

import gymnasium as gym

from ludus.core import renamed
from ludus.envs.registry import outdated, registered, spec_of
from ludus.errors import MissingExtra, UnknownName

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_VERSIONED = re.compile(r"(?P<stem>[\w:./-]+)-v(?P<version>\d+)")
_FIXED_SKIP = re.compile(r"(?P<game>\w+)Deterministic-v\d+")
_MOVED_MODULES = {"ray.rllib.examples.env.": "ray.rllib.examples.envs.classes."}
"""Modules of RLlib's examples, before and since Ray 2.11."""


@dataclass(frozen=True)
class CurrentName:
    """The name under which an environment is found, and what to tell whoever wrote another one."""

    name: str
    notice: str = ""


def current_name(name: str) -> CurrentName:
    """The same name if such an environment exists, or if nothing is known to have replaced it; else that of its successor.

    `package.module.Class`, as RLlib's files have it, is `package.module:Class`. Never raises: an unknown name stays as it is.
    """
    if name in registered():
        return CurrentName(name)
    if ":" in name:
        return CurrentName(renamed.current_name(name))
    if _DOTTED.fullmatch(name):
        return _as_import(name)
    try:
        notice = outdated(name)
        if not _raises_when_made(name):
            return CurrentName(name, notice)
    except (UnknownName, MissingExtra):
        pass
    successor = _successor(name)
    return (
        CurrentName(name)
        if successor is None
        else CurrentName(successor, f"env: {name} does not exist any more; {successor} is used.")
    )


def _as_import(name: str) -> CurrentName:
    for before, since in _MOVED_MODULES.items():
        if name.startswith(before):
            name = since + name.removeprefix(before)
    module, _, attribute = name.rpartition(".")
    return CurrentName(f"{module}:{attribute}")


def _raises_when_made(name: str) -> bool:
    """MuJoCo's v2 and v3, which Gymnasium lists only to say that they have left."""
    return getattr(spec_of(name).entry_point, "__name__", "") == "_raise_mujoco_py_error"


def _successor(name: str) -> str | None:
    fixed = _FIXED_SKIP.fullmatch(name)
    if fixed is not None:  # every 4th frame, which the usual preparation of Atari does here
        found = f"{fixed['game']}NoFrameskip-v4"
        return found if _exists(found) else None
    parts = _VERSIONED.fullmatch(name)
    if parts is None:
        return None
    same = [spec for spec in gym.registry.values() if spec.id.rpartition("-v")[0] == parts["stem"]]
    later = [spec for spec in same if (spec.version or 0) > int(parts["version"]) and not _raises_when_made(spec.id)]
    return max(later, key=lambda spec: spec.version or 0).id if later else None


def _exists(name: str) -> bool:
    try:
        spec_of(name)
    except (UnknownName, MissingExtra):
        return False
    return True
