"""A training whose gradients are computed on two nodes of a job, and the listener of the first learner."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.distributed.frames import FrameSocket
from ludus.distributed.learners.listener import JobLearnerListener, connect
from ludus.distributed.learners.rank import HELLO
from ludus.errors import UsageError, WorkerFailed
from ludus.experiments import runner
from ludus.experiments.resolve import resolve
from ludus.experiments.runs.run_dir import Run
from ludus.launch.job import Job, wait
from ludus.launch.local import LocalOrchestrator
from ludus.launch.planner import NodeRequest, plan_job
from ludus.process.job_env import LEARNERS, PORTS, JobEnv, find_free_ports
from ludus.tuning.trial import TrialRun
from tests.experiments import small

STEPS = 4096
TOKEN = "0123456789abcdef" * 2


def trained(tmp_path: Path, name: str, learner_nodes: int) -> tuple[list[dict[str, float]], list[str]]:
    """Rows of its metrics, and the log of its remote learner."""
    words = ["train", "CartPole-v1", "--num-workers", "0", "--seed", "3", "--stop", f"timesteps_total={STEPS}", "--quiet"]
    words += ["--local-dir", str(tmp_path / name), "--set", "config.torch_threads=1", "--set", "config.learner_threads=1"]
    job = plan_job(words, environ={}, nodes=NodeRequest(2, learners=learner_nodes, wait_s=60.0)).job
    without_ray = Job(**{**vars(job), "roles": tuple(role for role in job.roles if role.name != "ray"), "ray": 0})
    with LocalOrchestrator(tmp_path / "state", attached=True) as local:
        job_id = local.submit(replace(without_ray, name=name))
        status = wait(local, job_id, 120)
        log_lines = list(local.logs(job_id))
        assert (status.state, status.exit_code) == ("succeeded", 0), log_lines
    (metrics,) = (tmp_path / name).rglob("metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()], log_lines


def test_learners_on_two_nodes_learn_what_one_learns(tmp_path: Path) -> None:
    alone, _ = trained(tmp_path, "alone", 1)
    shared, log_lines = trained(tmp_path, "shared", 2)
    counts = [[row["learner/learners"] for row in rows if "learner/learners" in row] for rows in (alone, shared)]
    assert counts[0] == []
    assert set(counts[1]) == {2.0}
    scores = [[row["evaluation/return_mean"] for row in rows if "evaluation/return_mean" in row] for rows in (alone, shared)]
    assert scores[0] == scores[1] != [], "gradients that were summed in two places make another policy"
    assert any(line.startswith("learner-0:") for line in log_lines), log_lines


# -- waiting for them ---------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> JobEnv:
    """As its main role sees it, with learners on two more nodes."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    port = find_free_ports(str(tmp_path), PORTS, address="127.0.0.1")
    return JobEnv(("127.0.0.1", "127.0.0.2", "127.0.0.3"), 0, port, token, wait_s=0.5, learners=2)


@pytest.fixture
def entrance(job: JobEnv) -> Iterator[JobLearnerListener]:
    with contextlib.closing(JobLearnerListener(job, "Look there.")) as one:
        yield one


class Callers:
    """Far learners, as far as they come: each in a thread, since the entrance hears them only while it waits."""

    def __init__(self, address: str, token: bytes) -> None:
        self._address, self._token = address, token
        self._threads: list[threading.Thread] = []
        self.links: list[FrameSocket] = []

    def come(self, *, first_leaving: bool = False) -> None:
        self._threads.append(threading.Thread(target=self._enter, args=(first_leaving,)))
        self._threads[-1].start()

    def _enter(self, first_leaving: bool) -> None:
        if first_leaving:
            connect(self._address, self._token).close()
        self.links.append(connect(self._address, self._token))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(30.0)

    def close(self) -> None:
        self.join()
        for link in self.links:
            link.close()


@pytest.fixture
def callers(job: JobEnv, entrance: JobLearnerListener) -> Iterator[Callers]:
    with contextlib.closing(Callers(entrance.address, job.token())) as them:
        yield them


def test_learners_that_do_not_come_are_named_in_an_error_that_is_final(entrance: JobLearnerListener, callers: Callers) -> None:
    callers.come()
    found = r"1 of 2 learners .* within 1 s: 1 of 2 are connected \(the learner at 127\.0\.0\.1\); .*127\.0\.0\.2, 127\.0\.0\.3.* Look there"
    with pytest.raises(WorkerFailed, match=found) as error:
        entrance.accept_rank(1.0)
    assert (error.value.final, error.value.exit_code) == (True, 1)


def test_a_learner_that_leaves_while_others_are_awaited_has_not_come(entrance: JobLearnerListener, callers: Callers) -> None:
    callers.come(first_leaving=True)
    with pytest.raises(WorkerFailed, match="1 of 2 are connected"):
        entrance.accept_rank(1.0)


def test_all_connected_learners_are_accepted(entrance: JobLearnerListener, callers: Callers) -> None:
    callers.come()
    callers.come()
    with contextlib.closing(entrance.accept_rank(30.0)) as one, contextlib.closing(entrance.accept_rank(30.0)) as two:
        callers.join()
        for number, link in enumerate(callers.links):
            link.send({"op": HELLO, "number": number})
        assert {channel.receive(HELLO)[0]["number"] for channel in (one, two)} == {0, 1}


def test_a_place_that_is_taken_is_an_error_that_may_pass(job: JobEnv, entrance: JobLearnerListener) -> None:
    with pytest.raises(UsageError, match=rf"at 127\.0\.0\.1:{job.port + 2}: .*in use") as error:
        JobLearnerListener(job, "")
    assert not error.value.final


# -- which runs use them ------------------------------------------------------------------------------------------------


@pytest.fixture
def as_main(job: JobEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in job.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("as_main")
def test_a_training_with_learners_elsewhere_has_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve(small.data())
    assert runner.needs_supervisor(resolved)
    monkeypatch.delenv(LEARNERS)
    assert not runner.needs_supervisor(resolved)


@pytest.mark.usefixtures("as_main")
def test_the_learner_of_a_driver_waits_for_the_others_and_names_the_missing(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"2 of 2 learners of other machines did not come .*--resume"):
        runner.train(small.data(), project=tmp_path, trial="run")
    meta = Run.open(tmp_path / "run").meta()
    assert (meta["status"], meta.get("learner_restarts", 0)) == ("failed", 0)


@pytest.mark.usefixtures("as_main")
def test_a_trial_of_a_sweep_does_not_wait_for_them(tmp_path: Path) -> None:
    with contextlib.closing(TrialRun(tmp_path / "trial", small.data(1), report_s=0.0)) as attempt:
        assert LEARNERS not in os.environ, "what it starts would wait for them"
        assert attempt.advance()["timesteps"] > 0
    assert os.environ[LEARNERS] == "2"
