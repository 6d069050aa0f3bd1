"""What joins the parts of a job on several machines, so that no part outlives the job: `python -m ludus.launch.ssh.lifeline door|hold`.

The *door* runs on the first node, as long as the job does. On every other node *hold* calls it and stays connected. When the door
is asked to end, it says so to all of them, and they end too; when they are cut off, they call again, and give up after a while.
Both prove that they know the job's token before anything else is said. Where the door is, and the token, is in the environment.
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
from ludus.process.auth import HANDSHAKE_S, Authenticator, client_handshake, enable_keepalive, read_token
from ludus.process.job_env import TOKEN, Surroundings

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
LINGER_S = 5.0
"""How long a door that ends waits for nodes that have not come yet: a short job may be over before they are there."""

_OVER = b"over\n"
_CALL_S = 10.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
_LINE = 64


class Door:
    """`expected`: numbers of the nodes that shall hear of the end."""

    def __init__(self, token: bytes, expected: Sequence[int], linger_s: float = LINGER_S) -> None:
        self._guard, self._linger_s = Authenticator(token), linger_s
        self._unheard = set(expected)
        self._held: dict[asyncio.StreamWriter, int] = {}
        self._over = asyncio.Event()
        self._all_heard = asyncio.Event()

    def close(self) -> None:
        """Have `serve` tell all, and return."""
        self._over.set()

    async def serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._receive, sock=listening, limit=_LINE)
        try:
            await self._over.wait()
            await asyncio.gather(*(self._tell(writer) for writer in list(self._held)))
            if self._unheard:
                await asyncio.wait_for(self._all_heard.wait(), self._linger_s)
        except TimeoutError:
            log.warning("the job is over, and these nodes were not reached: %s", ", ".join(map(str, sorted(self._unheard))))
        finally:
            server.close()  # and not waited for: that would be for everyone who is connected, too

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            enable_keepalive(writer.get_extra_info("socket"))
            if not await self._guard.authenticate(reader, writer):
                return
            async with asyncio.timeout(HANDSHAKE_S):
                node = int(await reader.readline())
            self._held[writer] = node
            log.info("node %d is here", node)
            if self._over.is_set():
                await self._tell(writer)
            await reader.read(1)  # it has nothing more to say: this is its end
            log.info("node %d is gone", node)
        except (OSError, TimeoutError, ValueError) as error:
            log.info("a connection is lost: %s", error or "it said nothing")
        except asyncio.CancelledError:
            pass  # the loop ends, and so does this; asyncio would complain of a handler that says so
        finally:
            self._held.pop(writer, None)
            writer.close()

    async def _tell(self, writer: asyncio.StreamWriter) -> None:
        node = self._held.get(writer)
        try:
            writer.write(_OVER)
            await asyncio.wait_for(writer.drain(), _CALL_S)
        except (OSError, TimeoutError):
            return  # it calls again, or is gone
        self._unheard.discard(-1 if node is None else node)
        if not self._unheard:
            self._all_heard.set()


async def hold(
    door: tuple[str, int], node: int, token: bytes, patience_s: float, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Until the door says that the job is over: True; or until it could not be reached for `patience_s`: False."""
    parted, backoff = clock(), Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
    while True:
        try:
            if await _held(door, node, token):
                return True
            parted, why = clock(), "it hung up"
            backoff.reset()
        except _Cut as cut:
            parted, why = clock(), str(cut)
            backoff.reset()
        except (LudusError, OSError, TimeoutError) as error:
            why = str(error) or "no answer"
        left = parted + patience_s - clock()
        if left <= 0:
            log.error(
                "the first node of this job, %s:%d, was not reached for %g s (%s): its part here ends", *door, patience_s, why
            )
            return False
        log.info("%s:%d is not reached: %s", *door, why)
        await asyncio.sleep(min(backoff.next_delay(), left))


class _Cut(Exception):
    """A connection that was there is not any more."""


async def _held(door: tuple[str, int], node: int, token: bytes) -> bool:
    async with asyncio.timeout(_CALL_S):
        reader, writer = await asyncio.open_connection(*door, limit=_LINE)
    try:
        enable_keepalive(writer.get_extra_info("socket"))
        async with asyncio.timeout(_CALL_S):
            await client_handshake(reader, writer, token, "the first node of this job")
            writer.write(b"%d\n" % node)
            await writer.drain()
        log.info("the first node of this job is reached at %s:%d", *door)
        try:
            return await reader.readline() == _OVER
        except (OSError, ValueError) as error:
            raise _Cut(str(error)) from error
    finally:
        writer.close()


# -- the processes ------------------------------------------------------------------------------------------------------


def listen(address: str, port: int) -> socket.socket:
    """On the address by which others reach this node. One that others could not reach means: on all. Raises UsageError."""
    try:
        family, *_, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if _is_loopback(str(found[0])) and not _is_loopback(address):  # a machine may know its own name as 127.0.1.1
            family, found = socket.AF_INET, ("", port)
        return socket.create_server((str(found[0]), port), family=family)
    except OSError as error:
        raise UsageError(
            f"The door of this job cannot be opened at {address}:{port}: {error.strerror or error}.",
            "Is it an address of this machine? Else set its `address` in the list of machines.",
        ) from error


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


async def _keep_door(around: Surroundings, token: bytes) -> int:
    door = Door(token, range(1, len(around.nodes)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, door.close)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # one may have come while we were not ready for it
    with listen(*around.door) as listening:
        await door.serve(listening)
    return 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tether", description=__doc__)
    parser.add_argument("what", choices=("door", "hold"))
    parser.add_argument("--patience-s", type=float, default=PATIENCE_S, help="until a part ends that cannot reach the first node")
    parser.add_argument("--stay", action="store_true", help="have patience for ever")
    asked = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    around = Surroundings.of(os.environ)
    if around is None or around.token_file is None or not around.port:
        raise UsageError(f"This is no process of a job on several machines: {TOKEN} and others are not set.", "Jobs start it.")
    token = read_token(around.token_file)
    if asked.what == "door":
        return asyncio.run(_keep_door(around, token))
    patience_s = math.inf if asked.stay else asked.patience_s
    return 0 if asyncio.run(hold(around.door, around.node, token, patience_s)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LudusError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
