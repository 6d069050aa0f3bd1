"""Agent of `ludus doctor` on another machine, started over SSH or srun. It checks this machine and answers with JSON lines:

    ← {"hello": {"host": …, "versions": {…}}}
    → {"clock": 1}                                   ← {"time": seconds since the epoch}
    → {"look": {…}, "environment": {…}}              ← {"finding": {…}} … {"end": how many, "token": its fingerprint}

Requests and secrets come on stdin, never on a command line. Answers start with a mark, because modules and login scripts may print too.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ludus.io import json_lines
from ludus.launch.doctor.checks.versions import inspect_versions
from ludus.launch.doctor.local_checks import DoctorRequest, run_local_checks, this_machine
from ludus.launch.doctor.remote_nodes import MARK


def main() -> None:
    _send({"hello": {"host": this_machine(), "versions": inspect_versions(), "python": sys.executable}})
    for line in sys.stdin:
        try:
            request = json_lines.decode(line)
        except ValueError:
            continue
        if "clock" in request:
            _send({"time": time.time()})
        elif "look" in request:
            os.environ.update({str(name): str(value) for name, value in request.get("environment", {}).items()})
            report = run_local_checks(DoctorRequest.of(request["look"]))
            for finding in report.findings:  # one line each: srun breaks long lines
                _send({"finding": finding.to_json()})
            _send({"end": len(report.findings), "token": report.token})
    sys.stdout.flush()
    os._exit(0)  # without waiting for check threads that hang


def _send(answer: dict[str, Any]) -> None:
    json_lines.write_marked(MARK, answer)


if __name__ == "__main__":
    main()
