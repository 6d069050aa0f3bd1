"""Environment variables that describe a job's nodes to its processes. This module imports nothing heavy.

A job runs on one or more machines, its *nodes*. Node 0 runs the main role, and the head of the job's Ray cluster if it has one.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UsageError
from ludus.io.addresses import url_host

NODES, NODE, PORT, TOKEN, RAY, WAIT = (
    "LUDUS_JOB_NODES", "LUDUS_JOB_NODE", "LUDUS_JOB_PORT", "LUDUS_JOB_TOKEN_FILE", "LUDUS_JOB_RAY", "LUDUS_JOB_WAIT_S",
)  # fmt: skip
LEARNERS = "LUDUS_JOB_LEARNERS"
"""Number of learners on other nodes that connect to the first learner. Set for the main role only."""

RUN = "LUDUS_JOB_RUN"
"""File that names the run of the main role, so that a restarted main role resumes it, possibly on another machine."""

FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Between well-known service ports and Linux' default range for outgoing connections (from 32768)."""

PORTS = 3
"""Ports that a job needs on node 0: Ray head, lifeline, first learner."""

WAIT_S = 300.0


@dataclass(frozen=True)
class JobEnv:
    """Nodes, ports and token of a job, as one of its processes sees them.

    `nodes`: their addresses. `node`: number of this node. `port`: of the Ray head; the next two are for the lifeline and the first
    learner. `token_file`: the job's shared secret, mode 0600. `ray`: nodes that must be in the Ray cluster before work starts;
    0: no Ray. `learners`: number of learners on other nodes.
    """

    nodes: tuple[str, ...] = ("127.0.0.1",)
    node: int = 0
    port: int = 0
    token_file: Path | None = None
    ray: int = 0
    wait_s: float = WAIT_S
    learners: int = 0

    @property
    def head(self) -> str:
        """HOST:PORT of the job's Ray head; an IPv6 address is in brackets."""
        return f"{url_host(self.nodes[0])}:{self.port}"

    @property
    def lifeline_address(self) -> tuple[str, int]:
        """Where node 0 listens for the lifelines of the other nodes (SSH jobs)."""
        return self.nodes[0], self.port + 1

    @property
    def learner_address(self) -> tuple[str, int]:
        """Where the first learner listens for the others."""
        return self.nodes[0], self.port + 2

    def token(self) -> bytes:
        """Raises UsageError if there is no token, or if other users can read its file."""
        if self.token_file is None:
            raise UsageError(f"This job has no token: {TOKEN} is not set.")
        from ludus.process.auth import read_token

        return read_token(self.token_file)

    def environment(self) -> dict[str, str]:
        variables = {NODES: ",".join(self.nodes), NODE: str(self.node), PORT: str(self.port)}
        if self.token_file is not None:
            variables[TOKEN] = str(self.token_file)
        if self.ray:
            variables |= {RAY: str(self.ray), WAIT: f"{self.wait_s:g}"}
        if self.learners:
            variables |= {LEARNERS: str(self.learners), WAIT: f"{self.wait_s:g}"}
        return variables

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> JobEnv | None:
        """Read the variables. None: this process belongs to no job with nodes. Raises UsageError if they are inconsistent."""
        if not environ.get(NODES):
            return None
        try:
            nodes = tuple(environ[NODES].split(","))
            node, port = int(environ.get(NODE, "0")), int(environ.get(PORT, "0"))
            ray, wait_s = int(environ.get(RAY, "0")), float(environ.get(WAIT, str(WAIT_S)))
            learners = int(environ.get(LEARNERS, "0"))
        except ValueError as error:
            raise UsageError(f"The variables {NODES}, {NODE}, {PORT}, {RAY}, {WAIT} are not those of a job: {error}.") from error
        if not 0 <= node < len(nodes) or not all(nodes) or not 0 <= port < 1 << 16 or not 0 <= ray <= len(nodes) or learners < 0:
            raise UsageError(f"{NODES}={environ[NODES]}, {NODE}={node}, {PORT}={port}, {RAY}={ray} are not those of a job.")
        token = environ.get(TOKEN)
        return JobEnv(nodes, node, port, Path(token) if token else None, ray, wait_s, learners)


def candidate_ports(job: str, size: int, salt: str = "") -> list[int]:
    """Return the first ports of all blocks of `size` ports. The order starts at a hash of the job's name, so that jobs rarely collide."""
    blocks = (LAST_PORT - FIRST_PORT) // size
    start = zlib.crc32(f"{job}/{salt}".encode()) % blocks
    return [FIRST_PORT + size * ((start + turn) % blocks) for turn in range(blocks)]


def find_free_ports(job: str, size: int, salt: str = "", address: str = "") -> int:
    """Return the first port of a block in which no port is in use on this machine. Raises UsageError if there is none."""
    for first in candidate_ports(job, size, salt):
        if all(is_port_free(port, address) for port in range(first, first + size)):
            return first
    raise UsageError(f"No block of {size} free ports between {FIRST_PORT} and {LAST_PORT} is left on this machine.")


def is_port_free(port: int, address: str = "") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
