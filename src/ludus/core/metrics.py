"""Sinks for metrics of a run: metrics.jsonl, metrics.csv and TensorBoard events."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from ludus.errors import StoreFull, StoreUnavailable, is_unavailable
from ludus.io.atomic_file import path_for_replace

Numbers = Mapping[str, float]
_MAX_PENDING = 10_000
"""Reports kept while the file cannot be written; then the oldest are dropped."""


class Sink(Protocol):
    """Receives reports; one call of `write` is one report."""

    def write(self, numbers: Numbers) -> None: ...
    def close(self) -> None: ...


class JsonLinesSink:
    """Writes `metrics.jsonl`: one line per report; non-finite numbers become null."""

    def __init__(self, path: Path, incarnation: int = 1) -> None:
        torn = _ends_in_partial_line(path)
        with _translate_errors(path):
            self._file: IO[str] | None = path.open("a", encoding="utf-8")
        self._path, self._incarnation = path, incarnation
        self._pending: deque[str] = deque(["\n"] if torn else [], maxlen=_MAX_PENDING)

    def write(self, numbers: Numbers) -> None:
        """Raises StoreUnavailable when the file cannot be reached; the line is written with the next report."""
        plain = {name: _json_number(value) for name, value in numbers.items()}
        self._pending.append(json.dumps(plain | {"incarnation": self._incarnation}) + "\n")
        self._flush()

    def close(self) -> None:
        if self._pending:
            self._flush()
        with _translate_errors(self._path):
            if self._file is not None:
                self._file.close()

    def _flush(self) -> None:
        try:
            with _translate_errors(self._path):
                if self._file is None:  # closed after an error: a handle opened before a mount was lost never recovers
                    torn = _ends_in_partial_line(self._path)
                    self._file = self._path.open("a", encoding="utf-8")
                    self._file.write("\n" if torn else "")
                self._file.write("".join(self._pending))
                self._file.flush()
        except StoreUnavailable:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
            raise
        self._pending.clear()


@contextlib.contextmanager
def _translate_errors(path: Path) -> Iterator[None]:
    """Raise OSErrors as StoreUnavailable (mount lost) or StoreFull."""
    try:
        yield
    except OSError as error:
        if is_unavailable(error):
            raise StoreUnavailable(f"Cannot write {path}: {error.strerror}.", "Is its file system still mounted?") from error
        raise StoreFull(
            f"Cannot write {path}: {error.strerror}.", "Free some space; everything written before is intact."
        ) from error


def _json_number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1 << 53 else float(f"{value:.7g}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the reports ordered by iteration. After a resume, lines of the later incarnation replace earlier ones."""
    rows: list[dict[str, Any]] = []
    newest = 0
    if not path.exists():
        return rows
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                record = json.loads(text)
            except ValueError:
                continue  # partial last line of a killed process
            if not isinstance(record, dict) or "iterations" not in record:
                continue
            incarnation = record.get("incarnation", 1)
            if incarnation < newest:  # from a fenced trainer that was still running
                continue
            if incarnation > newest:  # iterations after the last checkpoint of the killed process are repeated
                rows = [row for row in rows if row["iterations"] < record["iterations"]]
                newest = incarnation
            at = len(rows)  # evaluations are reported after their iteration; by evaluation workers, even after later ones
            while at and rows[at - 1]["iterations"] > record["iterations"]:
                at -= 1
            if at and rows[at - 1]["iterations"] == record["iterations"]:
                rows[at - 1] |= record
            else:
                rows.insert(at, record)
    return rows


def _ends_in_partial_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class CsvSink:
    """Writes `metrics.csv`: the content of `metrics.jsonl` with one row per iteration; missing numbers are empty cells.

    The file is recreated from `metrics.jsonl` when it is opened and when a new column appears, and replaced atomically.
    """

    def __init__(self, path: Path, lines: Path, incarnation: int = 1) -> None:
        """`lines`: metrics.jsonl of the same run; its sink must be written to before this one."""
        self._path, self._lines, self._incarnation = path, lines, incarnation
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}
        self._row_at = 0
        self._is_first = True
        self._file: IO[str] | None = None
        self._rewrite()

    def write(self, numbers: Numbers) -> None:
        row = {name: _json_number(value) for name, value in numbers.items()} | {"incarnation": self._incarnation}
        if not self._is_first and (row.get("iterations") or 0) < (self._last.get("iterations") or 0):
            self._rewrite()  # a late evaluation of an earlier iteration
            return
        same_iteration = not self._is_first and row.get("iterations") == self._last.get("iterations")
        self._last = self._last | row if same_iteration else row
        if self._is_first or not self._last.keys() <= set(self._columns):  # a resumed run repeats some iterations
            self._is_first = False
            self._rewrite()
            return
        with _translate_errors(self._path):
            assert self._file is not None
            if same_iteration:  # an evaluation is reported after its iteration
                self._file.seek(self._row_at)
                self._file.truncate()
            self._append(self._file, self._last)
            self._file.flush()

    def close(self) -> None:
        with _translate_errors(self._path):
            if self._file is not None:
                self._file.close()

    def _rewrite(self) -> None:
        rows = read_jsonl(self._lines)
        if not rows and not self._last:
            return
        if not rows or rows[-1].get("iterations") != self._last.get("iterations", rows[-1].get("iterations")):
            rows.append(self._last)  # a report without iterations, which read_jsonl skips
        self._last = rows[-1] | self._last
        rows[-1] = self._last
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        with _translate_errors(self._path):
            self.close()
            with path_for_replace(self._path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerow(self._columns)
                for row in rows:
                    self._append(file, row)
            self._file = self._path.open("r+", encoding="utf-8", newline="")
            self._file.seek(self._row_at)
            self._file.readline()

    def _append(self, file: IO[str], row: Mapping[str, Any]) -> None:
        self._row_at = file.tell()
        csv.writer(file).writerow([row.get(name) for name in self._columns])


class TensorBoardSink:
    """Writes TensorBoard events, one scalar per metric over timesteps, flushed every `flush_s` seconds.

    `settings` appear in the HPARAMS tab. `pictures` is called on close and returns image files (PNG, GIF) to add.
    """

    def __init__(
        self,
        directory: Path,
        flush_s: float = 5.0,
        settings: Mapping[str, Any] | None = None,
        pictures: Callable[[], Iterable[Path]] = tuple,
        status: Callable[[], str] = lambda: "finished",
    ) -> None:
        self._directory, self._flush_s = directory, flush_s
        self._settings, self._pictures, self._status = dict(settings or {}), pictures, status
        self._pending: list[tuple[float, Numbers]] = []
        self._writer: Any = None
        self._flushed = time.monotonic()
        self._step = 0

    def write(self, numbers: Numbers) -> None:
        self._pending.append((time.time(), dict(numbers)))
        if time.monotonic() - self._flushed > self._flush_s:
            with _translate_errors(self._directory):
                self._flush()

    def close(self) -> None:
        with _translate_errors(self._directory):
            self._flush()
            if self._writer is None:
                return
            for path in self._pictures():
                self.picture(path.read_bytes(), f"{path.parent.name}/{path.stem}", self._step)
            if self._settings:
                self._add(_session_end(self._status()))
            self._writer.close()

    def picture(self, data: bytes, tag: str, step: int) -> None:
        """Add a PNG or GIF; other formats are ignored."""
        if not data.startswith((b"\x89PNG", b"GIF8")) or len(data) < 24:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = _image_size(data)
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
        with _translate_errors(self._directory):
            self._open()
            self._step = step
            self._add(Summary(value=[Summary.Value(tag=tag, image=image)]))

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if not self._pending:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._open()
        for wall, numbers in self._pending:
            values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in _scalars(numbers)]
            self._step = int(numbers.get("timesteps", 0))
            self._add(Summary(value=values), wall)
        self._writer.flush()
        self._pending.clear()

    def _open(self) -> None:
        if self._writer is not None:
            return
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._directory))
        if self._settings:
            self._add(_session_start(self._settings, self._directory.name))

    def _add(self, summary: Any, wall: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time() if wall is None else wall, step=self._step, summary=summary))


def _image_size(data: bytes) -> tuple[int, int]:
    """Read (width, height) from the header of a PNG or GIF."""
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack(">II", data[16:24])
    else:
        width, height = struct.unpack("<HH", data[6:10])
    return int(width), int(height)


def _session_start(settings: Mapping[str, Any], name: str) -> Any:
    """Build the message of the HPARAMS tab with the settings of this run."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=time.time())
    for key, value in settings.items():
        if isinstance(value, bool):
            info.hparams[key].bool_value = value
        elif isinstance(value, (int, float)):
            info.hparams[key].number_value = value
        elif value is not None:
            info.hparams[key].string_value = value if isinstance(value, str) else json.dumps(value)
    return _hparams("_hparams_/session_start_info", plugin_data_pb2.HParamsPluginData(session_start_info=info))


def _session_end(status: str) -> Any:
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    how = api_pb2.STATUS_SUCCESS if status in ("finished", "interrupted") else api_pb2.STATUS_FAILURE
    info = plugin_data_pb2.SessionEndInfo(status=how, end_time_secs=time.time())
    return _hparams("_hparams_/session_end_info", plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _hparams(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))])


def _scalars(numbers: Numbers) -> Iterator[tuple[str, float]]:
    for name, value in numbers.items():
        if math.isfinite(value):
            yield (name if "/" in name else f"train/{name}"), value
