"""Every algorithm learns from a fleet, alternating and free-running: a real Redis, with a worker in the learner's process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.core.metrics import read_jsonl
from ludus.distributed.redis.worker import WorkerOptions
from ludus.errors import ConfigError
from ludus.experiments import runner
from ludus.storage.local import LocalStore
from tests.distributed.test_redis_fleet import Work
from tests.redis_server import RedisServer

pytestmark = pytest.mark.system

ITERATIONS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"minibatch_size": 16, "num_epochs": 1},
    "IMPALA": {},
    "APPO": {},
    "DQN": {"num_steps_sampled_before_learning_starts": 64, "replay_buffer_config": {"capacity": 1_000}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.mark.parametrize(
    ("run", "sampling"),
    [("PPO", "sync"), *((run, sampling) for run in ("IMPALA", "APPO", "DQN") for sampling in ("sync", "async"))],
)
def test_an_algorithm_learns_from_a_fleet(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, sampling: str
) -> None:
    monkeypatch.setenv("LUDUS_MEMORY_PASSWORD", server.password)
    place = tmp_path / "run"
    config = {
        "num_workers": 1, "num_envs_per_worker": 2, "rollout_fragment_length": 16, "train_batch_size": 32,
        "model": {"fcnet_hiddens": [16]}, "evaluation_interval": 0, "sampling": sampling, **SETTINGS[run],
    }  # fmt: skip
    data = {"env": "CartPole-v1", "run": run, "memory": server.url, "stop": {"iterations": ITERATIONS}, "config": config}
    work = Work(server.url, LocalStore(place), WorkerOptions(name="one"))
    try:
        result = runner.train(data, place=place, supervised=False)
        work.join()
    finally:
        work.end()
    assert (result.stopped_by, work.ended) == ("iterations", "over")
    with contextlib.closing(server.client()) as client:
        assert client.keys("ludus:*") == [], "a run that is over leaves nothing in the server"
    last = read_jsonl(place / "metrics.jsonl")[-1]
    assert (last["fleet/rejected"], last["fleet/lost"], last["fleet/duplicates"]) == (0, 0, 0)
    if sampling == "sync" and run != "DQN":
        assert last["learner/lag_max"] == 0, "in turn, every step is of the newest version"


@pytest.mark.parametrize(("run", "sampling"), [("PPO", "sync"), ("APPO", "async"), ("DQN", "sync")])
def test_a_fleet_plays_matches_of_several_agents(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, sampling: str
) -> None:
    monkeypatch.setenv("LUDUS_MEMORY_PASSWORD", server.password)
    place = tmp_path / "run"
    config = {
        "num_workers": 2, "num_envs_per_worker": 4, "rollout_fragment_length": 8, "train_batch_size": 64,
        "model": {"fcnet_hiddens": [16]}, "evaluation_duration": 4, "sampling": sampling, **SETTINGS[run],
        "self_play": {"opponents": "mix", "every": 1},
    }  # fmt: skip
    data = {
        "env": "pettingzoo/tictactoe_v3",
        "run": run,
        "memory": server.url,
        "stop": {"iterations": ITERATIONS},
        "config": config,
    }
    work = Work(server.url, LocalStore(place), WorkerOptions(name="one"))
    try:
        result = runner.train(data, place=place, supervised=False)
        work.join()
    finally:
        work.end()
    assert (result.stopped_by, work.ended) == ("iterations", "over")
    last = read_jsonl(place / "metrics.jsonl")[-1]
    assert (last["fleet/rejected"], last["fleet/lost"], last["fleet/duplicates"]) == (0, 0, 0)
    assert last["zero_sum"] == 1
    assert last["episodes"] > 0
    assert {"model/episode_return_mean", "match/win/latest"} <= last.keys()


def test_a_fleet_trains_one_policy(tmp_path: Path) -> None:
    data = {
        "env": "tests.matches:make_roles",
        "memory": "redis://127.0.0.1:1/0",
        "config": {"multiagent": {"policies": ["talk", "hear"], "policy_mapping": {"speak*": "talk", "listener": "hear"}}},
    }
    with pytest.raises(ConfigError, match=r"several policies: talk, hear\."):
        runner.train(data, place=tmp_path / "run")
