"""Renaming, tagging and deleting runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ludus.cli.main import app
from ludus.errors import LudusError, NotFound, UsageError
from ludus.experiments.runs import run_edit, run_status
from ludus.experiments.runs.run_dir import Run, find_runs
from tests.experiments.test_compare import flat_run


def call(*words: str | Path, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=typed)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = flat_run(Path("runs/mine/PPO_x-abcde"), 1.0, seed=0)
    flat_run(Path("runs/mine/PPO_y-12345"), 1.0, seed=1)
    return made


def train_here(run: Path) -> None:
    """As a process that lives and writes its status would leave it."""
    Run.open(run).write_meta({"status": "running"})
    run_status.write(run, {**run_status.identity(), "state": "running", "written": time.time()})


def test_a_deleted_run_is_gone_and_its_neighbours_and_what_it_links_to_are_not(run: Path) -> None:
    Path("precious").mkdir()
    Path("precious/file").write_text("kept")
    (run / "videos").symlink_to(Path("precious").absolute())
    said = call("runs", "delete", "abcde", "--yes")
    assert said.exit_code == 0, said.output
    assert f"deleted: {run}" in said.output
    assert find_runs("runs") == [Path("runs/mine/PPO_y-12345")]
    assert sorted(path.name for path in Path("runs/mine").iterdir()) == ["PPO_y-12345"]
    assert Path("precious/file").read_text() == "kept"


@pytest.mark.parametrize("typed", ["n\n", "\n", ""])
def test_without_consent_nothing_is_deleted(run: Path, typed: str) -> None:
    said = call("runs", "delete", run, typed=typed)
    assert said.exit_code == 1
    assert "Delete this run?" in said.output
    assert run.exists()


def test_with_consent_several_are_deleted(run: Path) -> None:
    said = call("runs", "delete", run, "12345", typed="y\n")
    assert said.exit_code == 0, said.output
    assert find_runs("runs") == []


def test_a_run_that_is_being_trained_is_neither_deleted_nor_renamed(run: Path) -> None:
    train_here(run)
    for words in (["delete", "12345", str(run), "--yes"], ["rename", str(run), "better"]):
        said = call("runs", *words)
        assert isinstance(said.exception, UsageError)
        assert "is being trained: running since" in str(said.exception)
    assert len(find_runs("runs")) == 2, "nor those that were named before it"


def test_a_run_on_a_machine_that_cannot_be_seen_is_spared_as_long_as_it_may_live(run: Path) -> None:
    Run.open(run).write_meta({"status": "running"})
    written = time.time() - 60
    run_status.write(run, {"pid": 1, "host": "elsewhere", "state": "running", "written": written})
    with pytest.raises(UsageError, match="is being trained: silent"):
        run_edit.check_not_trained(run)
    run_edit.check_not_trained(run, now=written + 3600)


def test_nothing_but_a_run_is_deleted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other").mkdir()
    Path("project").mkdir()
    Path("project/config.yaml").write_text("mine: {env: CartPole-v1}")
    Path("link").symlink_to(run)
    for words, why in {
        ("other",): "is not the directory of a run",
        ("runs",): "is not the directory of a run",
        ("runs/mine",): "is not the directory of a run",
        ("nowhere",): "is not the directory of a run",
        ("project",): "no other file of a run",
        ("link",): "is a link to",
        ("mine",): "is an experiment with 2 runs",
        ("last/checkpoints",): "is not the directory of a run",
    }.items():
        said = call("runs", "delete", *words, "--yes")
        assert isinstance(said.exception, LudusError), words
        assert why in str(said.exception)
    monkeypatch.chdir(run)
    with pytest.raises(UsageError, match="holds the current directory"):
        run_edit.delete_run(Path.cwd())
    assert len(find_runs(Path.cwd().parent)) == 2


def test_a_renamed_run_is_found_by_its_new_name(run: Path) -> None:
    said = call("runs", "rename", "abcde", "best-so-far")
    assert said.exit_code == 0, said.output
    assert said.output == "renamed: runs/mine/best-so-far\n"
    assert call("runs", "show", "best-so-far").exit_code == 0
    for name in ("PPO_y-12345", "../away", ".hidden", "a/b", ""):
        with pytest.raises(UsageError):
            run_edit.rename_run(Path("runs/mine/best-so-far"), name)
    (Path("runs/mine") / "sweep.json").write_text("{}")
    with pytest.raises(UsageError, match="is a trial of the sweep"):
        run_edit.rename_run(Path("runs/mine/best-so-far"), "other")


def test_runs_are_selected_by_tags(run: Path) -> None:
    assert call("runs", "tag", "abcde", "good", "paper").output == f"{run}: good, paper\n"
    assert call("runs", "tag", "abcde", "good", "-r", "paper").output == f"{run}: good\n"
    assert call("runs", "tag", "12345").output == "runs/mine/PPO_y-12345: no tags\n"
    rows = json.loads(call("runs", "list", "--tag", "good", "--json").output)
    assert [row["run"] for row in rows] == [str(run)]
    assert "tags" in call("runs", "list").output.splitlines()[0]
    assert "tags         good" in call("runs", "show", "abcde").output
    for words in (["no tag!"], ["-r", "paper"]):
        assert isinstance(call("runs", "tag", "abcde", *words).exception, UsageError)
    assert isinstance(call("runs", "list", "--tag", "bad").exception, NotFound)
