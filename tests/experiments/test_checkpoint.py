"""Checkpoints: what was written comes back, what is wrong with one is said, the best one is never lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import ludus
from ludus.algorithms.ppo import PPO
from ludus.algorithms.trainer import Trainer
from ludus.core.types import Segments
from ludus.errors import Damaged, IncompatibleCheckpoint, NotFound, StoreError
from ludus.experiments.runs import checkpoint
from ludus.models.network_config import NetworkConfig
from ludus.models.weights import serialization
from ludus.models.weights.version_store import LocalVersionStore, list_versions, load_version
from ludus.storage.local import LocalStore
from ludus.transport.base import MemoryStats
from tests.experiments.small import ACTION, OBSERVATION, make_ppo, make_segments, same

SAMPLER = {"generator": np.arange(20, dtype=np.uint8)}
STATE: dict[str, Any] = {
    "progress": {"timesteps": 32, "iterations": 1},
    "config": {"env": "CartPole-v1", "run": "PPO"},
    "evaluation": 1.5,
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def write(store: LocalStore, number: int = 1, ppo: PPO | None = None) -> str:
    return checkpoint.write(store, number, {"model": ppo or make_ppo()}, {"model": number + 1}, SAMPLER, STATE)


def rewrite(store: LocalStore, name: str, changes: dict[str, bytes]) -> None:
    """The same checkpoint with other files, and a manifest that fits them: not damaged, but foreign."""
    files = store.get_bundle(f"checkpoints/{name}")
    store.delete(f"checkpoints/{name}")
    store.put_bundle(f"checkpoints/{name}", {**files, **changes})


# -- writing and reading ------------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was_written(store: LocalStore) -> None:
    ppo = make_ppo(normalise=True, normalize_reward=True)
    ppo.learn(make_segments(), 0)
    arrays, plain = ppo.state()
    name = write(store, 12, ppo)
    found = checkpoint.read(store, name)
    assert name == found.name == "000012"
    assert same(found.weights["model"], ppo.policy.weights())
    assert same(found.arrays["model"], arrays)
    assert same(found.sampler, SAMPLER)
    assert found.state["models"]["model"]["algorithm"] == plain
    assert found.state["models"]["model"]["version"] == 13
    assert {key: found.state[key] for key in STATE} == STATE
    assert found.state["ludus"] == ludus.__version__


def test_a_checkpoint_is_files_that_other_tools_can_read(store: LocalStore, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    ppo = make_ppo()
    write(store, 1, ppo)
    folder = tmp_path / "checkpoints" / "000001"
    expected = {"manifest.json", "model.optimizer.safetensors", "model.safetensors", "sampler.safetensors", "state.json"}
    assert {path.name for path in folder.iterdir()} == expected
    assert same(load_file(folder / "model.safetensors"), ppo.policy.weights())
    _, meta = serialization.decode_weights((folder / "model.safetensors").read_bytes(), "model")
    assert meta == {"model": "model", "version": "2"}


@pytest.mark.parametrize(
    "options", [{}, {"normalise": True}, {"normalize_reward": True}, {"network": NetworkConfig((8,), core="lstm")}]
)
def test_a_restored_algorithm_goes_on_bit_for_bit(store: LocalStore, options: dict[str, Any]) -> None:
    ppo = make_ppo(0, **options)
    if not ppo.policy.recurrent:
        ppo.learn(make_segments(1), 0)
    write(store, 1, ppo)
    other = make_ppo(99, **options)
    assert not same(other.policy.weights(), ppo.policy.weights())
    checkpoint.read(store, "000001").restore("model", other)
    assert same(other.policy.weights(), ppo.policy.weights())
    assert other.optimizer.updates == ppo.optimizer.updates
    if not ppo.policy.recurrent:
        before = ppo.policy.weights()
        assert ppo.learn(make_segments(2), 32) == other.learn(make_segments(2), 32)
        assert same(other.policy.weights(), ppo.policy.weights())
        assert not same(before, ppo.policy.weights())


def test_the_policy_of_a_checkpoint_acts_like_the_one_that_was_trained(store: LocalStore) -> None:
    ppo = make_ppo(normalise=True)
    ppo.learn(make_segments(1), 0)
    write(store, 1, ppo)
    found = checkpoint.read(store, "000001").policy("model")
    from ludus.sampling.trained_agent import TrainedAgent

    ours, theirs = TrainedAgent(ppo.policy), TrainedAgent(found)
    random = np.random.default_rng(0)
    for _ in range(20):
        seen = random.normal(size=4).astype(np.float32)
        assert ours.act(seen)[0] == theirs.act(seen)[0]
    assert same(found.weights(), ppo.policy.weights())


def test_a_checkpoint_never_replaces_another(store: LocalStore) -> None:
    first = make_ppo(1)
    assert write(store, 7, first) == "000007"
    before = store.get_bundle("checkpoints/000007")
    assert write(store, 7, make_ppo(2)) == "000007-1"
    assert write(store, 7, make_ppo(3)) == "000007-2"
    assert store.get_bundle("checkpoints/000007") == before
    assert same(checkpoint.read(store, "000007-2").weights["model"], make_ppo(3).policy.weights())
    assert checkpoint.names(store) == ["000007", "000007-1", "000007-2"]


def test_names_are_in_the_order_of_their_numbers(store: LocalStore) -> None:
    for name in ("000009", "1000000", "999999", "000010", "000010-10", "000010-2", "000010-1"):
        store.put_bundle(f"checkpoints/{name}", {"state.json": b"{}"})
    store.put("checkpoints/best.json", b"{}")
    store.put_bundle("checkpoints/my copy", {"state.json": b"{}"})
    expected = ["000009", "000010", "000010-1", "000010-2", "000010-10", "999999", "1000000"]
    assert checkpoint.names(store) == expected


# -- what can be wrong with one -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.safetensors", "model.optimizer.safetensors", "sampler.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "gone"])
def test_a_damaged_file_is_named(store: LocalStore, tmp_path: Path, file: str, how: str) -> None:
    write(store)
    path = tmp_path / "checkpoints" / "000001" / file
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    with pytest.raises(Damaged, match=file.replace(".", r"\.")):
        checkpoint.read(store, "000001")


@pytest.mark.parametrize(
    "changes",
    [
        {"state.json": b"not json"},
        {"state.json": b"[]"},
        {"state.json": b'{"format": 1}'},
        {"state.json": b'{"format": 1, "models": {"other": {}}}'},
        {"model.safetensors": b"\x00" * 100},
        {"model.safetensors": b""},
        {"model.optimizer.safetensors": b"\xff" * 9},
        {"sampler.safetensors": b"\x80\x04K\x01."},
    ],
    ids=lambda changes: f"{next(iter(changes))}={next(iter(changes.values()))[:24]!r}",
)
def test_a_checkpoint_whose_parts_make_no_sense_is_damaged(store: LocalStore, changes: dict[str, bytes]) -> None:
    write(store)
    rewrite(store, "000001", changes)
    with pytest.raises(Damaged, match="000001"):
        checkpoint.read(store, "000001")


def test_a_checkpoint_of_another_format_is_told_from_a_damaged_one(store: LocalStore) -> None:
    write(store)
    state = json.loads(store.get("checkpoints/000001/state.json"))
    rewrite(store, "000001", {"state.json": json.dumps(state | {"format": 99}).encode()})
    with pytest.raises(IncompatibleCheckpoint, match=rf"000001 has format 99.*ludus {ludus.__version__}, format 1"):
        checkpoint.read(store, "000001")


_SIX, _LARGE = gym.spaces.Box(-10.0, 10.0, (6,), np.float32), NetworkConfig(fcnet_hiddens=(8, 8))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"observation": _SIX}, "another observation space"),
        ({"action": gym.spaces.Discrete(3)}, "another action space"),
        ({"network": _LARGE}, "another network"),
        ({"normalise": True}, "another normalise observations"),
    ],
)
def test_a_checkpoint_of_another_environment_or_network_is_refused_and_changes_nothing(
    store: LocalStore, options: dict[str, Any], said: str
) -> None:
    write(store)
    other = make_ppo(5, **options)
    before = other.policy.weights()
    with pytest.raises(IncompatibleCheckpoint, match=said):
        checkpoint.read(store, "000001").restore("model", other)
    assert same(other.policy.weights(), before)
    assert other.optimizer.updates == 0


def test_a_checkpoint_from_before_a_setting_existed_still_fits(store: LocalStore) -> None:
    write(store)
    state = json.loads(store.get("checkpoints/000001/state.json"))
    described = state["models"]["model"]["description"]
    del described["kind"]
    for later in ("dueling", "custom_model", "custom_model_config", "log_std_init"):
        del described["network"][later]
    rewrite(store, "000001", {"state.json": json.dumps(state).encode()})
    algorithm, found = make_ppo(9), checkpoint.read(store, "000001")
    found.restore("model", algorithm)
    assert same(algorithm.policy.weights(), found.policy("model").weights())


def test_a_model_that_is_not_in_the_checkpoint_is_refused_with_those_that_are(store: LocalStore) -> None:
    write(store)
    found = checkpoint.read(store, "000001")
    with pytest.raises(IncompatibleCheckpoint, match="no model 'left', only model"):
        found.policy("left")
    with pytest.raises(IncompatibleCheckpoint, match="no model 'left', only model"):
        found.restore("left", make_ppo())


def test_the_newest_that_can_be_read_is_taken_and_the_damaged_are_passed_over_with_a_warning(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3):
        write(store, number)
    (tmp_path / "checkpoints" / "000003" / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "checkpoints" / "000002" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(store).name == "000001"
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["000003", "000002"]
    assert all(record.levelname == "WARNING" for record in caplog.records)


def test_without_a_whole_checkpoint_there_is_none(store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no complete checkpoint"):
        checkpoint.newest(store)
    write(store)
    (tmp_path / "checkpoints" / "000001" / "state.json").write_bytes(b"")
    with pytest.raises(NotFound, match="no complete checkpoint"):
        checkpoint.newest(store)


# -- the best one, and those that are kept ------------------------------------------------------------------------------


def test_the_best_is_remembered_by_name_and_score(store: LocalStore) -> None:
    assert checkpoint.best_name(store) is None
    assert checkpoint.best_score(store) == float("-inf")
    checkpoint.mark_best(store, "000004", -3.25, "evaluation")
    assert (checkpoint.best_name(store), checkpoint.best_score(store)) == ("000004", -3.25)
    store.put("checkpoints/best.json", b"{")
    with pytest.raises(Damaged, match=r"best\.json"):
        checkpoint.best_name(store)


def test_only_the_newest_and_the_best_are_kept(store: LocalStore) -> None:
    for number in range(1, 7):
        store.put_bundle(f"checkpoints/{number:06d}", {"state.json": b"{}"})
    checkpoint.mark_best(store, "000002", 1.0, "evaluation")
    assert list(checkpoint.apply_retention(store, None)) == []
    assert list(checkpoint.apply_retention(store, 2)) == ["000001", "000003", "000004"]
    assert checkpoint.names(store) == ["000002", "000005", "000006"]
    assert list(checkpoint.apply_retention(store, 2)) == []
    assert list(checkpoint.apply_retention(store, 1, fresh="000005")) == []
    assert list(checkpoint.apply_retention(store, 1)) == ["000005"]
    assert checkpoint.best_name(store) == "000002"


def test_what_is_deleted_is_told_with_its_versions(store: LocalStore) -> None:
    for number in (1, 2):
        write(store, number)
    assert checkpoint.apply_retention(store, 1) == {"000001": {"model": 2}}


# -- finding one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "mine"
    store = LocalStore(run)
    store.put("config.yaml", b"default: {}")
    for number in (1, 2, 3):
        write(store, number)
    checkpoint.mark_best(store, "000002", 1.0, "evaluation")
    return run


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("", "000003"),
        ("latest", "000003"),
        ("best", "000002"),
        ("checkpoints", "000003"),
        ("checkpoints/best", "000002"),
        ("checkpoints/latest", "000003"),
        ("checkpoints/000001", "000001"),
        ("checkpoints/000001/", "000001"),
    ],
)
def test_a_checkpoint_is_found_by_run_word_or_directory(run: Path, where: str, name: str) -> None:
    assert checkpoint.locate(run / where) == (run, name)
    assert checkpoint.locate(f"{run}/{where}") == (run, name)
    directory, found = checkpoint.open_checkpoint(run / where)
    assert (directory, found.name) == (run, name)


def test_a_checkpoint_is_found_from_within_its_directory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert checkpoint.open_checkpoint(".")[1].name == "000003"
    assert checkpoint.open_checkpoint("best")[1].name == "000002"
    monkeypatch.chdir(run / "checkpoints" / "000001")
    assert checkpoint.open_checkpoint(".")[1].name == "000001"


@pytest.mark.parametrize("where", ["nonsense", "checkpoints/000009", "checkpoints/000001/model.safetensors", "nonsense/best"])
def test_nonsense_is_not_found_and_the_error_names_it(run: Path, where: str) -> None:
    with pytest.raises(NotFound, match=r"ludus runs list"):
        checkpoint.locate(run / where)


def test_a_directory_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    with pytest.raises(NotFound, match="pictures is not the directory of a run or checkpoint"):
        checkpoint.locate(tmp_path / "pictures")


def test_a_run_without_checkpoint_or_best_says_so(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("config.yaml", b"default: {}")
    with pytest.raises(NotFound, match="no complete checkpoint"):
        checkpoint.locate(tmp_path)
    with pytest.raises(NotFound, match="no best checkpoint yet"):
        checkpoint.locate(tmp_path / "best")


@pytest.mark.parametrize("file", ["state.json", "model.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_with_the_others_of_its_run(run: Path, file: str) -> None:
    (run / "checkpoints" / "000003" / file).unlink()
    with pytest.raises(Damaged, match=r"000003.*Others in this run: 000001, 000002"):
        checkpoint.open_checkpoint(run / "checkpoints" / "000003")


def test_the_newest_is_refused_when_its_weights_are_damaged(run: Path) -> None:
    (run / "checkpoints" / "000003" / "model.safetensors").unlink()
    with pytest.raises(Damaged, match=r"000003.*Others in this run: 000001, 000002"):
        checkpoint.open_checkpoint(run)


@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_one_that_cannot_say_whose_it_is_is_not_the_newest_unless_there_is_no_other(
    run: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that was cut off may have finished one of which the new owner had swept everything else away."""
    store = LocalStore(run)
    (run / "checkpoints" / "000003" / file).unlink()
    assert checkpoint.newest_name(store) == checkpoint.newest(store).name == "000002"
    assert checkpoint.open_checkpoint(run)[1].name == "000002"
    assert "000003" in caplog.text
    for name in ("000001", "000002"):
        store.delete(f"checkpoints/{name}")
    assert checkpoint.newest_name(store) == "000003"
    with pytest.raises(Damaged, match="000003"):
        checkpoint.open_checkpoint(run)


def test_a_checkpoint_that_was_copied_elsewhere_still_opens(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoints" / "000002", tmp_path / "elsewhere" / "checkpoints" / "000002")
    directory, found = checkpoint.open_checkpoint(tmp_path / "elsewhere" / "checkpoints" / "000002")
    assert directory == tmp_path / "elsewhere"
    assert found.name == "000002"


def test_every_error_of_opening_is_one_of_the_store(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "000003")
    (run / "checkpoints" / "best.json").write_text('{"checkpoint": "000099", "score": 1}')
    with pytest.raises(StoreError, match="000099"):
        checkpoint.open_checkpoint(run / "best")


# -- several models in one run ------------------------------------------------------------------------------------------


class _Queue:
    """A memory of ready-made segments."""

    def __init__(self, *blocks: Segments) -> None:
        self._ready = deque(blocks)
        self.released: list[Segments] = []

    def reserve(self, timeout_s: float) -> Segments | None:
        return None

    def commit(self, segments: Segments) -> None:
        self._ready.append(segments)

    def abandon(self, segments: Segments) -> None:
        raise AssertionError("nobody reserves here")

    def take(self, timeout_s: float) -> Segments | None:
        return self._ready.popleft() if self._ready else None

    def release(self, segments: Segments) -> None:
        self.released.append(segments)

    def stats(self) -> MemoryStats:
        return MemoryStats(waiting=len(self._ready))

    def close(self) -> None:
        pass


def _two(store: LocalStore, *blocks: Segments) -> tuple[Trainer, LocalVersionStore, dict[str, PPO]]:
    algorithms = {"left": make_ppo(1), "right": make_ppo(2, network=NetworkConfig(fcnet_hiddens=(12,)))}
    pool = LocalVersionStore(store)
    for name, algorithm in algorithms.items():
        pool.add(name, algorithm.policy)
    return Trainer(algorithms, _Queue(*blocks), pool), pool, algorithms


def test_each_model_learns_only_from_its_own_segments(store: LocalStore) -> None:
    trainer, pool, models = _two(
        store, make_segments(1, model="right"), make_segments(2, model="right"), make_segments(3, model="left")
    )
    left, right = models["left"].policy.weights(), models["right"].policy.weights()
    assert trainer.step()
    assert trainer.step()
    assert same(models["left"].policy.weights(), left), "the left model learned from the right one's segments"
    assert not same(models["right"].policy.weights(), right)
    assert (pool.newest("left")[1], pool.newest("right")[1]) == (1, 3)
    assert "right/learner/loss" in trainer.metrics
    assert "left/learner/loss" not in trainer.metrics
    right = models["right"].policy.weights()
    assert trainer.step()
    assert not same(models["left"].policy.weights(), left)
    assert same(models["right"].policy.weights(), right)
    assert (pool.newest("left")[1], pool.newest("right")[1]) == (2, 3)
    assert trainer.progress.iterations == 3
    assert trainer.progress.timesteps == 3 * 32
    assert not trainer.step()


def test_two_models_live_in_one_checkpoint_and_come_back_to_themselves(store: LocalStore, tmp_path: Path) -> None:
    trainer, pool, models = _two(store, make_segments(1, model="left"), make_segments(2, model="right"))
    trainer.step()
    trainer.step()
    versions = {name: pool.keep(name) for name in models}
    name = checkpoint.write(store, 2, models, versions, SAMPLER, STATE)
    expected = {"manifest.json", "sampler.safetensors", "state.json"}
    expected |= {f"{model}{kind}.safetensors" for model in models for kind in ("", ".optimizer")}
    assert {path.name for path in (tmp_path / "checkpoints" / name).iterdir()} == expected
    found = checkpoint.read(store, name)
    assert {model: entry["version"] for model, entry in found.state["models"].items()} == {"left": 2, "right": 2}
    for model, network in (("left", (8,)), ("right", (12,))):
        other = make_ppo(50, network=NetworkConfig(fcnet_hiddens=network))
        found.restore(model, other)
        assert same(other.policy.weights(), models[model].policy.weights())
        assert same(other.state()[0], models[model].state()[0])
    with pytest.raises(IncompatibleCheckpoint, match="another network"):
        found.restore("right", make_ppo())
    assert list_versions(store, "left") == list_versions(store, "right") == [2]


# -- versions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "killed"])
def test_versions_never_go_back_however_a_pool_ends(store: LocalStore, closes: bool) -> None:
    policy = make_ppo().policy
    last = 0
    for incarnation in range(1, 5):
        pool = LocalVersionStore(store)
        pool.add("model", policy)
        assert pool.incarnation("model") == incarnation
        published = [pool.newest("model")[1]] + [pool.publish("model") for _ in range(3)]
        assert published == list(range(published[0], published[0] + 4))
        assert published[0] > last, "a version was given twice"
        if closes:
            assert published[0] == last + 1, "closing gives back the numbers that were not used"
            pool.close()
        last = published[-1]


def test_versions_go_on_above_more_than_one_reserved_block(store: LocalStore) -> None:
    policy = make_ppo().policy
    pool = LocalVersionStore(store)
    pool.add("model", policy)
    last = [pool.publish("model") for _ in range(2500)][-1]
    assert last == 2501
    again = LocalVersionStore(store)  # without close: killed
    again.add("model", policy)
    assert again.newest("model")[1] > last


def test_versions_start_above_those_of_a_restored_checkpoint(store: LocalStore) -> None:
    pool = LocalVersionStore(store)
    pool.add("model", make_ppo().policy, above=5000)
    assert pool.newest("model")[1] == 5001


def test_each_model_counts_its_own_versions(store: LocalStore) -> None:
    pool = LocalVersionStore(store)
    pool.add("left", make_ppo().policy)
    pool.add("right", make_ppo().policy, above=10)
    pool.publish("left")
    assert (pool.newest("left")[1], pool.newest("right")[1]) == (2, 11)
    assert pool.names() == ["left", "right"]


def test_a_damaged_counter_is_said_rather_than_counted_from_one(store: LocalStore) -> None:
    LocalVersionStore(store).add("model", make_ppo().policy)
    store.put("models/model/versions.json", b"{")
    with pytest.raises(Damaged, match=r"versions\.json"):
        LocalVersionStore(store).add("model", make_ppo().policy)


def test_a_kept_version_does_not_change_when_training_goes_on(store: LocalStore) -> None:
    ppo = make_ppo()
    pool = LocalVersionStore(store)
    pool.add("model", ppo.policy)
    before = ppo.policy.weights()
    assert pool.keep("model") == 1
    assert pool.keep("model") == 1
    ppo.learn(make_segments(), 0)
    pool.publish("model")
    assert pool.keep("model") == 2
    kept, meta = load_version(store, "model", 1)
    assert same(kept.weights(), before)
    assert meta == {"model": "model", "version": "1"}
    assert (kept.observation_space, kept.action_space) == (OBSERVATION, ACTION)
    assert list_versions(store, "model") == [1, 2]


# -- checkpoints of trainers that were cut off --------------------------------------------------------------------------


def claim(store: LocalStore, number: int, **said: Any) -> None:
    store.put(f"models/model/incarnations/{number:06d}", json.dumps(said).encode() if said else b"")


def write_as(store: LocalStore, number: int, incarnation: int | None) -> str:
    ours = None if incarnation is None else {"model": incarnation}
    return checkpoint.write(store, number, {"model": make_ppo()}, {"model": number}, {}, {}, incarnations=ours)


@pytest.mark.parametrize(
    ("claims", "written", "newest"),
    [
        pytest.param({1: {"from": None}}, [(1, 1), (2, 1)], "000002", id="one owner"),
        pytest.param({1: {"from": None}, 2: {"from": "000002"}}, [(1, 1), (2, 1)], "000002", id="begun from the newest"),
        pytest.param({1: {"from": None}, 2: {"from": "000002"}}, [(2, 1), (3, 1)], "000002", id="the old one went on"),
        pytest.param({1: {"from": None}, 2: {"from": "000002"}}, [(2, 1), (3, 2), (9, 1)], "000003", id="far beyond the new one"),
        pytest.param({1: {"from": None}, 2: {"from": "000002"}, 3: {"from": "000003"}}, [(2, 1), (3, 2), (8, 2), (9, 1)], "000003", id="three"),
        pytest.param({1: {"from": None}, 2: {"from": None}}, [(1, 1), (5, 1)], None, id="begun from nothing"),
        pytest.param({1: {}, 2: {}}, [(1, 1), (2, 1)], "000002", id="claims that say nothing"),
        pytest.param({1: {"from": None}, 2: {"from": 7}}, [(2, 1)], "000002", id="a claim that makes no sense"),
        pytest.param({1: {"from": None}, 2: {"from": "../x"}}, [(2, 1)], "000002", id="a claim that is no name"),
        pytest.param({1: {"from": None}, 2: {"from": "000001"}}, [(2, None)], "000002", id="a checkpoint of an earlier version"),
        pytest.param({}, [(2, 1)], "000002", id="no claims"),
    ],
)  # fmt: skip
def test_only_what_the_run_goes_on_from_is_the_newest(
    store: LocalStore, claims: dict[int, dict[str, Any]], written: list[tuple[int, int | None]], newest: str | None
) -> None:
    for number, said in claims.items():
        claim(store, number, **said)
    for number, incarnation in written:
        write_as(store, number, incarnation)
    assert checkpoint.newest_name(store) == newest
    assert len(checkpoint.names(store)) == len(written)
    if newest is None:
        with pytest.raises(NotFound):
            checkpoint.newest(store)
        assert checkpoint.active_names(store) == []
    else:
        assert checkpoint.newest(store).name == checkpoint.active_names(store)[-1] == newest


def test_a_second_one_of_the_same_iteration_comes_after_the_one_that_the_run_began_from(store: LocalStore) -> None:
    claim(store, 1, **{"from": None})
    write_as(store, 4, 1)
    claim(store, 2, **{"from": "000004"})
    assert write_as(store, 4, 1) == "000004-1"
    assert checkpoint.newest_name(store) == "000004"


def test_a_run_begins_from_its_own_checkpoint_although_the_weights_are_anothers(store: LocalStore) -> None:
    for number in (3, 7):
        checkpoint.write(store, number, {"model": make_ppo()}, {"model": number}, {}, {"progress": {"iterations": number}})
    own = checkpoint.read(store, "000003")
    assert checkpoint.resume_origin(store, None) is None
    assert checkpoint.resume_origin(store, own) == "000003"
    assert checkpoint.resume_origin(store, dataclasses.replace(own, name="000099")) == "000003"
    assert checkpoint.resume_origin(store, dataclasses.replace(own, state={"progress": {"iterations": 2}})) is None


@pytest.mark.parametrize(
    ("begun_from", "written", "overtaken"),
    [
        pytest.param("000002", [(1, 1), (2, 1)], False, id="nothing is newer"),
        pytest.param("000002", [(2, 1), (4, 2)], True, id="another went on"),
        pytest.param("000002", [(4, 2)], True, id="and what it was begun from was dropped"),
        pytest.param(None, [(4, 2)], True, id="begun from nothing"),
        pytest.param("000002", [(2, 1), (4, 1)], False, id="newer, of one that was cut off"),
    ],
)
def test_a_run_is_overtaken_when_there_is_more_than_it_begins_from(
    store: LocalStore, begun_from: str | None, written: list[tuple[int, int]], overtaken: bool
) -> None:
    claim(store, 1, **{"from": None})
    claim(store, 2, **{"from": "000002"})
    claim(store, 3, host="here")
    for number, incarnation in written:
        write_as(store, number, incarnation)
    store.put_bundle("checkpoints/000009", {"state.json": b"damaged"})
    with pytest.raises(checkpoint.Overtaken, match="000004") if overtaken else contextlib.nullcontext():
        checkpoint.check_newest(store, begun_from)
