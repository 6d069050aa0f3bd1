"""What a network divides uint8 observations by: 255 for pictures, their largest value for grids of small integers.

A grid of symbols, such as MiniGrid's 7×7×3 with values up to 10, declares the same range as a picture. Divided by 255 its
symbols are hardly different from each other, and a network takes twice as long to tell them apart. The choice is made once,
before training, and is part of the policy (`NetworkConfig.byte_scales`): rollouts, servers and exports divide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import space_leaves

PICTURE = 255.0
"""The divisor of every part that `byte_scales` does not name."""

SMALLEST_PICTURE = 32
"""Pixels of the shorter side; no grid of symbols that is in use is that large."""

LARGEST_SYMBOL = 31
"""A part in which no larger value is seen is a grid of symbols."""

Seen = Mapping[str, int]
"""Path of a uint8 part → the largest value that was seen in it."""


@dataclass(frozen=True)
class ByteScale:
    """The divisor of one uint8 part of an observation, and why it is that."""

    path: str
    divisor: float
    reason: str
    obvious: bool = False
    """A picture: there is nothing to announce."""

    def __str__(self) -> str:
        part = f"observation.{self.path}" if self.path else "observation"
        return f"{part} (uint8) is divided by {self.divisor:g}: {self.reason}"


def choose(space: gym.Space[Any], setting: bool | float | None, look: Callable[[], Seen] | None) -> list[ByteScale]:
    """The divisors of all uint8 parts of an observation.

    `setting` is `preprocess.scale`: a number divides all of them, false leaves them as they are, null and true choose. `look` plays
    an environment for a moment and is called only if the space does not tell; None: there is no environment to play.
    """
    parts = byte_parts(space)
    if setting is False or (setting is not None and setting is not True):
        return [ByteScale(path, float(setting) if setting else 1.0, "set by preprocess.scale") for path in parts]
    unclear = [path for path, box in parts.items() if int(box.high.max()) == PICTURE and not has_size_of_picture(box)]
    seen = look() if unclear and look is not None else {}
    return [_choose_one(path, box, seen.get(path) if path in unclear else None) for path, box in parts.items()]


def _choose_one(path: str, box: gym.spaces.Box, seen: int | None) -> ByteScale:
    declared = int(box.high.max())
    if declared < PICTURE:
        return ByteScale(path, max(1.0, float(declared)), "the largest value of its space")
    if has_size_of_picture(box):
        return ByteScale(path, PICTURE, "a picture", obvious=True)
    if seen is None:
        return ByteScale(
            path,
            PICTURE,
            "its space allows 0 to 255. If it holds small integers, declare their largest value, or set preprocess.scale",
        )
    if seen > LARGEST_SYMBOL:
        return ByteScale(path, PICTURE, f"values up to {seen} were seen")
    return ByteScale(
        path,
        max(1.0, float(seen)),
        f"a grid of small integers, the largest seen is {seen}. If it is a picture, set preprocess.scale: 255",
    )


def has_size_of_picture(box: gym.spaces.Box) -> bool:
    """[H, W], [H, W, C] or [C, H, W] with both sides of at least 32 pixels."""
    sides = box.shape if len(box.shape) == 2 else sorted(box.shape)[1:] if len(box.shape) == 3 else ()
    return bool(sides) and min(sides) >= SMALLEST_PICTURE


def byte_parts(space: gym.Space[Any]) -> dict[str, gym.spaces.Box]:
    """Path → space of the parts of an observation that are uint8."""
    leaves = space_leaves(space)
    return {path: leaf for path, leaf in leaves if isinstance(leaf, gym.spaces.Box) and leaf.dtype == np.uint8}


def stored(choice: list[ByteScale]) -> tuple[tuple[str, float], ...]:
    """As a policy keeps it: the parts that are not divided by 255."""
    return tuple((scale.path, scale.divisor) for scale in choice if scale.divisor != PICTURE)


def below(scales: tuple[tuple[str, float], ...], key: str) -> tuple[tuple[str, float], ...]:
    """The scales of the observation under a key, with paths from there on."""
    return tuple((path.removeprefix(key).removeprefix("."), d) for path, d in scales if path == key or path.startswith(f"{key}."))
