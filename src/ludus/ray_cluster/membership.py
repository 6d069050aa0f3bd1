"""Present and former nodes of a Ray cluster: `python -m ludus.ray_cluster.membership HOST:PORT TOKEN_FILE` prints one line of JSON.

A separate process, because Ray reads its settings only once per process and may terminate it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludus.errors import Unreachable

QUERY_S = 10.0
WITHIN_S = 40.0
"""A busy machine takes a while to import Ray."""


@dataclass(frozen=True)
class NodeRecord:
    """A node, as the head reports it. `since`, `until`: seconds since 1970; `until` is 0 while it is alive, else `why` is the reason."""

    address: str
    host: str
    cores: int
    head: bool
    since: float
    until: float = 0.0
    why: str = ""

    @property
    def alive(self) -> bool:
        return not self.until


def arguments(address: str, token_file: Path | str) -> tuple[str, ...]:
    """Arguments of this module, here or on another machine."""
    return (address, str(token_file))


def query_nodes(address: str, token_file: Path, within_s: float = WITHIN_S) -> list[NodeRecord]:
    """Query the nodes, oldest first. Raises Unreachable."""
    command = [sys.executable, "-P", "-m", __name__, *arguments(address, token_file)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=within_s, check=False)  # noqa: S603 - this module
    except subprocess.TimeoutExpired:
        raise Unreachable(f"The head of the Ray at {address} did not answer within {within_s:g} s.") from None
    return parse_output(done.stdout.decode(errors="replace"), address)


def parse_output(output: str, address: str) -> list[NodeRecord]:
    """Parse the output of the process. Raises Unreachable."""
    for line in reversed(output.splitlines()):
        if not line.startswith("{"):
            continue
        try:
            found = json.loads(line)
        except ValueError:  # incomplete
            break
        if "refused" in found:
            raise Unreachable(f"The head of the Ray at {address} does not answer: {found['refused']}")
        return sorted((NodeRecord(**each) for each in found["residents"]), key=lambda each: (each.since, each.address))
    raise Unreachable(f"The head of the Ray at {address} does not answer.")


def main(output: Sequence[str]) -> None:
    address, token_file = output
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file, "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.pop("RAY_AUTH_TOKEN", None)
    reply: dict[str, Any]
    try:
        import ray

        client = ray._raylet.GcsClient(address=address)  # type: ignore[attr-defined]
        reply = {"residents": [asdict(_node_record(info)) for info in client.get_all_node_info(timeout=QUERY_S).values()]}
    except Exception as error:  # any error is the result
        reply = {"refused": f"{error}"}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads need no cleanup, and may wait for a head that is gone


def _node_record(info: Any) -> NodeRecord:
    cores = int(dict(info.resources_total).get("CPU", 0))
    gone = 0.0 if info.state == 0 else info.end_time_ms / 1000 or 1.0
    why = str(info.death_info.reason_message) if gone else ""
    return NodeRecord(
        info.node_manager_address, info.node_manager_hostname, cores, info.is_head_node, info.start_time_ms / 1000, gone, why
    )


if __name__ == "__main__":
    main(sys.argv[1:])
