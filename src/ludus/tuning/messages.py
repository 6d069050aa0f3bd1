"""Values and interfaces between a sweep and the processes of its trials."""

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
"""Metric that schedulers compare; higher is better."""

OVER = "ludus_over"
"""Metric of a trial that has ended by itself: FINISHED or FAILED."""

FINISHED, FAILED = 1.0, 2.0


@dataclass(frozen=True)
class TrialResources:
    """Resources that a trial reserves on one node."""

    cpus: int = 1
    gpus: float = 0.0
    workers: int = 0
    """Further processes of the trial, with one core each."""

    @property
    def all_cpus(self) -> int:
        return self.cpus + self.workers


@dataclass(frozen=True)
class TrialRequest:
    """What the process of a trial is to train."""

    name: str
    directory: Path | None
    """Tune's directory for the trial; None if it is not on a file system."""
    config: Mapping[str, Any]
    pointer: Mapping[str, Any] | None
    """The checkpoint to begin with, of this trial or of another one; as `TrialTraining.checkpoint` described it."""


class TrialTraining(Protocol):
    """A training that is advanced from report to report."""

    def advance(self) -> Numbers:
        """Train until the next report. If it has `OVER`, the trial has ended."""
        ...

    def checkpoint(self) -> dict[str, Any]:
        """Store a checkpoint; returns its location as JSON."""
        ...

    def close(self) -> None:
        """Store a checkpoint and end the training. Idempotent."""
        ...


StartTrial = Callable[[TrialRequest], TrialTraining]
ReserveResources = Callable[[Mapping[str, Any]], TrialResources]
"""Returns the resources of a trial with this config."""


@dataclass(frozen=True)
class TrialEvent:
    """An event of a trial. `kind`: started, reported, ended, retried or failed."""

    name: str
    kind: str
    numbers: Numbers
    config: Mapping[str, Any]
    error: str = ""


OnTrialEvent = Callable[[TrialEvent], None]


@dataclass(frozen=True)
class TrialEnvironment:
    """Working directory, import path and code that the process of a trial needs to resolve names."""

    directory: str
    path: tuple[str, ...]
    code_bundles: tuple[CodeBundle, ...] = ()

    @classmethod
    def here(cls, code_bundles: Iterable[CodeBundle]) -> TrialEnvironment:
        return cls(str(Path.cwd()), tuple(str(Path(entry).absolute()) for entry in sys.path), tuple(code_bundles))

    def enter(self) -> None:
        with contextlib.suppress(OSError):  # another node may not have the directory
            os.chdir(self.directory)
        sys.path += [entry for entry in ("", *self.path) if entry not in sys.path]
        for packed in self.code_bundles:
            packed.unpack()
