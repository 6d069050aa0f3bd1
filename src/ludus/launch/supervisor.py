"""The processes of one job, started, watched, restarted and ended: `python -m ludus.launch.supervisor DIRECTORY`.

Two processes look after a job. The *supervisor* starts the roles, each in a session of its own, writes down what they say and how
they fare, and ends them. The *keeper*, its parent, does nothing but wait for it: should the supervisor be killed, the kernel kills
its children, their orphans fall to the keeper, which ends them and says in the status what happened. If it is the keeper that is
killed, the supervisor is told by the kernel and ends the job. So nothing of a job outlives it, and both use the standard library only.

They leave the family of whoever started them; with `--stay` they do not, and end with the exit code of the job: so a queue runs them.
`--reach module:Class` says how processes are started on the other machines of a job (`reach.py`).

One thread: a parent's death signal is bound to the thread that forked, and nothing here can deadlock.
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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ludus.core import plugins
from ludus.io.rotating_log import LogWriter, before
from ludus.launch.job import OVER, JobState, ProcessState, ProcessStatus, Role, exit_code, is_restarted
from ludus.launch.job_dir import PRIVATE, JobDirectory, Record, Watcher, host, machine
from ludus.launch.job_dir import RUN as RUN_FILE
from ludus.launch.remote_starter import MakeReach
from ludus.process import identity, procfs
from ludus.process.job_env import NODE, PORTS, RUN, Surroundings, free_block
from ludus.process.signals import SignalQueue

FIRST_BACKOFF_S, MAX_BACKOFF_S, STEADY_S = 0.5, 30.0, 60.0
"""A process that lived for STEADY_S was healthy: the next back-off begins anew."""

MAIN_LIVES = 5
"""A main role that is killed so often in a row, and never lives for STEADY_S, is not started again."""

TICK_S = 1.0
"""How often it looks at what nothing tells it of."""
_CHUNK = 65_536
_READS, _LAST_READS = 16, 8
_AGAIN_S = 5.0
_LAST_WORD_S = 60.0
"""How long a disk may take the last word about a job from us."""

_ASKS = {signal.SIGTERM: False, signal.SIGINT: False, signal.SIGHUP: False, signal.SIGQUIT: True}
"""Signals that end the job, and whether at once."""

_LATER = signal.SIGUSR1
"""Ends the job too, but only for now: a queue will start it again."""

_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM, 130)
"""How a process ends that was asked to."""

_SAME_MOMENT_S = 1.0
"""A queue that ends a job tells all its processes; so much later than main we may hear of it."""

INTERRUPTED = 75
"""How a supervisor ends whose job is not over, but will go on."""


def backoff_s(short_lives: int) -> float:
    """Seconds until the next life, after so many short ones in a row (at least one)."""
    return min(FIRST_BACKOFF_S * 2.0 ** min(short_lives - 1, 16), MAX_BACKOFF_S)


class Member:
    """One place of a role, and the process that fills it at the moment. `words`: what is started here for it, `host`: where it then is."""

    def __init__(self, role: Role, index: int, log: LogWriter, words: tuple[str, ...] = (), host: str = "") -> None:
        self.role, self.index, self.log = role, index, log
        self.words, self.host = words or role.command, host
        self.name = f"{role.name}-{index}"
        self.state: ProcessState = "pending"
        self.process: subprocess.Popen[bytes] | None = None
        self.returned: int | None = None
        self.restarts = self.short_lives = 0
        self.began = self.due = 0.0

    def start(self, environment: Mapping[str, str], now: float) -> None:
        """What cannot be started ends at once, with the code that a shell would give it."""
        parent = os.getpid()
        self.began = now
        try:
            self.process = subprocess.Popen(  # noqa: S603 # a job runs what it is told to
                self.words,
                env={
                    **environment,
                    **self.role.environment,
                    "LUDUS_JOB_ROLE": self.role.name,
                    "LUDUS_JOB_INDEX": str(self.index),
                },
                stdin=subprocess.PIPE if self.elsewhere else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: identity.die_with_parent(parent, signal.SIGKILL),  # there are no threads here
            )
        except (OSError, subprocess.SubprocessError) as error:
            self.log.line(f"{self.words[0]} cannot be started: {error}")
            self.returned = 126 if isinstance(error, PermissionError) else 127
            self.state = "ended"
            return
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.state = "running"

    @property
    def elsewhere(self) -> bool:
        return self.words != self.role.command

    def copy(self) -> bool:
        """From its pipe into its log, as much as there is; False when there will never be more."""
        pipe = self.process.stdout if self.process else None
        if pipe is None or pipe.closed:
            return False
        for _ in range(_READS):  # one that writes without end does not keep the others waiting
            try:
                data = os.read(pipe.fileno(), _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.log.write(data)
        return True

    def tell(self, number: signal.Signals) -> None:
        """To the process itself; what it started is its own business, until it is gone."""
        if self.process is not None and self.state == "running":
            # Not by Popen, which takes the exit code of one that has ended: as long as nobody has, the number is its own.
            os.kill(self.process.pid, number)
            os.kill(self.process.pid, signal.SIGCONT)  # one that is stopped could not end

    def kill(self) -> None:
        """What runs elsewhere is told by the end of its input; only if that does not help is killed what stands for it here."""
        if self.process is not None and self.state == "running" and not self._hang_up():
            _kill_group(self.process.pid)

    def _hang_up(self) -> bool:
        if self.process is None or self.process.stdin is None or self.process.stdin.closed:
            return False
        self.process.stdin.close()
        return True

    def exited(self) -> bool:
        return self.process is not None and self.state == "running" and _exited(self.process)

    def bury(self) -> None:
        """One that has exited: what it left in its session is gone with it, and its pipe is empty and closed."""
        assert self.process is not None
        self._hang_up()
        _kill_group(self.process.pid)  # before its number is free for somebody else
        self.returned = self.process.wait()
        for _ in range(_LAST_READS):  # what it left behind in another session may write for ever
            if not self.copy() or self.process.stdout is None or not _readable(self.process.stdout.fileno()):
                break
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.state = "ended"

    def status(self, machine: str) -> ProcessStatus:
        running = self.process.pid if self.process and self.state == "running" else None
        code = None if self.returned is None else exit_code(self.returned)
        return ProcessStatus(self.role.name, self.index, self.state, code, self.restarts, running, self.host or machine)


class Supervisor:
    """Runs one job to its end. `lifeline`: a pipe; when nobody holds its other end any more, the job is cancelled."""

    def __init__(
        self, directory: JobDirectory, keeper: Watcher, lifeline: int | None = None, reach: MakeReach | None = None
    ) -> None:
        self.directory, self._keeper = directory, keeper
        self.job = directory.job()
        directory.scratch.mkdir(mode=PRIVATE, exist_ok=True)  # in its first life it was there
        self._log = LogWriter(directory.log("supervisor"), 1_000_000)
        self._reach = None if reach is None else reach(directory, self.job)
        self._surroundings = self._here() if self._reach is None else self._reach.surroundings()
        self._environment = self._environment_of(os.environ)
        self.members = [self._member(role, index) for role in self.job.roles for index in range(role.count)]
        self._main = next(member for member in self.members if member.role.name == self.job.main)
        self._state: JobState = "running"
        self._reason = ""
        self._cancelled = self._later = self._at_once = False
        self._stages: list[list[Member]] | None = None
        """Who is still to be ended; the first are being ended until `_deadline`."""
        self._deadline = 0.0
        self._record, self._stamp = directory.read(), directory.stamp()
        earlier = self._record.status.of(self.job.main)
        if earlier and earlier[0].state != "pending":  # a queue has started it again
            self._main.restarts = earlier[0].restarts + 1
        self._this, self._machine = Watcher.this(), machine()
        self._selector = selectors.DefaultSelector()
        self._signals = SignalQueue(
            *_ASKS, _LATER, signal.SIGCHLD, restore=False
        )  # what comes later must not change the exit code
        self._selector.register(self._signals, selectors.EVENT_READ, self._heed)
        self._lifeline = lifeline
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, self._bereaved)

    def run(self) -> None:
        with contextlib.suppress(BlockingIOError):  # what came while it was being set up
            self._heed()
        if self.directory.is_marked():  # somebody wanted its end before there was anybody to tell
            self._cancel("")
        for member in self.members:
            if self._stages is None:
                self._start(member)
        self.publish()
        while self._stages is None or self._stages:
            for key, _ in self._selector.select(self._until_next()):
                key.data()
            self._collect()
            now = time.monotonic()
            self._restart(now)
            self._end_stages(now)
            self.publish()
        left = identity.end_descendants()
        if left:
            self._say(f"could not be killed: {left}")
        if self._reach is not None and not self._asked() and self._main.returned in _TERMINATED:
            self._await_word()
        self._finish()

    # -- where it is

    def _here(self) -> Surroundings:
        """All nodes are this machine."""
        several = self.job.nodes > 1
        port = free_block(self.directory.id, PORTS) if several else 0
        token = self.directory.token() if several else None
        return Surroundings(("127.0.0.1",) * self.job.nodes, 0, port, token, self.job.ray, self.job.wait_s)

    def _environment_of(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What all processes are told, but for which node they are on. A job may be submitted by a process of another one."""
        kept = {name: value for name, value in environ.items() if not name.startswith("LUDUS_JOB_")}
        return {"PYTHONUNBUFFERED": "1"} | kept | self.directory.read_secrets() | self._surroundings.environment() | {
            "LUDUS_JOB_ID": self.directory.id, "LUDUS_JOB_DIR": str(self.directory.path), "LUDUS_JOB_SCRATCH": str(self.directory.scratch),
        }  # fmt: skip

    def _member(self, role: Role, index: int) -> Member:
        node, log = role.node(index), self.directory.log(f"{role.name}-{index}")
        if role.log:
            log = _linked(log, Path(role.log.replace("{index}", str(index))))
        words = host = None
        if self._reach is not None:
            words, host = self._reach.words(node, role.command), self._reach.names()[node]
        return Member(role, index, LogWriter(log), words or role.command, host or "")

    # -- starting

    def _start(self, member: Member) -> None:
        told = {NODE: str(member.role.node(member.index))}
        if member is self._main:
            told[RUN] = str(self.directory.path / RUN_FILE)
        member.start(self._environment | told, time.monotonic())
        if member.process is not None and member.process.stdout is not None and member.state == "running":
            self._selector.register(member.process.stdout, selectors.EVENT_READ, lambda: self._copy(member))
            self._say(f"{member.name} started as {member.process.pid}")
        else:
            self._after(member)

    def _restart(self, now: float) -> None:
        for member in self.members:
            if member.state == "waiting" and member.due <= now:
                member.restarts += 1
                self._start(member)

    def _copy(self, member: Member) -> None:
        if not member.copy() and member.process is not None and member.process.stdout is not None:
            self._selector.unregister(member.process.stdout)
            member.process.stdout.close()

    # -- what happened

    def _collect(self) -> None:
        for member in self.members:
            if not member.exited():  # asked once: between two answers it may end
                continue
            pipe = member.process.stdout if member.process else None
            if pipe is not None and not pipe.closed:
                self._selector.unregister(pipe)
            member.bury()
            self._end_strays(member)
            self._after(member)
        _reap_orphans({member.process.pid for member in self.members if member.process is not None and member.state == "running"})

    def _end_strays(self, member: Member) -> None:
        """What it left in sessions of its own would run on beside its next life. (Far from here that is done there.)"""
        if member.elsewhere:
            return
        known = {other.process.pid for other in self.members if other.process is not None and other.state == "running"}
        marks = {f"LUDUS_JOB_ID={self.directory.id}", f"LUDUS_JOB_ROLE={member.role.name}", f"LUDUS_JOB_INDEX={member.index}"}
        for pid in procfs.list_children(os.getpid()):
            if pid not in known and marks <= procfs.read_environment(pid):
                for stray in (pid, *procfs.list_descendants(pid)):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(stray, signal.SIGKILL)

    def _after(self, member: Member) -> None:
        """One has ended: is it started again, and is the job over?"""
        assert member.returned is not None
        now = time.monotonic()
        member.short_lives = member.short_lives + 1 if now - member.began < STEADY_S else 1
        again = self._stages is None and is_restarted(member.role.restart, member.returned)
        if member is self._main and member.short_lives > MAIN_LIVES:
            again = False
        self._say(f"{member.name} ended with {_spoken(member.returned)}")
        if again:
            delay = backoff_s(member.short_lives)
            member.state, member.due = "waiting", now + delay
            self._say(f"{member.name} is started again in {delay:g} s")
        elif member is self._main:
            self._end("" if member.returned == 0 else f"{member.name} ended with {_spoken(member.returned)}")

    def _heed(self) -> None:
        for number in self._signals.take():
            if number == _LATER and self._reach is not None and self._stages is None:
                self._later = True
                self._end("its time was nearly up")
            elif number in _ASKS:
                orphaned = os.getppid() != self._keeper.pid
                self._cancel("its keeper was killed" if orphaned else "", at_once=_ASKS[signal.Signals(number)])

    def _asked(self) -> bool:
        return self._cancelled or self._later

    def _await_word(self) -> None:
        """Main has ended as if it had been asked to, and not by us: perhaps the queue has asked all of us, and it was quicker."""
        deadline = time.monotonic() + _SAME_MOMENT_S
        while not self._asked() and _readable(self._signals.fileno(), max(0.0, deadline - time.monotonic())):
            if any(number in _ASKS for number in self._signals.take()) and self._goes_on():
                self._cancelled = self._later = True
                self._reason = "its queue ended it"

    def _bereaved(self) -> None:
        assert self._lifeline is not None
        self._selector.unregister(self._lifeline)
        self._cancel("the process that started it is gone")

    # -- ending

    def _cancel(self, reason: str, *, at_once: bool = False) -> None:
        if self._stages is None:
            self._cancelled = True
            if self._goes_on():
                self._later = True
                reason = "its queue ended it"
            self._end(reason or "it was cancelled")
        if at_once:
            self._at_once = True
            self._deadline = time.monotonic() + _AGAIN_S
            self._say("everything is killed")
            for member in self.members:
                member.kill()

    def _end(self, reason: str) -> None:
        """Main first, so that it can save what it has while the others still serve it; then the others, last started first."""
        if self._stages is not None:
            return
        self._reason = reason
        self._say(f"the job ends{': ' if reason else ''}{reason}")
        for member in self.members:
            if member.state in ("pending", "waiting"):
                member.state = "ended"
        others = [role for role in reversed(self.job.roles) if role.name != self.job.main]
        self._stages = [[self._main], *([m for m in self.members if m.role.name == role.name] for role in others)]
        self._begin_stage()

    def _begin_stage(self) -> None:
        assert self._stages
        self._deadline = time.monotonic() + (_AGAIN_S if self._at_once else self.job.grace_s)
        for member in self._stages[0]:
            member.tell(signal.SIGTERM)

    def _end_stages(self, now: float) -> None:
        while self._stages:
            running = [member for member in self._stages[0] if member.state == "running"]
            if running:
                if now > self._deadline:
                    for member in running:
                        self._say(f"{member.name} did not end in {self.job.grace_s:g} s and is killed")
                        member.kill()
                    self._deadline = now + _AGAIN_S  # one that waits for a disk cannot be killed yet
                return
            self._stages.pop(0)
            if self._stages:
                self._begin_stage()

    def _finish(self) -> None:
        code = self._main.returned
        if self._later and not self._is_done() and self._goes_on():
            self._state = "pending"
            if not self._cancelled:
                self._queue_again()
        elif self._later and not self._is_done():  # it was to go on, until somebody asked for its end
            self._state, self._reason = "cancelled", "it was cancelled"
        elif self._cancelled:
            self._state = "cancelled"
        else:
            self._state = "succeeded" if code == 0 else "failed"
        if self._state != "pending":
            self.directory.clear()
        deadline = time.monotonic() + _LAST_WORD_S
        while not self._published() and time.monotonic() < deadline:
            time.sleep(TICK_S)
        for member in self.members:
            if member.log.lost:
                self._say(f"{member.log.lost} bytes of {member.name} could not be written")
            member.log.close()
        self._log.close()
        self._selector.close()
        self._signals.close()

    def _is_done(self) -> bool:
        """A training that ends with 0 has nothing left to do. What serves others, and is started again when it fails, ends so if asked to."""
        return self._main.returned == 0 and self._main.role.restart != "on-failure"

    def _goes_on(self) -> bool:
        """Whether somebody starts it again, unless it is over by itself: a queue does, until we are asked to end it."""
        return self._reach is not None and self._reach.goes_on() and not self.directory.is_marked()

    def _queue_again(self) -> None:
        """Said before it is done: a queue may end us for it."""
        assert self._reach is not None
        self.publish()
        self._say("the job is queued again")
        if why := self._reach.requeue():
            self._say(f"it could not be queued again: {why}")
            self._state, self._reason = "failed", f"{self._reason}, and it could not be queued again: {why}"

    @property
    def interrupted(self) -> bool:
        return self._state == "pending"

    @property
    def exit_code(self) -> int:
        return 1 if self._main.returned is None else exit_code(self._main.returned)

    # -- saying

    def _published(self) -> bool:
        self.publish()
        return self._record.status.state == self._state

    def publish(self) -> None:
        """How it fares, and who looks after it: from the first time on it can be cancelled."""
        over = self._state in OVER
        code = exit_code(self._main.returned) if over and self._main.returned is not None else 1 if over else None
        status = replace(
            self._record.status,
            state=self._state,
            exit_code=code,
            reason=self._reason if self._state != "running" else "",
            processes=tuple(member.status(host()) for member in self.members),
        )
        record = Record(status, self._machine, self._this, self._keeper)
        if record == self._record and self.directory.stamp() == self._stamp:
            return
        try:
            self._record, self._stamp = record, self.directory.write(record)
        except OSError as error:  # it is tried again in the next turn
            self._say(f"the status could not be written: {error}")

    def _say(self, sentence: str) -> None:
        self._log.line(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {sentence}")

    def _until_next(self) -> float:
        due = [member.due for member in self.members if member.state == "waiting"]
        if self._stages:
            due.append(self._deadline)
        return min(TICK_S, max(0.0, min(due, default=TICK_S + time.monotonic()) - time.monotonic()))


# -- the kernel's side --------------------------------------------------------------------------------------------------


def _exited(process: subprocess.Popen[bytes]) -> bool:
    """Without taking its exit code, which would free its number. Where that cannot be asked (macOS), by taking it."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap_orphans(ours: set[int]) -> None:
    if not hasattr(os, "waitid"):
        return
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None and found.si_pid not in ours:
            os.waitpid(found.si_pid, os.WNOHANG)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _readable(fd: int, within_s: float = 0.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(within_s))


def _spoken(returned: int) -> str:
    if returned >= 0:
        return f"code {returned}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-returned).name}"
    return f"signal {-returned}"


# -- the processes ------------------------------------------------------------------------------------------------------


def _linked(inside: Path, log: Path) -> Path:
    """A log elsewhere, which can be found in the job's directory too, with the one before it."""
    log = log.absolute()
    log.parent.mkdir(parents=True, exist_ok=True)
    for here, there in ((inside, log), (before(inside), before(log))):
        here.unlink(missing_ok=True)
        here.symlink_to(there)
    return log


def keep(directory: JobDirectory, lifeline: int | None, started: int | None, reach: MakeReach | None = None) -> int:
    """Become the keeper of a job; returns when nothing of it is left, with its exit code. `started`: a pipe that hears of it when all is set up."""
    identity.adopt_orphans()
    keeper = Watcher.this()
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_ASKS, _LATER))  # until there is somebody who understands them
    child = os.fork()
    if child == 0:
        code = 1
        try:
            identity.adopt_orphans()
            supervisor = Supervisor(directory, keeper, lifeline, reach)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_ASKS, _LATER))
            identity.die_with_parent(keeper.pid, signal.SIGTERM)
            supervisor.publish()
            if started is not None:
                os.write(started, b"1")
                os.close(started)
            supervisor.run()
            code = INTERRUPTED if supervisor.interrupted else supervisor.exit_code if started is None else 0
        except BaseException:  # its keeper does what is left to do
            traceback.print_exc()
        finally:
            os._exit(code)
    if started is not None:
        os.close(started)
    if lifeline is not None:
        os.close(lifeline)
    with _forwarding(child):
        _, ended = os.waitpid(child, 0)
    identity.end_descendants()
    _sweep()
    returned = os.waitstatus_to_exitcode(ended)
    if returned == INTERRUPTED and not directory.read().status.over:
        return 0
    directory.clear()
    directory.conclude(f"its supervisor ended with {_spoken(returned)}; its processes were ended")
    return exit_code(returned)


def _sweep() -> None:
    """What was killed could not tidy up: rings and directories of its workers, of its Ray."""
    from ludus.ray_cluster.cluster import sweep_leftovers

    with contextlib.suppress(OSError):
        sweep_leftovers()


@contextlib.contextmanager
def _forwarding(child: int) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (*_ASKS, _LATER):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_ASKS, _LATER))
    yield


def main(words: list[str]) -> int:
    """Leave the family of whoever submits it, keep the job, and let the caller go as soon as it is set up. 0: it is."""
    parser = argparse.ArgumentParser(prog="ludus.launch.supervisor")
    parser.add_argument("directory", type=Path)
    parser.add_argument("lifeline", type=int, nargs="?")
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--reach", metavar="MODULE:CLASS")
    asked = parser.parse_args(words)
    directory, lifeline = JobDirectory(asked.directory), asked.lifeline
    reach = None if asked.reach is None else plugins.load_object(asked.reach)
    if lifeline is not None:
        os.set_inheritable(lifeline, False)
    if asked.stay:
        return keep(directory, lifeline, None, reach)
    heard, started = os.pipe()
    if os.fork() > 0:
        os.close(started)
        return 0 if os.read(heard, 1) else 1
    os.close(heard)
    try:
        keep(directory, lifeline, started, reach)
    except BaseException:  # this process is nobody's child: what it says here is all that will be known
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
