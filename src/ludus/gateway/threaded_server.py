"""A gateway of one's own, on an event loop in a thread: where the games of this process knock, and nobody without its token."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from ludus.errors import UsageError
from ludus.gateway.inline_source import new_loop
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.io.addresses import local_address

log = logging.getLogger(__name__)

_OPEN_S: Final = 30.0
_CLOSE_S: Final = 1.0
_EVERYWHERE: Final = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104 - with a token, see Door


class Door:
    """Open from the moment it is made until it is closed."""

    def __init__(self, host: str, make_actor: Callable[[], Any], settings: GatewaySettings) -> None:
        """`host`: by which address or name games reach us. Raises UsageError."""
        if not settings.token:
            raise UsageError("A door without a token would let anyone in.")
        self._listening = bound(host)
        self.port = int(self._listening.getsockname()[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._make_actor, self._settings = make_actor, settings
        self._opened: Future[asyncio.AbstractEventLoop] = Future()
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()
        self._loop = self._opened.result(_OPEN_S)

    def close(self) -> None:
        """Sessions that are open end. Waits a moment for it."""
        closing = self._closing
        if closing is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has ended in between
                self._loop.call_soon_threadsafe(closing.set)
            self._thread.join(2 * _CLOSE_S + 1.0)
        self._listening.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            log.exception("the door is closed")
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        gateway = Gateway(self._make_actor, self._settings)
        await gateway.start([self._listening])
        self._opened.set_result(asyncio.get_running_loop())
        await self._closing.wait()
        await gateway.close(_CLOSE_S)


def bound(host: str) -> socket.socket:
    """On a free port of this address; an address that this machine only seems to have is one of all its addresses."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            f"Games are to reach this machine as {host!r}, which is not known: {error}.", "Set advertise."
        ) from error
    listening = socket.socket(family, kind)
    try:
        try:
            listening.bind((address[0], 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            log.warning("%s is not an address of this machine: listening on all of them", host)
            listening.bind((_EVERYWHERE[family], 0))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UsageError(f"Cannot listen on {host}: {error}.") from error
    return listening


def own_address(host: str, port: int) -> str:
    """By which address whoever is there reaches this machine. Raises UsageError."""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return "127.0.0.1"
    try:
        return local_address(host, port)
    except OSError as error:
        raise UsageError(
            f"How {host} reaches this machine is not known: {error}.", "Set advertise, or LUDUS_ADVERTISE."
        ) from error
