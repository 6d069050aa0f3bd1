"""kill -9 of a learner on another node, of the first one, or of its machine, while they train: the run goes on, and comes to its end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ludus.core.metrics import read_jsonl
from ludus.experiments.runs.run_dir import find_runs
from ludus.launch.job import Job, JobStatus, RoleRestart, wait
from ludus.launch.local import LocalOrchestrator
from ludus.launch.planner import LEARNER, MAIN, NodeRequest, plan_job
from ludus.process.job_env import WAIT, JobEnv
from tests.long.record import record
from tests.system.hosts import SHARED, Hosts, end, up
from tests.waiting import wait_until

KILLS = 4
STEPS = 400_000
LIMIT_S = 60.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Training:
    """A job with learners on two nodes, which are both here."""

    def __init__(self, local: LocalOrchestrator, place: Path, workers: int, wait_s: float, far: RoleRestart) -> None:
        words = ["train", "CartPole-v1", "--num-workers", str(workers), "--stop", f"timesteps={STEPS}", "--checkpoint-freq", "2"]
        words += ["--num-envs", "8", "--set", "evaluation_duration=0", "--set", "train_batch_size=2048", "--quiet"]
        words += ["--set", "torch_threads=1", "--set", "learner_threads=1", "--local-dir", str(place)]
        job = plan_job(words, environ={}, nodes=NodeRequest(2, learners=2, wait_s=wait_s)).job
        others, main = (next(role for role in job.roles if role.name == name) for name in (LEARNER, MAIN))
        told = {**main.environment, WAIT: f"{wait_s:g}"}  # a job without a Ray does not say it by itself
        roles = (replace(others, restart=far), replace(main, environment=told))
        self._local, self._place = local, place
        self.id = local.submit(Job(**{**vars(job), "roles": roles, "ray": 0}))

    @property
    def run(self) -> Path:
        (run,) = find_runs(self._place)
        return run

    def meta(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "meta.json").read_text()))

    def rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run / "metrics.jsonl")

    def learner(self, node: int) -> int:
        """Its process; 0 while there is none."""
        if node:
            (far,) = self._local.status(self.id).of(LEARNER)
            return far.pid or 0 if far.state == "running" else 0
        try:
            seen = json.loads((self.run / "status.json").read_text())
        except OSError:
            return 0
        return int(seen["pid"]) if seen["state"] == "running" else 0

    def learns(self) -> bool:
        """Whether its newest learner has learned something."""
        if not find_runs(self._place) or not (self.run / "metrics.jsonl").exists():
            return False
        rows, restarts = self.rows(), self.meta().get("learner_restarts", 0)
        return bool(rows and rows[-1]["incarnation"] == restarts + 1 and self.learner(0) and self.learner(1))

    def eventually(self, found: Callable[[], Any]) -> None:
        wait_until(found, LIMIT_S, what=lambda: list(self._local.logs(self.id)), failed=lambda: self._local.status(self.id).over)

    def end(self) -> tuple[JobStatus, list[str]]:
        return wait(self._local, self.id, 200), list(self._local.logs(self.id))


def restarted(training: Training, times: int) -> bool:
    return int(training.meta().get("learner_restarts", 0)) >= times


@pytest.mark.parametrize("workers", [0, 2], ids=["sampling in the learner", "two workers"])
@pytest.mark.parametrize("node", [1, 0], ids=["the far learner", "the first learner"])
def test_a_learner_that_is_killed_comes_back_and_the_run_is_completed(tmp_path: Path, node: int, workers: int) -> None:
    rng, back_s = random.Random(node), list[float]()
    with LocalOrchestrator(tmp_path / "state", attached=True) as local:
        training = Training(local, tmp_path / "runs", workers, LIMIT_S, "always")
        training.eventually(training.learns)
        for kill in range(1, KILLS + 1):
            time.sleep(rng.uniform(0.0, 0.5))  # the moment is what is tried here
            began = time.monotonic()
            os.kill(training.learner(node), signal.SIGKILL)
            training.eventually(partial(restarted, training, kill))
            training.eventually(training.learns)
            back_s.append(time.monotonic() - began)
        status, said = training.end()
        assert (status.state, status.exit_code) == ("succeeded", 0), said
        rows, meta = training.rows(), training.meta()
    assert (meta["status"], meta["learner_restarts"]) == ("finished", KILLS)
    assert rows[-1]["timesteps"] >= STEPS
    assert {row["learner/learners"] for row in rows if "learner/learners" in row} == {2.0}
    versions = [row["learner/version"] for row in rows if "learner/version" in row]
    assert versions == sorted(set(versions)), "versions only grow"
    whose = "the first learner" if node == 0 else "a learner of another node"
    numbers = {"kills": KILLS, "back_s_mean": round(sum(back_s) / KILLS, 2), "back_s_max": round(max(back_s), 2)}
    record(f"kill -9 of {whose}, {workers} workers", **numbers)


@pytest.mark.parametrize("workers", [0, 2], ids=["sampling in the learner", "two workers"])
def test_a_far_learner_that_does_not_come_back_ends_the_run_with_an_error_that_says_so(tmp_path: Path, workers: int) -> None:
    with LocalOrchestrator(tmp_path / "state", attached=True) as local:
        training = Training(local, tmp_path / "runs", workers, 15.0, "never")
        training.eventually(training.learns)
        os.kill(training.learner(1), signal.SIGKILL)
        status, said = training.end()
        meta = training.meta()
    assert (status.state, status.exit_code) == ("failed", 1), said
    assert (meta["status"], meta["learner_restarts"]) == ("failed", 1)
    (last,) = [line for line in said if line.startswith("main") and "learners of other machines did not come to" in line]
    assert "1 of 1" in last
    assert "within 15 s" in last
    assert f"--resume {training.run}" in last


# -- machines -------------------------------------------------------------------------------------------------------------


NOTICED_S = 90.0
"""A common sum is given up after a minute."""


class Machines:
    """Two hosts: the training on the first, a learner on the other."""

    def __init__(self, hosts: Hosts, shared: Path) -> None:
        self._hosts, self._shared = hosts, shared
        (shared / "token").write_text("0123456789abcdef" * 2)
        (shared / "token").chmod(0o600)
        self._job = JobEnv((hosts.address(0), hosts.address(1)), 0, 17_000, SHARED / "token", wait_s=120.0, learners=1)
        words: list[str | Path] = [
            "train",
            "CartPole-v1",
            "--project",
            SHARED,
            "--trial",
            "run",
            "--stop",
            f"timesteps={STEPS}",
            "--quiet",
        ]
        words += ["--num-envs", "8", "--set", "evaluation_duration=0", "--set", "train_batch_size=2048", "--checkpoint-freq", "2"]
        words += ["--set", "torch_threads=1", "--set", "learner_threads=1"]
        self.training = self._start(0, self._job, "ludus.cli.main", *words)
        self.start_far()

    def start_far(self) -> None:
        self._start(1, replace(self._job, node=1, learners=0), "ludus.distributed.learners.remote_rank")

    def _start(self, host: int, job: JobEnv, *words: str | Path) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LUDUS_")}
        with (self._shared / f"{host}.log").open("ab") as log:
            argv = [sys.executable, "-P", "-m", *words]
            return self._hosts.run(host, argv, env=kept | job.environment() | {"PYTHONUNBUFFERED": "1"}, output=log)

    def said(self) -> str:
        return "".join((self._shared / f"{host}.log").read_text(errors="replace") for host in range(2))

    def meta(self) -> dict[str, Any]:
        path = self._shared / "run" / "meta.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def learns(self, restarts: int) -> bool:
        path = self._shared / "run" / "metrics.jsonl"
        return path.exists() and any(row["incarnation"] == restarts + 1 for row in read_jsonl(path))

    def restarted(self) -> bool:
        return int(self.meta().get("learner_restarts", 0)) > 0

    def eventually(self, found: Callable[[], bool], within_s: float) -> float:
        began = time.monotonic()
        wait_until(found, within_s, what=self.said, failed=lambda: self.training.poll() is not None)
        return time.monotonic() - began


@pytest.mark.parametrize("cut", [True, False], ids=["its cable is pulled", "its power fails"])
def test_a_run_outlives_the_machine_of_a_learner(tmp_path: Path, cut: bool) -> None:
    tmp_path.chmod(0o755)
    with up(2, shared=tmp_path) as hosts:
        machines = Machines(hosts, tmp_path)
        try:
            machines.eventually(partial(machines.learns, 0), LIMIT_S)
            hosts.cut(1) if cut else hosts.power_off(1)
            noticed_s = machines.eventually(machines.restarted, NOTICED_S)
            if cut:
                hosts.mend(1)
            else:
                hosts.power_on(1)
                machines.start_far()
            back_s = machines.eventually(partial(machines.learns, 1), 120.0)
            assert machines.training.wait(300) == 0, machines.said()
        finally:
            end(machines.training)
    assert (machines.meta()["status"], machines.meta()["learner_restarts"]) == ("finished", 1)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["timesteps"] >= STEPS
    way = "cut off" if cut else "without power"
    record(f"the machine of a learner {way}", noticed_s=round(noticed_s, 2), back_s=round(back_s, 2))
