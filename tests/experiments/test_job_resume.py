"""The note of a job: what one life writes, the next one reads; whatever else is in the file says nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ludus.errors import UsageError
from ludus.experiments import runner
from ludus.experiments.resolve import resolve
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.job_resume import JobResumeFile
from ludus.experiments.runs.run_dir import Run
from ludus.process.job_env import RUN
from ludus.storage.local import LocalStore
from tests.experiments import small
from tests.experiments.small import same


def test_who_takes_the_note_leaves_no_trace_of_it_for_the_processes_that_it_starts(tmp_path: Path) -> None:
    environ = {RUN: str(tmp_path / "note"), "OTHER": "1"}
    note = JobResumeFile.take(environ)
    assert note is not None
    assert note.path == tmp_path / "note"
    assert environ == {"OTHER": "1"}
    assert JobResumeFile.take(environ) is None
    assert JobResumeFile.take({RUN: ""}) is None


def test_what_one_life_writes_the_next_one_reads(tmp_path: Path) -> None:
    path = tmp_path / "job" / "note"
    first = JobResumeFile.read(path)
    assert (first.location("a"), first.trouble) == (None, "")
    assert first.write("a", "/runs/a") == first.write("ü", "s3://bucket/runs/ü") == ""
    second = JobResumeFile.read(path)
    assert (second.location("a"), second.location("ü"), second.location("b")) == ("/runs/a", "s3://bucket/runs/ü", None)
    assert second.names("/runs/a")
    assert not second.names("/runs")
    assert second.write("a", "/elsewhere") == ""
    assert JobResumeFile.read(path).location("a") == "/elsewhere"
    assert json.loads(path.read_text()) == {"a": "/elsewhere", "ü": "s3://bucket/runs/ü"}
    assert os.listdir(path.parent) == ["note"], "nothing half written stays"


@pytest.mark.parametrize("empty", [b"", b"\n", b"{}"])
def test_an_empty_note_is_a_new_one(tmp_path: Path, empty: bytes) -> None:
    (tmp_path / "note").write_bytes(empty)
    note = JobResumeFile.read(tmp_path / "note")
    assert (note.location("a"), note.trouble) == (None, "")


@pytest.mark.parametrize(
    "foreign",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b"3",
        b'{"a": 1}',
        b'{"a": ""}',
        b'{"a": {"b": "c"}}',
        b'{"a": "/x"}' + b" " * (1 << 20),
        b"[" * 9999,
    ],
)
def test_what_is_no_note_says_nothing_and_is_replaced(tmp_path: Path, foreign: bytes) -> None:
    (tmp_path / "note").write_bytes(foreign)
    note = JobResumeFile.read(tmp_path / "note")
    assert note.location("a") is None
    assert note.trouble
    assert note.write("a", "/runs/a") == ""
    assert JobResumeFile.read(tmp_path / "note").location("a") == "/runs/a"


def test_a_note_that_cannot_be_written_is_a_sentence_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    note = JobResumeFile.read(tmp_path / "file" / "note")
    assert "Not a directory" in note.trouble
    assert str(tmp_path / "file") in note.write("a", "/runs/a")
    (tmp_path / "directory").mkdir()
    assert "directory" in JobResumeFile.read(tmp_path / "directory").trouble.lower()


def test_where_a_run_will_be_is_told_before_it_is_there_and_not_when_the_place_is_taken(tmp_path: Path) -> None:
    told: list[tuple[Path, bool]] = []

    def noted(directory: Path) -> None:
        told.append((directory, directory.exists()))

    result = runner.train(small.data(1), local_dir=tmp_path, on_directory=noted)
    assert told == [(result.run_dir, False)]
    with pytest.raises(UsageError, match="already holds a run"):
        runner.train(small.data(1), place=result.run_dir, on_directory=noted)
    assert len(told) == 1


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again_from_the_weights_it_was_given(tmp_path: Path) -> None:
    first = small.train(tmp_path / "first", 2)
    kept = checkpoint.newest(LocalStore(first.run_dir)).weights
    data = small.data(1, lr=0.0, top={"checkpoint_at_end": True})
    Run.create(tmp_path / "run", resolve(data).to_dict())
    result = runner.resume(tmp_path / "run", restore=first.run_dir, again=True)
    now = checkpoint.newest(LocalStore(result.run_dir)).weights
    assert same(now["model"], kept["model"]), "with a learning rate of 0 they stay what they were"


def test_a_run_that_came_to_its_end_and_could_not_say_so_is_finished_when_it_is_taken_up_again(tmp_path: Path) -> None:
    ended = small.train(tmp_path / "run", 2)
    run = Run.open(tmp_path / "run")
    run.write_meta({"status": "running"})
    rows = run.metrics_path.read_bytes()
    result = runner.resume(tmp_path / "run", again=True)
    assert (result.stopped_by, result.metrics["timesteps"]) == ("iterations", ended.metrics["timesteps"])
    assert Run.open(tmp_path / "run").meta()["status"] == "finished"
    assert run.metrics_path.read_bytes() == rows
    with pytest.raises(UsageError, match="already reached its stop"):
        runner.resume(tmp_path / "run")


def test_a_run_that_was_killed_between_its_configuration_and_its_metadata_is_whole_again(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", resolve(small.data(1, seed=7)).to_dict())
    (tmp_path / "run" / "meta.json").unlink()
    runner.resume(tmp_path / "run")
    meta = Run.open(tmp_path / "run").meta()
    assert (meta["status"], meta["seed"]) == ("finished", 7)
    assert meta["id"]
    assert meta["started"]
