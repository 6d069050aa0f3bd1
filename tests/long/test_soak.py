"""Ten minutes of training: memory stays where it was."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.long.record import record

MINUTES, WARM_UP_S, EVERY_S = 10, 60, 2.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_memory_does_not_grow_over_ten_minutes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ludus.cli.main", "train", "CartPole-v1", "--quiet", "--local-dir", str(tmp_path)]
    words += ["--stop", f"time_s={MINUTES * 60}", "--checkpoint-freq", "200", "--keep-checkpoints-num", "3"]
    process = subprocess.Popen(words)
    watched, began = psutil.Process(process.pid), time.monotonic()
    times, sizes, files = [], [], []
    while process.poll() is None:
        try:
            size, open_files = watched.memory_info().rss / 2**20, watched.num_fds()
        except psutil.NoSuchProcess:
            break
        if time.monotonic() - began > WARM_UP_S:
            times.append(time.monotonic() - began)
            sizes.append(size)
            files.append(open_files)
        time.sleep(EVERY_S)
    assert process.wait(timeout=60) == 0
    slope = float(np.polyfit(times, sizes, 1)[0]) * 600
    record(
        "10-minute soak",
        minutes=MINUTES,
        rss_max_mb=round(max(sizes), 1),
        rss_growth_mb_per_10_min=round(slope, 2),
        open_files_max=max(files),
    )
    assert max(sizes) < 600
    assert abs(slope) < 6, "MB in ten minutes"
    assert max(files) - min(files) <= 4
