"""Starts, restarts and stops the processes of one job: `python -m ludus.launch.supervisor DIRECTORY`.

A job has two processes of this module. The *supervisor* starts each role in its own session, writes its output to logs and its
state to status.json, and stops it. The *guard*, its parent, only waits for it. If the supervisor is killed, the kernel kills its
children; their orphans are reparented to the guard, which kills them and records the failure. If the guard is killed, the
supervisor gets a parent death signal and ends the job. So no process outlives its job. Both need the standard library only.

They run detached from their caller. With `--stay` they stay attached and exit with the job's exit code, as a batch queue needs it.
`--starter module:Class` names the `RemoteStarter` for the other machines of the job.

There is one thread: a parent death signal is bound to the thread that forked.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from ludus.core import plugins
from ludus.core.backoff import exponential_delay
from ludus.io.rotating_log import LogWriter, previous_path
from ludus.launch.job import OVER, JobState, ProcessState, ProcessStatus, Role, exit_code, should_restart
from ludus.launch.job_dir import PRIVATE, JobDirectory, JobRecord, ProcessIdentity, hostname, machine_id
from ludus.launch.job_dir import RUN as RUN_FILE
from ludus.launch.remote_starter import StarterFactory
from ludus.process import children, procfs
from ludus.process.children import describe_exit, shell_exit_code, start_child
from ludus.process.job_env import NODE, PORTS, RUN, JobEnv, find_free_ports
from ludus.process.signals import SignalQueue
from ludus.ray_cluster.ray_temp_dir import sweep_leftovers

FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY_S = 0.5, 30.0, 60.0
"""A process that ran for STEADY_S was healthy: its back-off starts over."""

MAX_SHORT_RUNS = 5
"""The main role is not restarted after more consecutive runs than this that were shorter than STEADY_S."""

TICK_S = 1.0
"""Polling interval for everything that causes no event."""
_CHUNK = 65_536
_READS, _LAST_READS = 16, 8
_AGAIN_S = 5.0
_FINAL_WRITE_S = 60.0
"""How long to retry the write of the final status to a full disk."""

_STOP_SIGNALS = {signal.SIGTERM: False, signal.SIGINT: False, signal.SIGHUP: False, signal.SIGQUIT: True}
"""Signals that cancel the job, and whether they kill at once."""

_INTERRUPT = signal.SIGUSR1
"""Stops the job so that a queue can start it again."""

_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM, 130)
"""Return codes of a process that was stopped by SIGTERM or SIGINT."""

_SIGNAL_DELAY_S = 1.0
"""A queue that stops a job signals all its processes. The supervisor may get the signal this much later than main."""

INTERRUPTED = 75
"""Exit code of a supervisor whose job is not over, but will be started again."""


class OutputLog(Protocol):
    """Where the output of a process goes. `lost`: bytes that could not be written."""

    lost: int

    def write(self, data: bytes) -> None: ...

    def line(self, text: str) -> None: ...

    def close(self) -> None: ...


OpenLog = Callable[[str, int, Path], OutputLog]
"""Opens the log of a process: (role, index, default path)."""


def open_log_file(role: str, index: int, path: Path) -> OutputLog:
    return LogWriter(path)


class RoleProcess:
    """One process of a role, over its restarts. `words`: the command started on this machine. `host`: where the process runs."""

    def __init__(self, role: Role, index: int, log: OutputLog, words: tuple[str, ...] = (), host: str = "") -> None:
        self.role, self.index, self.log = role, index, log
        self.words, self.host = words or role.command, host
        self.name = f"{role.name}-{index}"
        self.state: ProcessState = "pending"
        self.popen: subprocess.Popen[bytes] | None = None
        self.returncode: int | None = None
        self.restarts = self.short_runs = 0
        self.started_at = self.restart_at = 0.0

    def start(self, environment: Mapping[str, str], now: float) -> None:
        """Start it. If that fails, it has ended with a shell's exit code 126 or 127."""
        self.started_at = now
        names = {"LUDUS_JOB_ROLE": self.role.name, "LUDUS_JOB_INDEX": str(self.index)}
        try:
            self.popen = start_child(
                self.words,
                env={**environment, **names, **self.role.environment},  # a part of a larger job sets its own index
                stdin=subprocess.PIPE if self.is_remote else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.log.line(f"{self.words[0]} cannot be started: {error}")
            self.returncode, self.state = shell_exit_code(error), "ended"
            return
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)
        self.state = "running"

    @property
    def is_remote(self) -> bool:
        return self.words != self.role.command

    def copy_output(self) -> bool:
        """Copy available output from the pipe to the log. Returns False at the end of the output."""
        pipe = self.popen.stdout if self.popen else None
        if pipe is None or pipe.closed:
            return False
        for _ in range(_READS):  # a process that writes without end must not starve the others
            try:
                data = os.read(pipe.fileno(), _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.log.write(data)
        return True

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process itself, not its children."""
        if self.popen is not None and self.state == "running":
            children.send_signal(self.popen.pid, number)

    def kill(self) -> None:
        """Kill it. The first call closes the stdin of a remote process, which ends it there; the next kills its local command."""
        if self.popen is not None and self.state == "running" and not self._close_stdin():
            children.kill_group(self.popen.pid)

    def _close_stdin(self) -> bool:
        if self.popen is None or self.popen.stdin is None or self.popen.stdin.closed:
            return False
        self.popen.stdin.close()
        return True

    def has_exited(self) -> bool:
        return self.popen is not None and self.state == "running" and _has_exited(self.popen)

    def reap(self) -> None:
        """Reap the exited process, kill the rest of its session, and copy and close its output."""
        assert self.popen is not None
        self._close_stdin()
        children.kill_group(self.popen.pid)  # before the process id can be reused
        self.returncode = self.popen.wait()
        for _ in range(_LAST_READS):  # bounded: children in other sessions may write for ever
            if not self.copy_output() or self.popen.stdout is None or not _is_readable(self.popen.stdout.fileno()):
                break
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self.state = "ended"

    def status(self, machine: str) -> ProcessStatus:
        running = self.popen.pid if self.popen and self.state == "running" else None
        code = None if self.returncode is None else exit_code(self.returncode)
        return ProcessStatus(self.role.name, self.index, self.state, code, self.restarts, running, self.host or machine)


class JobSupervisor:
    """Runs one job to its end. `lifeline`: read end of a pipe; the job is cancelled when its write end is closed."""

    def __init__(
        self,
        directory: JobDirectory,
        guard: ProcessIdentity,
        lifeline: int | None = None,
        starter: StarterFactory | None = None,
        open_log: OpenLog = open_log_file,
    ) -> None:
        self.directory, self._guard, self._open_log = directory, guard, open_log
        self.job = directory.job()
        directory.scratch.mkdir(mode=PRIVATE, exist_ok=True)  # missing when the job is restarted
        self._log = LogWriter(directory.log("supervisor"), 1_000_000)
        self._starter = None if starter is None else starter(directory, self.job)
        self._environment = self._base_environment(os.environ)
        self.processes = [self._create_process(role, index) for role in self.job.roles for index in range(role.count)]
        self._main = next(process for process in self.processes if process.role.name == self.job.main)
        self._state: JobState = "running"
        self._reason = ""
        self._cancelled = self._interrupted = self._at_once = False
        self._stages: list[list[RoleProcess]] | None = None
        """Groups of processes still to be stopped; the first group has until `_deadline`."""
        self._deadline = 0.0
        self._record, self._stamp = directory.read(), directory.stamp()
        earlier = self._record.status.of(self.job.main)
        if earlier and earlier[0].state != "pending":  # the queue has restarted the job
            self._main.restarts = earlier[0].restarts + 1
        self._identity, self._machine = ProcessIdentity.this(), machine_id()
        self._selector = selectors.DefaultSelector()
        self._signals = SignalQueue(
            *_STOP_SIGNALS, _INTERRUPT, signal.SIGCHLD, restore=False
        )  # what comes later must not change the exit code
        self._selector.register(self._signals, selectors.EVENT_READ, self._handle_signals)
        self._lifeline = lifeline
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, self._on_lifeline_closed)

    def run(self) -> None:
        with contextlib.suppress(BlockingIOError):  # signals that came during the set-up
            self._handle_signals()
        if self.directory.cancel_requested():  # before this process could receive signals
            self._cancel("")
        for process in self.processes:
            if self._stages is None:
                self._start(process)
        self.publish()
        while self._stages is None or self._stages:
            for key, _ in self._selector.select(self._next_event_s()):
                key.data()
            self._reap_ended()
            now = time.monotonic()
            self._restart(now)
            self._advance_shutdown(now)
            self.publish()
        left = children.end_descendants()
        if left:
            self._write_log(f"could not be killed: {left}")
        if self._starter is not None and not self._stop_requested() and self._main.returncode in _TERMINATED:
            self._await_queue_signal()
        self._finish()

    # -- environment

    def _local_job_env(self) -> JobEnv:
        """Return an environment in which this machine is every node."""
        several = self.job.nodes > 1
        port = find_free_ports(self.directory.id, PORTS) if several else 0
        token = self.directory.token() if several else None
        return JobEnv(("127.0.0.1",) * self.job.nodes, 0, port, token, self.job.ray, self.job.wait_s)

    def _base_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of all processes, without the number of the node."""
        env = self._local_job_env() if self._starter is None else self._starter.job_env()
        # The submitting process may belong to another job.
        inherited = {name: value for name, value in environ.items() if not name.startswith("LUDUS_JOB_")}
        return {"PYTHONUNBUFFERED": "1"} | inherited | self.directory.read_secrets() | env.environment() | {
            "LUDUS_JOB_ID": self.directory.id, "LUDUS_JOB_DIR": str(self.directory.path), "LUDUS_JOB_SCRATCH": str(self.directory.scratch),
        }  # fmt: skip

    def _create_process(self, role: Role, index: int) -> RoleProcess:
        node, log = role.node(index), self.directory.log(f"{role.name}-{index}")
        if role.log:
            log = _link_log(log, Path(role.log.replace("{index}", str(index))))
        writer = self._open_log(role.name, index, log)
        if self._starter is None:
            return RoleProcess(role, index, writer)
        words, host = self._starter.wrap_command(node, role.command), self._starter.node_names()[node]
        return RoleProcess(role, index, writer, words, host)

    # -- starting

    def _start(self, process: RoleProcess) -> None:
        variables = {NODE: str(process.role.node(process.index))}
        if process is self._main:
            variables[RUN] = str(self.directory.path / RUN_FILE)
        process.start(self._environment | variables, time.monotonic())
        if process.popen is not None and process.popen.stdout is not None and process.state == "running":
            self._selector.register(process.popen.stdout, selectors.EVENT_READ, lambda: self._copy_output(process))
            self._write_log(f"{process.name} started as {process.popen.pid}")
        else:
            self._handle_end(process)

    def _restart(self, now: float) -> None:
        for process in self.processes:
            if process.state == "waiting" and process.restart_at <= now:
                process.restarts += 1
                self._start(process)

    def _copy_output(self, process: RoleProcess) -> None:
        if not process.copy_output() and process.popen is not None and process.popen.stdout is not None:
            self._selector.unregister(process.popen.stdout)
            process.popen.stdout.close()

    # -- events

    def _reap_ended(self) -> None:
        for process in self.processes:
            if not process.has_exited():  # called once: the answer may change
                continue
            pipe = process.popen.stdout if process.popen else None
            if pipe is not None and not pipe.closed:
                self._selector.unregister(pipe)
            process.reap()
            self._kill_strays(process)
            self._handle_end(process)
        children.reap_orphans(self._running_pids())

    def _running_pids(self) -> set[int]:
        return {process.popen.pid for process in self.processes if process.popen is not None and process.state == "running"}

    def _kill_strays(self, process: RoleProcess) -> None:
        """Kill its children in other sessions, which would survive a restart. `remote_process` does so for remote processes."""
        if process.is_remote:
            return
        known = self._running_pids()
        marks = {f"LUDUS_JOB_ID={self.directory.id}", f"LUDUS_JOB_ROLE={process.role.name}", f"LUDUS_JOB_INDEX={process.index}"}
        for pid in procfs.list_children(os.getpid()):
            if pid not in known and marks <= procfs.read_environment(pid):
                children.kill(pid, *procfs.list_descendants(pid))

    def _handle_end(self, process: RoleProcess) -> None:
        """Schedule the restart of a process that ended, or end the job with its main process."""
        assert process.returncode is not None
        now = time.monotonic()
        process.short_runs = process.short_runs + 1 if now - process.started_at < STEADY_S else 1
        again = self._stages is None and should_restart(process.role.restart, process.returncode)
        if process is self._main and process.short_runs > MAX_SHORT_RUNS:
            again = False
        self._write_log(f"{process.name} ended with {describe_exit(process.returncode)}")
        if again:
            delay = exponential_delay(process.short_runs, FIRST_BACKOFF_S, MAX_BACKOFF_S)
            process.state, process.restart_at = "waiting", now + delay
            self._write_log(f"{process.name} is started again in {delay:g} s")
        elif process is self._main:
            self._begin_shutdown(
                "" if process.returncode == 0 else f"{process.name} ended with {describe_exit(process.returncode)}"
            )

    def _handle_signals(self) -> None:
        for number in self._signals.take():
            if number == _INTERRUPT and self._starter is not None and self._stages is None:
                self._interrupted = True
                self._begin_shutdown("its time limit was nearly reached")
            elif number in _STOP_SIGNALS:
                orphaned = os.getppid() != self._guard.pid
                self._cancel("its guard process was killed" if orphaned else "", at_once=_STOP_SIGNALS[signal.Signals(number)])

    def _stop_requested(self) -> bool:
        return self._cancelled or self._interrupted

    def _await_queue_signal(self) -> None:
        """After main was terminated by another process, wait briefly for the signal of a queue that stops the whole job."""
        deadline = time.monotonic() + _SIGNAL_DELAY_S
        while not self._stop_requested() and _is_readable(self._signals.fileno(), max(0.0, deadline - time.monotonic())):
            if any(number in _STOP_SIGNALS for number in self._signals.take()) and self._will_restart():
                self._cancelled = self._interrupted = True
                self._reason = "its queue ended it"

    def _on_lifeline_closed(self) -> None:
        assert self._lifeline is not None
        self._selector.unregister(self._lifeline)
        self._cancel("the process that started it is gone")

    # -- ending

    def _cancel(self, reason: str, *, at_once: bool = False) -> None:
        if self._stages is None:
            self._cancelled = True
            if self._will_restart():
                self._interrupted = True
                reason = "its queue ended it"
            self._begin_shutdown(reason or "it was cancelled")
        if at_once:
            self._at_once = True
            self._deadline = time.monotonic() + _AGAIN_S
            self._write_log("all processes are killed")
            for process in self.processes:
                process.kill()

    def _begin_shutdown(self, reason: str) -> None:
        """Stop main first, so that it can save its state while the others serve it; then the others in reverse order of start."""
        if self._stages is not None:
            return
        self._reason = reason
        self._write_log(f"the job ends{': ' if reason else ''}{reason}")
        for process in self.processes:
            if process.state in ("pending", "waiting"):
                process.state = "ended"
        others = [role for role in reversed(self.job.roles) if role.name != self.job.main]
        self._stages = [[self._main], *([m for m in self.processes if m.role.name == role.name] for role in others)]
        self._stop_stage()

    def _stop_stage(self) -> None:
        assert self._stages
        self._deadline = time.monotonic() + (_AGAIN_S if self._at_once else self.job.grace_s)
        for process in self._stages[0]:
            process.send_signal(signal.SIGTERM)

    def _advance_shutdown(self, now: float) -> None:
        while self._stages:
            running = [process for process in self._stages[0] if process.state == "running"]
            if running:
                if now > self._deadline:
                    for process in running:
                        self._write_log(f"{process.name} did not end in {self.job.grace_s:g} s and is killed")
                        process.kill()
                    self._deadline = now + _AGAIN_S  # a process in disk wait dies only later
                return
            self._stages.pop(0)
            if self._stages:
                self._stop_stage()

    def _finish(self) -> None:
        code = self._main.returncode
        if self._interrupted and not self._is_done() and self._will_restart():
            self._state = "pending"
            if not self._cancelled:
                self._requeue()
        elif self._interrupted and not self._is_done():  # cancelled after the interruption
            self._state, self._reason = "cancelled", "it was cancelled"
        elif self._cancelled:
            self._state = "cancelled"
        else:
            self._state = "succeeded" if code == 0 else "failed"
        if self._state != "pending":
            self.directory.clear()
        deadline = time.monotonic() + _FINAL_WRITE_S
        while not self._publish_state() and time.monotonic() < deadline:
            time.sleep(TICK_S)
        for process in self.processes:
            if process.log.lost:
                self._write_log(f"{process.log.lost} bytes of {process.name} could not be written")
            process.log.close()
        self._log.close()
        self._selector.close()
        self._signals.close()

    def _is_done(self) -> bool:
        """Whether main needs no restart. Exit code 0 means so, except for a service (restart on-failure), which also exits so when stopped."""
        return self._main.returncode == 0 and self._main.role.restart != "on-failure"

    def _will_restart(self) -> bool:
        """Whether the queue starts an interrupted job again: it does unless the user has cancelled the job."""
        return self._starter is not None and self._starter.restarts_job() and not self.directory.cancel_requested()

    def _requeue(self) -> None:
        assert self._starter is not None
        self.publish()  # first: the queue may kill this process when it requeues the job
        self._write_log("the job is queued again")
        if why := self._starter.requeue():
            self._write_log(f"it could not be queued again: {why}")
            self._state, self._reason = "failed", f"{self._reason}, and it could not be queued again: {why}"

    @property
    def is_interrupted(self) -> bool:
        return self._state == "pending"

    @property
    def exit_code(self) -> int:
        return 1 if self._main.returncode is None else exit_code(self._main.returncode)

    # -- status and log

    def _publish_state(self) -> bool:
        self.publish()
        return self._record.status.state == self._state

    def publish(self) -> None:
        """Write status.json if it changed. The job can be cancelled from the first call on."""
        over = self._state in OVER
        code = exit_code(self._main.returncode) if over and self._main.returncode is not None else 1 if over else None
        status = replace(
            self._record.status,
            state=self._state,
            exit_code=code,
            reason=self._reason if self._state != "running" else "",
            processes=tuple(process.status(hostname()) for process in self.processes),
        )
        record = JobRecord(status, self._machine, self._identity, self._guard)
        if record == self._record and self.directory.stamp() == self._stamp:
            return
        try:
            self._record, self._stamp = record, self.directory.write(record)
        except OSError as error:  # the next tick retries
            self._write_log(f"the status could not be written: {error}")

    def _write_log(self, sentence: str) -> None:
        self._log.line(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {sentence}")

    def _next_event_s(self) -> float:
        due = [process.restart_at for process in self.processes if process.state == "waiting"]
        if self._stages:
            due.append(self._deadline)
        return min(TICK_S, max(0.0, min(due, default=TICK_S + time.monotonic()) - time.monotonic()))


# -- system calls -------------------------------------------------------------------------------------------------------


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Check without reaping, which would free the process id; by reaping where waitid is missing (macOS)."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _is_readable(fd: int, within_s: float = 0.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(within_s))


# -- processes ----------------------------------------------------------------------------------------------------------


def _link_log(inside: Path, log: Path) -> Path:
    """Link a log elsewhere, and its rotated predecessor, into the job directory; return the log."""
    log = log.absolute()
    log.parent.mkdir(parents=True, exist_ok=True)
    for here, there in ((inside, log), (previous_path(inside), previous_path(log))):
        here.unlink(missing_ok=True)
        here.symlink_to(there)
    return log


def run_guard(
    directory: JobDirectory,
    lifeline: int | None = None,
    started: int | None = None,
    starter: StarterFactory | None = None,
    open_log: OpenLog = open_log_file,
) -> int:
    """Fork the supervisor, wait for it, kill what it leaves and return the job's exit code.

    `started`: write end of a pipe that gets a byte once the job can be cancelled.
    """
    children.adopt_orphans()
    guard = ProcessIdentity.this()
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_STOP_SIGNALS, _INTERRUPT))  # until the handlers are installed
    child = os.fork()
    if child == 0:
        code = 1
        try:
            children.adopt_orphans()
            supervisor = JobSupervisor(directory, guard, lifeline, starter, open_log)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_STOP_SIGNALS, _INTERRUPT))
            children.die_with_parent(guard.pid, signal.SIGTERM)
            supervisor.publish()
            if started is not None:
                os.write(started, b"1")
                os.close(started)
            supervisor.run()
            code = INTERRUPTED if supervisor.is_interrupted else supervisor.exit_code if started is None else 0
        except BaseException:  # the child must not return into the caller's code; the guard cleans up
            traceback.print_exc()
        finally:
            os._exit(code)
    if started is not None:
        os.close(started)
    if lifeline is not None:
        os.close(lifeline)
    with _forwarding(child):
        _, ended = os.waitpid(child, 0)
    children.end_descendants()
    sweep_leftovers()
    returncode = os.waitstatus_to_exitcode(ended)
    if returncode == INTERRUPTED and not directory.read().status.over:
        return 0
    directory.clear()
    directory.record_failure(f"its supervisor ended with {describe_exit(returncode)}; its processes were ended")
    return exit_code(returncode)


@contextlib.contextmanager
def _forwarding(child: int) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (*_STOP_SIGNALS, _INTERRUPT):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_STOP_SIGNALS, _INTERRUPT))
    yield


def main(words: list[str]) -> int:
    """Run the guard in a detached process; return 0 as soon as the job is set up. With --stay: run it here to the end."""
    parser = argparse.ArgumentParser(prog="ludus.launch.supervisor")
    parser.add_argument("directory", type=Path)
    parser.add_argument("lifeline", type=int, nargs="?")
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--starter", metavar="MODULE:CLASS")
    args = parser.parse_args(words)
    directory, lifeline = JobDirectory(args.directory), args.lifeline
    starter = None if args.starter is None else plugins.load_object(args.starter)
    if lifeline is not None:
        os.set_inheritable(lifeline, False)
    if args.stay:
        return run_guard(directory, lifeline, None, starter)
    ready, started = os.pipe()
    if os.fork() > 0:
        os.close(started)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    try:
        run_guard(directory, lifeline, started, starter)
    except BaseException:  # a forked child must end here; its traceback goes to supervisor.log
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
