"""Smoke test of an environment: creates, resets and steps it in another process, and measures its resources.

As a program it takes the name of an environment and a time limit, and prints the result as JSON. It runs the environment's code, as a
training would. There are two processes: the runner, which has the environment, and its guard, which reports the result, even after a
crash, and ends all processes that the runner has started, in any session.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from ludus.core import trust
from ludus.core.formatting import format_bytes
from ludus.display import headless
from ludus.errors import LudusError
from ludus.launch.doctor.finding import DoctorFinding, failed, format_count, ok, skipped, warning
from ludus.process import procfs
from ludus.process.identity import adopt_orphans, end_descendants, reap_children, send_signal, start_time

SMOKE_TEST_S = 30.0
STEPS = 5
_MARK = "ludus-smoke-test "
_CLOSE_S, _TERM_S, _END_S = 5.0, 1.0, 10.0
"""Time to close the environment; between SIGTERM and SIGKILL for remaining processes; and for the guard to finish."""

_TICK_S = 0.05
_MAX_STDERR = 100_000


@dataclass(frozen=True)
class SmokeTest:
    """`threads`, `memory`, `processes`: of one environment, without those of the interpreter. `why`: why it failed.

    `private_screen`: it needs a private X server.
    """

    env: str
    seconds: float = 0.0
    threads: int = 0
    memory: int = 0
    processes: int = 0
    why: str = ""
    hint: str = ""
    skipped: bool = False
    private_screen: bool = False


def run_smoke_test(env: str, environ: Mapping[str, str] | None = None, timeout_s: float = SMOKE_TEST_S) -> SmokeTest:
    """Run the test; if it fails and there is no screen, run it again with a private one."""
    environ = dict(os.environ if environ is None else environ)
    end = time.monotonic() + timeout_s
    first = _run_once(env, environ, timeout_s)
    if not first.why or first.skipped or headless.find_xvfb() is None:
        return first
    with contextlib.suppress(LudusError), headless.screen(environ=environ) as variables:
        if not variables:  # there is a screen, or none is wanted: it is not the cause
            return first
        second = _run_once(env, {**environ, **variables}, max(1.0, end - time.monotonic()))
        if not second.why:
            return SmokeTest(**{**asdict(second), "private_screen": True})
    return first


def _run_once(env: str, environ: Mapping[str, str], timeout_s: float) -> SmokeTest:
    words = [sys.executable, "-P", "-m", __name__, env, str(timeout_s)]
    with tempfile.TemporaryFile() as errors:  # not a pipe, which games that survive would keep open
        with subprocess.Popen(  # noqa: S603 - ourselves
            words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as guard:
            try:
                out, _ = guard.communicate(timeout=timeout_s + _CLOSE_S + _TERM_S + 2 * _END_S)
            except subprocess.TimeoutExpired:
                guard.kill()
                return _timed_out(env, timeout_s)
        size = os.fstat(errors.fileno()).st_size
        stderr = os.pread(errors.fileno(), _MAX_STDERR, max(0, size - _MAX_STDERR)).decode(errors="replace")
    lines = [line for line in out.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if lines:
        return SmokeTest(**json.loads(lines[-1].removeprefix(_MARK)))
    code = int(out.split()[-1]) if out.split() else guard.returncode
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = next((line.strip()[:200] for line in reversed(stderr.splitlines()) if line.strip()), "")
    return SmokeTest(env, why=f"its process ended with {ended}{f': {last}' if last else ''}")


def _timed_out(env: str, timeout_s: float) -> SmokeTest:
    return SmokeTest(env, why=f"it was not created, reset and stepped {STEPS} times within {timeout_s:.0f} s")


def check_smoke_test(result: SmokeTest) -> DoctorFinding:
    if result.skipped:
        return skipped("environment", f"{result.env}: {result.why}", result.hint)
    if result.why:
        return failed(
            "environment",
            f"{result.env}: {result.why}",
            result.hint or "`ludus train` would end with the same error: see its message.",
        )
    takes = f"{format_count(result.threads, 'thread')}, {format_bytes(result.memory)}"
    if result.processes:
        takes += f", {format_count(result.processes, 'process').replace('processs', 'processes')}"
    text = f"{result.env}: created, reset and stepped in {result.seconds:.1f} s; one takes {takes}"
    if result.private_screen:
        return warning("environment", f"{text}; it needs a screen, and works with a private Xvfb", "export LUDUS_SCREEN=xvfb")
    return ok("environment", text)


# -- guard process --------------------------------------------------------------------------------------------------------


def main(name: str, timeout_s: float) -> None:
    adopt_orphans()  # before anything is started: orphaned games are reparented to this process
    reader, writer = os.pipe()
    runner = os.fork()  # of a process with one thread
    if runner == 0:
        os.close(reader)
        os.dup2(2, 1)  # keep the environment's output out of the result
        _run_environment(name, writer)
    os.close(writer)
    line, code = _await_result(runner, reader, timeout_s)
    _end_processes(runner)
    if not line and code is None:
        line = f"{_MARK}{json.dumps(asdict(_timed_out(name, timeout_s)))}"
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line or code}\n".encode())
    os._exit(0)


def _await_result(runner: int, reader: int, timeout_s: float) -> tuple[str, int | None]:
    """Return the runner's line and exit code; "" and None after the time limit, or when the reader of this process is gone.

    After the line, the runner has _CLOSE_S to close the environment.
    """
    data, end = b"", time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(1, 0)  # reports an error when the reader is gone
    while True:
        left = end - time.monotonic()
        if (code := _exit_code(runner)) is not None or left <= 0:
            data += b"".join(_read_available(reader))
            return data.decode(errors="replace").strip() if data.endswith(b"\n") else "", code
        for file, event in poll.poll(1000 * min(left, _TICK_S)):  # the end of a process is not an event on all systems
            if file == 1 and event & (select.POLLERR | select.POLLHUP):
                return "", None
            if file == reader:
                more = os.read(reader, 1 << 16)
                data += more
                if not more:
                    poll.unregister(reader)
                if more and data.endswith(b"\n"):
                    end = time.monotonic() + _CLOSE_S


def _read_available(reader: int) -> Iterator[bytes]:
    while select.select([reader], [], [], 0)[0] and (more := os.read(reader, 1 << 16)):
        yield more


def _exit_code(runner: int) -> int | None:
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(runner, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    return 0


def _end_processes(runner: int) -> None:
    """End all descendants, with SIGTERM first, so that they clean up; a private screen deletes its files."""
    if not sys.platform.startswith("linux"):  # without /proc: at least the process group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(runner, signal.SIGKILL)
    end = time.monotonic() + _TERM_S
    for pid in procfs.list_descendants(os.getpid()):
        if (since := start_time(pid)) is not None:
            send_signal(pid, since, signal.SIGKILL if pid == runner else signal.SIGTERM)  # the runner had its time
    while time.monotonic() < end and procfs.list_descendants(os.getpid()):
        reap_children()
        time.sleep(_TICK_S / 5)  # these are not children: there is no wait call
    end_descendants(_END_S)


# -- runner process -------------------------------------------------------------------------------------------------------


def _run_environment(name: str, writer: int) -> NoReturn:
    """Write the result, then close the environment, which may hang."""
    os.setsid()
    adopt_orphans()  # so that orphaned games are counted
    sys.path.insert(0, "")  # `module:function` is searched in the working directory too, as by `ludus train`
    created: list[Any] = []
    try:
        result = _play(name, created)
    except LudusError as error:
        result = SmokeTest(name, why=error.message, hint=error.hint)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        result = SmokeTest(name, why=f"it raised {type(error).__name__}: {error}"[:500])
    os.write(writer, f"{_MARK}{json.dumps(asdict(result))}\n".encode())
    for env in created:
        with contextlib.suppress(Exception):  # the user's code may raise anything; the result is already written
            env.close()
    headless.end_screen()
    os._exit(0)  # without waiting for threads of the environment


def _play(name: str, created: list[Any]) -> SmokeTest:
    """`created`: receives the environment, which the caller closes."""
    from ludus.envs.vector_env import make_one
    from ludus.errors import EnvironmentFault

    before, start = _measure(), time.perf_counter()
    try:
        trust.allow(name)
        env = make_one(name)
        created.append(env)
    except EnvironmentFault as error:
        if "not a gymnasium.Env" in error.message:  # multi-agent, or a vector of environments
            return SmokeTest(name, why=error.message, hint="It is not tested here; `ludus train` supports it.", skipped=True)
        raise
    observation, _ = env.reset(seed=0)
    for _ in range(STEPS):
        observation, _, terminated, truncated, _ = env.step(_action(env, observation))
        if terminated or truncated:
            observation, _ = env.reset()
    seconds, after = time.perf_counter() - start, _measure()
    threads, memory, processes = (max(0, now - then) for now, then in zip(after, before, strict=True))
    return SmokeTest(name, seconds, threads, memory, processes)


def _action(env: Any, observation: Any) -> Any:
    if isinstance(observation, dict) and "action_mask" in observation:
        with contextlib.suppress(TypeError, ValueError, AssertionError):  # the space does not support masks
            return env.action_space.sample(observation["action_mask"].astype("int8"))
    return env.action_space.sample()


def _measure() -> tuple[int, int, int]:
    """Return the threads and bytes of this process and its descendants, and the number of descendants."""
    pids = [os.getpid(), *procfs.list_descendants(os.getpid())]
    stats = [stat for stat in map(procfs.read_stat, pids) if stat is not None]
    memory = sum(stat.resident for stat in stats) * os.sysconf("SC_PAGE_SIZE")
    return sum(stat.threads for stat in stats), memory, len(pids) - 1


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
