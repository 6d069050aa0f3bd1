"""Nodes of a Ray cluster, queried in a separate process: Ray reads its settings only once per process and may terminate it.

    python -P -m ludus.ray_cluster.membership HOST:PORT [TOKEN_FILE]

prints one line of JSON: the present nodes with the versions of the cluster, and the present and former nodes with their times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludus.errors import Unreachable

AUTO = "auto"
"""Address of the cluster that `ray start` has started on this machine."""

SHARES = "ludus-shares-weights"
"""Label of Ray nodes; see `Member.shares`."""

QUERY_S = 10.0
WITHIN_S = 40.0
"""A busy machine takes a while to import Ray."""


@dataclass(frozen=True)
class Member:
    """A Ray node, as the head reports it."""

    id: str
    host: str
    address: str
    cores: int
    alive: bool
    head: bool
    name: str = ""
    shares: bool = False
    """Its cores are used by the learner on the same machine, if there is one."""
    directory: str = ""

    @staticmethod
    def from_info(info: Any) -> Member:
        """From the node information of Ray."""
        return Member(
            info.node_id.hex(),
            info.node_manager_hostname,
            info.node_manager_address,
            int(dict(info.resources_total).get("CPU", 0)),
            info.state == 0,
            info.is_head_node,
            info.node_name,
            SHARES in dict(info.labels),
            info.temp_dir,
        )


@dataclass(frozen=True)
class NodeRecord:
    """A present or former node. `since`, `until`: seconds since 1970; `until` is 0 while it is alive, else `why` is the reason."""

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

    @staticmethod
    def from_info(info: Any) -> NodeRecord:
        member, since = Member.from_info(info), info.start_time_ms / 1000
        gone = 0.0 if member.alive else info.end_time_ms / 1000 or 1.0
        why = str(info.death_info.reason_message) if gone else ""
        return NodeRecord(member.address, member.host, member.cores, member.head, since, gone, why)


def query_nodes(address: str, token_file: Path, within_s: float = WITHIN_S) -> list[NodeRecord]:
    """Query the nodes, oldest first. Raises Unreachable."""
    try:
        done = run_query(address, os.environ, within_s, str(token_file))
    except subprocess.TimeoutExpired:
        raise Unreachable(f"The head of the Ray at {address} did not answer within {within_s:g} s.") from None
    return parse_output(done.stdout.decode(errors="replace"), address)


def run_query(address: str, environ: Mapping[str, str], within_s: float, *token: str) -> subprocess.CompletedProcess[bytes]:
    """Run this module as a program. Raises TimeoutExpired."""
    command = [sys.executable, "-P", "-m", __name__, address, *token]
    return subprocess.run(command, env=dict(environ), capture_output=True, timeout=within_s, check=False)  # noqa: S603 - ours


def parse_output(output: str, address: str) -> list[NodeRecord]:
    """Parse the output of the program, here or on another machine. Raises Unreachable."""
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


# -- with Ray -----------------------------------------------------------------------------------------------------------------


def query_members(client: Any, address: str, timeout_s: float) -> dict[str, Any]:
    """Members and versions of the cluster, and records of its nodes. Raises the errors of Ray."""
    metadata = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=timeout_s) or b"{}")
    nodes = list(client.get_all_node_info(timeout=timeout_s).values())
    return {
        "address": address,
        "ray": metadata.get("ray_version", ""),
        "python": metadata.get("python_version", ""),
        "members": [vars(Member.from_info(info)) for info in nodes],
        "residents": [asdict(NodeRecord.from_info(info)) for info in nodes],
    }


def main(words: Sequence[str]) -> None:
    address = words[0]
    if words[1:]:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": words[1], "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.pop("RAY_AUTH_TOKEN", None)
    import ray

    try:
        if address == AUTO:
            found = ray._private.services.canonicalize_bootstrap_address(AUTO)
            if not found:
                raise ConnectionError("no Ray started by `ray start` runs on this machine")
            address = str(found)
        reply = query_members(ray._raylet.GcsClient(address=address), address, QUERY_S)  # type: ignore[attr-defined]
    except ray.exceptions.AuthenticationError:
        reply = {"refused": "token"}
    except Exception as error:  # Ray raises many types; any of them is the result
        reply = {"refused": f"{error}"}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads need no cleanup, and may wait for a head that is gone


if __name__ == "__main__":
    main(sys.argv[1:])
