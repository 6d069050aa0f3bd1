"""Commands that serve, in processes of their own, for as long as a test needs them."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 60.0


@dataclass
class Program:
    process: subprocess.Popen[str]
    url: str = ""
    lines: dict[str, list[str]] = field(default_factory=lambda: {"out": [], "err": []})
    changed: threading.Condition = field(default_factory=threading.Condition)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def listen(self) -> None:
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            assert stream is not None
            thread = threading.Thread(target=self._read, args=(name, stream), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _read(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            with self.changed:
                self.lines[name].append(line)
                self.changed.notify_all()

    def wait_for(self, words: str) -> str:
        """The line in which they were said."""

        def found() -> str:
            return next((line for lines in self.lines.values() for line in lines if words in line), "")

        with self.changed:
            assert self.changed.wait_for(lambda: bool(found()), LIMIT_S), self.lines
            return found()

    def wait_for_lines(self, count: int) -> None:
        """Until it has printed so many more lines."""
        with self.changed:
            wanted = len(self.lines["out"]) + count
            assert self.changed.wait_for(lambda: len(self.lines["out"]) >= wanted, LIMIT_S), self.lines

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end; returns the exit code, stdout and stderr."""
        code = self.process.wait(LIMIT_S)
        for thread in self.threads:
            thread.join(LIMIT_S)
        return code, "".join(self.lines["out"]), "".join(self.lines["err"])


@contextlib.contextmanager
def program(*arguments: str | Path, listens: bool = True, files: tuple[int, int] | None = None) -> Iterator[Program]:
    """Start a command; killed at the end if it still runs. With `listens`, wait until it prints its address. `files`: soft and hard limit of open files."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "300"}
    command = [sys.executable, "-m", "ludus.cli.main", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
    ) as process:  # fmt: skip
        running = Program(process)
        running.listen()
        try:
            if listens:
                found = re.search(r"http://\S+", running.wait_for(" on http://"))
                assert found is not None
                running.url = found.group()
            yield running
        finally:
            process.kill()
