"""Commands on runs in a store: arguments, output and files."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ludus.experiments.runs import run_status
from ludus.experiments.runs.remote_runs import CACHE_DIR
from ludus.storage.base import STORES
from tests.cli.calling import Call
from tests.experiments.boxes import AWAY, BOXES

TINY = (
    "--set",
    "num_envs_per_worker=8",
    "--set",
    "train_batch_size=256",
    "--set",
    "minibatch_size=64",
    "--set",
    "evaluation_duration=0",
)


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(STORES, "box", "tests.experiments.boxes:Box")
    monkeypatch.setenv(BOXES, str(tmp_path / "boxes"))
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "boxes").mkdir()
    return tmp_path / "boxes"


def test_a_run_on_a_store_is_trained_resumed_listed_shown_and_played(
    boxes: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("train", "CartPole-v1", "--local-dir", "box://shelf/runs?endpoint=http://x:1", *TINY, "--json")
    trained = call(*asked, "--stop", "iterations=2").json
    where = trained["run_dir"]
    assert where.startswith("box://shelf/runs/default/PPO_CartPole-v1_")
    assert where.endswith("?endpoint=http://x:1")
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "another machine"))
    newest = call(*asked, "--stop", "iterations=3", "--resume")
    assert newest.json["run_dir"] == where, "the newest of that place goes on"
    assert f"continuing {where}" in newest.err
    resumed = call("train", "--resume", where, "--stop", "iterations=4", "--json").json
    assert (resumed["run_dir"], resumed["iterations"]) == (where, 4)
    assert resumed["checkpoint"] == where.replace("?", "/checkpoints/000004?")
    (listed,) = call("runs", "list", "box://shelf?endpoint=http://x:1", "--json").json
    assert (listed["run"], listed["status"]) == (where, "finished")
    assert call("runs", "show", where, "--json").json["checkpoints"][-1] == "000004"
    assert call("status", where, "--json").json["run"] == where
    played = call("rollout", resumed["checkpoint"], "--episodes", "1", "--run", "PPO", "--json").json
    assert played["steps_file"].startswith(where.partition("?")[0] + "/rollouts/000004-")
    assert list((boxes / "shelf/runs").rglob("steps.npz"))
    assert not (tmp_path / "box:").exists(), "nobody took an address for a path"
    assert not (tmp_path / "runs").exists()


def test_a_new_run_begins_with_a_checkpoint_of_a_store(boxes: Path, call: Call, tmp_path: Path) -> None:
    words = ("train", "CartPole-v1", *TINY, "--stop", "iterations=1", "--json")
    first = call(*words, "--project", "box://shelf/project", "--trial", "one").json
    assert first["run_dir"] == "box://shelf/project/one"
    again = call(*words, "--project", "box://shelf/project", "--trial", "one")
    assert again.code == 2
    assert "box://shelf/project/one already holds a run" in again.err
    second = call(*words, "--local-dir", str(tmp_path / "here"), "--restore", "box://shelf/project/one/latest")
    assert second.code == 0
    assert second.json["run_dir"].startswith(str(tmp_path / "here"))


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "list", "box://shelf"),
        ("status", "box://shelf/a"),
        ("rollout", "box://shelf/a"),
        ("train", "--resume", "box://shelf/a"),
    ],
)
def test_a_store_that_cannot_be_reached_is_named(boxes: Path, call: Call, words: tuple[str, ...]) -> None:
    (boxes / AWAY).touch()
    result = call(*words)
    assert result.code == 1
    assert "box://shelf" in result.err
    assert "cannot be reached" in result.err
    assert "Traceback" not in result.err


def test_a_remote_run_is_polled_less_often_than_a_local_one(
    boxes: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    for where, place in ((boxes / "shelf/run", "box://shelf/run"), (tmp_path / "here", str(tmp_path / "here"))):
        where.mkdir(parents=True)
        (where / "config.yaml").write_text("default: {env: CartPole-v1}")
        (where / "status.json").write_text(json.dumps({**run_status.identity(), "written": time.time()}))

        def ends(pause_s: float, where: Path = where) -> None:
            waited.append(pause_s)
            (where / "meta.json").write_text('{"status": "finished"}')

        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", ends)
            assert call("status", place, "--json", "--watch").out.count('"state": "running"') == 1
    assert waited == [5.0, 1.0]


def test_a_sweep_on_a_store_is_refused(boxes: Path, call: Call) -> None:
    for command in ("train", "tune"):
        result = call(command, "CartPole-v1", "--num-samples", "2", "--local-dir", "box://shelf/sweeps")
        assert result.code == 2
        assert "it cannot be on an object store" in result.err
