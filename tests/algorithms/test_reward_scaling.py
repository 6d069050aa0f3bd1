from __future__ import annotations

import json

import numpy as np
import pytest

from ludus.algorithms import reward_scaling
from ludus.algorithms.reward_scaling import RewardScale
from ludus.core.spaces import ArraySpec
from ludus.core.types import Segments, SegmentSpec

NOTHING = ArraySpec((), np.dtype(np.float32))


def block(steps: int, origin: list[int]) -> Segments:
    """Zero rewards, all valid, no episode begins."""
    made = Segments.empty(SegmentSpec(steps, NOTHING, NOTHING), len(origin))
    made.origin[:] = origin
    made.valid[:] = True
    return made


def random_block(random: np.random.Generator, steps: int, origin: list[int], padding: int = 0) -> Segments:
    made = block(steps + padding, origin)
    made.reward[:] = 10 * random.normal(size=made.reward.shape)
    made.first[:] = random.random(made.first.shape) < 0.2
    made.valid[steps:] = False
    return made


class Plain:
    """The same, one number at a time, keeping everything it has seen."""

    def __init__(self, gamma: float) -> None:
        self.gamma, self.running, self.seen = gamma, dict[int, float](), list[float]()

    def scale(self, segments: Segments) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        for b, origin in enumerate(segments.origin.tolist()):
            for t in range(segments.spec.steps):
                if segments.valid[t, b]:
                    before = 0.0 if segments.first[t, b] else self.running.get(origin, 0.0)
                    self.running[origin] = before * self.gamma + float(segments.reward[t, b])
                    self.seen.append(self.running[origin])
        return segments.reward.astype(np.float64) / np.std(self.seen)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.99, 1.0])
def test_rewards_are_divided_by_the_deviation_of_all_returns_so_far(gamma: float) -> None:
    scale, plain, random = RewardScale(gamma), Plain(gamma), np.random.default_rng(0)
    for origin in ([0, 1, 2], [0, 1, 2], [2, 0], [7], [1, 2, 0]):
        segments = random_block(random, 9, origin)
        np.testing.assert_allclose(scale.scale(segments), plain.scale(segments), rtol=1e-4)


def test_padding_neither_counts_nor_ages_the_running_return() -> None:
    scale, plain, random = RewardScale(0.9), Plain(0.9), np.random.default_rng(0)
    for padding in (0, 4, 2, 0):
        segments = random_block(random, 5, [0, 1], padding)
        segments.first[:] = False
        np.testing.assert_allclose(scale.scale(segments)[:5], plain.scale(segments)[:5], rtol=1e-4)


def test_the_row_in_which_an_environment_only_resets_does_not_count() -> None:
    scale, plain, random = RewardScale(0.9), Plain(0.9), np.random.default_rng(0)
    for _ in range(3):
        segments = random_block(random, 6, [0, 1])
        segments.first[:] = False
        segments.valid[2, 0], segments.first[3, 0] = False, True
        np.testing.assert_allclose(scale.scale(segments)[[0, 1, 3, 4, 5]], plain.scale(segments)[[0, 1, 3, 4, 5]], rtol=1e-4)


def test_scaling_keeps_signs_and_zeros_and_the_rewards_of_the_block() -> None:
    segments = random_block(np.random.default_rng(0), 9, [0, 1])
    segments.reward[3] = 0
    kept = segments.reward.copy()
    scale = RewardScale(0.99).scale(segments)
    assert (np.sign(scale) == np.sign(kept)).all()
    assert np.array_equal(segments.reward, kept)
    assert scale.dtype == np.float32


@pytest.mark.parametrize("valid", [True, False])
def test_rewards_that_are_all_zero_stay_zero(valid: bool) -> None:
    segments = block(4, [0, 1])
    segments.valid[:] = valid
    scale = RewardScale(0.99).scale(segments)
    assert not scale.any()


def test_a_restored_scale_keeps_statistics_and_resets_returns() -> None:
    random, scale, plain, resumed = np.random.default_rng(0), RewardScale(0.9), Plain(0.9), RewardScale(0.9)
    segments = random_block(random, 9, [0, 1])
    scale.scale(segments)
    plain.scale(segments)
    resumed.load_state(json.loads(json.dumps(scale.state())))
    plain.running.clear()
    following = random_block(random, 9, [0, 1])
    np.testing.assert_allclose(resumed.scale(following), plain.scale(following), rtol=1e-4)


# -- collated segments: several rows of one session in one block ----------------------------------------------------------


def collated(random: np.random.Generator, origins: list[int], steps: int = 5) -> Segments:
    """Rows of any length, each the continuation of the one before of the same origin."""
    made = block(steps, origins)
    made.reward[:] = 10 * random.normal(size=made.reward.shape)
    lengths = random.integers(1, steps + 1, len(origins))
    made.valid[:] = np.arange(steps)[:, None] < lengths
    made.first[0] = random.random(len(origins)) < 0.2
    return made


@pytest.mark.parametrize("origins", [[3, 3, 3], [0, 1, 0, 1, 0], [5, 4, 4, 5, 9, 4], [2]])
def test_rows_of_one_origin_in_one_block_follow_each_other(origins: list[int]) -> None:
    scale, plain, random = RewardScale(0.95), Plain(0.95), np.random.default_rng(0)
    for _ in range(4):
        segments = collated(random, origins)
        valid = segments.valid
        np.testing.assert_allclose(scale.scale(segments)[valid], plain.scale(segments)[valid], rtol=1e-4)


def test_cutting_episodes_into_pieces_does_not_change_their_scale() -> None:
    random = np.random.default_rng(0)
    reward = 1 + random.normal(size=64).astype(np.float32)
    whole = block(64, [7])
    whole.reward[:, 0], whole.first[0, 0] = reward, True
    expected = RewardScale(0.99).scale(whole)[:, 0]
    pieces = block(8, [7] * 8)
    pieces.reward[:], pieces.first[0, 0] = reward.reshape(8, 8).T, True
    np.testing.assert_allclose(RewardScale(0.99).scale(pieces).T.reshape(-1), expected, rtol=1e-5)


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_a_session_that_has_ended_leaves_nothing_behind(flag: str) -> None:
    scale = RewardScale(0.9)
    for origin in range(50):
        segments = block(4, [origin])
        segments.reward[:] = 1
        segments.valid[3] = False
        getattr(segments, flag)[2] = True
        scale.scale(segments)
    assert scale._carry == {}


def test_sessions_that_broke_off_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_scaling, "_MAX_OPEN_RETURNS", 10)
    scale, plain, random = RewardScale(0.9), Plain(0.9), np.random.default_rng(0)
    for origin in range(100):
        segments = block(2, [1000, origin])
        segments.reward[:] = random.normal(size=(2, 2))
        np.testing.assert_allclose(scale.scale(segments), plain.scale(segments), rtol=1e-4, atol=1e-3)
        assert len(scale._carry) <= 10
    assert 1000 in scale._carry, "who is still playing is not forgotten"
