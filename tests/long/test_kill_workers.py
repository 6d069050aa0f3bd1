"""F1: of four workers one is killed every two seconds, for two minutes; the others go on, and a replacement is there at once."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.distributed.sampled import Fleet, fleet
from tests.long.record import record

WORKERS, SECONDS, EVERY_S = 4, 120.0, 2.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def sampled(made: Fleet, seconds: float) -> tuple[int, dict[int, int]]:
    """Take what comes for so long: (steps, blocks of each worker)."""
    steps, blocks = 0, dict.fromkeys(range(WORKERS), 0)
    over = time.monotonic() + seconds
    while (left := over - time.monotonic()) > 0:
        if not made.batches.ready():
            made.sampling._wakeup.wait(min(left, 0.1))
            made.sampling.step()
            continue
        taken = made.batches.take()
        assert taken is not None
        steps += taken.steps
        for origin in set((taken.origin // made.plan.num_envs).tolist()):
            blocks[origin] += 1
        made.batches.release(taken)
    return steps, blocks


def test_workers_are_killed_all_the_time_and_sampling_goes_on() -> None:
    with fleet(num_workers=WORKERS, sampling="async", rollout_fragment_length=32, num_envs_per_worker=16) as made:
        made.batches._blocks = 1  # a batch is whatever comes first
        while made.sampling.metrics()["sampler/workers"] < WORKERS:
            sampled(made, 0.2)
        calm_s = 20.0
        calm, _ = sampled(made, calm_s)
        kills, late, waits = 0, 0, []
        total, began = 0, time.monotonic()
        chooser = random.Random(0)
        while time.monotonic() - began < SECONDS:
            round_began = time.monotonic()
            victim = chooser.randrange(WORKERS)
            pid = made.pid(victim)
            if pid is None:  # it has been killed a moment ago, and is not back yet: counted as late there
                sampled(made, 0.05)
                continue
            before = made.sampling._reports[victim].restarts
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            kills += 1
            back = False
            while time.monotonic() - round_began < EVERY_S:
                steps, blocks = sampled(made, 0.05)
                total += steps
                report = made.sampling._reports.get(victim)
                if not back and report is not None and report.restarts > before and report.state == "ready" and blocks[victim]:
                    back = True
                    waits.append(time.monotonic() - killed)
            late += not back or waits[-1] > 1.0
        elapsed = time.monotonic() - began
        share = (total / elapsed) / (calm / calm_s)
        record(
            "F1 workers killed",
            kills=kills,
            late=late,
            replaced_s_median=sorted(waits)[len(waits) // 2],
            replaced_s_max=max(waits),
            share_of_calm_speed=round(share, 3),
            restarts=made.sampling.restarts,
        )
        for worker in range(WORKERS):  # whatever was finished has arrived: only what was being written is lost
            reader = made.sampling._node_of[worker]._readers[worker]  # type: ignore[attr-defined]
            assert reader.committed == made.sampling._taken_there[worker] + reader.waiting
        assert made.sampling.restarts == kills
        assert share >= 0.5
        assert late <= kills * 0.05, f"{late} of {kills} replacements did not sample within a second: {sorted(waits)[-5:]}"
