"""The supervisor where a queue runs it: in the foreground, with other machines to reach, and not always to the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ludus.cluster import record
from ludus.cluster.cluster import Job, JobStatus, ProcessStatus, Role
from ludus.cluster.record import JobDirectory
from ludus.runtime.surroundings import Surroundings

ROOT = Path(__file__).parents[2]
_WAIT_S = 30.0


@dataclass
class Queue:
    """Starts the supervisor of a job as a batch script would."""

    path: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def prepare(self, job: Job) -> JobDirectory:
        place = JobDirectory(self.path / "job")
        waiting = tuple(ProcessStatus(role.name, index, "pending") for role in job.roles for index in range(role.count))
        place.create({record.JOB: record.write_job(job)}, JobStatus("job", job.name, "pending", processes=waiting))
        return place

    def start(self, place: JobDirectory, **environment: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "ludus.cluster.supervisor", str(place.path)]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment}
        process = subprocess.Popen([*words, "--stay", "--reach", "tests.cluster.reaches:Pretended"], env=env, cwd=self.path)
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGQUIT)
            process.wait(_WAIT_S)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with contextlib.closing(Queue(tmp_path)) as made:
        yield made


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def sh(name: str, script: str, count: int = 1, at: tuple[int, ...] = ()) -> Role:
    return Role(name, ("sh", "-c", script), count, at=at)


LIVES = "echo life >> lives; trap 'echo saved >> saved; exit 130' TERM; while :; do sleep 0.05; done"


def test_processes_know_their_node_and_run_where_it_is(queue: Queue) -> None:
    said = 'echo "$LUDUS_JOB_NODE $FAR $LUDUS_JOB_NODES $LUDUS_JOB_PORT $LUDUS_JOB_RAY" > $LUDUS_JOB_ROLE-$LUDUS_JOB_INDEX'
    far = sh("far", said, 3, (0, 1, 2))
    over = sh("main", f"{said}; until [ -s far-0 ] && [ -s far-1 ] && [ -s far-2 ]; do sleep 0.05; done; exit 3")
    place = queue.prepare(Job("trial", (far, over), "main", nodes=3, ray=2))
    assert queue.start(place, LUDUS_JOB_RAY="7").wait(_WAIT_S) == 3
    nodes = "10.0.0.1,10.0.0.2,10.0.0.3 12345 2"
    texts = [(queue.path / name).read_text().strip() for name in ("main-0", "far-0", "far-1", "far-2")]
    assert texts == [f"0  {nodes}", f"0  {nodes}", f"1 n2 {nodes}", f"2 n3 {nodes}"]
    status = place.read().status
    assert (status.state, status.exit_code) == ("failed", 3)
    assert [process.host for process in status.of("far")] == ["n1", "n2", "n3"]
    assert not (place.path / record.TOKEN).exists()


def test_secrets_come_from_a_file_that_goes_with_the_job(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", '[ "$PASS" = word ] && stat -c %a "$LUDUS_JOB_TOKEN_FILE"'),), "main"))
    place.write_secrets({"PASS": "word"})
    assert (place.path / record.SECRETS).stat().st_mode & 0o777 == 0o600
    assert queue.start(place).wait(_WAIT_S) == 0
    assert place.log("main-0").read_text() == "600\n"
    assert not (place.path / record.SECRETS).exists()


def test_when_time_is_nearly_up_the_job_is_ended_and_queued_again_and_goes_on(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES),), "main"))
    place.write_secrets({"PASS": "word"})
    first = queue.start(place)
    until((queue.path / "lives").exists)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(_WAIT_S) == 0
    status = place.read().status
    assert (status.state, status.exit_code, status.over) == ("pending", None, False)
    assert "nearly up" in status.reason
    assert (place.path / "requeued").read_text() == "pending\n", "the state is said before the queue ends us"
    assert (queue.path / "saved").read_text() == "saved\n"
    assert place.read_secrets() == {"PASS": "word"}

    second = queue.start(place)
    until(lambda: (queue.path / "lives").read_text().count("life") == 2)
    status = place.read().status
    assert (status.state, status.reason, status.of("main")[0].restarts) == ("running", "", 1)
    place.mark_cancelled()
    second.send_signal(signal.SIGTERM)
    assert second.wait(_WAIT_S) == 130
    assert place.read().status.state == "cancelled"
    assert place.read_secrets() == {}


def test_a_job_that_is_done_when_its_time_is_up_is_not_queued_again(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES.replace("130", "0")),), "main"))
    process = queue.start(place)
    until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(_WAIT_S) == 0
    assert place.read().status.state == "succeeded"
    assert not (place.path / "requeued").exists()


def test_a_queue_that_does_not_take_it_again_makes_it_fail(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES),), "main"))
    process = queue.start(place, REQUEUE="Job is not requeueable")
    until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(_WAIT_S) == 130
    status = place.read().status
    assert (status.state, status.exit_code) == ("failed", 130)
    assert "not requeueable" in status.reason


def test_what_the_queue_ends_is_not_cancelled(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES),), "main"))
    process = queue.start(place)
    until((queue.path / "lives").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 0
    status = place.read().status
    assert (status.state, status.over) == ("pending", False)
    assert "queue" in status.reason
    assert not (place.path / "requeued").exists()


def test_a_process_elsewhere_hears_of_its_end_by_its_input(queue: Queue) -> None:
    far = sh("far", "trap '' TERM; echo begun > begun; cat; echo ended > ended", at=(1,))
    place = queue.prepare(
        Job("trial", (far, sh("main", "until [ -s begun ]; do sleep 0.05; done")), "main", nodes=2, grace_s=0.2)
    )
    assert queue.start(place).wait(_WAIT_S) == 0
    assert (queue.path / "ended").read_text() == "ended\n"
    assert place.read().status.of("far")[0].exit_code == 0


def test_the_supervisor_killed_leaves_nothing_and_says_so(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", "echo $$ > pid; exec sleep 600"),), "main"))
    keeper = queue.start(place)
    until(lambda: (queue.path / "pid").exists() and bool((queue.path / "pid").read_text().strip()))
    watcher = place.read().supervisor
    assert watcher is not None
    os.kill(watcher.pid, signal.SIGKILL)
    assert keeper.wait(_WAIT_S) == 137
    assert not Path(f"/proc/{(queue.path / 'pid').read_text().strip()}").exists()
    assert place.read().status.state == "failed"


def test_a_log_may_be_elsewhere_and_is_found_in_the_job_too(queue: Queue) -> None:
    log = queue.path / "logs" / "actor" / "actor_{index}.log"
    role = Role("actor", ("sh", "-c", "echo $LUDUS_JOB_INDEX; touch said-$LUDUS_JOB_INDEX"), 2, log=str(log))
    main = sh("main", "until [ -e said-0 ] && [ -e said-1 ]; do sleep 0.05; done")
    place = queue.prepare(Job("trial", (role, main), "main"))
    assert queue.start(place).wait(_WAIT_S) == 0
    for index in range(2):
        assert Path(str(log).replace("{index}", str(index))).read_text() == f"{index}\n"
        assert place.log(f"actor-{index}").read_text() == f"{index}\n"


@pytest.mark.parametrize(
    "wrong",
    [{"LUDUS_JOB_NODES": "a,,b"}, {"LUDUS_JOB_NODE": "3"}, {"LUDUS_JOB_PORT": "x"}, {"LUDUS_JOB_PORT": "70000"}, {"LUDUS_JOB_RAY": "4"}],
)  # fmt: skip
def test_surroundings_that_make_no_sense_are_refused(wrong: dict[str, str]) -> None:
    right = Surroundings(("a", "b"), 1, 4000, Path("/t"), 2).environment()
    assert Surroundings.of(right) == Surroundings(("a", "b"), 1, 4000, Path("/t"), 2)
    assert Surroundings.of({}) is None
    with pytest.raises(Exception, match="not those of a job"):
        Surroundings.of(right | wrong)
