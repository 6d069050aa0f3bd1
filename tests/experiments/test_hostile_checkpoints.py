"""Checkpoints with parts that are links, pipes, endless, cut off, nested without end or absurd: they are damaged, and older ones serve."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.errors import Damaged
from ludus.experiments import runner
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.models.weights import serialization
from ludus.serving import checkpoint_follower
from ludus.storage import safe_read
from ludus.storage.local import LocalStore
from ludus.storage.safe_read import parse_json, read_regular_file
from tests.experiments import small

DEEP = b"[" * 200_000 + b"]" * 200_000
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints."""
    return small.train(tmp_path_factory.mktemp("trained") / "run", 2, top={"checkpoint_freq": 1}).run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints" / checkpoint.names(LocalStore(run))[-1]


def replaced_by_link(part: Path) -> None:
    part.unlink()
    part.symlink_to("/dev/zero")


def replaced_by_pipe(part: Path) -> None:
    part.unlink()
    os.mkfifo(part)


def cut_off(part: Path) -> None:
    os.truncate(part, part.stat().st_size // 2)


def grown(part: Path) -> None:
    os.truncate(part, 1 << 40)  # sparse: it takes no room


def missing(part: Path) -> None:
    part.unlink()


def nested(part: Path) -> None:
    part.write_bytes(DEEP)


@pytest.mark.parametrize("part", [WEIGHTS, "state.json", "manifest.json", "model.optimizer.safetensors"])
@pytest.mark.parametrize("harm", [replaced_by_link, replaced_by_pipe, cut_off, grown, missing, nested])
def test_a_part_that_is_not_what_was_written_is_damage(run: Path, part: str, harm: Callable[[Path], None]) -> None:
    name = newest(run).name
    older = checkpoint.names(LocalStore(run))[0]
    harm(newest(run) / part)
    with pytest.raises(Damaged):
        checkpoint.read(LocalStore(run), name)
    assert checkpoint.newest(LocalStore(run)).name == older


def rewrite(run: Path, change: Callable[[dict[str, Any]], None] | bytes) -> None:
    """With the right checksums, as somebody who wants it to be read would."""
    key, store = f"checkpoints/{newest(run).name}", LocalStore(run)
    files = dict(store.get_bundle(key))
    if isinstance(change, bytes):
        files["state.json"] = change
    else:
        state = json.loads(files["state.json"])
        change(state)
        files["state.json"] = json.dumps(state).encode()
    store.delete(key)
    store.put_bundle(key, files)


def described(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["models"]["model"]["description"].update(changes)


def networked(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["models"]["model"]["description"]["network"].update(changes)


def nested_space(depth: int) -> dict[str, Any]:
    space: dict[str, Any] = {"type": "Discrete", "n": 2}
    for _ in range(depth):
        space = {"type": "Tuple", "spaces": [space]}
    return space


ABSURD: dict[str, Callable[[dict[str, Any]], None] | bytes] = {
    "nested state": DEEP,
    "no JSON": b"{",
    "a list": b"[]",
    "no models": lambda state: state.update(models=[]),
    "env is a list": lambda state: state["config"].update(env=["CartPole-v1"]),
    "version": lambda state: state["models"]["model"].update(version=[1]),
    "a huge box": described(observation_space={"type": "Box", "shape": [1 << 20, 1 << 20], "low": 0, "high": 1}),
    "a negative box": described(observation_space={"type": "Box", "shape": [-1], "low": 0, "high": 1}),
    "a huge discrete": described(action_space={"type": "Discrete", "n": 10**15}),
    "many parts": described(observation_space={"type": "Tuple", "spaces": [{"type": "Discrete", "n": 2}] * 20_000}),
    "a deep space": described(observation_space=nested_space(400)),
    "no space": described(observation_space=[]),
    "a huge layer": networked(fcnet_hiddens=[10**6, 10**6]),
    "a million layers": networked(fcnet_hiddens=[64] * 1_000_000),
    "an integer without end": networked(cell_size=10**400, core="lstm"),
}  # fmt: skip


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_values_with_right_checksums_are_damage(run: Path, name: str) -> None:
    older = checkpoint.names(LocalStore(run))[0]
    rewrite(run, ABSURD[name])
    with pytest.raises(Damaged):
        ludus.load(run / "checkpoints" / newest(run).name)
    assert checkpoint.newest(LocalStore(run)).name == older


@pytest.mark.parametrize("name", ["nested state", "a huge layer"])
def test_a_resumed_run_goes_on_from_the_checkpoint_before(run: Path, name: str) -> None:
    rewrite(run, ABSURD[name])
    result = runner.resume(run, stop={"iterations": 3})
    assert result.metrics["iterations"] == 3
    assert ludus.load(run).version > 0


def test_a_follower_says_damaged_and_never_waits(run: Path) -> None:
    replaced_by_pipe(newest(run) / WEIGHTS)
    with pytest.raises(Damaged):
        checkpoint_follower.CheckpointSource(str(run)).release(newest(run).name)


def test_links_to_directories_are_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    shutil.move(newest(run), tmp_path / "moved")
    (run / "checkpoints" / "000002").symlink_to(tmp_path / "moved")
    assert checkpoint.open_checkpoint(tmp_path / "link")[1].name == "000002"


@pytest.mark.parametrize("harm", [replaced_by_pipe, nested])
@pytest.mark.parametrize("file", ["meta.json", "config.yaml"])
def test_other_files_of_a_run_do_not_hang_a_reader(run: Path, file: str, harm: Callable[[Path], None]) -> None:
    harm(run / file)
    opened = Run.open(run)
    assert opened.meta() == {} or file != "meta.json"
    if file == "config.yaml":
        with pytest.raises(ludus.errors.LudusError):
            opened.config()


def test_a_file_larger_than_the_machine_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(b"x" * 100)
    assert read_regular_file(tmp_path / "large", size=100) == b"x" * 100
    monkeypatch.setattr(safe_read, "max_file_bytes", lambda: 99)
    with pytest.raises(Damaged, match="at most 99"):
        read_regular_file(tmp_path / "large")


def test_json_is_bounded() -> None:
    assert parse_json(b'{"a": 1}', "it") == {"a": 1}
    for text in (DEEP, b"\xff", b"1" * 5000, b"x"):
        with pytest.raises(Damaged, match="it is damaged"):
            parse_json(text, "it")


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x08" + bytes(7) + b'{"a":{}}', (1 << 62).to_bytes(8, "little") + b"{}"])
def test_bytes_that_are_no_weights_are_damage(data: bytes) -> None:
    with pytest.raises(Damaged):
        serialization.decode_weights(data, "it")
