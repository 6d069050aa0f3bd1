"""Observation and action spaces of all dtypes, shapes and nestings, for property tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces as gs
from hypothesis import strategies as st

INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = tuple(np.dtype(f"float{bits}") for bits in (16, 32, 64))
BOX_DTYPES = (np.dtype(np.bool_), *INTEGERS, *FLOATS)
SHAPES = ((), (1,), (3,), (0,), (2, 3), (2, 0), (2, 2, 2), (7, 7, 3), (3, 8, 8), (1, 1, 1, 2))
_INTERVALS = ((-np.inf, np.inf), (-1, 1), (0, np.inf), (-np.inf, 2.5), (-0.1, 0.3), (5, 5))
_KEYS = ("a", "b", "a.b", "units", "units_mask", "observation", "state", "two words", "ü", "0")


def box_of(dtype: np.dtype[Any], shape: tuple[int, ...], interval: tuple[float, float] = (-1, 1)) -> gym.Space[Any]:
    if dtype.kind == "f":
        return gs.Box(*interval, shape, dtype.type)
    widest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return gs.Box(*(widest if interval == (-1, 1) else (0, 1)), shape, dtype.type)


def _boxes(dtypes: tuple[np.dtype[Any], ...]) -> st.SearchStrategy[gym.Space[Any]]:
    return st.builds(box_of, st.sampled_from(dtypes), st.sampled_from(SHAPES), st.sampled_from(_INTERVALS))


def _multi_discrete(nvec: list[Any], start: int, dtype: type) -> gs.MultiDiscrete:
    return gs.MultiDiscrete(nvec, start=np.full_like(np.asarray(nvec), start), dtype=dtype)


_CATEGORIES = st.one_of(
    st.builds(
        lambda n, start, dtype: gs.Discrete(n, start=start, dtype=dtype),
        st.integers(1, 9), st.sampled_from([0, -3, 4]), st.sampled_from([np.int64, np.int32, np.int8]),
    ),
    st.builds(
        _multi_discrete,
        st.sampled_from([[2], [3, 1], [[2, 3], [4, 5]]]), st.sampled_from([0, 2]), st.sampled_from([np.int64, np.int32]),
    ),
    st.builds(gs.MultiBinary, st.sampled_from([1, 3, (2, 2), [2, 1]])),
)  # fmt: skip


def _nested(parts: st.SearchStrategy[gym.Space[Any]]) -> st.SearchStrategy[gym.Space[Any]]:
    dicts = st.dictionaries(st.sampled_from(_KEYS), parts, max_size=4).map(gs.Dict)
    return st.one_of(dicts, st.lists(parts, max_size=3).map(gs.Tuple))


_OTHERS: st.SearchStrategy[Any] = st.sampled_from([gs.Text(5), gs.Sequence(gs.Discrete(2)), gs.Dict({}), gs.Tuple([])])
observation_spaces = st.recursive(st.one_of(_boxes(BOX_DTYPES), _CATEGORIES, _CATEGORIES, _OTHERS), _nested, max_leaves=5)
action_spaces = st.recursive(st.one_of(_boxes(FLOATS), _CATEGORIES, _CATEGORIES), _nested, max_leaves=3)

_PARTS_SEEN: dict[str, gym.Space[Any]] = {
    f"{dtype}-{len(shape)}": box_of(dtype, shape) for dtype in BOX_DTYPES for shape in ((), (2, 3))
} | {
    "grid": gs.Box(0, 255, (7, 7, 3), np.uint8),
    "planes": box_of(np.dtype(np.bool_), (8, 8, 5)),
    "empty": gs.Box(0, 1, (0,), np.float32),
    "units": box_of(np.dtype(np.bool_), (3, 2)),
    "units_mask": gs.MultiBinary(3),
    "category": gs.Discrete(4, start=-2, dtype=np.int32),
    "one": gs.Discrete(1),
    "categories": gs.MultiDiscrete(np.array([[2, 3], [1, 5]])),
    "bits": gs.MultiBinary((2, 2)),
    "nested": gs.Tuple([gs.Dict({"a": box_of(np.dtype(np.bool_), (2,))}), gs.Discrete(2)]),
}
_PARTS_DONE: dict[str, gym.Space[Any]] = {str(dtype): box_of(dtype, (2,)) for dtype in FLOATS} | {
    "choice": gs.Discrete(3, start=-1, dtype=np.int32),
    "choices": gs.MultiDiscrete(np.array([[2, 3], [1, 5]])),
    "bits": gs.MultiBinary((2, 2)),
    "nested": gs.Tuple([gs.Discrete(2), gs.Box(0, np.inf, (), np.float32)]),
}


EVERY_OBSERVATION, EVERY_ACTION = gs.Dict(_PARTS_SEEN), gs.Dict(_PARTS_DONE)
"""One part of every kind."""
EXPORTED_OBSERVATION = gs.Dict({key: EVERY_OBSERVATION[key] for key in ("bool-2", "uint16-0", "planes", "one")})
EXPORTED_ACTION = gs.Dict({key: EVERY_ACTION[key] for key in ("float64", "choice")})
"""Fewer parts: tracing takes long."""


class Random(gym.Env[Any, Any]):
    """Shows samples of its observation space, and takes only actions of its action space; episodes of three steps."""

    def __init__(self, observation: gym.Space[Any], action: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self._steps += 1
        return self.observation_space.sample(), 1.0, self._steps >= 3, False, {}
