"""Games that play in gateway workers: the learner gets only complete segments, even if workers are killed, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import mmap
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from ludus.buffers.collate import CollatedBatches
from ludus.core.types import Segments
from ludus.distributed.gateway_source import GatewaySharedMemory, GatewaySource
from ludus.distributed.gateway_workers import bind
from ludus.errors import Refused, Unreachable
from ludus.gateway.server import GatewaySettings
from ludus.models.policy import Policy
from ludus.models.weights.version_store import LocalVersionStore
from ludus.protocol.client import Client
from ludus.storage.local import LocalStore
from tests.experiments.called import one_seat

WAIT_S = 60.0
STEPS = 5


@dataclass
class Gathered:
    shared: GatewaySharedMemory
    memory: CollatedBatches
    gathering: GatewaySource

    @property
    def url(self) -> str:
        host, port = self.gathering.address
        return f"http://{host}:{port}"

    def discard(self) -> Segments:
        """The next batch, whatever is in it."""
        deadline = time.monotonic() + WAIT_S
        while (batch := self.memory.take(0)) is None:
            assert time.monotonic() < deadline, "no batch"
            self.gathering.step()
        self.memory.release(batch)
        return batch

    def batch(self) -> Segments:
        """The next batch: all that is in it is of the games in `called.py`, each step whole."""
        batch = self.discard()
        valid = batch.valid
        assert (np.abs(batch.observation[:-1][valid]) <= 1).all()
        np.testing.assert_array_equal(batch.reward[valid], 0.5 + 0.5 * batch.action[valid])
        return batch


@contextlib.contextmanager
def gathered(tmp_path: Path, workers: int) -> Iterator[Gathered]:
    policy = Policy(gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), gym.spaces.Discrete(2))
    pool = LocalVersionStore(LocalStore(tmp_path / "run"))
    pool.add("model", policy)
    shared = GatewaySharedMemory({"model": policy}, STEPS, 400)
    memory = CollatedBatches([shared.memory.of("model")], 48)
    try:
        shared.publish("model", pool.newest("model")[1])
        logs = tmp_path / "logs"
        port, settings = bind("127.0.0.1", 0), GatewaySettings()
        gathering = GatewaySource(port, settings, {"": "model"}, workers, shared, memory, logs)
        try:
            yield Gathered(shared, memory, gathering)
        finally:
            gathering.close()
    finally:
        shared.close()


@contextlib.contextmanager
def games(url: str, count: int) -> Iterator[None]:
    """Matches one after the other, whatever becomes of their sessions."""
    over = threading.Event()

    def match(client: Client, random: np.random.Generator) -> None:
        session, answer = uuid.uuid4().hex, None
        client.start(session)
        for _ in range(int(random.integers(1, 12))):
            answer = json.loads(client.tick(session, json.dumps(one_seat(random, answer)).encode()))
        assert answer is not None
        client.end(session, json.dumps({"reward": 0.5 + 0.5 * answer["action"], "terminated": True}).encode())

    def play(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not over.is_set():
            with contextlib.suppress(Refused, Unreachable), Client(url, timeout_s=10, retries=0) as client:
                while not over.is_set():
                    match(client, random)
            over.wait(0.02)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)


@pytest.mark.long
def test_kills_of_workers_cost_what_was_under_way_and_no_count_goes_back(tmp_path: Path) -> None:
    with gathered(tmp_path, 2) as fleet:
        with games(fleet.url, count=4):
            requests = 0.0
            for turn in range(4):
                worker = fleet.gathering._workers.workers[turn % 2]
                for _ in range(3):
                    fleet.batch()
                worker.kill()
                fleet.batch()
                metrics = fleet.gathering.metrics()
                assert metrics["games/requests"] >= requests
                requests = metrics["games/requests"]
                worker.wait_ready(WAIT_S)
            assert sum(worker.incarnation for worker in fleet.gathering._workers.workers) == 6
            deadline = time.monotonic() + WAIT_S
            while fleet.gathering.metrics()["games/requests"] <= requests:  # replacements count on
                assert time.monotonic() < deadline
                fleet.batch()
        scratch = fleet.shared._scratch.path
    assert not scratch.exists()


def test_a_worker_whose_ring_holds_rubbish_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gathered(tmp_path, 1) as fleet:
        worker = fleet.gathering._workers.workers[0]
        with games(fleet.url, count=2):
            fleet.batch()
            (ring,) = fleet.shared._scratch.path.glob(".segments/0.*/ring")
            over = threading.Event()

            def spoil() -> None:
                """Whatever the worker writes: it is the only one that may, but for this."""
                with open(ring, "r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
                    rubbish = b"\xff" * (len(whole) - (1 << 17))  # the counters are in front of the records
                    while not over.wait(0.001):
                        whole[1 << 17 :] = rubbish

            spoiler = threading.Thread(target=spoil)
            spoiler.start()
            try:
                deadline = time.monotonic() + WAIT_S
                while "cut off" not in caplog.text:
                    assert time.monotonic() < deadline
                    fleet.gathering.step()
                    fleet.memory.take(0)
            finally:
                over.set()
                spoiler.join()
            fleet.gathering.step()
            worker.wait_ready(WAIT_S)
            assert worker.incarnation == 2
            fleet.discard()  # it may hold what was taken before, and spoilt afterwards
            for _ in range(3):
                fleet.batch()
        assert fleet.gathering.metrics()["games/dropped_segments"] > 0
