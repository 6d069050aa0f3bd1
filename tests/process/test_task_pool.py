"""TaskPool: every task has a result, even if its workers die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import EnvironmentFault, WorkerFailed
from ludus.process.workers.supervisor import WorkerRestart
from ludus.process.workers.task_pool import TaskPool, TaskResult
from tests.process.pool_tasks import Clerk, Stillborn, Unmade

QUICK = WorkerRestart(limit=20, backoff_s=0.01)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def clerks(notes: Path) -> Iterator[TaskPool]:
    with TaskPool("clerk", Clerk, str(notes), workers=2, hang_s=1.0, restart=QUICK, log_dir=notes, preload=()) as errands:
        yield errands


def all_done(errands: TaskPool, within_s: float = 30.0) -> dict[int, TaskResult]:
    done: dict[int, TaskResult] = {}
    deadline = time.monotonic() + within_s
    while errands.pending and time.monotonic() < deadline:
        done |= {item.number: item for item in errands.take(0.5)}
    return done | {item.number: item for item in errands.take()}


def give(errands: TaskPool, number: int, **errand: Any) -> None:
    errands.submit(number, {"number": number, **errand})


def test_every_task_runs_once_and_has_a_result(clerks: TaskPool, notes: Path) -> None:
    for number in range(1, 21):
        give(clerks, number, much=300_000 if number == 7 else 0)
    done = all_done(clerks)
    assert {number: item.answer["square"] for number, item in done.items()} == {n: n * n for n in range(1, 21)}
    assert len(done[7].answer["much"]) == 300_000
    assert len({item.answer["pid"] for item in done.values()}) <= 2
    assert all((notes / f"{number}.tries").stat().st_size == 1 for number in range(1, 21))
    assert clerks.take() == []


def test_the_task_of_a_process_that_dies_or_hangs_goes_to_its_replacement(clerks: TaskPool, notes: Path) -> None:
    give(clerks, 101, die="once")
    give(clerks, 102, hang=True)
    give(clerks, 103)
    done = all_done(clerks)
    assert {number: item.answer["square"] for number, item in done.items()} == {n: n * n for n in (101, 102, 103)}
    assert [(notes / f"{n}.tries").stat().st_size for n in (101, 102, 103)] == [2, 2, 1]


def test_a_task_that_kills_every_worker_fails_and_the_others_do_not(clerks: TaskPool, notes: Path) -> None:
    give(clerks, 201, die="always")
    give(clerks, 202)
    done = all_done(clerks)
    assert isinstance(done[201].error, WorkerFailed)
    assert "SIGKILL" in str(done[201].error)
    assert (notes / "201.tries").stat().st_size == 3
    assert done[202].answer["square"] == 202 * 202


def test_an_error_of_ours_is_an_answer(clerks: TaskPool, notes: Path) -> None:
    give(clerks, 301, fail=True)
    error = all_done(clerks)[301].error
    assert isinstance(error, EnvironmentFault)
    assert (error.message, error.hint) == ("the game crashed", "Try another.")
    assert (notes / "301.tries").stat().st_size == 1


@pytest.mark.parametrize(("made", "error"), [(Unmade, EnvironmentFault), (Stillborn, WorkerFailed)])
def test_tasks_fail_when_no_process_can_start(made: Any, error: type[Exception], tmp_path: Path) -> None:
    with TaskPool("none", made, workers=1, restart=QUICK, log_dir=tmp_path, preload=()) as errands:
        give(errands, 1)
        done = all_done(errands)
    assert isinstance(done[1].error, error)


def test_take_does_not_wait_longer_than_its_timeout(clerks: TaskPool) -> None:
    assert clerks.pending == 0
    assert clerks.take(60.0) == [], "there is nothing to wait for"
