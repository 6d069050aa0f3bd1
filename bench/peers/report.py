"""What every peer script shares: its arguments, its clock, its episode window and its one JSON line.

Needs the standard library and psutil only. All times run from the start of the process, imports included,
because that is what a user waits for; `train_s` runs from the first environment step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

WINDOW_EPISODES = 100
WARMUP_ITERATIONS = 2
ASYNC_MODES = ("appo", "impala")
AGENTS_MODE = "agents"
"""Training of several agents; `matches.py` has the tasks and their settings."""
AGENT_TASKS = ("simple_spread", "pistonball", "connect_four")
ASYNC_WARMUP_S = 6.0
"""Asynchronous systems take a while until all of their queues are filled as they stay."""
AGENTS_WARMUP_S = 4.0
RSS_INTERVAL_S = 1.0
MEGABYTE = 2**20
_WARMUP_S = {**dict.fromkeys(ASYNC_MODES, ASYNC_WARMUP_S), AGENTS_MODE: AGENTS_WARMUP_S}


@dataclass(frozen=True)
class Args:
    task: str
    mode: str
    seed: int
    max_seconds: float
    """Training seconds, counted from the first environment step."""
    max_frames: int
    target: float
    threads: int
    workers: int = 0
    """Sampling processes; only with several agents."""


def parse_args(argv: Sequence[str] | None = None) -> Args:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=("cartpole", "pong", "doom", *AGENT_TASKS), default="cartpole")
    parser.add_argument("--mode", choices=("tuned", "equal", *ASYNC_MODES, AGENTS_MODE), default="equal")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-seconds", type=float, default=60.0)
    parser.add_argument("--max-frames", type=int, default=2_000_000)
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: two for images, else one")
    parser.add_argument("--workers", type=int, default=0, help="sampling processes, with --mode agents")
    values = vars(parser.parse_args(argv))
    values["threads"] = values["threads"] or (2 if values["task"] in ("pong", "doom", "pistonball") else 1)
    return Args(**values)


class EpisodeWindow:
    """Rolling mean of the last training episodes; defined only once the window is full."""

    def __init__(self, size: int = WINDOW_EPISODES) -> None:
        self._returns: deque[float] = deque(maxlen=size)
        self.best: float | None = None

    def add(self, episode_return: float) -> float | None:
        self._returns.append(float(episode_return))
        if len(self._returns) < (self._returns.maxlen or 0):
            return None
        mean = sum(self._returns) / len(self._returns)
        self.best = mean if self.best is None else max(self.best, mean)
        return mean


@dataclass(frozen=True)
class Usage:
    cpu_s: float
    rss_mb: float


def process_start() -> float:
    """When this process was created, on the `time.perf_counter` scale (10 ms resolution).

    Not psutil's create_time: that one adds a boot time rounded to whole seconds.
    """
    with open("/proc/self/stat", encoding="ascii") as file:
        start_ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return time.perf_counter() - age


def tree_usage() -> Usage:
    """CPU seconds and resident memory of this process and its descendants; children already reaped count too."""
    cpu_s, rss = 0.0, 0
    root = psutil.Process()
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
            rss += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        cpu_s += times.user + times.system + times.children_user + times.children_system
    return Usage(cpu_s, rss / MEGABYTE)


def own_peak_rss_mb() -> float:
    """VmHWM rather than ru_maxrss, which a launcher's own size would leak into."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


class PeakRss:
    """Samples the process tree's resident memory in a daemon thread; between samples a spike can go unseen."""

    def __init__(self, interval_s: float = RSS_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._sampled_mb = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-rss", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sampled_mb = max(self._sampled_mb, tree_usage().rss_mb)

    def close(self) -> float:
        self._stop.set()
        self._thread.join(timeout=5.0)
        return max(self._sampled_mb, tree_usage().rss_mb, own_peak_rss_mb())


class JsonLine:
    """Keeps the real stdout for one line of JSON; whatever a library prints goes to stderr."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def write(self, values: dict[str, Any]) -> None:
        os.write(self._fd, (json.dumps(values) + "\n").encode())


class Run:
    """One training run: tell it when stepping starts, which episodes end and when an iteration is over.

    An iteration is one rollout plus its update. `fps` counts whole iterations after the first two (asynchronous and with
    several agents: after the first seconds), so neither warm-up nor a rollout cut short by reaching the target distorts it.
    """

    def __init__(self, peer: str, args: Args, settings: dict[str, Any]) -> None:
        self._out = JsonLine()
        self._peer = peer
        self._args = args
        self._settings = settings
        self._process_start = process_start()
        self._peak_rss = PeakRss()
        self._window = EpisodeWindow()
        self._first_step: float | None = None
        self._iterations: list[tuple[float, int]] = []
        self._steady: tuple[float, int] | None = None  # when, and at how many frames, the warm-up was over
        self._cpu: list[tuple[float, float]] = []  # since then: when, how many CPU seconds
        self._notes: dict[str, Any] = {}
        self._frames = 0
        self._at_target: dict[str, float | int] = {}
        self._measured: dict[str, float] | None = None

    def begin(self) -> None:
        """Call right before the first environment step; later calls do nothing."""
        if self._first_step is None:
            self._first_step = time.perf_counter()

    def episode(self, episode_return: float, frames: int) -> None:
        """A training episode has ended after `frames` environment steps in total."""
        mean = self._window.add(episode_return)
        if mean is not None and mean >= self._args.target:
            self.reach(frames)

    def reach(self, frames: int) -> None:
        """The target is reached now; later calls do nothing."""
        if self._at_target:
            return
        self._at_target = {
            "time_to_target_s": round(time.perf_counter() - self._process_start, 3),
            "cpu_to_target_s": round(tree_usage().cpu_s, 2),
            "frames_to_target": frames,
        }

    def iteration(self, frames: int) -> None:
        self._iterations.append((time.perf_counter(), frames))
        self.saw(frames)
        warm_s = _WARMUP_S.get(self._args.mode, 0.0)
        if self._steady is None and len(self._iterations) >= WARMUP_ITERATIONS and self._train_s() >= warm_s:
            self._steady = self._iterations[-1]
        if self._steady is not None and (not self._cpu or self._iterations[-1][0] - self._cpu[-1][0] >= RSS_INTERVAL_S):
            self._cpu.append((time.perf_counter(), tree_usage().cpu_s))  # now: processes that have ended count no more

    def saw(self, frames: int) -> None:
        """Progress within an iteration, so that `max_frames` and `max_seconds` hold there too."""
        self._frames = max(self._frames, frames)

    def note(self, values: dict[str, Any]) -> None:
        """Something else that is to stand in the result."""
        self._notes |= values

    @property
    def reached(self) -> bool:
        return bool(self._at_target)

    @property
    def over(self) -> bool:
        """Whether to stop now: target reached, or out of frames or time."""
        return self.reached or self._frames >= self._args.max_frames or self._train_s() >= self._args.max_seconds

    def stop(self) -> None:
        """End all measuring. `finish` does it too; call it earlier where a library takes time to wind down."""
        if self._measured is not None:
            return
        train_s = self._train_s()
        first_step = self._first_step or time.perf_counter()
        self._measured = {
            "startup_s": round(first_step - self._process_start, 3),
            "frames": self._frames,
            "train_s": round(train_s, 3),
            "fps": round(self._fps(train_s), 1),
            "cpu_s": round(tree_usage().cpu_s, 2),
            "cores": round(self._cores(), 3),
            "peak_rss_mb": round(self._peak_rss.close(), 1),
        }

    def finish(self, evaluate: Callable[[], float] | None = None) -> None:
        """Print the result. `evaluate` runs after all measuring, and only if the target was reached."""
        self.stop()
        eval_mean = evaluate() if evaluate and self.reached else None
        best = self._window.best
        self._out.write(
            {
                "peer": self._peer,
                "task": self._args.task,
                "mode": self._args.mode,
                "seed": self._args.seed,
                "threads": self._args.threads,
                "settings": self._settings,
                **(self._measured or {}),
                **self._notes,
                "reached": self.reached,
                "time_to_target_s": self._at_target.get("time_to_target_s"),
                "cpu_to_target_s": self._at_target.get("cpu_to_target_s"),
                "frames_to_target": self._at_target.get("frames_to_target"),
                "eval_mean": None if eval_mean is None else round(eval_mean, 2),
                "best_mean": None if best is None else round(best, 2),
            }
        )

    def _train_s(self) -> float:
        return 0.0 if self._first_step is None else time.perf_counter() - self._first_step

    def _fps(self, train_s: float) -> float:
        if self._steady is None or self._iterations[-1][0] <= self._steady[0]:
            return self._frames / train_s if train_s else 0.0
        (start_s, start_frames), (end_s, end_frames) = self._steady, self._iterations[-1]
        return (end_frames - start_frames) / (end_s - start_s)

    def _cores(self) -> float:
        """CPU seconds per second since the warm-up, of the whole process tree."""
        if len(self._cpu) < 2:
            return 0.0
        (start_s, start_cpu_s), (end_s, end_cpu_s) = self._cpu[0], self._cpu[-1]
        return (end_cpu_s - start_cpu_s) / (end_s - start_s)


def skip(peer: str, args: Args, reason: str) -> None:
    """The one line of a peer that does not do this task."""
    print(json.dumps({"peer": peer, "task": args.task, "skipped": reason}))


def describe(settings: Any, **extra: Any) -> dict[str, Any]:
    """A settings dataclass, plus what one library adds to it, for the `settings` field."""
    return {**asdict(settings), **extra}
