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

from ludus.gamecore.status import Status

log = logging.getLogger(__name__)

KEEP = 20_000
_MAX_RESULT = 2_000
"""Of a larger one only the winner is kept."""

_MAX_LINE = 100_000


class Tasks:
    """One line per game that is over. May be used from any thread; `load` and `write` may wait for the disk."""

    def __init__(self, path: Path, keep: int = KEEP) -> None:
        self._path, self._keep = path, keep
        self._games: deque[dict[str, Any]] = deque(maxlen=keep)
        self._unwritten: list[dict[str, Any]] = []
        self._lines = 0
        self._rewrite = False
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def ids(self) -> list[str]:
        return list(dict.fromkeys(game["task_id"] for game in self._all()))

    def of(self, task_id: str) -> list[dict[str, Any]]:
        return [game for game in self._all() if game["task_id"] == task_id]

    def add(self, status: Status) -> None:
        told = {**status.to_json(), "last_lines": status.last_lines[-1:]}
        if len(json.dumps(status.result)) > _MAX_RESULT:
            told["result"] = {"winner": (status.result or {}).get("winner")}
        with self._lock:
            self._games.append(told)
            self._unwritten.append(told)

    def remove(self, task_id: str | None = None) -> None:
        """Of one task; None: of all."""
        with self._lock:
            left = [] if task_id is None else [game for game in self._games if game["task_id"] != task_id]
            self._games = deque(left, maxlen=self._keep)
            self._rewrite = True

    def load(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            while line := file.readline(_MAX_LINE):
                self._lines += 1
                try:
                    told = json.loads(line)
                    Status.from_json(told)
                    str.encode(told["task_id"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # half a line, of a server that was killed
                self._games.append(told)

    def write(self) -> None:
        """What is new; all of it, if the file has become twice as long as it must be."""
        with self._writing:
            with self._lock:
                anew = self._rewrite or self._lines + len(self._unwritten) > 2 * self._keep
                games = list(self._games) if anew else self._unwritten
                self._unwritten, self._rewrite = [], False
            self._lines = len(games) + (0 if anew else self._lines)
            try:
                handle = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if anew else os.O_APPEND), 0o600
                )
                with open(handle, "wb") as file:
                    file.writelines(json.dumps(game).encode() + b"\n" for game in games)
            except OSError as error:
                log.warning("%s cannot be written: %s", self._path, error)

    def _all(self) -> list[dict[str, Any]]:
        with self._lock:
            return list(self._games)
