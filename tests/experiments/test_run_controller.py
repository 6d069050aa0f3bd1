"""When a run controller reports, evaluates, checkpoints and stops, with a trainer that learns in no time."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ludus.algorithms.run_clock import RunClock
from ludus.algorithms.trainer import Progress, Trainer
from ludus.config.schema import StopConfig
from ludus.config.validation import parse_experiment
from ludus.core.metrics import Numbers
from ludus.errors import EnvironmentFault, Fenced, StartTimeout, StoreFull, StoreUnavailable
from ludus.experiments.control import checkpointer, evaluation_schedule
from ludus.experiments.control.checkpointer import Checkpointer, CheckpointSchedule
from ludus.experiments.control.evaluation_schedule import (
    BackgroundEvaluation,
    Evaluate,
    EvaluationInterval,
    EvaluationSchedule,
)
from ludus.experiments.control.experience_source import ExperienceSource
from ludus.experiments.control.metrics_reporter import MetricsReporter
from ludus.experiments.control.run_controller import RunController
from ludus.experiments.control.stopping import StopConditions, reached_condition
from ludus.experiments.runs import checkpoint
from ludus.models.weights.version_store import LocalVersionStore, list_versions
from ludus.sampling.episode_runner import Score
from ludus.storage.base import Bytes, WriteGuard
from ludus.storage.local import LocalStore
from tests.experiments.small import make_ppo, make_segments, same

# -- when a run is over -------------------------------------------------------------------------------------------------


def progress(returns: Iterable[float] = (), window: int = 3, **counts: Any) -> Progress:
    return Progress(recent_returns=deque(returns, maxlen=window), recent_lengths=deque(maxlen=window), **counts)


@pytest.mark.parametrize(
    ("key", "value", "before", "at"),
    [
        ("timesteps", 100, {"timesteps": 99}, {"timesteps": 100}),
        ("iterations", 7, {"iterations": 6}, {"iterations": 7}),
        ("time_s", 1.5, {"time_s": 1.49}, {"time_s": 1.5}),
        ("episode_return_mean", 2.0, {"returns": [1, 2, 2.9]}, {"returns": [1, 2, 3]}),
        ("timesteps_total", 100, {"timesteps": 99}, {"timesteps": 100}),
        ("training_iteration", 7, {"training_iteration": 6, "iterations": 99}, {"training_iteration": 7}),
        ("time_total_s", 1.5, {"time_s": 1.49}, {"time_s": 1.5}),
        ("episode_reward_mean", 2.0, {"returns": [1, 2, 2.9]}, {"returns": [1, 2, 3]}),
    ],
)
def test_each_stop_key_stops_at_its_value_and_not_before(key: str, value: float, before: Any, at: Any) -> None:
    stop = parse_experiment({"env": "CartPole-v1", "stop": {key: value}}).stop
    canonical = {
        "timesteps_total": "timesteps",
        "time_total_s": "time_s",
        "episode_reward_mean": "episode_return_mean",
    }
    assert reached_condition(stop, progress(**before)) is None
    assert reached_condition(stop, progress(**at)) == canonical.get(key, key)


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        ((0, 0.0), [1, 2, 3, 4, 5, 6]),  # PPO: one update
        ((1000, 0.0), [0, 0, 1, 1, 1, 2]),  # DQN: 1,000 steps
        ((0, 10.0), [0, 0, 0, 0, 1, 1]),  # IMPALA, APPO: 10 seconds
        ((1000, 5.0), [0, 0, 1, 1, 1, 2]),  # both are over
    ],
)
def test_a_training_iteration_takes_so_many_steps_and_seconds_as_in_rllib(least: tuple[int, float], expected: list[int]) -> None:
    counted, counts = progress(), []
    for update in range(1, 7):
        if update == 4:  # a resumed run goes on counting where it was
            before, counted = counted.to_json(), progress()
            counted.load_json(before)
        counted.timesteps, counted.time_s = 400 * update, 2.0 * update
        counted.count_training_iteration(*least)
        counts.append(counted.training_iteration)
    assert counts == expected


def test_a_checkpoint_without_training_iterations_is_loaded() -> None:
    old = progress(timesteps=5000, iterations=9, time_s=60.0).to_json()
    del old["training_iteration"], old["iteration_began"]
    loaded = progress()
    loaded.load_json(old)
    loaded.count_training_iteration(1000, 0.0)
    assert (loaded.training_iteration, loaded.iteration_began) == (0, (5000, 60.0))


def test_a_lucky_first_episode_does_not_stop_a_run() -> None:
    stop = StopConfig(episode_return_mean=2.0)
    assert reached_condition(stop, progress([100.0, 100.0], window=3)) is None
    assert reached_condition(stop, progress([100.0, 100.0, 100.0], window=3)) == "episode_return_mean"


def test_whichever_comes_first_stops() -> None:
    stop = StopConfig(timesteps=100, iterations=5)
    assert reached_condition(stop, progress(timesteps=100, iterations=1)) == "timesteps"
    assert reached_condition(stop, progress(timesteps=1, iterations=5)) == "iterations"
    assert reached_condition(StopConfig(), progress(timesteps=10**9, iterations=10**9, time_s=1e9, returns=[1e9] * 3)) is None


# -- a run played through -----------------------------------------------------------------------------------------------


class _Trainer:
    """Learns in no time; `advance` sets its returns."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.algorithms = {"model": make_ppo()}
        self.progress = progress(window=1)
        self.metrics: dict[str, float] = {}
        self.now = 0.0
        self.clock = RunClock(limit_s, lambda: self.now)

    def counts(self) -> dict[str, float]:
        return {"timesteps": self.progress.timesteps, "time_s": self.progress.time_s}

    def advance(self, gained: float | None = None, seconds: float = 1.0) -> None:
        p = self.progress
        p.iterations, p.timesteps, p.time_s = p.iterations + 1, p.timesteps + 32, p.time_s + seconds
        if gained is not None:
            p.recent_returns.append(gained)
        self.algorithms["model"].learn(make_segments(p.iterations), p.timesteps)
        self.metrics = {"iterations": p.iterations, "timesteps": p.timesteps}


class _Sampler:
    def step(self) -> bool:
        return False

    def metrics(self) -> dict[str, float]:
        return {"sampler/workers": 2.0}

    def load_state(self, state: dict[str, Any]) -> None: ...

    def unlearned_steps(self) -> int:
        return 7

    def state(self) -> dict[str, Any]:
        return {"generator": np.zeros(4, np.uint8)}


class _Sink:
    def __init__(self) -> None:
        self.written: list[dict[str, float]] = []
        self.closed = False

    def write(self, numbers: Numbers) -> None:
        self.written.append(dict(numbers))

    def close(self) -> None:
        self.closed = True


class _Evaluation:
    """Returns given scores, by iteration."""

    def __init__(self, scores: dict[int, float]) -> None:
        self._scores = scores
        self.evaluated: list[int] = []

    def __call__(self, iteration: int) -> Score:
        self.evaluated.append(iteration)
        score = self._scores.get(iteration)
        return Score((), ()) if score is None else Score((score - 1, score + 1), (10, 20))


class _Stage:
    """A run controller with everything around it."""

    def __init__(
        self,
        root: Path | LocalStore,
        *,
        evaluate: Evaluate | BackgroundEvaluation | None = None,
        keep: int | None = None,
        began: str | None = None,
        source: ExperienceSource | None = None,
        stop: StopConfig | None = None,
        checkpoint_freq: int = 0,
        checkpoint_time_s: float = 0.0,
        evaluation_interval: int = 0,
        evaluation_unit: Any = "iterations",
        report_every_s: float = 0.0,
        start_timeout_s: float | None = None,
    ) -> None:
        limit_s = None if stop is None else stop.time_s
        self.store, self.trainer, self.sink = LocalStore(root) if isinstance(root, Path) else root, _Trainer(limit_s), _Sink()
        self.pool = LocalVersionStore(self.store, {checkpoint.BEGUN_FROM: began})
        self.pool.add("model", self.trainer.algorithms["model"].policy)
        trainer, source = cast(Trainer, self.trainer), source or _Sampler()
        self.reporter = MetricsReporter([self.sink], report_every_s)
        self.checkpointer = Checkpointer(
            trainer,
            source,
            self.pool,
            self.store,
            CheckpointSchedule(checkpoint_freq, checkpoint_time_s, keep=keep),
            parse_experiment({"env": "CartPole-v1"}).model_dump(mode="json"),
            judge_by_training=evaluate is None,
        )
        interval = EvaluationInterval(evaluation_interval, evaluation_unit)
        self.evaluations = EvaluationSchedule(evaluate, interval, trainer, self.checkpointer, self.reporter)
        self.controller = RunController(
            trainer,
            source,
            self.pool,
            self.reporter,
            self.checkpointer,
            self.evaluations,
            StopConditions(stop or StopConfig(), start_timeout_s=start_timeout_s),
        )

    def play(self, *returns: float | None, seconds: float = 1.0) -> None:
        for gained in returns:
            self.trainer.advance(gained, seconds)
            self.pool.publish("model")
            assert self.controller.step()

    @property
    def names(self) -> list[str]:
        return checkpoint.names(self.store)


def test_without_a_new_iteration_there_is_nothing_to_do(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=1)
    assert not stage.controller.step()
    stage.play(None)
    assert not stage.controller.step()
    assert stage.names == ["000001"]
    assert len(stage.sink.written) == 1


class _Workers(_Sampler):
    """Workers that start in their own time."""

    def __init__(self) -> None:
        self.sampled = False

    def has_sampled(self) -> bool:
        return self.sampled

    def waiting_for(self) -> str:
        return "the first step of 2 workers: worker 0 is starting"


def test_a_run_whose_workers_never_sample_fails_with_what_it_waited_for(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, source=_Workers(), start_timeout_s=30.0, stop=StopConfig(time_s=10.0))
    stage.trainer.now = 29.9
    assert not stage.controller.step()  # start-up is not training time
    stage.trainer.now = 30.0
    with pytest.raises(
        StartTimeout, match=r"within 30 s of the start; waited for the first step of 2 workers: worker 0 is starting"
    ):
        stage.controller.step()
    assert stage.controller.stopped_by is None
    assert stage.names == []


def test_the_time_limit_counts_from_the_first_sampled_step(tmp_path: Path) -> None:
    workers = _Workers()
    stage = _Stage(tmp_path, source=workers, start_timeout_s=30.0, stop=StopConfig(time_s=10.0))
    stage.trainer.now = 25.0
    workers.sampled = True
    assert not stage.controller.step()
    stage.trainer.now = 34.9
    assert not stage.controller.step()
    stage.trainer.now = 35.0
    assert stage.controller.step()
    assert stage.controller.stopped_by == "time_s"
    numbers = stage.controller.numbers()
    assert (numbers["time_s"], numbers["timesteps"], numbers["unlearned_steps"]) == (10.0, 0, 7)
    assert stage.names == ["000000"]


def test_at_the_time_limit_the_last_version_is_evaluated_once(tmp_path: Path) -> None:
    evaluation = _Evaluation({1: 5.0})
    stage = _Stage(tmp_path, evaluate=evaluation, stop=StopConfig(time_s=10.0))
    stage.play(None)
    stage.trainer.clock.start()
    stage.trainer.now = 10.0
    assert stage.controller.step()
    assert (stage.controller.stopped_by, evaluation.evaluated) == ("time_s", [1])
    numbers = stage.controller.numbers()
    assert numbers["evaluation/return_mean"] == 5.0
    assert "evaluation/unfinished" not in numbers


def test_an_evaluation_that_was_broken_off_has_no_score(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=lambda iteration: Score((1.0,), (3,), complete=False), evaluation_interval=1)
    stage.play(None)
    numbers = stage.controller.numbers()
    assert numbers["evaluation/unfinished"] == 1.0
    assert "evaluation/return_mean" not in numbers


def test_checkpoints_come_at_their_frequency(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=3)
    stage.play(*[None] * 7)
    assert stage.names == ["000003", "000006"]
    assert stage.controller.last_checkpoint == "000006"
    state = checkpoint.read(stage.store, "000006").state
    assert (state["progress"]["iterations"], state["config"]["env"]) == (6, "CartPole-v1")


def test_a_checkpoint_holds_the_weights_of_its_moment_and_its_version_is_kept(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=2)
    stage.play(None, None)
    then = stage.trainer.algorithms["model"].policy.weights()
    stage.play(None)
    found = checkpoint.read(stage.store, "000002")
    assert same(found.weights["model"], then)
    assert list_versions(stage.store, "model") == [found.state["models"]["model"]["version"]] == [3]


def test_one_iteration_is_checkpointed_once(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=2)
    stage.play(None, None)
    assert stage.controller.checkpoint() == "000002"
    assert stage.names == ["000002"]
    stage.play(None)
    assert stage.controller.checkpoint() == "000003"


def test_every_report_has_the_numbers_of_its_iteration(tmp_path: Path) -> None:
    stage = _Stage(tmp_path)
    stage.play(None, None, None)
    assert [numbers["iterations"] for numbers in stage.sink.written] == [1, 2, 3]
    assert not stage.sink.closed
    stage.controller.close()
    assert stage.sink.closed


def test_reports_can_be_spaced_and_the_last_one_always_comes(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, report_every_s=2.5, stop=StopConfig(iterations=8))
    stage.play(*[None] * 8)  # one second each
    assert [numbers["iterations"] for numbers in stage.sink.written] == [1, 4, 7, 8]
    assert stage.controller.stopped_by == "iterations"


def test_between_two_reports_the_numbers_of_the_sampler_are_still_known(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, report_every_s=100.0)
    assert stage.controller.numbers() == {"timesteps": 0, "time_s": 0.0}
    stage.play(None, None)
    assert len(stage.sink.written) == 1
    assert stage.controller.numbers() == {"sampler/workers": 2.0, "iterations": 2, "timesteps": 64, "time_s": 2.0}


def test_the_stop_is_decided_after_the_update_that_reaches_it(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, stop=StopConfig(timesteps=64))
    stage.play(None)
    assert stage.controller.stopped_by is None
    stage.play(None)
    assert stage.controller.stopped_by == "timesteps"


def test_evaluations_come_at_their_interval_and_are_reported(tmp_path: Path) -> None:
    evaluate = _Evaluation({2: 5.0, 4: 7.0})
    stage = _Stage(tmp_path, evaluate=evaluate, evaluation_interval=2, checkpoint_freq=4)
    stage.play(*[None] * 5)
    assert evaluate.evaluated == [2, 4], "a checkpoint must not evaluate again"
    shown = {n["iterations"]: n["evaluation/return_mean"] for n in stage.sink.written if "evaluation/return_mean" in n}
    assert shown == {2: 5.0, 4: 7.0}
    last = stage.sink.written[5]
    assert (last["evaluation/return_min"], last["evaluation/return_max"]) == (6.0, 8.0)
    assert (last["evaluation/length_mean"], last["evaluation/episodes"]) == (15.0, 2)


@pytest.mark.parametrize(
    ("unit", "interval", "due"),
    [
        ("timesteps", 32, [1, 2, 3, 4, 5, 6]),
        ("timesteps", 48, [2, 3, 5, 6]),  # at 64, 96, 160 and 192, each the first at or beyond 48, 96, 144 and 192
        ("timesteps", 1000, []),
        ("timesteps", 0, []),
        ("episodes", 2, [3, 6]),
        ("iterations", 4, [4]),
    ],
)
def test_evaluations_may_be_counted_in_steps_or_episodes(unit: Any, interval: int, due: list[int]) -> None:
    schedule = EvaluationInterval(interval, unit)
    progress, found, before = Progress(), [], 0
    for ended in (0, 1, 1, 0, 1, 1):
        progress.iterations, progress.timesteps = progress.iterations + 1, progress.timesteps + 32
        progress.episodes += ended
        found += [progress.iterations] * schedule.is_due(progress, before)
        before = getattr(progress, unit)
    assert found == due


def test_an_evaluation_by_steps_comes_with_the_first_update_that_has_got_so_far(tmp_path: Path) -> None:
    evaluate = _Evaluation({})
    stage = _Stage(tmp_path, evaluate=evaluate, evaluation_interval=48, evaluation_unit="timesteps")
    stage.play(None, None, None)
    assert evaluate.evaluated == [2, 3]


def test_without_an_interval_every_checkpoint_is_evaluated(tmp_path: Path) -> None:
    evaluate = _Evaluation({2: 5.0, 4: 7.0})
    stage = _Stage(tmp_path, evaluate=evaluate, checkpoint_freq=2)
    stage.play(*[None] * 5)
    assert evaluate.evaluated == [2, 4]
    assert checkpoint.best_score(stage.store) == 7.0


def test_the_best_is_the_one_with_the_best_evaluation_not_the_newest(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=_Evaluation({1: -5.0, 2: 9.0, 3: 4.0}), checkpoint_freq=1)
    stage.play(100, 0, 200)  # the returns of training do not matter
    assert checkpoint.best_name(stage.store) == "000002"
    assert checkpoint.best_score(stage.store) == 9.0


def test_of_two_equally_good_the_newer_is_the_best(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=_Evaluation({1: 9.0, 2: 9.0}), checkpoint_freq=1)
    stage.play(None, None)
    assert checkpoint.best_name(stage.store) == "000002"


def test_without_evaluation_the_returns_of_training_judge(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=1)
    stage.play(None)
    assert checkpoint.best_name(stage.store) is None, "before an episode has ended nothing is known"
    stage.play(3.0, 8.0, 5.0)
    assert checkpoint.best_name(stage.store) == "000003"


def test_an_evaluation_in_which_nothing_ended_judges_nothing(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=_Evaluation({2: 1.0}), checkpoint_freq=1)
    stage.play(50.0, 50.0, 50.0)
    assert checkpoint.best_name(stage.store) == "000002"
    assert checkpoint.best_score(stage.store) == 1.0
    assert not any(math.isnan(value) for numbers in stage.sink.written for value in numbers.values())


def test_retention_keeps_the_newest_and_never_deletes_the_best(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=_Evaluation({2: 9.0} | dict.fromkeys((1, 3, 4, 5, 6), 1.0)), checkpoint_freq=1, keep=2)
    stage.play(*[None] * 6)
    assert stage.names == ["000002", "000005", "000006"]
    assert checkpoint.best_score(stage.store) == 9.0


def test_the_best_is_kept_even_where_no_checkpoint_was_due(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=_Evaluation({1: 3.0, 2: 9.0, 3: 1.0}), checkpoint_freq=0, evaluation_interval=1)
    stage.play(None, None, None)
    assert stage.names == ["000001", "000002"]
    assert checkpoint.best_name(stage.store) == "000002"


def test_the_checkpoint_is_there_before_the_evaluation_begins(tmp_path: Path) -> None:
    class Endless:
        def __call__(self, iteration: int) -> Score:
            assert stage.names == ["000001"], "an evaluation may last for ever, or be killed"
            assert [n["iterations"] for n in stage.sink.written] == [1]
            return Score((), (), complete=False)

    stage = _Stage(tmp_path, evaluate=Endless(), checkpoint_freq=1)
    stage.play(None)
    assert checkpoint.best_name(stage.store) is None


def test_checkpoints_come_by_time_too(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=0, checkpoint_time_s=1e-9)
    stage.play(None, None)
    assert stage.names == ["000001", "000002"]


def test_after_the_death_of_a_learner_the_first_checkpoints_come_soon_and_then_ever_later(tmp_path: Path) -> None:
    def checkpoints(stage: _Stage) -> list[str]:
        for _ in range(28):
            stage.trainer.advance(seconds=30.0)
            stage.pool.publish("model")
            stage.controller.step()
        return stage.names

    restarted = _Stage(tmp_path / "restarted", checkpoint_freq=0, checkpoint_time_s=210.0)
    restarted.controller.hurry_checkpoints()
    assert [30 * int(name) for name in checkpoints(restarted)] == [30, 90, 210, 420, 630, 840]
    untouched = _Stage(tmp_path / "untouched", checkpoint_freq=0, checkpoint_time_s=210.0)
    assert [30 * int(name) for name in checkpoints(untouched)] == [210, 420, 630, 840]
    by_count = _Stage(tmp_path / "by_count", checkpoint_freq=20, checkpoint_time_s=0.0)
    by_count.controller.hurry_checkpoints()
    assert checkpoints(by_count) == ["000020"], "no checkpoints by time are wanted"


def test_retention_bounds_the_kept_versions_too(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=_Evaluation({2: 9.0}), checkpoint_freq=1, keep=2)
    stage.play(*[None] * 6)
    kept = [checkpoint.read(stage.store, name).state["models"]["model"]["version"] for name in stage.names]
    assert list_versions(stage.store, "model") == kept


def test_a_damaged_checkpoint_above_does_not_cost_the_fresh_one(tmp_path: Path) -> None:
    """A resumed run counts again through the numbers of checkpoints that could not be read."""
    stage = _Stage(tmp_path, checkpoint_freq=1, keep=1)
    stage.store.put_bundle("checkpoints/000009", {"state.json": b"damaged"})
    stage.play(5.0, 1.0, 1.0)
    assert stage.controller.last_checkpoint == "000003"
    assert stage.names == ["000001", "000003", "000009"]  # the best, the fresh one, the one that is not ours to judge


# -- evaluations that go on elsewhere -----------------------------------------------------------------------------------


class _Background:
    """A background evaluation that ends when `end` gives its score."""

    def __init__(self, now: bool = False) -> None:
        self.begun: list[tuple[int, str]] = []
        self.stopped = False
        self._score: Score | None = None
        self._now, self._busy, self._ready = now, False, False

    @property
    def busy(self) -> bool:
        return self._busy

    def is_interrupted(self) -> bool:
        return self.stopped

    def begin(self, iteration: int, checkpoint: str) -> None:
        assert not self._busy
        self.begun.append((iteration, checkpoint))
        self._busy, self._ready, self._score = True, self._now, Score((1.0, 1.0), (3, 3))

    def end(self, score: float | None) -> None:
        self._score = None if score is None else Score((score, score), (3, 3))
        self._ready = True

    def poll(self, timeout_s: float = 0.0) -> tuple[int, Score | None] | None:
        if not self._ready:
            return None
        self._busy = self._ready = False
        return self.begun[-1][0], self._score


def evaluations(stage: _Stage) -> dict[int, float]:
    """Timesteps → score, as reported."""
    found = [numbers for numbers in stage.sink.written if "evaluation/return_mean" in numbers]
    assert all(numbers["timesteps"] == 32 * numbers["iterations"] for numbers in found)
    return {int(numbers["timesteps"]): numbers["evaluation/return_mean"] for numbers in found}


def test_a_background_evaluation_is_reported_at_the_version_it_played(tmp_path: Path) -> None:
    players = _Background()
    stage = _Stage(tmp_path, evaluate=players, evaluation_interval=2)
    stage.play(None, None)
    then = stage.trainer.algorithms["model"].policy.weights()
    assert players.begun == [(2, "000002")]
    stage.play(None, None, None)
    assert evaluations(stage) == {}, "training goes on meanwhile"
    players.end(7.0)
    assert stage.controller.step(), "an evaluation that has ended is something to do"
    assert evaluations(stage) == {64: 7.0}
    assert checkpoint.best_name(stage.store) == "000002"
    assert same(checkpoint.read(stage.store, "000002").weights["model"], then)
    assert not same(stage.trainer.algorithms["model"].policy.weights(), then)
    assert stage.controller.numbers()["evaluation/return_mean"] == 7.0
    assert "evaluation/return_mean" not in stage.trainer.metrics, "the numbers of now are not those of then"


def test_while_an_evaluation_lasts_only_the_newest_version_waits_for_the_next(tmp_path: Path) -> None:
    players = _Background()
    stage = _Stage(tmp_path, evaluate=players, evaluation_interval=1)
    stage.play(None, None, None, None)
    assert players.begun == [(1, "000001")]
    players.end(3.0)
    assert stage.controller.step()
    assert players.begun == [(1, "000001"), (4, "000004")]
    assert stage.names == ["000001", "000004"], "what is passed over goes again"
    players.end(2.0)
    assert stage.controller.step()
    assert checkpoint.best_name(stage.store) == "000001"


def test_a_checkpoint_that_was_made_for_an_evaluation_stays_only_if_it_is_the_best(tmp_path: Path) -> None:
    players = _Background()
    stage = _Stage(tmp_path, evaluate=players, evaluation_interval=1, checkpoint_freq=3)
    for score in (5.0, 1.0, 2.0, 9.0, 4.0, 3.0, 1.0, 1.0):
        stage.play(None)
        players.end(score)
        assert stage.controller.step()
    assert checkpoint.best_name(stage.store) == "000004"
    assert stage.names == ["000001", "000003", "000004", "000006", "000008"], (
        "those that were due, were the best, or are the newest"
    )
    kept = [checkpoint.read(stage.store, name).state["models"]["model"]["version"] for name in stage.names]
    assert list_versions(stage.store, "model") == kept


def test_retention_waits_for_the_checkpoint_that_is_being_evaluated(tmp_path: Path) -> None:
    players = _Background()
    stage = _Stage(tmp_path, evaluate=players, checkpoint_freq=1, keep=1)
    stage.play(None, None, None)
    assert stage.names == ["000001", "000003"], "one is played, the newest waits for it"
    players.end(5.0)
    assert stage.controller.step()
    players.end(1.0)
    assert stage.controller.step()
    stage.play(None, None)
    players.end(1.0)
    assert stage.controller.step()
    assert stage.names == ["000001", "000005"]
    assert checkpoint.best_name(stage.store) == "000001"


def test_checkpoints_by_time_do_not_count_those_of_evaluations(tmp_path: Path) -> None:
    players = _Background(now=True)
    stage = _Stage(tmp_path, evaluate=players, evaluation_interval=1, checkpoint_time_s=3.0)
    stage.play(*[None] * 7)
    stage.controller.step()
    assert {"000003", "000006"} <= set(stage.names)


def test_a_background_evaluation_that_fails_has_no_other_effect(tmp_path: Path) -> None:
    players = _Background()
    stage = _Stage(tmp_path, evaluate=players, evaluation_interval=1)
    stage.play(None)
    players.end(None)
    stage.play(None)
    assert players.begun == [(1, "000001"), (2, "000002")]
    assert evaluations(stage) == {}
    assert checkpoint.best_name(stage.store) is None


def test_at_its_end_a_run_waits_for_the_last_evaluations(tmp_path: Path) -> None:
    players = _Background(now=True)
    stage = _Stage(tmp_path, evaluate=players, evaluation_interval=1, stop=StopConfig(iterations=2))
    stage.play(None, None)
    assert evaluations(stage) == {32: 1.0, 64: 1.0}
    assert checkpoint.best_name(stage.store) == "000002"


def test_a_run_that_is_interrupted_at_its_end_does_not_wait(tmp_path: Path) -> None:
    players = _Background()
    players.stopped = True
    stage = _Stage(tmp_path, evaluate=players, evaluation_interval=1, stop=StopConfig(iterations=1))
    stage.play(None)
    assert stage.controller.stopped_by == "iterations"
    assert players.busy
    assert evaluations(stage) == {}


def test_at_its_end_a_run_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_schedule, "LAST_EVALUATIONS_S", 0.01)
    stage = _Stage(tmp_path, evaluate=_Background(), evaluation_interval=1, stop=StopConfig(iterations=1))
    stage.play(None)
    assert stage.names == ["000001"]


def test_an_environment_that_fails_in_an_evaluation_does_not_end_the_training(tmp_path: Path) -> None:
    def failing(iteration: int) -> Score:
        raise EnvironmentFault("the game crashed")

    stage = _Stage(tmp_path, evaluate=failing, evaluation_interval=1, checkpoint_freq=1)
    stage.play(None, None)
    assert stage.names == ["000001", "000002"]
    assert evaluations(stage) == {}


def test_a_score_is_reported_with_its_interval(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, evaluate=lambda i: Score(tuple(map(float, range(20))), (1,) * 20, cut=2), evaluation_interval=1)
    stage.play(None)
    told = stage.sink.written[-1]
    assert told["evaluation/return_low"] < told["evaluation/return_mean"] == 9.5 < told["evaluation/return_high"]
    assert told["evaluation/cut"] == 2
    lone = _Stage(tmp_path / "lone", evaluate=lambda i: Score((4.0,), (1,)), evaluation_interval=1)
    lone.play(None)
    assert "evaluation/return_low" not in lone.sink.written[-1], "one episode says nothing of the spread"


# -- a store that is unavailable for a while -----------------------------------------------------------------------------------


class _Away(LocalStore):
    """Cannot be written for so many times, if what is written matches."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.times, self.matching = 0, "checkpoints/"

    def _refuse(self, key: str) -> None:
        if self.times and key.startswith(self.matching):
            self.times -= 1
            raise StoreUnavailable(f"{key} cannot be reached.")

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        self._refuse(key)
        super().put(key, data, overwrite=overwrite)

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        self._refuse(key)
        super().put_bundle(key, files, guard=guard)


def test_training_continues_while_the_store_is_unavailable_and_the_checkpoint_is_retried(tmp_path: Path) -> None:
    store = _Away(tmp_path)
    stage = _Stage(store, checkpoint_freq=1)
    store.times = 3
    stage.play(*[None] * 10, seconds=10.0)
    assert stage.names == ["000008", "000009", "000010"], "tried again after 10 s, 20 s and 40 s; from then on as usual"
    assert [numbers.get("checkpoint/failures", 0) for numbers in stage.sink.written] == [0, 1, 2, 2, 3, 3, 3, 3, 3, 3]
    kept = [checkpoint.read(store, name).state["models"]["model"]["version"] for name in stage.names]
    assert list_versions(store, "model") == kept, "versions whose checkpoint was not stored do not stay"


def test_a_background_evaluation_is_skipped_when_its_checkpoint_could_not_be_stored(tmp_path: Path) -> None:
    store, begun = _Away(tmp_path), list[str]()

    class Background:
        busy = False
        is_interrupted = staticmethod(lambda: False)

        def begin(self, iteration: int, checkpoint: str) -> None:
            begun.append(checkpoint)

        def poll(self, timeout_s: float = 0.0) -> tuple[int, Score | None] | None:
            return None

    stage = _Stage(store, evaluate=Background(), checkpoint_freq=2)
    store.times = 1
    stage.play(*[None] * 4, seconds=10.0)
    assert begun == stage.names[:1] == ["000003"]
    assert store.times == 0


class _Unreadable(LocalStore):
    away = False

    def get(self, key: str) -> bytes:
        if self.away:
            raise StoreUnavailable(f"{key} cannot be reached.")
        return super().get(key)


def test_a_background_evaluation_that_ends_while_the_store_is_unavailable_does_not_end_the_training(tmp_path: Path) -> None:
    players, store = _Background(), _Unreadable(tmp_path)
    stage = _Stage(store, evaluate=players, evaluation_interval=2)
    stage.play(None, None, seconds=10.0)
    store.away = True
    players.end(7.0)
    stage.play(None, seconds=10.0)
    assert evaluations(stage) == {64: 7.0}
    store.away = False
    stage.play(*[None] * 5, seconds=10.0)
    assert (checkpoint.best_name(store), checkpoint.best_score(store)) == ("000002", 7.0)


def test_a_queued_evaluation_while_the_store_is_unavailable_does_not_end_the_training(tmp_path: Path) -> None:
    players, store = _Background(), _Unreadable(tmp_path)
    stage = _Stage(store, evaluate=players, evaluation_interval=1)
    stage.play(None, None, seconds=10.0)
    name = stage.controller.checkpoint()
    store.away = True
    stage.evaluations.evaluate_checkpoint(name, 2, 64)
    assert stage.checkpointer.metrics() == {"checkpoint/failures": 1.0}


def test_the_best_is_marked_later_when_it_could_not_be_marked_at_once(tmp_path: Path) -> None:
    store = _Away(tmp_path)
    stage = _Stage(store, evaluate=_Evaluation({1: 9.0, 2: 1.0}), evaluation_interval=1, checkpoint_freq=1)
    store.times, store.matching = 1, "checkpoints/best.json"
    stage.play(None, seconds=10.0)
    assert checkpoint.best_name(store) is None
    stage.play(None, seconds=10.0)
    assert (checkpoint.best_name(store), checkpoint.best_score(store)) == ("000001", 9.0)


class _Clock:
    """Stands in for the module `time`: sleeping takes no time."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_the_last_checkpoint_is_tried_again_and_again_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(checkpointer, "time", clock)
    store = _Away(tmp_path)
    stage = _Stage(store, stop=StopConfig(iterations=3))
    store.times = 5
    stage.play(3.0, 2.0, 1.0)
    assert stage.names == ["000003"]
    assert checkpoint.best_name(store) == "000003"
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 15.0]
    clock.now, clock.slept = 0.0, []
    again = _Stage(store, stop=StopConfig(iterations=3))
    store.times = 10**9
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        again.play(None, None, None)
    assert checkpointer.LAST_S - 15.0 < clock.now <= checkpointer.LAST_S
    assert 10**9 - store.times == len(clock.slept) + 1, "it is tried after every pause"


def test_a_full_store_ends_a_run_at_once(tmp_path: Path) -> None:
    class Full(LocalStore):
        def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
            raise StoreFull(f"No space left to write {key}.")

    stage = _Stage(Full(tmp_path), checkpoint_freq=1)
    with pytest.raises(StoreFull):
        stage.play(None)


# -- a run that another trainer has taken over --------------------------------------------------------------------------


def _take_over(store: LocalStore, began: str | None) -> LocalVersionStore:
    pool = LocalVersionStore(store, {checkpoint.BEGUN_FROM: began})
    pool.add("model", make_ppo().policy)
    return pool


def test_a_fenced_trainer_neither_reports_nor_stores_nor_marks_nor_deletes(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=1, keep=1)
    stage.play(1.0, 2.0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    _take_over(LocalStore(tmp_path), "000002")
    stage.trainer.advance(9.0)
    attempts: list[Callable[[], object]] = [
        stage.controller.checkpoint,
        stage.checkpointer.write_last,
        lambda: stage.checkpointer.judge(100.0, "training", "000002"),
        stage.checkpointer.remove_old,
    ]
    for attempt in attempts:
        with pytest.raises(Fenced):
            attempt()
    with pytest.raises(Fenced):
        _until_fenced(stage)
    stage.pool.close()
    assert len(stage.sink.written) == 2
    after = {path: path.read_bytes() for path in before}
    changed = [path.name for path in before if after[path] != before[path]]
    assert sorted(changed) == ["versions.json"], "which the new owner has written"
    assert stage.names == ["000002"]
    assert json.loads(LocalStore(tmp_path).get("models/model/versions.json"))["incarnation"] == 2


def _until_fenced(stage: _Stage) -> None:
    """The first look may be a moment old."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        stage.pool.check_recently()
    stage.controller.step()


class _TakenOver(LocalStore):
    """Another trainer comes in the moment between the guard's last word and the checkpoint."""

    def __init__(self, root: Path, began: str | None, killed: bool = False) -> None:
        super().__init__(root)
        self._began, self._killed, self.armed = began, killed, False

    def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
        def last_word() -> None:
            assert guard is not None
            guard()
            if self.armed:
                self.armed = False
                self.successor = _take_over(LocalStore(self.root), self._began)

        armed = self.armed
        super().put_bundle(key, files, guard=last_word)
        if armed and self._killed:
            raise KeyboardInterrupt  # stands for kill -9: nothing after it runs


def test_a_checkpoint_that_was_written_just_when_another_took_over_is_taken_back(tmp_path: Path) -> None:
    store = _TakenOver(tmp_path, "000001")
    stage = _Stage(store, checkpoint_freq=1)
    stage.play(None)
    store.armed = True
    with pytest.raises(Fenced):
        stage.play(None)
    assert stage.names == ["000001"]


def test_the_checkpoint_of_a_fenced_trainer_that_dies_is_never_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = _TakenOver(tmp_path, "000001", killed=True)
    stage = _Stage(store, checkpoint_freq=1)
    stage.play(None)
    store.armed = True
    with pytest.raises(KeyboardInterrupt):
        stage.play(None)
    assert stage.names == ["000001", "000002"]
    assert checkpoint.newest_name(store) == "000001"
    assert checkpoint.newest(store).name == "000001"
    assert "000002 is skipped" in caplog.text
    assert checkpoint.locate(tmp_path)[1] == "000001"
    assert checkpoint.active_names(store) == ["000001"]


@pytest.mark.parametrize(("keep", "left"), [(None, ["000001", "000002", "000002-1"]), (2, ["000001", "000002-1"])])
def test_the_new_owner_deletes_a_foreign_checkpoint_unless_all_are_kept(
    tmp_path: Path, keep: int | None, left: list[str]
) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=1)
    stage.play(None, None)
    owner = _Stage(tmp_path, checkpoint_freq=1, keep=keep, began="000001")
    owner.trainer.advance()
    owner.play(None)
    assert owner.names == left
    assert checkpoint.newest_name(owner.store) == "000002-1"


def test_the_best_stays_although_it_is_of_the_other_line(tmp_path: Path) -> None:
    stage = _Stage(tmp_path, checkpoint_freq=1)
    stage.play(1.0, 9.0)
    owner = _Stage(tmp_path, checkpoint_freq=1, keep=1, began="000001")
    owner.play(2.0, 3.0, 4.0)
    assert checkpoint.best_name(owner.store) == "000002"
    assert owner.names == ["000002", "000003"]
    assert checkpoint.newest_name(owner.store) == "000003"


class _Late(LocalStore):
    """Its trainer is stopped between its look at the claims and its mark of the best."""

    meanwhile: Callable[[], None] | None = None

    def put(self, key: str, data: Bytes, *, overwrite: bool = True) -> None:
        if key == "checkpoints/best.json" and self.meanwhile is not None:
            act, self.meanwhile = self.meanwhile, None
            act()
        super().put(key, data, overwrite=overwrite)


def test_the_best_mark_of_the_owner_is_restored_after_a_fenced_trainer_replaced_it(tmp_path: Path) -> None:
    store = _Late(tmp_path)
    stage = _Stage(store, checkpoint_freq=1, keep=1)
    stage.play(5.0)
    owners = list[_Stage]()

    def take_over() -> None:
        owner = _Stage(tmp_path, checkpoint_freq=1, keep=1, began="000001")
        owner.trainer.progress.iterations = 9
        owner.play(50.0)
        owners.append(owner)

    store.meanwhile = take_over
    with pytest.raises(Fenced):
        stage.play(6.0)
    assert checkpoint.best_name(store) == "000002", "the mark of the one that was cut off"
    (owner,) = owners
    owner.play(7.0, 8.0)
    assert (checkpoint.best_name(store), checkpoint.best_score(store)) == ("000010", 50.0)
    assert owner.names == ["000010", "000012"]
    assert json.loads(store.get("checkpoints/best.json"))["incarnation"] == 2


def test_a_checkpoint_that_another_trainer_swept_away_half_written_is_written_again(tmp_path: Path) -> None:
    """Two were started at once: the one that lost believed for a moment that the run was its own."""

    class Swept(LocalStore):
        times = 1

        def put_bundle(self, key: str, files: Mapping[str, Bytes], *, guard: WriteGuard | None = None) -> None:
            def last_word() -> None:
                assert guard is not None
                guard()
                if self.times:
                    self.times -= 1
                    assert LocalStore(self.root).sweep("checkpoints") == 1

            super().put_bundle(key, files, guard=last_word)

    stage = _Stage(Swept(tmp_path), checkpoint_freq=1)
    stage.play(None)
    assert stage.names == ["000001"]
    assert checkpoint.newest(stage.store).state["progress"]["iterations"] == 1
