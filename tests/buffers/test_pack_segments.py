"""Packed segments give the same returns as the segments one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.algorithms.returns import StepFlags, gae, next_values
from ludus.buffers.collate import pack_segments, packed_rows, without_empty_rows
from ludus.core.spaces import ArraySpec
from ludus.core.types import Segments, SegmentSpec

STEPS = 8
PLAIN = SegmentSpec(STEPS, {"x": ArraySpec((2,), np.dtype(np.float32))}, ArraySpec((), np.dtype(np.int64)), mask_size=3)
RECURRENT = SegmentSpec(
    STEPS, PLAIN.observation, PLAIN.action, mask_size=3, state=(ArraySpec((2,), np.dtype(np.float32)),), state_every=4
)

Part = tuple[int, int, str]
"""Origin, length, and how it ends: terminated, truncated or open."""


def make_part(spec: SegmentSpec, origin: int, length: int, end: str, random: np.random.Generator) -> Segments:
    part = Segments.empty(spec, 1)
    part.observation["x"][: length + 1] = random.normal(size=(length + 1, 1, 2))
    part.action[:length, 0] = random.integers(3, size=length)
    part.reward[:length, 0] = random.normal(size=length)
    part.value[: length + 1, 0] = random.normal(size=length + 1)
    part.valid[:length] = True
    part.first[0] = random.integers(2)
    part.origin[0] = origin
    part.version[:] = 7
    part.terminated[length - 1], part.truncated[length - 1] = end == "terminated", end == "truncated"
    for state in part.state:
        state[:] = random.normal(size=state.shape)
    return part


def advantages(segments: Segments) -> dict[tuple[float, ...], float]:
    """Advantage of every valid step, by its observation."""
    found = gae(
        segments.reward,
        segments.value[:-1],
        next_values(segments.value, segments.final_at[:0], segments.final_value[:0]),
        StepFlags.of(segments),
        0.9,
        0.8,
    )
    return {
        tuple(segments.observation["x"][t, b].tolist()): float(found[t, b])
        for t, b in zip(*np.nonzero(segments.valid), strict=True)
    }


@pytest.mark.parametrize("spec", [PLAIN, RECURRENT], ids=["plain", "recurrent"])
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, STEPS), st.sampled_from(["terminated", "truncated", "open"])), max_size=30
    )
)
def test_packing_keeps_every_step_with_its_advantage(spec: SegmentSpec, parts: list[Part]) -> None:
    random = np.random.default_rng(0)
    made = [make_part(spec, *part, random) for part in parts]
    block = Segments.empty(spec, packed_rows(STEPS, sum(length for _, length, _ in parts), 4) if spec is PLAIN else 34)
    block.valid.fill(True)  # as left by its last use
    pack_segments(made, block)
    expected = {key: value for part in made for key, value in advantages(part).items()}
    assert advantages(block) == pytest.approx(expected)
    assert advantages(without_empty_rows(block)) == pytest.approx(expected)
    for row in np.flatnonzero(block.valid.any(axis=0)):
        assert 0 <= block.origin[row] <= 3


def test_recurrent_states_stay_with_their_steps() -> None:
    random = np.random.default_rng(0)
    parts = [make_part(RECURRENT, 0, 2, "terminated", random), make_part(RECURRENT, 0, 3, "open", random)]
    block = Segments.empty(RECURRENT, 2)
    pack_segments(parts, block)
    assert block.valid[:, 0].tolist() == [True, True, False, False, True, True, True, False]
    np.testing.assert_array_equal(block.state[0][0, 0], parts[0].state[0][0, 0])
    np.testing.assert_array_equal(block.state[0][1, 0], parts[1].state[0][0, 0])


def test_terminated_episodes_follow_each_other_without_a_gap() -> None:
    random = np.random.default_rng(0)
    block = Segments.empty(PLAIN, 3)
    pack_segments([make_part(PLAIN, 5, 4, "terminated", random) for _ in range(3)], block)
    assert block.valid.sum(axis=0).tolist() == [8, 4, 0]
    assert block.origin.tolist() == [5, 5, -1]


def test_a_block_that_is_too_small_is_an_error() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match="do not fit"):
        pack_segments([make_part(PLAIN, origin, 1, "open", random) for origin in range(3)], Segments.empty(PLAIN, 2))
