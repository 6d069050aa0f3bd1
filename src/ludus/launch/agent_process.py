"""Program that a local command, `ssh` or `srun`, runs on another machine, and its JSON lines."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader, LineTooLong
from ludus.process.children import wait_or_kill

ExplainFailure = Callable[[int | None, str], LudusError]
"""Translates an exit code (None: still running) and the output of the command into an error."""

_EXIT_S = 5.0


class AgentProcess:
    """The agent must end when its stdin closes, also if this process dies. Answers start with `mark`. Not thread-safe."""

    def __init__(
        self, words: Sequence[str], mark: str, host: str, explain: ExplainFailure, max_line: int = json_lines.MAX_LINE_BYTES
    ) -> None:
        self.host, self._mark, self._explain = host, mark, explain
        self._stderr: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the connection
        self._noise: deque[str] = deque(maxlen=5)
        self._answers: deque[dict[str, Any]] = deque()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C must reach this process only
            )
        except OSError as error:
            self._stderr.close()
            raise UsageError(f"{words[0]} cannot be run: {error.strerror}.", f"Install {words[0]}.") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._reader = LineReader(self._output.fileno(), max_line)

    def fileno(self) -> int:
        return self._output.fileno()

    def send(self, request: Mapping[str, Any]) -> None:
        """Raises LudusError."""
        try:
            self.input.write(json_lines.encode(request))
            self.input.flush()
        except OSError as error:
            raise self._failure() from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """Wait for the next answer. Raises LudusError."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while not self._answers:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise self._failure(silent=True)
                if not self.read_available() and not self._answers:
                    raise self._failure()
        return self.next_answer()

    def read_available(self) -> bool:
        """Read received data without waiting; return False at the end of the stream."""
        try:
            for line in self._reader.read():
                answer = json_lines.decode_marked(line, self._mark)
                if answer is None:
                    self._noise.append(line.decode(errors="replace"))
                else:
                    self._answers.append(answer)
        except LineTooLong as error:
            raise WorkerFailed(f"{self.host} sent a line without end.", "Does its login script write to stdout?") from error
        return not self._reader.at_end

    @property
    def has_answer(self) -> bool:
        return bool(self._answers)

    def next_answer(self) -> dict[str, Any]:
        """Return a received answer."""
        return self._answers.popleft()

    def close(self, within_s: float = 1.0) -> None:
        """Close stdin, which ends the agent; kill the local command after `within_s`."""
        with contextlib.suppress(OSError):
            self.input.close()
        wait_or_kill(self._process, within_s)
        self._output.close()
        self._stderr.close()

    def _failure(self, *, silent: bool = False) -> LudusError:
        code: int | None = None
        if not silent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_EXIT_S)
        output = os.pread(self._stderr.fileno(), 100_000, 0).decode(errors="replace")  # the command shares the file position
        return self._explain(code, output or "\n".join(self._noise))
