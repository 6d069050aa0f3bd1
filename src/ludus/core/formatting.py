"""Numbers, durations, bars and sparklines as text for terminals and reports. JSON output uses plain numbers instead."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "–"
_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MIN_FIXED, _MAX_FIXED = 1e-4, 1e12  # outside of these with an exponent


def format_number(value: float | None) -> str:
    """Three to four significant digits, by magnitude: 1,234 · 475.3 · 12.5 · 4.94 · 0.333 · 0.0123 · 1.2e-05."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size < _MIN_FIXED or size >= _MAX_FIXED:
        text = f"{size:.2g}"
    elif size < 1:
        text = f"{size:.{2 - math.floor(math.log10(size))}f}"
    else:
        text = f"{size:,.{2 if size < 10 else 1 if size < 1000 else 0}f}"
    return f"−{text}" if value < 0 else text


def pluralize(number: float, word: str, plural: str = "") -> str:
    """1 worker · 1,200 workers. `plural`: where it is not the word and an s."""
    return f"{number:,.0f} {word if number == 1 else plural or f'{word}s'}"


def format_bytes(count: float) -> str:
    """1.5 GB · 120 MB · 512 bytes."""
    for unit, scale in (("TB", 1 << 40), ("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}" if count < 100 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:.0f} bytes"


def format_duration(seconds: float | None) -> str:
    """The two largest units: 3.2 s · 45 s · 12 min 5 s · 3 h 20 min · 5 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    for size, name, part, part_name in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{whole} s"


def bar(share: float, width: int) -> str:
    """A bar of `width` characters, filled to `share` (clipped to 0 … 1) in eighths of a character."""
    filled = round(min(1.0, max(0.0, share if math.isfinite(share) else 0.0)) * width * 8)
    full, part = divmod(filled, 8)
    return (_EIGHTHS[8] * full + (_EIGHTHS[part] if part else "")).ljust(width)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a series in at most `width` characters; '' for fewer than two finite values. Non-finite values are skipped."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 or width < 1:
        return ""
    stride = max(1, math.ceil(len(finite) / width))
    points = [finite[min(i + stride, len(finite)) - 1] for i in range(0, len(finite), stride)]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[round((point - low) / span * (len(_BLOCKS) - 1))] for point in points)
