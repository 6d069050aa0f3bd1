"""What a process of a job is told about its surroundings, by variables of its environment. Nothing heavy is imported here.

A job runs on one or more machines, its *nodes*; the first one is where its main role runs, and the head of its Ray if it has one.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.errors import UsageError

NODES, NODE, PORT, TOKEN, RAY, WAIT = (
    "LUDUS_JOB_NODES", "LUDUS_JOB_NODE", "LUDUS_JOB_PORT", "LUDUS_JOB_TOKEN_FILE", "LUDUS_JOB_RAY", "LUDUS_JOB_WAIT_S",
)  # fmt: skip
LEARNERS = "LUDUS_JOB_LEARNERS"
"""How many learners on other nodes come to the one that the main role is, or starts. For the main role alone."""

RUN = "LUDUS_JOB_RUN"
"""A file: which run the main role has begun, so that its next life, on whichever machine, goes on with it."""

FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Below what Linux gives to outgoing connections by default (32768 on), above what services have."""

PORTS = 3
"""That a job needs on its first node: of Ray's head, of the door, of the first learner."""

WAIT_S = 300.0


@dataclass(frozen=True)
class Surroundings:
    """`nodes`: their addresses, as the others reach them. `node`: which of them this is. `port`: the head's; the next ones are the door's and the first learner's.

    `token_file`: 0600, the secret of this job. `ray`: how many nodes its Ray shall have before work begins; 0: it has none.
    `learners`: how many learners of other nodes there are.
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
        """HOST:PORT of the Ray of this job."""
        return f"{self.nodes[0]}:{self.port}"

    @property
    def door(self) -> tuple[str, int]:
        """Where the first node tells the others that the job is over."""
        return self.nodes[0], self.port + 1

    @property
    def learners_entrance(self) -> tuple[str, int]:
        """Where the first learner waits for the others."""
        return self.nodes[0], self.port + 2

    def token(self) -> bytes:
        """Raises UsageError where there is none, or others can read it."""
        if self.token_file is None:
            raise UsageError(f"This job has no token: {TOKEN} is not set.")
        from ludus.process.auth import read_token

        return read_token(self.token_file)

    def environment(self) -> dict[str, str]:
        said = {NODES: ",".join(self.nodes), NODE: str(self.node), PORT: str(self.port)}
        if self.token_file is not None:
            said[TOKEN] = str(self.token_file)
        if self.ray:
            said |= {RAY: str(self.ray), WAIT: f"{self.wait_s:g}"}
        if self.learners:
            said |= {LEARNERS: str(self.learners), WAIT: f"{self.wait_s:g}"}
        return said

    @staticmethod
    def of(environ: Mapping[str, str]) -> Surroundings | None:
        """None: this process belongs to no job with nodes. Raises UsageError when what it was told makes no sense."""
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
        return Surroundings(nodes, node, port, Path(token) if token else None, ray, wait_s, learners)


def candidates(job: str, size: int, salt: str = "") -> list[int]:
    """First ports of blocks of `size`, all that there are, beginning with one that follows from the job's name: two jobs begin apart."""
    blocks = (LAST_PORT - FIRST_PORT) // size
    start = zlib.crc32(f"{job}/{salt}".encode()) % blocks
    return [FIRST_PORT + size * ((start + turn) % blocks) for turn in range(blocks)]


def free_block(job: str, size: int, salt: str = "", address: str = "") -> int:
    """The first of the candidates whose ports nobody here listens on. Raises UsageError where there is none."""
    for first in candidates(job, size, salt):
        if all(is_free(port, address) for port in range(first, first + size)):
            return first
    raise UsageError(f"No block of {size} free ports between {FIRST_PORT} and {LAST_PORT} is left on this machine.")


def is_free(port: int, address: str = "") -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address, port))
        except OSError:
            return False
    return True
