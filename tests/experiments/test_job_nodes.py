"""A training that belongs to a job with several nodes: what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.experiments import runner
from ludus.experiments.assembly.auto_workers import choose_num_workers
from ludus.experiments.validation.validate import ParsedExperiment
from ludus.process.job_env import JobEnv

SMALL = {"env": "CartPole-v1", "run": "PPO", "stop": {"iterations": 1}, "config": {"num_workers": 0, "train_batch_size": 256}}


@pytest.fixture(params=[1, 3])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count = int(request.param)
    around = JobEnv(tuple(f"10.0.0.{i + 1}" for i in range(count)), port=4000, ray=count if count > 1 else 0)
    for name, value in around.environment().items():
        monkeypatch.setenv(name, value)
    return count


def test_nodes_that_have_nothing_to_do_are_named(nodes: int, tmp_path: Path) -> None:
    said: list[str] = []
    runner.train(SMALL, local_dir=tmp_path, announce=said.append)
    idle = [line for line in said if "nothing to sample" in line]
    assert len(idle) == (nodes > 1)
    assert not idle or "the other 2 of the job's 3 nodes" in idle[0]


def test_a_number_of_workers_is_chosen_for_all_nodes(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def choose(*args: object) -> tuple[int, str]:
        asked.append(int(str(args[-1])))
        return 4, "because"

    monkeypatch.setattr("ludus.experiments.assembly.auto_workers.choose_workers", choose)
    monkeypatch.setattr("ludus.experiments.assembly.auto_workers.usable_cores", lambda: 8)
    auto = {**SMALL, "config": {"num_workers": "auto"}}
    assert choose_num_workers(ParsedExperiment(auto)).config["num_workers"] == 4
    assert asked == [8 * nodes]
