"""Replacement for the dashboard agent of a Ray node, which Ray starts even without a dashboard and which takes 100 MB and a second.

It gets the agent's command line and writes what the agent of a Ray without a dashboard writes: its ports are -1. Ray ends with it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a file, without installed packages
    sys.path.append(str(Path(__file__).parents[2]))

from ludus.process import children

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def main(words: list[str]) -> None:
    parent = os.getppid()
    children.die_with_parent(parent, signal.SIGKILL)
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    for name in PORTS:
        path = Path(options["session-dir"]) / f"{name}_{options['node-id']}"
        part = path.with_suffix(".part")
        part.write_text("-1")
        part.rename(path)
    while os.getppid() == parent:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
