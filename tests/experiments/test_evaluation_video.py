"""Videos of evaluations during training: in the run, in TensorBoard and in the services, and never in the way of a training."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ludus.algorithms.run_clock import RunClock
from ludus.core.metrics import read_jsonl
from ludus.distributed.code_bundle import CodeBundle
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import EvaluationPlan, InlineEvaluation
from ludus.experiments.evaluation.evaluation_workers import EvaluationWorkers, WorkerSettings
from ludus.experiments.runs.remote_runs import synced_files
from ludus.models.weights import serialization
from ludus.process.workers.supervisor import WorkerRestart
from ludus.storage.local import LocalStore
from tests.experiments import small
from tests.experiments.test_evaluation import NO_STOP, WALK, a_course, finished, weights
from tests.serving import launched_services


def frames_of(path: Path) -> int:
    import imageio_ffmpeg

    counted: tuple[int, float] = imageio_ffmpeg.count_frames_and_secs(str(path))
    return counted[0]


def shown_in_tensorboard(run: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Tag → (step, encoded picture)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(run), size_guidance={"images": 0})
    events.Reload()
    return {tag: [(item.step, item.encoded_image_string) for item in events.Images(tag)] for tag in events.Tags()["images"]}


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "videos").glob("*"))


def test_the_first_episodes_of_an_evaluation_are_recorded_and_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small.train(run, 2, evaluation_interval=1, evaluation_video=1)
    videos = sorted((run / "videos").iterdir())
    assert [path.name for path in videos] == [f"evaluation-iteration-00000{i}-episode-1.mp4" for i in (1, 2)]
    shown = shown_in_tensorboard(run)
    assert list(shown) == ["evaluation/video_1"]
    assert [step for step, _ in shown["evaluation/video_1"]] == [row["timesteps"] for row in read_jsonl(run / "metrics.jsonl")]
    for path, (_, data) in zip(videos, shown["evaluation/video_1"], strict=True):
        assert frames_of(path) > 1
        picture = Image.open(io.BytesIO(data))
        assert picture.format == "GIF"
        assert getattr(picture, "n_frames", 1) > 1


def test_a_run_learns_the_same_with_videos(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env": WALK, "evaluation_interval": 1}
    small.train(tmp_path / "with", 2, evaluation_video=5, **settings)
    small.train(tmp_path / "without", 2, **settings)
    assert small.same(weights(tmp_path / "with"), weights(tmp_path / "without"))
    assert len(names(tmp_path / "with")) == 4, "an evaluation has two episodes"
    assert not (tmp_path / "without" / "videos").exists()


def test_the_videos_show_the_episodes_that_were_scored(tmp_path: Path) -> None:
    course = _course_with_videos(2)
    evaluation = InlineEvaluation(course, course.policy(), NO_STOP, tmp_path)
    score = evaluation(3)
    evaluation.close()
    assert [path.name for path in score.videos] == [f"evaluation-iteration-000003-episode-{i}.mp4" for i in (1, 2)]
    assert [frames_of(path) for path in score.videos] == list(score.lengths[:2])


def test_evaluation_workers_record_the_same_videos(tmp_path: Path) -> None:
    course = _course_with_videos(1)
    policy = course.policy()
    inline = InlineEvaluation(course, policy, NO_STOP, tmp_path / "inline")
    expected = inline(3)
    inline.close()
    weights_file = {"model.safetensors": serialization.encode_weights(policy.weights())}
    LocalStore(tmp_path).put_bundle("checkpoints/000003", weights_file)
    players = EvaluationWorkers(course, CodeBundle(), tmp_path, WorkerSettings(2, 60.0, WorkerRestart(3, 0.1)), lambda: False)
    players.begin(3, "000003")
    ((_, score),) = finished(players)
    players.close()
    assert score is not None
    assert score.returns == pytest.approx(expected.returns)
    assert [path.parent for path in score.videos] == [tmp_path / "videos"]
    assert [path.read_bytes() for path in score.videos] == [path.read_bytes() for path in expected.videos]


def test_an_environment_that_cannot_render_is_noticed_once_and_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    blind = "tests.experiments.evaluated:Blind"
    small.train(run, 2, env=blind, evaluation_interval=1, evaluation_video=1)
    (notice,) = [record.getMessage() for record in caplog.records if "evaluation_video" in record.getMessage()]
    assert "cannot render RGB frames: its render modes are none" in notice
    assert "--video" not in notice, "that is an option of rollouts"
    assert not (run / "videos").exists()
    assert any("evaluation/return_mean" in row for row in read_jsonl(run / "metrics.jsonl"))


@pytest.mark.parametrize("depth", ["one", "raises"])
def test_a_renderer_that_fails_later_ends_the_videos_and_nothing_else(tmp_path: Path, depth: str) -> None:
    """A depth map is no picture; an unknown kind of one is a KeyError of the environment."""
    notices: list[str] = []
    course = _course_with_videos(1, depth=depth)
    evaluation = InlineEvaluation(course, course.policy(), NO_STOP, tmp_path, notices.append)
    scores = [evaluation(i) for i in (1, 2)]
    evaluation.close()
    assert all(score.complete and not score.videos for score in scores)
    assert len(notices) == 1
    assert "evaluation_video" in notices[0]


def test_a_renderer_that_fails_in_a_worker_is_noticed_once(tmp_path: Path) -> None:
    notices: list[str] = []
    course = _course_with_videos(1, depth="one")
    LocalStore(tmp_path).put_bundle(
        "checkpoints/000001", {"model.safetensors": serialization.encode_weights(course.policy().weights())}
    )
    players = EvaluationWorkers(
        course, CodeBundle(), tmp_path, WorkerSettings(1, 60.0, WorkerRestart(3, 0.1)), lambda: False, notices.append
    )
    for iteration in (1, 2):
        players.begin(iteration, "000001")
        ((_, score),) = finished(players)
        assert score is not None
        assert len(score.returns) == 4
    players.close()
    assert len(notices) == 1
    assert "float32[64, 80, 1], which is not an RGB image" in notices[0]


def test_videos_of_evaluations_go_to_the_store_of_a_run_and_other_videos_do_not(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("evaluation-iteration-000001-episode-1.mp4", "agent.mp4"):
        (tmp_path / "videos" / name).write_bytes(b"video")
    assert [name for name, _ in synced_files(tmp_path)] == ["videos/evaluation-iteration-000001-episode-1.mp4"]


def test_a_stop_ends_a_recording_and_keeps_the_score(tmp_path: Path) -> None:
    course = _course_with_videos(2)
    policy, asked = course.policy(), _Calls()
    plain = InlineEvaluation(course, policy, StopCheck(asked, RunClock()))
    expected = plain(3)
    late = _Calls(after=asked.count + 3)
    recording = InlineEvaluation(course, policy, StopCheck(late, RunClock()), tmp_path)
    score = recording(3)
    plain.close()
    recording.close()
    assert late.count > asked.count + 3, "it was asked while recording"
    assert score == expected
    assert not (tmp_path / "videos").exists()


class _Calls:
    """A stop that is requested after so many questions."""

    def __init__(self, after: float = float("inf")) -> None:
        self.count, self._after = 0, after

    def __call__(self) -> bool:
        self.count += 1
        return self.count > self._after


@pytest.mark.long
@pytest.mark.system
def test_a_tracked_run_shows_its_videos_as_one_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    top = {"track": {"wandb": {"mode": "offline"}}}
    small.train(run, 2, top=top, env=WALK, evaluation_interval=1, evaluation_video=1)
    (told,) = launched_services.wandb_runs(run)
    rows = [row for row in told.history if "evaluation/video_1/path" in row]
    assert [row["timesteps"] for row in rows] == [row["timesteps"] for row in read_jsonl(run / "metrics.jsonl")]
    assert all(row["evaluation/video_1/_type"] == "video-file" for row in rows)
    assert not [key for row in told.history for key in row if key.startswith("videos/")], "none is delivered twice"


def _course_with_videos(videos: int, **env_config: Any) -> EvaluationPlan:
    return replace(a_course(WALK, env_config, 4, explore=False), videos=videos)
