"""Trains with a recommended configuration for a moment, in another process, and measures what a step costs.

As a program it reads the experiment as JSON from a file, and writes the result to another one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ludus.core import trust
from ludus.errors import LudusError
from ludus.experiments.recommendation.settings import TrialCost
from ludus.io.atomic_file import replace_json
from ludus.process.commands.command import Games

TRIAL_S = 180.0


def run_trial(experiment: Mapping[str, Any], timeout_s: float = TRIAL_S) -> tuple[TrialCost | None, str]:
    """Returns (cost, "") or (None, why the configuration does not train)."""
    with tempfile.TemporaryDirectory(prefix="ludus-check-env-") as directory, Games() as games:
        task, result = Path(directory) / "task.json", Path(directory) / "result.json"
        task.write_text(json.dumps(experiment), encoding="utf-8")
        command = [sys.executable, "-P", "-m", __name__, str(task), str(result)]
        trial = games.start(command, log=Path(directory) / "log", environment=dict(os.environ), directory=Path.cwd())
        ended = trial.wait(timeout_s)
        if ended is None:
            trial.stop(1.0)
            return None, f"it was not measured within {timeout_s:g} s"
        if not result.exists():
            return None, f"its process {ended}: {(ended.last_lines or ('',))[-1]}"
        answer = json.loads(result.read_bytes())
    return (None, answer["failed"]) if "failed" in answer else (TrialCost(**answer), "")


# -- in the other process -------------------------------------------------------------------------------------------------


def main(task: Path, result: Path) -> NoReturn:
    sys.path.insert(0, "")  # `module:function` is searched in the working directory too, as by `ludus train`
    experiment = json.loads(task.read_bytes())
    trust.allow(experiment)  # the user gave these names to the command
    try:
        answer = asdict(measure_trial(experiment))
    except LudusError as error:
        answer = {"failed": str(error)}
    except Exception as error:  # of the environment or its libraries
        answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
    replace_json(result, answer)
    os._exit(0)  # do not wait for threads of the environment


def measure_trial(experiment: Mapping[str, Any]) -> TrialCost:
    """Sample and learn in this process for a moment. Raises LudusError."""
    import torch

    from ludus.experiments.assembly.auto_workers import PER_CORE, best_number, measure, measure_matches
    from ludus.experiments.resolve import resolve
    from ludus.process.host import usable_cores

    torch.set_num_threads(1)
    config = {**experiment["config"], "num_workers": 0}
    resolved = resolve({"name": "trial", **experiment, "config": config})
    env, cores = resolved.experiment.env, usable_cores()
    measure_cost = measure_matches if resolved.config.multiagent is not None else measure
    cost = measure_cost(env, resolved.algorithm, resolved.config)
    possible = range(1, PER_CORE * cores + 1)
    workers = best_number(cost, cores, "sync", possible)
    speeds = {
        "alone": cost.speed(0, cores, "sync"),
        "workers": max(cost.speed(number, cores, "sync") for number in possible),
        "async": max(cost.speed(number, cores, "async") for number in possible),
    }
    return TrialCost(cost.sample_s, cost.wait_s, cost.learn_s, cost.environment_s, cores, workers, speeds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
