"""What a training imports: only the code of its own training mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MODULES = 115
"""Modules with code, not the empty `__init__.py` of packages. 29 of them are of ludus.experiments, 24 of algorithms and models, 15 of config."""

OTHER_MODES = {"compat", "display", "distributed", "gamecore", "gateway", "launch", "ray_cluster", "remote", "serving", "tournament", "tuning"}  # fmt: skip
"""Packages that a training in one process does not need."""

_TRAIN = """
import json, sys
from pathlib import Path
import ludus
ludus.train("CartPole-v1", stop={"timesteps": 500}, local_dir=sys.argv[1], num_envs=4, evaluation_duration=2, progress=False)
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "ludus"]
print(json.dumps([module.__name__ for module in ours if Path(module.__file__).read_text().strip()]))
print(json.dumps(sorted(name for name in ("boto3", "ray", "redis", "httptools", "pettingzoo", "rich") if name in sys.modules)))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Names of our modules, and of optional libraries, after a training in a fresh interpreter."""
    command = [sys.executable, "-c", _TRAIN, str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=Path(__file__).parents[2])
    modules, libraries = map(json.loads, done.stdout.splitlines()[-2:])
    return modules, libraries


def test_a_training_in_one_process_imports_no_other_training_mode(imported: tuple[list[str], list[str]]) -> None:
    modules, libraries = imported
    assert [name for name in modules if name.split(".")[1:2] and name.split(".")[1] in OTHER_MODES] == []
    modes = {"worker_training", "fleet_training", "http_training", "multi_agent_training", "auto_workers"}
    assert [name for name in modules if name.rpartition(".")[2] in modes] == []
    assert [name for name in modules if name.startswith(("ludus.process.workers", "ludus.storage.s3"))] == []
    assert libraries == []


def test_a_training_in_one_process_imports_few_modules(imported: tuple[list[str], list[str]]) -> None:
    assert len(imported[0]) <= MOST_MODULES
