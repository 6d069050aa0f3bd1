"""The far side of `ludus doctor`: looks at this machine, for whoever started it over SSH or srun, and answers by lines.

    ← {"hello": {"host": …, "versions": {…}}}
    → {"clock": 1}                                   ← {"time": seconds since the epoch}
    → {"look": {…}, "environment": {…}}              ← {"finding": {…}} … {"end": how many, "token": its fingerprint}

What is asked comes over the input, and so do secrets: neither is ever in a command line. Lines that are ours begin with a mark: modules
and login scripts like to talk.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ludus.io import json_lines
from ludus.launch.doctor.checks.versions import look_versions
from ludus.launch.doctor.local_checks import Request, examine, this_machine
from ludus.launch.doctor.remote_nodes import MARK


def main() -> None:
    _say({"hello": {"host": this_machine(), "versions": look_versions(), "python": sys.executable}})
    for line in sys.stdin:
        try:
            asked = json_lines.decode(line)
        except ValueError:
            continue
        if "clock" in asked:
            _say({"time": time.time()})
        elif "look" in asked:
            os.environ.update({str(name): str(value) for name, value in asked.get("environment", {}).items()})
            examined = examine(Request.of(asked["look"]))
            for finding in examined.findings:  # each on a line of its own: srun breaks long ones
                _say({"finding": finding.to_json()})
            _say({"end": len(examined.findings), "token": examined.token})
    sys.stdout.flush()
    os._exit(0)  # a look that hangs must not keep us


def _say(answer: dict[str, Any]) -> None:
    json_lines.write_marked(MARK, answer)


if __name__ == "__main__":
    main()
