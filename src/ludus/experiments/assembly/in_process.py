"""The first runtime: every component in this process, taking turns. Starts at once, debuggable, bit-reproducible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ludus.errors import LudusError
from ludus.experiments.assembly.program import Handle, Program

log = logging.getLogger(__name__)


class InProcess:
    """Builds the components in order and lets them take turns until told to stop; closes them in reverse order.

    Used as a context manager: leaving it closes every component that was made, also when a later one failed to start.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._made: dict[str, Any] = {}

    def __enter__(self) -> InProcess:
        try:
            for node in self._program.nodes:
                args = [self._resolved(value) for value in node.args]
                kwargs = {key: self._resolved(value) for key, value in node.kwargs.items()}
                self._made[node.name] = node.make(*args, **kwargs)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getitem__(self, handle: Handle) -> Any:
        return self._made[handle.name]

    def run(self, stop: Callable[[], bool]) -> None:
        """Take turns until `stop()`. Raises if no component has anything left to do."""
        workers = [self._made[node.name].step for node in self._program.nodes if node.works]
        while not stop():
            busy = False
            for step in workers:
                busy = step() or busy
            if not busy:
                raise LudusError("No component of the program has anything to do: it would wait forever.")

    def close(self) -> None:
        while self._made:
            name, made = self._made.popitem()
            if hasattr(made, "close"):
                try:
                    made.close()
                except Exception:  # the user's environment among them; the others must be closed all the same
                    log.exception("closing %s failed", name)

    def _resolved(self, value: Any) -> Any:
        return self._made[value.name] if isinstance(value, Handle) else value
