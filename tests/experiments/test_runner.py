"""Whole runs: the same seed gives the same run to the last bit, and a run that was stopped or killed goes on."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import ludus
from ludus.algorithms.ppo import PPO
from ludus.core.metrics import Numbers, read_jsonl
from ludus.core.schedule import value_at
from ludus.core.tree import Array
from ludus.errors import ConfigError, EnvironmentFault, IncompatibleCheckpoint, NotFound, UnknownName, UsageError
from ludus.experiments import runner
from ludus.experiments.assembly.auto_workers import choose_num_workers
from ludus.experiments.assembly.components import PreparedRun, TrainingComponents
from ludus.experiments.control import checkpointer
from ludus.experiments.resolve import DEFAULT_TIMESTEPS, ClusterOptions, resolve
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import LOG_FILE, Run
from ludus.experiments.training import assemble_run, prepare_new_run, run_status
from ludus.experiments.validation.validate import ParsedExperiment
from ludus.models.weights.version_store import claims_after, list_versions
from ludus.storage.base import Bytes
from ludus.storage.local import LocalStore
from tests import environments as tiny
from tests.experiments import small
from tests.experiments.small import same
from tests.waiting import wait_until

TIMES = {"time_s", "fps", "learner_share"}
LSTM: dict[str, Any] = {"model": {"fcnet_hiddens": [16], "use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 8}}
FILTER: dict[str, Any] = {"observation_filter": "MeanStdFilter", "normalize_reward": True}


def numbers(run: Path) -> list[dict[str, Any]]:
    """The reports of a run, without what a clock measured."""
    rows = read_jsonl(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def arrays(run: Path, name: str) -> dict[str, Array]:
    """Everything in a checkpoint but its state.json, in which times are written: weights, optimizer, random states."""
    found = checkpoint.read(LocalStore(run), name)
    kinds = {"weights": found.weights["model"], "optimizer": found.arrays["model"], "sampler": found.sampler}
    return {f"{kind} {name}": array for kind, tensors in kinds.items() for name, array in tensors.items()}


# -- the same again -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterations", "changes"),
    [
        pytest.param(10, {}, id="plain"),
        pytest.param(4, LSTM, id="lstm"),
        pytest.param(4, FILTER, id="normalised"),
        pytest.param(3, {"env": "tests.environments:make_masked"}, id="masked"),
        pytest.param(3, {"env": "Pendulum-v1"}, id="continuous"),
        pytest.param(3, {"learner_threads": 2, "minibatch_size": 128}, id="two learner threads"),
    ],
)
def test_the_same_seed_gives_the_same_run_to_the_last_bit(tmp_path: Path, iterations: int, changes: dict[str, Any]) -> None:
    top = {"checkpoint_freq": 2}
    small.train(tmp_path / "one", iterations, top=top, seed=3, **changes)
    torch.manual_seed(time.time_ns())  # a run owns its randomness: what else happens in the process does not matter
    np.random.seed(time.time_ns() % 2**32)
    small.train(tmp_path / "two", iterations, top=top, seed=3, **changes)
    one, two = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert len(one) == iterations
    assert one == two
    assert same(arrays(tmp_path / "one", f"{iterations:06d}"), arrays(tmp_path / "two", f"{iterations:06d}"))


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    small.train(tmp_path / "one", 2, seed=1)
    small.train(tmp_path / "two", 2, seed=2)
    assert numbers(tmp_path / "one") != numbers(tmp_path / "two")
    weights = [checkpoint.open_checkpoint(tmp_path / name)[1].weights["model"] for name in ("one", "two")]
    assert not same(*weights)


def test_a_run_in_another_process_is_the_same_run(tmp_path: Path) -> None:
    small.train(tmp_path / "here", 3, seed=5)
    command = f"from pathlib import Path; from tests.experiments import small; small.train(Path({str(tmp_path / 'there')!r}), 3, seed=5)"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120, cwd=Path(__file__).parents[2])
    assert numbers(tmp_path / "here") == numbers(tmp_path / "there")
    assert same(arrays(tmp_path / "here", "000003"), arrays(tmp_path / "there", "000003"))


def test_evaluating_and_checkpointing_do_not_change_what_is_learned(tmp_path: Path) -> None:
    small.train(tmp_path / "often", 4, top={"checkpoint_freq": 1, "keep_checkpoints_num": 1}, evaluation_interval=1)
    small.train(tmp_path / "never", 4, evaluation_duration=0)
    often = [{k: v for k, v in row.items() if not k.startswith("evaluation/")} for row in numbers(tmp_path / "often")]
    assert often == numbers(tmp_path / "never")
    assert same(arrays(tmp_path / "often", "000004"), arrays(tmp_path / "never", "000004"))


# -- what is checked before anything starts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ({"env": "CartPol-v1"}, UnknownName, "Did you mean 'CartPole-v1'"),
        ({"env": "CartPole-v1", "run": "PPPO"}, UnknownName, "Unknown algorithm 'PPPO'.*'PPO'"),
        ({"env": "CartPole-v1", "config": {"lrr": 1}}, ConfigError, r"Unknown key 'config\.lrr'.*'lr'"),
        ({"env": "CartPole-v1", "config": {"lr": "fast"}}, ConfigError, r"config\.lr.*'fast'"),
        ({"env": "CartPole-v1", "config": {"sampling": "pipelined"}}, ConfigError, "sampling is pipelined"),
        ({"env": "CartPole-v1", "config": {"num_gpus": 1}}, ConfigError, "num_gpus is 1"),
        ({"env": "CartPole-v1", "stop": {"timestep": 1}}, ConfigError, r"Unknown key 'stop\.timestep'.*'timesteps'"),
        ({"run": "PPO"}, ConfigError, "'env' is missing"),
    ],
)
def test_an_invalid_experiment_is_refused_before_a_directory_is_created(
    tmp_path: Path, data: dict[str, Any], error: type[UsageError], said: str
) -> None:
    with pytest.raises(error, match=said):
        runner.train(data, local_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_device_of_workers_on_other_machines_is_not_looked_for_here() -> None:
    elsewhere = ClusterOptions("10.0.0.1:6379")
    data = small.data(num_workers=2, inference_device="cuda:99")
    with pytest.raises(ConfigError, match="inference_device"):
        resolve(data)
    assert resolve(data, elsewhere).config.inference_device == "cuda:99"
    with pytest.raises(ConfigError, match="inference_device"):  # without workers it is this process that decides
        resolve(data | {"config": data["config"] | {"num_workers": 0}}, replace(elsewhere, asked_for=False))


def test_the_number_of_workers_is_measured_here_unless_a_cluster_was_asked_for() -> None:
    parsed, named = ParsedExperiment(small.data(num_workers="auto")), ClusterOptions("10.0.0.1:6379")
    with pytest.raises(ConfigError, match="num_workers is auto"):
        choose_num_workers(parsed, None, named)
    chosen = choose_num_workers(parsed, None, replace(named, asked_for=False))
    assert isinstance(chosen.config["num_workers"], int)


def test_without_a_stop_the_reward_threshold_of_the_environment_is_used() -> None:
    stop = resolve({"env": "CartPole-v1"}).experiment.stop
    assert (stop.episode_return_mean, stop.timesteps) == (475.0, DEFAULT_TIMESTEPS)
    assert resolve({"env": "CartPole-v1", "stop": {"iterations": 1}}).experiment.stop.timesteps is None


def test_a_failure_is_recorded_in_the_metadata_and_the_log(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"environment 0 .* \(step 3\): the game crashed"):
        small.train(tmp_path / "run", env="tests.environments:make_faulty", env_config={"fault": "raises in step"})
    assert Run.open(tmp_path / "run").meta()["status"] == "failed"
    assert "the game crashed" in (tmp_path / "run" / LOG_FILE).read_text()
    assert logging.getLogger("ludus").handlers == []


def test_a_failing_run_closes_its_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tiny.Faulty] = []

    def make(**settings: Any) -> tiny.Faulty:
        made.append(tiny.Faulty("raises in step"))
        return made[-1]

    monkeypatch.setattr(tiny, "make_faulty", make)
    with pytest.raises(EnvironmentFault):
        small.train(tmp_path / "run", env="tests.environments:make_faulty")
    assert len(made) == 8
    assert all(env.closed for env in made)


def test_a_finished_run_closes_its_environments_those_of_evaluation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tiny.Count] = []

    def make(**settings: Any) -> tiny.Count:
        made.append(tiny.Count())
        return made[-1]

    monkeypatch.setattr(tiny, "make_count", make)
    small.train(tmp_path / "run", 1, env="tests.environments:make_count")
    assert len(made) == 8 + 2
    assert all(env.closed for env in made)


# -- going on -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after 4 of its iterations; copy it before use."""
    where = tmp_path_factory.mktemp("stopped") / "run"
    lr = [[0, 1e-3], [2000, 1e-4]]
    small.train(where, 4, top={"checkpoint_freq": 2}, seed=11, lr=lr, **FILTER)
    return where


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def parts_after_restore(run: Path) -> tuple[TrainingComponents, PPO]:
    opened = Run.open(run)
    resolved = resolve(opened.config())
    prepared = PreparedRun(resolved, lambda: opened, checkpoint.newest(opened.store), 5, counting_on=True)
    with assemble_run(prepared) as parts:
        algorithm = parts.trainer.algorithms["model"]
        assert isinstance(algorithm, PPO)
        return parts, algorithm


def test_a_resumed_run_starts_in_the_very_state_of_its_checkpoint(run: Path) -> None:
    before = checkpoint.open_checkpoint(run)[1]
    parts, ppo = parts_after_restore(run)
    assert parts.trainer.progress.to_json() == before.state["progress"]
    assert same(ppo.policy.weights(), before.weights["model"])
    assert any("norm" in name for name in before.weights["model"]), "the statistics belong to the weights"
    arrays, plain = ppo.state()
    assert same(arrays, before.arrays["model"])
    assert plain == before.state["models"]["model"]["algorithm"]
    assert plain["reward_scale"]["count"] > 0
    assert ppo.optimizer.updates == int(before.arrays["model"]["updates"]) > 0
    assert same(parts.source.state(), before.sampler)
    assert parts.pool.newest("model")[1] > before.state["models"]["model"]["version"]


def test_a_resumed_run_goes_on_counting(run: Path) -> None:
    before = checkpoint.open_checkpoint(run)[1]
    result = runner.resume(run, stop={"iterations": 7})
    after = checkpoint.open_checkpoint(run)[1]
    assert (before.name, after.name) == ("000004", "000007")
    assert result.run_dir == run
    assert result.stopped_by == "iterations"
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["incarnation"] for row in rows] == [1, 1, 1, 1, 2, 2, 2]
    for key in ("timesteps", "episodes", "time_s", "learner/version"):
        values = [row[key] for row in rows]
        assert values == sorted(values), f"{key} went back: {values}"
        assert values[4] > values[3]
    updates = [int(found.arrays["model"]["updates"]) for found in (before, after)]
    assert updates[1] > updates[0]
    counts = [found.state["models"]["model"]["algorithm"]["reward_scale"]["count"] for found in (before, after)]
    assert counts == [found.state["progress"]["timesteps"] for found in (before, after)]
    assert not same(before.sampler, after.sampler)


def test_schedules_go_on_where_they_were(run: Path) -> None:
    runner.resume(run, stop={"iterations": 6})
    rows = read_jsonl(run / "metrics.jsonl")
    for earlier, row in itertools.pairwise(rows):
        expected = value_at([(0, 1e-3), (2000, 1e-4)], earlier["timesteps"])
        assert row["learner/lr"] == pytest.approx(expected, rel=1e-5)
    assert rows[4]["learner/lr"] < rows[3]["learner/lr"] < 1e-3


def test_environments_restart_from_other_seeds_which_is_logged(run: Path) -> None:
    runner.resume(run, stop={"iterations": 5})
    text = (run / LOG_FILE).read_text()
    assert "continuing from checkpoint 000004; environments start from their reset" in text
    meta = Run.open(run).meta()
    assert meta["status"] == "finished"
    assert meta["resumed"] >= meta["started"]


def test_the_seeds_of_environments_after_a_resume_are_new_and_small_enough_for_any_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tiny.Count] = []

    def make(**settings: Any) -> tiny.Count:
        made.append(tiny.Count())
        return made[-1]

    monkeypatch.setattr(tiny, "make_count", make)
    where = tmp_path / "run"
    small.train(where, 1, env="tests.environments:make_count", seed=1)
    store = LocalStore(where)
    bundle = store.get_bundle("checkpoints/000001")
    state = json.loads(bundle["state.json"])
    state["progress"]["iterations"] = 50_000
    store.put_bundle("checkpoints/050000", bundle | {"state.json": json.dumps(state).encode()})
    first = {seed for env in made for seed in env.seeds if seed is not None}
    made.clear()
    runner.resume(where, stop={"iterations": 50_001})
    second = {seed for env in made for seed in env.seeds if seed is not None}
    assert second
    assert not first & second
    assert max(second) < 2**31, "ALE and others take 32 bits"


def test_a_run_can_be_resumed_again_and_again(run: Path) -> None:
    versions = [checkpoint.open_checkpoint(run)[1].state["models"]["model"]["version"]]
    for incarnation, iterations in enumerate((5, 6, 7), start=2):
        runner.resume(run, stop={"iterations": iterations})
        found = checkpoint.open_checkpoint(run)[1]
        assert found.state["progress"]["iterations"] == iterations
        versions.append(found.state["models"]["model"]["version"])
        assert read_jsonl(run / "metrics.jsonl")[-1]["incarnation"] == incarnation
    assert versions == sorted(set(versions))
    assert set(versions) <= set(list_versions(LocalStore(run), "model"))


def test_a_damaged_checkpoint_is_passed_over_and_left_alone(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = run / "checkpoints" / "000004"
    (damaged / "model.safetensors").write_bytes(b"damaged")
    before = {path.name: path.read_bytes() for path in damaged.iterdir()}
    with caplog.at_level(logging.WARNING):
        runner.resume(run, stop={"iterations": 6})
    assert "000004 cannot be used" in caplog.text
    assert checkpoint.names(LocalStore(run)) == ["000002", "000004", "000004-1", "000006"]
    assert {path.name: path.read_bytes() for path in damaged.iterdir()} == before
    assert checkpoint.read(LocalStore(run), "000004-1").state["progress"]["iterations"] == 4
    rows = read_jsonl(run / "metrics.jsonl")
    assert [(row["iterations"], row["incarnation"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]


def test_what_a_killed_process_left_half_written_is_removed(run: Path) -> None:
    for place in (run, run / "checkpoints", run / "models" / "model"):
        (place / ".aside-dead").mkdir()
        (place / ".aside-dead" / "part").write_text("half")
    runner.resume(run, stop={"iterations": 5})
    assert not list(run.rglob(".aside*"))


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = numbers(run)
    shutil.rmtree(run / "checkpoints")
    runner.resume(run, stop={"iterations": len(before)})
    assert "has no checkpoint yet; it starts again" in caplog.text
    learned = [{k: v for k, v in row.items() if k not in ("incarnation", "learner/version")} for row in numbers(run)]
    assert learned == [{k: v for k, v in row.items() if k not in ("incarnation", "learner/version")} for row in before]


def test_a_run_whose_learner_died_checkpoints_soon(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "SOON_S", 1e-9)
    shutil.rmtree(run / "checkpoints")
    data = Run.open(run).config() | {"checkpoint_freq": 0, "keep_checkpoints_num": None, "checkpoint_time_s": 300.0}
    Run.open(run).write_config({data.pop("name"): data})
    Run.open(run).write_meta({"learner_restarts": 1})
    runner.resume(run, stop={"iterations": 3})
    assert checkpoint.names(LocalStore(run)) == ["000001", "000002", "000003"]


def test_the_status_keeps_the_numbers_of_the_last_report_until_the_next(tmp_path: Path) -> None:
    resolved = resolve(small.data(100, evaluation_duration=0, min_time_s_per_iteration=1000.0))

    def create() -> Run:
        made = Run.create(tmp_path / "run", resolved.to_dict())
        made.write_meta({"learner_restarts": 7})  # is in every report
        return made

    with assemble_run(PreparedRun(resolved, create, None, 0)) as parts:
        parts.controller.run(lambda: parts.trainer.progress.iterations >= 3)
        shown = run_status(parts, resolved)
    assert shown["numbers"]["learner/restarts"] == 7.0
    assert shown["progress"]["iterations"] == 3


def test_what_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"is not the directory of a run"):
        runner.resume(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_config_was_changed_to_another_network_is_refused(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["default"]["config"]["model"]["fcnet_hiddens"] = [32]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    names = checkpoint.names(LocalStore(run))
    with pytest.raises(IncompatibleCheckpoint, match="another network"):
        runner.resume(run, stop={"iterations": 6})
    assert checkpoint.names(LocalStore(run)) == names


def test_the_best_checkpoint_stays_the_best_across_a_resume(run: Path) -> None:
    store = LocalStore(run)
    checkpoint.mark_best(store, "000002", 1e9, "evaluation")
    runner.resume(run, stop={"iterations": 6})
    assert checkpoint.best_name(store) == "000002"
    assert checkpoint.locate(run / "best") == (run, "000002")


# -- another trainer, between the look at a run and the claim -----------------------------------------------------------


class Meanwhile(LocalStore):
    """Whoever claims a run here is stopped for a while just before it."""

    act: Callable[[], None] | None = None

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        if not overwrite and "/incarnations/" in key and Meanwhile.act is not None:
            act, Meanwhile.act = Meanwhile.act, None
            act()
        super().put(key, data, overwrite=overwrite)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Meanwhile]]:
    monkeypatch.setattr("ludus.experiments.runs.run_dir.store_of", Meanwhile)
    yield Meanwhile
    Meanwhile.act = None


def test_a_late_trainer_continues_from_the_newer_checkpoint_of_another(run: Path, meanwhile: type[Meanwhile]) -> None:
    store = LocalStore(run)
    began = checkpoint.newest(store).state["progress"]["iterations"]
    meanwhile.act = lambda: _finish(run, began + 6)  # by its end it has dropped what the late one began from
    result = runner.resume(run, stop={"iterations": began + 8})
    assert result.metrics["iterations"] == began + 8
    assert [row["iterations"] for row in numbers(run)] == list(range(1, began + 9)), "nothing is learned twice"
    newest = checkpoint.newest(store)
    assert newest.state["progress"]["iterations"] == began + 8
    claims = [claim.content.get("from", "nothing") for claim in claims_after(store, "model", 0)]
    assert claims[-3:] == [f"{began:06d}", "nothing", f"{began + 6:06d}"]


def test_a_late_trainer_changes_nothing_of_a_run_that_is_over(run: Path, meanwhile: type[Meanwhile]) -> None:
    store, before = LocalStore(run), dict[str, bytes]()
    began = checkpoint.newest(store).state["progress"]["iterations"]

    def finish() -> None:
        _finish(run, began + 6)
        before.update({name: store.get(name) for name in ("config.yaml", "meta.json", "checkpoints/best.json")})
        before.update(dict.fromkeys(checkpoint.names(store), b""))

    meanwhile.act = finish
    with pytest.raises(UsageError, match="already reached its stop"):
        runner.resume(run, stop={"iterations": began + 1})
    assert checkpoint.newest_name(store) == f"{began + 6:06d}"
    assert dict.fromkeys(checkpoint.active_names(store), b"").items() <= before.items()
    assert len(checkpoint.active_names(store)) == len(before) - 3
    assert all(store.get(name) == data for name, data in before.items() if data)
    assert json.loads(before["meta.json"])["status"] == "finished"


def _finish(run: Path, iterations: int) -> None:
    assert runner.resume(run, stop={"iterations": iterations}).stopped_by == "iterations"


def test_before_its_claim_a_resumed_run_writes_neither_config_nor_metadata(run: Path, meanwhile: type[Meanwhile]) -> None:
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "meta.json")}

    def break_off() -> None:
        raise KeyboardInterrupt

    meanwhile.act = break_off
    with pytest.raises(KeyboardInterrupt):
        runner.resume(run, stop={"iterations": 9})
    assert {name: (run / name).read_bytes() for name in before} == before
    runner.resume(run, stop={"iterations": 9})
    assert Run.open(run).config()["stop"]["iterations"] == 9
    assert {"resumed", "torch_threads"} <= Run.open(run).meta().keys()


# -- starting from another run ------------------------------------------------------------------------------------------


def test_a_new_run_can_start_from_a_checkpoint(run: Path, tmp_path: Path) -> None:
    before = checkpoint.open_checkpoint(run)[1]
    data = small.data(6, seed=12, **FILTER)
    result = runner.train(data, project=tmp_path, trial="new", restore=run)
    assert result.run_dir == tmp_path / "new"
    assert checkpoint.names(LocalStore(run)) == ["000002", "000004"], "the old run is not touched"
    after = checkpoint.open_checkpoint(result.run_dir)[1]
    assert after.state["progress"]["iterations"] == 6
    assert after.state["models"]["model"]["version"] > before.state["models"]["model"]["version"]
    assert int(after.arrays["model"]["updates"]) > int(before.arrays["model"]["updates"])


def test_a_checkpoint_of_another_environment_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleCheckpoint, match=r"trained on CartPole-v1, not on Acrobot-v1"):
        runner.train(small.data(env="Acrobot-v1", **FILTER), project=tmp_path, trial="new", restore=run)


def test_a_checkpoint_that_does_not_exist_costs_no_directory(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        runner.train(small.data(), local_dir=tmp_path / "runs", restore=tmp_path / "nonsense")
    assert not (tmp_path / "runs").exists()


# -- the Python API -----------------------------------------------------------------------------------------------------


def test_training_returns_the_run_its_numbers_and_an_agent(tmp_path: Path) -> None:
    result = ludus.train("CartPole-v1", stop={"iterations": 2}, local_dir=tmp_path, **small.SETTINGS)
    assert result.run_dir.parent == tmp_path / "default"
    assert result.checkpoint == result.run_dir / "checkpoints" / "000002"
    assert result.metrics["iterations"] == 2
    assert result.episode_return_mean == result.metrics["episode_return_mean"]
    action, _ = result.agent.act(np.zeros(4, np.float32))
    assert action in (0, 1)
    loaded = ludus.load(result.run_dir)
    assert same(loaded.policy.weights(), result.agent.policy.weights())
    assert loaded.version == result.agent.version == 3
    assert same(ludus.load(result.run_dir / "best").policy.weights(), loaded.policy.weights())


def test_a_result_can_be_written_as_json_with_the_documented_keys(tmp_path: Path) -> None:
    result = small.train(tmp_path / "run", 1)
    plain = json.loads(json.dumps(result.to_json()))
    assert list(plain) == [
        *("run_dir", "checkpoint", "stopped_by", "timesteps"),
        *("iterations", "episode_return_mean", "time_s", "fps"),
    ]


def test_without_a_checkpoint_at_the_end_there_is_none(tmp_path: Path) -> None:
    result = small.train(tmp_path / "run", 1, top={"checkpoint_at_end": False})
    assert result.checkpoint is None
    assert checkpoint.names(LocalStore(tmp_path / "run")) == []


def test_sinks_of_the_caller_get_every_report_and_are_closed(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.seen: list[float] = []
            self.closed = 0

        def write(self, numbers: Numbers) -> None:
            self.seen.append(numbers["iterations"])

        def close(self) -> None:
            self.closed += 1

    sink = Sink()
    small.train(tmp_path / "run", 3, sinks=[sink])
    assert (sink.seen, sink.closed) == ([1, 2, 3, 3], 1), "the evaluation of the last iteration is a report of its own"


def test_the_last_evaluation_is_among_the_metrics(tmp_path: Path) -> None:
    result = small.train(tmp_path / "run", 2)
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["evaluation/return_mean"] == pytest.approx(result.metrics["evaluation/return_mean"])


# -- kill -9 ------------------------------------------------------------------------------------------------------------

_TRAIN = """
import sys
from pathlib import Path
from tests.experiments import small
small.train(Path(sys.argv[1]), 1_000_000, top={"checkpoint_freq": 1, "keep_checkpoints_num": 3}, evaluation_duration=0)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no kill -9")
def test_a_training_that_was_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    where = tmp_path / "run"
    training = subprocess.Popen([sys.executable, "-c", _TRAIN, str(where)], cwd=Path(__file__).parents[2], start_new_session=True)
    try:
        _wait_for(lambda: _numbers(where)[-1:] and _numbers(where)[-1] >= 5, training)
    finally:
        os.kill(training.pid, signal.SIGKILL)
        training.wait(30)
    newest = checkpoint.newest(LocalStore(where))
    reached = newest.state["progress"]["iterations"]
    assert Run.open(where).meta()["status"] == "running", "nobody had time to say how it ended"
    result = runner.resume(where, stop={"iterations": reached + 3})
    rows = read_jsonl(where / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == list(range(1, reached + 4))
    assert rows[-1]["incarnation"] == 2
    assert rows[-1]["learner/version"] > rows[reached - 1]["learner/version"]
    assert result.stopped_by == "iterations"
    assert checkpoint.newest(LocalStore(where)).state["progress"]["iterations"] == reached + 3
    assert not list(where.rglob(".aside*"))
    assert Run.open(where).meta()["status"] == "finished"


def _numbers(where: Path) -> Sequence[int]:
    return [int(name) for name in checkpoint.names(LocalStore(where))]


def _wait_for(condition: Any, process: subprocess.Popen[bytes], at_most_s: float = 120) -> None:
    wait_until(condition, at_most_s, failed=lambda: process.poll() is not None and "the training ended by itself")


def test_a_run_that_has_reached_its_stop_is_not_trained_any_further_by_a_resume(run: Path) -> None:
    before = checkpoint.names(LocalStore(run))
    with pytest.raises(UsageError, match=r"already reached its stop \(iterations\).*--stop"):
        runner.resume(run)
    assert checkpoint.names(LocalStore(run)) == before
    assert runner.resume(run, stop={"iterations": 5}).metrics["iterations"] == 5


def test_a_checkpoint_of_another_environment_costs_no_directory(run: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleCheckpoint, match="was trained on CartPole-v1, not on Acrobot-v1"):
        runner.train(small.data(1, env="Acrobot-v1"), project=tmp_path / "other", trial="run", restore=run)
    assert not (tmp_path / "other").exists()


# -- how a batch is made ------------------------------------------------------------------------------------------------


def test_a_batch_of_complete_episodes_holds_nothing_else(tmp_path: Path) -> None:
    result = small.train(tmp_path / "whole", 3, batch_mode="complete_episodes", train_batch_size=300)
    rows = numbers(result.run_dir)
    assert all(row["timesteps"] >= 300 * row["iterations"] for row in rows)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": {"use_lstm": True}}, "the model is recurrent"),
        ({"num_workers": 2, "sampling": "pipelined"}, "workers take turns"),
    ],
)
def test_complete_episodes_are_refused_where_they_cannot_be(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small.train(tmp_path / "whole", 1, batch_mode="complete_episodes", **settings)
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(
    ("run", "config", "stop"),
    [
        ("PPO", {}, {"iterations": 3}),
        ("PPO", {"min_time_s_per_iteration": 30}, {"training_iteration": 3}),
        ("DQN", {}, {"training_iteration": 3}),
        ("DQN", {"timesteps_per_iteration": 0}, {"iterations": 3}),
        ("IMPALA", {}, {"training_iteration": 3}),
        ("APPO", {"min_iter_time_s": 0}, {"iterations": 3}),
    ],
)
def test_a_training_iteration_is_an_update_only_where_rllibs_is(run: str, config: dict[str, Any], stop: dict[str, Any]) -> None:
    data = {"name": "x", "env": "CartPole-v1", "run": run, "stop": {"training_iteration": 3}, "config": config}
    resolved = resolve(data)
    assert resolved.experiment.stop.model_dump(exclude_none=True) == stop
    again = resolve({"name": "x", **resolved.to_dict()["x"]})
    assert again.experiment == resolved.experiment
    assert again.config.least_iteration == resolved.config.least_iteration


def test_training_iterations_of_dqn_are_a_thousand_steps(tmp_path: Path) -> None:
    config = {"evaluation_duration": 0, "model": {"fcnet_hiddens": [8]}}
    data = {"env": "CartPole-v1", "run": "DQN", "config": config}
    result = runner.train({**data, "stop": {"training_iteration": 2}}, local_dir=tmp_path, supervised=False)
    assert result.stopped_by == "training_iteration"
    assert 2000 <= result.metrics["timesteps"] < 2200
    assert result.metrics["training_iteration"] == 2


def test_without_exploring_the_most_probable_action_is_taken(tmp_path: Path) -> None:
    resolved = resolve(small.data(1, explore=False, env="tests.environments:make_count"))
    with assemble_run(prepare_new_run(resolved, tmp_path / "run")) as parts:
        block = None
        take = parts.trainer._memory.take

        def seen(timeout_s: float) -> Any:
            nonlocal block
            block = take(timeout_s)
            return block

        parts.trainer._memory.take = seen  # type: ignore[method-assign]
        parts.controller.run()
        assert block is not None
        assert (block.log_prob > np.log(0.5) - 1e-6).all(), "of two actions"
