"""Callbacks of `ludus.train`: when they are called, how they end a run, and what becomes of their exceptions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import ludus
from ludus.errors import UsageError
from ludus.experiments.control.callbacks import CallbackSink, TrainingRun
from ludus.experiments.runs import run_status
from ludus.experiments.runs.run_dir import Run

SMALL: dict[str, Any] = {"num_envs": 4, "train_batch_size": 64, "minibatch_size": 32, "evaluation_duration": 1}


class Diary(ludus.Callback):
    """Writes down what it is told, and in which process; may fail in one of its methods."""

    def __init__(self, stop_after: int = 10**9, fails_in: str = "") -> None:
        self.entries: list[str] = []
        self.stop_after, self.fails_in = stop_after, fails_in
        self.result: ludus.Result | None = None

    def note(self, method: str, what: str = "") -> None:
        self.entries.append(f"{method.removeprefix('on_')} {what}".strip())
        if method == self.fails_in:
            raise LookupError(f"{method} in {os.getpid()}")

    def on_start(self, run: TrainingRun) -> None:
        assert run.directory is not None
        self.note("on_start")

    def on_report(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        self.note("on_report", str(int(metrics["iterations"])))
        assert run.timesteps == metrics["timesteps"]
        if metrics["iterations"] >= self.stop_after:
            run.stop("enough")

    def on_checkpoint(self, run: TrainingRun, checkpoint: Path) -> None:
        assert (checkpoint / "manifest.json").exists()
        self.note("on_checkpoint", checkpoint.name)

    def on_evaluation(self, run: TrainingRun, metrics: Mapping[str, float]) -> None:
        assert metrics["evaluation/return_mean"] > 0
        self.note("on_evaluation", str(int(metrics["iterations"])))

    def on_end(self, run: TrainingRun, result: ludus.Result | None) -> None:
        self.result = result
        self.note("on_end")


def train(where: Path, *callbacks: Any, iterations: int = 3, **more: Any) -> ludus.Result:
    return ludus.train("CartPole-v1", stop={"iterations": iterations}, local_dir=where, callbacks=callbacks, **{**SMALL, **more})


def test_callbacks_are_called_in_the_order_of_what_happens(tmp_path: Path) -> None:
    diary = Diary()
    result = train(tmp_path, diary, checkpoint_freq=2)
    assert diary.entries == [
        *("start", "report 1", "report 2", "checkpoint 000002", "evaluation 2"),
        *("report 3", "checkpoint 000003", "evaluation 3", "end"),
    ]
    assert diary.result is result


def test_a_callback_ends_the_run_in_order(tmp_path: Path) -> None:
    result = train(tmp_path, Diary(stop_after=2), iterations=50)
    assert result.stopped_by == "callback: enough"
    assert result.metrics["iterations"] == 2
    assert result.checkpoint is not None
    assert Run.open(result.run_dir).meta()["status"] == "finished"
    assert ludus.resume(result.run_dir, stop={"iterations": 3}).metrics["iterations"] == 3


def test_a_function_is_called_with_every_report(tmp_path: Path) -> None:
    seen: list[float] = []

    def look(run: TrainingRun, metrics: Mapping[str, float]) -> None:
        seen.append(metrics["timesteps"])
        if len(seen) == 2:
            run.stop()

    assert train(tmp_path, look, iterations=9).stopped_by == "callback: a callback asked for it"
    assert len(seen) == 2


@pytest.mark.parametrize("method", ["on_report", "on_checkpoint", "on_evaluation"])
def test_an_exception_of_a_callback_reaches_the_caller_after_a_checkpoint(tmp_path: Path, method: str) -> None:
    failing, other = Diary(fails_in=method), Diary()
    with pytest.raises(LookupError, match=method):
        train(tmp_path, failing, other, iterations=50, checkpoint_freq=2)
    (run,) = (tmp_path / "default").iterdir()
    assert Run.open(run).meta()["status"] == "interrupted"
    assert failing.entries[-1] == other.entries[-1] == "end"
    assert other.result is not None
    again = ludus.resume(run, stop={"iterations": 4})
    assert again.metrics["iterations"] == 4


def test_an_exception_before_the_start_prevents_the_run(tmp_path: Path) -> None:
    other = Diary()
    with pytest.raises(LookupError, match="on_start"):
        train(tmp_path, other, Diary(fails_in="on_start"))
    assert not (tmp_path / "default").exists()
    assert other.entries == ["start", "end"]
    assert other.result is None


def test_an_exception_in_on_end_is_raised_after_the_other_callbacks_were_called(tmp_path: Path) -> None:
    other = Diary()
    with pytest.raises(LookupError, match="on_end"):
        train(tmp_path, Diary(fails_in="on_end"), other)
    assert other.result is not None


def test_a_run_that_fails_tells_its_callbacks(tmp_path: Path) -> None:
    diary = Diary()
    with pytest.raises(ludus.LudusError):
        ludus.train(
            "tests.experiments.evaluated:Crashing", stop={"iterations": 9}, local_dir=tmp_path, callbacks=[diary], **SMALL
        )
    assert diary.entries[-1] == "end"
    assert diary.result is None


def test_wrong_arguments_are_refused_before_any_callback(tmp_path: Path) -> None:
    diary = Diary()
    with pytest.raises(UsageError, match="lrr"):
        train(tmp_path, diary, lrr=1)
    assert diary.entries == []


@pytest.mark.parametrize(("given", "hint"), [(Diary, r"Diary\(\)"), (3, r"ludus\.Callback")], ids=str)
def test_what_is_no_callback_is_refused(given: Any, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        CallbackSink([given])


def test_with_workers_callbacks_are_called_here_and_end_the_run(tmp_path: Path) -> None:
    """The environment is a lambda, which goes to the worker by value."""
    diary = Diary(stop_after=2)
    result = ludus.train(
        lambda: gym.make("CartPole-v1"), total_timesteps=10**7, local_dir=tmp_path, callbacks=[diary], num_workers=1,
        checkpoint_freq=2, **SMALL,
    )  # fmt: skip
    assert result.stopped_by == "callback: enough"
    assert diary.entries[:4] == ["start", "report 1", "report 2", "checkpoint 000002"]
    assert diary.entries[-1] == "end"
    assert diary.result is result
    assert Run.open(result.run_dir).meta()["status"] == "finished"
    assert run_status.read_status(result.run_dir).status["state"] == "finished"
    assert result.checkpoint is not None
    assert result.checkpoint.exists()
    assert result.agent.evaluate(2).returns
