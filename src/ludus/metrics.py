"""Metrics: numbers with a step, and the places they go. Text for people goes through `logging`, never through here."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from ludus.errors import StoreFull

Numbers = Mapping[str, float]


class Sink(Protocol):
    """One report is one call: all numbers of one moment."""

    def write(self, numbers: Numbers) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: one line per report; a number that is not finite is written as null."""

    def __init__(self, path: Path, incarnation: int = 1) -> None:
        torn = _torn(path)
        with _written(path):
            self._file: IO[str] = path.open("a", encoding="utf-8")
        self._path, self._incarnation = path, incarnation
        if torn:
            self._file.write("\n")

    def write(self, numbers: Numbers) -> None:
        plain = {name: _plain(value) for name, value in numbers.items()}
        with _written(self._path):
            self._file.write(json.dumps(plain | {"incarnation": self._incarnation}) + "\n")
            self._file.flush()

    def close(self) -> None:
        with _written(self._path):
            self._file.close()


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """A full disk, once, as the error that says so."""
    try:
        yield
    except OSError as error:
        raise StoreFull(
            f"Cannot write {path}: {error.strerror}.", "Free some room; everything written before is intact."
        ) from error


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1 << 53 else float(f"{value:.7g}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reports in order of their iteration. After a resume, the lines of the later incarnation stand."""
    rows: list[dict[str, Any]] = []
    newest = 0
    if not path.exists():
        return rows
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                record = json.loads(text)
            except ValueError:
                continue  # the torn last line of a killed process
            if not isinstance(record, dict) or "iterations" not in record:
                continue
            incarnation = record.get("incarnation", 1)
            if incarnation > newest:  # what the killed process reported beyond its last checkpoint is learned again
                rows = [row for row in rows if row["iterations"] < record["iterations"]]
                newest = incarnation
            if rows and rows[-1]["iterations"] == record["iterations"]:
                rows[-1] |= record  # an evaluation is reported after its iteration
            else:
                rows.append(record)
    return rows


def _torn(path: Path) -> bool:
    """Whether a killed process left half a line at the end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class TensorBoard:
    """TensorBoard events, one scalar per number over timesteps. Buffered: opened and written only every few seconds."""

    def __init__(self, directory: Path, flush_s: float = 5.0) -> None:
        self._directory, self._flush_s = directory, flush_s
        self._waiting: list[tuple[float, Numbers]] = []
        self._writer: Any = None
        self._flushed = time.monotonic()

    def write(self, numbers: Numbers) -> None:
        self._waiting.append((time.time(), dict(numbers)))
        if time.monotonic() - self._flushed > self._flush_s:
            with _written(self._directory):
                self._flush()

    def close(self) -> None:
        with _written(self._directory):
            self._flush()
            if self._writer is not None:
                self._writer.close()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if not self._waiting:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._directory))
        for wall, numbers in self._waiting:
            values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in _scalars(numbers)]
            self._writer.add_event(Event(wall_time=wall, step=int(numbers.get("timesteps", 0)), summary=Summary(value=values)))
        self._writer.flush()
        self._waiting.clear()


def _scalars(numbers: Numbers) -> Iterator[tuple[str, float]]:
    for name, value in numbers.items():
        if math.isfinite(value):
            yield (name if "/" in name else f"train/{name}"), value
