"""Code of the user's script that another process needs because it cannot import it there."""

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
from ludus.process.workers.supervisor import describe_unpicklable


@dataclass(frozen=True)
class CodeBundle:
    """Meaning of names in the config that exist only in this process: functions and classes of its script, registered environments, and
    custom model files of this machine.
    """

    named: Mapping[str, Any] = field(default_factory=dict)
    spec: Any = None
    models: tuple[ModelFiles, ...] = ()
    """As text, so that every process of a run has the same version, on any machine, even if the file is edited meanwhile."""
    registered_envs: Mapping[str, Any] = field(default_factory=dict)
    """Environments added by `register_env`."""
    trusted: tuple[str, ...] = ()
    """Names that this process allows to be imported."""

    @classmethod
    def of(cls, *names: str, models: Iterable[str | None] = ()) -> CodeBundle:
        """Collect what the names need. `models`: custom models of the experiment, None entries are skipped. Raises UnknownName."""
        main = sys.modules["__main__"]
        custom = {name for name in models if name is not None}
        own = {name.partition(":")[2].split(".")[0] for name in (*names, *custom) if name.startswith("__main__:")}
        spec = next((gym.registry[name] for name in names if name in gym.registry), None)
        made = {name: registered_envs()[name] for name in names if name in registered_envs()}
        files = tuple(loader.files_of(name) for name in sorted(custom) if ":" not in name)
        trusted = trust.names_to_trust(*names, *custom)
        return cls({name: getattr(main, name) for name in own if hasattr(main, name)}, spec, files, made, trusted)

    def check_can_be_sent(self) -> None:
        """Raises UsageError with the part of an environment or class that cannot be pickled."""
        for name, value in {**self.named, **self.registered_envs}.items():
            part = describe_unpicklable(name, value)
            if part is not None:
                raise UsageError(
                    f"{name} cannot be sent to the processes of this run: {part}.",
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
