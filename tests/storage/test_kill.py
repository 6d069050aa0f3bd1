"""kill -9 at random moments: a checkpoint is complete or absent, and what was acknowledged is there.

The writer does what a training does to its store, without the training: it starts quickly and hardly does anything else, so
that nearly every kill falls into a write. (`make test-long` kills real trainings.)
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludus.storage.local import LocalStore

KILLS = 50
KEEP = 4

_WRITER = """
import hashlib, json, os, sys
from ludus.storage.local import LocalStore
assert "torch" not in sys.modules and "numpy" not in sys.modules
store, keep = LocalStore(sys.argv[1]), int(sys.argv[2])
store.sweep("checkpoints")
number = max([int(name) for name in store.list("checkpoints") if name.isdigit()], default=0)
while True:
    number += 1
    weights = os.urandom(40_000 + number % 7 * 10_000)
    state = {"iterations": number, "weights": hashlib.sha256(weights).hexdigest()}
    store.put_bundle(f"checkpoints/{number:06d}", {
        "model.safetensors": weights, "model.optimizer.safetensors": weights * 2, "state.json": json.dumps(state).encode(),
    })
    os.write(1, b"%d\\n" % number)
    store.put("checkpoints/best.json", json.dumps({"checkpoint": f"{number:06d}"}).encode())
    for old in [name for name in store.list("checkpoints") if name.isdigit()][:-keep]:
        store.delete(f"checkpoints/{old}")
"""


def _write_until_killed(root: Path, after_s: float) -> int:
    """Let a writer live for a moment after its first checkpoint; the last number that it acknowledged, or 0."""
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(root), str(KEEP)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        first = writer.stdout.readline()
        time.sleep(after_s)
        os.kill(writer.pid, signal.SIGKILL)
        lines = (first + writer.stdout.read()).split(b"\n")
        complaint = writer.stderr.read().decode()
    assert writer.returncode == -signal.SIGKILL, complaint
    return max((int(line) for line in lines[:-1]), default=0)  # the last line may be torn


def _check_loads(store: LocalStore, name: str) -> None:
    files = store.get_bundle(f"checkpoints/{name}")
    state = json.loads(files["state.json"])
    assert state["iterations"] == int(name)
    assert hashlib.sha256(files["model.safetensors"]).hexdigest() == state["weights"]
    assert files["model.optimizer.safetensors"] == files["model.safetensors"] * 2


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="Windows has no kill -9")
@pytest.mark.timeout(120)
def test_after_every_kill_the_newest_checkpoint_loads_and_numbers_never_go_back(tmp_path: Path) -> None:
    store, moments = LocalStore(tmp_path), random.Random(0)
    oldest = newest = interrupted = 0
    for _ in range(KILLS):
        acknowledged = _write_until_killed(tmp_path, moments.uniform(0, 0.1))
        names = [name for name in store.list("checkpoints") if name.isdigit()]
        assert int(names[-1]) >= max(newest + 1, acknowledged), "an acknowledged checkpoint is gone"
        assert int(names[0]) >= oldest, "what was deleted came back"
        for name in names:
            _check_loads(store, name)
        if "best.json" in store.list("checkpoints"):  # not if the first writer died before it
            assert json.loads(store.get("checkpoints/best.json"))["checkpoint"].isdigit()
        oldest, newest = int(names[0]), int(names[-1])
        interrupted += any(path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())
    assert interrupted > KILLS // 5, "hardly any kill fell into a write: the test shows nothing"
    assert store.sweep("checkpoints") <= 2
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]
