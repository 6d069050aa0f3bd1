"""Processes that carry out errands: plain values in, plain values out, each process one at a time.

    with Errands("evaluation", make_player, course, workers=2, hang_s=60) as errands:
        errands.give(7, {"weights": "…"})
        for done in errands.take(timeout_s=0): …

`make_player(context, course)` runs once in each process and returns the function that carries an errand out. A process that dies
or hangs is replaced and its errand given out again, a few times; one that raises an error of ours has answered.
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
from ludus.process.workers.supervisor import OVER, Context, Process, Restart, Supervisor

log = logging.getLogger(__name__)

Make = Callable[..., Callable[[Any], Any]]

ATTEMPTS = 3
"""An errand that kills whoever carries it out is given up after so many of them."""

_BEAT_S = 0.5
_RESTART = Restart(limit=100)


@dataclass(frozen=True)
class Done:
    """What became of an errand: an answer, or why there is none."""

    number: int
    answer: Any = None
    error: LudusError | None = None


class Errands:
    """A few supervised processes and what they have to do. Not for several threads; `close` ends the processes."""

    def __init__(
        self,
        name: str,
        make: Make,
        *args: Any,
        workers: int,
        hang_s: float | None = None,
        restart: Restart = _RESTART,
        log_dir: Path | None = None,
        preload: Sequence[str] = ("numpy", "torch"),
    ) -> None:
        self._waiting: deque[tuple[int, Any]] = deque()
        self._tries: dict[int, int] = {}
        self._done: list[Done] = []
        self._selector = selectors.DefaultSelector()
        self._bell, self._rung = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._rung, False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._supervisor = Supervisor(log_dir=log_dir, preload=preload)
        self._hands: list[_Hand] = []
        try:
            for i in range(workers):
                mine, theirs = socket.socketpair()
                try:
                    process = self._supervisor.start(
                        f"{name}-{i}", _serve, make, args, fds=(theirs.fileno(),), hang_s=hang_s, restart=restart,
                        on_change=self._ring,
                    )  # fmt: skip
                except BaseException:
                    mine.close()
                    raise
                finally:
                    theirs.close()
                self._hands.append(_Hand(process, mine))
                self._selector.register(mine, selectors.EVENT_READ)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Errands:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the processes that live now."""
        return [hand.process.pid for hand in self._hands if hand.process.pid is not None]

    @property
    def open(self) -> int:
        """Errands that are not done."""
        return len(self._waiting) + sum(hand.holds is not None for hand in self._hands)

    def give(self, number: int, errand: Any) -> None:
        """Have it carried out as soon as a process is free. Numbers are the caller's, each used once. Returns at once."""
        self._waiting.append((number, errand))
        self._share_out()

    def drop(self) -> None:
        """Forget all that nobody has begun with."""
        self._waiting.clear()

    def take(self, timeout_s: float = 0.0) -> list[Done]:
        """What is done since the last call; waits for the first, but not longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            left = deadline - time.monotonic()
            if self._done or left <= 0 or not self.open:
                done, self._done = self._done, []
                return done
            self._selector.select(left)

    def close(self) -> None:
        self._supervisor.close(grace_s=1.0)
        self._selector.close()
        for hand in self._hands:
            hand.socket.close()
        self._hands.clear()
        self._waiting.clear()
        for end in (self._bell, self._rung):
            with contextlib.suppress(OSError):  # closed before
                os.close(end)
        self._bell = self._rung = -1

    def _ring(self, process: Process) -> None:
        with contextlib.suppress(OSError):  # full: it rings already; or we are closing
            os.write(self._rung, b"!")

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 4096)
        for hand in self._hands:
            for message in hand.heard():
                if hand.holds is not None and message.get("number") == hand.holds[0]:
                    self._done.append(_done(message))
                    self._tries.pop(hand.holds[0], None)
                    hand.holds = None
            if hand.holds is not None and hand.lost():
                self._again(hand.process, *hand.holds)
                hand.holds = None
        self._share_out()

    def _again(self, process: Process, number: int, errand: Any) -> None:
        if self._tries[number] < ATTEMPTS:
            self._waiting.appendleft((number, errand))
        else:
            self._fail(number, process)

    def _share_out(self) -> None:
        for hand in self._hands:
            if self._waiting and hand.free:
                number, errand = self._waiting.popleft()
                self._tries[number] = self._tries.get(number, 0) + 1
                hand.send(number, errand)
        if self._hands and all(hand.useless() for hand in self._hands):
            while self._waiting:
                self._fail(self._waiting.popleft()[0], self._hands[0].process)

    def _fail(self, number: int, process: Process) -> None:
        self._tries.pop(number, None)
        why = process.error.rstrip().rpartition("\n")[2] or "unknown"
        self._done.append(Done(number, error=WorkerFailed(f"The worker {process.name!r} failed: {why}")))


class _Hand:
    """One process, seen from here: its end of a socket, and the errand it holds."""

    def __init__(self, process: Process, ours: socket.socket) -> None:
        self.process, self.socket = process, ours
        self.socket.setblocking(False)
        self.holds: tuple[int, Any] | None = None
        self._given_to = self._served = 0
        self._reader = LineReader(ours)

    @property
    def free(self) -> bool:
        if self.process.state != "ready":
            return False
        self._served = self.process.incarnation
        return self.holds is None

    def useless(self) -> bool:
        """It is over, or the last few of it did not live to serve."""
        return self.process.state in OVER or self.process.incarnation - self._served > ATTEMPTS

    def lost(self) -> bool:
        """Whoever had the errand is not the one that lives now."""
        return self.process.incarnation != self._given_to or self.process.state != "ready"

    def send(self, number: int, errand: Any) -> None:
        self.holds, self._given_to = (number, errand), self.process.incarnation
        line = json_lines.encode({"number": number, "errand": errand, "for": self._given_to})
        with contextlib.suppress(OSError):  # it is dead, which is noticed in one place; the buffer has room for many lines
            self.socket.sendall(line)

    def heard(self) -> Iterator[dict[str, Any]]:
        return json_lines.decode_valid(self._reader.read_available())  # a killed process may have left half a line


def _done(message: dict[str, Any]) -> Done:
    if "error" not in message:
        return Done(message["number"], message["answer"])
    kind = LudusError if message["error"] == "Refused" else getattr(errors, message["error"], LudusError)
    return Done(message["number"], error=kind(message["message"], message["hint"]))


# ---------------------------------------------------------------- in the worker


def _serve(context: Context, make: Make, args: tuple[Any, ...]) -> None:
    """Ends by SIGTERM, which raises SystemExit wherever it is, or when nobody gives errands any more."""
    with contextlib.ExitStack() as stack:
        orders = stack.enter_context(socket.socket(fileno=os.dup(context.fds[0])))
        carry_out = _made(context, make, args)
        if hasattr(carry_out, "close"):
            stack.callback(carry_out.close)
        context.ready()
        orders.settimeout(_BEAT_S)
        reader = LineReader(orders)
        while not reader.at_end:
            context.beat()
            lines: list[bytes] = []
            with contextlib.suppress(TimeoutError):
                lines = reader.read()
            for order in map(json_lines.decode, lines):
                if order["for"] == context.incarnation:  # else one that a predecessor did not live to read
                    _answer(orders, order["number"], carry_out, order["errand"])


def _made(context: Context, make: Make, args: tuple[Any, ...]) -> Callable[[Any], Any]:
    """What cannot be made here cannot be made by a replacement either: it is the answer to every errand."""
    try:
        return make(context, *args)
    except LudusError as error:
        why = error

    def refuse(errand: Any) -> Any:
        raise why

    return refuse


def _answer(orders: socket.socket, number: int, carry_out: Callable[[Any], Any], errand: Any) -> None:
    message: dict[str, Any] = {"number": number}
    try:
        message["answer"] = carry_out(errand)
    except LudusError as error:
        message |= {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    orders.settimeout(None)  # whoever reads may be in the middle of an update; if it is gone, so are we
    orders.sendall(b"\n" + json_lines.encode(message))  # the first ends what a killed predecessor had begun
    orders.settimeout(_BEAT_S)
