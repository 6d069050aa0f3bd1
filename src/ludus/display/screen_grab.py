"""Pictures of what a game draws on its private screen, through the X11 protocol (GetImage), without libX11.

with PrivateScreen() as private, ScreenGrab(private) as grab:
    frame = grab.frame()                    # uint8 [H, W, 3]: the game's window

Only private screens are read: the desktop of a user is never recorded.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.display import x11
from ludus.display.private_screen import PrivateScreen
from ludus.errors import UsageError, WorkerFailed

Picture = npt.NDArray[np.uint8]

WINDOW_S = 10.0
"""How long to wait for the first window of a game; further calls wait _NEXT_WINDOW_S."""
_NEXT_WINDOW_S = 0.2
_POLL_S = 0.05
_REPLY_S = 10.0
_GET_ATTRIBUTES, _GET_GEOMETRY, _QUERY_TREE, _GET_IMAGE = 3, 14, 15, 73
_VIEWABLE, _INPUT_ONLY = 2, 2
_Z_PIXMAP, _ALL_PLANES = 2, 0xFFFFFFFF
_ERROR, _REPLY = 0, 1  # first byte of what the server sends; events have larger numbers


@dataclass(frozen=True)
class Region:
    """A part of the screen in pixels."""

    x: int
    y: int
    width: int
    height: int

    @property
    def area(self) -> int:
        return self.width * self.height


@dataclass(frozen=True)
class _Visual:
    """Format of the pixels of the root window."""

    root: int
    width: int
    height: int
    bytes_per_pixel: int
    row_unit: int
    """Rows are padded to multiples of this many bytes."""
    little_endian: bool
    shifts: tuple[int, int, int]
    """Position of the bytes of red, green and blue in a pixel's number, in bits."""


class ScreenGrab:
    """Reads the pictures of a private screen. The first frame decides which part: the largest window then.

    A context manager. Not for several threads.
    """

    def __init__(self, private: PrivateScreen, window_s: float = WINDOW_S) -> None:
        self._private, self._window_s = private, window_s
        self._connection: socket.socket | None = None
        self._visual: _Visual | None = None
        self._region: Region | None = None

    def frame(self) -> Picture:
        """Return the picture as uint8 [H, W, 3]; all frames have the same size.

        Waits for the first window. Raises UsageError if none opens, WorkerFailed if the X server has ended.
        """
        try:
            if self._connection is None:
                self._connection, setup = x11.open_connection(self._private.variables(), _REPLY_S)
                self._connection.settimeout(_REPLY_S)
                self._visual = _parse_setup(setup)
            self._region = self._region or self._wait_for_window()
            return self._image(self._region)
        except (OSError, struct.error) as error:
            self.close()
            why = self._private.problem() or f"the private X server {self._private.display} gives no picture: {error}"
            raise WorkerFailed(f"{why[:1].upper()}{why[1:]}.", "The game has lost its screen: start it again.") from error

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def __enter__(self) -> ScreenGrab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_window(self) -> Region:
        window_s, self._window_s = self._window_s, min(self._window_s, _NEXT_WINDOW_S)
        deadline = time.monotonic() + window_s
        while True:
            windows = self.windows()
            if windows:
                return max(windows, key=lambda region: region.area)
            if time.monotonic() > deadline:
                raise UsageError(
                    f"Nothing is drawn on the private screen {self._private.display}: no window opened within {window_s:g} s.",
                    "Does the game draw? Record without --video, or give the environment a render method.",
                )
            time.sleep(_POLL_S)

    def windows(self) -> list[Region]:
        """The visible top-level windows, as far as they are on the screen."""
        assert self._visual is not None
        found = []
        reply = self._request(_QUERY_TREE, self._visual.root)
        (count,) = struct.unpack_from("<H", reply, 16)
        for window in struct.unpack_from(f"<{count}I", reply, 32):
            with contextlib.suppress(_XError):  # it has been closed since
                attributes = self._request(_GET_ATTRIBUTES, window)
                if struct.unpack_from("<H", attributes, 12)[0] == _INPUT_ONLY or attributes[26] != _VIEWABLE:
                    continue
                x, y, width, height, border = struct.unpack_from("<hhHHH", self._request(_GET_GEOMETRY, window), 12)
                left, top = max(0, x + border), max(0, y + border)
                right, bottom = min(self._visual.width, x + border + width), min(self._visual.height, y + border + height)
                if right > left and bottom > top:
                    found.append(Region(left, top, right - left, bottom - top))
        return found

    def _image(self, region: Region) -> Picture:
        visual = self._visual
        assert visual is not None
        body = struct.pack("<hhHHI", region.x, region.y, region.width, region.height, _ALL_PLANES)
        data = self._request(_GET_IMAGE, visual.root, body, detail=_Z_PIXMAP)[32:]
        row = -(-region.width * visual.bytes_per_pixel // visual.row_unit) * visual.row_unit
        rows = np.frombuffer(data, np.uint8, region.height * row).reshape(region.height, row)
        pixels = rows[:, : region.width * visual.bytes_per_pixel].reshape(region.height, region.width, visual.bytes_per_pixel)
        last = visual.bytes_per_pixel - 1
        channels = [shift // 8 if visual.little_endian else last - shift // 8 for shift in visual.shifts]
        return np.ascontiguousarray(pixels[:, :, channels])

    def _request(self, opcode: int, window: int, body: bytes = b"", detail: int = 0) -> bytes:
        """Send one request and return its reply. Raises _XError, OSError."""
        assert self._connection is not None
        self._connection.sendall(struct.pack("<BBHI", opcode, detail, 2 + len(body) // 4, window) + body)
        while (head := self._receive(32))[0] > _REPLY:  # an event that every client gets, such as MappingNotify
            pass
        if head[0] == _ERROR:
            raise _XError(f"X error {head[1]} of request {opcode}")
        return head + self._receive(4 * struct.unpack_from("<I", head, 4)[0])

    def _receive(self, size: int) -> bytes:
        assert self._connection is not None
        data = x11.receive(self._connection, size)
        if len(data) < size:
            raise ConnectionError("the X server closed the connection")
        return data


class _XError(OSError):
    """The server refuses a request."""


def _parse_setup(setup: bytes) -> _Visual:
    """Read the first screen of a setup reply. Raises struct.error, and UsageError for a format without one byte per colour."""
    vendor, screens, formats, byte_order = struct.unpack_from("<HxxBBB", setup, 16)
    at = 32 + vendor + -vendor % 4
    sizes: dict[int, tuple[int, int]] = {}
    for _ in range(formats):
        depth, bits, pad = struct.unpack_from("<BBB", setup, at)
        sizes[depth], at = (bits // 8, pad // 8), at + 8
    assert screens
    root, width, height, visual_id, root_depth, depths = _screen(setup, at)
    masks = _masks(setup, at + 40, depths, visual_id)
    bytes_per_pixel, row_unit = sizes[root_depth]
    if masks is None or bytes_per_pixel < 3 or any(mask >> _shift(mask) != 0xFF or _shift(mask) % 8 for mask in masks):
        raise UsageError(f"The screen has a depth of {root_depth} bits, which is not RGB with 8 bits each.")
    red, green, blue = map(_shift, masks)
    return _Visual(root, width, height, bytes_per_pixel, row_unit, byte_order == 0, (red, green, blue))


def _screen(setup: bytes, at: int) -> tuple[Any, ...]:
    (root,) = struct.unpack_from("<I", setup, at)
    width, height = struct.unpack_from("<HH", setup, at + 20)
    (visual,) = struct.unpack_from("<I", setup, at + 32)
    return root, width, height, visual, setup[at + 38], setup[at + 39]


def _masks(setup: bytes, at: int, depths: int, visual_id: int) -> tuple[int, int, int] | None:
    """Masks of red, green and blue of a visual."""
    for _ in range(depths):
        (visuals,) = struct.unpack_from("<H", setup, at + 2)
        at += 8
        for _ in range(visuals):
            (each,) = struct.unpack_from("<I", setup, at)
            if each == visual_id:
                red, green, blue = struct.unpack_from("<III", setup, at + 8)
                return red, green, blue
            at += 24
    return None


def _shift(mask: int) -> int:
    """Number of the lowest bit that is set."""
    return (mask & -mask).bit_length() - 1
