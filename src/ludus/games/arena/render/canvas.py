"""Canvas for antialiased shapes and text in resolution-independent units.

Everything is drawn at twice the size and downsampled, which smooths edges and allows half-pixel positions. The fonts are those of
matplotlib, so that the same state gives the same frame on every machine.
"""

from __future__ import annotations

import importlib.util
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ludus.core.tree import Array
from ludus.errors import MissingExtra

if TYPE_CHECKING:
    from ludus.games.arena.render.bands import DirtyTiles

OVERSAMPLING: Final = 2
_SPRITE_OVERSAMPLING: Final = 4
_TEXTS: Final = 1024  # cache size; a frame has about a hundred
_IMAGES: Final = 1536  # cache size; most have some 10 kB

Colour = tuple[int, ...]
"""Red, green, blue, and optionally opacity."""
Anchor = Literal["left", "middle", "right"]
Point = tuple[float, float]


def mix(a: Colour, b: Colour, share: float) -> Colour:
    """Blend `share` of b with the rest of a."""
    return tuple(round(x + (y - x) * share) for x, y in zip(a[:3], b[:3], strict=True))


def with_opacity(colour: Colour, opacity: float) -> Colour:
    return (*colour[:3], round(255 * max(0.0, min(1.0, opacity))))


def paste(target: Image.Image, source: Image.Image | Colour, at: tuple[int, int], mask: Image.Image | None = None) -> None:
    """Like `target.paste(source, at, mask)` in a third of the time for small sources, of which a frame has over a hundred. Both images
    are loaded and of the same mode (or the source has opacity and is its own mask)."""
    sized = mask if mask is not None else source
    assert isinstance(sized, Image.Image)
    box = at[0], at[1], at[0] + sized.width, at[1] + sized.height
    core: Any = target.im
    found = source.im if isinstance(source, Image.Image) else source
    if mask is None:
        core.paste(found, box)
    else:
        core.paste(found, box, mask.im)


class Canvas:
    """`scale`: pixels of the frame per layout unit. `origin`: position of the image in the frame in oversampled pixels, both even.
    Painting outside of the image is clipped."""

    def __init__(
        self,
        image: Image.Image,
        scale: float,
        cache: ImageCache | None = None,
        origin: tuple[int, int] = (0, 0),
        marks: DirtyTiles | None = None,
    ) -> None:
        self.image = image
        self.k = scale * OVERSAMPLING
        self.cache = cache or ImageCache()
        self._left, self._top = origin
        self._marks = marks
        self._draw = ImageDraw.Draw(image, "RGBA")
        self._opaque = ImageDraw.Draw(image)
        """Does not blend; ten times as fast."""

    def pixel(self, at: Point) -> Point:
        """Convert a point from layout units to pixels of the image."""
        return at[0] * self.k - self._left, at[1] * self.k - self._top

    def mark(self, left: float, top: float, right: float, bottom: float) -> None:
        if self._marks is not None:
            self._marks.mark(left - 1, top - 1, right + 1, bottom + 1)

    def _square(self, at: Point, radius: float) -> tuple[float, float, float, float]:
        """Return the bounding box of a circle and mark it as painted."""
        r = radius * self.k
        x, y = at[0] * self.k - self._left, at[1] * self.k - self._top
        self.mark(x - r, y - r, x + r, y + r)
        return x - r, y - r, x + r, y + r

    # -- shapes -------------------------------------------------------------------------------------------------------

    def circle(self, at: Point, radius: float, fill: Colour | None = None, edge: Colour | None = None, width: float = 1) -> None:
        self._draw.ellipse(self._square(at, radius), fill, edge, max(1, round(width * self.k)) if edge else 0)

    def arc(self, at: Point, radius: float, start: float, end: float, colour: Colour, width: float) -> None:
        """Angles in degrees, clockwise from three o'clock."""
        self._draw.arc(self._square(at, radius), start, end, colour, max(1, round(width * self.k)))

    def dashes(self, at: Point, radius: float, colour: Colour, width: float, count: int, turn: float = 0.0) -> None:
        """Draw a dashed circle."""
        step = 360 / count
        for i in range(count):
            start = turn + i * step
            self.arc(at, radius, start, start + step * 0.55, colour, width)

    def line(self, a: Point, b: Point, colour: Colour, width: float) -> None:
        (ax, ay), (bx, by), thick = self.pixel(a), self.pixel(b), max(1, round(width * self.k))
        self.mark(min(ax, bx) - thick, min(ay, by) - thick, max(ax, bx) + thick, max(ay, by) + thick)
        self._draw.line((ax, ay, bx, by), colour, thick)

    def polygon(self, points: Sequence[Point], fill: Colour | None, edge: Colour | None = None, width: float = 1) -> None:
        scaled = [(x * self.k - self._left, y * self.k - self._top) for x, y in points]
        thick = max(1, round(width * self.k)) if edge is not None else 0
        across, down = [x for x, _ in scaled], [y for _, y in scaled]
        self.mark(min(across) - thick, min(down) - thick, max(across) + thick, max(down) + thick)
        self._draw.polygon(scaled, fill)
        if edge is not None:
            self._draw.line([*scaled, scaled[0]], edge, thick, joint="curve")

    def box(
        self,
        left: float,
        top: float,
        width: float,
        height: float,
        fill: Colour | None = None,
        edge: Colour | None = None,
        round_by: float = 0.0,
        edge_width: float = 1,
    ) -> None:
        k, dx, dy = self.k, self._left, self._top
        where = (
            round(left * k) - dx,
            round(top * k) - dy,
            round((left + width) * k) - dx - 1,
            round((top + height) * k) - dy - 1,
        )
        if where[2] < where[0] or where[3] < where[1]:
            return
        self.mark(*where)
        if fill is not None and len(fill) == 3 and edge is None and not round_by:
            self._opaque.rectangle(where, fill)
            return
        thick = max(1, round(edge_width * k)) if edge else 0
        if round_by:
            self._draw.rounded_rectangle(where, round_by * k, fill, edge, thick)
        else:
            self._draw.rectangle(where, fill, edge, thick)

    def tint(self, colour: Colour, upper_left: Point, lower_right: Point, opacity: Image.Image) -> None:
        """Blend a colour over a rectangle; `opacity` ("L") is resized to it."""
        (left, top), (right, bottom) = self.pixel(upper_left), self.pixel(lower_right)
        box = round(left), round(top), round(right), round(bottom)
        self.mark(*box)
        self.image.paste(colour, box, opacity.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BILINEAR))

    # -- text and sprites ---------------------------------------------------------------------------------------------

    def text(
        self, at: Point, text: str, size: float, colour: Colour, anchor: Anchor = "left", bold: bool = True, halo: float = 0.0
    ) -> None:
        """Draw text, vertically centred on `at`; `halo`: width of a dark outline for readability."""
        pixels = max(1, round(size * self.k))
        mask, rise = _render_text(text, pixels, bold, 0)
        x, y = self.pixel(at)
        x, y = x - {"left": 0.0, "middle": mask.width / 2, "right": float(mask.width)}[anchor], y - rise
        self.mark(x, y, x + mask.width, y + mask.height)
        if halo:
            rim = max(1, round(halo * self.k))
            shade, _ = _render_text(text, pixels, bold, rim)
            self.mark(x - rim, y - rim, x - rim + shade.width, y - rim + shade.height)
            paste(self.image, (8, 12, 16), (round(x) - rim, round(y) - rim), shade)
        paste(self.image, colour[:3], (round(x), round(y)), mask)

    def text_width(self, text: str, size: float, bold: bool = True) -> float:
        return _render_text(text, max(1, round(size * self.k)), bold, 0)[0].width / self.k

    def region(self, key: tuple[object, ...], upper_left: Point, size: Point, paint: Callable[[], None]) -> None:
        """Paint a rectangle, or restore the earlier result of `paint` for the same key. The background must always be the same."""
        (x, y), (width, height) = self.pixel(upper_left), size
        left, top = math.floor(x), math.floor(y)
        right, bottom = math.ceil(x + width * self.k), math.ceil(y + height * self.k)

        def paint_and_crop() -> Image.Image:
            paint()
            return self.image.crop((left, top, right, bottom))

        image = self.cache.get((*key, left, top, self._left, self._top), paint_and_crop)
        self.mark(left, top, right, bottom)
        paste(self.image, image, (left, top))

    def sprite(self, key: tuple[object, ...], at: Point, half: float, paint: Callable[[SpriteCanvas], None]) -> None:
        """Draw a sprite from the cache; `paint` draws it once per key into a square from −half to half."""

        def paint_large() -> Image.Image:
            side = 2 * math.ceil(half * self.k) * _SPRITE_OVERSAMPLING
            canvas = SpriteCanvas(Image.new("RGBA", (side, side)), side / (2 * half), half)
            paint(canvas)
            return canvas.image.reduce(_SPRITE_OVERSAMPLING)

        image = self.cache.get((*key, half), paint_large)
        x, y = self.pixel(at)
        self._paste_blended(image, round(x - image.width / 2), round(y - image.height / 2))

    def label(
        self, key: tuple[object, ...], upper_left: Point, size: Point, paint: Callable[[Canvas, Point], None], margin: float = 0.0
    ) -> None:
        """Draw a label from the cache; `paint` gets a transparent canvas and the upper left corner, once per key."""

        def paint_label() -> Image.Image:
            width, height = (math.ceil((side + 2 * margin) * self.k) for side in size)
            image = Image.new("RGBA", (width, height))
            paint(Canvas(image, self.k / OVERSAMPLING, self.cache), (margin, margin))
            return image

        x, y = self.pixel((upper_left[0] - margin, upper_left[1] - margin))
        self._paste_blended(self.cache.get(key, paint_label), round(x), round(y))

    def _paste_blended(self, image: Image.Image, left: int, top: int) -> None:
        self.mark(left, top, left + image.width, top + image.height)
        paste(self.image, image, (left, top), image)


class ImageCache:
    """LRU cache of sprites, labels and painted regions for one scale."""

    def __init__(self) -> None:
        self._images: OrderedDict[tuple[object, ...], Image.Image] = OrderedDict()

    def get(self, key: tuple[object, ...], paint: Callable[[], Image.Image]) -> Image.Image:
        """Return the image of a key; `paint` makes it once."""
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
            return image
        image = self._images[key] = paint()
        if len(self._images) > _IMAGES:
            self._images.popitem(last=False)
        return image


class SpriteCanvas(Canvas):
    """Canvas with its origin in the middle. Blends translucent layers, which drawing into an RGBA image does not do."""

    def __init__(self, image: Image.Image, k: float, half: float) -> None:
        super().__init__(image, k / OVERSAMPLING)
        self._half = half

    def _over(self, draw: Callable[[Canvas], None]) -> None:
        layer = Canvas(Image.new("RGBA", self.image.size), self.k / OVERSAMPLING)
        draw(layer)
        self.image.alpha_composite(layer.image)

    def _at(self, at: Point) -> Point:
        return at[0] + self._half, at[1] + self._half

    def circle(self, at: Point, radius: float, fill: Colour | None = None, edge: Colour | None = None, width: float = 1) -> None:
        self._over(lambda layer: layer.circle(self._at(at), radius, fill, edge, width))

    def arc(self, at: Point, radius: float, start: float, end: float, colour: Colour, width: float) -> None:
        self._over(lambda layer: layer.arc(self._at(at), radius, start, end, colour, width))

    def dashes(self, at: Point, radius: float, colour: Colour, width: float, count: int, turn: float = 0.0) -> None:
        self._over(lambda layer: layer.dashes(self._at(at), radius, colour, width, count, turn))

    def line(self, a: Point, b: Point, colour: Colour, width: float) -> None:
        self._over(lambda layer: layer.line(self._at(a), self._at(b), colour, width))

    def polygon(self, points: Sequence[Point], fill: Colour | None, edge: Colour | None = None, width: float = 1) -> None:
        self._over(lambda layer: layer.polygon([self._at(point) for point in points], fill, edge, width))

    def glow(self, radius: float, colour: Colour, opacity: float, power: float = 2.0) -> None:
        """Draw a radial glow around the middle."""
        side = self.image.width
        offsets = (np.arange(side) + 0.5 - side / 2) / (radius * self.k)
        distance = np.sqrt(offsets[:, None] ** 2 + offsets[None, :] ** 2)
        strength = np.clip(1.0 - distance, 0.0, 1.0) ** power * opacity
        self.image.alpha_composite(_tint(strength, colour))

    def shade(self, at: Point, radius: float, opacity: float) -> None:
        """Draw a soft shadow."""
        side = self.image.width
        reach = (np.arange(side) + 0.5 - side / 2) / self.k
        distance = np.hypot((reach - at[0])[None, :], (reach - at[1])[:, None]) / radius
        strength = np.clip((1.0 - distance) * 2.5, 0.0, 1.0) * opacity
        self.image.alpha_composite(_tint(strength, (0, 0, 0)))


def _tint(strength: Array, colour: Colour) -> Image.Image:
    pixels = np.empty((*strength.shape, 4), np.uint8)
    pixels[..., :3] = colour[:3]
    pixels[..., 3] = (strength * 255).astype(np.uint8)
    return Image.fromarray(pixels, "RGBA")


@lru_cache(maxsize=_TEXTS)
def _render_text(text: str, size: int, bold: bool, rim: int) -> tuple[Image.Image, float]:
    """Return the opacity mask of a text and the distance of its middle from its top."""
    font = _load_font(size, bold)
    width = max(1, math.ceil(font.getlength(text)))
    ascent, descent = font.getmetrics()
    mask = Image.new("L", (width + 2 * rim, ascent + descent + 2 * rim))
    ImageDraw.Draw(mask).text((rim, rim), text, 255, font, stroke_width=rim)
    return mask, ascent - 0.36 * size  # capitals are 0.73 of the size high


@lru_cache(maxsize=64)
def _load_font(size: int, bold: bool) -> ImageFont.FreeTypeFont:
    spec = importlib.util.find_spec("matplotlib")  # not imported: that takes longer than rendering a frame
    if spec is None or spec.origin is None:
        raise MissingExtra("Rendering needs the fonts of matplotlib, which is not installed.", "pip install matplotlib")
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / name
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
