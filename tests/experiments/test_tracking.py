"""Tracking: what services are told, and that nothing they do or fail to do reaches the training."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ludus.config.schema import TrackConfig
from ludus.config.validation import parse_experiment
from ludus.core.metrics import Numbers, read_jsonl
from ludus.errors import ConfigError, MissingExtra
from ludus.experiments import runner
from ludus.experiments.runs import tracking
from ludus.experiments.runs.run_dir import Run
from ludus.experiments.runs.tracking import ServiceSink, attach_files, check_tracking, tracking_notices, wandb_mode
from tests.experiments import small
from tests.serving import launched_services

_KEYS = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "MLFLOW_TRACKING_URI")


@pytest.fixture(autouse=True)
def keyless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in _KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def track(**section: Any) -> TrackConfig:
    return parse_experiment({"env": "CartPole-v1", "track": section}).track


# -- what may be asked for ----------------------------------------------------------------------------------------------


def test_one_word_switches_a_service_on_or_off_and_is_saved_in_full() -> None:
    on = track(wandb=True, mlflow=True)
    assert on.wandb is not None
    assert on.mlflow is not None
    assert (on.wandb.project, on.wandb.mode, on.mlflow.tracking_uri) == ("ludus", None, None)
    assert track(**on.model_dump(mode="json")) == on, "reading and writing a config changes it"
    assert track(wandb=False).wandb is None
    assert track().tensorboard


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"wandb": {"projct": "x"}}, r"track\.wandb\.projct.*'project'"),
        ({"wandb": {"mode": "of"}}, r"track\.wandb\.mode is 'of'.*offline"),
        ({"tensorboard": False}, r"track\.tensorboard"),
        ({"wanb": True}, r"'track\.wanb'.*'wandb'"),
        ({"wandb": 3}, r"track\.wandb is 3"),
    ],
)
def test_a_wrong_key_or_value_is_said(section: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        track(**section)


@pytest.mark.parametrize(
    ("section", "hint"),
    [
        ({"wandb": {"api_key": "s3cret"}}, "WANDB_API_KEY"),
        ({"mlflow": {"tracking_uri": "https://me:s3cret@host/"}}, "MLFLOW_TRACKING_PASSWORD"),
        ({"mlflow": {"tracking_uri": "postgresql://me:s3cret@host/db"}}, "MLFLOW_TRACKING_URI"),
    ],
)
def test_a_secret_in_a_config_is_refused_and_not_repeated(section: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        track(**section)
    assert "s3cret" not in str(caught.value)


def test_online_without_a_key_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    data = small.data() | {"track": {"wandb": {"mode": "online"}}}
    with pytest.raises(ConfigError, match=r"no Weights & Biases key.*wandb login.*offline"):
        runner.train(data, local_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_without_a_key_a_run_is_offline_and_says_so(tmp_path: Path) -> None:
    asked = track(wandb=True)
    assert asked.wandb is not None
    assert wandb_mode(asked.wandb, {}) == "offline"
    assert any("offline" in sentence and "wandb sync" in sentence for sentence in tracking_notices(asked))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password s3cret\n")
    (tmp_path / "netrc").chmod(0o600)
    assert wandb_mode(asked.wandb, {"NETRC": str(tmp_path / "netrc")}) == "online"
    assert wandb_mode(asked.wandb, {"NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://own.server"}) == "offline"
    assert wandb_mode(asked.wandb, {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}) == "offline"
    assert list(tracking_notices(asked)) == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_is_not_installed_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(MissingExtra, match=rf"pip install 'ludus\[{name}\]'"):
        check_tracking(track(**{name: True}))


# -- beside the run -----------------------------------------------------------------------------------------------------


class _Service:
    """Takes notes; fails as often as told."""

    name = "notes"

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.reports: list[Numbers] = []
        self.files: list[tuple[str, int]] = []
        self.names: list[str] = []
        self.status = ""
        self.tried = threading.Semaphore(0)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def open(self) -> None:
        self._trouble()

    def write(self, reports: Sequence[Numbers]) -> None:
        self._trouble()
        self.reports += reports

    def file(self, path: Path, timesteps: int, name: str = "") -> None:
        self.files.append((path.name, timesteps))
        self.names.append(name)

    def close(self, status: str) -> None:
        self.status = status

    def _trouble(self) -> None:
        self.tried.release()
        assert self.may_go_on.wait(30)
        if self.failures:
            self.failures -= 1
            raise ConnectionError("https://me:s3cret@host/ does not answer")


def _aside(service: _Service, **settings: Any) -> ServiceSink:
    return ServiceSink(service, **{"batch_interval_s": 0.001, "min_backoff_s": 0.001, "close_s": 30.0, **settings})


def _numbers(i: int) -> Numbers:
    return {"timesteps": 10.0 * i, "x": float(i)}


def test_everything_is_delivered_in_order_and_then_files_and_the_end(tmp_path: Path) -> None:
    service = _Service()
    sink = _aside(service, files=lambda: [tmp_path / "a.png"], status=lambda: "interrupted")
    for i in range(100):
        sink.write(_numbers(i))
    sink.close()
    assert service.reports == [_numbers(i) for i in range(100)]
    assert (service.files, service.status) == ([("a.png", 990)], "interrupted")
    assert (sink.failures, sink.lost) == (0, 0)


def test_videos_are_delivered_under_the_name_of_their_series_and_once(tmp_path: Path) -> None:
    service = _Service(failures=1)
    aside = _aside(service)
    aside.write(_numbers(0))
    for i in (1, 2):
        aside.show_video(tmp_path / f"{i}.mp4", "evaluation/video_1", 10 * i)
    aside.close()
    assert service.files == [("1.mp4", 10), ("2.mp4", 20)]
    assert service.names == ["evaluation/video_1"] * 2


def test_a_service_that_fails_for_a_while_gets_everything_later_and_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    service = _Service(failures=6)
    with caplog.at_level(logging.INFO, "ludus"):
        sink = _aside(service)
        for i in range(5):
            sink.write(_numbers(i))
        for _ in range(8):  # six that fail, one that opens, one that writes
            assert service.tried.acquire(timeout=30)
        sink.close()
    assert service.reports == [_numbers(i) for i in range(5)]
    assert (sink.failures, sink.lost) == (6, 0)
    said = [record.message for record in caplog.records if "training continues" in record.message]
    assert len(said) == 1
    assert "ConnectionError" in said[0]
    assert "s3cret" not in caplog.text


def test_a_service_that_never_answers_is_left_behind_and_what_it_missed_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Opens(_Service):
        def open(self) -> None:
            pass

    service = Opens()
    service.may_go_on.clear()
    sink = _aside(service, close_s=0.05)
    for i in range(7):
        sink.write(_numbers(i))
    assert service.tried.acquire(timeout=30), "some are under way, and stay there"
    sink.close()
    assert "7 reports were not delivered; it did not finish" in caplog.text
    service.may_go_on.set()


def test_a_service_that_always_fails_ends_with_the_run(caplog: pytest.LogCaptureFixture) -> None:
    sink = _aside(_Service(failures=1 << 30))
    sink.write(_numbers(1))
    sink.close()
    assert sink.failures > 0
    assert sink.lost == 1
    assert "1 reports were not delivered" in caplog.text


def test_of_too_many_reports_the_oldest_are_lost_and_counted() -> None:
    service = _Service()
    service.may_go_on.clear()
    sink = _aside(service, waiting=10)
    assert service.tried.acquire(timeout=30), "it opens, and takes nothing yet"
    for i in range(25):
        sink.write(_numbers(i))
    service.may_go_on.set()
    sink.close()
    assert sink.lost in (14, 15), "one may have been taken before"
    assert [numbers["x"] for numbers in service.reports][-10:] == list(range(15, 25))


def test_a_service_that_fails_in_the_middle_does_not_change_what_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small.train(tmp_path / "plain", 3)
    monkeypatch.setattr(tracking, "services_of", lambda run, e: [_Service(failures=1 << 30)])
    tracked = small.train(tmp_path / "tracked", 3)
    assert tracked.stopped_by == plain.stopped_by == "iterations"
    for name, weights in plain.agent.policy.weights().items():
        assert np.array_equal(weights, tracked.agent.policy.weights()[name]), name


# -- the services themselves --------------------------------------------------------------------------------------------


def _check_reports(rows: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    """`told`: every report of a service. All numbers of metrics.jsonl are there, at their timesteps."""
    compared = 0
    for row in rows:
        at = {name: value for report in told if report.get("timesteps") == row["timesteps"] for name, value in report.items()}
        for name, value in row.items():
            if value is not None and name != "incarnation":
                assert at[name] == pytest.approx(value, rel=1e-6), name
                compared += 1
    assert compared > 20


@pytest.mark.system
def test_a_tracked_run_tells_both_services_the_numbers_of_its_own_record(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    data = small.data(3) | {
        "name": "mine",
        "track": {"csv": True, "wandb": {"mode": "offline", "tags": ["a"]}, "mlflow": {"tracking_uri": store}},
    }
    first = runner.train(data, local_dir=tmp_path / "runs")
    run = Run.open(first.run_dir)
    rows = read_jsonl(run.metrics_path)
    lr = run.config()["config"]["lr"]
    (told,) = launched_services.wandb_runs(first.run_dir)
    assert (told.id, told.project, told.group, told.name) == (run.meta()["track_id"], "ludus", "mine", first.run_dir.name)
    assert told.exit_code == 0
    assert (told.config["lr"], told.config["run"], told.config["model.fcnet_hiddens"]) == (lr, "PPO", [16])
    _check_reports(rows, told.history)
    assert any("plots/episode_return_mean/path" in report for report in told.history)

    (kept,) = launched_services.mlflow_runs(store, "mine")
    assert (kept.status, kept.params["lr"], kept.tags["ludus.group"]) == ("FINISHED", str(lr), "mine")
    steps = sorted(kept.metrics["timesteps"])
    _check_reports(rows, [{name: points[step] for name, points in kept.metrics.items() if step in points} for step in steps])
    assert kept.artifacts == ["plots/episode_return_mean.png"]

    runner.resume(run.directory, stop={"iterations": 5})
    rows = read_jsonl(run.metrics_path)
    assert len(rows) == 5
    parts = launched_services.wandb_runs(run.directory)
    assert {part.id for part in parts} == {told.id}
    _check_reports(rows, [report for part in parts for report in part.history])
    (later,) = launched_services.mlflow_runs(store, "mine")
    assert (later.id, later.status, len(later.metrics["timesteps"])) == (kept.id, "FINISHED", 5)


@pytest.mark.long
@pytest.mark.system
def test_a_video_that_is_made_later_is_shown_wherever_the_run_is_tracked(tmp_path: Path) -> None:
    import imageio.v3

    data = small.data(3) | {"name": "mine", "track": {"wandb": True, "mlflow": True}}
    run = Run.open(runner.train(data, local_dir=tmp_path / "runs").run_dir)
    video = run.directory / "videos" / "episode.mp4"
    video.parent.mkdir()
    imageio.v3.imwrite(video, np.random.default_rng(0).integers(0, 255, (20, 64, 64, 3), np.uint8), fps=10)
    assert attach_files(run.directory, [video])
    told = launched_services.wandb_runs(run.directory)
    assert {part.id for part in told} == {run.meta()["track_id"]}
    assert told[-1].history[-1]["videos/episode/path"].endswith(".mp4")
    assert told[-1].history[-1]["timesteps"] == read_jsonl(run.metrics_path)[-1]["timesteps"]
    (kept,) = launched_services.mlflow_runs(f"sqlite:///{tmp_path / 'runs' / 'mine' / 'mlflow.db'}", "mine")
    assert kept.status == "FINISHED"
    assert kept.artifacts == ["plots/episode_return_mean.png", "videos/episode.mp4"]
    assert _shown_in_tensorboard(run.directory) >= {"plots/episode_return_mean", "videos/episode"}


@pytest.mark.long
@pytest.mark.system
def test_a_run_with_workers_is_tracked_by_its_learner(tmp_path: Path) -> None:
    data = small.data(3, num_workers=2) | {"name": "mine", "track": {"wandb": True, "mlflow": True}}
    run = Run.open(runner.train(data, local_dir=tmp_path / "runs").run_dir)
    (told,) = launched_services.wandb_runs(run.directory)
    assert (told.id, told.exit_code) == (run.meta()["track_id"], 0)
    _check_reports(read_jsonl(run.metrics_path), told.history)
    (kept,) = launched_services.mlflow_runs(f"sqlite:///{tmp_path / 'runs' / 'mine' / 'mlflow.db'}", "mine")
    assert (kept.status, len(kept.metrics["timesteps"])) == ("FINISHED", 3)


@pytest.mark.long
@pytest.mark.system
def test_services_that_cannot_be_reached_do_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret" * 7)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
    data = small.data(3) | {"name": "mine", "track": {"wandb": True, "mlflow": {"tracking_uri": "http://127.0.0.1:9"}}}
    result = runner.train(data, local_dir=tmp_path / "runs")
    assert result.stopped_by == "iterations"
    assert Run.open(result.run_dir).meta()["status"] == "finished"
    told = (result.run_dir / "logs" / "learner" / "train.log").read_text()
    assert told.count("MLflow failed; training continues") == 1
    assert "cannot reach W&B; logging offline" in told
    _check_reports(read_jsonl(result.run_dir / "metrics.jsonl"), launched_services.wandb_runs(result.run_dir)[0].history)
    for path in result.run_dir.rglob("*"):
        assert not path.is_file() or b"s3cret" not in path.read_bytes(), path


def _shown_in_tensorboard(directory: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags: set[str] = set()
    for file in directory.glob("events*"):
        events = EventAccumulator(str(file), size_guidance={"images": 0})
        events.Reload()
        tags |= set(events.Tags()["images"])
    return tags


@pytest.mark.long
@pytest.mark.system
def test_trials_that_begin_at_once_share_one_database(tmp_path: Path) -> None:
    """MLflow's own way of making its tables breaks when two processes do it at the same time."""
    code = (
        "import sys; from pathlib import Path; from ludus.config.schema import MlflowConfig; from ludus.experiments.runs.tracking import Mlflow\n"
        "name = sys.argv[1]; service = Mlflow(Path(name), MlflowConfig(), 'sweep', name, {'lr': 1.0}); service.open()\n"
        "service.write([{'timesteps': 10, 'x': 1.5}]); service.close('finished')"
    )
    trials = [
        subprocess.Popen([sys.executable, "-c", code, f"t{i}"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) for i in range(3)
    ]
    for trial in trials:
        _, said = trial.communicate(timeout=240)
        assert trial.returncode == 0, said
    kept = launched_services.mlflow_runs(f"sqlite:///{tmp_path / 'mlflow.db'}", "sweep")
    assert {(run.tags["ludus.track_id"], run.status, run.metrics["x"][10]) for run in kept} == {
        (f"t{i}", "FINISHED", 1.5) for i in range(3)
    }
    assert not list(tmp_path.glob(".aside*"))


def test_a_run_that_is_not_tracked_attaches_nothing(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"mine": {"env": "CartPole-v1", "config": {}}})
    assert not attach_files(run.directory, [])
    assert tracking.TRACK_ID not in json.loads((run.directory / "meta.json").read_text())
    assert yaml.safe_load((run.directory / "config.yaml").read_text()) == {"mine": {"env": "CartPole-v1", "config": {}}}
