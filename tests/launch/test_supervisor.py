"""The supervisor where a queue runs it: in the foreground, with other machines to reach, and not always to the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ludus.errors import Damaged
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, ProcessStatus, Role
from ludus.launch.job_dir import JobDirectory
from ludus.process.job_env import Surroundings
from tests.waiting import wait_until

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
        place.create({job_dir.JOB: job_dir.write_job(job)}, JobStatus("job", job.name, "pending", processes=waiting))
        return place

    def start(self, place: JobDirectory, **environment: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "ludus.launch.supervisor", str(place.path)]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment}
        process = subprocess.Popen(
            [*words, "--stay", "--reach", "tests.launch.remote_starters:Pretended"], env=env, cwd=self.path
        )
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
    assert not (place.path / job_dir.TOKEN).exists()


def test_secrets_come_from_a_file_that_goes_with_the_job(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", '[ "$PASS" = word ] && stat -c %a "$LUDUS_JOB_TOKEN_FILE"'),), "main"))
    place.write_secrets({"PASS": "word"})
    assert (place.path / job_dir.SECRETS).stat().st_mode & 0o777 == 0o600
    assert queue.start(place).wait(_WAIT_S) == 0
    assert place.log("main-0").read_text() == "600\n"
    assert not (place.path / job_dir.SECRETS).exists()


def test_when_time_is_nearly_up_the_job_is_ended_and_queued_again_and_goes_on(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES),), "main"))
    place.write_secrets({"PASS": "word"})
    first = queue.start(place)
    wait_until((queue.path / "lives").exists)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(_WAIT_S) == 0
    status = place.read().status
    assert (status.state, status.exit_code, status.over) == ("pending", None, False)
    assert "nearly up" in status.reason
    assert (place.path / "requeued").read_text() == "pending\n", "the state is said before the queue ends us"
    assert (queue.path / "saved").read_text() == "saved\n"
    assert place.read_secrets() == {"PASS": "word"}

    second = queue.start(place)
    wait_until(lambda: (queue.path / "lives").read_text().count("life") == 2)
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
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(_WAIT_S) == 0
    assert place.read().status.state == "succeeded"
    assert not (place.path / "requeued").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_what_serves_others_ends_well_when_it_is_asked_to_and_goes_on_all_the_same(queue: Queue, number: signal.Signals) -> None:
    place = queue.prepare(Job("trial", (replace(sh("main", LIVES.replace("130", "0")), restart="on-failure"),), "main"))
    place.write_secrets({"PASS": "word"})
    process = queue.start(place)
    wait_until((queue.path / "lives").exists)
    process.send_signal(number)
    assert process.wait(_WAIT_S) == 0
    assert place.read().status.state == "pending"
    assert (place.path / "requeued").exists() == (number == signal.SIGUSR1), "a queue that ends it starts it again by itself"
    assert place.read_secrets() == {"PASS": "word"}


def test_a_queue_that_does_not_take_it_again_makes_it_fail(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES),), "main"))
    process = queue.start(place, REQUEUE="Job is not requeueable")
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(_WAIT_S) == 130
    status = place.read().status
    assert (status.state, status.exit_code) == ("failed", 130)
    assert "not requeueable" in status.reason


def test_what_the_queue_ends_is_not_cancelled(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES),), "main"))
    process = queue.start(place)
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 0
    status = place.read().status
    assert (status.state, status.over) == ("pending", False)
    assert "queue" in status.reason
    assert not (place.path / "requeued").exists()


@pytest.mark.parametrize("end", ["exit 130", "kill -TERM $$"])
def test_a_queue_that_ends_all_processes_may_be_heard_by_main_first(queue: Queue, end: str) -> None:
    place = queue.prepare(Job("trial", (sh("main", end),), "main"))
    place.write_secrets({"PASS": "word"})
    process = queue.start(place)
    wait_until(lambda: place.log("supervisor").exists() and "main-0 ended" in place.log("supervisor").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 0
    assert place.read().status.state == "pending"
    assert place.read_secrets() == {"PASS": "word"}


def test_a_cancel_between_the_last_warning_and_the_end_is_heeded(queue: Queue) -> None:
    slow = "echo life >> lives; trap 'echo ending > ending; while [ ! -e go ]; do sleep 0.02; done; exit 130' TERM; while :; do sleep 0.05; done"
    place = queue.prepare(Job("trial", (sh("main", slow),), "main"))
    process = queue.start(place)
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    wait_until((queue.path / "ending").exists)
    place.mark_cancelled()
    process.send_signal(signal.SIGTERM)
    (queue.path / "go").touch()
    assert process.wait(_WAIT_S) == 130
    assert (place.read().status.state, place.read().status.exit_code) == ("cancelled", 130)
    assert not (place.path / "requeued").exists()


def test_what_is_cancelled_before_it_is_started_never_starts(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", "touch began"),), "main"))
    place.mark_cancelled()
    queue.start(place).wait(_WAIT_S)
    assert place.read().status.state == "cancelled"
    assert not (queue.path / "began").exists()


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGTERM, "pending"), (signal.SIGUSR1, "pending"), (signal.SIGQUIT, "pending")]
)
def test_a_signal_while_it_is_being_set_up_waits_until_it_is_understood(queue: Queue, number: signal.Signals, state: str) -> None:
    place = queue.prepare(Job("trial", (sh("main", "touch began; exec sleep 600"),), "main"))
    place.write_secrets({"PASS": "word"})
    process = queue.start(place, SLOW="1")
    wait_until((queue.path / "job" / "setting-up").exists)
    process.send_signal(number)
    (queue.path / "job" / "go-on").touch()
    assert process.wait(_WAIT_S) == 0
    assert place.read().status.state == state
    assert place.read_secrets() == {"PASS": "word"}
    assert not (queue.path / "began").exists()


def test_in_an_allocation_whoever_ends_it_cancels_it(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", LIVES),), "main"))
    process = queue.start(place, ALLOCATION="1")
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 130
    assert place.read().status.state == "cancelled"


def test_a_record_that_was_damaged_is_written_again(queue: Queue) -> None:
    place = queue.prepare(Job("trial", (sh("main", "touch began; until [ -e go ]; do sleep 0.05; done"),), "main"))
    process = queue.start(place)
    wait_until((queue.path / "began").exists)
    (place.path / job_dir.STATUS).write_bytes(b"\xff\x00 rubbish")
    with pytest.raises(Damaged):
        place.read()

    def is_whole() -> bool:
        with contextlib.suppress(Damaged):
            return place.read().status.state == "running"
        return False

    wait_until(is_whole)
    (queue.path / "go").touch()
    assert process.wait(_WAIT_S) == 0
    assert place.read().status.state == "succeeded"


def test_what_a_killed_process_left_in_another_session_does_not_add_up(queue: Queue) -> None:
    leaves = "setsid sh -c 'echo $$ >> strays; exec sleep 600' & until [ -s strays ] && [ $(wc -l < strays) -ge $(wc -l < lives) ]; do sleep 0.02; done"
    dies = f"echo life >> lives; {leaves}; [ $(wc -l < lives) -ge 3 ] && touch third; kill -9 $$"
    actor = Role("actor", ("sh", "-c", dies), restart="always")
    kept = sh("kept", "setsid sleep 600 & echo $! > kept-child; exec sleep 600")
    place = queue.prepare(Job("trial", (kept, actor, sh("main", "until [ -e over ]; do sleep 0.05; done")), "main", grace_s=1.0))
    process = queue.start(place)
    wait_until((queue.path / "third").exists)
    strays = [int(word) for word in (queue.path / "strays").read_text().split()]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in strays[:3]))
    assert Path(f"/proc/{(queue.path / 'kept-child').read_text().strip()}").exists(), "those of others are left alone"
    (queue.path / "over").touch()
    assert process.wait(_WAIT_S) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk that is full is made by root")
def test_on_a_full_disk_the_last_word_is_written_in_the_place_of_the_one_before(queue: Queue, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    try:
        small = Queue(disk)
        place = small.prepare(
            Job("trial", (sh("main", f"touch {tmp_path}/began; until [ -e {tmp_path}/go ]; do sleep 0.05; done"),), "main")
        )
        process = small.start(place)
        wait_until((tmp_path / "began").exists)
        wait_until(lambda: place.read().status.state == "running")
        with contextlib.suppress(OSError), open(disk / "rubbish", "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        (tmp_path / "go").touch()
        assert process.wait(_WAIT_S) == 0
        assert (place.read().status.state, place.read().status.exit_code) == ("succeeded", 0)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


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
    wait_until(lambda: (queue.path / "pid").exists() and bool((queue.path / "pid").read_text().strip()))
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
