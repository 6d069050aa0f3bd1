"""Workers sample with the right weights, and the learner gets its batches even if workers die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import psutil
import pytest

from ludus.buffers.block_batches import BlockBatches
from ludus.core.types import Segments
from ludus.distributed.sampling_plan import COUNTERS
from ludus.distributed.sampling_pool import WorkerReport
from ludus.errors import EnvironmentFault
from ludus.process.temp_dirs import shared_memory_dir
from tests.distributed.sampled import FIRST_VERSION, Fleet, fleet
from tests.waiting import wait_until

WITHIN_S = 60.0


def until(fleet: Fleet, true: Callable[[], bool]) -> None:
    wait_until(true, WITHIN_S, what=fleet.sampling.status, pause=lambda _: fleet.sampling.step())


def batch(fleet: Fleet) -> Segments:
    until(fleet, fleet.batches.ready)
    taken = fleet.batches.take()
    assert taken is not None
    return taken


def test_in_turn_every_block_is_made_with_the_weights_after_as_many_updates(tmp_path: Path) -> None:
    with fleet(num_workers=2, logs=tmp_path) as made:
        for update in range(4):
            taken = batch(made)
            assert (taken.version == FIRST_VERSION + update).all()
            assert taken.origin.tolist() == list(range(8))
            assert taken.steps > 0
            made.batches.release(taken)
            assert not made.batches.ready(), "no worker samples ahead"
            made.learn()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["sampler-0.log", "sampler-1.log"]


def test_pipelined_the_next_block_is_made_meanwhile_and_no_further() -> None:
    with fleet(num_workers=1, sampling="pipelined") as made:
        for update in range(4):
            taken = batch(made)
            lag = made.version - int(taken.version.max())
            assert 0 <= lag <= 1
            until(made, lambda update=update: made.sampling._reports[0].counter("blocks") >= update + 2)  # type: ignore[misc]
            made.batches.release(taken)
            made.learn()
        time.sleep(0.3)
        made.sampling._update()
        assert made.sampling._reports[0].counter("blocks") <= 6


def test_without_turns_workers_go_on_as_long_as_there_is_room() -> None:
    with fleet(num_workers=2, sampling="async", blocks_ahead=3) as made:
        until(made, lambda: sum(report.counter("blocks") for report in made.sampling._reports.values()) >= 6)
        for _ in range(5):
            taken = batch(made)
            made.batches.release(taken)
        made.learn()
        seen = []
        for _ in range(8):
            taken = batch(made)
            seen.append(int(taken.version.max()))
            made.batches.release(taken)
        assert FIRST_VERSION + 1 in seen, "new weights arrive without waiting"


def test_a_killed_worker_is_replaced_and_its_blocks_go_on_where_they_were() -> None:
    with fleet(num_workers=2) as made:
        made.batches.release(batch(made))
        made.learn()
        until(made, lambda: made.batches.ready() and made.pid(1) is not None)
        victim = made.pid(1)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        made.batches.release(batch(made))
        made.learn()
        taken = batch(made)
        assert (taken.version == FIRST_VERSION + 2).all()
        assert taken.origin.tolist() == list(range(8))
        made.batches.release(taken)
        until(made, lambda: made.sampling.metrics()["sampler/restarts"] == 1)


def test_an_environment_that_always_raises_ends_the_run_with_its_own_words() -> None:
    with (
        pytest.raises(EnvironmentFault, match="the game crashed"),
        fleet("tests.environments:make_fragile", num_workers=1, env_config={"crash": 1.0}) as made,
    ):
        batch(made)


def test_a_worker_whose_environment_stalls_is_replaced() -> None:
    with fleet(
        "tests.environments:make_fragile",
        num_workers=1,
        sampling="async",
        env_config={"stall": 0.02, "stall_s": (30.0, 30.0)},
        worker_hang_s=0.5,
        rollout_fragment_length=4,
        num_envs_per_worker=1,
    ) as made:
        deadline = time.monotonic() + WITHIN_S
        while made.sampling.restarts < 1:
            assert time.monotonic() < deadline
            if made.batches.ready():
                made.batches.release(batch(made))
            made.sampling.step()
        made.batches.release(batch(made))
        assert made.sampling.metrics()["sampler/restarts"] >= 1


def test_an_environment_that_ends_its_process_without_an_error_is_started_again() -> None:
    with fleet("tests.environments:make_leaving", num_workers=1, sampling="async", num_envs_per_worker=1) as made:
        for _ in range(5):
            made.batches.release(batch(made))
        assert made.sampling.restarts >= 1


def test_a_batch_may_be_larger_than_what_workers_have_room_for() -> None:
    with fleet(num_workers=2, sampling="async", blocks_ahead=1) as made:
        many = BlockBatches(made.sampling, 2, 9, in_turn=False, newest=lambda: made.version)
        made.sampling.batches = many
        until(made, many.ready)
        taken = many.take()
        assert taken is not None
        assert taken.rows == 9 * 4
        assert (taken.version == FIRST_VERSION).all()


def test_an_environment_that_crashes_now_and_then_costs_its_episode_only() -> None:
    crashes = {"crash": 0.02}
    with fleet(
        "tests.environments:make_fragile",
        num_workers=1,
        sampling="async",
        env_config=crashes,
        restart_failed_sub_environments=True,
    ) as made:
        invalid = 0
        for _ in range(20):
            taken = batch(made)
            invalid += int((~taken.valid).sum())
            assert np.isfinite(taken.value).all()
            made.batches.release(taken)
        until(made, lambda: made.sampling.metrics()["sampler/env_restarts"] > 0)
        assert made.sampling.restarts == 0
        assert invalid > 0


def ours() -> set[Path]:
    return set(shared_memory_dir().glob(f"ludus-*-{os.getpid()}-*"))


def test_it_describes_what_it_waits_for_and_counts_unlearned_steps() -> None:
    with fleet(num_workers=1) as made:
        assert not made.sampling.has_sampled()
        assert made.sampling.waiting_for() == "the first step of 1 workers: worker 0 is starting"
        until(made, made.batches.ready)
        until(made, made.sampling.has_sampled)
        assert made.sampling.unlearned_steps() == 4 * 8
        made.batches.take()
        assert made.sampling.unlearned_steps() in (0, 4 * 8)  # a single block is learned from where it is


def test_steps_count_before_their_segment_is_whole() -> None:
    slow = {"step_s": 0.05, "length": 10_000}
    with fleet(
        "tests.experiments.stoppable:make_stoppable", num_workers=1, env_config=slow, rollout_fragment_length=2000
    ) as made:  # a segment takes 400 s
        until(made, made.sampling.has_sampled)
        assert made.sampling._reports[0].counter("blocks") == 0
        assert made.sampling.unlearned_steps() > 0


SPENT = ("environment_s", "policy_s", "blocked_s", "weights_wait_s")
SHARES = ("sampler/env_share", "sampler/policy_share", "sampler/blocked_share", "sampler/weights_wait_share")


def test_shares_of_time_add_up_to_at_most_100_percent() -> None:
    late = [(8.0, 4.0, 0.0, 6.0), (0.0, 0.0, 90.0, 0.0)]  # counters of more time than the window has
    now, total = 100.0, np.zeros(4)
    with fleet(num_workers=1) as made:
        sampling = made.sampling
        sampling._clock = lambda: now
        sampling._reports[0] = counted(total)
        sampling.metrics()
        for spent in [(1.0, 0.5, 0.25, 0.25), *late, (0.0, 0.0, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0)]:
            now, total = now + 2.0, total + spent
            sampling._reports[0] = counted(total)
            sampling._waited_s += 6.0  # a wait that began before the window
            numbers = sampling.metrics()
            shares = [numbers[name] for name in SHARES]
            assert min(shares) >= 0
            assert sum(shares) == pytest.approx(min(1.0, sum(spent) / 2.0))
            assert numbers["learner/wait_share"] == 1.0


def counted(spent: Iterable[float]) -> WorkerReport:
    """The report of a worker that has spent so many seconds, in the order of SPENT."""
    notes = dict.fromkeys(COUNTERS, 0.0) | dict(zip(SPENT, spent, strict=True))
    return WorkerReport("ready", None, 0, "", tuple(notes.values()))


def test_nothing_is_left_behind() -> None:
    before = ours()
    with fleet(num_workers=2) as made:
        made.batches.release(batch(made))
        until(made, lambda: None not in (made.pid(0), made.pid(1)))
        pids = [made.pid(worker) for worker in range(2)]
        assert ours() > before
    assert ours() <= before
    assert not [pid for pid in pids if pid is not None and psutil.pid_exists(pid)]


def test_the_metrics_show_which_side_waits() -> None:
    with fleet(num_workers=1, sampling="async") as made:
        until(made, lambda: made.sampling.metrics()["sampler/blocked_share"] > 0.5)  # no block is taken
        numbers = made.sampling.metrics()
        assert numbers["sampler/workers"] == 1
        assert numbers["sampler/nodes"] == 1


def test_a_worker_that_is_stopped_and_started_again_leaves_blocks_that_can_still_be_read() -> None:
    with fleet(num_workers=1, sampling="async") as made:
        until(made, lambda: made.sampling.take_block(0) is not None)
        node = made.sampling._node_of[0]
        held = None
        deadline = time.monotonic() + WITHIN_S
        while held is None and time.monotonic() < deadline:
            held = node.take(0)
        assert held is not None
        before = held.observation.copy()
        node.stop(0)
        node.start(0, 7)
        assert np.array_equal(held.observation, before)
        node.release(0, held)
        until(made, lambda: made.sampling.take_block(0) is not None)
