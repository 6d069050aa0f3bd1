"""Readers for tracking services: files of offline W&B runs, and MLflow through its client."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _HEAD = 7, 32 << 10, 7


def _frames(path: Path) -> Iterator[bytes]:
    """A log in blocks of 32 KiB; a record is one frame (1), or a first (2), middle ones (3) and a last one (4)."""
    data = path.read_bytes()
    assert data.startswith(b":W&B")
    at, parts = _HEADER, b""
    while at + _HEAD <= len(data):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length
        if kind in (1, 4):
            yield parts
            parts = b""


@dataclass
class WandbRun:
    """Content of one offline run."""

    id: str = ""
    project: str = ""
    group: str = ""
    name: str = ""
    exit_code: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def wandb_runs(directory: Path) -> list[WandbRun]:
    """The offline runs below a directory, oldest first."""
    return [_read(path) for path in sorted(directory.rglob("*.wandb"))]


def _read(path: Path) -> WandbRun:
    from wandb.proto import wandb_internal_pb2

    pb: Any = wandb_internal_pb2
    run = WandbRun()
    for data in _frames(path):
        record = pb.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.project, run.group = record.run.run_id, record.run.project, record.run.run_group
            run.name = record.run.display_name
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            run.history.append(items)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


@dataclass
class MlflowRun:
    """Metrics of one run: name → {step: value}."""

    id: str
    status: str
    params: dict[str, str]
    tags: dict[str, str]
    metrics: dict[str, dict[int, float]]
    artifacts: list[str]


def mlflow_runs(uri: str, experiment: str) -> list[MlflowRun]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    out = []
    for run in client.search_runs([found.experiment_id]):
        history = {name: {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} for name in run.data.metrics}
        files = [
            f.path
            for folder in client.list_artifacts(run.info.run_id)
            for f in client.list_artifacts(run.info.run_id, folder.path)
        ]
        out.append(MlflowRun(run.info.run_id, run.info.status, dict(run.data.params), dict(run.data.tags), history, files))
    return out
