"""Runs on a real S3 server: trained, taken up by a machine that has never heard of them, played, listed, served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ludus
from ludus.core.metrics import read_jsonl
from ludus.errors import StoreError
from ludus.experiments import runner
from ludus.experiments.runs import checkpoint, remote_runs, run_status
from ludus.experiments.runs.remote_runs import directory_of, display_path, store_of
from ludus.experiments.runs.run_dir import Run, find_runs
from ludus.serving.checkpoint_follower import CheckpointSource
from ludus.storage.s3 import S3Store
from ludus.storage.s3_url import S3Url
from tests.experiments import small
from tests.s3 import BUCKET, READER_ID, READER_SECRET, SECRET, Fault, Proxy, Server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_run_is_trained_taken_up_elsewhere_played_and_served(
    s3_url: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ludus.train("CartPole-v1", stop={"iterations": 2}, local_dir=s3_url, checkpoint_freq=1, **small.SETTINGS)
    where = first.place
    prefix, _, query = s3_url.partition("?")
    assert where.startswith(f"{prefix}/default/PPO_CartPole-v1_")
    assert where.endswith(f"?{query}")
    source = CheckpointSource(where)
    before = source.release().version
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "another machine"))
    second = ludus.resume(where, stop={"iterations": 4})
    assert second.place == where
    assert source.newest() == "000004"
    assert source.release().version > before
    store = store_of(second.run_dir)
    assert checkpoint.names(store) == ["000001", "000002", "000003", "000004"]
    (second.run_dir / "metrics.jsonl").write_bytes(store.get("metrics.jsonl"))
    rows = read_jsonl(second.run_dir / "metrics.jsonl")
    assert [(row["iterations"], row["incarnation"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "a third one"))
    (found,) = find_runs(s3_url)
    seen = run_status.read_status(found)
    assert (display_path(found), seen.state, seen.status["progress"]["iterations"]) == (where, "finished", 4)
    at = where.replace("?", "/checkpoints/000003?")
    assert len(ludus.rollout(at, episodes=2).returns) == 2
    assert small.same(ludus.load(where).policy.weights(), second.agent.policy.weights())
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET.encode() not in kept
    assert SECRET not in json.dumps(json.loads(store.get("meta.json")))


def test_a_server_that_takes_nothing_but_checkpoints_does_not_stop_a_training(
    s3_server: Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LUDUS_S3_RETRY_S", "0.2")
    monkeypatch.setenv("LUDUS_S3_RETRIES", "1")
    s3_proxy.on("PUT", Fault(status=503), within="/events.", times=1000)
    place = s3_server.url(endpoint=s3_proxy.endpoint)
    result = runner.train(small.data(2), place=place)
    assert result.stopped_by == "iterations"
    assert caplog.text.count("is retried") == 1
    assert "not uploaded: events.out.tfevents" in caplog.text
    straight = store_of(directory_of(place.replace(s3_proxy.endpoint, s3_server.endpoint)))
    assert checkpoint.newest(straight).state["progress"]["iterations"] == 2
    assert json.loads(straight.get("meta.json"))["status"] == "finished"
    assert straight.get("metrics.jsonl").count(b"\n") >= 2, "one that is refused does not keep the others back"


def test_a_look_at_a_run_leaves_its_metrics_where_they_are(s3_server: Server, s3_proxy: Proxy, cache: Path) -> None:
    place = s3_server.url(endpoint=s3_proxy.endpoint)
    store = S3Store(place)
    for name, data in (("config.yaml", b"a: {env: b}"), ("meta.json", b'{"id": "a"}'), ("metrics.jsonl", b'{"iterations": 7}\n')):
        store.put(name, data)
    store.put("status.json", b'{"progress": {"iterations": 8}}')
    assert run_status.read_status(place).status["progress"] == {"iterations": 8}
    assert s3_proxy.count("GET", "metrics.jsonl") == 0
    store.put("status.json", b"{}")
    assert run_status.read_status(place).status["progress"] == {"iterations": 7}


def test_unfinished_uploads_of_a_run_are_aborted_when_it_is_taken_up(s3_server: Server, cache: Path) -> None:
    place = s3_server.url()
    prefix = S3Url.parse(place).prefix
    S3Store(place).put("models/model/model.json", b"{}")
    for key in ("fleet/weights/00000001.safetensors", "models/model/7.safetensors", "metrics.jsonl"):
        assert s3_server.ask("POST", f"{BUCKET}/{prefix}/{key}", "uploads=")[0] == 200
    Run(directory_of(place)).sweep()
    assert b"<Upload>" not in s3_server.ask("GET", BUCKET, f"prefix={prefix}%2F&uploads=")[1]


def test_wrong_credentials_end_a_training_before_it_begins(s3_url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    with pytest.raises(StoreError, match="credentials are wrong") as refused:
        runner.train(small.data(1), place=s3_url)
    assert "hidden" not in str(refused.value)
    assert not list(cache.rglob("config.yaml"))


def test_who_may_only_read_looks_and_plays_and_is_told_what_stays_here(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained = runner.train(small.data(1), place=s3_url)
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "a guest"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    assert run_status.read_status(s3_url).state == "finished"
    assert small.same(ludus.load(s3_url).policy.weights(), trained.agent.policy.weights())
    film = directory_of(s3_url) / "film.mp4"
    film.write_bytes(b"of a rollout")
    assert remote_runs.upload(film) == str(film)
    assert f"{film} was not uploaded: Not allowed to write" in caplog.text
    with pytest.raises(StoreError, match="Not allowed to write"):
        ludus.resume(s3_url, stop={"iterations": 2})
