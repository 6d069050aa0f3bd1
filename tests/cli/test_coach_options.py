"""`ludus train` with the options of Coach: presets, levels, custom parameters and fleets."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from ludus.cli.clusters import fleet
from ludus.cli.main import app
from ludus.cli.training import coach_options, train
from ludus.errors import UsageError
from ludus.experiments.resolve import resolve
from ludus.experiments.source.experiment_source import ExperimentOptions, experiments_from, read_source
from ludus.launch.job import Job, JobStatus
from tests.cli.calling import Call

SMALL = ["--num-envs", "2", "--set", "train_batch_size=32", "--set", "minibatch_size=16", "--set", "evaluation_duration=0"]


def parsed(command: Any, *words: str) -> dict[str, Any]:
    """What a command understands of its words."""
    found: dict[str, Any] = command.make_context("it", list(words)).params
    return found


@functools.cache
def train_command() -> Any:
    root: Any = typer.main.get_command(app)
    return root.commands["train"]


@functools.cache
def learner_command() -> Any:
    root: Any = typer.main.get_command(fleet.app)
    return root.commands["learner"]


def saved(runs: Path, name: str) -> dict[str, Any]:
    (file,) = (runs / name).glob("*/config.yaml")
    found: dict[str, Any] = yaml.safe_load(file.read_text())[name]
    return found


# -- words --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "understood"),
    [
        (["-p", "X", "-dc", "-e", "NAME", "-n", "3", "-dcp", "file"],
         {"preset": "X", "distributed": True, "experiment_name": "NAME", "num_workers": "3", "distributed_config": Path("file")}),
        (["--preset", "X", "--distributed_coach", "--experiment_name", "N", "--num_workers", "3"],
         {"distributed": True, "experiment_name": "N", "num_workers": "3"}),
        (["-lvl", "hopper", "-cp", "a=1;b=2", "-ep", "there", "-s", "60", "-crd", "run/checkpoints/000001"],
         {"level": "hopper", "custom_parameter": ["a=1;b=2"], "local_dir": "there", "save_secs": 60,
          "restore": "run/checkpoints/000001"}),
        (["--level", "hopper", "--custom_parameter", "a=1", "--experiment_path", "there", "--checkpoint_save_secs", "60",
          "--checkpoint_restore_dir", "c", "--distributed_coach_config_path", "f"],
         {"level": "hopper", "custom_parameter": ["a=1"], "local_dir": "there", "save_secs": 60, "restore": "c",
          "distributed_config": Path("f")}),
        (["-asc", "-c", "-ew", "-l"], {"until_solved": True, "use_cpu": True, "evaluation_worker": True, "list_": True}),
        (["-vv", "-q"], {"verbose": 2, "quiet": True}),
        (["-qv", "-n4", "-f", "x.yaml", "-epool"],
         {"quiet": True, "verbose": 1, "num_workers": "4", "file": Path("x.yaml"), "experiment_name": "pool"}),
        (["CartPole-v1", "--resume"], {"env": "CartPole-v1", "resume": train.NEWEST}),
    ],
)  # fmt: skip
def test_short_and_long_coach_options_are_accepted_with_the_other_options(words: list[str], understood: dict[str, Any]) -> None:
    found = parsed(train_command(), *words)
    assert {name: found[name] for name in understood} == understood


def test_every_option_that_is_spoken_of_is_one() -> None:
    for name in [*coach_options.names(coach_options.IGNORED), *coach_options.names(coach_options.UNSUPPORTED)]:
        assert parsed(train_command(), name)["noted" if name in coach_options.names(coach_options.IGNORED) else "refused"] is True


def test_notices_quote_ignored_options_as_they_were_typed(call: Call, tmp_path: Path) -> None:
    result = call(
        "train", "CartPole-v1", *SMALL, "--stop", "iterations=1", "-ep", tmp_path, "-tb", "--no_summary", "-dcp", "x.ini"
    )
    assert result.code == 0
    assert "-tb changes nothing: metrics are always written for TensorBoard" in result.out
    assert "--no_summary changes nothing" in result.out
    assert "--tensorboard" not in result.out
    assert "-dcp x.ini changes nothing without -dc." in result.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--play"], "--play is not supported"),
        (["-p", "CartPole_DQN", "--evaluate", "100"], "ludus rollout RUN --episodes 20"),
        (["-r", "-p", "CartPole_DQN"], "-r is not supported: training is not rendered"),
        (["-p", "CartPole_DQN", "-crf", "x"], "a checkpoint is a directory here"),
        (["-f", "tensorflow", "-p", "CartPole_DQN"], "all networks use PyTorch"),
        (["-p", "CartPole_A3C"], "CartPole_A3C is not supported"),
        (["-p", "Mujoco_ClippedPPO"], "Choose one: -lvl hopper"),
        (["-p", "CartPole_DQN", "-cp", "gama=1"], "Did you mean 'gamma'"),
        (["-p", "nofile.py"], "There is no file nofile.py"),
        (["CartPole-v1", "-cp", "env_params.level=my.game:make"], "in quotes: 'my.game:make'"),
        (["CartPole-v1", "-lvl", "Acrobot-v1"], "named twice: CartPole-v1 and Acrobot-v1"),
        (["tests.environments:make_count", "-asc"], "no target return is known"),
    ],
)
def test_unsupported_options_are_refused_with_a_hint(call: Call, words: list[str], message: str) -> None:
    result = call("train", *words)
    assert result.code == 2
    assert message in result.err


def test_a_preset_is_trained_by_its_name_in_coach_with_its_options(call: Call, tmp_path: Path) -> None:
    custom = "agent_params.algorithm.discount=0.5; heatup_steps=EnvironmentSteps(40); improve_steps=TrainingSteps(2)"
    words = ["-p", "cartpole_clippedppo", "-e", "mine", "-ep", tmp_path, "-cp", custom, "-s", "7", "-asc", "-c", "--seed", "3"]
    result = call("train", *words, "--set", "evaluation_duration=0", "--set", "lambda=0.5", "--json", "-q")
    assert result.code == 0
    assert result.json["iterations"] == 2
    data = saved(tmp_path, "mine")
    assert {key: data["config"][key] for key in ("gamma", "lambda", "seed", "learner_device")} == {
        "gamma": 0.5, "lambda": 0.5, "seed": 3, "learner_device": "cpu",
    }  # fmt: skip
    assert data["config"]["num_steps_sampled_before_learning_starts"] == 40
    assert data["checkpoint_time_s"] == 7
    assert {key: value for key, value in data["stop"].items() if value} == {"iterations": 2, "episode_return_mean": 490}


def test_presets_are_listed_by_l(call: Call) -> None:
    result = call("train", "-l")
    assert result.code == 0
    assert "CartPole_ClippedPPO" in result.out
    assert "lunarlander" in result.out


def test_a_python_file_is_a_preset(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "small = dict(num_envs_per_worker=2, train_batch_size=32, minibatch_size=16, evaluation_duration=0)\n"
        "def preset():\n    return {'env': 'CartPole-v1', 'stop': {'iterations': 1}, 'config': small}\n"
    )
    result = call("train", "-p", tmp_path / "mine.py", "--local-dir", tmp_path / "runs", "-lvl", "Acrobot-v1", "-q")
    assert result.code == 0
    assert saved(tmp_path / "runs", "mine")["env"] == "Acrobot-v1"


# -- experiments --------------------------------------------------------------------------------------------------------


def described(preset: str, **settings: Any) -> tuple[dict[str, Any], list[str]]:
    result: list[str] = []
    source = read_source(None, preset)
    ((_, data),) = experiments_from(source, ExperimentOptions(settings=settings), say=result.append).items()
    return data, result


def test_the_batch_of_a_preset_fits_the_workers_that_it_is_given() -> None:
    data, result = described("CartPole_ClippedPPO", num_workers=3)
    assert data["config"]["train_batch_size"] == 1032
    assert result == [
        "train_batch_size is 1032, not 1024 as in the preset CartPole_ClippedPPO: a multiple of the steps that 3 workers "
        "with 8 environments sample together"
    ]
    assert resolve({"name": "a", **data}).config.workers == 3
    assert described("CartPole_ClippedPPO", num_workers=2)[1] == []
    assert described("CartPole_DQN", num_workers=3)[1] == []


def test_an_explicit_batch_size_is_not_changed() -> None:
    data, result = described("CartPole_ClippedPPO", num_workers=3, train_batch_size=1000)
    assert (data["config"]["train_batch_size"], result) == (1000, [])


def test_set_comes_after_a_custom_parameter_which_comes_after_single_options() -> None:
    source = read_source(None, "cartpole")
    options = ExperimentOptions(
        stop={"iterations": 1}, settings={"seed": 1, "lr": 1.0}, custom=["lr=2; seed=2"], assignments=["lr=3"]
    )
    ((_, data),) = experiments_from(source, options).items()
    assert (data["config"]["lr"], data["config"]["seed"]) == (3, 2)


def test_a_target_is_not_that_of_another_environment() -> None:
    for custom, top in ((["env_params.level='Acrobot-v1'"], {}), ([], {"env": "Acrobot-v1"})):
        source = read_source(None, "CartPole_ClippedPPO")
        ((_, data),) = experiments_from(source, ExperimentOptions(top=top, custom=custom)).items()
        assert (data["env"], "target" in data) == ("Acrobot-v1", False)
        assert coach_options.target_return(data) == -100, "what Gymnasium says of it"
    assert coach_options.target_return(described("CartPole_ClippedPPO")[0]) == 490


# -- a fleet ------------------------------------------------------------------------------------------------------------


def words_of(*typed: str) -> list[str]:
    context = train_command().make_context("train", list(typed))
    given = {name: value for name, value in context.params.items() if context.get_parameter_source(name).name == "COMMANDLINE"}
    return coach_options.learner_words(given, ["checkpoint_time_s=5"])


def test_a_fleet_gets_the_same_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("a: {env: CartPole-v1}\n")
    Path("mine.py").write_text("preset = {}\n")
    Path("old.py.d").mkdir()
    Path("old.py.d/mine.py").write_text("preset = {}\n")
    typed = ["-dc", "-e", "NAME", "-n", "3", "-dcp", "x.ini", "--seed", "4", "--stop", "timesteps=5", "--stop", "time_s=6"]
    typed += [
        "-cp",
        "lr=1; gamma=0.5",
        "--set",
        "lambda=0.9",
        "--num-envs",
        "4",
        "-vv",
        "-q",
        "-tb",
        "-s",
        "5",
        "--no-checkpoint-at-end",
    ]
    same = {"seed": 4, "stop": ["timesteps=5", "time_s=6"], "custom_parameter": ["lr=1; gamma=0.5"], "num_envs": 4, "verbose": 2}
    for source, there in (
        (["-p", "Mujoco_ClippedPPO", "-lvl", "hopper"], {"preset": "Mujoco_ClippedPPO", "level": "hopper"}),
        (["CartPole-v1", "--run", "IMPALA"], {"env": "CartPole-v1", "run": "IMPALA"}),
        (["-f", "mine.yaml", "--experiment", "a"], {"file": tmp_path / "mine.yaml", "experiment": "a"}),
        (["-p", "mine.py:preset"], {"preset": f"{tmp_path / 'mine.py'}:preset"}),
        (["-p", "old.py.d/mine.py:preset"], {"preset": f"{tmp_path / 'old.py.d' / 'mine.py'}:preset"}),
    ):
        words = words_of(*source, *typed)
        found = parsed(learner_command(), *words, "--memory", "redis://h", "--store", "s3://b/p")
        assert {key: found[key] for key in {**same, **there}} == {**same, **there}
        assert found["set_"] == ["checkpoint_time_s=5", "checkpoint_at_end=false", "lambda=0.9"]
        assert found["experiment_name"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume newest cannot be combined with -dc: rerun the same command"),
        (["-crd", "x"], "--restore x cannot be combined with -dc"),
        (["--local-dir", "x"], "--local-dir x cannot be combined with -dc: the location of the run is set in the -dcp file"),
        (["--address", "local"], "the workers of a fleet do not use Ray"),
        (["--num-samples", "2"], "a fleet trains one run"),
        (["--set", "memory=redis://:hush@host"], "--set memory cannot be combined with -dc"),
        (["-cp", "lr=1; memory='redis://:hush@host'"], "-cp memory cannot be combined with -dc"),
        (["--set", "track.mlflow.tracking_uri=http://me:hush@host"], "a URL with a password"),
        (["-cp", "num_workers=2"], "-cp num_workers cannot be combined with -dc: the number of workers is set by -n"),
        (["--set", "config.num_rollout_workers=2"], "cannot be combined with -dc: the number of workers is set by -n"),
    ],
)
def test_options_that_a_fleet_does_not_support_are_refused(call: Call, words: list[str], message: str) -> None:
    result = call("train", "-p", "CartPole_ClippedPPO", "-dc", "-n", "2", *words)
    assert result.code == 2
    assert message in result.err
    assert "hush" not in result.out + result.err


class Nowhere:
    """An orchestrator of one's own, that takes no jobs."""

    def list(self) -> list[JobStatus]:
        return []

    def submit(self, job: Job) -> str:
        raise UsageError("; ".join(f"{role.name} looks in {role.environment['LUDUS_MODEL_PATH']}" for role in job.roles))


def test_all_roles_import_models_next_to_the_file(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_MODEL_PATH", raising=False)
    (tmp_path / "mine.yaml").write_text("a: {env: CartPole-v1}\n")
    lines = (
        "[ludus]",
        f"orchestrator = {__name__}:Nowhere",
        "redis_url = redis://h",
        "data_store = nfs",
        f"nfs_path = {tmp_path}",
    )
    (tmp_path / "fleet.ini").write_text("\n".join(lines))
    result = call("train", "-f", tmp_path / "mine.yaml", "-dc", "-dcp", tmp_path / "fleet.ini")
    assert result.code == 2
    assert f"learner looks in {tmp_path}; worker looks in {tmp_path}" in result.err


def test_a_fleet_has_a_worker() -> None:
    assert [coach_options.fleet_workers(number) for number in (None, 1, 3)] == [1, 1, 3]
    for wrong in (0, "auto"):
        with pytest.raises(UsageError, match=rf"-n {wrong}: a fleet needs at least 1 worker"):
            coach_options.fleet_workers(wrong)
