"""Videos of episodes from RGB frames or depth maps, one after the other or as a grid."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.tree import Array
from ludus.envs.video_writer import FrameProgress, VideoWriter
from ludus.errors import Damaged, UsageError
from ludus.experiments.evaluation.rollout_file import translate_write_errors

FALLBACK_FPS = 30
GRID_CELLS = 16  # more pictures than that are too small to be watched
_GRID_SIDE = 1920  # pixels; cells are made smaller until the whole fits
_DIM = 0.35


def check_rgb(frame: Any, name: str) -> Array:
    """A frame as uint8 [H, W, 3]. Raises UsageError for anything else."""
    if frame is None:
        raise UsageError(f"{name} renders nothing in rgb_array mode.", "Record without --video.")
    array = np.asarray(frame)
    if array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8:
        return array
    shape = f"{array.dtype}{list(array.shape)}"
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1):
        raise UsageError(
            f"{name} renders {shape}, which is not an RGB image: one number per pixel is a depth map or a mask.",
            "Record without --video, or depth maps in false colours with --depth.",
        )
    raise UsageError(f"{name} renders {shape}, which is not an RGB image.", "Record without --video.")


def check_depth(frame: Any, name: str) -> Array:
    """A frame as float32 [H, W]. Raises UsageError for an RGB image."""
    if frame is None:
        raise UsageError(f"{name} renders nothing.", "Record without --depth.")
    array = np.asarray(frame)
    array = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    if array.ndim != 2 or array.dtype.kind not in "uif":
        raise UsageError(
            f"{name} renders {array.dtype}{list(array.shape)}, which is not a depth map.", "Use --video for RGB images."
        )
    return array.astype(np.float32)


def check_renders(env: gym.Env[Any, Any], name: str) -> None:
    """Raises UsageError if an environment cannot render frames."""
    if env.render_mode not in ("rgb_array", "depth_array"):
        modes = env.metadata.get("render_modes", [])
        raise UsageError(
            f"{name} cannot render RGB frames: its render modes are {list(modes) or 'none'}.", "Record without --video."
        )


def frame_rate(metadata: Mapping[str, Any]) -> float:
    return float(metadata.get("render_fps") or FALLBACK_FPS)


# -- frame files --------------------------------------------------------------------------------------------------------


class FrameFile:
    """Losslessly compressed frames of one episode, to be encoded later. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translate_write_errors(path):
            self._file = path.open("wb")

    def __enter__(self) -> FrameFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def add(self, frame: Array, total_return: float) -> None:
        """`total_return`: the return so far."""
        kind = frame.dtype.str.encode().ljust(4)
        packed = zlib.compress(np.ascontiguousarray(frame).tobytes(), 1)
        sides = (*frame.shape, 1)[:3]
        with translate_write_errors(self._path):
            self._file.write(_FRAME.pack(kind, frame.ndim, *sides, total_return, len(packed)) + packed)


_FRAME = struct.Struct("<4sB3IdQ")


def read_frames(path: Path) -> Iterator[tuple[Array, float]]:
    """Yields (frame, return so far)."""
    with path.open("rb") as file:
        while head := file.read(_FRAME.size):
            if len(head) < _FRAME.size:
                raise Damaged(f"{path} ends in the middle of a frame.")
            kind, dimensions, *sides, total_return, size = _FRAME.unpack(head)
            frame = np.frombuffer(zlib.decompress(file.read(size)), np.dtype(kind.strip().decode()))
            yield frame.reshape(sides[:dimensions]), total_return


# -- videos -------------------------------------------------------------------------------------------------------------


FrameConverter = Callable[[Array], Array]
"""Converts a frame to RGB."""


def depth_to_rgb(paths: Sequence[Path]) -> FrameConverter:
    """A colour map for depths over the range of all frames: dark is near, bright is far."""
    import matplotlib as mpl

    table = (mpl.colormaps["viridis"](np.arange(256))[:, :3] * 255).round().astype(np.uint8)
    low, high = math.inf, -math.inf
    for path in paths:
        for frame, _ in read_frames(path):
            known = frame[np.isfinite(frame)]
            if known.size:
                low, high = min(low, float(known.min())), max(high, float(known.max()))
    span = (high - low) or 1.0

    def colour(frame: Array) -> Array:
        share = np.clip((np.nan_to_num(frame, nan=high, posinf=high, neginf=low) - low) / span, 0.0, 1.0)
        picture: Array = table[(share * 255).astype(np.uint8)]
        return picture

    return colour


def identity(frame: Array) -> Array:
    return frame


def write_video(
    path: Path, episodes: Sequence[Path], fps: float, to_rgb: FrameConverter = identity, progress: FrameProgress | None = None
) -> Path | None:
    """Write episodes one after the other. Returns None if there are no frames."""
    writer: VideoWriter | None = None
    try:
        for episode in episodes:
            for frame, _ in read_frames(episode):
                writer = writer or VideoWriter(path, fps)
                writer.add(to_rgb(frame))
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
    to_rgb: FrameConverter = identity,
    returns: Sequence[float] = (),
    progress: FrameProgress | None = None,
) -> Path | None:
    """Episodes side by side, each with its number and return so far; those that have ended stay on their last picture, dimmed,
    with their final return (`returns`)."""
    running: list[Iterator[tuple[Array, float]] | None] = [read_frames(episode) for episode in episodes]
    cells: list[Array | None] = [None] * len(episodes)
    latest: dict[int, tuple[Array, float]] = {}
    layout: _GridLayout | None = None
    writer: VideoWriter | None = None
    try:
        while True:
            for i, frames in enumerate(running):
                if frames is None:
                    continue
                item = next(frames, None)
                if item is not None:
                    latest[i] = to_rgb(item[0]), item[1]
                    layout = layout or _GridLayout(latest[i][0].shape, len(episodes))
                else:
                    running[i] = None
                    if i in latest and i < len(returns):
                        latest[i] = latest[i][0], returns[i]
                if layout is not None and i in latest:
                    cells[i] = layout.cell(*latest[i], episode=i, over=item is None)
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


class _GridLayout:
    """Position and size of the cells of a grid: as large as the first frame, scaled down if the grid would be too large."""

    def __init__(self, shape: tuple[int, ...], cells: int) -> None:
        self.columns = math.ceil(math.sqrt(cells))
        self.rows = math.ceil(cells / self.columns)
        height, width = shape[:2]
        scale = min(1.0, _GRID_SIDE / max(width * self.columns, height * self.rows))
        self.height, self.width = max(2, int(height * scale) // 2 * 2), max(2, int(width * scale) // 2 * 2)

    def cell(self, frame: Array, total_return: float, *, episode: int, over: bool) -> Array:
        from PIL import Image, ImageDraw

        picture = Image.fromarray(frame)
        if picture.size != (self.width, self.height):
            picture = picture.resize((self.width, self.height))
        if over:
            picture = Image.fromarray((np.asarray(picture) * _DIM).astype(np.uint8))
        if min(self.width, self.height) >= 60:
            draw = ImageDraw.Draw(picture)
            text = f"{episode}: {total_return:.6g}"
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
