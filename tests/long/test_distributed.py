"""`ludus train -dc` with everything real: Redis, S3, a learner and workers, to the end of CartPole; and again with each killed once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.experiments.runs import checkpoint
from ludus.launch.job import JobStatus
from ludus.launch.local import LocalOrchestrator
from ludus.storage.base import open_store
from tests import s3
from tests.long.record import record
from tests.redis_server import require_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SOLVED = 475
STEPS = re.compile(r"s\s+([\d,]+) steps")
LOST_AT = {"worker": 5_000, "memory": 12_000, "learner": 20_000}
"""After so many steps one process of the role is killed."""


def start(tmp_path: Path, name: str) -> subprocess.Popen[str]:
    server = s3.server()
    credentials = tmp_path / "credentials"
    credentials.write_text(f"[default]\naws_access_key_id = {s3.KEY_ID}\naws_secret_access_key = {s3.SECRET}\n")
    credentials.chmod(0o600)
    (tmp_path / "dist.ini").write_text(
        "[coach]\nimage = somebody/coach:latest\nmemory_backend = redispubsub\ndata_store = s3\n"
        f"s3_end_point = {server.endpoint}\ns3_bucket_name = {s3.BUCKET}\ns3_prefix = {tmp_path.name}\ns3_creds_file = {credentials}\n"
    )
    words = ["train", "-p", "CartPole_ClippedPPO", "-dc", "-e", name, "-n", "2", "-dcp", str(tmp_path / "dist.ini")]
    words += ["--stop", f"episode_return_mean={SOLVED}", "--stop", "timesteps=3000000", "--checkpoint-freq", "2"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    environment |= {
        "LUDUS_STATE_DIR": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "AWS_REGION": "us-east-1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "ludus.cli.main", *words], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )


def finished(tmp_path: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> JobStatus:
    """All that is said of one that went well."""
    assert "Stopped: target return reached. Mean return" in said
    for variable, value in s3.server().environment().items():
        monkeypatch.setenv(variable, value)
    store = open_store(s3.server().url(f"{tmp_path.name}/{name}"))
    assert checkpoint.names(store)
    (status,) = LocalOrchestrator(tmp_path / "state").list()
    assert (status.state, status.exit_code) == ("succeeded", 0)
    secrets = [s3.SECRET.encode()]
    for path in (tmp_path / "state").rglob("*"):
        assert not path.is_file() or not any(secret in path.read_bytes() for secret in secrets), path
    return status


def test_cartpole_is_solved_by_a_fleet_over_redis_and_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_redis()
    with start(tmp_path, "whole") as process:
        said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    status = finished(tmp_path, "whole", said, monkeypatch)
    assert [p.restarts for p in status.processes if p.role != "worker"] == [0, 0]


def test_and_again_with_each_role_killed_once_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_redis()
    orchestrator = LocalOrchestrator(tmp_path / "state")
    left, lines = dict(LOST_AT), []
    with start(tmp_path, "killed") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            steps = STEPS.search(line)
            due = [role for role, at in left.items() if steps and int(steps[1].replace(",", "")) >= at]
            if due:
                (status,) = orchestrator.list()
                pid = status.of(due[0])[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                del left[due[0]]
        process.wait(60)
    said = "".join(lines)
    assert process.returncode == 0, said
    assert not left, f"it was over before {list(left)} could be killed"
    status = finished(tmp_path, "killed", said, monkeypatch)
    assert [p.restarts for p in status.processes if p.role != "worker"] == [1, 1]
    assert status.of("worker")[0].restarts >= 1
    counts = [found[1] for found in map(STEPS.search, lines) if found]
    record("fleet-killed", steps=int(counts[-1].replace(",", "")), **{f"{role}_killed_at": at for role, at in LOST_AT.items()})
