"""What checkers of environments find in purpose-built faulty ones: `ludus check-env`, Gymnasium's and Stable-Baselines3's `check_env`.

    python -m bench.check_env_zoo            # Stable-Baselines3 must be importable: pip install --no-deps stable-baselines3

Every checker looks at every environment of `tests/envs/env_check/zoo.py` in a process of its own, with a limit. *error*: it raised, or
reported a mistake. *warning*: a warning that it does not give for the environment without a fault.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from bench.train import provenance
from ludus.core import trust
from ludus.envs.env_check.runner import check_env as ludus_check
from ludus.envs.env_check.session import CheckRequest
from ludus.envs.env_check.stages import check_in_process
from tests.envs.env_check import zoo
from tests.envs.env_check.test_findings import FAULTS, SETTINGS, ZOO

RESULTS = Path(__file__).parent / "results"
CLEAN = ("Walk", "Grid", "Masked")
IN_A_CHILD = {
    "Hangs": "hang",
    "Crashes": "crash",
    "Exits": "exits",
    "ExitsHard": "exits",
    "CrashesAfterEnd": "after_end",
    "Prints": "prints",
}
LIMIT_S = 60


def by_ludus(kind: str) -> list[str]:
    settings = {"seconds": 20.0, "steps": 1_500, "measure_s": 0.02, **SETTINGS.get(kind, {})}
    request = CheckRequest(ZOO, {"kind": kind}, **settings)
    if kind in IN_A_CHILD:
        report = ludus_check(request, stages=("spaces", "play", "endings"), timeout_s=2.0)
    else:
        report = check_in_process(request)
    return [
        f"{'error' if finding.check.level == 'mistake' else finding.check.level}: {finding.check.kind}"
        for finding in report.findings
    ]


def by_other(check: Callable[..., None], kind: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check(zoo.make(kind))
        except (Exception, SystemExit) as error:
            return [f"error: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"]
    return sorted({"warning: " + re.sub(r"\x1b\[\d*m|0x\w+|<.*?>", "", str(each.message))[:100] for each in caught})


def in_fork(function: Callable[[], list[str]]) -> list[str]:
    """Run in a forked process, which may crash, exit or hang."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(LIMIT_S)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.write(writer, json.dumps(function()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(answer) if answer else [f"ended: {os.waitstatus_to_exitcode(status)}"]


def verdict(found: list[str], clean: set[str]) -> str:
    new = [text for text in found if text not in clean]
    for level in ("error", "warning", "advice", "ended"):
        if any(text.startswith(level) for text in new):
            return {"ended": "its process ended"}.get(level, level)
    return "–"


def main() -> int:
    from gymnasium.utils.env_checker import check_env as gymnasium_check
    from stable_baselines3 import __version__ as sb3_version
    from stable_baselines3.common.env_checker import check_env as sb3_check

    trust.allow(ZOO)
    checkers: dict[str, Callable[[str], list[str]]] = {
        "ludus": by_ludus,
        "gymnasium": lambda kind: by_other(gymnasium_check, kind),
        "sb3": lambda kind: by_other(sb3_check, kind),
    }
    clean = {
        name: {text for kind in CLEAN for text in in_fork(lambda kind=kind, check=check: check(kind))}
        for name, check in checkers.items()
    }
    began, rows = time.perf_counter(), {}
    for kind in [*CLEAN, *FAULTS, *IN_A_CHILD]:
        found = {name: in_fork(lambda kind=kind, check=check: check(kind)) for name, check in checkers.items()}
        expected = FAULTS[kind][0] if kind in FAULTS else IN_A_CHILD.get(kind, "")
        rows[kind] = {"fault": expected, **{name: verdict(found[name], clean[name]) for name in checkers}, "text": found}
        print(f"{kind:20} {' '.join(f'{rows[kind][name]:18}' for name in checkers)}", flush=True)
    counts = {
        name: sum(row[name] in ("error", "warning", "advice") for row in rows.values() if row["fault"]) for name in checkers
    }
    import gymnasium

    versions = {"gymnasium": gymnasium.__version__, "stable_baselines3": sb3_version}
    head = provenance()
    data = {**head, "versions": versions, "faults": len(FAULTS) + len(IN_A_CHILD), "found": counts, "rows": rows}
    (RESULTS / "check-env-zoo.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (RESULTS / "check-env-zoo.md").write_text(table(data), encoding="utf-8")
    print(counts, f"{time.perf_counter() - began:.0f} s")
    return 0


def table(data: dict) -> str:
    count, found = data["faults"], data["found"]
    lines = [
        "# Checkers of environments", "",
        f"{data['date']}, commit {data['commit']}, {data['cpu']}. Gymnasium {data['versions']['gymnasium']}, Stable-Baselines3 "
        f"{data['versions']['stable_baselines3']}.", "",
        f"{count} environments with one fault each, and {len(CLEAN)} without. Found: `ludus check-env` {found['ludus']}, Gymnasium's `check_env` "
        f"{found['gymnasium']}, Stable-Baselines3's {found['sb3']}. Some faults do not matter to the other libraries.", "",
        "| environment | fault | ludus check-env | gymnasium | stable-baselines3 |", "|---|---|---|---|---|",
        *(f"| {kind} | {row['fault'] or 'none'} | {row['ludus']} | {row['gymnasium']} | {row['sb3']} |" for kind, row in data["rows"].items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
