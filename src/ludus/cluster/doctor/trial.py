"""An environment made, reset and stepped a few times, in a process of its own: does it work here, and what does one of it take?

Run as a program with the name of an environment, it says so as JSON. That runs the environment's code, as a training would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludus.cluster.doctor.finding import Finding, failed, ok, several, size, skipped, warning
from ludus.errors import LudusError
from ludus.game import display

TRIAL_S = 30.0
STEPS = 5
_MARK = "ludus-trial "
_END_S = 5.0


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
    if not first.why or first.skipped or display.find_xvfb() is None:
        return first
    with contextlib.suppress(LudusError), display.screen(environ=environ) as variables:
        if not variables:  # there is a screen, or none is wanted: that is not why
            return first
        second = _tried(env, {**environ, **variables}, max(1.0, end - time.monotonic()))
        if not second.why:
            return Trial(**{**asdict(second), "private_screen": True})
    return first


def _tried(env: str, environ: Mapping[str, str], timeout_s: float) -> Trial:
    words = [sys.executable, "-P", "-m", __name__, env]
    with subprocess.Popen(  # noqa: S603 - ourselves
        words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Trial(env, why=f"it was not made, reset and stepped {STEPS} times within {timeout_s:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever games it has started
    told = [line for line in out.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if told:
        return Trial(**json.loads(told[-1].removeprefix(_MARK)))
    said = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return Trial(env, why=f"its process ended with {ended}{f': {said[-1][:200]}' if said else ''}")


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


# -- in the child ---------------------------------------------------------------------------------------------------------


def _play(name: str) -> Trial:
    from ludus.errors import EnvironmentFault
    from ludus.game.environment import make_one

    before, start = _taken(), time.perf_counter()
    try:
        env = make_one(name)
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
    from ludus.pids import descendants

    pids = [os.getpid(), *descendants(os.getpid())]
    threads = memory = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            threads += len(list(Path(f"/proc/{pid}/task").iterdir()))
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return threads, memory, len(pids) - 1


def main(name: str) -> None:
    sys.path.insert(0, "")  # `module:function` is looked for here too, as with `ludus train`
    try:
        found = _play(name)
    except LudusError as error:
        found = Trial(name, why=error.message, hint=error.hint)
    except Exception as error:  # the user's code may raise anything; it is the answer
        found = Trial(name, why=f"it raised {type(error).__name__}: {error}"[:500])
    sys.stdout.write(f"\n{_MARK}{json.dumps(asdict(found))}\n")
    sys.stdout.flush()
    os._exit(0)  # games that do not end when asked are ended by whoever started us


if __name__ == "__main__":
    main(sys.argv[1])
