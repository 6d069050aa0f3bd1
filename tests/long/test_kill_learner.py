"""kill -9 of the learner of a real training, many times: it goes on by itself, and what was written is always whole."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ludus.experiments.runs import checkpoint
from ludus.storage.local import LocalStore
from tests.cli.programs import Program, program
from tests.long.record import record
from tests.waiting import wait_until

KILLS = 20
LIMIT_S = 30.0
TIMESTEPS = 1_000_000
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def eventually(found: Callable[[], Any], training: Program, at_most_s: float) -> Any:
    return wait_until(
        found, at_most_s, what=lambda: "".join(training.lines["err"]), failed=lambda: training.process.poll() is not None
    )


def rows(run: Path) -> list[dict[str, Any]]:
    """Every line that was ever written, in order; the torn ones of killed processes are left out."""
    found = []
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines() if (run / "metrics.jsonl").exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def children(parent: int) -> dict[int, str]:
    """By their names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has just ended
            continue
        state, owner = text[text.rindex(")") + 2 :].split()[:2]
        if int(owner) == parent and state != "Z":
            found[int(path.parent.name)] = text[text.index("(") + 1 : text.rindex(")")]
    return found


def learner_of(training: Program) -> int:
    """The process below the supervisor's forkserver, before it runs anything of ours; 0 while there is none."""
    below = (children(server) for server in children(training.process.pid))
    return next((pid for processes in below for pid, name in processes.items() if name == "learner"), 0)


def running(run: Path, pid: int) -> bool:
    try:
        seen = json.loads((run / "status.json").read_text())
    except OSError:
        return False
    return bool(seen["state"] == "running" and seen["pid"] == pid)


def other_than(before: int, training: Program) -> int:
    pid = learner_of(training)
    return pid if pid != before else 0


def reported(run: Path, lines: int) -> bool:
    return len(rows(run)) > lines


def read_all(run: Path) -> int:
    """Read every checkpoint; raises if one is not whole."""
    store = LocalStore(run)
    names = checkpoint.names(store)
    for name in names:
        checkpoint.read(store, name)
    return len(names)


def test_twenty_kills_of_the_learner_tear_nothing_and_the_run_comes_to_its_end(tmp_path: Path) -> None:
    run, rng = tmp_path / "run", random.Random(0)
    words: list[str | Path] = ["train", "CartPole-v1", "--project", tmp_path, "--trial", "run", "--num-workers", "2"]
    words += ["--num-envs", "8", "--set", "train_batch_size=1024", "--set", "evaluation_duration=0", "--json"]
    words += ["--checkpoint-freq", "1", "--keep-checkpoints-num", "10", "--stop", f"timesteps={TIMESTEPS}"]
    words += ["--set", f"max_failures={KILLS}"]
    resumed_s, learned_s, read, early = list[float](), list[float](), 0, 0
    with program(*words, listens=False) as training:
        pid, lines = eventually(partial(learner_of, training), training, LIMIT_S), 0
        eventually(partial(running, run, pid), training, 2 * LIMIT_S)
        began = time.monotonic()
        for kill in range(KILLS):
            # Two thirds while it works, one third while it starts: before it has reported or stored anything.
            if kill % 3 != 2:
                eventually(partial(reported, run, lines), training, LIMIT_S)
                learned_s.append(time.monotonic() - began)
            early += len(rows(run)) == lines
            time.sleep(rng.uniform(0.0, 2.0))
            lines, began = len(rows(run)), time.monotonic()
            os.kill(pid, signal.SIGKILL)
            read += read_all(run)
            pid = eventually(partial(other_than, pid, training), training, LIMIT_S)
            if kill % 3 != 1:  # the next one is to be killed before it runs
                eventually(partial(running, run, pid), training, LIMIT_S)
                resumed_s.append(time.monotonic() - began)
        eventually(partial(reported, run, lines), training, LIMIT_S)
        learned_s.append(time.monotonic() - began)
        training.process.wait(900)
        code, out, err = training.finish()
    assert code == 0, out + err
    result = json.loads(out.splitlines()[-1])
    assert (result["stopped_by"], result["timesteps"] >= TIMESTEPS) == ("timesteps", True)
    versions = [row["learner/version"] for row in rows(run) if "learner/version" in row]
    assert versions == sorted(set(versions)), "versions only grow"
    incarnations = [row["incarnation"] for row in rows(run)]
    assert incarnations == sorted(incarnations)
    meta = json.loads((run / "meta.json").read_text())
    assert (meta["status"], meta["learner_restarts"]) == ("finished", KILLS)
    assert read_all(run) > 0
    assert max(learned_s) <= LIMIT_S
    record(
        "kill -9 of the learner, 2 workers",
        kills=KILLS,
        while_starting=early,
        torn_checkpoints=0,
        checkpoints_read=read,
        resume_s_mean=round(sum(resumed_s) / len(resumed_s), 2),
        resume_s_max=round(max(resumed_s), 2),
        first_update_s_mean=round(sum(learned_s) / len(learned_s), 2),
        first_update_s_max=round(max(learned_s), 2),
        last_version=int(versions[-1]),
    )
