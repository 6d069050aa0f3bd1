"""A job's main command, terminated at any moment, above all while it starts: it ends soon, leaves nothing, and its next life goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import Run, find_runs
from ludus.process.job_env import RUN
from ludus.storage.local import LocalStore
from tests.long.record import record

LIVES = 20
SOON_S = 10.0
"""What a life may take to its end: 5 s for a learner that is still starting, and what a busy machine adds."""

TRAIN = ["train", "CartPole-v1", "--num-envs", "4", "--set", "evaluation_duration=0", "--checkpoint-freq", "1"]
TRAIN += ["--stop", "timesteps=1000000000", "--quiet"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


class Job:
    """One command, and all its lives. Its processes are known by a variable of their environment."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.directory, self._words = directory, [*words, "--local-dir", str(directory / "runs")]
        self.runs, self.note = directory / "runs", directory / "note"
        self._mark = f"LUDUS_TEST_JOB={directory}"
        (directory / "tmp").mkdir()

    def live(self) -> subprocess.Popen[str]:
        name, _, value = self._mark.partition("=")
        return subprocess.Popen(
            [sys.executable, "-m", "ludus.cli.main", *self._words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {RUN: str(self.note), name: value, "TMPDIR": str(self.directory / "tmp")},
            start_new_session=True,
        )

    def end(self, life: subprocess.Popen[str], within_s: float) -> tuple[float, str]:
        """Terminate it: how long it took, and what it said."""
        began = time.monotonic()
        life.send_signal(signal.SIGTERM)
        try:
            said = life.communicate(timeout=within_s)[0]
        finally:
            if life.poll() is None:
                life.kill()
        return time.monotonic() - began, said

    def first_life(self) -> float:
        """How long it takes until there is a checkpoint; then it is terminated."""
        life, began = self.live(), time.monotonic()
        while not any(checkpoint.names(LocalStore(run)) for run in find_runs(self.runs)):
            assert life.poll() is None, life.communicate()[0]
            assert time.monotonic() < began + 120
            time.sleep(0.05)
        took_s = time.monotonic() - began
        _, said = self.end(life, 60.0)
        assert life.returncode == 130, said
        return took_s

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    environ = (path / "environ").read_bytes().split(b"\0")
                except OSError:  # it has ended, or is another user's
                    continue
                found += [int(path.name)] if self._mark.encode() in environ else []
        return found

    def gone_within_s(self, at_most_s: float) -> float:
        began = time.monotonic()
        while left := self.processes():
            assert time.monotonic() < began + at_most_s, f"processes are left: {left}"
            time.sleep(0.05)
        return time.monotonic() - began


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("in one process", []),
        ("with workers", ["--num-workers", "2"]),
        ("on a Ray of its own", ["--num-workers", "2", "--address", "local"]),
    ],
    ids=["alone", "workers", "ray"],
)
def test_a_training_that_is_terminated_at_any_moment_ends_soon_and_its_next_life_goes_on(
    tmp_path: Path, name: str, more: list[str]
) -> None:
    job, moments = Job(tmp_path, *TRAIN, *more), random.Random(0)
    starts_s = job.first_life()
    slowest, reached, went_on = 0.0, 0, 0
    for _ in range(LIVES):
        life = job.live()
        time.sleep(moments.uniform(0.1, 1.3 * starts_s))  # the moment is what is tried here
        assert life.poll() is None, life.communicate()[0]
        took_s, said = job.end(life, 60.0)
        slowest = max(slowest, took_s)
        assert took_s < SOON_S, said
        assert life.returncode in (130, -signal.SIGTERM), said  # the latter before Python has come to our first line
        assert "Traceback" not in said
        job.gone_within_s(5.0)
        assert list((tmp_path / "tmp").iterdir()) == []
        (run,) = find_runs(job.runs)  # no life begins one of its own
        assert json.loads(job.note.read_text()) == {"default": str(run)}
        progress = int(checkpoint.newest(LocalStore(run)).state["progress"]["iterations"])
        assert progress >= reached, "it went back"
        went_on += progress > reached
        reached = progress
    assert Run.open(run).meta()["id"]
    record(f"SIGTERM while a training starts, {name}", lives=LIVES, went_on=went_on, slowest_s=round(slowest, 2), leftovers=0)


def test_a_learner_that_waits_for_a_head_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    import socket

    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(16)
        job = Job(tmp_path, *TRAIN[:-1], "--num-workers", "2", "--address", f"127.0.0.1:{hole.getsockname()[1]}")
        life = job.live()
        assert life.stdout is not None
        while "joining" not in (line := life.stdout.readline()):
            assert line, "it ended by itself"
        took_s, _ = job.end(life, 60.0)
    assert (life.returncode, took_s < SOON_S) == (130, True)
    job.gone_within_s(5.0)
    assert find_runs(job.runs) == []


def test_a_sweep_that_is_terminated_goes_on_in_the_next_life_of_its_job(tmp_path: Path) -> None:
    words = [
        "tune",
        "CartPole-v1",
        "--num-samples",
        "2",
        "--stop",
        "iterations=60",
        "--checkpoint-freq",
        "2",
        "--ray-num-cpus",
        "2",
    ]
    job = Job(tmp_path, *words, "--set", "evaluation_duration=0")
    job.first_life()
    job.gone_within_s(20.0)
    assert json.loads(job.note.read_text()) == {"default": str(job.runs / "default")}
    last = job.live()
    said = last.communicate(timeout=240)[0]
    assert last.returncode == 0, said
    assert f"this job ran before: resuming {job.runs / 'default'}" in said
    state = json.loads((job.runs / "default" / "sweep.json").read_text())
    assert sorted(state["ended"].values()) == ["finished", "finished"]
