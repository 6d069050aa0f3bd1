"""The history of a run, and its progress where Python code started it."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.experiments.control.callbacks import TrainingObservers
from ludus.experiments.control.training_display import UpdatingOutput
from ludus.experiments.runs.history import HistoryTable

SMALL: dict[str, Any] = {"num_envs": 4, "train_batch_size": 64, "minibatch_size": 32, "evaluation_duration": 1}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ludus.Result:
    where = tmp_path_factory.mktemp("runs")
    return ludus.train("CartPole-v1", stop={"iterations": 3}, local_dir=where, **SMALL)


def test_the_history_is_a_data_frame_with_a_row_for_each_report(result: ludus.Result) -> None:
    pd = pytest.importorskip("pandas")
    history: Any = result.history
    assert isinstance(history, pd.DataFrame)
    assert history["iterations"].tolist() == [1, 2, 3]
    assert list(history.columns)[:3] == ["timesteps", "iterations", "episodes"]
    assert history["evaluation/return_mean"].notna().tolist() == [False, False, True]


def test_without_pandas_the_history_has_the_same_columns(result: ludus.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    with_pandas = list(result.history.columns)
    monkeypatch.setitem(sys.modules, "pandas", None)
    history = result.history
    assert isinstance(history, HistoryTable)
    assert history.columns == with_pandas
    assert history["iterations"] == [1, 2, 3]
    assert [math.isnan(value) for value in history["evaluation/return_mean"]] == [True, True, False]
    assert [row["iterations"] for row in history] == [1, 2, 3]
    assert "3 rows" in repr(history)
    assert history._repr_html_().startswith("<pre>")
    with pytest.raises(KeyError, match="the columns are timesteps"):
        history["nothing"]


def test_progress_is_shown_if_asked_for_and_nowhere_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ludus.train("CartPole-v1", stop={"iterations": 2}, local_dir=tmp_path, progress=True, **SMALL)
    out, err = capfd.readouterr()
    assert (out, "2 of 2 iterations" in err) == ("", True), err
    ludus.train("CartPole-v1", stop={"iterations": 1}, local_dir=tmp_path, **SMALL)
    assert capfd.readouterr() == ("", "")
    assert TrainingObservers([], False).arguments["announce"] is None


def test_in_a_notebook_one_line_takes_the_place_of_the_last() -> None:
    shown: list[str] = []
    output = UpdatingOutput(shown.append)
    print("10 steps", file=output)
    print("20 steps\n30 ", end="", file=output)
    print("steps", file=output, flush=True)
    assert shown == ["10 steps", "20 steps", "30 steps"]
    assert not output.isatty()
