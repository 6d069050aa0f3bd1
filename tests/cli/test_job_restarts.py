"""Restarts of a job's main command: each resumes the runs of the previous one (LUDUS_JOB_RUN)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import Run, find_runs
from ludus.process.job_env import RUN
from ludus.storage.local import LocalStore
from tests.cli.calling import Call
from tests.cli.programs import REPOSITORY

TRAIN: list[str | Path] = [
    "train",
    "CartPole-v1",
    "--num-envs",
    "8",
    "--set",
    "train_batch_size=256",
    "--set",
    "minibatch_size=64",
]
TRAIN += ["--set", "evaluation_duration=0", "--checkpoint-freq", "1"]
ENDLESS: list[str | Path] = ["--stop", "timesteps=1000000000"]


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A life begins: the job tells the command where its note is. Returns how to read it."""
    path = tmp_path / "job" / "note"

    def read() -> Any:
        monkeypatch.setenv(RUN, str(path))
        return json.loads(path.read_text()) if path.exists() else None

    read()
    return read


def interrupt(tmp_path: Path, *words: str | Path, ready: Callable[[], object], number: int = signal.SIGTERM) -> tuple[int, str]:
    """One life in a process of its own, ended by a signal as soon as something is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ludus.cli.main", *map(str, words)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {RUN: str(tmp_path / "job" / "note"), "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        end = time.monotonic() + 60
        while not ready():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait(30)
    return process.returncode, err


def checkpoints(runs: Path) -> list[str]:
    return [name for run in find_runs(runs) for name in checkpoint.names(LocalStore(run))]


def test_the_first_start_creates_and_notes_a_run_and_the_last_one_finds_it_finished(
    call: Call, note: Callable[[], Any], tmp_path: Path
) -> None:
    words = [*TRAIN, "--stop", "iterations=2", "--local-dir", tmp_path / "runs", "--json"]
    first = call(*words)
    assert first.code == 0, first.err
    assert RUN not in os.environ, "what the command starts is not the main command of the job"
    assert note() == {"default": first.json["run_dir"]}
    second = call(*words)
    assert second.code == 0, second.err
    assert f"{first.json['run_dir']} is finished" in second.err
    said_again = {key: second.json[key] for key in ("checkpoint", "stopped_by", "timesteps", "iterations")}
    assert said_again == {key: first.json[key] for key in said_again}
    assert len(find_runs(tmp_path / "runs")) == 1
    note()
    quiet = call(*words, "--quiet")
    assert (quiet.code, quiet.json["run_dir"]) == (0, first.json["run_dir"])


def test_a_restart_resumes_from_the_checkpoint_of_the_terminated_start(
    call: Call, note: Callable[[], Any], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    words = [*TRAIN, "--local-dir", runs]
    code, _ = interrupt(tmp_path, *words, *ENDLESS, ready=lambda: checkpoints(runs))
    assert code == 130
    (run,) = find_runs(runs)
    assert note() == {"default": str(run)}
    reached = int(checkpoint.newest(LocalStore(run)).state["progress"]["iterations"])
    code, result = interrupt(tmp_path, *words, *ENDLESS, ready=lambda: int(checkpoints(runs)[-1].partition("-")[0]) > reached)
    assert code == 130, result
    assert find_runs(runs) == [run]
    assert int(checkpoint.newest(LocalStore(run)).state["progress"]["iterations"]) > reached
    assert Run.open(run).meta()["status"] == "interrupted"


def test_a_restart_uses_the_directory_reserved_by_a_start_killed_before_its_run(
    call: Call, note: Callable[[], Any], tmp_path: Path
) -> None:
    place = tmp_path / "runs" / "default" / "PPO_CartPole-v1_never"
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "note").write_text(json.dumps({"default": str(place)}))
    result = call(*TRAIN, "--stop", "iterations=1", "--local-dir", tmp_path / "runs", "--json")
    assert result.code == 0, result.err
    assert f"{place}, named in {tmp_path / 'job' / 'note'}, holds no run: starting a new one" in result.err
    assert result.json["run_dir"] == str(place)
    assert note() == {"default": str(place)}


@pytest.mark.parametrize("foreign", ["{", '["a"]', '{"default": 3}'])
def test_a_note_that_is_damaged_is_ignored_with_a_word(call: Call, note: Callable[[], Any], tmp_path: Path, foreign: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "note").write_text(foreign)
    result = call(*TRAIN, "--stop", "iterations=1", "--local-dir", tmp_path / "runs", "--json")
    assert result.code == 0, result.err
    assert f"{tmp_path / 'job' / 'note'} is ignored: it is not the resume file of a job" in result.err
    assert note() == {"default": result.json["run_dir"]}


def test_a_run_of_another_experiment_is_not_gone_on_with(call: Call, note: Callable[[], Any], tmp_path: Path) -> None:
    few = ["--stop", "iterations=1", "--local-dir", tmp_path / "runs", "--json"]
    other = call(*TRAIN, *few).json["run_dir"]
    note()
    result = call(TRAIN[0], "tests.environments:make_count", *TRAIN[2:], *few)
    assert result.code == 0, result.err
    assert f"is ignored: {other} belongs to another experiment" in result.err
    assert note() == {"default": result.json["run_dir"]} != {"default": other}


def test_resume_skips_finished_experiments_and_continues_the_interrupted_one(
    call: Call, note: Callable[[], Any], tmp_path: Path
) -> None:
    settings = {"num_envs_per_worker": 8, "train_batch_size": 256, "minibatch_size": 64, "evaluation_duration": 0}
    one = {"env": "CartPole-v1", "checkpoint_freq": 1, "config": settings}
    file, runs = tmp_path / "several.yaml", tmp_path / "runs"
    file.write_text(yaml.safe_dump({"a": {**one, "stop": {"iterations": 1}}, "b": {**one, "stop": {"timesteps": 10**9}}}))
    words: list[str | Path] = ["train", "-f", file, "--local-dir", runs]
    code, _ = interrupt(tmp_path, *words, ready=lambda: checkpoints(runs / "b"))
    assert code == 130
    (a,), (b,) = find_runs(runs / "a"), find_runs(runs / "b")
    assert note() == {"a": str(a), "b": str(b)}
    reached = int(checkpoint.newest(LocalStore(b)).state["progress"]["iterations"])
    before = (a / "metrics.jsonl").read_bytes()
    code, result = interrupt(tmp_path, *words, ready=lambda: int(checkpoints(runs / "b")[-1].partition("-")[0]) > reached)
    assert code == 130, result
    assert (find_runs(runs / "a"), find_runs(runs / "b")) == ([a], [b])
    assert (a / "metrics.jsonl").read_bytes() == before


def test_a_job_with_resume_resumes_its_run_after_each_restart(call: Call, note: Callable[[], Any], tmp_path: Path) -> None:
    run = tmp_path / "project" / "run"
    assert call(*TRAIN, "--stop", "iterations=1", "--project", run.parent, "--trial", run.name).code == 0
    (tmp_path / "job" / "note").unlink()
    note()
    already = call("train", "--resume", run)
    assert already.code == 2
    assert "already reached its stop" in already.err
    assert note() is None, "nothing was begun"
    first = call("train", "--resume", run, "--stop", "iterations=3", "--json")
    assert (first.code, first.json["iterations"]) == (0, 3), first.err
    assert note() == {"run": str(run)}
    second = call("train", "--resume", run, "--stop", "iterations=3", "--json")
    assert (second.code, second.json["iterations"]) == (0, 3), second.err


def test_restarts_of_a_job_resume_the_same_newest_run(
    call: Call, note: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TRAIN, "--local-dir", tmp_path / "runs", "--json"]
    monkeypatch.delenv(RUN)
    run = call(*words, "--stop", "iterations=1").json["run_dir"]
    note()
    refused = call(*words, "--stop", "iterations=2", "--resume", "--set", "lr=0.1")
    assert refused.code == 2
    assert note() is None, "nothing was begun"
    first = call(*words, "--stop", "iterations=2", "--resume")
    assert (first.code, first.json["run_dir"], first.json["iterations"]) == (0, run, 2), first.err
    newer = call(*words, "--stop", "iterations=1").json["run_dir"]
    assert newer != run
    assert note() == {"default": run}
    second = call(*words, "--stop", "iterations=2", "--resume")
    assert (second.code, second.json["run_dir"], second.json["iterations"]) == (0, run, 2), second.err


def test_a_run_on_a_disk_that_is_full_of_notes_trains_all_the_same(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(RUN, str(tmp_path / "file" / "note"))
    result = call(*TRAIN, "--stop", "iterations=1", "--local-dir", tmp_path / "runs", "--json")
    assert result.code == 0, result.err
    assert "if this job is restarted, it will not resume" in result.err


def test_a_crash_in_a_library_of_the_environment_shows_the_line_that_called_it(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-c",
        "from ludus.cli.main import main; main()",
        "train",
        "tests.experiments.dying:Crashing",
        "--local-dir",
        str(tmp_path),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=REPOSITORY, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert re.search(r'dying\.py", line \d+ in step', done.stderr)
