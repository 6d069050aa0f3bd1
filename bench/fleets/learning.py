"""CartPole by a learner and two workers that share a Redis and a bucket, from the commands that one types; and what killing them costs.

A learner that was killed comes back as on another machine: with an empty cache, so that all it knows is from the store.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.fleets import services
from bench.fleets.services import PASSWORD_VARIABLE
from bench.train import Row

LUDUS = [sys.executable, "-m", "ludus.cli.main"]
WORKERS = 2
EPISODES, FIRST_SEED = 20, 10_000
KILL_AT = {"worker-0": 0.12, "learner": 0.3, "worker-1": 0.5}
"""Each once, when the mean return has come so far on its way to the target."""
LIMIT_S = 600.0
END_S = 60.0
LOOK_S = 0.1
COUNTS = ("duplicates", "lost", "rejected", "discarded", "dropped", "joined", "silent")


class Failed(Exception):
    pass


@dataclass
class Member:
    """A command that is started again when it was killed."""

    name: str
    words: list[str]
    directory: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    caches: list[Path] = field(default_factory=list)

    def start(self) -> None:
        cache = self.directory / f"cache-{self.name}-{self.starts}"
        cache.mkdir()
        self.caches.append(cache)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*LUDUS, *self.words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | self.environment | {"LUDUS_CACHE_DIR": str(cache)},
                start_new_session=True,
            )
        self.starts += 1

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> int:
        """As the kernel would for want of memory: this one process. Returns how many it had started outlived it by ten seconds."""
        assert self.process is not None
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(family, 10.0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(left)

    def end(self) -> None:
        """Whatever is left of it."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " / ".join(lines[-3:])[-400:]


class Crew:
    """One run: a server of each kind, the learner and its workers."""

    def __init__(
        self, directory: Path, memory: services.RedisServer, store: services.Seaweed, preset: str, target: float, seed: int
    ) -> None:
        self.target = target
        self.url = store.url(f"seed-{seed}-{directory.name}")
        self.environment = {PASSWORD_VARIABLE: memory.password, **store.environment}
        where = ["--memory", memory.url, "--store", self.url]
        stops = ["--stop", f"episode_return_mean={target:g}", "--stop", "timesteps=1000000"]
        learner = [
            "fleet",
            "learner",
            *where,
            "-p",
            preset,
            "-n",
            str(WORKERS),
            "--seed",
            str(seed),
            *stops,
            "--checkpoint-freq",
            "5",
            "-q",
            "--json",
        ]
        self.learner = Member("learner", learner, directory, self.environment)
        self.workers = [
            Member(f"worker-{i}", ["fleet", "worker", *where, "-q"], directory, self.environment) for i in range(WORKERS)
        ]
        self.members = {member.name: member for member in (self.learner, *self.workers)}

    def __enter__(self) -> Crew:
        for member in self.members.values():
            member.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members.values():
            member.end()

    def check(self) -> None:
        """Workers may go a little before the learner, when it has told them that the run is over."""
        for worker in self.workers:
            if worker.process is not None and worker.process.poll():
                raise Failed(f"{worker.name} ended with {worker.process.returncode}: {worker.last_words()}")

    def metrics(self) -> list[Row]:
        """What the learner of the moment has written."""
        return _metrics(self.learner.caches[-1])


def _metrics(cache: Path) -> list[Row]:
    rows = []
    for file in cache.rglob("metrics.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # it is being written
                rows.append(json.loads(line))
    return rows


def measured(preset: str, target: float, seed: int, killing: bool) -> Row:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ludus-fleet-")))
        memory = stack.enter_context(services.redis_server(durable=True))
        store = stack.enter_context(services.seaweed())
        crew = Crew(directory, memory, store, preset, target, seed)
        began = time.monotonic()
        row: Row = {"seed": seed, "killing": killing, "target": target, "preset": preset}
        try:
            with crew:
                row["kills"] = _until_over(crew, target if killing else None, began)
                row["seconds"] = round(time.monotonic() - began, 1)
                row |= _dismissed(crew)
                row |= _told(crew)
                row |= evaluated(crew, directory / "evaluation")
        except Failed as failed:
            row["error"] = str(failed)
        return row


def _until_over(crew: Crew, killing_for: float | None, began: float) -> list[Row]:
    """Until the learner has ended, with success. Who is due is killed as soon as all have recovered from the kill before."""
    kills: list[Row] = []
    due = dict(KILL_AT) if killing_for else {}
    while crew.learner.alive():
        time.sleep(LOOK_S)
        now = time.monotonic() - began
        if now > LIMIT_S:
            raise Failed(f"no end after {LIMIT_S:g} s: {crew.learner.last_words()}")
        crew.check()
        rows = crew.metrics() if killing_for else []
        steps, gained = _last(rows, "timesteps") or 0, _last(rows, "episode_return_mean") or 0.0
        if kills and "recovered_s" not in kills[-1]:
            if steps > kills[-1]["timesteps"]:
                kills[-1]["recovered_s"] = round(now - kills[-1]["after_s"], 1)
        elif due and gained >= next(iter(due.values())) * (killing_for or 0.0) and _may_die(next(iter(due)), crew):
            name = next(iter(due))
            del due[name]
            kills.append(
                {
                    "who": name,
                    "after_s": round(now, 1),
                    "timesteps": steps,
                    "return": gained,
                    "orphans": crew.members[name].kill(),
                }
            )
            crew.members[name].start()
    if crew.learner.process is not None and crew.learner.process.returncode:
        raise Failed(f"the learner ended with {crew.learner.process.returncode}: {crew.learner.last_words()}")
    return kills


def _last(rows: list[Row], key: str) -> Any:
    """Not every row has all: an evaluation writes one of its own."""
    return next((row[key] for row in reversed(rows) if row.get(key) is not None), None)


def _may_die(name: str, crew: Crew) -> bool:
    """The learner not before there is a checkpoint: else nothing would be shown but a second start."""
    if name != "learner":
        return True
    from ludus.storage.base import open_store

    with _environment(crew.environment):
        return bool(open_store(crew.url).list("checkpoints"))


def _dismissed(crew: Crew) -> Row:
    """Workers go home by themselves when the run is over."""
    began = time.monotonic()
    for worker in crew.workers:
        assert worker.process is not None
        try:
            code = worker.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{worker.name} is still there {END_S:g} s after the end: {worker.last_words()}") from None
        if code:
            raise Failed(f"{worker.name} ended with {code}: {worker.last_words()}")
    return {"dismissed_s": round(time.monotonic() - began, 1)}


def _told(crew: Crew) -> Row:
    """By the learners, of which each counts for itself."""
    lives = [rows for cache in crew.learner.caches if (rows := _metrics(cache))]
    if not lives:
        raise Failed("there are no metrics")
    row: Row = {"timesteps": _last(lives[-1], "timesteps"), "return": _last(lives[-1], "episode_return_mean")}
    row |= {"reached": row["return"] is not None and row["return"] >= crew.target, "learners": len(crew.learner.caches)}
    for name in COUNTS:
        row[name] = sum(int(_last(rows, f"fleet/{name}") or 0) for rows in lives)
    return row


def evaluated(crew: Crew, cache: Path) -> Row:
    """The final policy, fetched from the bucket by somebody who has nothing of it."""
    words = ["rollout", crew.url, "--episodes", str(EPISODES), "--seed", str(FIRST_SEED), "--json"]
    environment = os.environ | crew.environment | {"LUDUS_CACHE_DIR": str(cache)}
    try:
        done = subprocess.run([*LUDUS, *words], capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"no {EPISODES} episodes within {LIMIT_S:g} s") from None
    if done.returncode:
        raise Failed(f"the rollout failed: {done.stderr.strip()[-300:]}")
    played: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"evaluation_mean": played["return_mean"], "evaluation_returns": played["returns"]}


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
