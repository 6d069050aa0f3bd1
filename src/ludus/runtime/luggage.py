"""What goes along to another process because it cannot be imported there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym


@dataclass(frozen=True)
class Luggage:
    """What a name in the config means in this process alone: a function of its script, an environment registered there."""

    named: Mapping[str, Any] = field(default_factory=dict)
    spec: Any = None

    @classmethod
    def of(cls, *names: str) -> Luggage:
        main = sys.modules["__main__"]
        own = {name.partition(":")[2].split(".")[0] for name in names if name.startswith("__main__:")}
        spec = next((gym.registry[name] for name in names if name in gym.registry), None)
        return cls({name: getattr(main, name) for name in own if hasattr(main, name)}, spec)

    def unpack(self) -> None:
        main = sys.modules["__main__"]
        for name, value in self.named.items():
            setattr(main, name, value)
        if self.spec is not None:
            gym.registry.setdefault(self.spec.id, self.spec)
