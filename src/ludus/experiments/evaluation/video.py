"""RGB video: what a person would see on the screen, and nothing else passed off as it. Depth maps become a file of that name."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from ludus.core.tree import Array
from ludus.envs.video_writer import FrameProgress, VideoWriter
from ludus.errors import Damaged, UsageError
from ludus.experiments.evaluation.rollout_file import written_to

FALLBACK_FPS = 30
GRID_CELLS = 16  # more pictures than that are too small to be watched
_GRID_SIDE = 1920  # pixels; cells are made smaller until the whole fits
_DIM = 0.35


def check_rgb(frame: Any, name: str) -> Array:
    """A frame as uint8 [H, W, 3]; anything else is refused with what it is."""
    if frame is None:
        raise UsageError(f"{name} renders nothing in rgb_array mode.", "Record without --video.")
    array = np.asarray(frame)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise UsageError(
            f"{name} renders {array.dtype}{list(array.shape)}, which is not an RGB picture (a depth map?).",
            "Record without --video, or with --depth if that is what you want to see.",
        )
    return array


def check_depth(frame: Any, name: str) -> Array:
    """A frame as float32 [H, W]; a picture in colours is refused: it is no depth."""
    if frame is None:
        raise UsageError(f"{name} renders nothing.", "Record without --depth.")
    array = np.asarray(frame)
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.ndim != 2 or array.dtype.kind not in "uif":
        raise UsageError(
            f"{name} renders {array.dtype}{list(array.shape)}, which is not a depth map.", "Use --video for pictures."
        )
    return array.astype(np.float32)


def check_renders(env: gym.Env[Any, Any], name: str) -> None:
    """Raise UsageError with the reason when an environment cannot give frames."""
    if env.render_mode not in ("rgb_array", "depth_array"):
        modes = env.metadata.get("render_modes", [])
        raise UsageError(
            f"{name} cannot render RGB frames: its render modes are {list(modes) or 'none'}.", "Record without --video."
        )


def frame_rate(metadata: Mapping[str, Any]) -> float:
    return float(metadata.get("render_fps") or FALLBACK_FPS)


# -- frames that wait ---------------------------------------------------------------------------------------------------


class FrameFile:
    """Frames of one episode, compressed without loss, until they are put into a video. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with written_to(path):
            self._file = path.open("wb")

    def __enter__(self) -> FrameFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def add(self, frame: Array, gained: float) -> None:
        """`gained`: the return so far."""
        kind = frame.dtype.str.encode().ljust(4)
        packed = zlib.compress(np.ascontiguousarray(frame).tobytes(), 1)
        sides = (*frame.shape, 1)[:3]
        with written_to(self._path):
            self._file.write(_FRAME.pack(kind, frame.ndim, *sides, gained, len(packed)) + packed)


_FRAME = struct.Struct("<4sB3IdQ")


def read_frames(path: Path) -> Iterator[tuple[Array, float]]:
    """(frame, return so far), one after the other."""
    with path.open("rb") as file:
        while head := file.read(_FRAME.size):
            if len(head) < _FRAME.size:
                raise Damaged(f"{path} ends in the middle of a frame.")
            kind, dimensions, *sides, gained, size = _FRAME.unpack(head)
            frame = np.frombuffer(zlib.decompress(file.read(size)), np.dtype(kind.strip().decode()))
            yield frame.reshape(sides[:dimensions]), gained


# -- videos -------------------------------------------------------------------------------------------------------------


class Shown(Protocol):
    """How a frame is turned into an RGB picture."""

    def __call__(self, frame: Array) -> Array: ...


def depth_colours(paths: Sequence[Path]) -> Shown:
    """Depths as colours, over the range of all frames: dark is near, bright is far."""
    import matplotlib as mpl

    table = (mpl.colormaps["viridis"](np.arange(256))[:, :3] * 255).round().astype(np.uint8)
    low, high = math.inf, -math.inf
    for path in paths:
        for frame, _ in read_frames(path):
            known = frame[np.isfinite(frame)]
            if known.size:
                low, high = min(low, float(known.min())), max(high, float(known.max()))
    span = (high - low) or 1.0

    def coloured(frame: Array) -> Array:
        share = np.clip((np.nan_to_num(frame, nan=high, posinf=high, neginf=low) - low) / span, 0.0, 1.0)
        picture: Array = table[(share * 255).astype(np.uint8)]
        return picture

    return coloured


def as_it_is(frame: Array) -> Array:
    return frame


def write_video(
    path: Path, episodes: Sequence[Path], fps: float, shown: Shown = as_it_is, progress: FrameProgress | None = None
) -> Path | None:
    """One episode after the other. None when there is no frame at all."""
    writer: VideoWriter | None = None
    try:
        for episode in episodes:
            for frame, _ in read_frames(episode):
                writer = writer or VideoWriter(path, fps)
                writer.add(shown(frame))
                if progress is not None:
                    progress(writer.frames, None)
    finally:
        if writer is not None:
            writer.__exit__()
    return path if writer is not None else None


def write_grid(
    path: Path,
    episodes: Sequence[Path],
    fps: float,
    shown: Shown = as_it_is,
    returns: Sequence[float] = (),
    progress: FrameProgress | None = None,
) -> Path | None:
    """Episodes side by side, each with its number and return so far; those that have ended stay on their last picture, dimmed,
    with all that they gained (`returns`)."""
    running: list[Iterator[tuple[Array, float]] | None] = [read_frames(episode) for episode in episodes]
    cells: list[Array | None] = [None] * len(episodes)
    seen: dict[int, tuple[Array, float]] = {}
    layout: _Layout | None = None
    writer: VideoWriter | None = None
    try:
        while True:
            for i, frames in enumerate(running):
                if frames is None:
                    continue
                item = next(frames, None)
                if item is not None:
                    seen[i] = shown(item[0]), item[1]
                    layout = layout or _Layout(seen[i][0].shape, len(episodes))
                else:
                    running[i] = None
                    if i in seen and i < len(returns):
                        seen[i] = seen[i][0], returns[i]
                if layout is not None and i in seen:
                    cells[i] = layout.cell(*seen[i], episode=i, over=item is None)
            if layout is None or not any(running):
                break
            writer = writer or VideoWriter(path, fps)
            writer.add(layout.picture(cells))
            if progress is not None:
                progress(writer.frames, None)
    finally:
        if writer is not None:
            writer.__exit__()
    return path if writer is not None else None


class _Layout:
    """Where the cells of a grid are, and how large: all as large as the first frame, or smaller if they would not fit."""

    def __init__(self, shape: tuple[int, ...], cells: int) -> None:
        self.columns = math.ceil(math.sqrt(cells))
        self.rows = math.ceil(cells / self.columns)
        height, width = shape[:2]
        scale = min(1.0, _GRID_SIDE / max(width * self.columns, height * self.rows))
        self.height, self.width = max(2, int(height * scale) // 2 * 2), max(2, int(width * scale) // 2 * 2)

    def cell(self, frame: Array, gained: float, *, episode: int, over: bool) -> Array:
        from PIL import Image, ImageDraw

        picture = Image.fromarray(frame)
        if picture.size != (self.width, self.height):
            picture = picture.resize((self.width, self.height))
        if over:
            picture = Image.fromarray((np.asarray(picture) * _DIM).astype(np.uint8))
        if min(self.width, self.height) >= 60:
            draw = ImageDraw.Draw(picture)
            text = f"{episode}: {gained:.6g}"
            draw.rectangle((0, 0, 8 + draw.textlength(text), 13), fill=(0, 0, 0))
            draw.text((4, 1), text, fill=(255, 255, 255))
        return np.asarray(picture)

    def picture(self, cells: Sequence[Array | None]) -> Array:
        whole = np.zeros((self.rows * self.height, self.columns * self.width, 3), np.uint8)
        for i, cell in enumerate(cells):
            if cell is not None:
                top, left = i // self.columns * self.height, i % self.columns * self.width
                whole[top : top + self.height, left : left + self.width] = cell
        return whole
