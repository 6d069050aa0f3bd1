"""Ends the parts of a job on other machines with the first part: `python -m ludus.launch.ssh.lifeline serve|hold`.

*serve* runs on the first node as long as the job does. On every other node *hold* stays connected to it. When *serve* gets SIGTERM,
it notifies all nodes, which end. A node that loses its connection reconnects, and ends when that fails for `--patience-s`.
Both ends authenticate with the job's token. The address and the token are in the environment (`process/job_env.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from ludus.core.backoff import Backoff
from ludus.errors import LudusError, UsageError
from ludus.process.auth import HANDSHAKE_S, Authenticator, open_connection, read_token, start_server
from ludus.process.job_env import TOKEN, JobEnv

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
LINGER_S = 5.0
"""How long an ending server waits for nodes that have not connected yet: a short job may end before they start."""

_OVER = b"over\n"
_CALL_S = 10.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_LINE = 64


class LifelineServer:
    """`expected`: numbers of the nodes to notify."""

    def __init__(self, token: bytes, expected: Sequence[int], linger_s: float = LINGER_S) -> None:
        self._guard, self._linger_s = Authenticator(token), linger_s
        self._unnotified = set(expected)
        self._clients: dict[asyncio.StreamWriter, int] = {}
        self._over = asyncio.Event()
        self._all_notified = asyncio.Event()

    def close(self) -> None:
        """Make `serve` notify all nodes and return."""
        self._over.set()

    async def serve(self, listening: socket.socket) -> None:
        server = await start_server(listening, self._guard, self._receive, _LINE)
        try:
            await self._over.wait()
            await asyncio.gather(*(self._notify(writer) for writer in list(self._clients)))
            if self._unnotified:
                await asyncio.wait_for(self._all_notified.wait(), self._linger_s)
        except TimeoutError:
            log.warning("the job is over; nodes that could not be notified: %s", ", ".join(map(str, sorted(self._unnotified))))
        finally:
            server.close()  # without wait_closed, which waits for all connections

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                node = int(await reader.readline())
            self._clients[writer] = node
            log.info("node %d connected", node)
            if self._over.is_set():
                await self._notify(writer)
            await reader.read(1)  # nodes send nothing more: this is the end of the connection
            log.info("node %d disconnected", node)
        except (OSError, TimeoutError, ValueError) as error:
            log.info("connection lost: %s", error or "no data")
        finally:
            self._clients.pop(writer, None)

    async def _notify(self, writer: asyncio.StreamWriter) -> None:
        node = self._clients.get(writer)
        try:
            writer.write(_OVER)
            await asyncio.wait_for(writer.drain(), _CALL_S)
        except (OSError, TimeoutError):
            return  # it reconnects, or has ended
        self._unnotified.discard(-1 if node is None else node)
        if not self._unnotified:
            self._all_notified.set()


async def hold(
    address: tuple[str, int], node: int, token: bytes, patience_s: float, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Stay connected until the server reports the end of the job (True), or cannot be reached for `patience_s` (False)."""
    lost_at, backoff = clock(), Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
    while True:
        try:
            if await _stay_connected(address, node, token):
                return True
            lost_at, why = clock(), "it closed the connection"
            backoff.reset()
        except _LifelineLost as error:
            lost_at, why = clock(), str(error)
            backoff.reset()
        except (LudusError, OSError, TimeoutError) as error:
            why = str(error) or "no answer"
        left = lost_at + patience_s - clock()
        if left <= 0:
            log.error(
                "no connection to the first node, %s:%d, for %g s (%s): the part on this node ends", *address, patience_s, why
            )
            return False
        log.info("no connection to %s:%d: %s", *address, why)
        await asyncio.sleep(min(backoff.next_delay(), left))


class _LifelineLost(Exception):
    """An established connection broke."""


async def _stay_connected(address: tuple[str, int], node: int, token: bytes) -> bool:
    what = "the first node of this job"
    reader, writer = await open_connection(*address, token, what, timeout_s=_CALL_S, limit=_LINE)
    try:
        writer.write(b"%d\n" % node)
        await asyncio.wait_for(writer.drain(), _CALL_S)
        log.info("connected to the first node at %s:%d", *address)
        try:
            return await reader.readline() == _OVER
        except (OSError, ValueError) as error:
            raise _LifelineLost(str(error)) from error
    finally:
        writer.close()


# -- the processes ------------------------------------------------------------------------------------------------------


def listen(address: str, port: int) -> socket.socket:
    """Listen on this node's address; on all addresses if its name resolves to loopback only. Raises UsageError."""
    try:
        family, *_, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if _is_loopback(str(resolved[0])) and not _is_loopback(address):  # a machine may resolve its own name to 127.0.1.1
            family, resolved = socket.AF_INET, ("", port)
        return socket.create_server((str(resolved[0]), port), family=family)
    except OSError as error:
        raise UsageError(
            f"The lifeline server cannot listen on {address}:{port}: {error.strerror or error}.",
            "If this is not an address of this machine, set its `address` in the list of machines.",
        ) from error


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


async def _serve(job: JobEnv, token: bytes) -> int:
    server = LifelineServer(token, range(1, len(job.nodes)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.close)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by the parent; one may be pending
    with listen(*job.lifeline_address) as listening:
        await server.serve(listening)
    return 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ludus.launch.ssh.lifeline", description=__doc__)
    parser.add_argument("what", choices=("serve", "hold"))
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="seconds without a connection before a part ends")
    parser.add_argument("--stay", action="store_true", help="reconnect for ever")
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    job = JobEnv.from_environ(os.environ)
    if job is None or job.token_file is None or not job.port:
        raise UsageError(f"This process belongs to no job on several machines: {TOKEN} is not set.", "Only jobs start it.")
    token = read_token(job.token_file)
    if args.what == "serve":
        return asyncio.run(_serve(job, token))
    patience_s = math.inf if args.stay else args.patience_s
    return 0 if asyncio.run(hold(job.lifeline_address, job.node, token, patience_s)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LudusError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
