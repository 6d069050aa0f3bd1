"""Games that play in workers: what reaches the learner is whole, whoever is killed, and nothing is left of it."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from ludus.actor.gateway import GatewaySettings
from ludus.buffer.collate import Collated
from ludus.model.policy import Policy
from ludus.model.pool import LocalPool
from ludus.runtime.fleet import bind
from ludus.runtime.gathering import Boards, FleetGathering, PublishingPool
from ludus.store.local import LocalStore
from ludus.types import Segments
from tests.experiment.called import games

WAIT_S = 60.0
STEPS = 5


@dataclass
class Gathered:
    boards: Boards
    memory: Collated
    gathering: FleetGathering

    @property
    def url(self) -> str:
        host, port = self.gathering.address
        return f"http://{host}:{port}"

    def batch(self) -> Segments:
        """The next one. All that is in it is of the games in `called.py`, each step whole."""
        deadline = time.monotonic() + WAIT_S
        while (batch := self.memory.take(0)) is None:
            assert time.monotonic() < deadline, "no batch"
            self.gathering.step()
        self.memory.release(batch)
        valid = batch.valid
        assert (np.abs(batch.observation[:-1][valid]) <= 1).all()
        np.testing.assert_array_equal(batch.reward[valid], 0.5 + 0.5 * batch.action[valid])
        return batch


@contextlib.contextmanager
def gathered(tmp_path: Path, workers: int) -> Iterator[Gathered]:
    policy = Policy(gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), gym.spaces.Discrete(2))
    pool = LocalPool(LocalStore(tmp_path / "run"))
    pool.add("model", policy)
    boards = Boards({"model": policy}, STEPS, 400)
    memory = Collated([boards.memory.of("model")], 48)
    try:
        publisher = PublishingPool(pool, boards)
        logs = tmp_path / "logs"
        settings = GatewaySettings()
        gathering = FleetGathering(
            bind("127.0.0.1", 0), settings, {"": "model"}, workers, STEPS, boards, publisher, memory, logs
        )
        try:
            yield Gathered(boards, memory, gathering)
        finally:
            gathering.close()
    finally:
        boards.close()


def test_kills_of_workers_cost_what_was_under_way_and_no_count_goes_back(tmp_path: Path) -> None:
    with gathered(tmp_path, 2) as fleet:
        with games(fleet.url, count=4):
            requests = 0.0
            for turn in range(4):
                worker = fleet.gathering._fleet.workers[turn % 2]
                for _ in range(3):
                    fleet.batch()
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                fleet.batch()
                metrics = fleet.gathering.metrics()
                assert metrics["games/requests"] >= requests
                requests = metrics["games/requests"]
                worker.wait_ready(WAIT_S)
            assert sum(worker.incarnation for worker in fleet.gathering._fleet.workers) == 6
            deadline = time.monotonic() + WAIT_S
            while fleet.gathering.metrics()["games/requests"] <= requests:  # replacements count on
                assert time.monotonic() < deadline
                fleet.batch()
            fleet.gathering._fleet.close()
        scratch = fleet.boards._scratch.path
    assert not scratch.exists()


def test_a_worker_whose_ring_holds_rubbish_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gathered(tmp_path, 1) as fleet:
        worker = fleet.gathering._fleet.workers[0]
        with games(fleet.url, count=2):
            fleet.batch()
            (ring,) = fleet.boards._scratch.path.glob(".segments/0.*/ring")
            over = threading.Event()

            def spoil() -> None:
                """Whatever the worker writes: it is the only one that may, but for this."""
                with open(ring, "r+b") as file, mmap.mmap(file.fileno(), 0) as whole:
                    while not over.wait(0.001):
                        whole[-(1 << 24) :] = b"\xff" * (1 << 24)

            spoiler = threading.Thread(target=spoil)
            spoiler.start()
            try:
                deadline = time.monotonic() + WAIT_S
                while "cut off" not in caplog.text:
                    assert time.monotonic() < deadline
                    fleet.gathering.step()
                    with contextlib.suppress(AssertionError):  # steps that were spoilt on the way
                        fleet.memory.take(0)
            finally:
                over.set()
                spoiler.join()
            fleet.gathering.step()
            worker.wait_ready(WAIT_S)
            assert worker.incarnation == 2
            for _ in range(3):
                fleet.batch()
            fleet.gathering._fleet.close()
    assert not list((tmp_path / "logs").glob("*.crash"))
