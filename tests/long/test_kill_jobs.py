"""kill -9 of whatever looks after a job, or is part of one, at random moments, many times: nothing is ever left of it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludus.launch.job_dir import JobDirectory
from ludus.launch.local import LocalOrchestrator
from ludus.process import identity
from ludus.testing.orchestrator_contract import wait_until_ended
from tests.long.record import record
from tests.waiting import wait_until

KILLS = 60
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

TREE = "sleep 600 & setsid sleep 600 & (sleep 600 & setsid sh -c 'sleep 600; true' & wait) & wait"
"""A process with children, and some that hide from its group."""

SCRIPT = """
import sys
from pathlib import Path
from ludus.launch.job import Job, Role
from ludus.launch.local import LocalOrchestrator
tree = ("sh", "-c", sys.argv[2])
roles = (Role("memory", tree, restart="always"), Role("main", tree), Role("worker", tree, 3, "on-failure"))
orchestrator = LocalOrchestrator(Path(sys.argv[1]), attached=True)
print(orchestrator.submit(Job("trial", roles, "main")), flush=True)
sys.stdin.read()
"""


def marked(mark: str) -> list[int]:
    """All processes that have it in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"LUDUS_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if identity.start_time(pid) is not None]


def test_nothing_is_left_whoever_is_killed_and_whenever(tmp_path: Path) -> None:
    rng = random.Random(0)
    orchestrator = LocalOrchestrator(tmp_path)
    counts: dict[str, int] = {}
    for number in range(KILLS):
        mark = f"{os.getpid()}-{number}"
        words = [sys.executable, "-c", SCRIPT, str(tmp_path), TREE]
        environment = os.environ | {"LUDUS_TEST_MARK": mark}
        with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as submitter:
            assert submitter.stdout is not None
            job_id = submitter.stdout.readline().strip()
            time.sleep(rng.choice([0.0, rng.uniform(0, 0.3)]))
            found = JobDirectory(orchestrator.directory / job_id).read()
            roles = [p.pid for p in orchestrator.status(job_id).processes if p.pid is not None]
            watchers = {"supervisor": found.supervisor, "guard": found.guard}
            who = rng.choice(["supervisor", "guard", "submitter", "role", "nobody"])
            counts[who] = counts.get(who, 0) + 1
            if who == "role" and roles:
                os.kill(rng.choice(roles), signal.SIGKILL)
                time.sleep(rng.uniform(0, 0.2))
            elif who in watchers and watchers[who] is not None:
                watcher = watchers[who]
                assert watcher is not None
                identity.send_signal(watcher.pid, watcher.started, signal.SIGKILL)
            submitter.kill()
        if who == "nobody":
            orchestrator.cancel(job_id, at_once=True)
        status = wait_until_ended(orchestrator, job_id)
        assert status.state in ("failed", "cancelled"), status
        wait_until(lambda mark=mark: not marked(mark), 30)  # type: ignore[misc]
        assert not (orchestrator.directory / job_id / "scratch").exists()
    record("jobs-killed", **counts)
