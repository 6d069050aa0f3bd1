"""Smoke test of an environment: creates, resets and steps it in another process, and measures its resources.

As a program it takes the name of an environment and a file, and writes the result there as JSON. It runs the environment's code, as a
training would, under a guard that ends all processes that the environment has started, in any session.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ludus.core import trust
from ludus.core.formatting import format_bytes
from ludus.display import headless, private_screen
from ludus.errors import LudusError
from ludus.io.atomic_file import replace_json
from ludus.launch.doctor.finding import DoctorFinding, failure, format_count, ok, skip, warning
from ludus.process import procfs
from ludus.process.children import adopt_orphans
from ludus.process.commands.command import Games

SMOKE_TEST_S = 30.0
STEPS = 5
_CLOSE_S, _TERM_S = 5.0, 1.0
"""Time to close the environment; time between SIGTERM and SIGKILL for remaining processes."""


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
    if not first.why or first.skipped or private_screen.find_xvfb() is None:
        return first
    with contextlib.suppress(LudusError), headless.screen(environ=environ) as variables:
        if not variables:  # there is a screen, or none is wanted: it is not the cause
            return first
        second = _run_once(env, {**environ, **variables}, max(1.0, end - time.monotonic()))
        if not second.why:
            return SmokeTest(**{**asdict(second), "private_screen": True})
    return first


def _run_once(env: str, environ: Mapping[str, str], timeout_s: float) -> SmokeTest:
    with tempfile.TemporaryDirectory(prefix="ludus-doctor-") as directory, Games() as games:
        path = Path(directory) / "result.json"
        command = [sys.executable, "-P", "-m", __name__, env, str(path)]
        game = games.start(command, log=Path(directory) / "log", environment=environ, directory=Path.cwd())
        ended = game.wait(timeout_s)
        if ended is None:
            game.stop(_TERM_S)
        if path.exists():
            return SmokeTest(**json.loads(path.read_bytes()))
    if ended is None:
        return SmokeTest(env, why=f"it was not created, reset and stepped {STEPS} times within {timeout_s:.0f} s")
    last = next((line.strip() for line in reversed(ended.last_lines) if line.strip()), "")
    return SmokeTest(env, why=f"its process {ended}{f': {last}' if last else ''}")


def check_smoke_test(result: SmokeTest) -> DoctorFinding:
    if result.skipped:
        return skip("environment", f"{result.env}: {result.why}", result.hint)
    if result.why:
        remedy = result.hint or "`ludus train` would end with the same error: see its message."
        return failure("environment", f"{result.env}: {result.why}", remedy)
    takes = f"{format_count(result.threads, 'thread')}, {format_bytes(result.memory)}"
    if result.processes:
        takes += f", {result.processes} process{'es' if result.processes > 1 else ''}"
    text = f"{result.env}: created, reset and stepped in {result.seconds:.1f} s; one takes {takes}"
    if result.private_screen:
        return warning(
            "environment",
            f"{text}; it needs a screen, and works with a private Xvfb",
            "display: xvfb in config, or export LUDUS_SCREEN=xvfb",
        )
    return ok("environment", text)


# -- in the other process -------------------------------------------------------------------------------------------------


def main(name: str, path: Path) -> NoReturn:
    """Write the result, then close the environment, which may hang."""
    adopt_orphans()  # so that orphaned games are counted
    sys.path.insert(0, "")  # `module:function` is searched in the working directory too, as by `ludus train`
    created: list[Any] = []
    try:
        result = _play(name, created)
    except LudusError as error:
        result = SmokeTest(name, why=error.message, hint=error.hint)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        result = SmokeTest(name, why=f"it raised {type(error).__name__}: {error}"[:500])
    replace_json(path, asdict(result))
    threading.Timer(_CLOSE_S, os._exit, (0,)).start()
    try:
        for env in created:
            env.close()
    finally:
        headless.end_screen()
        os._exit(0)  # do not wait for threads of the environment


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
        mask = observation.get("action_mask") if isinstance(observation, dict) else None
        try:
            action = env.action_space.sample(mask if mask is None else mask.astype("int8"))
        except (TypeError, ValueError, AssertionError):  # the space does not support masks
            action = env.action_space.sample()
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            observation, _ = env.reset()
    seconds, after = time.perf_counter() - start, _measure()
    threads, memory, processes = (max(0, now - then) for now, then in zip(after, before, strict=True))
    return SmokeTest(name, seconds, threads, memory, processes)


def _measure() -> tuple[int, int, int]:
    """Return the threads and bytes of this process and its descendants, and the number of descendants."""
    pids = [os.getpid(), *procfs.list_descendants(os.getpid())]
    stats = [stat for stat in map(procfs.read_stat, pids) if stat is not None]
    memory = sum(stat.resident for stat in stats) * os.sysconf("SC_PAGE_SIZE")
    return sum(stat.threads for stat in stats), memory, len(pids) - 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
