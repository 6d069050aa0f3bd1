"""kill -9 of trainings whose run is on S3, each taken up by a machine with an empty cache; a service follows the run."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from ludus.core.metrics import read_jsonl
from ludus.errors import LudusError
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.remote_runs import CACHE_DIR
from ludus.storage.base import Store, open_store
from tests.cli.programs import Program, program
from tests.long.record import record
from tests.s3 import Server
from tests.serving.releases import current
from tests.waiting import wait_until

KILLS = 8
SOON_S = 60.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def newest(store: Store) -> int:
    try:
        return int(checkpoint.newest(store).state["progress"]["iterations"])
    except LudusError:  # there is none yet
        return 0


def wait_for_checkpoint(store: Store, training: Program, above: int) -> None:
    wait_until(
        lambda: newest(store) > above,
        SOON_S,
        what="a new checkpoint",
        failed=lambda: training.process.poll() is not None and training.finish(),
        poll_s=0.1,
    )


def test_a_run_on_s3_survives_every_kill_and_a_service_follows_it(
    s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rng = s3_server.url(), random.Random(0)
    store = open_store(place)
    top, _, query = place.partition("?")
    project, trial = top.rpartition("/")[0] + f"?{query}", top.rpartition("/")[2]
    begin = ["train", "CartPole-v1", "--project", project, "--trial", trial, "--stop", "timesteps=1000000000", "--quiet"]
    begin += ["--checkpoint-freq", "2", "--keep-checkpoints-num", "3", "--set", "evaluation_duration=0"]
    reached: list[int] = [0]
    versions: list[float] = []
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache-0"))
    for kill in range(KILLS):
        monkeypatch.setenv(CACHE_DIR, str(tmp_path / f"cache-{kill}"))
        words = begin if kill == 0 else ["train", "--resume", place, "--quiet"]
        with program(*words, listens=False) as training:
            wait_for_checkpoint(store, training, reached[-1])
            time.sleep(rng.uniform(0.0, 2.0))
            training.process.kill()
            training.process.wait(SOON_S)
        reached.append(newest(store))
        shutil.rmtree(tmp_path / f"cache-{kill}")
    assert reached == sorted(set(reached)), "every one went on from where the last had come to"
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "served"))
    with program("serve", place, "--follow", "--port", "0", "--json", listens=False) as serving:
        port = int(json.loads(serving.wait_for('"port"'))["port"])
        versions.append(current(port))
        monkeypatch.setenv(CACHE_DIR, str(tmp_path / "last"))
        with program("train", "--resume", place, "--quiet", listens=False) as training:
            deadline = time.monotonic() + SOON_S
            while current(port) <= versions[0]:
                assert time.monotonic() < deadline, "the service has not followed within a minute"
                time.sleep(0.1)
            training.process.terminate()
            assert training.finish()[0] == 130
        versions.append(current(port))
    (tmp_path / "metrics.jsonl").write_bytes(store.get("metrics.jsonl"))
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    counted = [row["iterations"] for row in rows]
    assert counted == sorted(set(counted))
    assert rows[-1]["incarnation"] == KILLS + 1
    assert counted[-1] == newest(store)
    assert json.loads(store.get("meta.json"))["status"] == "interrupted"
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]
    record("kills of a run on S3", kills=KILLS, iterations=reached[-1], missing_reports=counted[-1] - len(counted))
