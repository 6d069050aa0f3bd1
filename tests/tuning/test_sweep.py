"""Sweeps, without Ray: what is planned, refused, kept, and found. (Ray itself: the last test here, and tests/long/test_sweep.py.)"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.config.experiment_file import load_experiments
from ludus.config.search_space import SearchedKey
from ludus.errors import ConfigError, Damaged, NotFound, UsageError
from ludus.experiments.resolve import ClusterOptions
from ludus.experiments.runs.run_dir import Run, find_runs
from ludus.io.yaml_documents import dump_yaml
from ludus.tuning import sweep as tuning
from ludus.tuning.messages import FAILED, FINISHED, OVER, TrialEvent
from ludus.tuning.report import read_results
from ludus.tuning.sweep import Mutator, SweepOptions, open_sweep, plan_sweep, resume_sweep, run_sweep, trial_resources

SMALL = {"num_envs_per_worker": 2, "train_batch_size": 32, "minibatch_size": 16, "num_epochs": 1, "evaluation_duration": 0}
LR = {"grid_search": [1e-3, 1e-4]}


def experiment(**more: Any) -> dict[str, Any]:
    config = SMALL | more.pop("config", {"lr": LR})
    return {"env": "CartPole-v1", "run": "PPO", "stop": {"timesteps": 1000}, "config": config} | more


# -- planning


def test_every_trial_of_a_plan_is_an_experiment_that_can_be_trained(tmp_path: Path) -> None:
    sweep = plan_sweep("s", experiment(num_samples=2), tmp_path)
    assert sweep.directory == tmp_path / "s"
    made = [sweep.experiment_of(trial)["config"] for trial in sweep.trials]
    assert [(m["lr"], m["seed"]) for m in made] == [(1e-3, 0), (1e-4, 0), (1e-3, 1), (1e-4, 1)]
    assert all(m["torch_threads"] == m["learner_threads"] == 1 for m in made)


def test_older_spellings_can_be_searched(tmp_path: Path) -> None:
    data = {"env": "CartPole-v1", "config": {"num_sgd_iter": {"grid_search": [2, 3]}}, "repeat": 2}
    sweep = plan_sweep("s", data, tmp_path)
    assert [sweep.experiment_of(t)["config"]["num_epochs"] for t in sweep.trials] == [2, 3, 2, 3]


def test_the_call_of_an_older_script_is_a_sweep(tmp_path: Path) -> None:
    config = {"num_workers": 2, "num_gpus": 0, "ignore_worker_failures": True}
    data = {"env": "CartPole-v1", "run": "DQN", "stop": {"training_iteration": 10}, "num_samples": 2, "config": config}
    sweep = plan_sweep("dqn", data, tmp_path)
    assert [trial_resources(sweep.experiment_of(t), None).all_cpus for t in sweep.trials] == [3, 3]
    assert [sweep.experiment_of(t)["config"]["seed"] for t in sweep.trials] == [0, 1]


def test_a_trial_keeps_a_few_checkpoints_unless_it_is_told_how_many(tmp_path: Path) -> None:
    usual, told = plan_sweep("s", experiment(), tmp_path), plan_sweep("s", experiment(keep_checkpoints_num=7), tmp_path)
    assert [s.experiment_of(s.trials[0])["keep_checkpoints_num"] for s in (usual, told)] == [tuning.DEFAULT_KEEP, 7]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"config": {"lr": {"grid_search": [1e-3, -1.0]}}}, r"config\.lr is -1\.0"),
        ({"config": {"lrr": {"grid_search": [1]}}}, r"config\.lrr"),
        ({"config": {"num_workers": "auto", "lr": LR}}, "num_workers is auto"),
        ({"env": "external", "config": {"lr": LR}}, "External games"),
        ({"tune": {"schedular": "asha"}}, r"tune\.schedular"),
        ({"tune": {"scheduler": "pbt"}, "config": {}, "num_samples": 2}, "has nothing to change"),
        ({"tune": {"scheduler": "pbt"}, "config": {"lr": {"uniform": [0.1, 0.2]}}}, "needs at least 2 trials"),
        ({"tune": {"scheduler": "asha", "time_attr": "iterations"}}, r"Set stop\.iterations"),
        ({"tune": {"cpus_per_trial": 1}, "config": {"num_workers": 1, "lr": LR}}, "has 2 processes"),
        ({"stop": {"timesteps": {"choice": [1, 2]}}}, "contains search values|stop"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_starts(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_sweep({"s": experiment(**more)}, SweepOptions(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_of_several_experiments_none_begins_when_one_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run_sweep({"good": experiment(), "bad": experiment(config={"gamma": {"choice": [7]}})}, SweepOptions(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_trial_reserves_a_core_for_each_of_its_processes() -> None:
    def of(**config: Any) -> tuple[int, int, float]:
        found = trial_resources({"config": config}, config.pop("cpus", None))
        return found.cpus, found.workers, found.gpus

    assert of() == (1, 0, 0.0)
    assert of(num_workers=3, num_gpus=0.5) == (1, 3, 0.5)
    assert of(num_env_runners=2, num_learners=2) == (1, 3, 0.0)
    assert of(num_workers=2, cpus=6) == (4, 2, 0.0)


# -- the directory of a sweep


def test_a_saved_sweep_is_the_same_when_it_is_opened(tmp_path: Path) -> None:
    sweep = plan_sweep("s", experiment(num_samples=2, tune={"metric": "fps", "mode": "min"}), tmp_path)
    sweep.ended["t000_lr-0.001_seed-0"] = "finished"
    sweep.save()
    again = open_sweep(tmp_path / "s")
    assert (again.trials, again.ended, again.tune, again.data) == (sweep.trials, sweep.ended, sweep.tune, sweep.data)
    assert [trial.name for trial in again.remaining_trials(retry_failed=False)] == [trial.name for trial in sweep.trials[1:]]


def test_a_second_sweep_in_a_directory_is_refused(tmp_path: Path) -> None:
    plan_sweep("s", experiment(), tmp_path).save()
    with pytest.raises(UsageError, match="already holds a sweep"):
        run_sweep({"s": experiment()}, SweepOptions(tmp_path))


def test_a_sweep_of_which_no_trial_could_begin_leaves_nothing_behind(tmp_path: Path) -> None:
    nowhere = ClusterOptions("127.0.0.1:1")
    with pytest.raises(UsageError, match=r"There is no Ray cluster at 127\.0\.0\.1:1"):
        run_sweep({"s": experiment()}, SweepOptions(tmp_path, nowhere))
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_somebody_runs_is_refused(tmp_path: Path) -> None:
    plan_sweep("s", experiment(), tmp_path).save()
    with (
        tuning._lock_sweep(tmp_path / "s", made=False),
        pytest.raises(UsageError, match=r"A sweep is running in .* \(process \d+ on"),
    ):
        resume_sweep(tmp_path / "s", SweepOptions())


def test_what_is_no_sweep_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not the directory of a sweep"):
        resume_sweep(tmp_path, SweepOptions())
    (tmp_path / "sweep.json").write_text('{"trials": 3')
    with pytest.raises(Damaged):
        resume_sweep(tmp_path, SweepOptions())


@pytest.mark.parametrize(
    ("kind", "numbers", "state"),
    [
        ("ended", {OVER: FINISHED}, "finished"),
        ("ended", {OVER: FAILED}, "failed"),
        ("ended", {}, "stopped"),
        ("failed", {}, "failed"),
        ("reported", {OVER: FINISHED}, None),
        ("retried", {}, None),
    ],
)
def test_how_a_trial_ended_is_told_by_its_last_words(kind: str, numbers: dict[str, float], state: str | None) -> None:
    assert tuning._end_state(TrialEvent("t", kind, numbers, {})) == state


# -- results


def a_run(directory: Path, values: list[float | None], status: str = "finished") -> None:
    run = Run(directory)
    run.write_config({"s": {"env": "CartPole-v1"}})
    run.write_meta({"status": status})
    lines = [
        json.dumps({"iterations": n + 1, "timesteps": 100 * (n + 1), "time_s": 0.5 * n, "episode_return_mean": value})
        for n, value in enumerate(values)
    ]
    run.metrics_path.write_text("\n".join(lines) + "\n")


def results(tmp_path: Path, mode: str = "max") -> Any:
    sweep = plan_sweep("s", experiment(config={"lr": {"grid_search": [1e-1, 1e-2, 1e-3, 1e-4]}}, tune={"mode": mode}), tmp_path)
    names = [trial.name for trial in sweep.trials]
    a_run(sweep.directory / names[0], [10.0, 50.0])
    a_run(sweep.directory / names[1], [10.0, 70.0, None])
    a_run(sweep.directory / names[2], [10.0, 99.0], "failed")
    ended = {names[0]: "finished", names[1]: "stopped", names[2]: "failed"}
    return read_results("s", sweep.directory, sweep.data, sweep.tune, sweep.trials, ended).write(1.0, 2.0)


def test_the_best_is_first_and_what_failed_or_has_nothing_to_show_is_last(tmp_path: Path) -> None:
    found = results(tmp_path)
    assert [(row["settings"]["lr"], row["value"], row["status"]) for row in found.results] == [
        (1e-2, 70.0, "stopped"),
        (1e-1, 50.0, "finished"),
        (1e-4, None, "waiting"),
        (1e-3, 99.0, "failed"),
    ]
    assert found.interrupted
    assert found.best_run == tmp_path / "s" / "t001_lr-0.01"
    assert results(tmp_path / "other", "min").best["settings"]["lr"] == 1e-1


def seeded(tmp_path: Path, values: list[list[float | None]], ended: dict[int, str] | None = None, **tune: Any) -> Any:
    """A sweep over three learning rates with the last values [sample][setting]: trial 0 is the first sample of the first setting."""
    rates = {"grid_search": [1e-1, 1e-2, 1e-3]}
    sweep = plan_sweep("s", experiment(config={"lr": rates, "seed": 40}, num_samples=len(values), tune=tune), tmp_path)
    for trial, value in zip(sweep.trials, (v for sample in values for v in sample), strict=True):
        a_run(sweep.directory / trial.name, [value])
    states = {trial.name: (ended or {}).get(number, "finished") for number, trial in enumerate(sweep.trials)}
    return read_results("s", sweep.directory, sweep.data, sweep.tune, sweep.trials, states).write(1.0, 2.0)


def test_settings_are_ranked_by_the_mean_over_their_seeds_and_not_by_the_luckiest(tmp_path: Path) -> None:
    found = seeded(tmp_path, [[10.0, 60.0, 20.0], [100.0, 70.0, 20.0], [10.0, 65.0, 20.0]])
    assert [(row["settings"]["lr"], row["settings"]["seed"], row["value"]) for row in found.results] == [
        (1e-2, 41, 70.0), (1e-2, 42, 65.0), (1e-2, 40, 60.0),
        (1e-1, 41, 100.0), (1e-1, 40, 10.0), (1e-1, 42, 10.0),
        (1e-3, 40, 20.0), (1e-3, 41, 20.0), (1e-3, 42, 20.0),
    ]  # fmt: skip
    assert found.best_run.name == "t004_lr-0.01_seed-41"  # to play with: the best that was trained of the best setting
    assert (found.best_config["config"]["lr"], found.best_config["config"]["seed"]) == (1e-2, 40)  # the first seed, not the best
    text = (tmp_path / "s" / "best.yaml").read_text()
    assert text.startswith("# episode_return_mean 65, the mean of 3 seeds; the best of them is t004_lr-0.01_seed-41\n")
    assert load_experiments(tmp_path / "s" / "best.yaml")["s-best"]["config"]["seed"] == 40
    plain = json.loads((tmp_path / "s" / "results.json").read_text())
    assert [(one["settings"], one["value_mean"], one["value_n"]) for one in plain["settings"]] == [
        ({"lr": 1e-2}, 65.0, 3), ({"lr": 1e-1}, 40.0, 3), ({"lr": 1e-3}, 20.0, 3),
    ]  # fmt: skip
    assert [row["value_mean"] for row in plain["trials"]] == [65.0] * 3 + [40.0] * 3 + [20.0] * 3
    with (tmp_path / "s" / "results.csv").open() as file:
        assert [float(row["value_mean"]) for row in csv.DictReader(file)] == [65.0] * 3 + [40.0] * 3 + [20.0] * 3
    lowest = seeded(tmp_path / "min", [[10.0, 60.0, 20.0], [100.0, 70.0, 20.0]], mode="min")
    assert [one["settings"]["lr"] for one in lowest.settings] == [1e-3, 1e-1, 1e-2]


def test_trials_that_failed_or_have_no_value_do_not_count_in_the_mean(tmp_path: Path) -> None:
    found = seeded(tmp_path, [[500.0, 60.0, 70.0], [10.0, None, None]], {0: "failed"})
    assert [(one["settings"]["lr"], one["value_mean"], one["value_n"]) for one in found.settings] == [
        (1e-3, 70.0, 1), (1e-2, 60.0, 1), (1e-1, 10.0, 1),
    ]  # fmt: skip
    assert [row["value"] for row in found.results] == [70.0, None, 60.0, None, 10.0, 500.0]
    nobody = seeded(tmp_path / "none", [[1.0, None, None]], {0: "failed"})
    assert nobody.best is None


def test_what_population_based_training_has_brought_to_the_same_values_is_not_a_repetition(tmp_path: Path) -> None:
    values: list[list[float | None]] = [[10.0, 60.0, 20.0], [100.0, 70.0, 20.0]]
    found = seeded(tmp_path, values, scheduler="pbt")
    assert [row["value"] for row in found.results] == [100.0, 70.0, 60.0, 20.0, 20.0, 10.0]
    assert {row["value_n"] for row in found.results} == {1}


def test_the_table_shows_what_a_setting_is_worth_over_its_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ludus.cli.training.tune import _print_table

    _print_table(seeded(tmp_path, [[10.0, 60.0, 20.0], [100.0, 70.0, 21.0]]), to_stderr=False)
    said = capsys.readouterr().out
    assert [said.count(text) for text in ("65 (2)", "55 (2)", "20.5 (2)")] == [2, 2, 2]
    _print_table(results(tmp_path / "single"), to_stderr=False)
    assert "(1)" not in capsys.readouterr().out


def test_the_best_config_is_a_whole_experiment_that_train_takes(tmp_path: Path) -> None:
    found = results(tmp_path)
    loaded = load_experiments(tmp_path / "s" / "best.yaml")
    assert loaded == {"s-best": {"env": "CartPole-v1", "run": "PPO", "stop": {"timesteps": 1000}, "config": SMALL | {"lr": 1e-2}}}
    assert found.best_config == {"name": "s-best", **loaded["s-best"]}
    done = ludus.train(**found.best_config["config"], env=found.best_config["env"], stop={"iterations": 1}, local_dir=tmp_path)
    assert done.metrics["iterations"] == 1


def test_the_table_has_a_row_for_every_trial_and_a_column_for_every_setting(tmp_path: Path) -> None:
    results(tmp_path)
    with (tmp_path / "s" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["lr"]) for row in rows] == [1e-2, 1e-1, 1e-4, 1e-3]
    assert rows[0]["trial"] == "t001_lr-0.01"
    assert float(rows[0]["value"]) == 70.0
    assert int(rows[0]["timesteps"]) == 300
    plain = json.loads((tmp_path / "s" / "results.json").read_text())
    assert [row["trial"] for row in plain["trials"]] == [row["trial"] for row in rows]


def test_curves_and_the_searched_number_are_drawn(tmp_path: Path) -> None:
    results(tmp_path)
    picture = (tmp_path / "s" / "sweep.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    width = int.from_bytes(picture[16:20], "big")
    assert width == 13 * 120  # two panels: the curves, and the return over lr


def test_a_metric_that_nobody_has_is_said_with_those_that_are_known(tmp_path: Path) -> None:
    sweep = plan_sweep("s", experiment(tune={"metric": "return"}), tmp_path)
    a_run(sweep.directory / sweep.trials[0].name, [1.0])
    found = read_results("s", sweep.directory, sweep.data, sweep.tune, sweep.trials, {})
    with pytest.raises(NotFound, match=r"has a value of 'return'\. Known are: .*episode_return_mean"):
        _ = found.best_run


# -- mutations


def test_a_mutation_that_cannot_be_trained_is_never_handed_out() -> None:
    """A discount above 1 would end the trial."""
    key = SearchedKey(("config", "gamma"), "uniform", (0.5, 5.0))
    explorer = Mutator(experiment(config={}), [key], 1.0, None, 0)
    config = {"trial": {"name": "t", "values": [[["config", "gamma"], 0.9]]}}
    drawn = [explorer(config)["trial"]["values"][0][1] for _ in range(30)]
    assert all(value <= 1.0 for value in drawn)
    assert len(set(drawn)) > 10


# -- a real one


@pytest.mark.system
@pytest.mark.timeout(600)  # Ray's start alone may take a minute where others are busy
def test_a_sweep_from_the_command_line_trains_every_trial_and_finds_the_best(tmp_path: Path) -> None:
    data = experiment(config={"lr": {"grid_search": [1e-3, 1e-4]}}, stop={"iterations": 2})
    (tmp_path / "sweep.yaml").write_text(dump_yaml({"small": data}))
    command = [sys.executable, "-m", "ludus.cli.main", "tune", "-f", "sweep.yaml", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [row["status"] for row in told["trials"]] == ["finished", "finished"]
    assert [row["iterations"] for row in told["trials"]] == [2, 2]
    runs = find_runs(tmp_path / "runs")
    assert sorted(run.name for run in runs) == ["t000_lr-0.001", "t001_lr-0.0001"]
    assert {Run.open(run).config()["config"]["lr"] for run in runs} == {1e-3, 1e-4}
    assert ludus.load(tmp_path / told["best_run"]) is not None
    assert not (tmp_path / "runs" / "small" / ".tune").exists()
