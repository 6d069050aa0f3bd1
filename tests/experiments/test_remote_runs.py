from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.core.metrics import Numbers, read_jsonl
from ludus.errors import Fenced, NotFound, StoreUnavailable, UsageError
from ludus.experiments import runner
from ludus.experiments.control.restart_policy import RestartPolicy
from ludus.experiments.runs import checkpoint, remote_runs, run_status
from ludus.experiments.runs import run_sync as carriers
from ludus.experiments.runs.remote_runs import directory_of, display_path, fetch, is_remote, store_of
from ludus.experiments.runs.run_dir import Run, find_runs
from ludus.experiments.runs.run_sync import RunSync
from ludus.serving.checkpoint_follower import CheckpointFollower, CheckpointSource, UpdateSettings, parse_sources
from ludus.storage.base import STORES
from ludus.storage.local import LocalStore
from ludus.tuning import sweep
from tests.experiments import small
from tests.experiments.boxes import AWAY, BOXES

PLACE = "box://shelf/project/run"


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the boxes really are; nothing is in the cache."""
    monkeypatch.setitem(STORES, "box", "tests.experiments.boxes:Box")
    monkeypatch.setenv(BOXES, str(tmp_path / "boxes"))
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "cache"))
    (tmp_path / "boxes").mkdir()
    return tmp_path / "boxes"


def train(place: str = PLACE, iterations: int = 3, **changes: Any) -> ludus.Result:
    return runner.train(small.data(iterations, **changes), place=place)


def another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that has never heard of any run."""
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / f"cache-{len(list(tmp_path.iterdir()))}"))


# -- places -------------------------------------------------------------------------------------------------------------


def test_a_path_is_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert directory_of("runs/a") == directory_of(Path("runs/a")) == Path("runs/a")
    assert directory_of("~/a") == tmp_path / "a"
    assert directory_of(f"file://{tmp_path}/a") == tmp_path / "a"
    assert not is_remote("runs/a")
    assert not is_remote(f"nfs://{tmp_path}")
    assert isinstance(store_of(tmp_path), LocalStore)
    assert display_path(Path("runs/a")) == "runs/a"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LUDUS_CACHE_DIR": "{}/own", "XDG_CACHE_HOME": "{}/xdg"}, "own"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/ludus"),
        ({}, "home/.cache/ludus"),
    ],
)
def test_a_run_on_a_store_is_worked_on_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("LUDUS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    directory = directory_of("s3://bucket/prefix/run/")
    assert directory.is_relative_to(tmp_path / expected)
    assert directory.is_dir()
    assert (tmp_path / expected).stat().st_mode & 0o077 == 0, "what is trained is nobody else's business"
    assert display_path(directory) == "s3://bucket/prefix/run"


def test_what_is_below_a_place_belongs_below_its_address(boxes: Path) -> None:
    top = directory_of("box://shelf/project?endpoint=http://here:1")
    below = top / "run" / "checkpoints" / "000120"
    assert display_path(below) == "box://shelf/project/run/checkpoints/000120?endpoint=http://here:1"
    assert is_remote(below)
    assert store_of(below).url == display_path(below)
    assert directory_of(display_path(below)) == below
    assert not is_remote(boxes)


def test_an_address_that_was_made_a_path_is_known_all_the_same(boxes: Path) -> None:
    assert directory_of(Path("box://shelf/project/run")) == directory_of(PLACE)
    assert display_path(directory_of(Path("box://shelf/run?endpoint=http://here:1"))) == "box://shelf/run?endpoint=http://here:1"
    assert is_remote(Path(PLACE))
    assert not is_remote(Path("c:/runs"))


def test_buckets_of_one_name_at_two_servers_are_two(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")  # the later, the stronger
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    found = {directory_of("s3://bucket/run"), directory_of("s3://bucket/run?endpoint=http://here:1")}
    for port, name in enumerate(variables, 2):
        monkeypatch.setenv(name, f"http://there:{port}")
        found.add(directory_of("s3://bucket/run"))
    assert len(found) == 5


@pytest.mark.parametrize(
    "address", ["s3://me:hidden@bucket/run", "s3://me:hidden/or@bucket/run", "s3://bucket/run?endpoint=http://me:hidden@host"]
)
def test_a_secret_in_an_address_is_refused_and_neither_repeated_nor_kept(boxes: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError) as refused:
        directory_of(address)
    assert "hidden" not in str(refused.value)
    assert not (tmp_path / "cache").exists()


def test_what_stands_behind_the_options_of_an_address_is_refused(boxes: Path) -> None:
    for address in ("s3://bucket/run?endpoint=http://here:1/best", Path("s3://bucket/run?endpoint=http://here:1") / "best"):
        with pytest.raises(UsageError, match="Options come last"):
            directory_of(address)


def test_only_the_cache_says_where_a_directory_belongs(boxes: Path, tmp_path: Path) -> None:
    (tmp_path / ".place").write_text("box://shelf/of-another-user")
    run = tmp_path / "project" / "run"
    run.mkdir(parents=True)
    assert not is_remote(run)
    assert isinstance(store_of(run), LocalStore)
    assert store_of(run).url == display_path(run) == str(run)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".place").write_text("box://shelf/of-another-user")
    assert not is_remote(tmp_path / "cache" / "runs" / "box")


def test_a_cache_may_be_elsewhere_than_it_seems(boxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv(remote_runs.CACHE_DIR, str(tmp_path / "link"))
    assert display_path(directory_of(PLACE)) == display_path(directory_of(PLACE).resolve()) == PLACE


def test_a_cache_of_another_user_is_not_believed(boxes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, user = directory_of(PLACE), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert not is_remote(directory)
    with pytest.raises(UsageError, match=f"does not belong to this user.*{remote_runs.CACHE_DIR}"):
        directory_of(PLACE)


@pytest.mark.parametrize("address", ["s3://", "s3:///run", "s3://bucket/../other", "s3://bucket/a//b", "s3://bucket/run#part"])
def test_what_cannot_be_an_address_is_refused(boxes: Path, address: str) -> None:
    with pytest.raises(UsageError):
        directory_of(address)


def test_a_class_of_the_users_own_is_a_kind_of_store(boxes: Path) -> None:
    place = "tests.experiments.boxes:Box://shelf/project/run"
    result = train(place, top={"checkpoint_freq": 1})
    assert result.place == place
    assert checkpoint.names(store_of(directory_of(place))) == ["000001", "000002", "000003"]
    assert (boxes / "shelf/project/run/config.yaml").exists()
    assert directory_of(Path(place)) == directory_of(place) == result.run_dir
    assert display_path(result.run_dir / "best") == f"{place}/best"


def test_an_unknown_kind_of_store_is_named(boxes: Path) -> None:
    with pytest.raises(UsageError, match="gopher"):
        train("gopher://bucket/run")


# -- a run --------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_on_its_store(boxes: Path) -> None:
    result = train(top={"checkpoint_freq": 1})
    there = boxes / "shelf/project/run"
    found = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    expected = {"config.yaml", "meta.json", "metrics.jsonl", "status.json", "logs/learner/train.log", "checkpoints/best.json"}
    assert expected <= found
    assert any(name.startswith("events.") for name in found)
    assert not any(".place" in name or "aside" in name for name in found)
    assert [row["iterations"] for row in read_jsonl(there / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((there / "meta.json").read_bytes())["status"] == "finished"
    assert json.loads((there / "status.json").read_bytes())["state"] == "finished"
    assert "finished" in (there / "logs/learner/train.log").read_text(), "also what was said last"
    assert result.place == result.to_json()["run_dir"] == PLACE
    assert result.to_json()["checkpoint"] == f"{PLACE}/checkpoints/000003"
    assert not (result.run_dir / "checkpoints").exists(), "checkpoints are on the store alone"


def test_a_machine_that_knows_nothing_of_a_run_takes_it_up(boxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()
    another_machine(monkeypatch, tmp_path)
    second = ludus.resume(PLACE, stop={"iterations": 5})
    assert second.run_dir != first.run_dir
    there = boxes / "shelf/project/run"
    rows = read_jsonl(there / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["incarnation"] for row in rows] == [1, 1, 1, 2, 2]
    assert (there / "logs/learner/train.log").read_text().count("finished") == 2, "the log goes on"
    assert checkpoint.newest(store_of(second.run_dir)).state["progress"]["iterations"] == 5


def test_the_same_run_here_and_on_a_store_learns_the_same(boxes: Path, tmp_path: Path) -> None:
    there, here = train(), small.train(tmp_path / "project" / "run")
    one, other = checkpoint.newest(store_of(there.run_dir)), checkpoint.newest(store_of(here.run_dir))
    assert small.same(one.weights["model"], other.weights["model"])


def test_a_run_is_found_by_all_of_its_addresses(boxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train(top={"checkpoint_freq": 1})
    expected = {name: checkpoint.read(store_of(trained.run_dir), name) for name in ("000001", "000003")}
    best = checkpoint.best_name(store_of(trained.run_dir))
    assert trained.checkpoint is not None
    assert checkpoint.locate(trained.checkpoint) == (trained.run_dir, "000003")
    another_machine(monkeypatch, tmp_path)
    for where, name in (
        (PLACE, "000003"),
        (f"{PLACE}/latest", "000003"),
        (f"{PLACE}/best", best),
        (f"{PLACE}/checkpoints", "000003"),
        (f"{PLACE}/checkpoints/000001", "000001"),
    ):
        assert checkpoint.locate(where)[1] == name
    agent = ludus.load(f"{PLACE}/checkpoints/000001")
    assert small.same(agent.policy.weights(), expected["000001"].policy("model").weights())
    assert len(ludus.rollout(PLACE, episodes=2).returns) == 2
    assert not list(boxes.rglob("*.weights")), "a copy for processes that play stays here"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("box://shelf/nothing", "box://shelf/nothing is not the directory of a run"),
        ("box://shelf/nothing/best", "box://shelf/nothing is not the directory of a run"),
        (f"{PLACE}/checkpoints/000009", "000009"),
    ],
)
def test_what_is_not_there_is_said_with_its_address(boxes: Path, where: str, said: str) -> None:
    LocalStore(boxes / "shelf/project/run").put("config.yaml", b"default: {}")
    with pytest.raises(NotFound, match=said):
        ludus.load(where)
    with pytest.raises(NotFound):
        ludus.resume(where)


def test_a_place_that_holds_a_run_is_not_begun_anew(boxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(iterations=1)
    another_machine(monkeypatch, tmp_path)
    with pytest.raises(UsageError, match=f"{PLACE} already holds a run. Continue it with --resume {PLACE}"):
        train()


def test_of_two_that_begin_a_run_in_one_place_one_does(boxes: Path) -> None:
    LocalStore(boxes / "shelf/project/run").put("config.yaml", b"default: {}")
    directory = directory_of(PLACE)
    quicker = store_of(directory).get
    with pytest.raises(UsageError, match="already holds a run"):
        Run.create(directory, {"default": {"env": "CartPole-v1"}})
    assert quicker("config.yaml") == b"default: {}"


def test_runs_of_a_store_are_found_oldest_first(boxes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, started in (("b", "2026-01-01"), ("a", "2026-01-03"), ("deep/c", "2026-01-02")):
        store = LocalStore(boxes / "shelf/project" / name)
        store.put("config.yaml", b"default: {env: CartPole-v1}")
        store.put("meta.json", json.dumps({"started": started, "status": "finished", "ended": started}).encode())
    LocalStore(boxes / "shelf").put("elsewhere/config.yaml", b"default: {env: CartPole-v1}")
    found = find_runs("box://shelf/project")
    assert [display_path(run) for run in found] == [f"box://shelf/project/{name}" for name in ("b", "deep/c", "a")]
    assert [run_status.read_status(run).state for run in found] == ["finished"] * 3
    assert find_runs("box://shelf/none") == []


def test_a_sweep_on_a_store_is_refused_with_the_reason(boxes: Path) -> None:
    with pytest.raises(UsageError, match="cannot be on an object store"):
        ludus.tune(config={"env": "CartPole-v1"}, num_samples=2, local_dir="box://shelf/sweeps")
    with pytest.raises(UsageError, match="cannot be on an object store"):
        sweep.open_sweep(directory_of("box://shelf/sweeps/default"))


# -- what is in the cache -----------------------------------------------------------------------------------------------


def put(boxes: Path, **files: bytes) -> LocalStore:
    store = LocalStore(boxes / "shelf/project/run")
    for name, data in files.items():
        store.put(name.replace("_", "."), data)
    return store


@pytest.mark.parametrize(
    ("here", "there", "kept"),
    [
        (b"", b"1\n2\n", b"1\n2\n"),
        (b"1\n", b"1\n2\n", b"1\n2\n"),
        (b"1\n2\n3\n", b"1\n2\n", b"1\n2\n3\n"),
        (b"1\n2\n3\n4\n", b"1\n2\n9\n", b"1\n2\n9\n"),
    ],
    ids=["absent", "shorter", "longer", "of another history"],
)
def test_the_store_is_right_but_for_lines_that_could_not_be_carried(boxes: Path, here: bytes, there: bytes, kept: bytes) -> None:
    put(boxes, config_yaml=b"new", meta_json=b'{"id": "a"}', metrics_jsonl=there)
    directory = directory_of(PLACE)
    LocalStore(directory).put("config.yaml", b"old")
    LocalStore(directory).put("meta.json", b'{"id": "a", "status": "old"}')
    if here:
        LocalStore(directory).put("metrics.jsonl", here)
    fetch(directory)
    assert (directory / "config.yaml").read_bytes() == b"new"
    assert (directory / "meta.json").read_bytes() == b'{"id": "a"}'
    assert (directory / "metrics.jsonl").read_bytes() == kept


def test_what_could_never_be_carried_is_kept_when_the_run_is_looked_at(boxes: Path) -> None:
    put(boxes, config_yaml=b"new", meta_json=b'{"id": "a"}')
    local = LocalStore(directory_of(PLACE))
    names = ("metrics.jsonl", "metrics.csv", "logs/learner/train.log", "status.json")
    for name in names:
        local.put(name, b"{}\n")
    fetch(directory_of(PLACE), logs=True)
    assert [local.get(name) for name in names] == [b"{}\n"] * len(names)


def test_a_store_that_has_no_run_for_a_while_does_not_cost_what_only_is_here(boxes: Path) -> None:
    def there(run: str | None) -> None:
        store = put(boxes, config_yaml=b"new", meta_json=json.dumps({"id": run}).encode())
        for name in ("config.yaml", "meta.json") if run is None else ():
            store.delete(name)
        fetch(directory)

    directory = directory_of(PLACE)
    there("a")
    LocalStore(directory).put("metrics.jsonl", b"1\n")
    there(None)
    assert not (directory / "config.yaml").exists()
    there("a")
    assert (directory / "metrics.jsonl").read_bytes() == b"1\n"
    there(None)
    there("another")
    assert not (directory / "metrics.jsonl").exists(), "that was of the one before"


def test_what_is_left_of_another_run_of_that_name_is_forgotten(boxes: Path) -> None:
    train(iterations=2)
    shutil.rmtree(boxes / "shelf/project/run")
    (boxes / "shelf/project/run").mkdir()
    with pytest.raises(NotFound):
        Run.open(directory_of(PLACE))
    again = train(iterations=1)
    rows = read_jsonl(boxes / "shelf/project/run/metrics.jsonl")
    assert [row["iterations"] for row in rows] == [1]
    put(boxes, meta_json=b'{"id": "of a third one"}')
    fetch(again.run_dir)
    assert not list(again.run_dir.glob("events.*"))


def test_what_another_process_is_writing_here_is_left_to_it(boxes: Path) -> None:
    put(boxes, config_yaml=b"new", metrics_jsonl=b"of long ago\n", status_json=b"{}")
    directory = directory_of(PLACE)
    LocalStore(directory).put("metrics.jsonl", b"1\n2\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            LocalStore(directory).put(remote_runs.SYNC_OWNER_FILE, json.dumps(run_status.identity(other.pid)).encode())
            fetch(directory)
            assert (directory / "config.yaml").read_bytes() == b"new"
            assert (directory / "metrics.jsonl").read_bytes() == b"1\n2\n"
        finally:
            other.communicate(b"\n")
    fetch(directory)
    assert (directory / "metrics.jsonl").read_bytes() == b"of long ago\n"


def test_weights_for_other_processes_are_files_that_last_as_long_as_they_are_of_use(boxes: Path) -> None:
    directory = directory_of(PLACE)
    one = remote_runs.write_cached_weights(directory, b"weights")
    assert remote_runs.write_cached_weights(directory, b"weights") == one
    os.utime(one, (0, 0))
    other = remote_runs.write_cached_weights(directory, b"other weights")
    assert other.read_bytes() == b"other weights"
    assert not one.exists()


# -- the sync --------------------------------------------------------------------------------------------------------


class Elsewhere:
    """The directory of a run, and the place where it belongs."""

    def __init__(self, boxes: Path) -> None:
        self.here, self.there, self._away = directory_of(PLACE), boxes / "shelf/project/run", boxes / AWAY

    def write(self, text: str, name: str = "metrics.jsonl") -> None:
        with (self.here / name).open("a") as file:
            file.write(text)

    def away(self, away: bool) -> None:
        self._away.touch() if away else self._away.unlink()


@pytest.fixture
def elsewhere(boxes: Path) -> Elsewhere:
    return Elsewhere(boxes)


def arrives(sync: RunSync, holds: Callable[[], bool]) -> bool:
    """Waits for the sync's own thread."""
    for _ in range(1000):
        if holds():
            return True
        sync.request()
        threading.Event().wait(0.01)
    return False


def test_what_changes_is_carried_and_what_does_not_is_not(elsewhere: Elsewhere) -> None:
    elsewhere.write("1\n")
    sync = RunSync(elsewhere.here)
    assert sync.upload_now()
    assert (elsewhere.there / "metrics.jsonl").read_text() == "1\n"
    sync.upload_now()
    assert sync.uploads == 1
    elsewhere.write("2\n3")
    assert sync.pending() == ["metrics.jsonl"]
    sync.upload_now()
    assert (elsewhere.there / "metrics.jsonl").read_text() == "1\n2\n", "whole lines: another process may go on with them"
    elsewhere.write("{}", "notes.txt")
    elsewhere.write("{}", ".hidden")
    sync.upload_now()
    assert sorted(path.name for path in elsewhere.there.iterdir()) == ["metrics.jsonl"]


def test_a_thread_carries_and_the_last_word_is_carried_too(elsewhere: Elsewhere) -> None:
    name: list[str | None] = [None]
    with RunSync(elsewhere.here, mark=lambda: name[0], every_s=0.01) as sync:
        elsewhere.write("1\n")
        assert arrives(sync, (elsewhere.there / "metrics.jsonl").exists)
        elsewhere.write("2\n")
    assert (elsewhere.there / "metrics.jsonl").read_text() == "1\n2\n"
    assert not sync.pending()


def test_a_store_that_is_away_is_tried_again_and_stops_nobody(elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere.away(True)
    with caplog.at_level(logging.INFO), RunSync(elsewhere.here, every_s=0.01) as sync:
        elsewhere.write("1\n")
        assert arrives(sync, lambda: sync.failures >= 2)
        assert "cannot be reached" in sync.last_error
        assert sync.stats() == {"store": {"uploads": 0, "failures": sync.failures, "last_error": sync.last_error}}
        elsewhere.away(False)
        assert arrives(sync, lambda: sync.uploads == 1)
    assert (elsewhere.there / "metrics.jsonl").read_text() == "1\n"
    assert caplog.text.count("is retried") == 1, "once for each time that it was away"


def test_what_could_not_be_carried_to_the_end_is_said_with_where_it_is(
    elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere.away(True)
    with RunSync(elsewhere.here):
        elsewhere.write("1\n")
    assert f"not uploaded: metrics.jsonl; the files are in {elsewhere.here}" in caplog.text


def test_nothing_is_carried_to_a_run_that_is_another_trainers_now(elsewhere: Elsewhere) -> None:
    def fenced() -> None:
        raise Fenced("Another process has taken over.")

    elsewhere.write("1\n")
    with RunSync(elsewhere.here, guard=fenced) as sync:
        pass
    assert sync.fenced
    assert not elsewhere.there.exists()


def test_a_run_that_is_taken_over_while_a_file_is_carried_gets_no_other(elsewhere: Elsewhere) -> None:
    """The first upload is under way when another trainer claims the run."""

    elsewhere.write("1\n")
    elsewhere.write("{}", "status.json")
    sync = RunSync(elsewhere.here, guard=lambda: _fence_if((elsewhere.there / "metrics.jsonl").exists()))
    assert not sync.upload_now()
    assert sync.fenced
    assert [path.name for path in elsewhere.there.iterdir()] == ["metrics.jsonl"]


def test_who_is_cut_off_during_the_last_file_knows_at_once(elsewhere: Elsewhere) -> None:
    elsewhere.write("1\n")
    sync = RunSync(elsewhere.here, guard=lambda: _fence_if((elsewhere.there / "metrics.jsonl").exists()))
    sync.upload_now()
    assert sync.fenced


def _fence_if(taken: bool) -> None:
    if taken:
        raise Fenced("Another process has taken over.")


def test_a_file_that_is_too_long_is_named_and_keeps_no_other_back(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(carriers, "MAX_FILE_BYTES", 10)
    with RunSync(elsewhere.here) as sync:
        elsewhere.write("1\n")
        sync.upload_now()
        elsewhere.write("1234567890\n")
        elsewhere.write("{}", "status.json")
        sync.upload_now()
        sync.upload_now()
        assert sync.pending() == ["metrics.jsonl"]
        assert (elsewhere.there / "status.json").exists()
    assert (elsewhere.there / "metrics.jsonl").read_text() == "1\n"
    assert caplog.text.count("metrics.jsonl is larger than") == 1
    assert f"not uploaded: metrics.jsonl; the files are in {elsewhere.here}" in caplog.text


def test_a_long_file_is_carried_less_often(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "MAX_BYTES_PER_S", 10)
    elsewhere.write("1234567890\n" * 100)
    elsewhere.write("{}", "status.json")
    with RunSync(elsewhere.here, every_s=0.01) as sync:
        assert arrives(sync, lambda: sync.uploads == 2)
        sync.upload_now()
        elsewhere.write("more\n")
        for turn in range(3):
            (elsewhere.here / "status.json").write_text(json.dumps(turn))
            before = sync.uploads
            for _ in range(1000):
                if sync.uploads > before:
                    break
                threading.Event().wait(0.01)
        assert "more" not in (elsewhere.there / "metrics.jsonl").read_text()
    assert "more" in (elsewhere.there / "metrics.jsonl").read_text(), "at the end it is"


def test_the_directory_of_a_local_run_is_not_carried_anywhere(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("1\n")
    before = threading.active_count()
    with RunSync(tmp_path) as sync:
        assert threading.active_count() == before
    assert (sync.uploads, sync.failures, sync.stats(), sync.pending()) == (0, 0, {}, [])


class _Cuts:
    """A sink that cuts the store off at one iteration, and has it back at another."""

    def __init__(self, elsewhere: Elsewhere, off: int, on: int) -> None:
        self._elsewhere, self._at = elsewhere, {off: True, on: False}

    def write(self, numbers: Numbers) -> None:
        if "evaluation/episodes" not in numbers and numbers["iterations"] in self._at:
            self._elsewhere.away(self._at[int(numbers["iterations"])])

    def close(self) -> None:
        """Nothing is open."""


def test_training_goes_on_while_its_store_is_away(elsewhere: Elsewhere) -> None:
    result = runner.train(small.data(6), place=PLACE, sinks=[_Cuts(elsewhere, 2, 5)])
    assert result.stopped_by == "iterations"
    assert [row["iterations"] for row in read_jsonl(elsewhere.there / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


# -- serving, and the process that looks after a learner ------------------------------------------------------------------


def test_what_is_served_follows_a_run_on_a_store(boxes: Path) -> None:
    train(iterations=1)
    source, best = CheckpointSource(PLACE), CheckpointSource(f"{PLACE}/best")
    assert (source.newest(), source.fixed, source.best, best.best) == ("000001", False, False, True)
    assert CheckpointSource(f"{PLACE}/checkpoints/000001").fixed
    first = source.release()
    ludus.resume(PLACE, stop={"iterations": 2})
    assert source.newest() == "000002"
    assert source.release().version > first.version
    assert source.version(first.version).parts["model"].weights == first.parts["model"].weights
    assert first.origin == f"{PLACE}/checkpoints/000001"
    named = parse_sources([f"easy={PLACE}?endpoint=http://x:1", "box://shelf/run?endpoint=http://x:1"], "runs")
    assert {name: found.where for name, found in named.items()} == {
        "easy": f"{PLACE}?endpoint=http://x:1",
        "default": "box://shelf/run?endpoint=http://x:1",
    }


def test_a_run_on_a_store_is_looked_at_less_often_than_one_that_is_here(boxes: Path, tmp_path: Path) -> None:
    def looked_at(place: str, far_s: float) -> str:
        runner.train(small.data(1), place=place)
        service = Path(tempfile.mkdtemp(dir=tmp_path))
        made = CheckpointFollower(
            {"default": CheckpointSource(place)}, service, UpdateSettings(follow=True, follow_s=0.0, follow_far_s=far_s)
        )
        made.open()
        first = made.serving()["default"].version
        made.poll()
        ludus.resume(place, stop={"iterations": 2})
        made.poll()
        return "new" if made.serving()["default"].version > first else "old"

    assert looked_at("box://shelf/a", 3600.0) == "old"
    assert looked_at("box://shelf/b", 0.0) == "new"
    assert looked_at(str(tmp_path / "here"), 3600.0) == "new"


def test_a_learner_that_lost_its_store_is_started_again() -> None:
    from ludus.experiments.control.restart_policy import LearnerFailure, RestartAfter

    decided = RestartPolicy(3).decide(LearnerFailure("it was away", StoreUnavailable("It was away.")), "000001", True)
    assert isinstance(decided, RestartAfter)
