"""What the run controller costs: the same components driven by `RunController.run`, and in a bare loop, interleaved.

Run as `python -m bench.overhead`; prints one JSON line with the median ratio of their frames/s.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

from bench.ours import equal
from ludus.experiments.assembly.components import TrainingComponents
from ludus.experiments.resolve import resolve
from ludus.experiments.training import assemble_run, prepare_new_run

ROUNDS, ITERATIONS = 15, 12


def by_controller(parts: TrainingComponents) -> None:
    last = parts.trainer.progress.iterations + ITERATIONS
    parts.controller.run(lambda: parts.trainer.progress.iterations >= last)


def by_hand(parts: TrainingComponents) -> None:
    for _ in range(ITERATIONS):
        parts.source.step()
        parts.trainer.step()


def timed(run: object, parts: TrainingComponents) -> float:
    frames, began = parts.trainer.progress.timesteps, time.perf_counter()
    run(parts)  # type: ignore[operator]
    return (parts.trainer.progress.timesteps - frames) / (time.perf_counter() - began)


def main() -> None:
    resolved = resolve({"env": "CartPole-v1", "stop": {"iterations": 1 << 40}, "config": equal("cartpole")})
    with (
        tempfile.TemporaryDirectory() as directory,
        assemble_run(prepare_new_run(resolved, Path(directory) / "run")) as parts,
    ):
        by_hand(parts)
        pairs = [(timed(by_controller, parts), timed(by_hand, parts)) for _ in range(ROUNDS)]
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
