"""Sinks of a run's numbers: the table for spreadsheets, and what TensorBoard itself makes of our events."""

from __future__ import annotations

import contextlib
import csv
import json
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.core.metrics import CsvSink, JsonLinesSink, Sink, TensorBoardSink, read_jsonl
from ludus.errors import StoreUnavailable
from tests.mounts import sshfs_mounts

# -- metrics.csv --------------------------------------------------------------------------------------------------------


class _Both:
    """metrics.jsonl and metrics.csv of one run, as a run writes them."""

    def __init__(self, directory: Path, incarnation: int = 1) -> None:
        self.lines, self.table = directory / "metrics.jsonl", directory / "metrics.csv"
        self._sinks: list[Sink] = [JsonLinesSink(self.lines, incarnation), CsvSink(self.table, self.lines, incarnation)]

    def write(self, **numbers: float) -> None:
        for sink in self._sinks:
            sink.write({name.replace("__", "/"): value for name, value in numbers.items()})

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _table(path: Path) -> list[dict[str, Any]]:
    """As a spreadsheet reads it: an empty cell is no number."""
    with path.open(newline="") as file:
        return [{name: json.loads(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def _numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_the_table_is_equal_to_the_lines_after_every_report(tmp_path: Path) -> None:
    both = _Both(tmp_path)
    reports: list[dict[str, float]] = [
        {"iterations": 1, "timesteps": 10, "loss": 1 / 3},
        {"iterations": 2, "timesteps": 20, "loss": float("nan")},
        {"iterations": 2, "timesteps": 20, "evaluation__return_mean": 7.5},
        {"iterations": 3, "timesteps": 30, "loss": 2e-9, "games__refused": 4},
        {"iterations": 4, "timesteps": 40, "loss": float("inf")},
        {"iterations": 4, "timesteps": 40, "evaluation__return_mean": 9},
        {"iterations": 5, "timesteps": 50, "loss": 2**40},
    ]
    for report in reports:
        both.write(**report)
        assert _table(both.table) == _numbers(read_jsonl(both.lines))
    both.close()
    rows = _table(both.table)
    assert [row["iterations"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[1]["evaluation/return_mean"] == 7.5
    assert rows[3]["evaluation/return_mean"] == 9, "an evaluation belongs to the row of its iteration"
    assert "loss" not in rows[1]
    assert not list(tmp_path.glob(".aside*"))


def test_a_resumed_table_drops_what_is_learned_again(tmp_path: Path) -> None:
    both = _Both(tmp_path)
    for i in range(1, 6):
        both.write(iterations=i, timesteps=10 * i, who=1)
    both.close()
    both.table.write_bytes(both.table.read_bytes()[:-5])  # killed in the middle of a row
    again = _Both(tmp_path, incarnation=2)
    again.write(iterations=4, timesteps=40, who=2)
    assert [(row["iterations"], row["who"]) for row in _table(again.table)] == [(1, 1), (2, 1), (3, 1), (4, 2)]
    assert _table(again.table) == _numbers(read_jsonl(again.lines))
    again.write(iterations=5, timesteps=50, who=2)
    again.close()
    assert _table(again.table) == _numbers(read_jsonl(again.lines))


def test_a_run_without_a_report_has_no_table(tmp_path: Path) -> None:
    both = _Both(tmp_path)
    both.close()
    assert not both.table.exists()


# -- TensorBoard --------------------------------------------------------------------------------------------------------


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = b"".join(b"\0" + b"\x7f" * (3 * width) for _ in range(height))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _reported(directory: Path, settings: Mapping[str, Any], final: float, status: str = "finished") -> None:
    directory.mkdir()
    plot = directory / "plots" / "curve.png"
    plot.parent.mkdir()
    plot.write_bytes(_png(6, 4))
    broken = plot.with_name("broken.png")
    broken.write_bytes(b"nothing")
    board = TensorBoardSink(directory, settings=settings, pictures=lambda: [broken, plot], status=lambda: status)
    for i in (1, 2):
        board.write({"timesteps": 100 * i, "episode_return_mean": final * i / 2})
    board.close()


def test_the_hparams_tab_of_tensorboard_shows_settings_and_last_numbers_of_a_sweep(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    for name, lr, final, status in (("a", 1e-3, 480.0, "finished"), ("b", 1e-4, 120.0, "failed")):
        _reported(tmp_path / name, {"lr": lr, "use_lstm": False, "hiddens": [64, 64], "core": None, "env": "X"}, final, status)
    multiplexer = EventMultiplexer(tensor_size_guidance={"tensors": 0})
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    asked = RequestContext()
    metadata = context.hparams_metadata(asked, "")
    found = context.experiment_from_metadata(asked, "", True, metadata, context.hparams_from_data_provider(asked, "", None))
    differs = {info.name: info.differs for info in found.hparam_infos}
    assert differs == {"lr": True, "use_lstm": False, "hiddens": False, "env": False}
    return_mean = api_pb2.MetricName(group="", tag="train/episode_return_mean")
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE],
        col_params=[api_pb2.ColParams(hparam="lr"), api_pb2.ColParams(metric=return_mean)],
    )
    groups = list_session_groups.Handler(asked, context, "", request).run().session_groups
    shown = {
        g.name: (g.hparams["lr"].number_value, g.hparams["hiddens"].string_value, g.sessions[0].status, g.metric_values[0].value)
        for g in groups
        if g.metric_values[0].name.tag == "train/episode_return_mean"
    }
    success, failure = api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE
    assert shown == {"a": (1e-3, "[64, 64]", success, 480.0), "b": (1e-4, "[64, 64]", failure, 120.0)}


def test_pictures_of_a_run_are_shown_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _reported(tmp_path / "a", {}, 1.0)
    events = EventAccumulator(str(tmp_path / "a"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    assert events.Tags()["images"] == ["plots/curve"]
    (image,) = events.Images("plots/curve")
    assert (image.width, image.height, image.step) == (6, 4, 200)
    assert image.encoded_image_string == _png(6, 4)


def test_tensorboard_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    board = TensorBoardSink(tmp_path, flush_s=3600.0)
    board.write({"timesteps": 1, "loss": 1.0})
    assert not list(tmp_path.iterdir()), "nothing heavy is imported while a short run trains"
    board.close()
    (events,) = tmp_path.iterdir()
    assert events.stat().st_size > 50
    assert events.stat().st_mtime <= time.time() + 1


def test_what_a_trainer_reported_after_another_took_over_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old, new = JsonLinesSink(path, 1), JsonLinesSink(path, 2)
    for sink, iteration, value in ((old, 1, 1.0), (old, 2, 1.0), (new, 2, 2.0), (old, 3, 1.0), (new, 3, 2.0), (old, 4, 1.0)):
        sink.write({"iterations": iteration, "value": value})
    for sink in (old, new):
        sink.close()
    assert [(row["iterations"], row["value"]) for row in read_jsonl(path)] == [(1, 1), (2, 2), (3, 2)]


def test_lines_wait_for_a_file_that_cannot_be_reached_and_are_written_when_it_is_back(tmp_path: Path) -> None:
    with sshfs_mounts(1, "reconnect", "sshfs_sync") as (mount,):  # else it says that it wrote what it did not
        sink = JsonLinesSink(mount.path / "metrics.jsonl")
        sink.write({"iterations": 1})
        away, number, deadline = 0, 1, time.monotonic() + 30.0
        while not read_jsonl(mount.path.parent / "share" / "metrics.jsonl"):  # the mount is behind
            assert time.monotonic() < deadline
        mount.cut()
        while number < 4 or (not away and time.monotonic() < deadline):
            number += 1
            try:
                sink.write({"iterations": number})
            except StoreUnavailable:
                away += 1
        while time.monotonic() < deadline:
            with contextlib.suppress(StoreUnavailable):
                sink.close()
                break
        assert away, "or the test shows nothing"
        rows = read_jsonl(mount.path.parent / "share" / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == list(range(1, number + 1))
