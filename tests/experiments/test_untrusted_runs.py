"""A run from somebody else: whatever code it names, and whichever command reads it, nothing of that is imported or called."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.core import trust
from ludus.distributed.redis.messages import SPEC, WorkerSpec
from ludus.distributed.redis.worker import FleetWorker, WorkerOptions
from ludus.envs import wrappers
from ludus.envs.vector_env import make_as_trained
from ludus.errors import LudusError, Untrusted
from ludus.experiments import runner
from ludus.experiments.evaluation import rollout
from ludus.experiments.resolve import resolve
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import CONFIG
from ludus.io.yaml_documents import dump_yaml, parse_yaml
from ludus.models.weights import serialization, version_store
from ludus.serving import checkpoint_follower
from ludus.serving.release import ReleasedModel
from ludus.storage.local import LocalStore
from ludus.tuning import sweep as tuning
from tests.experiments import small

State = dict[str, Any]
Tamper = Callable[[State, str], None]

MODULE = """from pathlib import Path
import gymnasium as gym, torch
Path({mark!r}).touch()
class Game(gym.Env): pass
class Net(torch.nn.Module): pass
class Algorithm: Config = learn = None
def make(*args, **keywords) -> gym.Env: Path({mark!r}).touch()
def mapping(agent) -> str: Path({mark!r}).touch()
class CustomModel(torch.nn.Module): pass
"""
FOREIGN = "untrusted_canary"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.train(tmp_path_factory.mktemp("trained") / "run", 1).run_dir


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that is there once the canary was imported or called. It is installed: importable, and not of the project."""
    place, found = tmp_path / "site-packages", tmp_path / "mark"
    place.mkdir()
    (place / f"{FOREIGN}.py").write_text(MODULE.format(mark=str(found)))
    monkeypatch.syspath_prepend(place)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield found
    sys.modules.pop(FOREIGN, None)


@pytest.fixture
def run(trained: Path, tmp_path: Path, mark: Path) -> Path:
    copied = tmp_path / "here" / "run"
    shutil.copytree(trained, copied)
    (copied / "model").mkdir()
    (copied / "model" / "canary_net.py").write_text(MODULE.format(mark=str(mark)))
    return copied


def rewrite(run: Path, tamper: Tamper, name: str) -> None:
    """The run as somebody who knows the format would change it: config.yaml, state.json with its checksum, model.json."""
    store = LocalStore(run)
    (key,) = checkpoint.names(store)
    files = dict(store.get_bundle(f"checkpoints/{key}"))
    state = json.loads(files["state.json"])
    tamper(state, name)
    files["state.json"] = json.dumps(state).encode()
    store.delete(f"checkpoints/{key}")
    store.put_bundle(f"checkpoints/{key}", files)
    whole = state["config"]
    store.put(CONFIG, dump_yaml({"default": {k: v for k, v in whole.items() if k != "name"}}).encode())
    for model, entry in state["models"].items():
        store.put(f"models/{model}/model.json", json.dumps(entry["description"]).encode())


def set_env(state: State, name: str) -> None:
    state["config"]["env"] = name
    state["config"]["config"]["env_config"] = {"command": "touch mark"}


def set_wrapper(state: State, name: str) -> None:
    state["config"]["config"]["wrappers"] = [name]


def set_wrapper_with_keywords(state: State, name: str) -> None:
    state["config"]["config"]["wrappers"] = [{name: {"command": "touch mark"}}]


def set_algorithm(state: State, name: str) -> None:
    state["config"]["run"] = name


def set_model(state: State, name: str) -> None:
    state["config"]["config"]["model"]["custom_model"] = name
    for entry in state["models"].values():
        entry["description"]["network"]["custom_model"] = name


def set_class(state: State, name: str) -> None:
    for entry in state["models"].values():
        entry["description"] |= {"class": name, "args": ["touch mark"], "kwargs": {}}


def set_mapping(state: State, name: str) -> None:
    state["config"]["env"] = "mpe2/simple_spread_v3"
    state["config"]["config"]["multiagent"] = {"policies": ["main"], "policy_mapping": name}


def set_memory(state: State, name: str) -> None:
    state["config"]["memory"] = name
    state["config"]["config"]["num_workers"] = 1


NAMES = {
    "env": (set_env, (f"{FOREIGN}:make", f"{FOREIGN}:Game", f"{FOREIGN}:Game-v0", "torch.utils.collect_env:run", "os:system", "subprocess:run")),
    "wrapper": (set_wrapper, (f"{FOREIGN}:make", "torch.utils.collect_env:run", "gymnasium.wrappers:RecordVideo")),
    "wrapper with keywords": (set_wrapper_with_keywords, (f"{FOREIGN}:Game", "subprocess:run")),
    "algorithm": (set_algorithm, (f"{FOREIGN}:Algorithm", "subprocess:Popen")),
    "custom model": (set_model, (f"{FOREIGN}:Net", "canary_net", "torch.utils.collect_env:run")),
    "class of the model": (set_class, (f"{FOREIGN}:Net", f"/tmp/{FOREIGN}.py:Net", "subprocess:Popen")),
    "policy mapping": (set_mapping, (f"{FOREIGN}:mapping", "os:system")),
    "memory": (set_memory, (f"{FOREIGN}:make", f"{FOREIGN}:Game://x")),
}  # fmt: skip


def play(run: Path) -> None:
    *_, stage = rollout.rollout_spec(run)
    rollout.make_player(stage).close()


def serve(run: Path) -> None:
    for part in checkpoint_follower.CheckpointSource(str(run)).release().parts.values():
        assert isinstance(part, ReleasedModel)
        serialization.policy_from(part.description)


def load_kept_version(run: Path) -> None:
    store = LocalStore(run)
    for model in store.list("models"):
        for version in version_store.list_versions(store, model):
            version_store.load_version(store, model, version)
        serialization.model_from(store.get(f"models/{model}/model.json"))


def resume_sweep(run: Path) -> None:
    data = next(iter(parse_yaml((run / CONFIG).read_text(), CONFIG).values()))
    plain = {"format": tuning.FORMAT, "name": "swept", "experiment": data, "trials": [{"name": "a", "values": []}], "ended": {}}
    LocalStore(run).put(tuning.STATE, json.dumps(plain).encode())
    sweep = tuning.open_sweep(run)
    tuning._code_bundles(sweep, sweep.remaining_trials(retry_failed=False))
    wrappers.load_wrappers(data["config"].get("wrappers") or ())  # as the process of the trial does


def work_in_fleet(run: Path) -> None:
    state = checkpoint.open_checkpoint(run)[1].state
    config, (entry,) = state["config"]["config"], state["models"].values()
    orders = WorkerSpec(
        channel="c", room=1, env=state["config"]["env"], env_config=config["env_config"], preprocess={},
        wrappers=tuple(config.get("wrappers") or ()), num_envs=1, steps=1, description=entry["description"], masked=False, seed=0,
        in_turn=True,
    )  # fmt: skip
    store = LocalStore(run)
    store.put(SPEC, replace(orders).encode())
    worker = FleetWorker("redis://127.0.0.1:9", store, WorkerOptions())
    found = worker._wait_for_spec()
    environments = worker._make_environments(found)
    try:
        worker._make_policy(found, environments)
    finally:
        environments.close()


def export(run: Path) -> None:
    """What `ludus export --quantize int8` reads of the run: the policy, and the environment in which it is calibrated."""
    _, found = checkpoint.open_checkpoint(run)
    found.policy(next(iter(found.weights)))
    make_as_trained(found.state["config"]).close()


def battle(run: Path) -> None:
    ludus.battle(run, run, 1)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "rollout": play,
    "evaluate": lambda run: ludus.evaluate(run, 1),
    "resume": lambda run: runner.resume(run, stop={"iterations": 2}),
    "restore": lambda run: runner._load_restored(run, resolve(small.data(1))),
    "load": ludus.load,
    "export": export,
    "serve": serve,
    "kept version": load_kept_version,
    "battle": battle,
    "tune --resume": resume_sweep,
    "fleet worker": work_in_fleet,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_what_a_stored_run_names(command: str, run: Path, mark: Path, trained: Path) -> None:
    def attempt(tamper: Tamper, name: str) -> None:
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(trained / "checkpoints", run / "checkpoints")
        rewrite(run, tamper, name)
        with contextlib.suppress(LudusError):  # refused; or, where the name is not needed, whatever else is wrong with it
            COMMANDS[command](run)
        assert not mark.exists(), f"{name} was imported"
        assert not list(run.parent.rglob("*mark*")), f"{name} was called"
        assert FOREIGN not in sys.modules

    for tamper, names in NAMES.values():
        for name in names:
            attempt(tamper, name)


@pytest.mark.parametrize("command", ["rollout", "evaluate", "resume", "tune --resume", "fleet worker"])
@pytest.mark.parametrize("tamper", [set_env, set_wrapper])
def test_the_refusal_says_what_to_do(command: str, tamper: Tamper, run: Path) -> None:
    rewrite(run, tamper, f"{FOREIGN}:make")
    with pytest.raises(Untrusted, match=rf"{FOREIGN}:make.*Nothing was imported.*--trust"):
        COMMANDS[command](run)


@pytest.mark.parametrize("command", ["rollout", "resume", "load", "export", "serve"])
@pytest.mark.parametrize("name", [f"{FOREIGN}:Net", "canary_net"])
def test_a_model_that_is_not_the_users_is_refused(command: str, name: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)  # the file lies where a model of the user's own would
    rewrite(run, set_model, name)
    with pytest.raises(Untrusted):
        COMMANDS[command](run)


@pytest.mark.parametrize("trusting", ["--trust", "named"])
def test_with_consent_it_is_imported(trusting: str, run: Path, mark: Path) -> None:
    rewrite(run, set_env, f"{FOREIGN}:make")
    if trusting == "--trust":
        trust.allow_everything()
    with pytest.raises(LudusError):  # it makes nothing that could be played
        rollout.make_player(rollout.rollout_spec(run, env=f"{FOREIGN}:make" if trusting == "named" else None)[2])
    assert mark.exists()


def test_a_run_with_an_environment_of_the_project_is_played_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "trusted_game.py").write_text("import gymnasium\ndef make(**k):\n    return gymnasium.make('CartPole-v1', **k)\n")
    try:
        trained = small.train(tmp_path / "runs" / "one", 1, env="trusted_game:make").run_dir
        assert ludus.evaluate(trained, 1).returns
        assert runner.resume(trained, stop={"iterations": 2}).metrics["iterations"] == 2
    finally:
        sys.modules.pop("trusted_game", None)
