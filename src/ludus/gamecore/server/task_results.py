"""Results of games that were started for a task, kept although their ids are used again; bounded, and written down."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

from ludus.gamecore.server.game_status import GameStatus

log = logging.getLogger(__name__)

KEEP = 10_000
_MAX_RESULT = 4_000
"""Of a larger one only the winner and the lost camps are kept."""

_MAX_LINE = 100_000


class TaskResults:
    """One line of JSON per game that is over. May be used from any thread; `load` and `write` may wait for the disk."""

    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self._path, self._keep = path, keep
        self._games: deque[tuple[str, bytes]] = deque(maxlen=keep)
        """Task and line: as a dictionary it would take several times as much."""
        self._unwritten: list[bytes] = []
        self._lines = 0
        self._rewrite = False
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def ids(self) -> list[str]:
        with self._lock:
            return list(dict.fromkeys(task_id for task_id, _ in self._games))

    def games_of(self, task_id: str) -> list[dict[str, Any]]:
        with self._lock:
            lines = [line for mine, line in self._games if mine == task_id]
        return [json.loads(line) for line in lines]

    def add(self, status: GameStatus) -> None:
        assert status.task_id is not None
        fields = {**status.to_json(), "last_lines": status.last_lines[-1:]}
        if len(json.dumps(status.result)) > _MAX_RESULT:
            result = status.result or {}
            fields["result"] = {"winner": result.get("winner")} | ({"lost": result["lost"]} if result.get("lost") else {})
        line = json.dumps(fields).encode() + b"\n"
        with self._lock:
            self._games.append((status.task_id, line))
            self._unwritten.append(line)

    def remove(self, task_id: str | None = None) -> None:
        """Of one task; None: of all."""
        with self._lock:
            left = [] if task_id is None else [game for game in self._games if game[0] != task_id]
            self._games = deque(left, maxlen=self._keep)
            self._rewrite = True

    def load(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            while line := file.readline(_MAX_LINE):
                self._lines += 1
                self._rewrite = not line.endswith(b"\n")  # of a server that was killed: nothing may be appended to it
                try:
                    task_id = GameStatus.from_json(json.loads(line)).task_id
                except (ValueError, RecursionError):
                    continue
                if isinstance(task_id, str):
                    self._games.append((task_id, line))

    def write(self) -> None:
        """What is new; all of it, if the file has become twice as long as it must be."""
        with self._writing:
            with self._lock:
                rewrite = self._rewrite or self._lines + len(self._unwritten) > 2 * self._keep
                lines = [line for _, line in self._games] if rewrite else self._unwritten
                self._unwritten, self._rewrite = [], False
            self._lines = len(lines) + (0 if rewrite else self._lines)
            try:
                handle = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if rewrite else os.O_APPEND), 0o600
                )
                with open(handle, "wb") as file:
                    file.writelines(lines)
            except OSError as error:
                log.warning("%s cannot be written: %s", self._path, error)
