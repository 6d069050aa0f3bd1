"""Workers that die in every way, supervisors that are killed, scripts without a main guard: nothing leaks, nothing survives."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.errors import UsageError, WorkerFailed
from ludus.process.workers import forkserver
from ludus.process.workers import supervisor as processes
from ludus.process.workers.supervisor import ALWAYS, NEVER, Process, Supervisor, WorkerRestart
from tests.process import workers

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc and pidfd"),
]

SOON = 20.0
"""Seconds: what should take milliseconds; the machine may be busy."""


class Mail:
    """A pipe on which workers say things; `fd` goes to the worker."""

    def __init__(self) -> None:
        self._out, self.fd = os.pipe()
        self._rest = b""

    def next(self) -> Any:
        while b"\n" not in self._rest:
            assert select.select([self._out], [], [], SOON)[0], "the worker reported nothing"
            chunk = os.read(self._out, 65536)
            assert chunk, "the pipe is closed"
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        os.close(self._out)
        with contextlib.suppress(OSError):
            os.close(self.fd)


@pytest.fixture
def mail() -> Iterator[Mail]:
    with contextlib.closing(Mail()) as box:
        yield box


@pytest.fixture(scope="module")
def shared() -> Iterator[Supervisor]:
    """For tests that leave the forkserver alone; without heavy modules it starts fast."""
    with Supervisor(preload=()) as supervisor:
        yield supervisor


@pytest.fixture
def own() -> Iterator[Supervisor]:
    with Supervisor(preload=()) as supervisor:
        yield supervisor


@pytest.fixture(scope="module")
def warm() -> Iterator[Supervisor]:
    with Supervisor() as supervisor:
        yield supervisor


class History:
    """Records the states a process goes through, and lets a test wait for one of them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, process: Process) -> None:
        with self._changed:
            self.seen.append(f"{process.state} {process.incarnation}")
            self._changed.notify_all()

    def wait_for(self, state: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: state in self.seen, SOON), f"{state!r} did not come: {self.seen}"


def wait_gone(*pids: int) -> None:
    """Until these processes are dead, reaped or not."""
    deadline = time.monotonic() + SOON
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                assert select.select([fd], [], [], max(0, deadline - time.monotonic()))[0], f"{pid} is still alive"
            finally:
                os.close(fd)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ready_pid(process: Process) -> int:
    process.wait_ready(SOON)
    assert process.pid is not None
    return process.pid


def forkserver_of(worker: int) -> int:
    return int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])


# ---------------------------------------------------------------- the policy


def test_delays_double_up_to_the_maximum() -> None:
    policy = WorkerRestart(limit=None, backoff_s=0.1, max_backoff_s=1.0)
    assert [policy.delay(n) for n in range(1, 7)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert policy.delay(10_000) == 1.0


def test_delays_begin_anew_after_a_long_life_but_the_limit_counts_all_deaths() -> None:
    assert WorkerRestart(limit=None, backoff_s=0.1).delay(9, in_a_row=1) == pytest.approx(0.1)
    assert WorkerRestart(limit=2).delay(2, in_a_row=1) is not None
    assert WorkerRestart(limit=2).delay(3, in_a_row=1) is None


def test_never_and_always_are_what_they_say() -> None:
    assert NEVER.delay(1) is None
    assert ALWAYS.delay(1_000_000) == 5.0


# ---------------------------------------------------------------- a life


def test_the_target_gets_its_context_and_its_arguments(shared: Supervisor, mail: Mail) -> None:
    process = shared.start("one", workers.introduce, 1, "two", fds=[mail.fd], three=[3])
    assert mail.next() == ["one", 1, 1, [1, "two"], {"three": [3]}]
    assert process.wait(SOON)
    assert (process.state, process.error, process.pid) == ("done", "", None)


def test_environment_directory_and_path_of_the_moment_of_start_go_along(
    shared: Supervisor, mail: Mail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("LUDUS_TEST", "späte Änderung")
    monkeypatch.setattr(sys, "path", [*sys.path, "/somewhere/else"])
    monkeypatch.chdir(tmp_path)
    shared.start("looking", workers.look_around, fds=[mail.fd])
    assert mail.next() == [str(tmp_path), "späte Änderung", "PASSIVE", "/somewhere/else"]


def test_a_warm_worker_has_its_own_random_numbers_and_its_threads(warm: Supervisor, mail: Mail) -> None:
    for name in ("a", "b"):
        warm.start(name, workers.throw_dice, fds=[mail.fd])
    first, second = mail.next(), mail.next()
    assert all(one != other for one, other in zip(first, second, strict=True))
    warm.start("c", workers.multiply, fds=[mail.fd])
    assert mail.next() == [400.0**3, 400.0**3]


def test_the_forkserver_has_one_thread_although_it_has_imported_numpy_and_torch(warm: Supervisor) -> None:
    process = warm.start("thread", workers.serve)
    server = forkserver_of(ready_pid(process))
    assert "libtorch" in Path(f"/proc/{server}/maps").read_text()
    assert len(os.listdir(f"/proc/{server}/task")) == 1
    process.stop()


def test_a_preload_that_cannot_be_imported_is_skipped(mail: Mail) -> None:
    with Supervisor(preload=["no_such_module", "json"]) as supervisor:
        supervisor.start("one", workers.introduce, fds=[mail.fd])
        assert mail.next()[0] == "one"


def test_a_preload_that_starts_threads_is_complained_about(
    tmp_path: Path, mail: Mail, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "threaded_import.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for preload, complaint in ((["numpy"], ""), (["numpy", "threaded_import"], "a preloaded module runs 1 threads;")):
        with Supervisor(preload=preload) as supervisor:
            supervisor.start("one", workers.introduce, fds=[mail.fd])
            mail.next()
        assert complaint in capfd.readouterr().err if complaint else not capfd.readouterr().err


def test_a_worker_holds_its_own_descriptors_only_and_hands_none_to_programs(shared: Supervisor, mail: Mail) -> None:
    neighbour = shared.start("neighbour", workers.serve, fds=[mail.fd])
    neighbour.wait_ready(SOON)
    shared.start("holding", workers.descriptors, fds=[mail.fd])
    held = mail.next()
    kinds = sorted(name.partition(":")[0] for name, _ in held.values())
    assert kinds == ["/memfd", "pipe", "pipe"], held  # the page for its beats, the pipe of its supervisor, the one of the test
    assert not any(inheritable for _, inheritable in held.values()), held
    neighbour.stop()


def test_names_count_their_incarnations_also_over_separate_starts(shared: Supervisor, mail: Mail) -> None:
    for expected in (1, 2):
        process = shared.start("again", workers.introduce, fds=[mail.fd])
        assert mail.next()[1] == expected == process.incarnation
        assert process.wait(SOON)


def test_twenty_workers_start_at_once(own: Supervisor) -> None:
    many = [own.start(f"w{i}", workers.serve) for i in range(20)]
    pids = {ready_pid(process) for process in many}
    assert len(pids) == 20
    own.close()
    assert {process.state for process in many} == {"stopped"}
    assert not any(alive(pid) for pid in pids)


def test_start_works_in_a_thread_that_ends(shared: Supervisor) -> None:
    started: list[Process] = []
    thread = threading.Thread(target=lambda: started.append(shared.start("threaded", workers.serve)))
    thread.start()
    thread.join()
    pid = ready_pid(started[0])
    assert not started[0].wait(0.1)
    assert alive(pid)
    started[0].stop()


def test_fifty_starts_and_stops_leave_no_descriptor_and_no_zombie(own: Supervisor, mail: Mail) -> None:
    anchor = own.start("anchor", workers.serve)
    server = forkserver_of(ready_pid(anchor))

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server}/fd"))

    gc.collect()  # what earlier tests have left is not ours
    before = count()
    for i in range(50):
        process = own.start("cycle", workers.serve if i % 2 else workers.introduce, fds=[mail.fd])
        if i % 2:
            process.wait_ready(SOON)
        process.stop()
    after = count()
    assert (after[0] <= before[0], after[1] <= before[1]) == (True, True), (before, after)
    assert children(server) == [anchor.pid]
    own.close()
    assert not alive(server)
    assert server not in children(os.getpid())


# ---------------------------------------------------------------- a death


@pytest.mark.parametrize("ready", [False, True])
def test_the_traceback_of_a_worker_reaches_the_supervisor(shared: Supervisor, mail: Mail, ready: bool) -> None:
    process = shared.start(f"failing-{ready}", workers.fail, ready=ready, fds=[mail.fd])
    assert process.wait(SOON)
    assert process.state == "failed"
    assert process.error.startswith("Traceback (most recent call last):\n")
    assert process.error.endswith("ZeroDivisionError: the dice have no sides\n")
    assert "forkserver.py" not in process.error
    with pytest.raises(WorkerFailed, match=f"'failing-{ready}' failed: Traceback"):
        process.wait_ready(SOON)


def test_a_failed_worker_does_not_wait_for_its_threads(shared: Supervisor) -> None:
    process = shared.start("threads", workers.fail_with_a_thread)
    assert process.wait(SOON)
    assert process.state == "failed"


@pytest.mark.parametrize(
    ("how", "code", "state", "error"),
    [
        ("exit", 0, "done", ""),
        ("exit", 3, "failed", "exit code 3"),
        ("exit", "no dice", "failed", "no dice"),
        ("_exit", 4, "failed", "exit code 4"),
    ],
)
def test_how_a_worker_left_is_known(shared: Supervisor, how: str, code: int | str, state: str, error: str) -> None:
    process = shared.start("leaving", workers.leave, how, code)
    with pytest.raises(WorkerFailed, match="'leaving'"):
        process.wait_ready(SOON)
    assert (process.state, process.error) == (state, error)


def test_a_worker_that_is_not_ready_in_time_is_reported_and_lives_on(shared: Supervisor) -> None:
    process = shared.start("slow", time.sleep)  # called with the context: fails; the next one only waits
    with pytest.raises(WorkerFailed, match="TypeError"):
        process.wait_ready(SOON)
    process = shared.start("slow", lambda context: time.sleep(60))
    with pytest.raises(WorkerFailed, match=r"'slow' was not ready within 0.05 s \(starting\)"):
        process.wait_ready(0.05)
    assert not process.wait(0)
    process.stop()
    with pytest.raises(WorkerFailed, match="'slow' was stopped"):
        process.wait_ready(0)


def test_a_killed_worker_is_replaced_and_every_change_is_reported(shared: Supervisor, mail: Mail) -> None:
    history = History()
    process = shared.start("phoenix", workers.introduce_and_serve, restart=ALWAYS, fds=[mail.fd], on_change=history)
    mail.next()
    process.wait_ready(SOON)
    process.kill()
    history.wait_for("ready 2")
    assert mail.next()[1] == 2
    assert history.seen == ["ready 1", "waiting 1", "starting 2", "ready 2"]
    assert process.error == "killed by SIGKILL"
    process.stop()
    assert history.seen[-1] == "stopped 2"


def test_a_worker_terminated_by_another_process_is_replaced(shared: Supervisor) -> None:
    history = History()
    process = shared.start("accident", workers.serve, restart=ALWAYS, on_change=history)
    os.kill(ready_pid(process), signal.SIGTERM)
    history.wait_for("ready 2")
    assert "SIGTERM" in process.error
    process.stop()


def test_the_limit_of_replacements_holds(shared: Supervisor, mail: Mail) -> None:
    process = shared.start("limited", workers.fail, ready=True, restart=WorkerRestart(limit=2, backoff_s=0.01), fds=[mail.fd])
    assert process.wait(SOON)
    assert [mail.next(), mail.next(), mail.next()] == [1, 2, 3]
    assert (process.state, process.incarnation) == ("failed", 3)


def test_a_worker_whose_loop_is_held_is_killed_and_replaced(shared: Supervisor) -> None:
    history = History()
    process = shared.start("hung", workers.hold, incarnations=1, hang_s=0.3, restart=ALWAYS, on_change=history)
    history.wait_for("ready 2")
    assert process.error == "its loop was held for 0.3 s"
    assert not process.wait(1.0)  # the second one beats
    assert (process.state, process.incarnation) == ("ready", 2)
    process.stop()


def test_what_a_worker_has_started_ends_with_it(shared: Supervisor, mail: Mail) -> None:
    process = shared.start("launcher", workers.start_a_program, fds=[mail.fd])
    program = mail.next()
    assert alive(program)
    process.wait_ready(SOON)
    process.kill()
    wait_gone(program)


# ---------------------------------------------------------------- the end


def test_stop_is_an_order_that_a_worker_can_follow_in_its_own_way(shared: Supervisor, mail: Mail) -> None:
    process = shared.start("orderly", workers.stop_in_order, fds=[mail.fd])
    process.wait_ready(SOON)
    process.stop()
    process.stop()
    assert mail.next() == [True, ["called"]]
    assert (process.state, process.error) == ("stopped", "")


def test_stop_reaches_an_event_loop_that_sleeps(shared: Supervisor, mail: Mail) -> None:
    process = shared.start("loop", workers.stop_a_loop, fds=[mail.fd])
    process.wait_ready(SOON)
    process.stop()
    assert mail.next() == "uvloop"
    assert (process.state, process.error) == ("stopped", "")


def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(shared: Supervisor) -> None:
    process = shared.start("stubborn", workers.ignore_sigterm, restart=ALWAYS)
    pid = ready_pid(process)
    process.stop(grace_s=0.1)
    assert process.state == "stopped"
    assert "killed" in process.error
    wait_gone(pid)


def test_stop_during_the_back_off_ends_it(shared: Supervisor, mail: Mail) -> None:
    history = History()
    slowly = WorkerRestart(limit=None, backoff_s=60, max_backoff_s=60)
    process = shared.start("pausing", workers.fail, ready=True, restart=slowly, fds=[mail.fd], on_change=history)
    history.wait_for("waiting 1")
    assert process.pid is None
    process.stop()
    assert history.seen == ["ready 1", "waiting 1", "stopped 1"]


def test_stop_before_the_forkserver_is_up_starts_nothing(own: Supervisor, mail: Mail) -> None:
    process = own.start("early", workers.introduce, fds=[mail.fd])
    process.stop()
    own.start("later", workers.introduce, fds=[mail.fd])
    assert mail.next()[0] == "later"
    assert process.state == "stopped"


def test_stop_right_after_the_fork_is_not_lost(shared: Supervisor) -> None:
    """SIGTERM may come before the worker can handle it; then it must wait for the handler, not vanish."""
    for i in range(10):
        process = shared.start(f"hasty-{i}", workers.serve)
        if i % 2:
            deadline = time.monotonic() + SOON
            while process.pid is None and time.monotonic() < deadline:
                time.sleep(0)
        process.stop(grace_s=60)
        assert (process.state, process.error) == ("stopped", "")


def test_close_tells_all_workers_at_once() -> None:
    with contextlib.ExitStack() as pipes, Supervisor(preload=()) as supervisor:
        ends = [*os.pipe(), *os.pipe()]
        for fd in ends:
            pipes.callback(os.close, fd)
        one = supervisor.start("one", workers.stop_together, fds=[ends[0], ends[3]])
        two = supervisor.start("two", workers.stop_together, fds=[ends[2], ends[1]])
        one.wait_ready(SOON)
        two.wait_ready(SOON)
        supervisor.close(grace_s=SOON)
        assert [(process.state, process.error) for process in (one, two)] == [("stopped", "")] * 2


def test_close_kills_workers_that_do_not_stop_and_refuses_new_ones() -> None:
    supervisor = Supervisor(preload=())
    stubborn = [supervisor.start(f"stubborn-{i}", workers.ignore_sigterm) for i in range(3)]
    pids = [ready_pid(process) for process in stubborn]
    supervisor.close(grace_s=0.2)
    supervisor.close()
    assert {process.state for process in stubborn} == {"stopped"}
    wait_gone(*pids)
    with pytest.raises(UsageError, match="'late' cannot start: its supervisor is closed"):
        supervisor.start("late", workers.serve)


def test_a_supervisor_that_started_nothing_closes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    Supervisor().close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_on_change_may_stop_a_worker_fail_or_close(own: Supervisor) -> None:
    def disturb(process: Process) -> None:
        if process.state == "ready":
            process.stop()
        raise RuntimeError("of the user")

    process = own.start("disturbed", workers.serve, on_change=disturb)
    assert process.wait(SOON)
    assert process.state == "stopped"
    other = own.start("closing", workers.serve, on_change=lambda process: own.close())
    assert other.wait(SOON)
    own.close()


def test_a_forkserver_does_not_end_on_the_signals_that_end_programs(own: Supervisor, mail: Mail) -> None:
    process = own.start("steady", workers.serve)
    server = forkserver_of(ready_pid(process))
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(server, number)
    own.start("next", workers.introduce_and_serve, fds=[mail.fd])
    assert mail.next()[3] == server
    assert process.state == "ready"


def test_a_forkserver_without_descriptors_to_spare_fails_the_worker_and_recovers(own: Supervisor, mail: Mail) -> None:
    server = forkserver_of(ready_pid(own.start("anchor", workers.serve)))
    held, limit = len(os.listdir(f"/proc/{server}/fd")), resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (held + 5, limit[1]))
    with pytest.raises(WorkerFailed, match="could not fork: Too many open files"):
        own.start("greedy", workers.introduce, fds=[mail.fd] * 10).wait_ready(SOON)
    resource.prlimit(server, resource.RLIMIT_NOFILE, limit)
    own.start("greedy", workers.introduce, fds=[mail.fd] * 10)
    assert mail.next()[2] == 10
    assert len(os.listdir(f"/proc/{server}/fd")) == held


def test_a_forkserver_that_does_not_answer_is_replaced(own: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STUCK_S", 0.3)
    history = History()
    stopped, kept = own.start("stopped", workers.serve), own.start("kept", workers.serve, restart=ALWAYS, on_change=history)
    pids = ready_pid(stopped), ready_pid(kept)
    os.kill(forkserver_of(pids[0]), signal.SIGSTOP)
    stopped.stop(grace_s=0.1)
    assert stopped.state == "stopped"
    wait_gone(*pids)
    history.wait_for("ready 2")


# ---------------------------------------------------------------- what is asked for


def test_a_name_is_taken_while_its_worker_lives(shared: Supervisor) -> None:
    process = shared.start("taken", workers.serve)
    with pytest.raises(UsageError, match="There is a worker 'taken' already"):
        shared.start("taken", workers.serve)
    process.stop()


@pytest.mark.parametrize("name", ["", "a/b", "a\nb"])
def test_a_name_must_be_fit_for_a_file(shared: Supervisor, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a worker"):
        shared.start(name, workers.serve)


def test_descriptors_that_are_not_open_are_refused(shared: Supervisor) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match=r"The descriptors \[1, 9999999\] cannot be passed"):
        shared.start("lost", workers.serve, fds=[1, 9_999_999])
    with pytest.raises(UsageError, match="at most 250"):
        shared.start("many", workers.serve, fds=[1] * 251)
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_stay_valid_for_replacements_when_the_caller_closes_his(shared: Supervisor, mail: Mail) -> None:
    process = shared.start("heir", workers.introduce_and_serve, restart=ALWAYS, fds=[mail.fd])
    os.close(mail.fd)
    assert mail.next()[1] == 1
    process.kill()
    assert mail.next()[1] == 2
    process.stop()


def test_fifty_megabytes_go_along_also_to_the_replacement(shared: Supervisor, mail: Mail) -> None:
    data = b"a" + bytes(50_000_000) + b"z"
    process = shared.start("heavy", workers.measure, data=data, restart=ALWAYS, fds=[mail.fd])
    assert mail.next() == [1, len(data), "a", "z"]
    process.kill()
    assert mail.next() == [2, len(data), "a", "z"]
    process.stop()


def _unsendable() -> list[Any]:
    lock = threading.Lock()

    class Holder:
        def __init__(self) -> None:
            self.lock = lock

    def target(context: object) -> None:
        with lock:
            pass

    return [
        pytest.param(workers.introduce, {"lock": lock}, "lock (of type lock)", id="argument"),
        pytest.param(workers.introduce, {"config": {"a": 1, "b": [0, lock]}}, "config['b'][1] (of type lock)", id="nested"),
        pytest.param(workers.introduce, {"holder": Holder()}, "holder.lock (of type lock)", id="attribute"),
        pytest.param(target, {}, "'lock', used by the target, (of type lock)", id="closure"),
    ]


@pytest.mark.parametrize(("target", "kwargs", "culprit"), _unsendable())
def test_what_cannot_be_sent_is_named(shared: Supervisor, target: Callable[..., None], kwargs: Any, culprit: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError) as caught:
        shared.start("unsendable", target, **kwargs)
    assert caught.value.message.startswith(f"{culprit} cannot be sent to the worker 'unsendable': ")
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_received_is_an_error_of_the_worker(shared: Supervisor) -> None:
    process = shared.start("smoke", workers.introduce, workers.Unloadable())
    with pytest.raises(WorkerFailed, match="ValueError: made of smoke"):
        process.wait_ready(SOON)


def test_output_errors_and_log_lines_go_to_the_log_of_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "writer.log"
    path.parent.mkdir()
    path.write_text("before\n")
    with Supervisor(log_dir=path.parent, preload=()) as supervisor:
        process = supervisor.start("writer", workers.write_logs)
        with pytest.raises(WorkerFailed, match=f"Its log: {path}"):
            process.wait_ready(SOON)
    text = path.read_text()
    for line in (
        "before\n",
        "to standard output\n",
        "to standard error\n",
        "from a program\n",
        "ZeroDivisionError: to the end\n",
    ):
        assert text.count(line) == 1
    assert "INFO [writer] ludus.anything: to the log\n" in text


def test_a_large_log_is_put_aside_at_the_start(tmp_path: Path, mail: Mail) -> None:
    path = tmp_path / "one.log"
    path.write_bytes(b"x" * (forkserver.LOG_BYTES + 1))
    with Supervisor(log_dir=tmp_path, preload=()) as supervisor:
        assert supervisor.start("one", workers.introduce, fds=[mail.fd]).wait(SOON)
    assert path.stat().st_size == 0
    assert (tmp_path / "one.log.1").stat().st_size == forkserver.LOG_BYTES + 1


# ---------------------------------------------------------------- scripts

SCRIPT = """
import sys
print("executed", flush=True)
from ludus.process.workers.supervisor import ALWAYS, Supervisor

FACTOR = 6

class Game:
    def __init__(self, number):
        self.number = number
    def play(self):
        return self.number * FACTOR

def work(context, game):
    print(type(game).__name__, game.play(), flush=True)

supervisor = Supervisor(preload=())
process = supervisor.start("script", work, Game(7))
assert process.wait(20)
print(process.state, process.error, flush=True)
"""


@pytest.mark.parametrize("way", ["script", "module", "command", "standard input"])
def test_a_script_without_a_guard_works_and_is_executed_once(tmp_path: Path, way: str) -> None:
    (tmp_path / "unguarded.py").write_text(SCRIPT)
    arguments = {"script": ["unguarded.py"], "module": ["-m", "unguarded"], "command": ["-c", SCRIPT], "standard input": ["-"]}
    done = subprocess.run(
        [sys.executable, *arguments[way]], cwd=tmp_path, input=SCRIPT, capture_output=True, text=True, timeout=SOON, check=False
    )
    assert (done.stdout, done.stderr) == ("executed\nGame 42\ndone \n", "")


class Parent:
    """A process with a supervisor and two workers, that prints its PIDs and then what the test asks for."""

    BEGIN = """
import json, os, signal, subprocess, sys, time
from ludus.process.workers.supervisor import ALWAYS, Supervisor
from tests.process import workers
supervisor = Supervisor(preload=())
r, w = os.pipe()
one = supervisor.start("one", workers.serve, restart=ALWAYS)
two = supervisor.start("two", workers.start_a_program, fds=[w])
one.wait_ready(20), two.wait_ready(20)
program = int(os.read(r, 100))
print(json.dumps([one.pid, two.pid, program]), flush=True)
"""
    WAIT = "sys.stdin.read()\n"

    def __init__(self, then: str = WAIT) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", self.BEGIN + then],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.workers = self.read()
        self.server = forkserver_of(self.workers[0])

    def read(self) -> Any:
        assert self._popen.stdout is not None
        return json.loads(self._popen.stdout.readline())

    def finish(self) -> int:
        """Let its standard input end, and take its exit code."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        return self._popen.wait(SOON)

    def __enter__(self) -> Parent:
        return self

    def __exit__(self, *exc: object) -> None:
        self._popen.kill()
        self._popen.wait(SOON)
        for stream in (self._popen.stdin, self._popen.stdout):
            assert stream is not None
            stream.close()


def test_nothing_survives_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its processes nor its shared memory."""
    monkeypatch.setenv("LUDUS_SHM", str(tmp_path))
    scratch = "from pathlib import Path; from ludus.process.temp_dirs import TempDir; "
    with Parent(
        f"{scratch}made = TempDir(Path({str(tmp_path)!r})); print(json.dumps(made.path.name), flush=True)\n{Parent.WAIT}"
    ) as parent:
        made = parent.read()
        assert [path.name for path in tmp_path.iterdir()] == [made]
        os.kill(parent.pid, signal.SIGKILL)
        wait_gone(parent.server, *parent.workers)
    assert list(tmp_path.iterdir()) == []


def test_nothing_survives_when_parent_and_forkserver_are_killed_at_once() -> None:
    with Parent() as parent:
        for pid in (parent.pid, parent.server):
            os.kill(pid, signal.SIGKILL)
        workers_only = parent.workers[:2]
        wait_gone(parent.server, *workers_only)
        os.kill(parent.workers[2], signal.SIGKILL)  # a program that a worker executed; no process is left to end it


def test_nothing_survives_although_a_fork_and_a_program_of_the_parent_do() -> None:
    then = """
copy = os.fork()
if copy == 0:
    time.sleep(60)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
print(json.dumps([copy, child.pid]), flush=True)
"""
    with Parent(then + Parent.WAIT) as parent:
        others = parent.read()
        os.kill(parent.pid, signal.SIGKILL)
        wait_gone(parent.server, *parent.workers)
        assert all(alive(pid) for pid in others)
        for pid in others:
            os.kill(pid, signal.SIGKILL)


def test_a_parent_that_is_killed_while_the_forkserver_imports_leaves_nothing(tmp_path: Path) -> None:
    """The module that it imports lets us know, and then imports for as long as the parent lives."""
    (tmp_path / "slow_import.py").write_text(
        "import os, time\nparent = os.getppid()\nprint(os.getpid(), flush=True)\nwhile os.getppid() == parent: time.sleep(0.01)\n"
    )
    script = """
import sys
from ludus.process.workers.supervisor import Supervisor
supervisor = Supervisor(preload=["slow_import"])
supervisor.start("never", print)
sys.stdin.read()
"""
    arguments = [sys.executable, "-c", script]
    with subprocess.Popen(arguments, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        parent.kill()
        wait_gone(server)


def test_a_killed_forkserver_is_replaced_and_so_are_its_workers(own: Supervisor, mail: Mail) -> None:
    history = History()
    kept = own.start("kept", workers.introduce_and_serve, restart=ALWAYS, fds=[mail.fd], on_change=history)
    lost = own.start("lost", workers.start_a_program, fds=[mail.fd])
    pids = [ready_pid(kept), ready_pid(lost)]
    server = forkserver_of(pids[0])
    program = next(message for message in (mail.next(), mail.next()) if isinstance(message, int))
    os.kill(server, signal.SIGKILL)
    history.wait_for("ready 2")
    assert lost.wait(SOON)
    wait_gone(server, program, *pids)
    assert lost.state == "failed"
    assert lost.error == kept.error == "the forkserver died (killed by SIGKILL)"
    assert mail.next()[1] == 2
    assert forkserver_of(ready_pid(kept)) != server


def test_a_forkserver_that_cannot_start_fails_its_workers(own: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    process = own.start("hopeless", workers.serve, restart=WorkerRestart(limit=1))
    with pytest.raises(WorkerFailed, match=r"the forkserver died \(exit code 1\)"):
        process.wait_ready(SOON)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerFailed, match=r"could not be started: .*No such file"):
        own.start("missing", workers.serve).wait_ready(SOON)


def test_an_interpreter_that_ends_without_close_stops_its_workers_in_order() -> None:
    then = 'supervisor.start("three", workers.stop_in_order, fds=[1]).wait_ready(20)\n'
    with Parent(then + Parent.WAIT) as parent:
        assert parent.finish() == 0
        assert parent.read() == [True, ["called"]]
        wait_gone(parent.server, *parent.workers)


def test_ctrl_c_reaches_the_parent_alone() -> None:
    then = """
try:
    print(0, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pass
gone = one.wait(0.3)
print(json.dumps([gone, one.state, two.state, one.incarnation, one.pid]), flush=True)
"""
    with Parent(then + Parent.WAIT) as parent:
        parent.read()
        assert parent.pid not in [os.getpgid(pid) for pid in (parent.server, *parent.workers)]
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.read() == [False, "ready", "ready", 1, parent.workers[0]]
        assert parent.finish() == 0


def test_a_signal_handler_may_close_whatever_the_main_thread_is_doing() -> None:
    then = """
def close(number, frame):
    supervisor.close()
    os._exit(7)
signal.signal(signal.SIGTERM, close)
print(0, flush=True)
while True:
    process = supervisor.start("busy", workers.serve)
    process.wait(0.001)
    process.stop()
"""
    for delay in (0.0, 0.01, 0.05):
        with Parent(then) as parent:
            parent.read()
            time.sleep(delay)  # somewhere else in the loop each time
            os.kill(parent.pid, signal.SIGTERM)
            assert parent.finish() == 7
            wait_gone(parent.server, *parent.workers)


def test_what_the_parent_does_with_its_signals_does_not_reach_the_workers() -> None:
    script = """
import signal
from ludus.process.workers.supervisor import Supervisor
from tests.process import workers
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
with Supervisor(preload=()) as supervisor:
    process = supervisor.start("leaving", workers.leave, "exit", 3)
    assert process.wait(20)
    print(process.error)
    process = supervisor.start("serving", workers.serve)
    process.wait_ready(20)
    process.stop(grace_s=60)
    print(process.state, process.error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "exit code 3\nstopped \n", done.stderr


def test_a_fork_of_the_parent_has_no_part_in_its_workers() -> None:
    then = """
copy = os.fork()
if copy == 0:
    try:
        supervisor.start("mine", workers.serve)
    except Exception as error:
        print(json.dumps(str(error)), flush=True)
    held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    print(json.dumps([name for name in held if name.startswith("socket:")]), flush=True)
    supervisor.close()
    sys.exit(5)
status = os.waitpid(copy, 0)[1]
print(json.dumps([os.waitstatus_to_exitcode(status), one.wait(0.2), one.state, one.incarnation]), flush=True)
"""
    with Parent(then + Parent.WAIT) as parent:
        assert parent.read() == f"This supervisor belongs to the process {parent.pid}. Make one in this process."
        assert parent.read() == []
        assert parent.read() == [5, False, "ready", 1]
        assert parent.finish() == 0


def test_without_the_help_of_the_kernel_a_pipe_ends_a_worker() -> None:
    """The way of systems other than Linux."""
    held, lifeline = os.pipe()
    script = (
        f"from ludus.process.workers.forkserver import kill_at_end_of_file; print(0, flush=True); kill_at_end_of_file({held})"
    )
    with subprocess.Popen([sys.executable, "-c", script], pass_fds=[held], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert worker.poll() is None
        os.close(lifeline)
        assert worker.wait(SOON) == -signal.SIGKILL
    os.close(held)
