"""A film as it grows: H.264 in an mp4, frame by frame."""

from __future__ import annotations

from pathlib import Path

from ludus.errors import UsageError
from ludus.tree import Array


class VideoWriter:
    """An mp4 (H.264) that grows frame by frame; use as a context manager."""

    def __init__(self, path: Path, fps: float) -> None:
        import imageio

        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.frames = path, 0
        self._shape: tuple[int, ...] | None = None
        self._writer = imageio.get_writer(
            str(path), fps=fps, codec="libx264", macro_block_size=2, quality=7, ffmpeg_log_level="error"
        )

    def add(self, frame: Array) -> None:
        self._shape = self._shape or frame.shape
        if frame.shape != self._shape:
            raise UsageError(f"The pictures change from {list(self._shape)} to {list(frame.shape)}: that cannot be a video.")
        even = frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]  # H.264 wants even sides
        self._writer.append_data(even)
        self.frames += 1

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()
