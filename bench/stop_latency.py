"""How long a training takes to end after SIGTERM, and by how much it exceeds `time_s`, with slow environments.

    python -m bench.stop_latency [--out bench/results/stop-latency.json]

8 copies × 20 ms a step and `train_batch_size` 4,000: one batch takes 80 s, with 2 workers (sync) 40 s.

`late_s` is the time until the process has ended. For `time_s` it begins `time_s` after the first `status.json`, so that it includes
the start of the workers; `run_time_s` is the time from the first sampled step as the run itself reports it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

STEP_S = 0.02
SAMPLED_FOR_S = 4.0
TIME_LIMIT_S = 3.0
GIVE_UP_S = 400.0


class SlowEnv(gym.Env[Any, Any]):
    """Sleeps 20 ms in every step; an episode has 200 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(STEP_S)
        self._steps += 1
        return np.full(4, self._steps / 200, np.float32), 1.0, self._steps >= 200, False, {}


def make_slow() -> SlowEnv:
    return SlowEnv()


def _start(directory: Path, workers: int, stop: str) -> subprocess.Popen[bytes]:
    config = {
        "num_workers": workers,
        "num_envs_per_worker": 8,
        "rollout_fragment_length": 4000 // 8 // max(1, workers),
        "train_batch_size": 4000,
    }
    given = ["--config", json.dumps(config), "--stop", stop]
    command = [sys.executable, "-m", "ludus.cli.main", "train", "bench.stop_latency:make_slow", *given]
    return subprocess.Popen(
        [*command, "--project", str(directory.parent), "--trial", directory.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _until_running(process: subprocess.Popen[bytes], directory: Path) -> float:
    """When the run began to sample, as far as `status.json` shows."""
    while not (directory / "status.json").exists():
        if process.poll() is not None:
            raise SystemExit(f"the training ended: {process.stdout.read().decode() if process.stdout else ''}")
        time.sleep(0.02)
    return time.monotonic()


def _measure(workers: int, how: str, where: Path) -> dict[str, Any]:
    directory = where / f"{how}-{workers}"
    process = _start(directory, workers, f"time_s={TIME_LIMIT_S:g}" if how == "time_s" else "timesteps=1000000")
    began = _until_running(process, directory)
    due = TIME_LIMIT_S
    if how == "SIGTERM":
        time.sleep(SAMPLED_FOR_S)
        began, due = time.monotonic(), 0.0
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(GIVE_UP_S)
    finally:
        process.kill()
    seconds = time.monotonic() - began - due
    checkpoints = sorted(path.name for path in (directory / "checkpoints").glob("0*"))
    status = json.loads((directory / "status.json").read_text())
    text = process.stdout.read().decode() if process.stdout else ""
    words = [line for line in text.splitlines() if line.strip()]
    return {
        "how": how,
        "workers": workers,
        "late_s": round(seconds, 2),
        "run_time_s": round(status["progress"]["time_s"], 2),
        "exit_code": process.returncode,
        "checkpoint": bool(checkpoints),
        "last_lines": words[-5:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for workers in (0, 2):
            for how in ("SIGTERM", "time_s"):
                rows.append(_measure(workers, how, Path(scratch)))
                print(json.dumps(rows[-1]), flush=True)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
        "rows": [{key: value for key, value in row.items() if key != "last_lines"} for row in rows],
    }
    if out is not None:
        before = json.loads(out.read_text()) if out.exists() else []
        out.write_text(json.dumps([*before, report], indent=1) + "\n")


if __name__ == "__main__":
    main()
