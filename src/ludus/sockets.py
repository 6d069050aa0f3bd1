"""Connections to machines that may vanish."""

from __future__ import annotations

import socket


def keep_alive(connection: socket.socket, idle_s: int, lost_s: int, *, unheard: bool = False) -> None:
    """A connection to a machine that is gone breaks after `lost_s`, not after hours; it is asked for a sign of life after `idle_s` of silence.

    `unheard`: so does one on which something was sent that has not arrived by then. That is for short messages only: one that does
    not fit into the buffers of a machine whose program is busy would break as well.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", lost_s - idle_s)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if unheard and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * lost_s)
