"""Where a run gets its experience from: a sampler in this process, sampling workers, a fleet, or games that call over HTTP."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ludus.core.metrics import Numbers
from ludus.core.tree import Array


class ExperienceSource(Protocol):
    """Provides the trainer's memory with segments."""

    def step(self) -> bool:
        """Do one piece of work; False when there was nothing to do."""
        ...

    def state(self) -> dict[str, Array]:
        """What a checkpoint has to hold of it."""
        ...

    def load_state(self, state: dict[str, Array]) -> None: ...

    def metrics(self) -> Numbers: ...

    def unlearned_steps(self) -> int:
        """Steps sampled since the last batch: nothing learns from them if the run ends now."""
        ...


@runtime_checkable
class RemoteSampling(Protocol):
    """An experience source whose steps come from other processes, which may fail to start."""

    def has_sampled(self) -> bool:
        """Whether a step was sampled since this process started."""
        ...

    def waiting_for(self) -> str:
        """What the first step is waiting for, as the object of "waited for"."""
        ...
