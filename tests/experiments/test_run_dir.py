"""What a run leaves behind: a directory that says everything about it, and that nothing but plain readers are needed for."""

from __future__ import annotations

import itertools
import json
import logging
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import ludus
from ludus.core.metrics import JsonLinesSink, read_jsonl
from ludus.errors import ConfigError, NotFound, UsageError
from ludus.experiments.resolve import resolve
from ludus.experiments.runs.run_dir import LOG_FILE, Run, find_runs, run_directory
from tests.experiments import small

CONFIG = {"mine": {"env": "CartPole-v1", "run": "PPO", "config": {"seed": 7}}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run, with checkpoints and evaluations on its way."""
    where = tmp_path_factory.mktemp("runs") / "trained"
    small.train(where, 6, top={"checkpoint_freq": 2}, seed=7, observation_filter="MeanStdFilter", normalize_reward=True)
    return where


# -- making and opening -------------------------------------------------------------------------------------------------


def test_a_new_run_has_its_config_and_its_origin(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", CONFIG)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == CONFIG
    assert run.config() == {"name": "mine", **CONFIG["mine"]}
    assert run.meta()["status"] == "running"
    assert run.meta()["seed"] == 7


def test_a_directory_holds_one_run_only(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", CONFIG)
    before = (tmp_path / "run" / "meta.json").read_bytes()
    with pytest.raises(UsageError, match=r"already holds a run.*--resume .*run.*or choose another name"):
        Run.create(tmp_path / "run", {"other": {"env": "Acrobot-v1"}})
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == CONFIG
    assert (tmp_path / "run" / "meta.json").read_bytes() == before


@pytest.mark.parametrize("where", ["nowhere", "."])
def test_what_is_no_run_cannot_be_opened(tmp_path: Path, where: str) -> None:
    with pytest.raises(NotFound, match=r"is not the directory of a run.*ludus runs list"):
        Run.open(tmp_path / where)


def test_changes_of_the_metadata_keep_the_rest(tmp_path: Path) -> None:
    run = Run.create(tmp_path, CONFIG)
    run.write_meta({"status": "finished"})
    assert run.meta()["status"] == "finished"
    assert run.meta()["seed"] == 7
    (tmp_path / "meta.json").write_text("{damaged")
    assert run.meta() == {}
    run.write_meta({"status": "running"})
    assert run.meta() == {"status": "running"}


def test_looking_at_a_run_does_not_touch_what_its_trainer_is_writing(tmp_path: Path) -> None:
    Run.create(tmp_path, CONFIG)
    half = tmp_path / "checkpoints" / ".aside-0123"
    half.mkdir(parents=True)
    Run.open(tmp_path)
    assert half.is_dir()


def test_directories_are_named_after_the_run_or_as_asked(tmp_path: Path) -> None:
    free = run_directory("mine", "PPO", "ALE/Pong-v5", tmp_path, None, None)
    assert free.parent == tmp_path / "mine"
    assert free.name.startswith("PPO_ALE-Pong-v5_")
    assert free != run_directory("mine", "PPO", "ALE/Pong-v5", tmp_path, None, None), "two runs of one second"
    own = run_directory("mine", "my.module:Own", "games.one:make", tmp_path, None, None)
    assert own.name.startswith("my-module-Own_games.one-make_")
    assert run_directory("mine", "PPO", "CartPole-v1", tmp_path, tmp_path / "project", "one") == tmp_path / "project" / "one"


@pytest.mark.parametrize("trial", ["../escape", "/abs", "a/b", "..", ".hidden", "", "a b"])
def test_a_trial_is_a_plain_name(tmp_path: Path, trial: str) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        run_directory("mine", "PPO", "CartPole-v1", tmp_path, tmp_path, trial)


def test_project_and_trial_go_together(tmp_path: Path) -> None:
    for project, trial in ((tmp_path, None), (None, "one")):
        with pytest.raises(ConfigError, match="go together"):
            run_directory("mine", "PPO", "CartPole-v1", tmp_path, project, trial)


def test_runs_are_found_below_a_directory(tmp_path: Path) -> None:
    for name in ("a/one", "a/two", "three"):
        Run.create(tmp_path / name, CONFIG)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert {str(run.relative_to(tmp_path)) for run in find_runs(tmp_path)} == {"a/one", "a/two", "three"}
    assert find_runs(tmp_path / "a" / "one") == [tmp_path / "a" / "one"]
    assert find_runs(tmp_path / "nowhere") == []


def test_the_log_of_a_run_ends_with_the_run(tmp_path: Path) -> None:
    run = Run.create(tmp_path, CONFIG)
    log = logging.getLogger("ludus.experiment.test")
    before = logging.getLogger("ludus").level
    run.start_log()
    log.info("inside the run")
    log.debug("too much")
    run.stop_log()
    log.warning("after the run")
    text = (tmp_path / LOG_FILE).read_text()
    assert "INFO ludus.experiment.test: inside the run" in text
    assert "too much" not in text
    assert "after the run" not in text
    assert logging.getLogger("ludus").level == before
    run.stop_log()


# -- what a training leaves ---------------------------------------------------------------------------------------------


def test_a_run_directory_looks_as_designed(trained: Path) -> None:
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    (events,) = [name for name in files if name.startswith("events.out.tfevents")]
    checkpoint = {"manifest.json", "model.optimizer.safetensors", "model.safetensors", "sampler.safetensors", "state.json"}
    expected = {
        "config.yaml",
        "meta.json",
        "status.json",
        "metrics.jsonl",
        events,
        "logs/learner/train.log",
        "checkpoints/best.json",
    }
    expected |= {f"checkpoints/{name}/{file}" for name in ("000002", "000004", "000006") for file in checkpoint}
    expected |= {f"models/model/{name}" for name in ("model.json", "versions.json", "incarnations/000001")}
    expected |= {"models/model/incarnations/.once-000001/value"}  # of the one that was created by one process alone
    expected |= {f"models/model/{version:06d}.safetensors" for version in (3, 5, 7)}
    assert files == expected


def test_the_config_is_whole_and_can_be_run_again(trained: Path, tmp_path: Path) -> None:
    text = yaml.safe_load((trained / "config.yaml").read_text())
    (experiment_,) = text.values()
    config = experiment_["config"]
    assert (config["seed"], config["num_envs_per_worker"], config["observation_filter"]) == (7, 8, "MeanStdFilter")
    assert (config["lambda"], config["gamma"], config["model"]["fcnet_hiddens"]) == (0.95, 0.99, [16])
    again = resolve(Run.open(trained).config())
    assert again.to_dict() == text, "reading and writing a config changes it"
    assert {*config} == {*again.config.model_dump(by_alias=True)}, "a key is missing from the written config"


def test_the_metadata_say_where_it_came_from_and_nothing_else(trained: Path) -> None:
    meta = json.loads((trained / "meta.json").read_text())
    assert set(meta) == {
        *("status", "versions", "host", "platform", "cpus", "git_commit", "command", "started", "ended", "seed"),
        *("torch_threads", "learner_threads", "id"),
    }
    assert meta["status"] == "finished"
    assert meta["seed"] == 7
    assert isinstance(meta["command"], list)
    assert set(meta["versions"]) == {"ludus", "python", "torch", "numpy", "gymnasium"}
    assert meta["versions"]["ludus"] == ludus.__version__
    assert all(version != "unknown" for version in meta["versions"].values())
    assert meta["started"] <= meta["ended"]


def test_the_log_tells_the_story_of_the_run(trained: Path) -> None:
    text = (trained / LOG_FILE).read_text()
    assert [line.split("checkpoint ")[1].split(" at")[0] for line in text.splitlines() if "checkpoint 0" in line] == [
        "000002",
        "000004",
        "000006",
    ]
    assert "finished: iterations" in text


def test_nothing_in_a_run_is_a_pickle(trained: Path) -> None:
    files = [path for path in trained.rglob("*") if path.is_file()]
    assert len(files) > 15
    for path in files:
        assert not is_pickle(path), path


def is_pickle(path: Path) -> bool:
    """By its bytes, whatever its name: a pickle of any protocol, or an archive with one inside."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith((".pkl", ".pickle")) for name in archive.namelist())
    data = path.read_bytes()
    try:
        return bool(list(pickletools.genops(data)))
    except Exception:  # whatever genops meets first
        return data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")


def test_the_pickle_detector_detects_pickles(tmp_path: Path) -> None:
    import pickle

    import torch

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "a").write_bytes(pickle.dumps({"a": [1]}, protocol))
        assert is_pickle(tmp_path / "a")
    torch.save({"a": torch.zeros(2)}, tmp_path / "b")
    assert is_pickle(tmp_path / "b")


def test_tensorboard_reads_the_same_numbers_as_the_metrics_file(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    shown = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    rows = read_jsonl(trained / "metrics.jsonl")
    assert len(rows) == 6
    compared = 0
    for row in rows:
        for name, value in row.items():
            if name == "incarnation" or value is None:
                continue
            tag = name if "/" in name else f"train/{name}"
            assert shown[tag][row["timesteps"]] == pytest.approx(value, rel=1e-5), f"{tag} at {row['timesteps']}"
            compared += 1
    assert compared == sum(len(points) for points in shown.values()), "TensorBoard has more than the file"
    assert {"train/episode_return_mean", "train/fps", "learner/loss", "evaluation/return_mean"} <= shown.keys()


def test_the_metrics_of_a_run_are_complete_and_count_upwards(trained: Path) -> None:
    rows = read_jsonl(trained / "metrics.jsonl")
    assert [row["iterations"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(a["timesteps"] < b["timesteps"] for a, b in itertools.pairwise(rows))
    assert [row["learner/version"] for row in rows] == [2, 3, 4, 5, 6, 7]
    assert [row["learner/lag_mean"] for row in rows] == [0] * 6
    assert [row["iterations"] for row in rows if "evaluation/return_mean" in row] == [2, 4, 6]
    assert all(json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines())


# -- metrics.jsonl after accidents --------------------------------------------------------------------------------------


def _lines(path: Path, incarnation: int, iterations: range, **extra: Any) -> None:
    sink = JsonLinesSink(path, incarnation)
    for i in iterations:
        sink.write({"iterations": i, "timesteps": 10 * i, **extra})
    sink.close()


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _lines(path, 1, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # killed in the middle of a line
    assert [row["iterations"] for row in read_jsonl(path)] == [1, 2]
    _lines(path, 2, range(3, 6))
    assert [(row["iterations"], row["incarnation"]) for row in read_jsonl(path)] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert path.read_bytes().startswith(whole[:-20]), "what was written is not changed"


def test_after_a_resume_the_later_lines_stand(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _lines(path, 1, range(1, 8), who=1)  # checkpoint at 4, killed after 7
    _lines(path, 2, range(5, 7), who=2)  # resumed from 4, killed after 6
    assert [(row["iterations"], row["who"]) for row in read_jsonl(path)] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    _lines(path, 3, range(5, 6), who=3)
    assert [(row["iterations"], row["who"]) for row in read_jsonl(path)] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 3)]


def test_a_number_that_is_none_is_null_and_others_keep_seven_digits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _lines(path, 1, range(1, 2), nan=float("nan"), inf=float("inf"), third=1 / 3, large=2**40, small=1.23456789e-12)
    (row,) = read_jsonl(path)
    assert row["nan"] is None
    assert row["inf"] is None
    assert (row["third"], row["large"], row["small"]) == (0.3333333, 2**40, 1.234568e-12)


def test_a_run_that_has_not_reported_has_no_metrics(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text("\n\0\0\0\nnonsense\n[1]\n{}\n")
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
