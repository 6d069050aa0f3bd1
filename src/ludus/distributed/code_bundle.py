"""What goes along to another process because it cannot be found there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from ludus.core import trust
from ludus.envs.registry import register_env, registered_envs
from ludus.errors import UsageError
from ludus.models.custom import loader
from ludus.models.custom.loader import ModelFiles
from ludus.process.workers.supervisor import unsendable_part


@dataclass(frozen=True)
class Luggage:
    """What a name in the config means in this process alone: a function or class of its script, an environment registered_envs
    there, a model in a file of this machine."""

    named: Mapping[str, Any] = field(default_factory=dict)
    spec: Any = None
    models: tuple[ModelFiles, ...] = ()
    """As text, so that every process of a run has the same, on whatever machine and whoever edits the file meanwhile."""
    registered_envs: Mapping[str, Any] = field(default_factory=dict)
    """By `register_env`."""
    trusted: tuple[str, ...] = ()
    """Names that may be imported there because they may be here."""

    @classmethod
    def of(cls, *names: str, models: Iterable[str | None] = ()) -> Luggage:
        """`models`: what the experiment calls its custom models; None: none. Raises UnknownName when there is no such file."""
        main = sys.modules["__main__"]
        custom = {name for name in models if name is not None}
        own = {name.partition(":")[2].split(".")[0] for name in (*names, *custom) if name.startswith("__main__:")}
        spec = next((gym.registry[name] for name in names if name in gym.registry), None)
        made = {name: registered_envs()[name] for name in names if name in registered_envs()}
        files = tuple(loader.files_of(name) for name in sorted(custom) if ":" not in name)
        trusted = trust.trusted_names(*names, *custom)
        return cls({name: getattr(main, name) for name in own if hasattr(main, name)}, spec, files, made, trusted)

    def check_can_be_sent(self) -> None:
        """Raises UsageError with what of an environment or a class cannot be sent to another process."""
        for name, value in {**self.named, **self.registered_envs}.items():
            culprit = unsendable_part(name, value)
            if culprit is not None:
                raise UsageError(
                    f"{name} cannot be sent to the processes of this run: {culprit}.",
                    "Create that inside the function that makes the environment, or define the function in a module and pass its name, "
                    "'module:function', or register it: ludus.register_env(name, function). With num_workers=0 nothing is sent.",
                )

    def unpack(self) -> None:
        trust.adopt(self.trusted)
        main = sys.modules["__main__"]
        for name, value in self.named.items():
            setattr(main, name, value)
        if self.spec is not None:
            gym.registry.setdefault(self.spec.id, self.spec)
        for files in self.models:
            loader.register_files(files)
        for name, function in self.registered_envs.items():
            register_env(name, function)
