"""Private screens: time to start, memory, and pictures per second.

python -m bench.screens
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.train import RESULTS, provenance
from ludus.display.opengl_probe import probe_backend
from ludus.display.private_screen import PrivateScreen
from ludus.display.screen_grab import ScreenGrab
from ludus.process import procfs

MANY = 20
SIZES = ((84, 84), (640, 480), (1280, 1024))
FRAMES = 100
WINDOW = Path(__file__).parents[1] / "tests" / "display" / "window.py"
HOW = """\
An Xvfb of 1280 × 1024 pixels as `PrivateScreen` starts it. Memory is the proportional set size of the X server (smaps_rollup): pages that several
of them share count in parts. A picture is read from a window that pygame has drawn. Median [least–most] of {rounds} rounds."""


def pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def servers(screens: Sequence[PrivateScreen]) -> list[int]:
    return [next(iter(procfs.list_descendants(screen._command.guard.pid))) for screen in screens]


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextlib.contextmanager
def window(private: PrivateScreen, width: int, height: int) -> Iterator[None]:
    command = [sys.executable, str(WINDOW), str(width), str(height), "10", "20", "30"]
    environment = {**os.environ, **private.variables()}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as game:
        assert game.stdout is not None
        assert any(line == "drawn\n" for line in game.stdout)
        yield
        game.communicate()


def measure() -> dict[str, float]:
    found: dict[str, float] = {}
    screens: list[PrivateScreen] = []
    found["start of one, ms"] = 1e3 * timed(lambda: screens.append(PrivateScreen()))
    with screens[0] as one:
        found["memory of one, MB"] = pss_mb(servers([one])[0])
        found["check of its OpenGL, ms"] = 1e3 * timed(lambda: probe_backend("glx", {**os.environ, **one.variables()}))
        for width, height in SIZES:
            with window(one, width, height), ScreenGrab(one) as grab:
                grab.frame()
                seconds = timed(lambda: [grab.frame() for _ in range(FRAMES)])
                found[f"pictures of {width} × {height} per second"] = FRAMES / seconds
    with ThreadPoolExecutor(MANY) as pool:
        screens = []
        found[f"start of {MANY} at once, ms"] = 1e3 * timed(
            lambda: screens.extend(pool.map(lambda _: PrivateScreen(), range(MANY)))
        )
        found[f"memory of {MANY}, MB each"] = statistics.mean(map(pss_mb, servers(screens)))
        found[f"end of {MANY} at once, ms"] = 1e3 * timed(lambda: list(pool.map(lambda screen: screen.close(), screens)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args(argv).rounds
    measure()  # warms the caches of files; not counted
    rows: list[dict[str, Any]] = [measure() for _ in range(rounds)]
    lines = ["| | |", "|---|---:|"]
    for name in rows[0]:
        values = [row[name] for row in rows]
        lines.append(f"| {name} | {statistics.median(values):,.0f} [{min(values):,.0f}–{max(values):,.0f}] |")
    head, how = provenance(), HOW.format(rounds=rounds)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    how += f" Load averages of the machine at the end, other work included: {load}."
    (RESULTS / "screens.json").write_text(json.dumps(head | {"how": how, "rows": rows}, indent=1))
    text = (
        f"# Private screens\n\n{head['date']}, commit {head['commit']}, {head['cpu']}, Python {head['python']}\n\n{how}\n\n"
        + "\n".join(lines)
    )
    (RESULTS / "screens.md").write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
