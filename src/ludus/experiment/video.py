"""RGB video: what a person would see on the screen, and nothing else passed off as it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.errors import UsageError
from ludus.tree import Array

FALLBACK_FPS = 30


def check_rgb(frame: Any, name: str) -> Array:
    """A frame as uint8 [H, W, 3]; anything else is refused with what it is."""
    if frame is None:
        raise UsageError(f"{name} renders nothing in rgb_array mode.", "Record without --video.")
    array = np.asarray(frame)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise UsageError(
            f"{name} renders {array.dtype}{list(array.shape)}, which is not an RGB picture (a depth map?).",
            "Record without --video.",
        )
    return array


def check_renders(env: gym.Env[Any, Any], name: str) -> None:
    """Raise UsageError with the reason when an environment cannot give RGB frames."""
    if env.render_mode != "rgb_array":
        modes = env.metadata.get("render_modes", [])
        raise UsageError(
            f"{name} cannot render RGB frames: its render modes are {list(modes) or 'none'}.", "Record without --video."
        )


class VideoWriter:
    """An mp4 (H.264) that grows frame by frame; use as a context manager."""

    def __init__(self, path: Path, fps: float) -> None:
        import imageio

        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.frames = path, 0
        self._writer = imageio.get_writer(str(path), fps=fps, codec="libx264", macro_block_size=2, quality=7)

    def add(self, frame: Array) -> None:
        even = frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]  # H.264 wants even sides
        self._writer.append_data(even)
        self.frames += 1

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._writer.close()


def frame_rate(env: gym.Env[Any, Any]) -> float:
    return float(env.metadata.get("render_fps") or FALLBACK_FPS)
