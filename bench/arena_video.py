"""Frames per second of video rendering of the Arena, for this source tree and another one.

    git archive OLDER src | tar -x -C /tmp/older
    python -m bench.arena_video --against /tmp/older/src            (about 3 minutes)

A 3v3 match between two bots is recorded once. A part of it is rendered in separate processes, alternating between the source trees:
1280 pixels wide, 30 frames a second, as `ludus games arena play --video` does. CPU time is that of Python and ffmpeg together.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.train import RESULTS, provenance

_ROOT = Path(__file__).parents[1]
_WARM_S = 2.0
"""Part of the match rendered as warm-up of sprites, fonts and kernels."""


def record(path: Path, seed: int) -> None:
    words = ["games", "arena", "play", "--mode", "3v3", "--camps", "hard,medium", "--seed", str(seed), "--record", str(path)]
    subprocess.run([sys.executable, "-m", "ludus.cli.main", *words], check=True, stdout=subprocess.DEVNULL)


def render(recording: Path, first_s: float, last_s: float) -> dict[str, float]:
    """Render in this process."""
    from ludus.games.arena.engine.recording import read_recording
    from ludus.games.arena.render.video import write_video

    found = read_recording(recording)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "match.mp4"
        write_video(found, out, first_s=first_s, last_s=first_s + _WARM_S)
        cpu, began = _cpu_s(), time.perf_counter()
        frames = write_video(found, out, first_s=first_s, last_s=last_s)
        took, used = time.perf_counter() - began, _cpu_s() - cpu
        return {"frames": frames, "fps": frames / took, "cpu_ms": used / frames * 1e3, "mb": out.stat().st_size / 1e6}


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(source: Path, recording: Path, first_s: float, last_s: float) -> dict[str, float]:
    """Render in a separate process with the package from `source`."""
    command = [sys.executable, str(Path(__file__)), "--render", str(recording), "--from", str(first_s), "--to", str(last_s)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source), str(_ROOT)))}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| | frames/s by the clock | CPU time of a frame, ms | frames | file, MB |", "|---|---:|---:|---:|---:|"]
    for name, measured in rounds.items():
        fps, cpu = (_format_median([one[key] for one in measured]) for key in ("fps", "cpu_ms"))
        lines.append(f"| {name} | {fps} | {cpu} | {measured[0]['frames']:.0f} | {measured[0]['mb']:.1f} |")
    return "\n".join(lines)


def _format_median(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} [{min(values):.1f}–{max(values):.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the `src` directory of another version")
    parser.add_argument("--from", dest="first_s", type=float, default=60.0, help="second of the match")
    parser.add_argument("--to", dest="last_s", type=float, default=90.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--render", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.render is not None:
        print(json.dumps(render(args.render, args.first_s, args.last_s)))
        return
    sources = ({"before": args.against} if args.against else {}) | {"now": _ROOT / "src"}
    load = os.getloadavg()[0]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    with tempfile.TemporaryDirectory() as directory:
        recording = Path(directory) / "match.arena"
        record(recording, args.seed)
        for _ in range(args.repeats):
            for name, source in sources.items():
                rounds[name].append(measure(source, recording, args.first_s, args.last_s))
                print(name, rounds[name][-1], flush=True)
    write(rounds, args.last_s - args.first_s, load)


def write(rounds: dict[str, list[dict[str, float]]], seconds: float, load: float) -> None:
    where: Any = provenance()
    text = [
        "# arena-film",
        "",
        f"{where['date']}, commit {where['commit']}, {where['cpu']}, Python {where['python']}",
        "",
        f"{seconds:g} s of a recorded 3v3 match rendered and encoded as H.264, 1280 × 720, 30 frames a second, in a separate process. CPU time of Python and",
        f"ffmpeg together. Median [least–most] of {len(rounds['now'])} rounds, in turn. Load of the machine before it: {load:.1f}.",
        "",
        table(rounds),
        "",
    ]
    (RESULTS / "arena-film.md").write_text("\n".join(text))
    (RESULTS / "arena-film.json").write_text(json.dumps({**where, "load": load, "rounds": rounds}, indent=1) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
