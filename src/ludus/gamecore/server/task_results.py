"""Results of games by task, kept on disk even when runtime ids are reused. Bounded."""

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
"""Bytes; of a larger result only the winner and the lost camps are kept."""

_MAX_LINE = 100_000


class TaskResults:
    """A JSON line per finished game. Thread-safe; `load` and `write` block on the disk."""

    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self._path, self._keep = path, keep
        self._games: deque[tuple[str, bytes]] = deque(maxlen=keep)
        """(task id, line): parsed dictionaries would take several times the memory."""
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
        """Remove the results of one task; None: of all."""
        with self._lock:
            left = [] if task_id is None else [game for game in self._games if game[0] != task_id]
            self._games = deque(left, maxlen=self._keep)
            self._rewrite = True

    def load(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            while line := file.readline(_MAX_LINE):
                self._lines += 1
                self._rewrite = not line.endswith(b"\n")  # an incomplete line of a killed server: do not append to it
                try:
                    task_id = GameStatus.from_json(json.loads(line)).task_id
                except (ValueError, RecursionError):
                    continue
                if isinstance(task_id, str):
                    self._games.append((task_id, line))

    def write(self) -> None:
        """Append new lines, or rewrite the file once it is twice as long as needed."""
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
                log.warning("cannot write %s: %s", self._path, error)
