"""RemoteTrainer: the user's function in learner processes, averaged gradients, reported failures."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ludus
from ludus.core.metrics import read_jsonl
from ludus.errors import UsageError, WorkerFailed
from ludus.models.weights import module_spec
from ludus.remote.context import RunContext
from tests.remote import parts
from tests.waiting import wait_until

X = np.ones(3, np.float32)


def notes(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def test_the_function_is_called_once_in_each_of_the_learners_with_the_keywords_as_given(busy: RunContext, tmp_path: Path) -> None:
    trainer = ludus.RemoteTrainer(num_workers=2)
    trainer.train(train=parts.write_down, out=str(tmp_path), model="a_name", buffer="another", num_steps=3, config={"x": [1, 2]})
    assert trainer.wait(60)
    first, second = notes(tmp_path)
    given = {"model": "a_name", "buffer": "another", "num_steps": 3, "config": {"x": [1, 2]}}
    assert first["kwargs"] == second["kwargs"] == given
    assert (first["rank"], second["rank"], first["world"], second["world"]) == (0, 1, 2, 2)
    assert first["pid"] != second["pid"]
    assert first["threads"] >= 1


def test_gradients_are_the_mean_over_all_learners(busy: RunContext, tmp_path: Path) -> None:
    model = ludus.RemoteModel("ddp", parts.Two())
    expected = parts.steps_on(model.get_model(), [parts.data_of(0), parts.data_of(1)])
    trainer = ludus.RemoteTrainer(num_workers=2)
    trainer.train(parts.descend, model="ddp", out=str(tmp_path))
    assert trainer.wait(60)
    for learner in notes(tmp_path):
        np.testing.assert_allclose(learner["gradients"], expected, rtol=1e-4, atol=1e-6)
        assert learner["names"] == sorted(module_spec.shapes_of(model.get_model())), "the wrapper's names leaked"


def test_what_a_learner_publishes_is_what_others_ask_and_handles_travel(busy: RunContext, tmp_path: Path) -> None:
    model = ludus.RemoteModel("pub", parts.Scale(), forward_args=(X,))
    buffer = ludus.RemoteBuffer("factors")
    assert float(model(X)[0]) == 1
    buffer.push(6.0)
    trainer = ludus.RemoteTrainer()
    trainer.train(parts.publish_one, model=model, buffer=buffer, out=str(tmp_path))
    assert trainer.wait(60)
    assert notes(tmp_path) == [{"version": 2}]
    assert float(model(X)[0]) == 6


def test_a_learner_reports_once_for_all_and_a_plain_metric_from_each(busy: RunContext) -> None:
    trainer = ludus.RemoteTrainer(num_workers=2)
    trainer.train(parts.report, value=2)
    assert trainer.wait(60)
    busy.client.call({"op": "report"})
    path = busy.directory / "metrics.jsonl"
    wait_until(lambda: any("from_all" in row for row in read_jsonl(path)))
    row = next(row for row in read_jsonl(path) if "from_all" in row)
    assert row["from_rank_0"] == 2
    assert row["from_all"] == 52


def test_a_failed_learner_is_reported_with_its_traceback_and_stops_the_others(
    busy: RunContext, caplog: pytest.LogCaptureFixture
) -> None:
    ludus.RemoteBuffer("empty")
    trainer = ludus.RemoteTrainer(num_workers=2)
    with caplog.at_level(logging.ERROR):
        trainer.train(parts.fail_in_the_second, buffer="empty")
        with pytest.raises(WorkerFailed, match="the second gives up") as caught:
            trainer.wait(60)
    assert "parts.py" in str(caught.value), "there is no traceback"
    assert any("the second gives up" in record.getMessage() for record in caplog.records)
    wait_until(lambda: all(learner.wait(0) for learner in trainer._learners))
    assert {learner.state for learner in trainer._learners} == {"failed", "stopped"}
    failure = busy.failure()
    assert isinstance(failure, WorkerFailed)
    assert "the second gives up" in str(failure)
    busy._watched_processes.clear()  # the other tests go on with this run


def test_stopping_a_learner_ends_its_iteration_and_the_function_returns(busy: RunContext, tmp_path: Path) -> None:
    buffer = ludus.RemoteBuffer("two")
    buffer.push(1.0, 2.0)
    trainer = ludus.RemoteTrainer()
    trainer.train(parts.consume_until_the_end, buffer="two", out=str(tmp_path))
    wait_until((tmp_path / "seen 2").exists)
    trainer.stop()
    assert trainer.wait(0)
    assert notes(tmp_path) == [{"seen": 2}]


def test_it_trains_one_function_at_a_time(busy: RunContext, tmp_path: Path) -> None:
    ludus.RemoteBuffer("idle")
    trainer = ludus.RemoteTrainer()
    trainer.train(parts.consume_until_the_end, buffer="idle", out=str(tmp_path))
    with pytest.raises(UsageError, match="training already"):
        trainer.train(parts.report, value=1)
    trainer.stop()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_not_silently_replaced(busy: RunContext) -> None:
    with pytest.raises(UsageError, match="no GPU"):
        ludus.RemoteTrainer(use_gpu=True)
    ludus.RemoteTrainer(use_gpu=None)


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_there_is_at_least_one_learner(busy: RunContext, number: Any) -> None:
    with pytest.raises(UsageError, match="at least one learner"):
        ludus.RemoteTrainer(num_workers=number)


def test_what_is_not_a_function_is_refused(busy: RunContext) -> None:
    with pytest.raises(UsageError, match="not a function"):
        ludus.RemoteTrainer().train("train_atari")  # type: ignore[arg-type]


def test_outside_of_a_learner_there_is_one(busy: RunContext) -> None:
    learner = ludus.learner()
    network = parts.Two()
    assert (learner.rank, learner.world_size) == (0, 1)
    assert learner.wrap(network) is network
