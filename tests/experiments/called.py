"""Trainings whose games call them, and games that do: all in this process, over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ludus.errors import Refused, Unreachable
from ludus.experiments import runner
from ludus.experiments.resolve import Announce
from ludus.experiments.result import Result
from ludus.protocol.client import Client

LIMIT_S = 60.0
PLANE = {"type": "Box", "shape": [2]}
CHOICE = {"type": "Discrete", "n": 2}
ONE_SEAT: dict[str, Any] = {"observation_space": PLANE, "action_space": CHOICE}
TWO_SEATS: dict[str, Any] = {
    "seats": {
        "blue": ONE_SEAT | {"model": "navy"},
        "red": {"observation_space": {"type": "Discrete", "n": 3}, "action_space": {"type": "Discrete", "n": 3}, "model": "rose"},
    }
}
SETTINGS: dict[str, Any] = {
    "train_batch_size": 48,
    "rollout_fragment_length": 5,
    "minibatch_size": 32,
    "num_epochs": 2,
    "model": {"fcnet_hiddens": [8]},
    "metrics_num_episodes_for_smoothing": 5,
}


def data(iterations: int = 3, outside: dict[str, Any] | None = None, *, run: str = "PPO", **settings: Any) -> dict[str, Any]:
    """An experiment as a config holds it; on any free port."""
    env_config = {"port": 0, **(outside or ONE_SEAT)}
    config = {**SETTINGS, "env_config": env_config, **settings}
    return {"env": "external", "run": run, "stop": {"iterations": iterations, "time_s": LIMIT_S}, "config": config}


@dataclass
class Training:
    done: Future[Result]
    url: str

    def result(self) -> Result:
        return self.done.result(LIMIT_S)


@contextlib.contextmanager
def training(start: Callable[[Announce], Result]) -> Iterator[Training]:
    """Runs in a thread of its own; it listens when the block begins, and is over when it ends."""
    url: Future[str] = Future()

    def announced(sentence: str) -> None:
        found = re.search(r"http://[^/]+", sentence)
        if found and not url.done():
            url.set_result(found.group())

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(start, announced)
        done.add_done_callback(lambda _: url.cancel())
        try:
            where = url.result(LIMIT_S)
        except CancelledError:
            done.result(0)  # why it did not come to that
            raise
        yield Training(done, where)


def started(where: Path, experiment_data: dict[str, Any]) -> contextlib.AbstractContextManager[Training]:
    return training(lambda announce: runner.train(experiment_data, project=where.parent, trial=where.name, announce=announce))


def resumed(where: Path, iterations: int) -> contextlib.AbstractContextManager[Training]:
    return training(
        lambda announce: runner.resume(where, stop={"iterations": iterations, "time_s": 2 * LIMIT_S}, announce=announce)
    )


# -- games --------------------------------------------------------------------------------------------------------------


def plane(random: np.random.Generator) -> dict[str, Any]:
    """What the seat of a plane sees in a good game: never beyond 1."""
    return {"observation": random.uniform(-1, 1, 2).tolist()}


def one_seat(random: np.random.Generator, answer: Any) -> dict[str, Any]:
    """The next tick; rewards are 1 for the second option, and 0.5 for the first."""
    return plane(random) | ({} if answer is None else {"reward": 0.5 + 0.5 * answer["action"]})


def two_seats(random: np.random.Generator, answer: Any) -> dict[str, Any]:
    """Blue acts always, red every other time."""
    actions = {} if answer is None else answer["actions"]
    seats = {"blue": plane(random) | ({"reward": 0.5 + 0.5 * actions["blue"]} if "blue" in actions else {})}
    if "red" in actions or random.random() < 0.5:
        seats["red"] = {"observation": int(random.integers(3))} | ({"reward": actions["red"]} if "red" in actions else {})
    return {"seats": seats}


Ticks = Callable[[np.random.Generator, Any], dict[str, Any]]


@dataclass
class Games:
    """Matches of random length, one after the other in each of some threads, until the server goes away."""

    url: str
    ticks: Ticks
    last: Callable[[Any], dict[str, Any]]
    threads: list[threading.Thread] = field(default_factory=list)
    matches: int = 0
    faults: list[BaseException] = field(default_factory=list)

    def begin(self, count: int) -> None:
        for seed in range(count):
            self.threads.append(threading.Thread(target=self._play, args=(seed,), daemon=True))
            self.threads[-1].start()

    def _play(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            with Client(self.url, timeout_s=LIMIT_S, retries=0) as client:
                while self._goes_on(client, random):
                    self.matches += 1
        except Unreachable:
            pass
        except BaseException as fault:
            self.faults.append(fault)

    def _goes_on(self, client: Client, random: np.random.Generator) -> bool:
        """One match; False when the server is stopping."""
        try:
            self._match(client, random)
        except Refused as refused:
            if refused.error in ("worker_away", "worker_busy"):  # of several, while they start
                threading.Event().wait(0.05)
                return True
            if refused.status in (404, 410, 503):  # what one hears of a server that is stopping
                return False
            raise
        return True

    def _match(self, client: Client, random: np.random.Generator) -> None:
        session = uuid.uuid4().hex
        client.start(session)
        answer = None
        for _ in range(int(random.integers(1, 12))):
            answer = json.loads(client.tick(session, json.dumps(self.ticks(random, answer)).encode()))
        client.end(session, json.dumps(self.last(answer)).encode())


@contextlib.contextmanager
def games(url: str, ticks: Ticks = one_seat, count: int = 3) -> Iterator[Games]:
    def last(answer: Any) -> dict[str, Any]:
        if "actions" not in answer:
            return {"reward": 0.5 + 0.5 * answer["action"], "terminated": True}
        return {"seats": {name: {"terminated": True} for name in answer["actions"]}}

    playing = Games(url, ticks, last)
    playing.begin(count)
    try:
        yield playing
    finally:
        for thread in playing.threads:
            thread.join(LIMIT_S)
    assert not playing.faults, playing.faults
