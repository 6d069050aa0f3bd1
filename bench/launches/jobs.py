"""Jobs in a Slurm of this machine, in a world of their own: what they leave can be counted.

`alone` starts this program again in its own PID and mount namespaces, with an empty /tmp and /dev/shm: every process and every file
there that was not there before a job is that job's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.system.slurm_rig import SlurmRig, slurm_rig
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
NODES = 3
STORE_BYTES = 100 << 20
WITHIN_S = 300.0
_POLL_S = 0.02
_ALONE = "LUDUS_BENCH_ALONE"


class Late(Exception):
    """What was waited for did not come."""


# -- a world of its own -------------------------------------------------------------------------------------------------


def alone(module: str, words: Sequence[str]) -> int | None:
    """None: this process is alone already. Else the exit code of one that was."""
    if os.environ.get(_ALONE):
        return None
    # The shell stays, as the first process there: it takes the exit codes of orphans, which nobody else would.
    mount = 'mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && { "$@" & wait $!; }'
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", mount, "sh"]
    environment = {**os.environ, _ALONE: "1", "TMPDIR": "/tmp"}
    return subprocess.run(
        [*command, sys.executable, "-m", module, *words], env=environment, cwd=REPOSITORY, check=False
    ).returncode


@dataclass(frozen=True)
class Seen:
    """What there is at a moment."""

    processes: frozenset[int]
    files: frozenset[str]

    @staticmethod
    def now() -> Seen:
        numbers = frozenset(int(path.name) for path in Path("/proc").glob("[0-9]*"))
        files = [path for top in ("/tmp", "/dev/shm") for path in Path(top).iterdir()]
        return Seen(numbers, frozenset(map(str, files)))

    def more(self, before: Seen) -> tuple[list[str], list[str]]:
        """(processes, files) that were not there before, by command line and by path."""
        return sorted(filter(None, map(_words, self.processes - before.processes))), sorted(self.files - before.files)


def _words(pid: int) -> str:
    """Empty: it is gone, or is about to be (a zombie has none)."""
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:160]
    return ""


def until(what: str, happened: Callable[[], Any], within_s: float = WITHIN_S) -> float:
    """Seconds until then. Raises Late."""
    began = time.monotonic()
    try:
        wait_until(happened, within_s, what=what, poll_s=_POLL_S)
    except AssertionError as error:
        raise Late(str(error)) from None
    return time.monotonic() - began


# -- a job ----------------------------------------------------------------------------------------------------------------


@dataclass
class Lab:
    """A Slurm, and a place for the runs of its jobs."""

    rig: SlurmRig
    home: Path
    _count: int = field(default=0)

    @property
    def environment(self) -> dict[str, str]:
        own = {"LUDUS_STATE_DIR": str(self.home / "state"), "PYTHONPATH": str(REPOSITORY)}
        return {**os.environ, **self.rig.environment, **own}

    def place(self) -> Path:
        self._count += 1
        place = self.home / f"j{self._count}"
        place.mkdir()
        return place

    def ludus(self, *words: str | Path, within_s: float = 60.0) -> str:
        """Raises CalledProcessError with what was said."""
        done = subprocess.run(
            [sys.executable, "-m", "ludus.cli.main", *map(str, words)],
            env=self.environment, cwd=self.home, capture_output=True, text=True, timeout=within_s, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Late(f"ludus {' '.join(map(str, words))} ended with {done.returncode}: {done.stderr.strip()[-600:]}")
        return done.stdout

    def gone(self, before: Seen, within_s: float = 60.0) -> float:
        """Seconds until no process is left that was not there before. Raises Late, which names them."""
        began = time.monotonic()
        while left := Seen.now().more(before)[0]:
            if time.monotonic() > began + within_s:
                raise Late(f"{len(left)} processes are left after {within_s:.0f} s: {left[:6]}")
            time.sleep(_POLL_S)
        return time.monotonic() - began


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="b", dir="/var/tmp") as home, slurm_rig(NODES) as rig:
        yield Lab(rig, Path(home))


@dataclass
class Submitted:
    """`slurm`: its number there. `run`: where its run will be. `started`: a file that its script writes first."""

    lab: Lab
    slurm: str
    run: Path
    started: Path
    at: float
    id: str = ""

    def first_step(self, within_s: float = WITHIN_S) -> dict[str, float]:
        """When the first update of the training was reported, since the script began and since it was submitted."""
        until("the first training step", lambda: self.rows(1) or self.over(), within_s)
        now = time.time()
        if not self.rows(1):
            raise Late(f"the job ended before it trained: {self.last_words()}")
        began = float(self.started.read_text())
        return {"from_start_s": now - began, "from_submit_s": now - self.at}

    def rows(self, at_least: int) -> bool:
        try:
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n") >= at_least
        except OSError:
            return False

    def last_row(self) -> Mapping[str, Any]:
        lines = (self.run / "metrics.jsonl").read_bytes().splitlines()
        found: Mapping[str, Any] = json.loads(lines[-1])
        return found

    def over(self) -> bool:
        return self.slurm not in self.lab.rig.jobs()

    def directory(self) -> Path:
        return next(path for path in (self.lab.home / "state").rglob(self.id) if path.is_dir())

    def record(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((self.directory() / "status.json").read_text())
        return found

    def last_words(self) -> str:
        logs = (
            sorted((self.lab.home / "state").rglob(f"{self.id}/logs/*.log")) if self.id else sorted(self.run.parent.glob("*.log"))
        )
        return " | ".join(f"{path.name}: {path.read_text(errors='replace')[-300:]}" for path in logs)


def words(run: Path, *more: str, environment: str = "CartPole-v1") -> list[str]:
    """Of a small training whose workers are on all nodes."""
    small = ["train", environment, "--num-workers", str(NODES), "--num-envs", "4", "--set", "evaluation_duration=0"]
    small += ["--set", f"train_batch_size={NODES * 4 * 64}", "--set", "minibatch_size=128", "--quiet"]
    return [*small, "--project", str(run.parent), "--trial", run.name, *(more or ("--stop", "timesteps=1000000000"))]


def submit(lab: Lab, *more: str, options: Sequence[str] = (), environment: str = "CartPole-v1") -> Submitted:
    """By our launcher."""
    place = lab.place()
    given, run, started = _ours(place, options)
    at = time.time()
    job_id = lab.ludus(*given, "--quiet", "--", *words(run, *more, environment=environment)).split()[-1]
    return Submitted(lab, lab.rig.jobs()[-1], run, started, at, job_id)


@contextlib.contextmanager
def waiting(lab: Lab) -> Iterator[tuple[subprocess.Popen[str], Submitted]]:
    """By our launcher, which stays and shows what the job says."""
    place, at = lab.place(), time.time()
    given, run, started = _ours(place, ())
    with subprocess.Popen(
        [sys.executable, "-m", "ludus.cli.main", *given, "--wait", "--", *words(run)],
        env=lab.environment, cwd=lab.home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
    ) as launcher:  # fmt: skip
        try:
            until("the job", lambda: lab.rig.jobs() and run.exists())
            newest = max((lab.home / "state").rglob("job.json"), key=lambda path: path.stat().st_mtime)
            yield launcher, Submitted(lab, lab.rig.jobs()[-1], run, started, at, newest.parent.name)
        finally:
            launcher.kill()


def _ours(place: Path, options: Sequence[str]) -> tuple[list[str], Path, Path]:
    run, started = place / "run", place / "started"
    given = ["submit", "--on", "slurm", "--nodes", str(NODES), "--cpus", "1", *options]
    given += ["--setup", f"date +%s.%N >>{started}", "--env", f"PYTHONPATH={REPOSITORY}"]
    return given, run, started


def submit_bare(lab: Lab, port: int, *more: str) -> Submitted:
    """By a script of sbatch."""
    place = lab.place()
    run, started, scratch = place / "run", place / "started", place / "s"
    scratch.mkdir()
    (place / "words").write_text("\n".join(words(run, *more)) + "\n")
    told = {
        "PYTHON": sys.executable, "RAY": str(Path(sys.executable).parent / "ray"), "STARTED": str(started), "PORT": str(port),
        "SCRATCH": str(scratch), "STORE_BYTES": str(STORE_BYTES), "WORDS_FILE": str(place / "words"),
    }  # fmt: skip
    at = time.time()
    said = subprocess.run(
        ["sbatch", "--parsable", f"--nodes={NODES}", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={place}/job.log",
         str(Path(__file__).with_name("bare.sh"))],
        env=lab.environment | told, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return Submitted(lab, said.stdout.strip(), run, started, at)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
