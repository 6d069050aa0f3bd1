"""Stands where a node of Ray wants the agent of a dashboard: a small program that says that there is none.

Ray starts that agent whether there is a dashboard or not, waits for it, and ends with it: 100 MB and a second for nothing. It is given
the agent's command line, and writes what the agent of a Ray without dashboard writes: that its ports are -1.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # run as a file, without the packages that are installed
    sys.path.append(str(Path(__file__).parents[2]))

from ludus.process import identity

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def main(words: list[str]) -> None:
    parent = os.getppid()
    identity.die_with_parent(parent, signal.SIGKILL)
    told = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
    for name in PORTS:
        path = Path(told["session-dir"]) / f"{name}_{told['node-id']}"
        part = path.with_suffix(".part")
        part.write_text("-1")
        part.rename(path)
    while os.getppid() == parent:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
