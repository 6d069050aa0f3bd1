"""An environment made, reset and stepped a few times, in a process of its own: does it work here, and what does one of it take?

Run as a program with the name of an environment and a time, it says so as JSON. That runs the environment's code, as a training would.
There are two processes: the player, which has the environment, and its keeper, which tells what became of it, whatever it was, and
ends all that it has started, in whichever session.
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
from ludus.display import headless
from ludus.errors import LudusError
from ludus.launch.doctor.finding import Finding, failed, ok, several, size, skipped, warning
from ludus.process import procfs
from ludus.process.identity import adopt_orphans, end_descendants, reap_children, send_signal, start_time

TRIAL_S = 30.0
STEPS = 5
_MARK = "ludus-trial "
_CLOSE_S, _LEAVE_S, _END_S = 5.0, 1.0, 10.0
"""For the environment to be closed; for what is left then, between being asked to end and being ended; for the keeper, to do all that."""

_TICK_S = 0.05
_MOST_SAID = 100_000


@dataclass(frozen=True)
class Trial:
    """`threads`, `memory`, `processes`: of one environment, beyond what the interpreter itself has. `why`: it did not work.

    `private_screen`: it works only with one.
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


def look_trial(env: str, environ: Mapping[str, str] | None = None, timeout_s: float = TRIAL_S) -> Trial:
    """Where it fails and there is no screen, once more with a private one."""
    environ = dict(os.environ if environ is None else environ)
    end = time.monotonic() + timeout_s
    first = _tried(env, environ, timeout_s)
    if not first.why or first.skipped or headless.find_xvfb() is None:
        return first
    with contextlib.suppress(LudusError), headless.screen(environ=environ) as variables:
        if not variables:  # there is a screen, or none is wanted: that is not why
            return first
        second = _tried(env, {**environ, **variables}, max(1.0, end - time.monotonic()))
        if not second.why:
            return Trial(**{**asdict(second), "private_screen": True})
    return first


def _tried(env: str, environ: Mapping[str, str], timeout_s: float) -> Trial:
    words = [sys.executable, "-P", "-m", __name__, env, str(timeout_s)]
    with tempfile.TemporaryFile() as errors:  # games hold on to what they write to: a pipe would not end before them
        with subprocess.Popen(  # noqa: S603 - ourselves
            words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as keeper:
            try:
                out, _ = keeper.communicate(timeout=timeout_s + _CLOSE_S + _LEAVE_S + 2 * _END_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
                return _late(env, timeout_s)
        size = os.fstat(errors.fileno()).st_size
        said = os.pread(errors.fileno(), _MOST_SAID, max(0, size - _MOST_SAID)).decode(errors="replace")
    told = [line for line in out.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if told:
        return Trial(**json.loads(told[-1].removeprefix(_MARK)))
    code = int(out.split()[-1]) if out.split() else keeper.returncode
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = next((line.strip()[:200] for line in reversed(said.splitlines()) if line.strip()), "")
    return Trial(env, why=f"its process ended with {ended}{f': {last}' if last else ''}")


def _late(env: str, timeout_s: float) -> Trial:
    return Trial(env, why=f"it was not made, reset and stepped {STEPS} times within {timeout_s:.0f} s")


def judge_trial(trial: Trial) -> Finding:
    if trial.skipped:
        return skipped("environment", f"{trial.env}: {trial.why}", trial.hint)
    if trial.why:
        return failed(
            "environment",
            f"{trial.env}: {trial.why}",
            trial.hint or "`ludus train` would end with the same error: see its message.",
        )
    takes = f"{several(trial.threads, 'thread')}, {size(trial.memory)}"
    if trial.processes:
        takes += f", {several(trial.processes, 'process').replace('processs', 'processes')}"
    said = f"{trial.env}: made, reset and stepped in {trial.seconds:.1f} s; one takes {takes}"
    if trial.private_screen:
        return warning("environment", f"{said}; it needs a screen, and a private Xvfb will do", "export LUDUS_SCREEN=xvfb")
    return ok("environment", said)


# -- the keeper -----------------------------------------------------------------------------------------------------------


def main(name: str, timeout_s: float) -> None:
    adopt_orphans()  # before anything is started: games that leave their parent come to us
    reader, writer = os.pipe()
    player = os.fork()  # of a process with one thread
    if player == 0:
        os.close(reader)
        os.dup2(2, 1)  # what the environment says is none of the answer
        _player(name, writer)
    os.close(writer)
    told, code = _awaited(player, reader, timeout_s)
    _end_all(player)
    if not told and code is None:
        told = f"{_MARK}{json.dumps(asdict(_late(name, timeout_s)))}"
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{told or code}\n".encode())
    os._exit(0)


def _awaited(player: int, reader: int, timeout_s: float) -> tuple[str, int | None]:
    """The line that the player says, and its exit code; without them when its time is over, or nobody wants to know any more.

    Once it has said it, it has a little time for closing what it opened.
    """
    data, end = b"", time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(1, 0)  # an error there: whoever asked is gone
    while True:
        left = end - time.monotonic()
        if (code := _exit_code(player)) is not None or left <= 0:
            data += b"".join(_available(reader))
            return data.decode(errors="replace").strip() if data.endswith(b"\n") else "", code
        for file, event in poll.poll(1000 * min(left, _TICK_S)):  # a process that ends makes no noise on all systems
            if file == 1 and event & (select.POLLERR | select.POLLHUP):
                return "", None
            if file == reader:
                more = os.read(reader, 1 << 16)
                data += more
                if not more:
                    poll.unregister(reader)
                if more and data.endswith(b"\n"):
                    end = time.monotonic() + _CLOSE_S


def _available(reader: int) -> Iterator[bytes]:
    while select.select([reader], [], [], 0)[0] and (more := os.read(reader, 1 << 16)):
        yield more


def _exit_code(player: int) -> int | None:
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(player, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    return 0


def _end_all(player: int) -> None:
    """First they are asked, so that they clean up; a screen of our own removes its files."""
    if not sys.platform.startswith("linux"):  # where those below cannot be seen: at least those that stayed together
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(player, signal.SIGKILL)
    end = time.monotonic() + _LEAVE_S
    for pid in procfs.list_descendants(os.getpid()):
        if (since := start_time(pid)) is not None:
            send_signal(
                pid, since, signal.SIGKILL if pid == player else signal.SIGTERM
            )  # the player is asked no more: its time is over
    while time.monotonic() < end and procfs.list_descendants(os.getpid()):
        reap_children()
        time.sleep(_TICK_S / 5)  # an end that nothing here can wait for
    end_descendants(_END_S)


# -- the player -----------------------------------------------------------------------------------------------------------


def _player(name: str, writer: int) -> NoReturn:
    """Says what it found, then closes what it opened: that may hang."""
    os.setsid()
    adopt_orphans()  # so that games that leave their parent are counted
    sys.path.insert(0, "")  # `module:function` is looked for here too, as with `ludus train`
    made: list[Any] = []
    try:
        found = _play(name, made)
    except LudusError as error:
        found = Trial(name, why=error.message, hint=error.hint)
    except (Exception, SystemExit) as error:  # the user's code may raise anything; it is the answer
        found = Trial(name, why=f"it raised {type(error).__name__}: {error}"[:500])
    os.write(writer, f"{_MARK}{json.dumps(asdict(found))}\n".encode())
    for env in made:
        with contextlib.suppress(Exception):  # it has been judged
            env.close()
    headless.end_screen()
    os._exit(0)  # threads that do not end when asked must not keep us


def _play(name: str, made: list[Any]) -> Trial:
    """`made`: for what has to be closed."""
    from ludus.envs.vector_env import make_one
    from ludus.errors import EnvironmentFault

    before, start = _taken(), time.perf_counter()
    try:
        trust.allow(name)
        env = make_one(name)
        made.append(env)
    except EnvironmentFault as error:
        if "not a gymnasium.Env" in error.message:  # of several agents, or a vector of environments
            return Trial(
                name, why=error.message, hint="It is not tried here; `ludus train` knows what to do with it.", skipped=True
            )
        raise
    observation, _ = env.reset(seed=0)
    for _ in range(STEPS):
        observation, _, terminated, truncated, _ = env.step(_action(env, observation))
        if terminated or truncated:
            observation, _ = env.reset()
    seconds, after = time.perf_counter() - start, _taken()
    threads, memory, processes = (max(0, now - then) for now, then in zip(after, before, strict=True))
    return Trial(name, seconds, threads, memory, processes)


def _action(env: Any, observation: Any) -> Any:
    if isinstance(observation, dict) and "action_mask" in observation:
        with contextlib.suppress(TypeError, ValueError, AssertionError):  # of a space that takes no masks
            return env.action_space.sample(observation["action_mask"].astype("int8"))
    return env.action_space.sample()


def _taken() -> tuple[int, int, int]:
    """Threads, bytes and further processes of this one and all below it."""
    pids = [os.getpid(), *procfs.list_descendants(os.getpid())]
    stats = [stat for stat in map(procfs.read_stat, pids) if stat is not None]
    memory = sum(stat.resident for stat in stats) * os.sysconf("SC_PAGE_SIZE")
    return sum(stat.threads for stat in stats), memory, len(pids) - 1


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
