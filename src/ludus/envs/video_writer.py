"""Video files written frame by frame (H.264 in mp4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from ludus.core.tree import Array
from ludus.errors import UsageError

FrameProgress = Callable[[int, int | None], None]
"""Called after every frame with the number written and the total, None if unknown."""
PixelFormat = Literal["rgb24", "yuv420p"]
_ENCODING: Final = ("-preset", "veryfast", "-crf", "18", "-x264-params", "subme=1")
"""Measured on the Arena (bench/results/arena-film.md): 7 ms of CPU time per frame instead of 17, smaller files, no visible difference."""


class VideoWriter:
    """Writes an mp4 (H.264) frame by frame; a context manager."""

    def __init__(self, path: Path, fps: float, pixels: PixelFormat = "rgb24") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.frames = path, 0
        self._fps, self._pixels = fps, pixels
        self._shape: tuple[int, ...] | None = None
        self._encoder: Any = None

    def add(self, frame: Array) -> None:
        """`frame`: uint8 [H, W, 3]; for yuv420p [H·3/2, W], the three planes concatenated, with even H and W."""
        if self._shape is None:
            self._shape = frame.shape
            self._encoder = self._start(frame.shape)
        if frame.shape != self._shape:
            raise UsageError(f"The frame size changes from {list(self._shape)} to {list(frame.shape)}; a video needs one size.")
        if self._pixels == "rgb24":
            frame = frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]  # H.264 wants even sides
        self._encoder.send(np.ascontiguousarray(frame))
        self.frames += 1

    def _start(self, shape: tuple[int, ...]) -> Any:
        import imageio_ffmpeg

        height = shape[0] // 2 * 2 if self._pixels == "rgb24" else shape[0] * 2 // 3
        encoder = imageio_ffmpeg.write_frames(
            str(self.path),
            (shape[1] // 2 * 2, height),
            pix_fmt_in=self._pixels,
            fps=self._fps,
            quality=None,
            codec="libx264",
            macro_block_size=2,
            ffmpeg_log_level="error",
            output_params=list(_ENCODING),
        )
        encoder.send(None)
        return encoder

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._encoder is not None:
            self._encoder.close()
