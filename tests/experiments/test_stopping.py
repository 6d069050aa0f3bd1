"""A stop is honoured between two environment steps: while a batch is sampled, in a reset, in an evaluation, at start-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ludus.algorithms.run_clock import RunClock
from ludus.errors import Interrupted, UsageError
from ludus.experiments import runner
from ludus.experiments.control import stopping
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.result import Result
from ludus.experiments.runs.checkpoint import open_checkpoint
from ludus.process import signals
from ludus.process.signals import StopSignal, stop_on_signals
from tests.experiments import stoppable
from tests.experiments.small import data
from tests.experiments.stoppable import Calls

ENV, MATCH = "tests.experiments.stoppable:make_stoppable", "tests.experiments.stoppable:make_match"


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    fresh = Calls()
    monkeypatch.setattr(stoppable, "CALLS", fresh)
    return fresh


def run(where: Path, stop: dict[str, Any], *, env: str = ENV, **settings: Any) -> Result:
    whole = data(env=env, train_batch_size=800, minibatch_size=800, **settings) | {"stop": stop}
    return runner.train(whole, project=where.parent, trial=where.name)


def meta_of(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((result.run_dir / "meta.json").read_text())
    return found


# -- signals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [4, 13, 803])
def test_no_environment_is_stepped_again_after_a_signal(tmp_path: Path, calls: Calls, step: int) -> None:
    result = run(tmp_path / "run", {"iterations": 9}, env_config={"step": step, "length": 1000}, evaluation_duration=0)
    assert calls.steps == step
    assert result.stopped_by == "interrupted (SIGTERM)"
    assert meta_of(result)["status"] == "interrupted"
    assert result.checkpoint is not None
    counted = open_checkpoint(result.checkpoint)[1].state["progress"]
    assert counted["timesteps"] == 800 * (step // 800)
    # Of the 8 copies, a row that is not whole was not sampled.
    assert result.metrics["unlearned_steps"] == (step % 800 - 1) // 8 * 8


def test_a_call_that_does_not_return_is_broken_off(tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "INTERRUPT_AFTER_S", 0.05)
    result = run(tmp_path / "run", {"iterations": 9}, env_config={"reset": 20, "blocks_s": 60.0}, evaluation_duration=0)
    assert calls.resets == 20
    assert calls.finished == calls.steps + 19
    assert result.stopped_by == "interrupted (SIGTERM)"
    assert result.checkpoint is not None


def test_a_start_that_does_not_return_is_broken_off_and_leaves_no_run(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "INTERRUPT_AFTER_S", 0.05)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", {"iterations": 9}, env_config={"reset": 3, "blocks_s": 60.0})
    assert (calls.resets, calls.finished) == (3, 2)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_ends_at_the_signal_and_has_no_score(tmp_path: Path, calls: Calls) -> None:
    changed = {"env_config": {"step": 850, "length": 1000}}
    result = run(tmp_path / "run", {"iterations": 9}, evaluation_interval=1, evaluation_config=changed)
    assert calls.steps == 850
    assert result.stopped_by == "interrupted (SIGTERM)"
    assert result.metrics["evaluation/unfinished"]
    assert "evaluation/return_mean" not in result.metrics
    assert result.checkpoint is not None


@pytest.mark.parametrize("step", [4, 813])
def test_with_several_agents_no_environment_is_stepped_again(tmp_path: Path, calls: Calls, step: int) -> None:
    counted = {"count_steps_by": "env_steps"}
    settings: dict[str, Any] = {"env_config": {"step": step}, "evaluation_duration": 0, "multiagent": counted}
    result = run(tmp_path / "run", {"iterations": 9}, env=MATCH, **settings)
    assert calls.steps == step
    assert result.stopped_by == "interrupted (SIGTERM)"
    assert result.checkpoint is not None
    assert result.metrics["unlearned_steps"] == (step % 800 - 1) // 8 * 8


def test_outside_of_an_interruptible_region_nothing_is_raised() -> None:
    earlier = StopSignal()
    with stop_on_signals() as stop:
        stop.interrupt_now()
        with stop.interruptible():
            earlier.interrupt_now()  # of a training that has ended
        with pytest.raises(Interrupted), stop.interruptible():
            stop.interrupt_now()
        stop.interrupt_now()


# -- the time limit -----------------------------------------------------------------------------------------------------


def test_the_time_limit_ends_a_run_in_the_middle_of_a_batch(tmp_path: Path, calls: Calls) -> None:
    result = run(tmp_path / "run", {"time_s": 0.1}, env_config={"step_s": 0.005}, evaluation_duration=0)
    assert 0 < calls.steps < 800
    assert result.stopped_by == "time_s"
    assert result.checkpoint is not None
    assert result.metrics["time_s"] >= 0.1
    assert result.metrics["timesteps"] == 0
    assert result.metrics["unlearned_steps"] > 0
    assert meta_of(result)["status"] == "finished"
    with pytest.raises(UsageError, match="already reached its stop"):
        runner.resume(result.run_dir)


def test_an_evaluation_may_exceed_the_limit_by_a_moment_and_training_may_not(tmp_path: Path, calls: Calls) -> None:
    now = 0.0
    check = StopCheck(lambda: False, RunClock(5.0, lambda: now))
    check.before_step()
    now = 5.0
    with pytest.raises(Interrupted):
        check.before_step()
    check.before_evaluation_step()
    now = 5.0 + stopping.FINAL_EVALUATION_S
    assert check.ends_evaluation()
    with pytest.raises(Interrupted):
        check.before_evaluation_step()


def test_time_counts_from_the_first_step_and_goes_on_in_a_resumed_run() -> None:
    now = 100.0
    clock = RunClock(5.0, lambda: now)
    now = 200.0
    assert (clock.elapsed_s, clock.startup_s, clock.is_up()) == (0.0, 100.0, False)
    clock.before_s = 3.0
    clock.start()
    now = 201.9
    clock.start()
    assert not clock.is_up()
    now = 202.0
    assert (clock.elapsed_s, clock.startup_s, clock.is_up()) == (5.0, 100.0, True)
    assert not clock.is_up(allowance_s=1.5)
