"""kill -9 of real trainings at random moments, many times: what was written before is always whole."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludus.experiments.runs import checkpoint
from ludus.storage.local import LocalStore
from tests.long.record import record
from tests.waiting import wait_until

KILLS = 50
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def start(run: Path, resume: bool) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "ludus.cli.main", "train", "--quiet"]
    if resume:
        words += ["--resume", str(run)]
    else:
        words += ["CartPole-v1", "--project", str(run.parent), "--trial", run.name, "--stop", "timesteps=1000000000"]
        words += ["--checkpoint-freq", "1", "--keep-checkpoints-num", "3", "--set", "evaluation_duration=0"]
    return subprocess.Popen(words)


def wait_for_first_report(run: Path, process: subprocess.Popen[bytes], before: int) -> None:
    """Until the training of this process has written something, so that the kill hits a run at work, and until there is a checkpoint."""
    metrics = run / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.stat().st_size > before and bool(checkpoint.names(LocalStore(run))),
        what="a report of the training",
        failed=lambda: process.poll() is not None and "the training ended by itself",
        poll_s=0.02,
    )


def test_fifty_kills_never_tear_a_checkpoint_or_turn_back_a_version(tmp_path: Path) -> None:
    run, rng = tmp_path / "project" / "trial", random.Random(0)
    versions, iterations, newest = [0], [0], ""
    for attempt in range(KILLS):
        size = (run / "metrics.jsonl").stat().st_size if attempt else 0
        process = start(run, resume=attempt > 0)
        try:
            wait_for_first_report(run, process, size)
            time.sleep(rng.uniform(0.0, 1.0))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=30)
        store = LocalStore(run)
        names = checkpoint.names(store)
        found = checkpoint.read(store, names[-1])  # raises if the newest is not whole
        versions.append(int(found.state["models"]["model"]["version"]))
        iterations.append(int(found.state["progress"]["iterations"]))
        if (
            names[-1] == newest
        ):  # killed after the report of an update and before its checkpoint: the next learner repeats the update
            assert (versions[-1], iterations[-1]) == (versions[-2], iterations[-2])
        else:
            assert versions[-1] > versions[-2]
            assert iterations[-1] > iterations[-2]
        newest = names[-1]
        reserved = json.loads(store.get("models/model/versions.json"))
        assert reserved["reserved"] >= versions[-1]
        assert reserved["incarnation"] == attempt + 1
    assert len(set(versions)) > KILLS / 2, "most of the trainings wrote a checkpoint before they were killed"
    record(
        "kill -9 of a real training",
        kills=KILLS,
        torn_checkpoints=0,
        iterations_reached=iterations[-1],
        last_version=versions[-1],
    )
