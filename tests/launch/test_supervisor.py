"""The supervisor as a batch queue runs it: in the foreground, with remote nodes, interrupted and restarted."""

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
from ludus.process.job_env import JobEnv
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
_WAIT_S = 30.0


@dataclass
class Queue:
    """Starts the supervisor of a job as a batch script would."""

    path: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def prepare(self, job: Job) -> JobDirectory:
        directory = JobDirectory(self.path / "job")
        waiting = tuple(ProcessStatus(role.name, index, "pending") for role in job.roles for index in range(role.count))
        directory.create({job_dir.JOB: job_dir.job_to_json(job)}, JobStatus("job", job.name, "pending", processes=waiting))
        return directory

    def start(self, directory: JobDirectory, **environment: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "ludus.launch.supervisor", str(directory.path)]
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment}
        process = subprocess.Popen(
            [*words, "--stay", "--starter", "tests.launch.remote_starters:FakeStarter"], env=env, cwd=self.path
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


HEARTBEAT = "echo life >> lives; trap 'echo saved >> saved; exit 130' TERM; while :; do sleep 0.05; done"


def test_processes_run_on_their_nodes_with_the_job_environment(queue: Queue) -> None:
    said = 'echo "$LUDUS_JOB_NODE $FAR $LUDUS_JOB_NODES $LUDUS_JOB_PORT $LUDUS_JOB_RAY" > $LUDUS_JOB_ROLE-$LUDUS_JOB_INDEX'
    far = sh("far", said, 3, (0, 1, 2))
    over = sh("main", f"{said}; until [ -s far-0 ] && [ -s far-1 ] && [ -s far-2 ]; do sleep 0.05; done; exit 3")
    directory = queue.prepare(Job("trial", (far, over), "main", nodes=3, ray=2))
    assert queue.start(directory, LUDUS_JOB_RAY="7").wait(_WAIT_S) == 3
    nodes = "10.0.0.1,10.0.0.2,10.0.0.3 12345 2"
    texts = [(queue.path / name).read_text().strip() for name in ("main-0", "far-0", "far-1", "far-2")]
    assert texts == [f"0  {nodes}", f"0  {nodes}", f"1 n2 {nodes}", f"2 n3 {nodes}"]
    status = directory.read().status
    assert (status.state, status.exit_code) == ("failed", 3)
    assert [process.host for process in status.of("far")] == ["n1", "n2", "n3"]
    assert not (directory.path / job_dir.TOKEN).exists()


def test_secrets_are_read_from_a_file_that_is_deleted_with_the_job(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", '[ "$PASS" = word ] && stat -c %a "$LUDUS_JOB_TOKEN_FILE"'),), "main"))
    directory.write_secrets({"PASS": "word"})
    assert (directory.path / job_dir.SECRETS).stat().st_mode & 0o777 == 0o600
    assert queue.start(directory).wait(_WAIT_S) == 0
    assert directory.log("main-0").read_text() == "600\n"
    assert not (directory.path / job_dir.SECRETS).exists()


def test_before_its_time_limit_a_job_is_stopped_and_requeued(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", HEARTBEAT),), "main"))
    directory.write_secrets({"PASS": "word"})
    first = queue.start(directory)
    wait_until((queue.path / "lives").exists)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(_WAIT_S) == 0
    status = directory.read().status
    assert (status.state, status.exit_code, status.over) == ("pending", None, False)
    assert "nearly reached" in status.reason
    assert (directory.path / "requeued").read_text() == "pending\n", "the state is written before the requeue"
    assert (queue.path / "saved").read_text() == "saved\n"
    assert directory.read_secrets() == {"PASS": "word"}

    second = queue.start(directory)
    wait_until(lambda: (queue.path / "lives").read_text().count("life") == 2)
    status = directory.read().status
    assert (status.state, status.reason, status.of("main")[0].restarts) == ("running", "", 1)
    directory.request_cancel()
    second.send_signal(signal.SIGTERM)
    assert second.wait(_WAIT_S) == 130
    assert directory.read().status.state == "cancelled"
    assert directory.read_secrets() == {}


def test_a_finished_job_is_not_requeued(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", HEARTBEAT.replace("130", "0")),), "main"))
    process = queue.start(directory)
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(_WAIT_S) == 0
    assert directory.read().status.state == "succeeded"
    assert not (directory.path / "requeued").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_service_that_exits_with_0_on_request_is_restarted_by_the_queue(queue: Queue, number: signal.Signals) -> None:
    directory = queue.prepare(Job("trial", (replace(sh("main", HEARTBEAT.replace("130", "0")), restart="on-failure"),), "main"))
    directory.write_secrets({"PASS": "word"})
    process = queue.start(directory)
    wait_until((queue.path / "lives").exists)
    process.send_signal(number)
    assert process.wait(_WAIT_S) == 0
    assert directory.read().status.state == "pending"
    assert (directory.path / "requeued").exists() == (number == signal.SIGUSR1), "the queue that stopped it restarts it"
    assert directory.read_secrets() == {"PASS": "word"}


def test_a_failed_requeue_fails_the_job(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", HEARTBEAT),), "main"))
    process = queue.start(directory, REQUEUE="Job is not requeueable")
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(_WAIT_S) == 130
    status = directory.read().status
    assert (status.state, status.exit_code) == ("failed", 130)
    assert "not requeueable" in status.reason


def test_a_job_stopped_by_the_queue_is_pending_and_not_cancelled(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", HEARTBEAT),), "main"))
    process = queue.start(directory)
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 0
    status = directory.read().status
    assert (status.state, status.over) == ("pending", False)
    assert "queue" in status.reason
    assert not (directory.path / "requeued").exists()


@pytest.mark.parametrize("end", ["exit 130", "kill -TERM $$"])
def test_main_may_get_the_signal_of_the_queue_first(queue: Queue, end: str) -> None:
    directory = queue.prepare(Job("trial", (sh("main", end),), "main"))
    directory.write_secrets({"PASS": "word"})
    process = queue.start(directory)
    wait_until(lambda: directory.log("supervisor").exists() and "main-0 ended" in directory.log("supervisor").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 0
    assert directory.read().status.state == "pending"
    assert directory.read_secrets() == {"PASS": "word"}


def test_a_cancel_after_the_interruption_prevents_the_requeue(queue: Queue) -> None:
    slow = "echo life >> lives; trap 'echo ending > ending; while [ ! -e go ]; do sleep 0.02; done; exit 130' TERM; while :; do sleep 0.05; done"
    directory = queue.prepare(Job("trial", (sh("main", slow),), "main"))
    process = queue.start(directory)
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGUSR1)
    wait_until((queue.path / "ending").exists)
    directory.request_cancel()
    process.send_signal(signal.SIGTERM)
    (queue.path / "go").touch()
    assert process.wait(_WAIT_S) == 130
    assert (directory.read().status.state, directory.read().status.exit_code) == ("cancelled", 130)
    assert not (directory.path / "requeued").exists()


def test_a_job_cancelled_before_its_start_never_starts(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", "touch began"),), "main"))
    directory.request_cancel()
    queue.start(directory).wait(_WAIT_S)
    assert directory.read().status.state == "cancelled"
    assert not (queue.path / "began").exists()


@pytest.mark.parametrize(
    ("number", "state"), [(signal.SIGTERM, "pending"), (signal.SIGUSR1, "pending"), (signal.SIGQUIT, "pending")]
)
def test_a_signal_during_the_set_up_is_handled_afterwards(queue: Queue, number: signal.Signals, state: str) -> None:
    directory = queue.prepare(Job("trial", (sh("main", "touch began; exec sleep 600"),), "main"))
    directory.write_secrets({"PASS": "word"})
    process = queue.start(directory, SLOW="1")
    wait_until((queue.path / "job" / "setting-up").exists)
    process.send_signal(number)
    (queue.path / "job" / "go-on").touch()
    assert process.wait(_WAIT_S) == 0
    assert directory.read().status.state == state
    assert directory.read_secrets() == {"PASS": "word"}
    assert not (queue.path / "began").exists()


def test_in_an_interactive_allocation_sigterm_cancels_the_job(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", HEARTBEAT),), "main"))
    process = queue.start(directory, ALLOCATION="1")
    wait_until((queue.path / "lives").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(_WAIT_S) == 130
    assert directory.read().status.state == "cancelled"


def test_a_damaged_record_is_rewritten(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", "touch began; until [ -e go ]; do sleep 0.05; done"),), "main"))
    process = queue.start(directory)
    wait_until((queue.path / "began").exists)
    (directory.path / job_dir.STATUS).write_bytes(b"\xff\x00 rubbish")
    with pytest.raises(Damaged):
        directory.read()

    def is_whole() -> bool:
        with contextlib.suppress(Damaged):
            return directory.read().status.state == "running"
        return False

    wait_until(is_whole)
    (queue.path / "go").touch()
    assert process.wait(_WAIT_S) == 0
    assert directory.read().status.state == "succeeded"


def test_children_of_a_killed_process_in_other_sessions_are_killed(queue: Queue) -> None:
    leaves = "setsid sh -c 'echo $$ >> strays; exec sleep 600' & until [ -s strays ] && [ $(wc -l < strays) -ge $(wc -l < lives) ]; do sleep 0.02; done"
    dies = f"echo life >> lives; {leaves}; [ $(wc -l < lives) -ge 3 ] && touch third; kill -9 $$"
    actor = Role("actor", ("sh", "-c", dies), restart="always")
    kept = sh("kept", "setsid sleep 600 & echo $! > kept-child; exec sleep 600")
    directory = queue.prepare(
        Job("trial", (kept, actor, sh("main", "until [ -e over ]; do sleep 0.05; done")), "main", grace_s=1.0)
    )
    process = queue.start(directory)
    wait_until((queue.path / "third").exists)
    strays = [int(word) for word in (queue.path / "strays").read_text().split()]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in strays[:3]))
    assert Path(f"/proc/{(queue.path / 'kept-child').read_text().strip()}").exists(), "children of other processes survive"
    (queue.path / "over").touch()
    assert process.wait(_WAIT_S) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_on_a_full_disk_the_final_status_overwrites_the_last_one(queue: Queue, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=False).returncode != 0:
        pytest.skip("file systems cannot be mounted here")
    try:
        small = Queue(disk)
        directory = small.prepare(
            Job("trial", (sh("main", f"touch {tmp_path}/began; until [ -e {tmp_path}/go ]; do sleep 0.05; done"),), "main")
        )
        process = small.start(directory)
        wait_until((tmp_path / "began").exists)
        wait_until(lambda: directory.read().status.state == "running")
        with contextlib.suppress(OSError), open(disk / "rubbish", "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        (tmp_path / "go").touch()
        assert process.wait(_WAIT_S) == 0
        assert (directory.read().status.state, directory.read().status.exit_code) == ("succeeded", 0)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_the_end_of_stdin_ends_a_remote_process(queue: Queue) -> None:
    far = sh("far", "trap '' TERM; echo begun > begun; cat; echo ended > ended", at=(1,))
    directory = queue.prepare(
        Job("trial", (far, sh("main", "until [ -s begun ]; do sleep 0.05; done")), "main", nodes=2, grace_s=0.2)
    )
    assert queue.start(directory).wait(_WAIT_S) == 0
    assert (queue.path / "ended").read_text() == "ended\n"
    assert directory.read().status.of("far")[0].exit_code == 0


def test_a_killed_supervisor_leaves_no_process_and_a_failed_status(queue: Queue) -> None:
    directory = queue.prepare(Job("trial", (sh("main", "echo $$ > pid; exec sleep 600"),), "main"))
    guard = queue.start(directory)
    wait_until(lambda: (queue.path / "pid").exists() and bool((queue.path / "pid").read_text().strip()))
    supervisor = directory.read().supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    assert guard.wait(_WAIT_S) == 137
    assert not Path(f"/proc/{(queue.path / 'pid').read_text().strip()}").exists()
    assert directory.read().status.state == "failed"


def test_a_log_elsewhere_is_linked_into_the_job_directory(queue: Queue) -> None:
    log = queue.path / "logs" / "actor" / "actor_{index}.log"
    role = Role("actor", ("sh", "-c", "echo $LUDUS_JOB_INDEX; touch said-$LUDUS_JOB_INDEX"), 2, log=str(log))
    main = sh("main", "until [ -e said-0 ] && [ -e said-1 ]; do sleep 0.05; done")
    directory = queue.prepare(Job("trial", (role, main), "main"))
    assert queue.start(directory).wait(_WAIT_S) == 0
    for index in range(2):
        assert Path(str(log).replace("{index}", str(index))).read_text() == f"{index}\n"
        assert directory.log(f"actor-{index}").read_text() == f"{index}\n"


@pytest.mark.parametrize(
    "wrong",
    [{"LUDUS_JOB_NODES": "a,,b"}, {"LUDUS_JOB_NODE": "3"}, {"LUDUS_JOB_PORT": "x"}, {"LUDUS_JOB_PORT": "70000"}, {"LUDUS_JOB_RAY": "4"}],
)  # fmt: skip
def test_inconsistent_job_variables_are_refused(wrong: dict[str, str]) -> None:
    right = JobEnv(("a", "b"), 1, 4000, Path("/t"), 2).environment()
    assert JobEnv.from_environ(right) == JobEnv(("a", "b"), 1, 4000, Path("/t"), 2)
    assert JobEnv.from_environ({}) is None
    with pytest.raises(Exception, match="not those of a job"):
        JobEnv.from_environ(right | wrong)
