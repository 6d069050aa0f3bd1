"""Coverage-guided fuzzing of everything that reads bytes from outside.

    python -m bench.fuzz --seconds 3600           # all targets, in turn, for an hour altogether
    python -m bench.fuzz --target http --seconds 60

Needs `pip install atheris` (Linux). A finding is written to tests/fuzz/corpus/TARGET/, where the tests try it from then on; the
inputs that reached new code are kept in --corpus (default: a directory of its own in bench/.fuzz), from which the next run goes on.
Figures go to bench/results/fuzz.md.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
MEMORY_BYTES = 3 << 30
INPUT_BYTES = 4096
INSTRUMENTED = ["ludus", "httptools", "msgpack", "yaml", "configparser", "json"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    parser.add_argument("--corpus", type=Path, default=ROOT / "bench" / ".fuzz", help="inputs that reached new code")
    parser.add_argument("--worker", nargs=2, metavar=("TARGET", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        fuzz_target(options.worker[0], float(options.worker[1]), options.corpus)
        return 0
    from tests.fuzz.targets import targets

    names = options.target or sorted(targets())
    rows = [run_worker(name, options.seconds / len(names), options.corpus) for name in names]
    write_results(rows, options.seconds)
    return 1 if any(row["findings"] for row in rows) else 0


def fuzz_target(name: str, seconds: float, corpus: Path) -> None:
    """In a process of its own: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.targets import CORPUS, targets
    target = targets()[name]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))  # an input that asks for gigabytes is a finding
    place, kept = corpus / name, CORPUS / name
    place.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.corpus()):
        (place / f"seed-{number}").write_bytes(seed)
    accepted = calls = 0

    def one_input(data: bytes) -> None:
        nonlocal accepted, calls
        calls += 1
        try:
            accepted += target.check(data)
        except BaseException:
            kept.mkdir(parents=True, exist_ok=True)
            (kept / f"finding-{abs(hash(data)):x}").write_bytes(data)
            raise
        if calls % 500 == 0:
            (place.parent / f"{name}.json").write_text(json.dumps({"calls": calls, "accepted": accepted}))

    options = [f"-max_total_time={max(1, int(seconds))}", f"-max_len={INPUT_BYTES}", "-timeout=20", "-rss_limit_mb=0"]
    atheris.Setup([sys.argv[0], *options, str(place)], one_input)
    atheris.Fuzz()


def run_worker(name: str, seconds: float, corpus: Path) -> dict[str, Any]:
    """One target; its figures."""
    counted = corpus / f"{name}.json"
    counted.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.fuzz", "--corpus", str(corpus), "--worker", name, str(seconds)]
    began = time.time()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds + 300)
    figures = json.loads(counted.read_text()) if counted.exists() else {"calls": 0, "accepted": 0}
    covered = [int(found) for found in re.findall(r"cov: (\d+)", done.stderr)]
    row = {
        "target": name,
        "seconds": round(time.time() - began, 1),
        **figures,
        "edges": covered[-1] if covered else 0,
        "edges_of_seeds": covered[0] if covered else 0,
        "findings": int(done.returncode != 0),
    }
    print(json.dumps(row), flush=True)
    if done.returncode != 0:
        print(done.stdout[-3000:], done.stderr[-6000:], flush=True)
    return row


def write_results(rows: list[dict[str, Any]], seconds: float) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    date = time.strftime("%Y-%m-%d")
    head = f"`python -m bench.fuzz --seconds {seconds:g}`, {date}, commit {commit}. Coverage-guided (atheris), one process.\n"
    columns = ("target", "seconds", "calls", "accepted", "edges_of_seeds", "edges", "findings")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(f"{row[key]:,}" if isinstance(row[key], int) else str(row[key]) for key in columns) + " |"
        for row in rows
    ]
    told = "`accepted`: inputs that were valid; all others were refused as they should be. `edges`: branches reached, first by the seeds."
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fuzz.md").write_text("# Fuzzing\n\n" + head + "\n" + "\n".join(lines) + "\n\n" + told + "\n")
    (RESULTS / "fuzz.json").write_text(json.dumps({"date": date, "commit": commit, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
