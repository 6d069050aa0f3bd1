"""The main commands: options, output and exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import imageio.v3
import numpy as np
import pytest
import yaml

import ludus
from ludus.experiments.runs import checkpoint
from ludus.experiments.runs.run_dir import Run
from ludus.storage.local import LocalStore
from tests.cli.calling import Call, CommandResult, one_line
from tests.experiments import small
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
LUDUS = [sys.executable, "-m", "ludus.cli.main"]
RESULT = ["run_dir", "checkpoint", "stopped_by", "timesteps", "iterations", "episode_return_mean", "time_s", "fps"]
SMALL = ["--num-envs", "8", "--set", "train_batch_size=256", "--set", "minibatch_size=64", "--set", "evaluation_duration=2"]


def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [*LUDUS, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> CommandResult:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)
    return CommandResult(process.returncode, out, err)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CommandResult]:
    """One training by the real command, and its output."""
    runs = tmp_path_factory.mktemp("cli") / "runs"
    result = finish(
        start(
            "train",
            "CartPole-v1",
            "--stop",
            "iterations=3",
            "--json",
            "--local-dir",
            runs,
            "--seed",
            "4",
            "--checkpoint-freq",
            "2",
        )
    )
    (run,) = (runs / "default").iterdir()
    return run, result


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent for the tiny environment that counts; its episodes have 5 steps."""
    where = tmp_path_factory.mktemp("cli") / "counting"
    small.train(where, 1, env="tests.environments:make_count")
    return where


# -- starting quickly ---------------------------------------------------------------------------------------------------

_HEAVY = ("torch", "gymnasium", "pydantic", "numpy", "ray", "matplotlib", "tensorboard", "imageio", "pygame", "safetensors")


def _imported(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint()\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["train", "--help"], ["rollout", "--help"], ["runs", "--help"], ["runs", "plot", "-h"]),
        *(["config", "explain", "--help"], ["tune", "--help"]),
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"from ludus.cli.main import main\nsys.argv = ['ludus', *{arguments!r}]\ntry: main()\nexcept SystemExit as e: assert not e.code"
    imported = _imported(code)
    assert "typer" in imported
    heavy = set(_HEAVY) - ({"pydantic"} if len(arguments) > 1 else set())  # Typer itself may use it for the options of a command
    assert not imported & heavy


def test_importing_ludus_imports_nothing_heavy() -> None:
    imported = _imported("import ludus")
    assert "ludus" in imported
    assert not imported & {*_HEAVY, "typer", "rich", "yaml"}


def test_the_installed_command_answers() -> None:
    installed = Path(sys.executable).parent / "ludus"
    if not installed.exists():
        pytest.skip("the package is not installed with its scripts")
    done = subprocess.run([installed, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"ludus {ludus.__version__}\n"


def test_help_names_every_command_and_option(call: Call) -> None:
    result = call("--help")
    assert result.code == 0
    assert all(re.search(rf"\b{command}\b", result.out) for command in ("train", "rollout", "runs", "demo"))
    options = call("train", "--help-all").out
    for option in (
        *(
            "--file",
            "--env",
            "--name-env",
            "--run",
            "--num-envs",
            "--num-workers",
            "--num-cpus",
            "--num-gpus",
            "--seed",
            "--stop",
        ),
        *("--set", "--local-dir", "--project", "--trial", "--checkpoint-freq", "--checkpoint-at-end", "--keep-checkpoints-num"),
        *("--resume", "--restore", "--local-mode", "--quiet", "--json", "--debug", "--verbose", "--preset", "--experiment"),
        *("--temp-dir", "--ray-num-cpus", "--ray-num-gpus", "--ray-num-nodes", "--ray-object-store-memory", "--ray-address"),
        *("--num-samples", "--config", "--experiment-name", "--checkpoint-score-attr", "--upload-dir", "--resources-per-trial"),
        *("--queue-trials", "--torch", "--eager", "--trace", "--no-ray-ui", "--redis-password"),
    ):
        assert option in options, option
    options = call("rollout", "--help-all").out
    for option in (
        *("--run", "--env", "--episodes", "--steps", "--seed", "--video", "--monitor", "--video-dir", "--save-info", "--out"),
        *("--num-workers", "--num-gpus", "--config", "--deterministic", "--stochastic", "--json"),
    ):
        assert option in options, option


# -- train --------------------------------------------------------------------------------------------------------------


def test_training_ends_with_one_line_of_json(trained: tuple[Path, CommandResult]) -> None:
    run, command = trained
    assert command.code == 0, command.err
    assert command.out.count("\n") == 1, "with --json standard output holds the result and nothing else"
    result = command.json
    assert list(result) == RESULT
    assert result["run_dir"] == str(run)
    assert result["checkpoint"] == str(run / "checkpoints" / "000003")
    assert (result["stopped_by"], result["iterations"]) == ("iterations", 3)
    assert result["timesteps"] > 3 * 3000
    assert result["episode_return_mean"] > 5
    assert result["time_s"] > 0
    assert result["fps"] > 0
    assert "Traceback" not in command.err
    assert f"ludus rollout {run} --video" in command.err


def test_the_options_of_a_training_are_in_its_config(trained: tuple[Path, CommandResult]) -> None:
    run, _ = trained
    (config,) = yaml.safe_load((run / "config.yaml").read_text()).values()
    assert (config["env"], config["run"], config["checkpoint_freq"]) == ("CartPole-v1", "PPO", 2)
    assert config["config"]["seed"] == 4
    assert config["stop"]["iterations"] == 3
    assert json.loads((run / "meta.json").read_text())["command"][1:3] == ["train", "CartPole-v1"]
    assert checkpoint.names(LocalStore(run)) == ["000002", "000003"]


def test_quiet_is_quiet_and_a_file_is_read(call: Call, tmp_path: Path) -> None:
    config = {"mine": small.data(2)}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    result = call(
        "train", "-f", tmp_path / "experiment.yaml", "--local-dir", tmp_path, "--quiet", "--set", "lr=5e-4", "--num-envs", "4"
    )
    assert (result.code, result.out, result.err) == (0, "", "")
    (run,) = (tmp_path / "mine").iterdir()
    saved = Run.open(run).config()["config"]
    assert (saved["lr"], saved["num_envs_per_worker"], saved["minibatch_size"]) == (5e-4, 4, 64)


def test_without_quiet_progress_and_next_commands_are_printed(call: Call, tmp_path: Path) -> None:
    result = call("train", "CartPole-v1", *SMALL, "--stop", "iterations=2", "--project", tmp_path, "--trial", "one")
    assert result.code == 0
    assert result.err == ""
    assert "Stopped: iteration limit reached. " in result.out
    assert re.search(r"^100 % █{10}  2 of 2 iterations  .*steps/s", result.out, re.MULTILINE)
    assert len(re.findall("2 of 2 iterations", result.out)) == 1  # the last line, once
    assert re.search(r"^[\d,]+ steps in ", result.out, re.MULTILINE)
    assert f"run         {tmp_path / 'one'}" in result.out
    assert f"ludus rollout {tmp_path / 'one'} --video" in result.out


def test_a_project_and_trial_is_used_once_and_can_be_resumed(call: Call, tmp_path: Path) -> None:
    arguments = ["train", "CartPole-v1", *SMALL, "--stop", "iterations=2", "--project", tmp_path, "--trial", "one", "--quiet"]
    assert call(*arguments).code == 0
    metrics = (tmp_path / "one" / "metrics.jsonl").read_bytes()
    again = call(*arguments)
    assert again.code == 2
    assert re.search(
        rf"one already holds a run\. Continue it with --resume {tmp_path / 'one'}, or choose another name", one_line(again)
    )
    assert (tmp_path / "one" / "metrics.jsonl").read_bytes() == metrics
    resumed = call("train", "--resume", tmp_path / "one", "--stop", "iterations=4", "--json", "--quiet")
    assert resumed.code == 0
    assert resumed.json["iterations"] == 4
    assert resumed.json["checkpoint"] == str(tmp_path / "one" / "checkpoints" / "000004")


def test_a_new_run_starts_from_a_checkpoint(call: Call, counting: Path, tmp_path: Path) -> None:
    arguments = ["train", "tests.environments:make_count", *SMALL, "--set", "model.fcnet_hiddens=[16]", "--quiet", "--json"]
    result = call(*arguments, "--restore", counting, "--stop", "iterations=3", "--local-dir", tmp_path)
    assert result.code == 0, result.err
    assert result.json["iterations"] == 3
    refused = call("train", "CartPole-v1", *SMALL, "--restore", counting, "--local-dir", tmp_path / "new", "--quiet")
    assert refused.code == 2
    assert "trained on tests.environments:make_count, not on CartPole-v1" in one_line(refused)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["CartPol-v1"], r"Unknown environment 'CartPol-v1'\. Did you mean 'CartPole-v1'"),
        (["tests.environments:make_cuont"], r"has no 'make_cuont'\. Did you mean 'make_count'"),
        (["HalfCheetah-v99"], r"There is no 'HalfCheetah-v99'"),
        (["CartPole-v1", "--run", "PPPO"], r"Unknown algorithm 'PPPO'\. Did you mean 'PPO'"),
        (["CartPole-v1", "--set", "lrr=1"], r"Unknown key 'config\.lrr'\. Did you mean 'lr'"),
        (["CartPole-v1", "--set", "config.gama=1"], r"Unknown key 'config\.gama'\. Did you mean 'gamma'"),
        (["CartPole-v1", "--set", "model.use_lsmt=true"], r"Unknown key 'config\.model\.use_lsmt'\. Did you mean 'use_lstm'"),
        (["CartPole-v1", "--set", "lr.x=1"], r"config\.lr is {'x': 1}"),
        (["CartPole-v1", "--set", "lr"], r"--set 'lr' is not of the form path\.to\.key=VALUE"),
        (["CartPole-v1", "--set", "lr=fast"], r"config\.lr.* is 'fast'"),
        (["CartPole-v1", "--set", "gamma=1.5"], r"config\.gamma is 1\.5"),
        (["CartPole-v1", "--stop", "timestep=3"], r"Unknown key 'stop\.timestep'\. Did you mean 'timesteps'"),
        (["CartPole-v1", "--stop", "iterations"], r"--stop 'iterations' is not of the form KEY=NUMBER"),
        (["CartPole-v1", "--stop", "iterations=many"], r"--stop 'iterations=many' is not of the form KEY=NUMBER"),
        (["CartPole-v1", "--stop", "iterations=0"], r"stop\.iterations is 0"),
        (["CartPole-v1", "--num-workers", "some"], r"num_workers is 'some'"),
        (["CartPole-v1", "--address", "local"], r"this run has none"),
        (["CartPole-v1", "--num-gpus", "1"], r"num_gpus is 1"),
        (["CartPole-v1", "--project", "somewhere"], r"--project and --trial go together"),
        (["CartPole-v1", "--project", "somewhere", "--trial", "../x"], r"--trial '\.\./x' is not a plain name"),
        (["-f", "no-such-file.yaml"], r"Cannot read no-such-file\.yaml"),
        (["--resume", "somewhere", "CartPole-v1", "--seed", "3"], r"--resume keeps .* ENV, --seed cannot be changed"),
        ([], r"Which environment\?"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2_before_anything_is_made(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("train", *arguments)
    assert result.code == 2
    assert re.search(complaint, one_line(result)), result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--num-envs", "many"], ["CartPole-v1", "Acrobot-v1"]])
def test_options_that_do_not_exist_are_exit_code_2_as_well(call: Call, arguments: list[str]) -> None:
    result = call("train", *arguments)
    assert result.code == 2
    assert "Traceback" not in result.err


@pytest.mark.parametrize("text", ["a: [1", "a: 1", "[]", "", "a: {env: X, env: Y}", "env: CartPole-v1"])
def test_a_file_that_holds_no_experiment_is_refused(call: Call, tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    result = call("train", "-f", tmp_path / "x.yaml", "--local-dir", tmp_path / "runs")
    assert result.code == 2
    assert "x.yaml" in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()


def test_debug_shows_the_traceback_and_keeps_the_exit_code(call: Call, tmp_path: Path) -> None:
    result = call("train", "CartPol-v1", "--debug", "--local-dir", tmp_path)
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert "ConfigError" in result.err
    assert result.err.splitlines()[-1].startswith("ludus: Unknown environment")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            "{fault: raises in reset}",
            r"environment 0 of tests\.environments:make_faulty raised RuntimeError in reset.*no game server",
        ),
        ("{fault: raises in step}", r"environment 0 of .* raised RuntimeError in step \(step 3\): the game crashed"),
        ("{fault: nan}", r"nvironment 0 of .* returned nan in its observation .*at step 3"),
        ("{fault: too short}", r"environment 0 of .* at step 3 returned float32\[1\]; its space has float32\[2\]"),
        ("{fault: reward nan}", r"nvironment 0 of .* returned the reward nan at step 2"),
        ("{folt: x}", r"could not be constructed: .*folt.* Check config\.env_config"),
    ],
)
def test_an_environment_that_misbehaves_is_one_line_and_exit_code_1(
    call: Call, tmp_path: Path, settings: str, complaint: str
) -> None:
    result = call(
        "train", "tests.environments:make_faulty", *SMALL, "--set", f"env_config={settings}", "--quiet", "--local-dir", tmp_path
    )
    assert result.code == 1
    assert re.search(complaint, one_line(result))


def test_an_unwritable_directory_is_an_error(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = call("train", "CartPole-v1", *SMALL, "--quiet", "--local-dir", tmp_path / "file")
    assert result.code == 1
    assert str(tmp_path / "file") in one_line(result)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_an_error_with_a_remedy(call: Call, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    result = call("train", "CartPole-v1", *SMALL, "--quiet", "--local-dir", tmp_path / "closed")
    assert result.code == 1
    assert "Choose another --local-dir" in one_line(result)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Small file systems."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        where = tmp_path / f"disk{size}"
        where.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr!r}")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", "-l", where], check=True)


@pytest.mark.parametrize("size", ["64k", "16k"], ids=["too small for a checkpoint", "too small for the metrics"])
def test_a_full_disk_is_a_one_line_error_and_written_files_stay(call: Call, disk: Callable[[str], Path], size: str) -> None:
    where = disk(size)
    result = call("train", "CartPole-v1", *SMALL, "--quiet", "--stop", "iterations=40", "--project", where, "--trial", "run")
    assert result.code == 1
    assert re.search(r"No space left", one_line(result))
    assert "unexpected" not in result.err
    run = Run.open(where / "run")
    assert run.config()["env"] == "CartPole-v1"
    assert checkpoint.names(run.store) == []


@pytest.mark.parametrize("where", ["nonsense", "."])
def test_resuming_something_that_is_not_a_run_is_an_error(call: Call, tmp_path: Path, where: str) -> None:
    result = call("train", "--resume", tmp_path / where, "--quiet")
    assert result.code == 1
    assert re.search(r"is not the directory of a run .*ludus runs list", one_line(result))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_one_line_that_names_the_others(
    call: Call, trained: tuple[Path, CommandResult], tmp_path: Path
) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "000003" / "model.safetensors").write_bytes(b"x")
    result = call("rollout", tmp_path / "run")
    assert result.code == 1
    assert re.search(r"000003/model\.safetensors is damaged.*Others in this run: 000002", one_line(result))


# -- signals ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_training_saves_a_checkpoint_and_exits_with_130(tmp_path: Path, number: signal.Signals) -> None:
    endless = ["train", "CartPole-v1", *SMALL, "--stop", "timesteps=1000000000", "--json"]
    process = start(*endless, "--project", tmp_path, "--trial", "run")
    _wait_for_lines(tmp_path / "run" / "metrics.jsonl", process)
    process.send_signal(number)
    output = finish(process)
    assert output.code == 130, output.err
    assert "Traceback" not in output.err
    result = output.json
    assert result["stopped_by"] == f"interrupted ({number.name})"
    _, found = checkpoint.open_checkpoint(result["checkpoint"])
    assert found.state["progress"]["iterations"] == result["iterations"] >= 1
    assert Run.open(tmp_path / "run").meta()["status"] == "interrupted"


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.3, 0.45])
def test_a_command_that_is_interrupted_while_it_starts_exits_with_130(tmp_path: Path, after_s: float) -> None:
    """Whatever is being imported at that moment."""
    process = start("train", "CartPole-v1", "--stop", "timesteps=1000000000", "--local-dir", tmp_path, "--json")
    assert process.stderr is not None
    assert process.stderr.readline() == "starting …\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130, result.err
    assert "Traceback" not in result.err


def _wait_for_lines(path: Path, process: subprocess.Popen[str]) -> None:
    wait_until(
        lambda: path.exists() and path.read_bytes().count(b"\n") >= 2,
        120,
        failed=lambda: process.poll() is not None and finish(process),
    )


# -- rollout ------------------------------------------------------------------------------------------------------------


def test_a_rollout_prints_every_episode_and_their_statistics(
    call: Call, trained: tuple[Path, CommandResult], tmp_path: Path
) -> None:
    result = call("rollout", trained[0], "--episodes", "4", "--out", tmp_path / "steps.npz")
    assert result.code == 0, result.err
    episodes = re.findall(r"episode +(\d+) +return +([\d.]+) +length +(\d+)", result.out)
    assert [int(i) for i, _, _ in episodes] == [0, 1, 2, 3]
    returns = [float(r) for _, r, _ in episodes]
    assert returns == [float(length) for _, _, length in episodes], "CartPole pays 1 a step"
    stats = re.search(r"return mean ([\d.]+) +std ([\d.]+) +min ([\d.]+) +max ([\d.]+)", result.out)
    assert stats is not None
    expected = [np.mean(returns), np.std(returns), min(returns), max(returns)]
    assert [float(x) for x in stats.groups()] == pytest.approx(expected, abs=0.01)


def test_every_step_is_in_one_file_that_numpy_opens_with_its_defaults(
    call: Call, trained: tuple[Path, CommandResult], tmp_path: Path
) -> None:
    output = call("rollout", trained[0], "--episodes", "3", "--out", tmp_path / "steps.npz", "--json")
    result = output.json
    assert result["steps_file"] == str(tmp_path / "steps.npz")
    with np.load(tmp_path / "steps.npz") as file:  # allow_pickle is False
        columns = {name: file[name] for name in file.files}
    finals = {name: columns.pop(name) for name in ("final.episode", "final.observation")}
    assert set(columns) == {"episode", "step", "observation", "action", "reward", "terminated", "truncated"}
    assert finals["final.episode"].tolist() == [0, 1, 2]
    assert finals["final.observation"].shape == (3, 4)
    total = sum(result["lengths"])
    assert {len(column) for column in columns.values()} == {total}
    assert (columns["observation"].shape, columns["observation"].dtype) == ((total, 4), np.float32)
    assert set(columns["action"].tolist()) <= {0, 1}
    assert (columns["terminated"].dtype, columns["truncated"].dtype) == (np.bool_, np.bool_)
    for i, (gained, length) in enumerate(zip(result["returns"], result["lengths"], strict=True)):
        mine = columns["episode"] == i
        assert columns["step"][mine].tolist() == list(range(length))
        assert columns["reward"][mine].sum() == gained
        over = (columns["terminated"] | columns["truncated"])[mine]
        assert over[-1]
        assert not over[:-1].any()
    assert (np.abs(columns["observation"][columns["step"] == 0]) <= 0.05).all(), "the observation before the step, not after it"


def test_infos_are_saved_on_request(call: Call, counting: Path, tmp_path: Path) -> None:
    result = call("rollout", counting, "--episodes", "2", "--save-info", "--out", tmp_path / "steps.npz", "--json")
    assert result.code == 0
    with np.load(tmp_path / "steps.npz") as file:
        infos = [json.loads(text) for text in file["info"]]
    assert infos == [{"steps": i} for i in (1, 2, 3, 4, 5)] * 2


def test_a_number_of_steps_ends_a_rollout_in_the_middle_of_an_episode(call: Call, counting: Path, tmp_path: Path) -> None:
    result = call("rollout", counting, "--steps", "7", "--out", tmp_path / "steps.npz", "--json")
    assert result.json["lengths"] == [5]
    with np.load(tmp_path / "steps.npz") as file:
        assert file["episode"].tolist() == [0] * 5 + [1] * 2
    none = call("rollout", counting, "--steps", "3", "--out", tmp_path / "short.npz")
    assert none.code == 0
    assert "no episode ended within 3 steps" in none.out


def test_the_result_of_a_rollout_is_one_line_of_json(call: Call, counting: Path) -> None:
    output = call("rollout", counting, "--episodes", "3", "--json")
    assert output.out.count("\n") == 1
    result = output.json
    assert result["episodes"] == 3
    assert (result["return_mean"], result["return_std"], result["return_min"], result["return_max"]) == (5, 0, 5, 5)
    assert (result["length_mean"], result["returns"], result["lengths"]) == (5, [5, 5, 5], [5, 5, 5])
    assert result["video"] is None
    steps = Path(result["steps_file"])
    assert steps.parent.parent == counting / "rollouts"
    assert steps.exists()


def test_the_same_seed_plays_the_same_and_sampling_plays_differently(
    call: Call, trained: tuple[Path, CommandResult], tmp_path: Path
) -> None:
    played = {}
    for name, options in {
        "a": ["--seed", "1"],
        "b": ["--seed", "1"],
        "c": ["--seed", "9"],
        "d": ["--seed", "1", "--stochastic"],
    }.items():
        call("rollout", trained[0], "--episodes", "2", "--out", tmp_path / f"{name}.npz", *options)
        with np.load(tmp_path / f"{name}.npz") as file:
            played[name] = file["observation"].tobytes(), file["action"].tobytes()
    assert played["a"] == played["b"]
    assert played["a"] != played["c"]
    assert played["a"] != played["d"]


@pytest.mark.parametrize(
    ("suffix", "name"), [("", "000003"), ("/latest", "000003"), ("/checkpoints/000002", "000002"), ("/best", None)]
)
def test_a_rollout_takes_a_run_a_word_or_a_checkpoint(
    call: Call, trained: tuple[Path, CommandResult], suffix: str, name: str | None
) -> None:
    result = call("rollout", f"{trained[0]}{suffix}", "--episodes", "1", "--json")
    expected = name or checkpoint.best_name(LocalStore(trained[0]))
    assert Path(result.json["steps_file"]).parent.name.startswith(f"{expected}-")


_IMAGEIO_LEAKS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its reader leaves pipes open


@_IMAGEIO_LEAKS
def test_a_video_has_rgb_frames_that_move(call: Call, trained: tuple[Path, CommandResult], tmp_path: Path) -> None:
    result = call("rollout", trained[0], "--video", "--video-dir", tmp_path, "--episodes", "1", "--steps", "30", "--json")
    assert result.code == 0, result.err
    video = Path(result.json["video"])
    assert video.parent == tmp_path
    assert video.suffix == ".mp4"
    frames = imageio.v3.imread(video)
    assert frames.dtype == np.uint8
    assert frames.shape[1:] == (400, 600, 3)
    with np.load(result.json["steps_file"]) as file:
        assert len(frames) == len(file["step"])
    assert frames[0].std() > 5, "a picture, not one colour"
    assert (frames[0].astype(int) - frames[-1].astype(int)).any(), "the pole moves"


@_IMAGEIO_LEAKS
def test_a_video_of_odd_sides_loses_one_row_not_its_colours(call: Call, counting: Path, tmp_path: Path) -> None:
    result = call("rollout", counting, "--monitor", "--video-dir", tmp_path, "--episodes", "5", "--json")
    frames = imageio.v3.imread(result.json["video"])
    assert frames.shape == (15, 32, 48, 3), "three episodes are filmed"
    strongest = frames[4].reshape(-1, 3).mean(axis=0)
    assert strongest.argmax() == 1, "a first episode is green"
    widths = [int((frame.max(axis=2)[16] > 100).sum()) for frame in frames[:5]]
    assert widths == sorted(widths)
    assert widths[-1] > widths[0]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ("tests.environments:make_without_pictures", r"make_without_pictures cannot render RGB frames"),
        ("tests.environments:make_dark", r"make_dark renders float32\[8, 8\], which is not an RGB image"),
    ],
)
def test_an_environment_without_rgb_pictures_is_refused_with_the_reason(
    call: Call, counting: Path, tmp_path: Path, environment: str, reason: str
) -> None:
    result = call("rollout", counting, "--env", environment, "--video", "--video-dir", tmp_path)
    assert result.code == 2
    assert re.search(reason, one_line(result))
    assert not list(tmp_path.glob("*.mp4"))
    assert call("rollout", counting, "--env", environment, "--episodes", "1").code == 0


@pytest.mark.parametrize("environment", ["Acrobot-v1", "tests.environments:make_like_cartpole"])
def test_an_environment_with_other_spaces_is_refused(call: Call, trained: tuple[Path, CommandResult], environment: str) -> None:
    result = call("rollout", trained[0], "--env", environment)
    assert result.code == 2
    assert re.search(rf"trained on CartPole-v1; the spaces of {environment} are others", one_line(result))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--run", "DQN"], "trained with PPO, not with DQN"),
        (["--num-gpus", "1"], "played on the CPU"),
        (["--out", "steps.csv"], r"does not end in \.npz"),
        (["--config", "{"], "--config is not JSON"),
        (["--config", '{"lr": 1}'], r"is not supported.*env_config"),
        (["--env", "CartPol-v1"], "Did you mean 'CartPole-v1'"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused(call: Call, counting: Path, arguments: list[str], complaint: str) -> None:
    result = call("rollout", counting, *arguments)
    assert result.code == 2
    assert re.search(complaint, one_line(result))


def test_options_that_change_nothing_here_are_taken_with_a_notice(call: Call, counting: Path) -> None:
    result = call("rollout", counting, "--episodes", "2", "--use-shelve", "--no-render", "--track-progress", "--json")
    assert result.code == 0
    assert result.json["episodes"] == 2
    assert re.search(r"--use-shelve changes nothing.*--no-render changes nothing", result.err, re.DOTALL)
    assert re.search(r"1 of 2 episodes, 5 steps.*2 of 2 episodes, 10 steps", result.err, re.DOTALL)


def test_a_grid_of_episodes_is_one_video(call: Call, counting: Path, tmp_path: Path) -> None:
    result = call("rollout", counting, "--episodes", "3", "--video-grid", "--video-dir", tmp_path, "--json")
    assert result.code == 0, result.err
    assert [path.name for path in tmp_path.iterdir()] == [Path(result.json["video"]).name]
    assert result.json["video"].endswith("-grid.mp4")


def test_a_rollout_of_nonsense_is_not_found(call: Call, tmp_path: Path) -> None:
    result = call("rollout", tmp_path / "nonsense")
    assert result.code == 1
    assert re.search(r"no run or checkpoint at .*nonsense.*ludus runs list", one_line(result))


def test_settings_of_the_environment_can_be_changed_for_a_rollout(call: Call, counting: Path) -> None:
    result = call("rollout", counting, "--config", '{"env_config": {"length": 9}}', "--episodes", "2", "--json")
    assert result.json["lengths"] == [9, 9]


def test_an_environment_that_raises_during_a_rollout_is_named(call: Call, counting: Path) -> None:
    result = call(
        *("rollout", counting, "--env", "tests.environments:make_faulty"),
        *("--config", '{"env_config": {"fault": "raises in step"}}'),
    )
    assert result.code == 1
    assert re.search(r"make_faulty raised RuntimeError in step .*: the game crashed", one_line(result))


# -- runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(trained: tuple[Path, CommandResult], counting: Path, tmp_path: Path) -> Path:
    """A directory with two runs."""
    shutil.copytree(trained[0], tmp_path / "runs" / "a" / "cartpole")
    shutil.copytree(counting, tmp_path / "runs" / "a" / "counting")
    return tmp_path / "runs"


def test_runs_are_listed(call: Call, two: Path) -> None:
    result = call("runs", "list", two)
    assert result.code == 0
    assert all(
        word in result.out for word in ("cartpole", "counting", "CartPole-v1", "tests.environments:make_count", "finished")
    )
    rows = call("runs", "list", two, "--json").json
    by_env = {row["env"]: row for row in rows}
    assert by_env["tests.environments:make_count"]["return"] == 5
    assert by_env["CartPole-v1"]["timesteps"] > 9000
    assert {row["status"] for row in rows} == {"finished"}


def test_runs_are_found_in_the_default_directory(call: Call, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two.parent)
    assert len(call("runs", "list", "--json").json) == 2


def test_a_run_is_shown_in_full(call: Call, two: Path) -> None:
    result = call("runs", "show", two / "a" / "cartpole", "--full")
    assert result.code == 0
    for words in ("env: CartPole-v1", '"status": "finished"', '"versions"', '"000003"', "episode_return_mean", '"best"'):
        assert words in result.out, words


def test_looking_at_a_run_does_not_disturb_it(call: Call, two: Path, tmp_path: Path) -> None:
    half = two / "a" / "cartpole" / "checkpoints" / ".aside-busy"
    half.mkdir()
    before = sorted(str(path) for path in two.rglob("*"))
    for arguments in (["list"], ["compare", "--out", str(tmp_path / "compare.png")], ["show"]):
        assert call("runs", *arguments, two / "a" / "cartpole").code == 0
    assert sorted(str(path) for path in two.rglob("*")) == before


def test_runs_are_compared_best_first_with_the_settings_that_differ(call: Call, two: Path, tmp_path: Path) -> None:
    compared = call("runs", "compare", two, "--json", "--out", tmp_path / "compare.png").json
    rows = compared["runs"]
    assert [row["env"] for row in rows] == ["CartPole-v1", "tests.environments:make_count"]
    assert rows[0]["best"] > rows[1]["best"]
    assert (rows[0]["num_envs_per_worker"], rows[1]["num_envs_per_worker"]) == (64, 8)
    assert "gamma" not in rows[0], "the same in both"
    assert {group["n"] for group in compared["groups"]} == {1}
    assert compared["differences"] == [], "two environments are not compared"
    assert imageio.v3.imread(compared["picture"]).std() > 5
    result = call("runs", "compare", two, "--out", tmp_path / "compare.png")
    assert result.code == 0, result.err
    assert "2 environments; groups are compared only within one of them" in result.out
    assert str(tmp_path / "compare.png") in result.out


def test_several_curves_are_drawn_in_one_picture(call: Call, two: Path, tmp_path: Path) -> None:
    result = call("runs", "plot", two, "--out", tmp_path / "plots" / "curves.png")
    assert result.code == 0, result.err
    assert result.out.strip() == str(tmp_path / "plots" / "curves.png")
    picture = imageio.v3.imread(tmp_path / "plots" / "curves.png")
    assert picture.shape[0] > 300
    assert picture.shape[1] > 500
    assert picture.std() > 5
    alone = call(
        "runs", "plot", two / "a" / "cartpole", "--out", tmp_path / "one.png", "--metric", "learner/loss", "--over", "iterations"
    )
    assert alone.code == 0
    assert not np.array_equal(imageio.v3.imread(tmp_path / "one.png"), picture)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["list", "nowhere"], r"No runs in nowhere.*ludus train CartPole-v1"),
        (["show", "nowhere"], r"nowhere is not the directory of a run"),
        (["plot", "nowhere"], r"No runs in nowhere"),
    ],
)
def test_missing_runs_are_an_error(call: Call, arguments: list[str], complaint: str) -> None:
    result = call("runs", *arguments)
    assert result.code == 1
    assert re.search(complaint, one_line(result))


def test_an_unknown_metric_is_an_error(call: Call, two: Path, tmp_path: Path) -> None:
    result = call("runs", "plot", two, "--metric", "happiness", "--out", tmp_path / "x.png")
    assert result.code == 1
    assert "has values of 'happiness'" in one_line(result)
    assert not (tmp_path / "x.png").exists()


def test_a_damaged_run_does_not_hide_the_others(call: Call, two: Path) -> None:
    (two / "a" / "counting" / "metrics.jsonl").write_bytes(b"\x00\xff\n{torn")
    (two / "a" / "counting" / "meta.json").write_text("{")
    rows = call("runs", "list", two, "--json").json
    assert {row["env"] for row in rows} == {"CartPole-v1", "tests.environments:make_count"}


def test_a_closed_output_pipe_causes_no_traceback(two: Path) -> None:
    listing = subprocess.Popen(
        [*LUDUS, "runs", "show", str(two / "a" / "cartpole")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert listing.stdout is not None
    listing.stdout.close()
    with listing:
        assert listing.stderr is not None
        assert "Traceback" not in listing.stderr.read()
