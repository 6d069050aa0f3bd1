"""Divisors of uint8 observations: 255 for images, the largest value for grids of small integers.

A grid of symbols, such as MiniGrid's 7×7×3 with values up to 10, declares the same range as an image. Divided by 255 its symbols are
hardly distinguishable, and learning takes twice as long. The divisor is chosen once before training and is part of the policy
(`NetworkConfig.byte_scales`), so rollouts, servers and exports use the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import space_leaves

IMAGE_DIVISOR = 255.0
"""Divisor of every leaf that `byte_scales` does not name."""

MIN_IMAGE_SIDE = 32
"""Minimum length of the shorter side of an image in pixels; symbol grids in use are smaller."""

LARGEST_SYMBOL = 31
"""A leaf without a larger value is a grid of symbols."""

LargestValues = Mapping[str, int]
"""Path of a uint8 leaf → the largest observed value."""


@dataclass(frozen=True)
class ByteScale:
    """The divisor of one uint8 leaf of an observation, and the reason for it."""

    path: str
    divisor: float
    reason: str
    obvious: bool = False
    """An image: nothing to announce."""

    def __str__(self) -> str:
        part = f"observation.{self.path}" if self.path else "observation"
        return f"{part} (uint8) is divided by {self.divisor:g}: {self.reason}"


def choose(space: gym.Space[Any], setting: bool | float | None, look: Callable[[], LargestValues] | None) -> list[ByteScale]:
    """Choose the divisors of all uint8 leaves of an observation.

    `setting` is `preprocess.scale`: a number divides all of them, false leaves them unchanged, null and true choose. `look` plays an
    environment briefly and is called only if the space is ambiguous; None: there is no environment to play.
    """
    parts = byte_parts(space)
    if setting is False or (setting is not None and setting is not True):
        return [ByteScale(path, float(setting) if setting else 1.0, "set by preprocess.scale") for path in parts]
    unclear = [path for path, box in parts.items() if int(box.high.max()) == IMAGE_DIVISOR and not has_image_size(box)]
    largest = look() if unclear and look is not None else {}
    return [_choose_one(path, box, largest.get(path) if path in unclear else None) for path, box in parts.items()]


def _choose_one(path: str, box: gym.spaces.Box, largest: int | None) -> ByteScale:
    declared = int(box.high.max())
    if declared < IMAGE_DIVISOR:
        return ByteScale(path, max(1.0, float(declared)), "the largest value of its space")
    if has_image_size(box):
        return ByteScale(path, IMAGE_DIVISOR, "a picture", obvious=True)
    if largest is None:
        return ByteScale(
            path,
            IMAGE_DIVISOR,
            "its space allows 0 to 255. If it holds small integers, declare their largest value, or set preprocess.scale",
        )
    if largest > LARGEST_SYMBOL:
        return ByteScale(path, IMAGE_DIVISOR, f"values up to {largest} occur")
    return ByteScale(
        path,
        max(1.0, float(largest)),
        f"a grid of small integers, the largest value is {largest}. If it is a picture, set preprocess.scale: 255",
    )


def has_image_size(box: gym.spaces.Box) -> bool:
    """[H, W], [H, W, C] or [C, H, W] with both sides of at least 32 pixels."""
    sides = box.shape if len(box.shape) == 2 else sorted(box.shape)[1:] if len(box.shape) == 3 else ()
    return bool(sides) and min(sides) >= MIN_IMAGE_SIDE


def byte_parts(space: gym.Space[Any]) -> dict[str, gym.spaces.Box]:
    """Return path → space of the uint8 leaves of an observation."""
    leaves = space_leaves(space)
    return {path: leaf for path, leaf in leaves if isinstance(leaf, gym.spaces.Box) and leaf.dtype == np.uint8}


def non_default_scales(choice: list[ByteScale]) -> tuple[tuple[str, float], ...]:
    """Return the divisors other than 255, as a policy stores them."""
    return tuple((scale.path, scale.divisor) for scale in choice if scale.divisor != IMAGE_DIVISOR)


def below(scales: tuple[tuple[str, float], ...], key: str) -> tuple[tuple[str, float], ...]:
    """Return the scales below a key, with paths relative to it."""
    return tuple((path.removeprefix(key).removeprefix("."), d) for path, d in scales if path == key or path.startswith(f"{key}."))
