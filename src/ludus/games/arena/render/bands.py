"""Bands of a frame that are repainted only where they changed.

A frame is divided into bands (the score, the field, a panel for each hero). A band keeps its oversampled image between frames. It
restores the tiles that were painted on, and downsamples only tiles that were painted on in the last frame or this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from PIL import Image

from ludus.core.tree import Array
from ludus.games.arena.render.canvas import OVERSAMPLING, Canvas, ImageCache

_SHIFT: Final = 6
_TILE: Final = 1 << _SHIFT
"""Side of a tile in oversampled pixels; a multiple of `OVERSAMPLING`."""

PixelBox = tuple[int, int, int, int]
"""Left, top, right and bottom; right and bottom are exclusive."""


class DirtyTiles:
    """Tiles of an image that were painted on: one bit per tile, one integer per row of tiles."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._width, self._height = size
        self._columns, self._lines = -(-self._width // _TILE), -(-self._height // _TILE)
        self._rows = [0] * self._lines

    def mark(self, left: float, top: float, right: float, bottom: float) -> None:
        first, last = max(0, int(left) >> _SHIFT), min(self._columns - 1, int(right) >> _SHIFT)
        if first > last:
            return
        bits = ((2 << (last - first)) - 1) << first
        rows = self._rows
        for row in range(max(0, int(top) >> _SHIFT), min(self._lines - 1, int(bottom) >> _SHIFT) + 1):
            rows[row] |= bits

    def union(self, other: DirtyTiles) -> DirtyTiles:
        both = DirtyTiles((self._width, self._height))
        both._rows = [a | b for a, b in zip(self._rows, other._rows, strict=True)]
        return both

    def boxes(self) -> Iterator[PixelBox]:
        """Yield rectangles that cover the marked tiles; rows with the same marks are joined."""
        start = 0
        for row in range(1, self._lines + 1):
            if row < self._lines and self._rows[row] == self._rows[start]:
                continue
            top, bottom = start << _SHIFT, min(row << _SHIFT, self._height)
            for first, end in _runs(self._rows[start]):
                yield first << _SHIFT, top, min(end << _SHIFT, self._width), bottom
            start = row


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """Yield runs of ones as start and end (exclusive)."""
    at = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        ones = (~bits & (bits + 1)).bit_length() - 1
        yield at + zeros, at + zeros + ones
        at += zeros + ones
        bits >>= ones


class Band:
    """A rectangle of the frame with a constant background."""

    def __init__(
        self, background: Image.Image, box: PixelBox, frame: Array, scale: float, cache: ImageCache, *, tiled: bool = False
    ) -> None:
        """`background`: oversampled background of the whole frame. `box`: in pixels of `frame` [height, width, 3], which the band
        updates. `tiled`: track painted tiles, for a large band that is mostly background."""
        left, top, right, bottom = box
        self._box = box
        self._origin = left * OVERSAMPLING, top * OVERSAMPLING
        self._background = background.crop((*self._origin, right * OVERSAMPLING, bottom * OVERSAMPLING))
        self._image = self._background.copy()
        self._frame = frame[top:bottom, left:right]
        self._scale, self._cache = scale, cache
        self._all: PixelBox = (0, 0, *self._image.size)
        self._painted = self._now = DirtyTiles(self._image.size) if tiled else None
        self._key: object = None

    def is_showing(self, key: object) -> bool:
        """Return whether the last frame had the same key and needs no repaint; store the key."""
        same = key == self._key
        self._key = key
        return same

    def begin(self) -> Canvas:
        """Restore the background and return a canvas to paint on."""
        if self._painted is None:
            self._image.paste(self._background)
        else:
            for box in self._painted.boxes():
                self._image.paste(self._background.crop(box), box)
            self._now = DirtyTiles(self._image.size)
        return Canvas(self._image, self._scale, self._cache, self._origin, self._now)

    def end(self) -> list[PixelBox]:
        """Downsample what was painted since `begin` into the frame; return the changed rectangles."""
        n = OVERSAMPLING
        tiles = None if self._painted is None or self._now is None else self._painted.union(self._now)
        changed = []
        for box in (self._all,) if tiles is None else tiles.boxes():
            left, top, right, bottom = (side // n for side in box)
            self._frame[top:bottom, left:right] = np.asarray(self._image.reduce(n, box))
            changed.append((left + self._box[0], top + self._box[1], right + self._box[0], bottom + self._box[1]))
        self._painted = self._now
        return changed
