"""Prometheus metrics of a service: every worker writes a snapshot file, and any worker renders all of them.

A replaced worker starts from zero under the same label, as Prometheus expects of a counter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ludus.io.atomic_file import replace_json

log = logging.getLogger(__name__)

MEDIA = "text/plain; version=0.0.4; charset=utf-8"
FOLLOWER = "follower"
"""The snapshot of the process that started the workers."""

_DOWN_S = 5.0  # without a snapshot; they are written every second
_WARN_S = 60.0
_LARGEST_US = 25  # powers of two: 33 s
_LARGEST_BATCH = 10

_warned: dict[Path, float] = {}

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


def write_snapshot(directory: Path, name: str, numbers: Mapping[str, Any]) -> None:
    path = directory / f"{name}.metrics"
    try:
        replace_json(path, numbers)
    except OSError as error:  # stale metrics are better than a stopped worker
        if time.monotonic() >= _warned.get(path, 0.0) + _WARN_S:
            _warned[path] = time.monotonic()
            log.warning("cannot write %s: %s", path, error)


def read_snapshots(directory: Path) -> dict[str, dict[str, Any]]:
    """Read all snapshots, by the name of their writer."""
    found = {}
    for path in sorted(directory.glob("*.metrics")):
        with contextlib.suppress(OSError, ValueError):
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def render(found: Mapping[str, Mapping[str, Any]], now: float) -> bytes:
    """Render all snapshots. `now` is time.monotonic(); a worker without a recent snapshot is down."""
    follower = found.get(FOLLOWER, {})
    every = {name: numbers for name, numbers in found.items() if name != FOLLOWER}
    workers = {name: numbers for name, numbers in every.items() if now - numbers["at"] < _DOWN_S}
    up: list[Sample] = [({"worker": name}, float(name in workers)) for name in every]
    lines: list[str] = []
    for name, kind, help_text, samples in (
        ("ludus_up", "gauge", "Whether the worker serves.", up),
        *_worker_families(workers),
        *_version_families(workers),
        *_follower_families(follower),
    ):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    for name, help_text, rows in _histograms(workers):
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} histogram"]
        for labels, bounds, counts, total in rows:
            lines += _histogram(name, labels, bounds, counts, total)
    return ("\n".join(lines) + "\n").encode()


def _worker_families(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    def each(value: Any) -> list[Sample]:
        return [({"worker": name}, float(value(numbers))) for name, numbers in workers.items()]

    def each_of(values: Any, label: str) -> list[Sample]:
        return [
            ({"worker": name, label: key}, float(value))
            for name, numbers in workers.items()
            for key, value in sorted(values(numbers).items())
        ]

    yield "ludus_draining", "gauge", "Whether new sessions are refused.", each(lambda n: n["draining"])
    yield "ludus_connections", "gauge", "Open connections.", each(lambda n: n["connections"])
    yield "ludus_sessions_limit", "gauge", "Sessions that may be open.", each(lambda n: n["sessions_limit"])
    yield "ludus_sessions_started_total", "counter", "Sessions that began.", each(lambda n: n["stats"]["started"])
    ended = each_of(lambda n: _end_counts(n["stats"]), "by")
    yield "ludus_sessions_ended_total", "counter", "Sessions that ended, by what ended them.", ended
    refused = each_of(lambda n: n["refused"], "error")
    yield "ludus_refused_total", "counter", "Requests that were refused, by the word in the reply.", refused
    yield "ludus_repeated_total", "counter", "Retries answered from memory.", each(lambda n: n["stats"]["repeated"])
    segments, dropped = (each(lambda n, key=key: n["replay"][key]) for key in ("segments", "dropped"))
    yield "ludus_replay_segments_total", "counter", "Segments of live matches that were written down.", segments
    yield "ludus_replay_dropped_total", "counter", "Segments of live matches for which there was no room.", dropped
    yield "ludus_log_dropped_total", "counter", "Lines of the access log that were lost.", each(lambda n: n["log_dropped"])


def _end_counts(stats: Mapping[str, int]) -> dict[str, int]:
    words = {"game": "ended", "silent": "silent", "timeout": "timed_out", "failed": "failed", "shutdown": "shut_down"}
    return {word: stats[key] for word, key in words.items()}


def _versions(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    for worker, numbers in workers.items():
        for model, agent in numbers["agents"].items():
            for version, counted in agent["versions"].items():
                yield {"worker": worker, "model": model, "version": version}, counted


def _version_families(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    versions = list(_versions(workers))
    requests: list[Sample] = [({**labels, "kind": "tick"}, sum(counted["buckets"])) for labels, counted in versions]
    for worker, numbers in workers.items():
        stats = numbers["stats"]
        requests += [({"worker": worker, "kind": kind}, stats[key]) for kind, key in (("start", "started"), ("end", "ended"))]
    yield "ludus_requests_total", "counter", "Requests that were answered.", requests
    failed: list[Sample] = [
        ({**labels, "reason": reason}, counted[key])
        for labels, counted in versions
        for reason, key in (("actor_failed", "failed"), ("actor_timeout", "timed_out"))
    ]
    yield "ludus_errors_total", "counter", "Requests that failed and ended their session.", failed
    sessions: list[Sample] = [(labels, counted["sessions"]) for labels, counted in versions]
    yield "ludus_sessions", "gauge", "Open sessions.", sessions
    agents = [(worker, model, agent) for worker, n in workers.items() for model, agent in n["agents"].items()]
    moved: list[Sample] = [
        ({"worker": worker, "model": model, "how": how}, count)
        for worker, model, agent in agents
        for how, count in agent["moved"].items()
    ]
    yield "ludus_sessions_moved_total", "counter", "Sessions that went on with another version.", moved
    current: list[Sample] = [({"worker": worker, "model": model}, agent["current"]) for worker, model, agent in agents]
    yield "ludus_model_version", "gauge", "The version that new sessions get.", current
    live: list[Sample] = [({"worker": worker, "model": model}, len(agent["versions"])) for worker, model, agent in agents]
    yield "ludus_live_versions", "gauge", "Versions that are loaded.", live
    canaries: list[Sample] = [
        ({"worker": worker, "model": model}, agent["canary"]) for worker, model, agent in agents if agent["canary"] is not None
    ]
    yield "ludus_canary_version", "gauge", "The version that is on trial.", canaries


def _follower_families(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    for key, name, help_text in (
        ("refused", "ludus_update_refused_total", "New versions that were refused."),
        ("rolled_back", "ludus_canary_rollbacks_total", "Versions on trial that were taken back."),
        ("promoted", "ludus_canary_promoted_total", "Versions on trial that became current."),
    ):
        samples: list[Sample] = [({"model": model}, count) for model, count in numbers.get(key, {}).items()]
        yield name, "counter", help_text, samples
    restarts = numbers.get("restarts")
    yield (
        "ludus_worker_restarts_total",
        "counter",
        "Workers that died and were replaced.",
        [] if restarts is None else [({}, restarts)],
    )


Row = tuple[Labels, list[str], list[int], float]


def _histograms(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, list[Row]]]:
    versions = list(_versions(workers))
    us = [_number(2.0**k / 1e6) for k in range(_LARGEST_US + 1)]
    seconds: list[Row] = [(labels, us, counted["buckets"], counted["seconds"]) for labels, counted in versions]
    yield "ludus_request_seconds", "From the whole tick read to its reply written.", seconds
    rows = [str(2**k - 1) for k in range(_LARGEST_BATCH + 1)]
    batches: list[Row] = [
        (labels, rows, counted["batches"], float(counted["answered"])) for labels, counted in versions
    ]  # fmt: skip
    yield "ludus_batch_rows", "Ticks that were answered by one forward pass.", batches


def _histogram(name: str, labels: Labels, bounds: Sequence[str], counts: Sequence[int], total: float) -> list[str]:
    lines, seen = [], 0
    for k, bound in enumerate(bounds):
        seen += counts[k] if k < len(counts) else 0
        lines.append(f"{name}_bucket{_labels({**labels, 'le': bound})} {seen}")
    whole = sum(counts)
    lines.append(f"{name}_bucket{_labels({**labels, 'le': '+Inf'})} {whole}")
    return [*lines, f"{name}_sum{_labels(labels)} {_number(total)}", f"{name}_count{_labels(labels)} {whole}"]


def _labels(labels: Labels) -> str:
    inner = ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
