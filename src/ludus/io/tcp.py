"""Connections to machines that may vanish."""

from __future__ import annotations

import math
import socket
from typing import Final

_LONGEST_S: Final = 32_767
_MOST: Final = 127
"""What Linux takes as times, and as a number of times."""


def keep_alive(connection: socket.socket, idle_s: int, lost_s: int, *, unheard: bool = False) -> None:
    """A connection to a machine that is gone breaks after `lost_s`, not after hours; it is asked for a sign of life after `idle_s` of silence.

    `unheard`: so does one on which something was sent that has not arrived by then. That is for short messages only: one that does
    not fit into the buffers of a machine whose program is busy would break as well.
    """
    idle_s = min(idle_s, _LONGEST_S)
    every_s = min(math.ceil((lost_s - idle_s) / _MOST), _LONGEST_S)
    times = min(math.ceil((lost_s - idle_s) / every_s), _MOST)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", every_s), ("TCP_KEEPCNT", times)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if unheard and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * lost_s)
