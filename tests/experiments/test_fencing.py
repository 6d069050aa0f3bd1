"""Two trainers on one run: the one that was cut off writes nothing more, whatever it was doing when it was stopped."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from ludus.core.metrics import read_jsonl
from ludus.errors import StoreError
from ludus.experiments.runs import checkpoint
from ludus.models.weights.version_store import newest_claim
from ludus.storage.base import Store, open_store
from ludus.storage.local import LocalStore
from tests.mounts import sshfs_mounts
from tests.s3 import Server
from tests.waiting import wait_until

_BLOCK = 1000  # versions of the first owner are below it, those of the next one above
_WAIT_S = 90.0
pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@contextlib.contextmanager
def trainer(words: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """`ludus train …`, in a process group of its own, which is gone at the end."""
    command = [sys.executable, "-m", "ludus.cli.main", "train", "--quiet", *words]
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def wait_for(there: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    wait_until(there, _WAIT_S, what=log.read_text, failed=lambda: process.poll() is not None)


def new_run(where: list[str]) -> list[str]:
    small = ["train_batch_size=256", "num_sgd_iter=1", "evaluation_duration=0", "num_envs_per_worker=4"]
    words = ["CartPole-v1", *where, "--stop", "iterations=100000", "--checkpoint-freq", "1", "--keep-checkpoints-num", "3"]
    return [*words, *(word for key in small for word in ("--set", key))]


def fingerprints(store: Store) -> dict[str, str]:
    """Everything of a run that others read, by a checksum; what only people read (logs, curves) is left out."""
    names = [name for name in store.list("") if name not in ("logs",) and not name.startswith("events.")]
    names += [
        f"{folder}/{name}"
        for folder in ("checkpoints", "models/model", "models/model/incarnations")
        for name in store.list(folder)
    ]
    return {name: _fingerprint(store, name) for name in sorted(names)}


def _fingerprint(store: Store, name: str) -> str:
    if name.startswith("checkpoints/") and not name.endswith(".json"):
        return hashlib.sha256(repr(sorted(store.get_bundle(name).items())).encode()).hexdigest()
    if store.list(name):
        return "a directory"
    return hashlib.sha256(store.get(name)).hexdigest()


def _family(pid: int) -> list[int]:
    """A process and all that it and its children have started."""
    children = [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in _family(child))]


def iterations(store: Store) -> int:
    name = checkpoint.newest_name(store)
    return int(checkpoint.read(store, name).state["progress"]["iterations"]) if name else 0


def fence_one_off(store: Store, begin: list[str], place: str, tmp_path: Path, environment: dict[str, str] | None = None) -> str:
    """Stop one trainer in the middle, let another one take over and come to an end, wake the first; returns its last words."""
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    with trainer(begin, first_log, (environment or {}) | {"LUDUS_CACHE_DIR": str(tmp_path / "first")}) as first:
        wait_for(lambda: len(checkpoint.names(store)) >= 2, first, first_log)
        stopped = _family(first.pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        reached = int(checkpoint.names(store)[-1])
        resume = ["--resume", place, "--stop", f"iterations={reached + 8}"]
        with trainer(resume, second_log, (environment or {}) | {"LUDUS_CACHE_DIR": str(tmp_path / "second")}) as second:
            assert second.wait(_WAIT_S) == 0, second_log.read_text()
        assert iterations(store) == reached + 8
        before = fingerprints(store)
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        assert first.wait(_WAIT_S) == 1, first_log.read_text()
    after = fingerprints(store)
    assert {name: after.get(name) for name in before} == before, first_log.read_text()
    # A write that it was stopped in the middle of may still come to its end: weights under a number that nobody else will ever have.
    late = after.keys() - before.keys()
    assert len(late) <= 1, late
    assert all(name.startswith("models/") and int(PurePosixPath(name).stem) < _BLOCK for name in late), late
    newest = checkpoint.newest(store)
    assert newest.state["progress"]["iterations"] == reached + 8
    assert newest.state["models"]["model"]["incarnation"] == 2
    assert json.loads(store.get("meta.json"))["status"] == "finished"
    claim = newest_claim(store, "model")
    assert claim is not None
    assert claim.number == 2
    assert claim.content["pid"] not in stopped
    assert claim.content["from"] is not None
    return first_log.read_text()


def test_a_trainer_that_was_cut_off_writes_nothing_more_and_says_why_it_ends(tmp_path: Path) -> None:
    run = tmp_path / "project" / "trial"
    begin = new_run(["--project", str(run.parent), "--trial", run.name])
    said = fence_one_off(LocalStore(run), begin, str(run), tmp_path)
    assert "Another process has taken over" in said
    assert "incarnation 2, this is 1" in said
    assert "One run has one trainer" in said
    assert "Traceback" not in said
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["incarnation"] == 2


@pytest.mark.long
def test_on_s3_too_a_trainer_that_was_cut_off_writes_nothing_more(
    tmp_path: Path, s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**s3_server.environment(), "AWS_ENDPOINT_URL": s3_server.endpoint}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    url = s3_server.url().partition("?")[0]
    begin = new_run(["--project", url, "--trial", "trial"])
    said = fence_one_off(open_store(f"{url}/trial"), begin, f"{url}/trial", tmp_path, environment)
    assert "Another process has taken over" in said
    assert "Traceback" not in said


@pytest.mark.long
def test_on_a_shared_directory_too_seen_from_two_machines(tmp_path: Path) -> None:
    with sshfs_mounts(2) as (here, there):
        begin = new_run(["--project", str(here.path), "--trial", "trial"])
        share = LocalStore(here.path.parent / "share" / "trial")  # as it is on the server
        said = fence_one_off(share, begin, str(there.path / "trial"), tmp_path)
    assert "Another process has taken over" in said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_of_many_trainers_stopped_at_any_moment_and_woken_together_only_the_last_goes_on(tmp_path: Path) -> None:
    run, moments, store = tmp_path / "project" / "trial", random.Random(0), LocalStore(tmp_path / "project" / "trial")
    with contextlib.ExitStack() as stack:
        sleeping = []
        for number in range(1, 7):
            log = tmp_path / f"{number}.log"
            words = ["--resume", str(run)] if number > 1 else new_run(["--project", str(run.parent), "--trial", run.name])
            process = stack.enter_context(trainer(words, log))
            wait_for(functools.partial(_has_stored, store, number), process, log)
            time.sleep(moments.uniform(0.0, 0.3))
            if number < 6:
                os.killpg(process.pid, signal.SIGSTOP)
                sleeping.append(process)
        for other in sleeping:
            os.killpg(other.pid, signal.SIGCONT)
        assert [other.wait(_WAIT_S) for other in sleeping] == [1] * len(sleeping)
        reached = iterations(store)
        wait_for(lambda: iterations(store) > reached + 5, process, log)
        process.send_signal(signal.SIGINT)
        process.wait(_WAIT_S)
    assert json.loads(store.get("meta.json"))["status"] == "interrupted"
    newest = checkpoint.newest(store)
    assert newest.state["models"]["model"]["incarnation"] == 6
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == list(range(1, newest.state["progress"]["iterations"] + 1))
    assert [row["incarnation"] for row in rows] == sorted(row["incarnation"] for row in rows)
    assert len(checkpoint.names(store)) <= 4, "three, and the best"


def _has_stored(store: Store, incarnation: int) -> bool:
    name = checkpoint.newest_name(store)
    if name is None:
        return False
    try:
        state = checkpoint.read(store, name).state
    except StoreError:  # deleted meanwhile
        return False
    return bool(state["models"]["model"].get("incarnation") == incarnation)


@pytest.mark.long
def test_with_workers_too_when_all_processes_of_a_trainer_were_stopped(tmp_path: Path) -> None:
    """A driver does not start another learner, either: that would take the run back."""
    run = tmp_path / "project" / "trial"
    begin = new_run(["--project", str(run.parent), "--trial", run.name, "--set", "num_workers=1"])
    said = fence_one_off(LocalStore(run), begin, str(run), tmp_path)
    assert "Another process has taken over" in said


@pytest.mark.long
def test_of_several_that_take_a_run_up_at_once_one_brings_it_to_its_end(tmp_path: Path) -> None:
    run, store = tmp_path / "project" / "trial", LocalStore(tmp_path / "project" / "trial")
    first = [*new_run(["--project", str(run.parent), "--trial", run.name]), "--stop", "iterations=2"]
    with trainer(first, tmp_path / "first.log") as begun:
        assert begun.wait(_WAIT_S) == 0, (tmp_path / "first.log").read_text()
    with contextlib.ExitStack() as stack:
        logs = [tmp_path / f"{number}.log" for number in range(3)]
        words = ["--resume", str(run), "--stop", "iterations=40"]
        racing = [stack.enter_context(trainer(words, log)) for log in logs]
        codes = [process.wait(_WAIT_S) for process in racing]
    said = "\n".join(log.read_text() for log in logs)
    assert sorted(codes)[0] == 0, said
    assert codes.count(0) == 1, said
    assert said.count("Another process has taken over") + said.count("already reached its stop") >= 2, said
    assert checkpoint.newest(store).state["progress"]["iterations"] == 40
    assert json.loads(store.get("meta.json"))["status"] == "finished"
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == list(range(1, 41))
