"""Prometheus metrics, checked with Prometheus' own parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as families

from ludus.gateway.latency_histogram import LatencyHistogram
from ludus.gateway.sessions import SessionStats
from ludus.serving import prometheus
from tests.serving.releases import samples, total

NOW = 1000.0
STATS = SessionStats(started=9, ended=4, silent=1, timed_out=2, failed=1, refused=5, repeated=3).to_json()


def version(meter: LatencyHistogram, sessions: int = 1, batches: list[int] | None = None, answered: int = 0) -> dict[str, Any]:
    return {
        "sessions": sessions,
        "batches": batches or [0] * 32,
        "batch_seconds": [0.0] * 32,
        "answered": answered,
        **meter.to_json(),
    }


def worker(**changes: Any) -> dict[str, Any]:
    """The snapshot of a worker after a JSON round trip."""
    numbers = {
        "at": NOW,
        "began": 0.0,
        "draining": False,
        "connections": 7,
        "sessions_limit": 20_000,
        "stats": STATS,
        "refused": {"seq": 2, "unauthorized": 5},
        "agents": {
            "default": {
                "current": 3,
                "canary": None,
                "moved": {"carried": 1, "reset": 0},
                "versions": {"3": version(LatencyHistogram())},
            }
        },
        "replay": {"segments": 11, "dropped": 1},
        "log_dropped": 0,
    }
    found: dict[str, Any] = json.loads(json.dumps({**numbers, **changes}))
    return found


def told(found: Mapping[str, Mapping[str, Any]], now: float = NOW) -> bytes:
    return prometheus.render(found, now)


def took(*seconds: float, failed: int = 0) -> LatencyHistogram:
    meter = LatencyHistogram()
    for one in seconds:
        meter.record(one)
    meter.failed = failed
    return meter


def test_an_idle_worker_has_all_metrics() -> None:
    found = samples(told({"0": worker()}))
    assert found['ludus_up{worker="0"}'] == 1
    assert found['ludus_connections{worker="0"}'] == 7
    assert found['ludus_sessions_ended_total{by="timeout",worker="0"}'] == 2
    assert found['ludus_refused_total{error="unauthorized",worker="0"}'] == 5
    assert found['ludus_model_version{model="default",worker="0"}'] == 3
    assert found['ludus_request_seconds_count{model="default",version="3",worker="0"}'] == 0
    assert found['ludus_request_seconds_sum{model="default",version="3",worker="0"}'] == 0
    assert total(found, "ludus_canary_version") == 0


def test_a_worker_without_recent_snapshots_is_down() -> None:
    found = samples(told({"0": worker(), "1": worker(at=NOW - 60)}))
    assert (found['ludus_up{worker="0"}'], found['ludus_up{worker="1"}']) == (1, 0)
    assert [name for name in found if 'worker="1"' in name] == ['ludus_up{worker="1"}']


def test_metrics_without_workers_are_valid() -> None:
    assert samples(told({})) == {}
    assert samples(told({prometheus.FOLLOWER: {"refused": {"default": 2}, "restarts": 1}})) == {
        'ludus_update_refused_total{model="default"}': 2,
        "ludus_worker_restarts_total{}": 1,
    }


def test_every_family_has_one_type_and_help_and_a_conventional_name() -> None:
    text = told({"0": worker(), "1": worker(), prometheus.FOLLOWER: {"restarts": 0, "promoted": {"default": 1}}})
    found = list(families(text.decode()))
    assert len({family.name for family in found}) == len(found)
    assert all(family.documentation for family in found)
    for family in found:
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples), family.name
        else:
            assert not family.name.endswith("_total")
    assert {family.type for family in found} == {"counter", "gauge", "histogram"}


@given(st.text(max_size=30))
def test_labels_of_any_text_come_through(name: str) -> None:
    data = worker(agents={name: {"current": 3, "canary": 4, "moved": {}, "versions": {"3": version(took(0.001))}}})
    found = [
        sample.labels["model"]
        for family in families(told({"0": data}).decode())
        for sample in family.samples
        if "model" in sample.labels
    ]
    assert found
    assert set(found) == {name}


@settings(max_examples=60)
@given(st.lists(st.floats(0, 100), max_size=60), st.lists(st.integers(1, 5000), max_size=60))
def test_histograms_count_what_was_measured(seconds: list[float], batches: list[int]) -> None:
    sizes = [0] * 32
    for size in batches:
        sizes[size.bit_length()] += 1
    counted = version(took(*seconds), batches=sizes, answered=sum(batches))
    data = worker(agents={"default": {"current": 3, "canary": None, "moved": {}, "versions": {"3": counted}}})
    found = {family.name: family for family in families(told({"0": data}).decode())}
    for name, values in (("ludus_request_seconds", seconds), ("ludus_batch_rows", batches)):
        buckets = [s for s in found[name].samples if s.name.endswith("_bucket")]
        bounds = [float(sample.labels["le"]) for sample in buckets]
        assert bounds == sorted(set(bounds))
        assert bounds[-1] == float("inf")
        for sample, bound in zip(buckets, bounds, strict=True):
            # Times are cut to whole microseconds before they are counted.
            assert sample.value == sum((int(v * 1e6) < bound * 1e6 - 0.5) if "seconds" in name else v <= bound for v in values)
        by_name = {s.name: s.value for s in found[name].samples}
        assert by_name[f"{name}_count"] == len(values) == buckets[-1].value
        assert by_name[f"{name}_sum"] == pytest.approx(sum(values))


def test_the_tick_counter_equals_the_histogram_count() -> None:
    versions = {"3": version(took(0.001, 0.002, failed=2)), "4": version(took(0.1))}
    data = worker(agents={"default": {"current": 4, "canary": 4, "moved": {}, "versions": versions}})
    found = samples(told({"0": data, "1": data}))
    assert total(found, "ludus_requests_total", kind="tick") == 6 == total(found, "ludus_request_seconds_count")
    assert total(found, "ludus_requests_total", kind="tick", version="3", worker="1") == 2
    assert total(found, "ludus_requests_total", kind="start") == 18
    assert total(found, "ludus_errors_total", version="3", reason="actor_failed") == 4
    assert total(found, "ludus_canary_version", worker="0") == 4
    assert total(found, "ludus_live_versions", worker="0") == 2


def test_an_unreadable_snapshot_does_not_hide_others(tmp_path: Path) -> None:
    prometheus.write_snapshot(tmp_path, "0", worker())
    prometheus.write_snapshot(tmp_path, "1", worker(connections=9))
    (tmp_path / "2.metrics").write_text('{"at": 1')
    (tmp_path / "3.metrics").mkdir()
    assert set(prometheus.read_snapshots(tmp_path)) == {"0", "1"}
    assert total(samples(told(prometheus.read_snapshots(tmp_path))), "ludus_connections") == 16
    prometheus.write_snapshot(tmp_path, "1", worker(connections=1))
    assert total(samples(told(prometheus.read_snapshots(tmp_path))), "ludus_connections") == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.metrics", "1.metrics", "2.metrics", "3.metrics"]


def test_a_snapshot_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prometheus.write_snapshot(tmp_path / "nowhere", "0", worker())
    assert "cannot write" in caplog.text
