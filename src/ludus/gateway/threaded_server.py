"""A token-protected gateway on an event loop in a background thread."""

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

_START_S: Final = 30.0
_CLOSE_S: Final = 1.0
_ANY_ADDRESS: Final = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104 - with a token, see ThreadedGateway


class ThreadedGateway:
    """Serves from its construction until `close`."""

    def __init__(self, host: str, make_actor: Callable[[], Any], settings: GatewaySettings) -> None:
        """`host`: the address or name by which games reach this machine. Raises UsageError."""
        if not settings.token:
            raise UsageError("A threaded gateway needs a token.")
        self._listening = listen_on(host)
        self.port = int(self._listening.getsockname()[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._make_actor, self._settings = make_actor, settings
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._closing: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        self._loop = self._ready.result(_START_S)

    def close(self) -> None:
        """End open sessions and join the thread; waits up to three seconds."""
        closing = self._closing
        if closing is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has closed in between
                self._loop.call_soon_threadsafe(closing.set)
            self._thread.join(2 * _CLOSE_S + 1.0)
        self._listening.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # reported to the constructor, or logged: a thread has no caller
            log.exception("the gateway thread failed")
            if not self._ready.done():
                self._ready.set_exception(error)

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        gateway = Gateway(self._make_actor, self._settings)
        await gateway.start([self._listening])
        self._ready.set_result(asyncio.get_running_loop())
        await self._closing.wait()
        await gateway.close(_CLOSE_S)


def listen_on(host: str) -> socket.socket:
    """Listen on a free port of this address, or of all addresses if this machine has no such address (NAT). Raises UsageError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            f"Cannot resolve {host!r}, the name by which games reach this machine: {error}.", "Set advertise."
        ) from error
    listening = socket.socket(family, kind)
    try:
        try:
            listening.bind((address[0], 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            log.warning("%s is not an address of this machine: listening on all addresses", host)
            listening.bind((_ANY_ADDRESS[family], 0))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UsageError(f"Cannot listen on {host}: {error}.") from error
    return listening


def own_address(host: str, port: int) -> str:
    """Return the address of this machine on its route to `host`. Raises UsageError."""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return "127.0.0.1"
    try:
        return local_address(host, port)
    except OSError as error:
        raise UsageError(
            f"Cannot find the address of this machine for {host}: {error}.", "Set advertise, or LUDUS_ADVERTISE."
        ) from error
