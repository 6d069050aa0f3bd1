"""A whole fleet as people run it: commands that share a Redis server and an S3 bucket, each of which is killed once on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli.main import app
from ludus.errors import UsageError
from tests.redis_server import RedisServer
from tests.s3 import Server
from tests.waiting import wait_until

pytestmark = pytest.mark.system

WAIT_S = 150.0
LUDUS = [sys.executable, "-m", "ludus.cli.main"]


class Commands:
    """Starts commands in groups of their own, and ends whatever is left."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._directory, self._environment = directory, environment
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with open(self._directory / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [*LUDUS, *words], stdout=log, stderr=log, cwd=self._directory, env=self._environment, start_new_session=True
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                self.kill(process)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    environment = {**os.environ, "LUDUS_CACHE_DIR": str(tmp_path / "cache"), "PYTHONFAULTHANDLER": "1"}
    commands = Commands(tmp_path, environment)
    yield commands
    commands.close()


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        monkeypatch.setenv("LUDUS_MEMORY_PASSWORD", server.password)
        yield server


def rows(cache: Path) -> list[dict[str, float]]:
    texts = [file.read_text(encoding="utf-8") for file in cache.rglob("metrics.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines() if line.endswith("}")]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_fleet_learns_though_everyone_is_killed_once(
    redis: RedisServer, s3_server: Server, s3_url: str, tmp_path: Path, commands: Commands
) -> None:
    place = ("--memory", redis.url, "--store", s3_url)
    learn = ["fleet", "learner", "CartPole-v1", "-n", "2", "--stop", "episode_return_mean=300", "--stop", "timesteps=900000"]
    learn += ["--checkpoint-freq", "4", "--keep-checkpoints-num", "2", "--set", "evaluation_duration=0", "--json", *place]

    def iterations() -> float:
        return max((row.get("iterations", 0) for row in rows(tmp_path / "cache")), default=0)

    one = commands.start("one", "fleet", "worker", *place)
    two = commands.start("two", "fleet", "worker", *place)
    learner = commands.start("learner", *learn)
    wait_until(lambda: iterations() >= 6, WAIT_S, what="the first updates")
    commands.kill(learner)
    assert one.poll() is None
    assert two.poll() is None
    before = iterations()
    learner = commands.start("learner", *learn)
    commands.kill(two)
    three = commands.start("three", "fleet", "worker", *place)
    wait_until(lambda: iterations() > before + 1, WAIT_S, what="updates of the second learner")
    assert learner.poll() is None
    redis.restart()  # kill -9

    assert learner.wait(WAIT_S) == 0, commands.log("learner")
    assert one.wait(WAIT_S) == 0, commands.log("one")
    assert three.wait(WAIT_S) == 0, commands.log("three")
    result = json.loads(commands.log("learner").splitlines()[-1])
    assert result["stopped_by"] == "episode_return_mean"
    last = [row for row in rows(tmp_path / "cache") if "fleet/joined" in row][-1]
    assert last["fleet/rejected"] == 0
    assert 2 <= last["fleet/joined"] <= 3
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "redis" not in path.parts]
    assert not any(redis.password.encode() in text for text in written), "the password was written somewhere"


@pytest.mark.timeout(200)
def test_a_worker_of_a_place_without_a_learner_waits_and_stops_when_told(
    redis: RedisServer, tmp_path: Path, commands: Commands
) -> None:
    worker = commands.start("worker", "fleet", "worker", "--memory", redis.url, "--store", str(tmp_path / "nobody"))
    wait_until(lambda: "there is no learner yet" in commands.log("worker"), WAIT_S, what="the worker says what it waits for")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(WAIT_S) == 0, commands.log("worker")


@pytest.mark.timeout(300)
def test_many_workers_of_one_command_pack_and_drop_and_go_home(redis: RedisServer, tmp_path: Path, commands: Commands) -> None:
    place = ("--memory", redis.url, "--store", str(tmp_path / "run"))
    workers = commands.start("workers", "fleet", "worker", *place, "-n", "2", "--compression", "lz4", "--when-full", "drop")
    learn = ["fleet", "learner", "CartPole-v1", "--run", "IMPALA", "-n", "2", "--stop", "iterations=40", *place]
    learner = commands.start("learner", *learn, "--set", "evaluation_duration=0")
    assert learner.wait(WAIT_S) == 0, commands.log("learner")
    assert workers.wait(WAIT_S) == 0, commands.log("workers")
    assert commands.log("workers").endswith("the run is over\n")


@pytest.mark.timeout(300)
def test_many_workers_that_are_refused_end_with_the_reason(redis: RedisServer, tmp_path: Path, commands: Commands) -> None:
    place = ("--memory", redis.url, "--store", str(tmp_path / "run"))
    commands.start("learner", "fleet", "learner", "CartPole-v1", *place)
    workers = commands.start("workers", "fleet", "worker", *place, "-n", "2", "--env", "Acrobot-v1")
    assert workers.wait(WAIT_S) == 2, commands.log("workers")
    assert "this worker accepts only Acrobot-v1" in commands.log("workers")


@pytest.mark.timeout(300)
def test_what_a_run_that_was_given_up_left_in_the_memory_is_cleared(
    redis: RedisServer, tmp_path: Path, commands: Commands
) -> None:
    place = ("--memory", redis.url, "--store", str(tmp_path / "run"))
    learner = commands.start("learner", "fleet", "learner", "CartPole-v1", *place)
    worker = commands.start("worker", "fleet", "worker", *place)
    wait_until(lambda: len(rows(tmp_path / "run")) > 0, WAIT_S, what="the first update")
    for process in (learner, worker):
        commands.kill(process)
    with contextlib.closing(redis.client()) as client:
        assert client.keys("ludus:*")
        done = CliRunner().invoke(app, ["fleet", "clear", *place])
        assert done.exit_code == 0, done.output
        assert client.keys("ludus:*") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "rediss"], "redis://HOST:PORT"),
        (["--memory", "redis://h", "--set", "lr={grid_search: [1, 2]}"], "sweep"),
        (["--memory", "redis://h?password=geheim"], "LUDUS_MEMORY_PASSWORD"),
        (["--memory", "redis://h", "--set", "batch_mode=complete_episodes"], "complete_episodes"),
    ],
    ids=["not a memory", "a sweep", "a password in the query", "whole episodes"],
)
def test_what_a_fleet_cannot_do_is_refused_before_it_begins(tmp_path: Path, words: list[str], said: str) -> None:
    place = ["--store", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["fleet", "learner", "CartPole-v1", *place, *words, "--quiet"])
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)
    assert "geheim" not in str(done.exception)
    assert not (tmp_path / "run").exists()
