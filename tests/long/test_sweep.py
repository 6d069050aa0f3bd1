"""Sweeps in a real Ray: schedulers, failures, interruptions and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import ludus
from ludus.core.metrics import read_jsonl
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.io.yaml_documents import dump_yaml
from ludus.storage.local import LocalStore
from ludus.tuning.messages import TrialEvent
from ludus.tuning.report import SweepResult
from ludus.tuning.sweep import SweepOptions, open_sweep, resume_sweep, run_sweep
from tests.long.record import record
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(900)]

SMALL = {"num_envs_per_worker": 4, "train_batch_size": 256, "minibatch_size": 64, "num_epochs": 2, "evaluation_duration": 0}
BUSY_S = 180.0  # for processes to start, on a machine that has other things to do


def experiment(**more: Any) -> dict[str, Any]:
    config = SMALL | more.pop("config", {})
    return {"env": "CartPole-v1", "run": "PPO", "stop": {"timesteps": 20_000}, "config": config} | more


class Heard:
    def __init__(self) -> None:
        self.events: list[TrialEvent] = []

    def __call__(self, event: TrialEvent) -> None:
        self.events.append(event)

    def kinds(self, name: str) -> list[str]:
        return [event.kind for event in self.events if event.name == name and event.kind != "reported"]


def sweep(tmp_path: Path, data: dict[str, Any], heard: Heard | None = None, **options: Any) -> SweepResult:
    (result,) = run_sweep({"s": data}, SweepOptions(tmp_path, hear=heard, **options))
    return result


def by_name(result: SweepResult) -> dict[str, dict[str, Any]]:
    return {row["trial"]: row for row in result.results}


def ours(tag: str) -> list[psutil.Process]:
    """Processes that belong to the sweep whose driver was given this word in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LUDUS_TEST_TAG") == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


# -- schedulers


def test_population_based_training_copies_the_better_trial_and_changes_its_settings(tmp_path: Path) -> None:
    """The bad learning rates learn nothing: what they show after they copied is what the good one has learned."""
    data = experiment(
        config={"lr": {"grid_search": [2e-3, 1e-9]}},
        stop={"timesteps": 60_000},
        tune={
            "scheduler": "pbt", "perturbation_interval": 20_000, "quantile_fraction": 0.5, "report_s": 0.2,
            "hyperparam_mutations": {"lr": {"loguniform": [1e-4, 1e-2]}},
        },
    )  # fmt: skip
    heard = Heard()
    result = sweep(tmp_path, data, heard)
    rows = by_name(result)
    weak, strong = rows["t001_lr-1e-09"], rows["t000_lr-0.002"]
    assert [row["status"] for row in result.results] == ["finished", "finished"]
    assert weak["exploited"] >= 1
    meta = Run.open(Path(weak["run_dir"])).meta()
    assert Path(meta["exploited"][0]["run"]) == Path(strong["run_dir"]).absolute()
    assert weak["settings"]["lr"] != 1e-9  # explored
    assert 1e-4 <= weak["settings"]["lr"] <= 1e-2
    steps = [row["timesteps"] for row in read_jsonl(Path(weak["run_dir"]) / "metrics.jsonl")]
    assert steps == sorted(steps)  # counting goes on
    assert weak["value"] > 60  # a policy that has learned nothing gets 22
    record("pbt", exploits=weak["exploited"] + strong["exploited"], weak=weak["value"], strong=strong["value"])


def test_asha_stops_what_is_bad_early_and_lets_the_good_go_on(tmp_path: Path) -> None:
    data = experiment(
        config={"lr": {"grid_search": [2e-3, 1e-9, 2e-9, 3e-9]}},
        stop={"timesteps": 60_000},
        tune={"scheduler": "asha", "grace_period": 10_000, "reduction_factor": 3, "report_s": 0.2, "max_concurrent": 2},
    )
    result = sweep(tmp_path, data)
    rows = by_name(result)
    assert rows["t000_lr-0.002"]["status"] == "finished"
    assert result.best_run.name == "t000_lr-0.002"
    stopped = [row for row in result.results if row["status"] == "stopped"]
    assert len(stopped) >= 2
    assert all(row["timesteps"] < 60_000 for row in stopped)
    assert all(Run.open(Path(row["run_dir"])).meta()["status"] == "stopped" for row in stopped)


# -- failures


def test_a_trial_that_fails_is_tried_again_from_its_checkpoint(tmp_path: Path) -> None:
    """The environment breaks twice and then no more: it counts in a file how often."""
    data = experiment(
        env="tests.long.test_sweep:make_breaking",
        config={"seed": {"grid_search": [1, 2]}, "env_config": {"file": str(tmp_path / "broken")}},
        stop={"iterations": 12},
        checkpoint_freq=1,
        max_failures=3,
    )
    heard = Heard()
    result = sweep(tmp_path, data, heard, max_concurrent=1)
    assert [row["status"] for row in result.results] == ["finished", "finished"]
    assert heard.kinds("t000_seed-1").count("retried") == 2
    assert "the game broke" in next(event.error for event in heard.events if event.kind == "retried")
    assert [row["iterations"] for row in read_jsonl(tmp_path / "s" / "t000_seed-1" / "metrics.jsonl")] == list(range(1, 13))


def test_a_trial_that_always_fails_is_given_up_and_the_others_go_on_and_it_can_be_retried(tmp_path: Path) -> None:
    file = tmp_path / "broken"
    data = experiment(
        env="tests.long.test_sweep:make_breaking",
        config={"env_config": {"file": str(file), "times": {"grid_search": [0, 100]}}},
        stop={"iterations": 5},
        max_failures=1,
    )
    result = sweep(tmp_path, data, max_concurrent=1)
    rows = by_name(result)
    assert rows["t000_times-0"]["status"] == "finished"
    assert rows["t001_times-100"]["status"] == "failed"
    assert "the game broke" in rows["t001_times-100"]["error"]
    assert result.best_run.name == "t000_times-0"
    assert not result.interrupted
    unchanged = resume_sweep(tmp_path / "s", SweepOptions())
    assert by_name(unchanged)["t001_times-100"]["status"] == "failed"
    file.write_text("x" * 1000)  # it has broken often enough
    retried = resume_sweep(tmp_path / "s", SweepOptions(retry_failed=True))
    assert [row["status"] for row in retried.results] == ["finished", "finished"]


def make_breaking(file: str, times: int = 2) -> Any:
    """A CartPole whose first step breaks after a while, as often as `times`, over all processes."""
    import gymnasium as gym

    class Broken(gym.Wrapper[Any, Any, Any, Any]):
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 150 and (len(Path(file).read_text()) if Path(file).exists() else 0) < times:
                with open(file, "a") as counter:
                    counter.write("x")
                raise RuntimeError("the game broke")
            return super().step(action)

    return Broken(gym.make("CartPole-v1"))


# -- workers


def test_a_trial_with_workers_reserves_their_cores_and_leaves_none_of_them(tmp_path: Path) -> None:
    data = experiment(
        config={"num_workers": 1, "num_envs_per_worker": 4, "lr": {"grid_search": [1e-3, 1e-4]}}, stop={"timesteps": 5_000}
    )
    os.environ["LUDUS_TEST_TAG"] = tag = f"workers-{os.getpid()}-{time.time()}"
    seen: list[set[str]] = []
    running: set[str] = set()

    def hear(event: TrialEvent) -> None:
        running.add(event.name) if event.kind == "started" else running.discard(event.name) if event.kind == "ended" else None
        seen.append(set(running))

    try:
        (result,) = run_sweep({"s": data}, SweepOptions(tmp_path, hear=hear))
    finally:
        del os.environ["LUDUS_TEST_TAG"]
    assert [row["status"] for row in result.results] == ["finished", "finished"]
    if os.cpu_count() == 2:  # each trial takes both
        assert max(len(together) for together in seen) == 1
    wait_until(lambda: not ours(tag), 30, what="all processes of the sweep are gone")


# -- interrupted, killed, resumed


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> tuple[subprocess.Popen[str], str]:
        tag = f"driver-{os.getpid()}-{time.time()}"
        command = [sys.executable, "-m", "ludus.cli.main", "tune", "--local-dir", str(tmp_path), *words]
        process = subprocess.Popen(
            command, env={**os.environ, "LUDUS_TEST_TAG": tag}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process, tag

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def a_long_one(tmp_path: Path, **more: Any) -> Path:
    file = tmp_path / "long.yaml"
    data = experiment(config={"lr": {"grid_search": [1e-3, 1e-4]}}, stop={"timesteps": 10_000_000}, **more)
    file.write_text(dump_yaml({"s": data}))
    return file


def iterations(run: Path) -> int:
    rows = read_jsonl(run / "metrics.jsonl")
    return int(rows[-1]["iterations"]) if rows else 0


RUNS = ("t000_lr-0.001", "t001_lr-0.0001")


def test_ctrl_c_stores_what_all_trials_have_and_resume_goes_on(tmp_path: Path, driver: Any) -> None:
    process, tag = driver("-f", str(a_long_one(tmp_path)))
    wait_until(
        lambda: all(iterations(tmp_path / "s" / run) >= 3 for run in RUNS), BUSY_S, what="both trials have learned something"
    )
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=BUSY_S)
    assert process.returncode == 130, out
    assert "--resume" in out
    wait_until(lambda: not ours(tag), 30, what="all processes of the sweep are gone")
    reached = {}
    for run in RUNS:
        assert Run.open(tmp_path / "s" / run).meta()["status"] == "interrupted"
        reached[run] = int(checkpoint.newest(LocalStore(tmp_path / "s" / run)).state["progress"]["iterations"])
        assert reached[run] == iterations(tmp_path / "s" / run)
    assert open_sweep(tmp_path / "s").ended == {}

    again, tag = driver("--resume", str(tmp_path / "s"))
    wait_until(lambda: all(iterations(tmp_path / "s" / run) > reached[run] + 1 for run in RUNS), BUSY_S, what="both trials go on")
    again.send_signal(signal.SIGTERM)
    out, _ = again.communicate(timeout=BUSY_S)
    assert again.returncode == 130, out
    for run in RUNS:
        counted = [row["iterations"] for row in read_jsonl(tmp_path / "s" / run / "metrics.jsonl")]
        assert counted == list(range(1, len(counted) + 1))


def test_the_second_ctrl_c_ends_everything_at_once(tmp_path: Path, driver: Any) -> None:
    process, tag = driver("-f", str(a_long_one(tmp_path)))
    wait_until(
        lambda: all(iterations(tmp_path / "s" / run) >= 1 for run in RUNS), BUSY_S, what="both trials have learned something"
    )
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    wait_until(lambda: not ours(tag), 30, what="all processes of the sweep are gone")


@pytest.mark.parametrize("workers", [0, 1])
def test_kill_9_of_the_driver_leaves_no_process_and_resume_goes_on(tmp_path: Path, driver: Any, workers: int) -> None:
    file = a_long_one(tmp_path, checkpoint_freq=1, keep_checkpoints_num=2)
    more = ("--num-workers", "1", "--max-concurrent", "1") if workers else ()
    runs = RUNS[:1] if workers else RUNS
    process, tag = driver("-f", str(file), *more)
    wait_until(
        lambda: all(iterations(tmp_path / "s" / run) >= 3 for run in runs), BUSY_S, what="the trials have learned something"
    )
    assert len(ours(tag)) > 3
    process.kill()
    process.wait(timeout=30)
    wait_until(lambda: not ours(tag), 40, what="all processes of the sweep are gone")
    reached = {run: int(checkpoint.newest(LocalStore(tmp_path / "s" / run)).state["progress"]["iterations"]) for run in runs}
    again, tag = driver("--resume", str(tmp_path / "s"), *more[2:])
    wait_until(
        lambda: all(iterations(tmp_path / "s" / run) > max(3, reached[run]) for run in runs), BUSY_S, what="the trials go on"
    )
    again.send_signal(signal.SIGINT)
    out, _ = again.communicate(timeout=BUSY_S)
    assert again.returncode == 130, out
    wait_until(lambda: not ours(tag), 30, what="all processes of the sweep are gone")
    first = json.loads((tmp_path / "s" / runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert first["incarnation"] >= 2


def test_a_sweep_that_runs_is_not_run_twice(tmp_path: Path, driver: Any) -> None:
    first, _ = driver("-f", str(a_long_one(tmp_path)))
    wait_until(lambda: (tmp_path / "s" / "sweep.json").exists(), BUSY_S, what="the sweep has begun")
    for words in (("-f", str(tmp_path / "long.yaml")), ("--resume", str(tmp_path / "s"))):
        second, _ = driver(*words)
        out, _ = second.communicate(timeout=BUSY_S)
        assert second.returncode == 2, out
        assert "already holds a sweep" in out or f"process {first.pid} on" in out
    assert first.poll() is None


# -- a Tuner of one's own

SCRIPT = """
import sys
import gymnasium as gym
import ray
from ray import tune
import ludus

class Mine(gym.Wrapper):
    pass

def mine(**settings):
    return Mine(gym.make("CartPole-v1"))

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ludus.register_env("mine", mine)
    trainable = ludus.trainable("PPO", num_envs_per_worker=4, train_batch_size=256, minibatch_size=64, evaluation_duration=0)
    space = {"env": "mine", "lr": tune.grid_search([1e-3, 1e-4]), "num_workers": tune.choice([1])}
    stop = tune.RunConfig(
        name="own", storage_path=sys.argv[1], stop={"timesteps": 3000}, verbose=0,
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
    )
    results = tune.Tuner(trainable, param_space=space, run_config=stop).fit()
    assert not results.errors, results.errors
    for result in results:
        assert result.metrics["timesteps"] >= 3000
        agent = ludus.load(result.path)
        assert agent is not None
    print("resources", trainable.default_resource_request({"env": "mine", "num_workers": 3}).bundles)
    print("best", results.get_best_result("episode_return_mean", "max").config["lr"])
    config = {"env": "mine", "num_workers": 0, "num_gpus": 0, "ignore_worker_failures": True, "evaluation_duration": 0}
    swept = ludus.tune("DQN", name="seeds", stop={"training_iteration": 10}, config=config, num_samples=2, local_dir=sys.argv[1])
    print("swept", [(row["status"], row["iterations"], row["settings"]) for row in swept.results], len(swept.to_pandas()))
    assert ray.is_initialized()
"""


def test_a_trainable_works_in_a_tuner_and_a_ray_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py", str(tmp_path / "results")], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resources [{'CPU': 1.0}, {'CPU': 1.0}, {'CPU': 1.0}, {'CPU': 1.0}]" in done.stdout
    assert len(list((tmp_path / "results" / "own").glob("*/config.yaml"))) == 2
    swept = next(line for line in done.stdout.splitlines() if line.startswith("swept"))
    assert swept.count("('finished', 10, {'seed': ") == 2


def test_the_same_trial_learns_the_same_in_a_sweep_and_by_hand(tmp_path: Path) -> None:
    data = experiment(config={"lr": {"grid_search": [1e-3]}, "seed": 3}, stop={"timesteps": 4_000})
    result = sweep(tmp_path, data)
    settings: dict[str, Any] = {**SMALL, "lr": 1e-3, "seed": 3}
    alone = ludus.train("CartPole-v1", stop={"timesteps": 4_000}, local_dir=tmp_path / "alone", **settings)
    one, other = checkpoint.newest(LocalStore(result.best_run)), checkpoint.newest(LocalStore(alone.run_dir))
    for name, value in other.weights["model"].items():
        np.testing.assert_array_equal(one.weights["model"][name], value, err_msg=name)
