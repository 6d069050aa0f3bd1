"""A client in another language, led by the hand: a program that does what it is told, line by line, on its standard input; or,
since not every engine reads that, on the port that LUDUS_DRIVER names.

    open url=… token=… timeout_ms=… deadline_ms=… fallback=error|repeat|default default=HEX
         retries=… max_reply_bytes=… certificate=FILE
    start session=… body=HEX match=… side=… model=… version=… temperature=…       again=1: the one before, once more
    tick body=HEX deadline_ms=…                                            zeros=N: a body of so many
    end body=HEX
    spec
    raw                     writes a raw tick, has it echoed, reads it; replies with what it wrote

With `async=1` a step is made in the other way that the client has, if it has one. Each command is answered by a line:
`= KIND xHEX key=value …`; the kinds are ok, refused, lost, deadline, unreachable, usage. Other lines are the engine's own.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

PATIENCE_S = 60.0
DRIVERS = Path(__file__).parent / "drivers"
CLIENTS = Path(__file__).parents[2] / "clients"


@dataclass(frozen=True)
class Outcome:
    kind: str
    body: bytes
    more: Mapping[str, str]

    @property
    def missed(self) -> int:
        return int(self.more["missed"])

    @property
    def fell_back(self) -> bool:
        return self.more["flag"] == "1"

    @property
    def refusal(self) -> tuple[str, int, str]:
        return self.kind, int(self.more["status"]), self.more["word"]

    @property
    def took_s(self) -> float:
        return float(self.more["ms"]) / 1e3


@dataclass
class Driver:
    process: subprocess.Popen[str]
    orders: IO[str]
    lines: queue.Queue[str | None] = field(default_factory=queue.Queue)
    other: list[str] = field(default_factory=list)
    """Other output of the program."""
    always: tuple[str, ...] = ()
    """Added to every step."""

    def do(self, command: str, body: bytes | None = None, **more: object) -> Outcome:
        words = [command, *(f"{key}={value}" for key, value in more.items())]
        if body is not None:
            words.append(f"body={body.hex()}")
        if command in ("start", "tick", "end"):
            words.extend(self.always)
        self.orders.write(" ".join(words) + "\n")
        self.orders.flush()
        return self._answer()

    def ok(self, command: str, body: bytes | None = None, **more: object) -> bytes:
        outcome = self.do(command, body, **more)
        assert outcome.kind == "ok", (outcome, self.other)
        return outcome.body

    def open(self, url: str, **options: object) -> None:
        self.ok("open", None, url=url, **options)

    def _answer(self) -> Outcome:
        while True:
            line = self.lines.get(timeout=PATIENCE_S)
            assert line is not None, f"it crashed: {self.other[-20:]}"
            if not line.startswith("= "):
                self.other.append(line)
                continue
            kind, said, *words = line[2:].split()
            return Outcome(kind, bytes.fromhex(said[1:]), dict(word.split("=", 1) for word in words))

    def read(self, stream: IO[str], last: bool) -> None:
        for line in stream:
            self.lines.put(line)
        if last:
            self.lines.put(None)


@contextlib.contextmanager
def driver(
    command: Sequence[str | Path], environment: Mapping[str, str], *always: str, by_port: bool = False
) -> Iterator[Driver]:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(PATIENCE_S)
        told = {**environment, "LUDUS_DRIVER": str(listening.getsockname()[1])}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = stack.enter_context(subprocess.Popen(command, text=True, env=told, **pipes))
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        orders, sources = cast(IO[str], process.stdin), [cast(IO[str], process.stdout)]
        if by_port:
            connected = stack.enter_context(listening.accept()[0])
            orders = stack.enter_context(connected.makefile("w", encoding="utf-8"))
            sources.append(stack.enter_context(connected.makefile("r", encoding="utf-8")))
        driven = Driver(process, orders, always=always)
        for source in sources:
            reading = threading.Thread(target=driven.read, args=(source, source is sources[-1]), daemon=True)
            reading.start()
            stack.callback(reading.join, PATIENCE_S)
        stack.callback(process.kill)  # first of all: it ends what the threads read
        yield driven
