"""The terminal as an image: 24 rows of 80 characters in the sixteen colours of a terminal."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ludus.errors import MissingExtra

_WIDTH, _HEIGHT, _SIZE = 8, 16, 13
"""Cell and font in pixels; 80 × 24 cells are 640 × 384."""
_COLORS: Final = np.array(
    [
        (96, 96, 96), (205, 60, 60), (60, 175, 70), (170, 115, 50), (80, 110, 235), (190, 80, 190), (50, 170, 185), (200, 200, 200),
        (120, 120, 120), (255, 140, 60), (100, 235, 100), (245, 225, 80), (125, 165, 255), (245, 130, 235), (110, 235, 245), (255, 255, 255),
    ],
    np.float32,
)  # fmt: skip
_BACKGROUND: Final = np.array((16, 16, 20), np.float32)


def draw_screen(characters: npt.NDArray[np.uint8], colors: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Return [24·16, 80·8, 3]. Raises MissingExtra."""
    masks = _masks()[characters & 127]  # [rows, columns, height, width]
    ink = _COLORS[colors & 15][:, :, None, None, :]
    cells = _BACKGROUND + masks[..., None] * (ink - _BACKGROUND)
    rows, columns = characters.shape
    picture: npt.NDArray[np.uint8] = cells.transpose(0, 2, 1, 3, 4).reshape(rows * _HEIGHT, columns * _WIDTH, 3).astype(np.uint8)
    return picture


@cache
def _masks() -> npt.NDArray[np.float32]:
    """[128, height, width]: opacity of the characters."""
    from PIL import Image, ImageDraw, ImageFont

    spec = importlib.util.find_spec("matplotlib")  # not imported: that takes longer than rendering a frame
    if spec is None or spec.origin is None:
        raise MissingExtra("Rendering needs the fonts of matplotlib, which is not installed.", "pip install matplotlib")
    path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSansMono.ttf"
    font = ImageFont.truetype(str(path), _SIZE, layout_engine=ImageFont.Layout.BASIC)
    masks = np.zeros((128, _HEIGHT, _WIDTH), np.float32)
    for code in range(33, 127):
        image = Image.new("L", (_WIDTH, _HEIGHT))
        ImageDraw.Draw(image).text((0, 0), chr(code), 255, font)
        masks[code] = np.asarray(image, np.float32) / 255
    return masks
