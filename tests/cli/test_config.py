"""`ludus config`, and `ludus train -f`: files with experiments, old and new."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.algorithms.base import config_schemas
from ludus.cli.training import train
from ludus.config.aliases import rllib_keys
from ludus.config.experiment_file import load_experiments
from ludus.config.search_space import is_sweep
from ludus.config.translation import section_schemas, translate_config, translate_experiment
from ludus.config.validation import parse_algorithm_config
from ludus.experiments.runs.run_dir import Run
from ludus.experiments.validation import explain, validate
from ludus.experiments.validation.convert import RLLIB_DEFAULTS, convert
from tests.cli.calling import Call, lines, one_line
from tests.experiments import small

REPOSITORY = Path(__file__).parents[2]
OLD = sorted((REPOSITORY / "tests" / "old").glob("*.yaml"))
PAGE = REPOSITORY / "docs" / "config.md"


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


def tiny(iterations: int = 1, **settings: Any) -> dict[str, Any]:
    return small.data(iterations, env="tests.environments:make_count", **{"evaluation_duration": 0, **settings})


def saved(local_dir: Path, name: str) -> dict[str, Any]:
    (run,) = (local_dir / name).iterdir()
    return Run.open(run).config()


# -- explain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("lr", ["config.lr", "Learning rate", "0.001", "PPO", "also      learning_rate, lr_schedule"]),
        ("config.lr", ["config.lr"]),
        ("lambda", ["config.lambda", "only      PPO, APPO, IMPALA"]),
        ("model.use_lstm", ["config.model.use_lstm", "default   false"]),
        ("use_lstm", ["config.model.use_lstm"]),
        ("num_sgd_iter", ["config.num_epochs", "num_sgd_iter"]),
        ("lstm_cell_size", ["config.model.cell_size"]),
        ("timesteps_total", ["stop.timesteps"]),
        ("env_runners/episode_return_mean", ["stop.episode_return_mean"]),
        ("framework", ["config.framework, a key of RLlib, is read: torch, tf and tf2 are accepted"]),
        ("ignore_worker_failures", ["config.max_worker_restarts", "ignore_worker_failures: false is 0"]),
        ("log_level", ["config.log_level, a key of RLlib, is accepted and ignored: it is an option of the command: -v"]),
        ("model.use_attention", ["belongs to attention networks", "It may stay as false"]),
        ("timesteps", ["stop.timesteps", "target.timesteps"]),
        ("track.wandb.project", ["track.wandb.project"]),
        ("SAC", ["SAC is not supported"]),
    ],
)
def test_a_key_is_explained_by_any_of_its_names(call: Call, key: str, words: list[str]) -> None:
    result = call("config", "explain", key)
    assert result.code == 0, result.err
    assert all(word in result.out for word in words), result.out


def test_an_unknown_key_is_answered_with_the_nearest(call: Call) -> None:
    result = call("config", "explain", "gama")
    assert result.code == 2
    assert one_line(result).startswith("ludus: There is no key 'gama'. Did you mean 'gamma'")


def test_without_a_key_all_are_listed(call: Call) -> None:
    result = call("config", "explain")
    assert result.code == 0
    listed = {line.split()[0] for line in result.out.splitlines() if line.startswith("  ")}
    assert listed == set(explain.catalogue())


def test_every_key_of_every_schema_is_in_the_catalogue_with_a_description() -> None:
    found = explain.catalogue()
    for run, schema in config_schemas().items():
        for name in schema.model_fields:
            assert f"config.{name.rstrip('_')}" in found, f"{run}: {name}"
    for section, inside in section_schemas().items():
        prefix = f"{section}." if section else ""
        assert {prefix + name.rstrip("_") for name in inside.model_fields} <= set(found)
    assert [key.path for key in found.values() if len(key.description) < 8] == []


def test_every_other_spelling_leads_to_its_key() -> None:
    for section, table in rllib_keys.RENAMED.items():
        for old, new in table.items():
            if old != "lambda_":
                assert any(key.name == new for key in explain._find_keys(old)), f"{section}: {old}"


def test_the_page_of_keys_matches_the_schemas() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert explain.fill_tables(page) == page, "docs/config.md is outdated: run  python scripts/config_page.py"
    shown = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert {key.name for key in explain.catalogue().values()} <= shown


# -- check --------------------------------------------------------------------------------------------------------------


def test_a_file_without_a_fault_is_praised(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "good.yaml", {"one": tiny(), "two": tiny(lr={"grid_search": [1e-3, 1e-4]})})
    result = call("config", "check", file)
    assert (result.code, result.out) == (0, f"{file}: one, two: no errors.\n")


def test_all_complaints_of_all_experiments_come_at_once_and_nothing_is_made(call: Call, tmp_path: Path) -> None:
    bad = {"one": tiny(gama=1, framework="jax"), "two": {"env": "NoSuch-v1", "stop": {"iteration": 1}}}
    file = write(tmp_path / "bad.yaml", bad)
    for command in (["config", "check", file], ["train", "-f", file, "--local-dir", tmp_path / "runs"]):
        result = call(*command)
        assert result.code == 2
        found = "\n".join(lines(result))
        for words in (
            f"{file}:{line_of(file, 'framework')}: one: config.framework ('jax')",
            f"{file}:{line_of(file, 'gama')}: one: Unknown key 'config.gama'",
            f"{file}:{line_of(file, 'iteration:')}: two: Unknown key 'stop.iteration'",
            f"{file}:{line_of(file, 'NoSuch')}: two: Unknown environment 'NoSuch-v1'",
        ):
            assert words in found
    assert not (tmp_path / "runs").exists()


def line_of(file: Path, words: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), 1) if words in line)


def test_errors_name_file_and_line_for_all_line_breaks(call: Call, tmp_path: Path) -> None:
    text = "x:\r\n  env: CartPole-v1\r\n  run: PP0\r\n  config:\r\n    lr: fast\r\n    model:\r\n      hidden: 3\r\n"
    file = tmp_path / "dos.yaml"
    file.write_bytes(text.encode())
    for command in (["config", "check", file], ["train", "-f", file]):
        result = call(*command)
        assert result.code == 2
        assert [line.split(" ")[0] for line in lines(result)[-3:]] == ["ludus:", f"{file}:5:", f"{file}:7:"]
        assert f"ludus: {file}:3: Unknown algorithm 'PP0'" in result.err
    file.write_bytes(text.replace("PP0", "PPO").replace("fast", "1e-3").replace("hidden: 3", "use_lstm: true").encode())
    assert call("config", "check", file).code == 0


def test_an_error_of_the_command_line_has_no_line_of_the_file(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", {"one": tiny(lr=1e-3)})
    result = call("train", "-f", file, "--set", "lr=fast", "--local-dir", tmp_path / "runs")
    assert result.code == 2
    assert one_line(result).startswith("ludus: config.lr is 'fast'")


def test_a_file_that_passes_the_check_starts_and_one_that_cannot_start_does_not_pass(call: Call, tmp_path: Path) -> None:
    for settings, words in (
        ({"sampling": "pipelined"}, "config.sampling is pipelined, and num_workers is 0."),
        ({"minibatch_size": 4000, "train_batch_size": 64, "num_envs_per_worker": 4}, "config.minibatch_size is 4000"),
        ({"learner_device": "cuda:99"}, "config.learner_device is 'cuda:99'"),
    ):
        file = write(tmp_path / "one.yaml", {"one": {"env": "CartPole-v1", "config": settings}})
        for command in (["config", "check", file], ["train", "-f", file, "--local-dir", tmp_path / "runs"]):
            result = call(*command)
            assert result.code == 2, result.out
            assert f"{file}:{line_of(file, next(iter(settings)))}: {words}" in result.err
    assert not (tmp_path / "runs").exists()


def test_gpus_that_are_not_here_are_named_and_may_be_left_out(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = write(tmp_path / "one.yaml", {"one": tiny(num_gpus_per_learner=1, num_learners=1)})
    for command in (["config", "check", file], ["train", "-f", file]):
        result = call(*command)
        assert result.code == 2
        assert "config.num_gpus is 1, but PyTorch finds no GPU on this machine. Train on the CPU with --num-gpus 0" in result.err
    assert call("config", "check", file, "--num-gpus", "0").code == 0
    result = call("train", "-f", file, "--num-gpus", "0", "--local-dir", tmp_path / "runs", "--quiet")
    assert result.code == 0, result.err


def test_notices_are_printed_once_by_the_check_and_by_the_training(call: Call, tmp_path: Path) -> None:
    ignored: dict[str, Any] = {
        "framework": {"grid_search": ["tf", "torch"]},
        "enable_connectors": True,
        "_disable_execution_plan_api": False,
    }
    file = write(tmp_path / "one.yaml", {"one": tiny(**ignored)})
    for command in (["config", "check", file], ["train", "-f", file, "--local-dir", tmp_path / "runs"]):
        result = call(*command)
        assert result.code == 0, result.err
        for key in ignored:
            assert result.out.count(f"config.{key} ") == 1, result.out
        assert result.out.count("it is one trial") == 1
    (run,) = (tmp_path / "runs" / "one").iterdir()
    assert (run / "config.yaml").exists(), "one run, no sweep"


# -- convert ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_defaults", [False, True])
@pytest.mark.parametrize("file", OLD, ids=lambda path: path.stem)
def test_an_old_file_becomes_one_in_present_names_that_means_the_same(file: Path, with_defaults: bool) -> None:
    old = load_experiments(file)
    new: dict[str, Any] = yaml.safe_load(convert(old, file.name, with_defaults=with_defaults).text)
    assert list(new) == list(old)
    for name, data in new.items():
        assert validate.validate_experiment({"name": name, **data}, env_too=False) == []
        read = translate_experiment(data)
        inner = translate_config(data["config"], validate.algorithm_of(data["run"]).Config)
        assert not read.spelled_as, "there is no old name any more"
        assert not inner.spelled_as
        assert not [*read.rejected, *read.redundant, *read.ignored, *inner.rejected, *inner.redundant, *inner.ignored]
        assert read.data["stop"] == translate_experiment(old[name]).data["stop"] if "stop" in data else True


@pytest.mark.parametrize("file", OLD, ids=lambda path: path.stem)
def test_every_key_of_an_old_file_is_there_or_is_accounted_for(file: Path) -> None:
    text = convert(load_experiments(file), file.name).text
    for data in load_experiments(file).values():
        for section in (data, data.get("stop", {}), data["config"], data["config"].get("model", {})):
            for key in section:
                assert key in text, f"{key} vanished"


def test_a_comment_replaces_each_dropped_key() -> None:
    text = convert(load_experiments(REPOSITORY / "tests/old/dodgeball-ppo-fcnet.yaml"), "old.yaml").text
    assert "    # framework: tf was removed: the same layers are built with PyTorch." in text
    assert "    # log_level: WARN was removed: it is an option of the command: -v, -vv." in text
    assert "    num_epochs: 10  # was num_sgd_iter" in text
    assert "    # lr: 0.0003 was removed: it is overridden by its schedule." in text


def test_an_environment_and_an_algorithm_of_today_are_written(call: Call, tmp_path: Path) -> None:
    old = {
        "env": "Pendulum-v0",
        "run": "A2C",
        "config": {"train_batch_size": 200, "disable_env_checking": True, "use_critic": True},
    }
    result = call("config", "convert", write(tmp_path / "old.yaml", {"x": old}))
    assert result.code == 0, result.err
    assert "  env: Pendulum-v1  # was Pendulum-v0" in result.out
    assert "  run: PPO  # was A2C" in result.out
    assert "    # disable_env_checking: true was removed: environments are always checked." in result.out
    assert "    # use_critic: true was removed: it is already the default." in result.out


def test_a_conversion_that_changes_the_experiment_fails(call: Call, tmp_path: Path) -> None:
    soft = {"env": "CartPole-v1", "run": "DQN", "config": {"exploration_config": {"type": "SoftQ"}, "log_level": "WARN"}}
    new = tmp_path / "new.yaml"
    result = call("config", "convert", write(tmp_path / "old.yaml", {"x": soft}), "-o", new)
    assert result.code == 1
    assert "differs from the experiment in" in result.err
    assert "config.exploration_config" in result.err
    assert "log_level" not in result.err
    assert call("config", "check", new).code == 0, "what is left is written, and can be trained"


def test_a_batch_is_rounded_up_to_whole_fragments_as_rllib_collected_it() -> None:
    text = convert(load_experiments(REPOSITORY / "tests/old/dronedodgeball-ppo-convnet.yaml"), "old.yaml").text
    assert "train_batch_size: 4200  # was 4000" in text  # 3 rounds of 7 workers × 200 steps


def test_rllibs_defaults_are_keys_that_the_algorithm_has() -> None:
    for run, defaults in RLLIB_DEFAULTS.items():
        nested: dict[str, Any] = {}
        for path, value in defaults.items():
            section, _, key = path.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[key] = value
        parse_algorithm_config(config_schemas()[run], nested | {"train_batch_size": defaults["train_batch_size"]})


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("DQN", "(32 steps sampled for each); an iteration of RLlib's DQN is 1,000 steps or more."),
        ("IMPALA", "10 seconds or more"),
        ("PPO", ""),
    ],
)
def test_an_iteration_that_differs_from_rllib_is_reported(run: str, words: str) -> None:
    counting = {"env": "CartPole-v1", "run": run, "stop": {"training_iteration": 5}, "config": {"evaluation_interval": 2}}
    text = convert({"x": counting}, "f").text
    assert words in text
    assert ("evaluation_interval counts updates" in text) is bool(words)
    assert "training_iteration: 5\n" in text
    by_steps = {"env": "CartPole-v1", "run": run, "stop": {"timesteps_total": 5}, "config": {"evaluation_interval": None}}
    assert "counts updates" not in convert({"x": by_steps}, "f").text


def test_the_length_of_an_iteration_is_printed_at_the_start(call: Call, tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", "--run", "DQN", "--local-dir", tmp_path, "--set", "evaluation_duration=0"]
    result = call(*words, "--stop", "iterations=2", "--checkpoint-freq", "2")
    assert result.code == 0, result.err
    assert "checkpoint_freq counts updates (32 steps sampled for each)" in result.out
    assert result.out.count("64 steps in") == 1
    assert "counts updates" not in call(*words, "--stop", "timesteps=64").out


def test_a_file_is_written_once_and_never_over_another(call: Call, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    assert call("config", "convert", REPOSITORY / "tests/old/cartpole-dqn.yaml", "-o", new).code == 0
    before = new.read_bytes()
    assert call("config", "check", new).code == 0
    again = call("config", "convert", OLD[0], "-o", new)
    assert again.code == 2
    assert "already exists" in one_line(again)
    assert new.read_bytes() == before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"x": {"env": "A", "config": {"gama": 1}}}, "Unknown key 'config.gama'"),
        ({"x": {"env": "A", "config": {"num_sgd_iter": 1, "num_epochs": 2}}}, "sets 'num_epochs' twice"),
        ({"x": {"env": "A", "run": "SAC"}}, "SAC is not supported"),
        ({"x": {"env": "A", "config": [1]}}, "config is [1]"),
    ],
)
def test_unknown_keys_are_not_converted(call: Call, tmp_path: Path, data: dict[str, Any], words: str) -> None:
    result = call("config", "convert", write(tmp_path / "old.yaml", data), "-o", tmp_path / "new.yaml")
    assert result.code == 2
    assert words in result.err
    assert not (tmp_path / "new.yaml").exists()


def test_a_value_with_line_breaks_stays_on_the_line_of_its_comment() -> None:
    text = convert({"x": {"env": "A", "config": {"log_level": "a\nb: {c", "env_config": {"text": "one\ntwo"}}}}, "f").text
    assert yaml.safe_load(text)["x"]["config"] == {"env_config": {"text": "one\ntwo"}}


# -- several experiments ------------------------------------------------------------------------------------------------


def test_experiments_of_a_file_run_one_after_another(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "two.yaml", {".all": {}, "one": tiny(), "two": tiny(2)})
    result = call("train", "-f", file, "--local-dir", tmp_path / "runs", "--json", "--quiet")
    assert result.code == 0, result.err
    assert [(line["experiment"], line["iterations"]) for line in result.json] == [("one", 1), ("two", 2)]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"one", "two"}


def test_a_failed_experiment_is_reported_and_the_others_run(call: Call, tmp_path: Path) -> None:
    bad = small.data(1, env="tests.environments:make_faulty", env_config={"fault": "raises in reset"})
    file = write(tmp_path / "two.yaml", {"bad": bad, "good": tiny()})
    result = call("train", "-f", file, "--local-dir", tmp_path / "runs", "--json", "--quiet")
    assert result.code == 1
    assert result.err.startswith("ludus: bad: ")
    assert result.json[0]["experiment"] == "good"
    assert "no game server" in result.json[1]["error"]


def test_one_experiment_of_a_file_is_chosen_by_name(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "two.yaml", {"one": {"env": "NoSuch-v1"}, "two": tiny()})
    result = call("train", "-f", file, "--experiment", "two", "--local-dir", tmp_path / "runs", "--quiet")
    assert result.code == 0, result.err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["two"]
    absent = call("train", "-f", file, "--experiment", "tow")
    assert "There is no experiment 'tow'" in one_line(absent)
    assert "Did you mean 'two'" in one_line(absent)


@pytest.mark.long
def test_an_interruption_ends_them_all(tmp_path: Path) -> None:
    file = write(tmp_path / "two.yaml", {"one": tiny(1_000_000), "two": tiny(1_000_000)})
    command = [sys.executable, "-m", "ludus.cli.main", "train", "-f", str(file), "--local-dir", str(tmp_path / "runs")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            while "steps/s" not in process.stdout.readline():  # it trains
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"one"}


def test_unfinished_experiments_are_resumed_and_finished_ones_are_skipped(call: Call, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    file = write(tmp_path / "two.yaml", {"one": tiny(), "two": tiny(2)})
    assert call("train", "-f", file, "--experiment", "one", "--local-dir", runs, "--quiet").code == 0
    result = call("train", "-f", file, "--local-dir", runs, "--quiet", "--json", "--resume")
    assert result.code == 0, result.err
    assert [line["experiment"] for line in result.json] == ["two"]
    (run,) = (runs / "two").iterdir()
    Run.open(run).write_meta({"status": "interrupted"})
    again = call("train", "-f", file, "--local-dir", runs, "--resume", "--json")
    assert f"continuing {run}" in again.err
    assert "has already reached its stop" in again.err


def test_a_run_that_is_continued_takes_over_its_stop_and_its_checkpoints_and_nothing_else(call: Call, tmp_path: Path) -> None:
    again = ["train", "-f", tmp_path / "one.yaml", "--local-dir", tmp_path / "runs", "--json", "--resume"]
    write(tmp_path / "one.yaml", {"one": tiny(1, lr=1e-3)})
    assert call(*again).json["iterations"] == 1
    changed = call(*again, "--seed", "7", "--set", "model.fcnet_hiddens=[3]")
    assert changed.code == 2
    assert "config.seed is 0 in the run, but 7 in the settings." in changed.err
    assert "config.model.fcnet_hiddens is " in changed.err
    assert "--restore x starts a new one" in one_line(call(*again, "--restore", "x"))
    assert "is finished" in call(*again, "--set", "lr=0.001").err, "repeating an unchanged setting is allowed"
    assert call(*again, "--stop", "iterations=2").json["iterations"] == 2
    write(tmp_path / "one.yaml", {"one": tiny(3, lr=1e-3) | {"checkpoint_freq": 1}})
    longer = call(*again)
    assert longer.json["iterations"] == 3
    assert 'with stop: {"iterations": 3}, checkpoint_freq: 1' in longer.err
    assert saved(tmp_path / "runs", "one")["checkpoint_freq"] == 1
    assert "is finished" in call(*again, "--stop", "iterations=2").err, "it has come further than that"
    write(tmp_path / "one.yaml", {"one": tiny(9, lr=1e-4)})
    edited = call(*again)
    assert edited.code == 2
    assert "config.lr is 0.001 in the run, but 0.0001 in the settings." in edited.err
    assert len(list((tmp_path / "runs" / "one").iterdir())) == 1


def test_a_run_with_a_name_of_its_own_is_found_again(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", {"one": tiny()})
    words = ["train", "-f", file, "--project", tmp_path / "mine", "--trial", "first", "--json", "--resume"]
    assert "holds no run to resume: starting a new one" in call(*words).err
    assert "is finished" in call(*words).err
    assert call(*words, "--stop", "iterations=2").json["run_dir"] == str(tmp_path / "mine" / "first")


# -- options ------------------------------------------------------------------------------------------------------------


def test_options_are_stronger_than_the_file_and_say_nothing_where_they_are_not_given(call: Call, tmp_path: Path) -> None:
    top = {"checkpoint_freq": 7, "keep_checkpoints_num": 2, "checkpoint_at_end": False}
    file = write(tmp_path / "one.yaml", {"one": tiny(num_sgd_iter=3, num_epochs=3) | top})
    options = [
        "--config",
        '{"lr": 1e-4, "num_sgd_iter": 1}',
        "--set",
        "sgd_minibatch_size=32",
        "--stop",
        '{"training_iteration": 2}',
    ]
    result = call("train", "-f", file, "--local-dir", tmp_path / "runs", "--quiet", *options, "--seed", "5")
    assert result.code == 0, result.err
    found = saved(tmp_path / "runs", "one")
    assert {key: found[key] for key in top} == top
    assert found["stop"]["iterations"] == 2
    inner = found["config"]
    assert (inner["lr"], inner["num_epochs"], inner["minibatch_size"], inner["seed"]) == (1e-4, 1, 32, 5)


def test_the_saved_config_of_a_run_is_a_valid_experiment(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", {"one": tiny(1, lr_schedule=[[0, 1e-3], [100, 0]], lambda_=0.9)})
    assert call("train", "-f", file, "--local-dir", tmp_path / "runs", "--quiet").code == 0
    (run,) = (tmp_path / "runs" / "one").iterdir()
    again = call("train", "-f", run / "config.yaml", "--local-dir", tmp_path / "again", "--quiet")
    assert again.code == 0, again.err
    assert saved(tmp_path / "again", "one") == Run.open(run).config()
    assert "lambda" in Run.open(run).config()["config"]


def test_a_preset_may_be_a_path(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", {"mine": tiny()})
    assert call("train", "-p", file, "--local-dir", tmp_path / "runs", "--quiet").code == 0
    assert "both name an experiment" in one_line(call("train", "-p", file, "-f", file))


def test_ignored_options_print_a_notice(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", {"one": tiny()})
    older = ["--torch", "--eager", "--trace", "--queue-trials", "--no-ray-ui"]
    valued = [
        "--redis-password",
        "s3cret",
        "--ray-num-gpus",
        "0",
        "--ray-num-cpus",
        "2",
        "--checkpoint-score-attr",
        "episode_reward_mean",
    ]
    result = call("train", "-f", file, "--local-dir", tmp_path / "runs", *older, *valued, "--ray-num-nodes", "1")
    assert result.code == 0, result.err
    for option in (*older, "--redis-password", "--ray-num-gpus", "--ray-num-cpus"):
        (notice,) = [line for line in result.out.splitlines() if line.startswith(option) and "nothing" in line]
        assert notice.endswith(".")
    assert "s3cret" not in result.out + result.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ray-num-nodes", "2"], "emulated nodes have no more cores"),
        (["--upload-dir", "s3://bucket"], "--upload-dir s3://bucket: runs are not copied"),
        (["--checkpoint-score-attr", "min-loss"], "--checkpoint-score-attr min-loss chooses the best checkpoint"),
        (["--num-cpus", "3", "--num-workers", "2"], "--num-cpus is 3 and --num-workers is 2; they mean the same"),
        (["--config", "[1]"], "--config '[1]' is not of the form"),
        (["--stop", "{}"], "--stop '{}' is not of the form"),
        (["--temp-dir", "/proc/nowhere"], "--temp-dir /proc/nowhere cannot be written"),
    ],
)
def test_options_that_cannot_be_are_refused_with_the_reason(call: Call, options: list[str], words: str) -> None:
    result = call("train", "CartPole-v1", *options)
    assert result.code == 2
    assert words in one_line(result)


@pytest.fixture
def own_temp_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())  # restored afterwards
    yield
    tempfile.tempdir = None


@pytest.mark.usefixtures("own_temp_dir")
def test_temporary_files_go_to_the_directory_of_the_option(call: Call, tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", {"one": tiny()})
    result = call("train", "-f", file, "--local-dir", tmp_path / "runs", "--quiet", "--temp-dir", tmp_path / "a" / "b")
    assert result.code == 0, result.err
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "a" / "b")


def test_cores_for_experience_are_workers(tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", {"one": {"env": "X", "config": {"num_env_runners": 2, "lr": 1}}})
    assert train.parse_workers(None, 35) == train.parse_workers("35", 35) == 35
    found = train.experiments_from(file, train.ExperimentOptions(settings={"num_workers": 35}))
    assert found == {"one": {"env": "X", "config": {"lr": 1, "num_workers": 35}}}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"env": "X"}, False),
        ({"env": "X", "num_samples": 1}, False),
        ({"env": "X", "num_samples": 2}, True),
        ({"env": "X", "config": {"lr": {"grid_search": [1, 2]}}}, True),
        ({"env": "X", "config": {"model": {"fcnet_hiddens": {"choice": [[1], [2]]}}}}, True),
        ({"env": {"grid_search": ["A", "B"]}}, True),
        ({"env": "X", "tune": {"hyperparam_mutations": {"lr": {"uniform": [0, 1]}}}}, False),
    ],
)
def test_several_samples_or_searched_values_make_a_sweep(data: dict[str, Any], expected: bool) -> None:
    assert is_sweep(data) is expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--resume"], ["--resume", "newest"]),
        (["--resume", "-v"], ["--resume", "newest", "-v"]),
        (["--resume", "somewhere"], ["--resume", "somewhere"]),
        (["-f", "x", "--resume", "--json"], ["-f", "x", "--resume", "newest", "--json"]),
    ],
)
def test_resume_needs_no_value(words: list[str], expected: list[str]) -> None:
    assert train.add_resume_value(words) == expected
