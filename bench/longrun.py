"""`make test-long`: the tests marked long, with what they measured kept in `bench/results` with date and commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "results.jsonl"
        began = time.time()
        command = [sys.executable, "-m", "pytest", "-m", "long", "-o", "addopts=", "-ra", *sys.argv[1:], "tests"]
        code = subprocess.run(command, cwd=HERE.parent, env=os.environ | {"LUDUS_LONG_RESULTS": str(lines)}).returncode
        rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    head = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "passed": code == 0, "seconds": round(time.time() - began)}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "test-long.json").write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    print(json.dumps(head | {"rows": rows}, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
