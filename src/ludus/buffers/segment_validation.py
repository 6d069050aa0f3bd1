"""Validation of segments received from other machines before they are learned from.

A correct worker never sends an invalid segment: an error means damage in transport or a foreign sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.core.spaces import bits, categories, category_counts, choices, mask_size, space_leaves
from ludus.core.tree import Array, Tree, leaves
from ludus.core.types import Segments, SegmentSpec

_FLAGS = ("terminated", "truncated", "valid", "first", "action_mask")
_SMALL_SIZE = 2048


@dataclass(frozen=True)
class _Choice:
    """A categorical choice, or one bit, of an action: its index within a leaf, and the slice of its options in the mask."""

    part: int
    at: int
    options: slice
    bit: bool


class SegmentValidator:
    """Validates segments of environments with these spaces, written with `spec`.

    Padding is checked too: a masked loss multiplies it by zero, and NaN times zero is NaN.
    """

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any], spec: SegmentSpec) -> None:
        self._spec = spec
        self._ranges = {
            ".".join(filter(None, ("observation", path))): bounds
            for path, bounds in (categories(observation_space) | bits(observation_space)).items()
        }
        actions = {
            ".".join(filter(None, ("action", path))): bounds
            for path, bounds in (categories(action_space) | bits(action_space)).items()
        }
        self._actions = {path: (np.zeros_like(low), high - low) for path, (low, high) in actions.items()}  # stored from 0 on
        trees = {"observation": spec.observation, "action": spec.action, "state": spec.state}
        self._float_or_bool = [name for name, tree in trees.items() if any(leaf.dtype.kind in "fb" for _, leaf in leaves(tree))]
        masked = spec.mask_size and spec.mask_size == mask_size(action_space)
        self._options = choices(action_space) if masked else []
        self._choices = _choices(action_space) if masked else []

    def find_error(self, segments: Segments) -> str | None:
        """Return a description of the first error, from a small fixed set of texts, or None."""
        for name in _FLAGS:  # bytes other than 0 and 1 break boolean logic: `valid` and `~valid` could both be true
            if not _is_boolean(getattr(segments, name)):
                return f"{name} contains values other than true and false"
        return (
            self._check_numbers(segments)
            or self._check_observations(segments)
            or self._check_ranges("action", segments.action, self._actions)
            or self._check_masks(segments)
            or self._check_finals(segments)
            or self._check_episodes(segments)
        )

    def _check_numbers(self, segments: Segments) -> str | None:
        for name in ("reward", "log_prob", "value"):
            if not np.isfinite(getattr(segments, name)).all():
                return f"{name} is not finite"
        for name in self._float_or_bool:
            if (wrong := _find_invalid_number(name, getattr(segments, name))) is not None:
                return wrong
        if segments.version.size and segments.version.min() < 0:
            return "version is negative"
        return None

    def _check_observations(self, segments: Segments) -> str | None:
        """Steps that were never written are zeros, which need not be in range."""
        wrong = self._check_ranges("observation", segments.observation, self._ranges)
        if wrong is None or segments.valid.all():
            return wrong
        unused = np.ones((segments.spec.steps + 1, segments.rows), np.bool_)
        unused[:-1] &= ~segments.valid
        unused[1:] &= ~segments.valid  # the index after a valid step holds its bootstrap observation
        for path, leaf in leaves(segments.observation, "observation"):
            if path in self._ranges:
                low, high = self._ranges[path]
                empty = unused.reshape(*unused.shape, *(1 for _ in leaf.shape[2:])) & (leaf == 0)
                if (((leaf < low) | (leaf >= high)) & ~empty).any():
                    return f"{path} is out of range"
        return None

    @staticmethod
    def _check_ranges(name: str, tree: Tree, ranges: dict[str, tuple[Array, Array]]) -> str | None:
        if not ranges:
            return None
        for path, leaf in leaves(tree, name):
            if path in ranges and leaf.size:
                low, high = ranges[path]
                if (leaf < low).any() or (leaf >= high).any():
                    return f"{path} is out of range"
        return None

    def _check_masks(self, segments: Segments) -> str | None:
        mask = segments.action_mask
        for options in self._options:
            if not mask[..., options].any(axis=-1).all():
                return "action_mask forbids every action"
        if not self._choices:
            return None
        flat = [leaf.reshape(*leaf.shape[:2], -1) for _, leaf in leaves(segments.action)]
        for choice in self._choices:
            chosen, allowed = flat[choice.part][..., choice.at], mask[:-1, :, choice.options]
            if choice.bit:
                forbidden = (chosen != 0) & ~allowed[..., 0]
            else:
                forbidden = ~np.take_along_axis(allowed, chosen[..., None].astype(np.int64), axis=-1)[..., 0]
            if (forbidden & segments.valid).any():
                return "a forbidden action was taken"
        return None

    def _check_finals(self, segments: Segments) -> str | None:
        """With same-step autoreset every truncated step needs a final observation to bootstrap from."""
        n = segments.finals
        if not self._spec.finals:
            return None
        cut = segments.truncated & ~segments.terminated
        if n:
            t, row = segments.final_at[:n, 0], segments.final_at[:n, 1]
            if t.min() < 0 or row.min() < 0 or t.max() >= segments.spec.steps or row.max() >= segments.rows:
                return "a final observation belongs to no step"
            if not cut[t, row].all() or len(np.unique(t * segments.rows + row)) != n:
                return "a final observation belongs to a step that is not truncated or has another one"
            for path, leaf in leaves(segments.final_observation, "observation"):
                wrong = _find_invalid_number("", leaf[:n]) or self._check_ranges(path, leaf[:n], self._ranges)
                if wrong is not None:
                    return "a final observation is invalid"
            if not np.isfinite(segments.final_value[:n]).all():
                return "final_value is not finite"
        if np.count_nonzero(cut & segments.valid) > np.count_nonzero(segments.valid[t, row] if n else ()):
            return "a truncated step has no final observation"
        return None

    @staticmethod
    def _check_episodes(segments: Segments) -> str | None:
        if len(segments.episode_return) and not np.isfinite(segments.episode_return).all():
            return "episode_return is not finite"
        if len(segments.episode_length) and segments.episode_length.min() < 1:
            return "episode_length is below 1"
        if not np.isfinite(segments.results).all():
            return "results are not finite"
        counts = segments.results[..., 1]
        if (counts < 0).any() or (counts.sum(axis=0) > segments.spec.steps * segments.rows).any():
            return "results have an impossible number of episodes"
        return None


def _find_invalid_number(name: str, tree: Tree) -> str | None:
    for path, leaf in leaves(tree, name):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            return f"{path} is not finite"
        if leaf.dtype.kind == "b" and not _is_boolean(leaf):
            return f"{path} contains values other than true and false"
    return None


def _is_boolean(flags: Array) -> bool:
    if flags.size <= _SMALL_SIZE:  # five times faster than a reduction
        return not flags.tobytes().translate(None, b"\0\1")
    return bool(flags.view(np.uint8).max() <= 1)


def _choices(space: gym.Space[Any]) -> list[_Choice]:
    result, start = list[_Choice](), 0
    for part, (_, leaf) in enumerate(space_leaves(space)):
        is_binary = isinstance(leaf, gym.spaces.MultiBinary)
        for at, size in enumerate([1] * mask_size(leaf) if is_binary else category_counts(leaf)):
            result.append(_Choice(part, at, slice(start, start + size), is_binary))
            start += size
    return result
