"""TCP keep-alive: detection of peers that have disappeared."""

from __future__ import annotations

import math
import socket
from typing import Final

_MAX_SECONDS: Final = 32_767
_MAX_PROBES: Final = 127
"""Limits of Linux."""


def keep_alive(connection: socket.socket, idle_s: int, lost_s: int, *, unheard: bool = False) -> None:
    """Close a connection `lost_s` after its peer disappeared; probes begin after `idle_s` of silence.

    `unheard`: also close it when sent data is not acknowledged for `lost_s`. For short messages only: data that does not fit
    into the buffers of a peer with a busy program would close it as well.
    """
    idle_s = min(idle_s, _MAX_SECONDS)
    every_s = min(math.ceil((lost_s - idle_s) / _MAX_PROBES), _MAX_SECONDS)
    times = min(math.ceil((lost_s - idle_s) / every_s), _MAX_PROBES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", times)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if unheard and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * lost_s)
