"""How many of RLlib's published experiment files Ludus accepts unchanged.

    python -m bench.rllib_files DIR        # a directory with YAML files, such as rllib/tuned_examples of a release of Ray

Each file whose `run` is one of RUNS is checked as `ludus config check` does it; one that asks for GPUs that this machine does not
have is checked again with `--num-gpus 0`. Nothing is trained. Prints a line per file and the counts as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import yaml

from ludus.cli.training.config_check import check_file
from ludus.errors import LudusError

RUNS = ("PPO", "APPO", "IMPALA", "DQN", "SimpleQ", "A2C")


def algorithms(path: Path) -> set[str]:
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError:
        return set()
    inner = data.values() if isinstance(data, dict) else ()
    return {str(one.get("run")) for one in inner if isinstance(one, dict)}


def outcome(path: Path) -> tuple[str, str]:
    """accepted, accepted with --num-gpus 0, or refused with the first reason."""
    errors: list[str] = []
    for verdict, options in (("accepted", {}), ("accepted with --num-gpus 0", {"num_gpus": 0})):
        try:
            errors = list(map(str, check_file(path, options).errors))
        except LudusError as error:
            errors = [str(error)]
        if not errors:
            return verdict, ""
    return "refused", errors[0].splitlines()[0]


def main() -> int:
    root = Path(sys.argv[1])
    files = [path for path in sorted(root.rglob("*.yaml")) if algorithms(path) & set(RUNS)]
    counts: Counter[str] = Counter()
    for path in files:
        verdict, reason = outcome(path)
        counts[verdict] += 1
        print(f"{verdict:26} {path.relative_to(root)} {reason[:160]}")
    print(json.dumps({"files": len(files), **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
