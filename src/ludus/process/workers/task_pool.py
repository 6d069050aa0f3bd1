"""Worker processes that run tasks: JSON values in, JSON values out, one task at a time per process.

    with TaskPool("evaluation", make_player, course, workers=2, hang_s=60) as pool:
        pool.submit(7, {"weights": "…"})
        for result in pool.take(timeout_s=0): …

`make_player(context, course)` runs once in each process and returns the function that runs a task. A process that dies
or hangs is replaced and its task is submitted again, up to ATTEMPTS times; a LudusError is a result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus import errors
from ludus.errors import LudusError, WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.process.workers.supervisor import FINAL_STATES, Context, Process, Supervisor, WorkerRestart

log = logging.getLogger(__name__)

Make = Callable[..., Callable[[Any], Any]]

ATTEMPTS = 3
"""Number of worker processes a task may kill before it fails."""

_BEAT_S = 0.5
_RESTART = WorkerRestart(limit=100)


@dataclass(frozen=True)
class TaskResult:
    """Result of a task: an answer or an error."""

    number: int
    answer: Any = None
    error: LudusError | None = None


class TaskPool:
    """Supervised processes and their queue of tasks. Not thread-safe; `close` ends the processes."""

    def __init__(
        self,
        name: str,
        make: Make,
        *args: Any,
        workers: int,
        hang_s: float | None = None,
        restart: WorkerRestart = _RESTART,
        log_dir: Path | None = None,
        preload: Sequence[str] = ("numpy", "torch"),
    ) -> None:
        self._queue: deque[tuple[int, Any]] = deque()
        self._attempts: dict[int, int] = {}
        self._results: list[TaskResult] = []
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = os.pipe()
        os.set_blocking(self._wake_receiver, False)
        os.set_blocking(self._wake_sender, False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._supervisor = Supervisor(log_dir=log_dir, preload=preload)
        self._workers: list[_PoolWorker] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for i in range(workers):
                mine, theirs = socket.socketpair()
                undo.callback(mine.close)
                with theirs:
                    process = self._supervisor.start(
                        f"{name}-{i}", _serve, make, args, fds=(theirs.fileno(),), hang_s=hang_s, restart=restart,
                        on_change=self._wake_owner,
                    )  # fmt: skip
                self._workers.append(_PoolWorker(process, mine))
                self._selector.register(mine, selectors.EVENT_READ)
            undo.pop_all()

    def __enter__(self) -> TaskPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """PIDs of the running processes."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    @property
    def pending(self) -> int:
        """Number of tasks that are not done."""
        return len(self._queue) + sum(worker.task is not None for worker in self._workers)

    def submit(self, number: int, task: Any) -> None:
        """Queue a task; returns at once. The caller chooses the number, which must be unique."""
        self._queue.append((number, task))
        self._dispatch()

    def take(self, timeout_s: float = 0.0) -> list[TaskResult]:
        """Results since the last call; waits at most `timeout_s` for the first."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._update()
            left = deadline - time.monotonic()
            if self._results or left <= 0 or not self.pending:
                done, self._results = self._results, []
                return done
            self._selector.select(left)

    def close(self) -> None:
        self._supervisor.close(grace_s=1.0)
        self._selector.close()
        for worker in self._workers:
            worker.socket.close()
        self._workers.clear()
        self._queue.clear()
        for end in (self._wake_receiver, self._wake_sender):
            with contextlib.suppress(OSError):  # closed before
                os.close(end)
        self._wake_receiver = self._wake_sender = -1

    def _wake_owner(self, process: Process) -> None:
        with contextlib.suppress(OSError):  # the pipe is full and will wake the owner anyway, or it is closing
            os.write(self._wake_sender, b"!")

    def _update(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_receiver, 4096)
        for worker in self._workers:
            for message in worker.read_results():
                if worker.task is not None and message.get("number") == worker.task[0]:
                    self._results.append(_parse_result(message))
                    self._attempts.pop(worker.task[0], None)
                    worker.task = None
            if worker.task is not None and worker.has_lost_task():
                if self._attempts[worker.task[0]] < ATTEMPTS:
                    self._queue.appendleft(worker.task)
                else:
                    self._fail(worker.task[0], worker.process)
                worker.task = None
        self._dispatch()

    def _dispatch(self) -> None:
        for worker in self._workers:
            if self._queue and worker.is_idle:
                number, task = self._queue.popleft()
                self._attempts[number] = self._attempts.get(number, 0) + 1
                worker.send(number, task)
        if self._workers and all(worker.is_hopeless() for worker in self._workers):
            while self._queue:
                self._fail(self._queue.popleft()[0], self._workers[0].process)

    def _fail(self, number: int, process: Process) -> None:
        self._attempts.pop(number, None)
        why = process.error.rstrip().rpartition("\n")[2] or "unknown"
        self._results.append(TaskResult(number, error=WorkerFailed(f"The worker {process.name!r} failed: {why}")))


class _PoolWorker:
    """One process: the socket to it and the task it runs."""

    def __init__(self, process: Process, ours: socket.socket) -> None:
        self.process, self.socket = process, ours
        self.socket.setblocking(False)
        self.task: tuple[int, Any] | None = None
        self._sent_to = self._last_ready = 0
        self._reader = LineReader(ours)

    @property
    def is_idle(self) -> bool:
        if self.process.state != "ready":
            return False
        self._last_ready = self.process.incarnation
        return self.task is None

    def is_hopeless(self) -> bool:
        """It has ended, or its last few incarnations died before they were ready."""
        return self.process.state in FINAL_STATES or self.process.incarnation - self._last_ready > ATTEMPTS

    def has_lost_task(self) -> bool:
        """The incarnation that got the task is gone."""
        return self.process.incarnation != self._sent_to or self.process.state != "ready"

    def send(self, number: int, task: Any) -> None:
        self.task, self._sent_to = (number, task), self.process.incarnation
        line = json_lines.encode({"number": number, "task": task, "for": self._sent_to})
        with contextlib.suppress(OSError):  # its death is handled in one place; the socket buffer holds many lines
            self.socket.sendall(line)

    def read_results(self) -> Iterator[dict[str, Any]]:
        return json_lines.decode_valid(self._reader.read_available())  # a killed process may have left an incomplete line


def _parse_result(message: dict[str, Any]) -> TaskResult:
    if "error" not in message:
        return TaskResult(message["number"], message["answer"])
    kind = LudusError if message["error"] == "Refused" else getattr(errors, message["error"], LudusError)
    return TaskResult(message["number"], error=kind(message["message"], message["hint"]))


# -- in the worker ------------------------------------------------------------------------------------------------------


def _serve(context: Context, make: Make, args: tuple[Any, ...]) -> None:
    """Run tasks until SIGTERM (which raises SystemExit) or until the owner closes the socket."""
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(socket.socket(fileno=os.dup(context.fds[0])))
        run_task = _make_task_function(context, make, args)
        if hasattr(run_task, "close"):
            stack.callback(run_task.close)
        context.ready()
        channel.settimeout(_BEAT_S)
        reader = LineReader(channel)
        while not reader.at_end:
            context.beat()
            lines: list[bytes] = []
            with contextlib.suppress(TimeoutError):
                lines = reader.read()
            for request in map(json_lines.decode, lines):
                if request["for"] == context.incarnation:  # else it was sent to a predecessor
                    _run_and_reply(channel, request["number"], run_task, request["task"])


def _make_task_function(context: Context, make: Make, args: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Make the task function. If that fails with a LudusError, a replacement would fail too: every task fails with this error."""
    try:
        return make(context, *args)
    except LudusError as error:
        why = error

    def refuse(task: Any) -> Any:
        raise why

    return refuse


def _run_and_reply(channel: socket.socket, number: int, run_task: Callable[[Any], Any], task: Any) -> None:
    message: dict[str, Any] = {"number": number}
    try:
        message["answer"] = run_task(task)
    except LudusError as error:
        message |= {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    channel.settimeout(None)  # the owner may be busy with an update for long
    channel.sendall(b"\n" + json_lines.encode(message))  # the newline ends an incomplete line of a killed predecessor
    channel.settimeout(_BEAT_S)
