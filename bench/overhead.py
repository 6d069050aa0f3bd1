"""What the program costs: the same components driven by the in-process runtime, and by hand in a bare loop, interleaved.

Run as `python -m bench.overhead`; prints one JSON line with the median ratio of their frames/s.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

from bench.ours import equal
from ludus.experiments import runner
from ludus.experiments.runner import Parts
from ludus.experiments.runs.run_dir import Run

ROUNDS, ITERATIONS = 15, 12


def through_program(parts: Parts) -> None:
    last = parts.trainer.progress.iterations + ITERATIONS
    parts.runtime.run(lambda: parts.trainer.progress.iterations >= last)


def by_hand(parts: Parts) -> None:
    for _ in range(ITERATIONS):
        parts.sampler.step()
        parts.trainer.step()


def timed(run: object, parts: Parts) -> float:
    frames, began = parts.trainer.progress.timesteps, time.perf_counter()
    run(parts)  # type: ignore[operator]
    return (parts.trainer.progress.timesteps - frames) / (time.perf_counter() - began)


def main() -> None:
    resolved = runner.resolve({"env": "CartPole-v1", "stop": {"iterations": 1 << 40}, "config": equal("cartpole")})
    with tempfile.TemporaryDirectory() as directory:
        run = Run.create(Path(directory) / "run", resolved.saved())
        with runner.assembled(resolved, lambda: run, None, [], 0) as parts:
            by_hand(parts)
            pairs = [(timed(through_program, parts), timed(by_hand, parts)) for _ in range(ROUNDS)]
    ratios = sorted(program / bare for program, bare in pairs)
    print(
        json.dumps(
            {
                "program_fps": round(statistics.median(p for p, _ in pairs)),
                "by_hand_fps": round(statistics.median(b for _, b in pairs)),
                "program_over_by_hand": round(statistics.median(ratios), 4),
                "quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[3 * len(ratios) // 4], 4)],
            }
        )
    )


if __name__ == "__main__":
    main()
