"""What passes between a sweep and its trials, whoever runs them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ludus.core.metrics import Numbers
from ludus.distributed.code_bundle import CodeBundle

SCORE = "ludus_score"
"""Among the numbers of a trial: what schedulers compare. More of it is better."""

OVER = "ludus_over"
"""Among the numbers of a trial that has come to its own end: how."""

FINISHED, FAILED = 1.0, 2.0


@dataclass(frozen=True)
class Reserved:
    """What a trial needs of one machine."""

    cpus: int = 1
    gpus: float = 0.0
    workers: int = 0
    """Processes beside that of the trial, each with a core of its own."""

    @property
    def all_cpus(self) -> int:
        return self.cpus + self.workers


@dataclass(frozen=True)
class Order:
    """What the process of a trial is told."""

    name: str
    directory: Path | None
    """Of the trial, where Tune keeps its results; None when that is not on a file system."""
    config: Mapping[str, Any]
    pointer: Mapping[str, Any] | None
    """The checkpoint to begin with, of this trial or of another one; as `Attempt.checkpoint` described it."""


class Attempt(Protocol):
    """A training that can be advanced bit by bit."""

    def advance(self) -> Numbers:
        """Train until the next report. `OVER` in it: there is no more to do."""
        ...

    def checkpoint(self) -> dict[str, Any]:
        """Store everything; says where, as JSON."""
        ...

    def close(self) -> None:
        """Store everything, and end. Again: no effect."""
        ...


Begin = Callable[[Order], Attempt]
Reserve = Callable[[Mapping[str, Any]], Reserved]
"""What a trial with this config needs."""


@dataclass(frozen=True)
class Event:
    """What became known of a trial: `kind` is started, reported, ended, retried or failed."""

    name: str
    kind: str
    numbers: Numbers
    config: Mapping[str, Any]
    error: str = ""


Hear = Callable[[Event], None]


@dataclass(frozen=True)
class Surroundings:
    """What a process of a trial needs so that names mean there what they mean here."""

    directory: str
    path: tuple[str, ...]
    code_bundle: tuple[CodeBundle, ...] = ()

    @classmethod
    def here(cls, code_bundle: Iterable[CodeBundle]) -> Surroundings:
        return cls(str(Path.cwd()), tuple(str(Path(entry).absolute()) for entry in sys.path), tuple(code_bundle))

    def enter(self) -> None:
        with contextlib.suppress(OSError):  # another machine, which need not have it
            os.chdir(self.directory)
        sys.path += [entry for entry in ("", *self.path) if entry not in sys.path]
        for packed in self.code_bundle:
            packed.unpack()
