"""Evaluations of a run: they change nothing, they are of the version they say, and nobody waits for them."""

from __future__ import annotations

import contextlib
import csv
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ludus
from ludus.algorithms.run_clock import RunClock
from ludus.config.schema import PreprocessConfig
from ludus.core.metrics import CsvSink, JsonLinesSink, Numbers, read_jsonl
from ludus.distributed.code_bundle import CodeBundle
from ludus.errors import ConfigError
from ludus.experiments.control.stopping import StopCheck
from ludus.experiments.evaluation.evaluation import EvaluationPlan, InlineEvaluation
from ludus.experiments.evaluation.evaluation_workers import EvaluationWorkers, WorkerSettings
from ludus.experiments.runs import checkpoint
from ludus.models.network_config import NetworkConfig
from ludus.models.policy import Policy
from ludus.models.weights import serialization
from ludus.process.workers.supervisor import WorkerRestart
from ludus.sampling import episode_runner
from ludus.sampling.episode_runner import Score
from ludus.storage.local import LocalStore
from tests.experiments import small
from tests.experiments.evaluated import Walk

WALK, SHAKEN, ENDLESS = (f"tests.experiments.evaluated:{name}" for name in ("Walk", "Shaken", "Endless"))
NO_STOP = StopCheck(lambda: False, RunClock())
TROUBLED = "tests.experiments.evaluated:Troubled"


def weights(run: Path) -> dict[str, Any]:
    found = checkpoint.open_checkpoint(run)[1]
    return {**found.weights["model"], **found.arrays["model"]}


def scores(run: Path) -> dict[int, float]:
    rows = read_jsonl(run / "metrics.jsonl")
    return {row["iterations"]: row["evaluation/return_mean"] for row in rows if "evaluation/return_mean" in row}


def train(where: Path, seed: int = 0, **changes: Any) -> Path:
    """Everybody's random numbers begin in the same place."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    small.train(where, 3, **changes)
    return where


# -- inline -------------------------------------------------------------------------------------------------------------


def test_evaluations_do_not_disturb_an_environment_that_draws_from_everybodys_random_numbers(tmp_path: Path) -> None:
    never = train(tmp_path / "never", env=SHAKEN, evaluation_duration=0)
    often = train(tmp_path / "often", env=SHAKEN, evaluation_interval=1, evaluation_duration=5)
    explored = train(tmp_path / "explored", env=SHAKEN, evaluation_interval=1, evaluation_config={"explore": True})
    assert list(scores(often)) == list(scores(explored)) == [1, 2, 3]
    assert small.same(weights(often), weights(never))
    assert small.same(weights(explored), weights(never))
    assert scores(often) != scores(explored), "the most probable action and a drawn one are not the same"
    other = train(tmp_path / "other", seed=1, env=SHAKEN, evaluation_duration=0)
    assert not small.same(weights(other), weights(never)), "the environment does draw from them"


def test_an_evaluation_may_be_so_many_steps_whoever_plays_them(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"evaluation_duration": 3000, "evaluation_duration_unit": "timesteps", "evaluation_interval": 3}
    inline = train(tmp_path / "inline", env=WALK, env_config={"length": 40}, **asked)
    row = read_jsonl(inline / "metrics.jsonl")[-1]
    steps = row["evaluation/length_mean"] * row["evaluation/episodes"]
    assert 3000 <= steps < 3000 + 3 * 44, "three rows, each of which finishes its last episode"
    beside = train(tmp_path / "beside", env=WALK, env_config={"length": 40}, evaluation_num_workers=2, **asked)
    assert scores(beside) == scores(inline)


def test_an_evaluation_may_have_another_environment(tmp_path: Path) -> None:
    changed = {"env_config": {"length": 40}}
    run = train(tmp_path / "run", env=WALK, env_config={"length": 4}, evaluation_interval=3, evaluation_config=changed)
    row = read_jsonl(run / "metrics.jsonl")[-1]
    assert row["episode_length_mean"] < 10
    assert 40 <= row["evaluation/length_mean"] <= 43


@pytest.mark.parametrize("mode", ["1v1", "3v3"])
def test_opponents_from_the_past_are_refused_at_the_start_and_not_at_the_first_evaluation(tmp_path: Path, mode: str) -> None:
    keywords = {"mode": mode, "opponent": {"self": 0.8, "past": 0.2}}
    with pytest.raises(ConfigError, match=r"opponents from the past.*evaluation_config\.env_config"):
        small.train(
            tmp_path,
            1,
            env="ludus.games.arena.env.gym_env:ArenaVectorEnv",
            env_config=keywords,
            num_envs_per_worker=6,
            train_batch_size=60,
            minibatch_size=60,
            evaluation_duration=12,
        )


def test_an_environment_for_evaluations_with_other_spaces_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation_config.env_config changes the spaces of .*Walk.*\(6,\)"):
        train(tmp_path / "run", env=WALK, evaluation_config={"env_config": {"seen": 6}})


def test_an_environment_that_never_ends_is_evaluated_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episode_runner, "EPISODE_STEPS", 50)
    run = train(tmp_path / "run", env=ENDLESS, evaluation_interval=3)
    row = read_jsonl(run / "metrics.jsonl")[-1]
    assert (row["evaluation/length_mean"], row["evaluation/cut"], row["evaluation/episodes"]) == (50, 2, 2)
    assert "2 of 2 episodes of an evaluation were cut after 50 steps" in caplog.text
    assert checkpoint.best_name(LocalStore(run)) == "000003"


# -- in other processes -------------------------------------------------------------------------------------------------


def a_course(env: str, env_config: dict[str, Any], episodes: int, explore: bool = True) -> EvaluationPlan:
    torch.manual_seed(0)
    policy = Policy(Walk().observation_space, Walk().action_space, NetworkConfig(fcnet_hiddens=(16,)))
    return EvaluationPlan(
        env=env, env_config=env_config, preprocess=PreprocessConfig(), wrappers=(), description=policy.description(),
        duration=episodes, by_steps=False, explore=explore, seed=3, forgiving=False, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("episodes", "group", "quota"),
    [
        (5, 1, [1] * 5),
        (20, 1, [2] * 4 + [1] * 12),
        (15, 3, [1] * 15),
        (32, 3, [3] * 3 + [2] * 12),  # eleven matches of three
        (1, 3, [1] * 3),
        (7, 20, [1] * 20),
    ],
)
def test_whole_sides_play_equally_often(episodes: int, group: int, quota: list[int]) -> None:
    course = replace(a_course(WALK, {}, episodes), group=group)
    assert course.quota().tolist() == quota
    assert course.rows == len(quota)


def test_teams_are_evaluated_in_whole_matches_that_begin_at_the_beginning(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_workers": 0,
        "num_envs_per_worker": 6,
        "train_batch_size": 96,
        "rollout_fragment_length": 16,
        "num_epochs": 1,
        "env_config": {
            "mode": "3v3",
            "seconds": 20,
            "repeat": 1.0,
            "opponent": {"easy": 0.5, "hard": 0.5},
            "matchmaking": "even",
        },
        "evaluation_interval": 1,
        "evaluation_duration": 16,
        "evaluation_config": {"env_config": {"opponent": "medium"}},
        "model": {"fcnet_hiddens": [16]},
    }
    made = ludus.train(
        "ludus.games.arena.env.gym_env:ArenaVectorEnv", stop={"iterations": 1}, local_dir=tmp_path, config=settings
    )
    row = next(row for row in read_jsonl(Path(made.run_dir) / "metrics.jsonl") if "evaluation/episodes" in row)
    assert row["evaluation/episodes"] == 18
    assert row["evaluation/length_mean"] == 100  # of whole matches: twenty seconds, five decisions in each
    assert row["evaluation/win/medium"] == 0.0


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Policy]:
    """A run directory with the weights of a checkpoint, and a policy that has them."""
    policy = a_course(WALK, {}, 1).policy()
    weights = serialization.encode_weights(policy.weights())
    LocalStore(tmp_path).put_bundle("checkpoints/000004", {"model.safetensors": weights})
    return tmp_path, policy


def finished(players: EvaluationWorkers, within_s: float = 60.0) -> Iterator[tuple[int, Score | None]]:
    deadline = time.monotonic() + within_s
    while players.busy and time.monotonic() < deadline:
        found = players.poll(0.5)
        if found is not None:
            yield found


def test_workers_that_die_and_hang_are_replaced_and_the_score_is_that_of_an_evaluation_inline(
    stored: tuple[Path, Policy],
) -> None:
    directory, policy = stored
    expected = InlineEvaluation(a_course(WALK, {}, 20), policy, NO_STOP)(4)
    assert len(expected.returns) == 20
    course = a_course(TROUBLED, {"notes": str(directory)}, 20)
    players = EvaluationWorkers(
        course, CodeBundle(), directory, WorkerSettings(2, 1.0, WorkerRestart(limit=10, backoff_s=0.01)), lambda: False
    )
    try:
        players.begin(4, "000004")
        ((iteration, score),) = finished(players)
        assert (directory / "killed").exists()
        assert (directory / "hung").exists()
        assert iteration == 4
        assert score is not None
        assert score.lengths == expected.lengths
        assert score.returns == pytest.approx(expected.returns), "seeds and noise belong to the rows"
        players.begin(5, "000009")
        ((iteration, score),) = finished(players)
        assert (iteration, score) == (5, None), "its weights are not there, which is said and costs nothing"
    finally:
        players.close()
    assert players.pids == []


def test_whole_sides_play_the_same_matches_whoever_plays_them(tmp_path: Path) -> None:
    settings = {"mode": "3v3", "seconds": 60, "opponent": "hard", "start": "lane"}
    course = replace(a_course("ludus.games.arena.env.gym_env:ArenaVectorEnv", settings, 12), group=3)
    with contextlib.closing(course.environments(3)) as arena:
        policy = Policy(arena.observation_space, arena.action_space, NetworkConfig(fcnet_hiddens=(16,)))
    course = replace(course, description=policy.description())
    LocalStore(tmp_path).put_bundle("checkpoints/000004", {"model.safetensors": serialization.encode_weights(policy.weights())})
    expected = InlineEvaluation(course, policy, NO_STOP)(4)
    assert len(expected.sides) == 4
    assert len(set(expected.sides)) == 4, "four matches, not the same four times"
    players = EvaluationWorkers(
        course, CodeBundle(), tmp_path, WorkerSettings(2, 60.0, WorkerRestart(limit=3, backoff_s=0.01)), lambda: False
    )
    try:
        players.begin(4, "000004")
        ((_, score),) = finished(players)
    finally:
        players.close()
    assert score is not None
    assert score.returns == pytest.approx(expected.returns)
    assert score.sides == pytest.approx(expected.sides)


def test_a_run_with_evaluation_workers_learns_what_it_would_have_learned_without(tmp_path: Path) -> None:
    never = train(tmp_path / "never", env=WALK, evaluation_duration=0)
    run = train(tmp_path / "run", env=WALK, evaluation_interval=1, evaluation_num_workers=1, evaluation_duration=3)
    assert small.same(weights(run), weights(never))
    inline = train(tmp_path / "inline", env=WALK, evaluation_interval=1, evaluation_duration=3)
    found, expected = scores(run), scores(inline)
    assert 3 in found, "at the end it waits"
    assert found == pytest.approx({iteration: expected[iteration] for iteration in found})
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert best["score"] == pytest.approx(max(found.values()))
    named = checkpoint.read(LocalStore(run), best["checkpoint"])
    assert found[named.state["progress"]["iterations"]] == pytest.approx(best["score"])


def test_a_late_evaluation_is_read_back_with_its_own_iteration(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, float]] = [{"iterations": i, "timesteps": 10 * i, "incarnation": 1} for i in (1, 2, 4, 5)]
    late = [{"iterations": i, "timesteps": 10 * i, "evaluation/return_mean": i + 0.5, "incarnation": 1} for i in (2, 3, 5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, *late)))
    rows = read_jsonl(path)
    assert [row["iterations"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row.get("evaluation/return_mean") for row in rows] == [None, 2.5, 3.5, None, 5.5]


def test_a_late_evaluation_stands_in_the_row_of_its_iteration_in_a_spreadsheet_too(tmp_path: Path) -> None:
    lines, sheet = JsonLinesSink(tmp_path / "metrics.jsonl"), CsvSink(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl")
    late: Numbers = {"iterations": 2, "timesteps": 20, "evaluation/return_mean": 2.5}
    for numbers in (*({"iterations": i, "timesteps": 10 * i} for i in (1, 2, 3)), late, {"iterations": 4, "timesteps": 40}):
        lines.write(numbers)
        sheet.write(numbers)
    lines.close()
    sheet.close()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["iterations"], row["evaluation/return_mean"]) for row in rows] == [("1", ""), ("2", "2.5"), ("3", ""), ("4", "")]
