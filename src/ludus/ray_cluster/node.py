"""A Ray node as processes under a guard: what to start, and its reports. This module does not import Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from ludus.errors import WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.process import temp_dirs
from ludus.process.commands.lifeline_guard import GuardedCommand


@dataclass(frozen=True)
class NodeSpec:
    """`head`: HOST:PORT. `wait_s`: how long a joining node waits for the head; None: without limit. `ports`: by Ray's names for them.

    `cpus`, `gpus`, `memory`: None: detected by Ray.
    """

    first: bool
    head: str
    address: str
    name: str
    directory: str
    store_bytes: int
    wait_s: float | None
    cpus: int | None
    gpus: int | None = None
    memory: int | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> NodeSpec:
        return NodeSpec(**json.loads(text))


class RayNode:
    """A running `node_process`. All processes of the node, and `home`, end with `close` or with this process, however that ends.

    `home`: a directory that contains all files of the node. `errors`: file for the output of Ray (default: that of this process).
    """

    def __init__(self, spec: NodeSpec, environment: Mapping[str, str], home: Path, errors: IO[bytes] | None = None) -> None:
        self._command = GuardedCommand(
            [sys.executable, "-P", "-m", "ludus.ray_cluster.node_process", spec.to_json()],
            environment=environment,
            directory=Path.cwd(),
            remove=[home],
            sweep=temp_dirs.base_dirs(),
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert self._command.guard.stdout is not None
        self._reports = self._command.guard.stdout
        self._reader = LineReader(self._reports.fileno())

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._command.close()

    def fileno(self) -> int:
        """Readable when there are reports."""
        return self._reports.fileno()

    @property
    def has_ended(self) -> bool:
        """All its processes have ended, and all reports are read."""
        return self._reader.at_end

    def read_reports(self) -> list[dict[str, Any]]:
        """Reports of the process: `waiting`, `ready` with `logs`, or `failed` with `hint`. Blocks until there is one or the end."""
        return [json_lines.decode(line) for line in self._reader.read()]

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises WorkerFailed."""
        deadline = time.monotonic() + timeout_s
        failure = "its process was killed"
        try:
            while (line := self._reader.read_line(deadline - time.monotonic())) is not None:
                report = json_lines.decode(line)
                if "ready" in report:
                    return
                failure = report.get("failed", failure)
        except TimeoutError:
            failure = f"it was not ready within {timeout_s:g} s"
        raise WorkerFailed(failure if failure.startswith("Ray could not") else f"Ray could not be started: {failure}.")
