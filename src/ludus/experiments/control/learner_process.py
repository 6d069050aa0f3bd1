"""The learner process of a supervised run: trains, and reports to its supervisor over a pipe, one JSON object per line.

Messages: {"pid"}, {"numbers"}, {"checkpoint"}, {"notice"}, and as the last one {"ended"} or {"error"}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ludus import errors
from ludus.core.metrics import Numbers, Sink
from ludus.distributed.code_bundle import CodeBundle
from ludus.errors import LudusError
from ludus.io import json_lines
from ludus.models.weights import serialization
from ludus.process.workers.supervisor import Context

if TYPE_CHECKING:
    from ludus.experiments.resolve import Announce
    from ludus.experiments.result import Result

log = logging.getLogger(__name__)


class Learn(Protocol):
    """The training that a learner process runs."""

    def __call__(self, *, sinks: Sequence[Sink], announce: Announce | None, again: bool, set_up: bool) -> Result:
        """`again`: not the first learner of its supervisor. `set_up`: the run directory has been created."""
        ...


class SupervisorPipe:
    """A metrics sink that writes to the supervisor. Blocks while the supervisor is behind, as any slow sink does."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # the supervisor has died, and this process dies with it
            json_lines.write(self._pipe, message)

    def announce(self, notice: str) -> None:
        self.send(notice=notice)

    def write(self, numbers: Numbers) -> None:
        self.send(numbers={name: float(value) for name, value in numbers.items()})

    def checkpoint_written(self, name: str) -> None:
        self.send(checkpoint=name)

    def close(self) -> None:
        """The supervisor closes the sinks of the caller."""


def run_learner(context: Context, learn: Learn, bundle: CodeBundle, again: bool, set_up: bool, announces: bool) -> None:
    """Entry point of the process: train, then report the result. Signals stop it like a training in the foreground."""
    pipe, file = context.fds
    supervisor = SupervisorPipe(pipe)
    for handler in logging.getLogger("ludus").handlers:  # the log of the run holds the rest
        handler.setLevel(logging.WARNING)
    supervisor.send(pid=os.getpid())  # before it claims the run: the supervisor must recognise the claim even if it dies then
    bundle.unpack()
    context.ready()
    try:
        result = learn(sinks=[supervisor], announce=supervisor.announce if announces else None, again=again, set_up=set_up)
    except LudusError as error:
        log.exception("the learner ends")
        supervisor.send(error=pack_error(error))
        return
    agent = result.agent
    with open(file, "wb", closefd=False) as weights:
        description = {"description": json.dumps(agent.policy.description())}
        weights.write(serialization.encode_weights(agent.policy.weights(), description))
    ended: dict[str, Any] = {"stopped_by": result.stopped_by, "version": agent.version, "env": result.env, "model": agent.model}
    ended["checkpoint"] = result.checkpoint.name if result.checkpoint else None
    supervisor.send(ended=ended | {"metrics": {name: float(value) for name, value in result.metrics.items()}})


def pack_error(error: LudusError) -> dict[str, Any]:
    known = next(cls for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)
    return {"class": known.__name__, "message": error.message, "hint": error.hint, "final": error.final}


def unpack_error(data: Mapping[str, Any]) -> LudusError:
    cls = getattr(errors, str(data["class"]), LudusError)
    try:
        error: LudusError = cls(data["message"], data["hint"])
    except TypeError:  # a class with more arguments
        error = LudusError(data["message"], data["hint"])
    if data.get("final"):
        error.final = True
    return error
