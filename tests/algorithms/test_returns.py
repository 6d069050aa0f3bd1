from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.algorithms.returns import StepFlags, VTrace, VTraceClip, explained_variance, gae, next_values, vtrace
from ludus.core.types import Bools, Floats


def by_definition(reward: list[float], value: list[float], terminated: bool, gamma: float, lambda_: float) -> list[float]:
    """Advantages of one piece of one episode: the λ-weighted mixture of all n-step returns, less the value (O(T²)).

    `value` has one entry more than `reward`: the last is that of the observation after the last step.
    """
    steps = len(reward)
    tail = 0.0 if terminated else value[steps]
    advantages = []
    for t in range(steps):
        left = steps - t
        n_step = [
            sum(gamma**k * reward[t + k] for k in range(n)) + gamma**n * (tail if t + n == steps else value[t + n])
            for n in range(1, left + 1)
        ]
        mixture = sum((1 - lambda_) * lambda_ ** (n - 1) * n_step[n - 1] for n in range(1, left))
        advantages.append(mixture + lambda_ ** (left - 1) * n_step[-1] - value[t])
    return advantages


def vtrace_by_definition(
    ratio: list[float],
    reward: list[float],
    value: list[float],
    terminated: bool,
    gamma: float,
    lambda_: float,
    bars: tuple[float, float],
) -> tuple[list[float], list[float]]:
    """(targets, advantages) of one piece of one episode, as the sum over products of eq. 1 (O(T³)); arguments as above."""
    steps, (rho_bar, c_bar) = len(reward), bars
    value = [*value[:steps], 0.0 if terminated else value[steps]]
    c = [lambda_ * min(c_bar, x) for x in ratio]
    error = [reward[t] + gamma * value[t + 1] - value[t] for t in range(steps)]
    delta = [min(rho_bar, ratio[t]) * error[t] for t in range(steps)]
    target = [value[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, steps)) for s in range(steps)]
    after = [*(lambda_ * target[t] + (1 - lambda_) * value[t] for t in range(1, steps)), value[steps]]
    return target, [reward[t] + gamma * after[t] - value[t] for t in range(steps)]


@dataclass
class Played:
    """A segment as a sampler writes it, with the advantages its episodes should get."""

    steps: int
    rows: int
    reward: Floats = field(init=False)
    value: Floats = field(init=False)
    terminated: Bools = field(init=False)
    truncated: Bools = field(init=False)
    valid: Bools = field(init=False)
    expected: Floats = field(init=False)
    ratio: Floats = field(init=False)
    pieces: list[tuple[int, int, int, list[float], bool]] = field(default_factory=list)
    """(begin, steps, row, values with that of the last successor, terminated) of every episode's part."""
    finals: list[tuple[int, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = (self.steps, self.rows)
        self.reward, self.expected = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.value = np.zeros((self.steps + 1, self.rows), np.float32)
        self.terminated, self.truncated, self.valid = (np.zeros(shape, np.bool_) for _ in range(3))
        self.ratio = np.random.default_rng(self.steps).lognormal(0, 1, shape).astype(np.float32)

    def vtrace(self, gamma: float, lambda_: float, rho_bar: float, c_bar: float, ratio: Floats | None = None) -> VTrace:
        at = np.array([(t, b) for t, b, _ in self.finals], np.int64).reshape(-1, 2)
        next_value = next_values(self.value, at, np.array([v for _, _, v in self.finals], np.float32))
        flags = StepFlags(self.terminated, self.truncated, self.valid)
        ratio = self.ratio if ratio is None else ratio
        return vtrace(ratio, self.reward, self.value[:-1], next_value, flags, gamma, lambda_, VTraceClip(rho_bar, c_bar))

    def advantages(self, gamma: float, lambda_: float) -> Floats:
        at = np.array([(t, b) for t, b, _ in self.finals], np.int64).reshape(-1, 2)
        next_value = next_values(self.value, at, np.array([v for _, _, v in self.finals], np.float32))
        flags = StepFlags(self.terminated, self.truncated, self.valid)
        return gae(self.reward, self.value[:-1], next_value, flags, gamma, lambda_)


def played(seed: int, steps: int, rows: int, same_step: bool, gamma: float, lambda_: float) -> Played:
    """Random episodes side by side: the environments reset in the same step, or spend a row on it."""
    random, out = np.random.default_rng(seed), Played(steps, rows)
    out.value[:] = random.normal(size=out.value.shape)
    for b in range(rows):
        t = 0 if same_step else int(random.integers(0, 2))  # the row before may have ended in the previous segment
        while t < steps:
            wanted = int(random.integers(1, 7))
            n = min(wanted, steps - t)
            ending = random.choice(["terminated", "truncated", "both"]) if n == wanted else "open"
            reward, value = random.normal(size=n).astype(np.float32), random.normal(size=n + 1).astype(np.float32)
            out.reward[t : t + n, b], out.value[t : t + n, b], out.valid[t : t + n, b] = reward, value[:-1], True
            out.terminated[t + n - 1, b] = ending in ("terminated", "both")
            out.truncated[t + n - 1, b] = ending in ("truncated", "both")
            over = bool(out.terminated[t + n - 1, b])
            out.pieces.append((t, n, b, value.tolist(), over))
            out.expected[t : t + n, b] = by_definition(reward.tolist(), value.tolist(), over, gamma, lambda_)
            if ending == "truncated" and same_step:
                out.finals.append((t + n - 1, b, float(value[-1])))
            elif not same_step or ending == "open":
                out.value[t + n, b] = value[-1]
            t += n if same_step else n + 1
    return out


DISCOUNTS = st.tuples(st.floats(0, 1), st.floats(0, 1))


@pytest.mark.parametrize("same_step", [True, False], ids=["same-step reset", "next-step reset"])
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 4), DISCOUNTS)
def test_gae_is_its_definition_episode_by_episode(
    same_step: bool, seed: int, steps: int, rows: int, discounts: tuple[float, float]
) -> None:
    segment = played(seed, steps, rows, same_step, *discounts)
    found = segment.advantages(*discounts)
    np.testing.assert_allclose(found, segment.expected, rtol=1e-4, atol=1e-4)
    assert found.dtype == np.float32


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_a_padded_segment_has_the_advantages_of_the_unpadded(seed: int, steps: int, padding: int, same_step: bool) -> None:
    short = played(seed, steps, 2, same_step, 0.9, 0.8)
    long, random = Played(steps + padding, 2), np.random.default_rng(seed + 1)
    long.reward[:], long.value[:] = random.normal(size=long.reward.shape), random.normal(size=long.value.shape)
    long.terminated[:], long.truncated[:] = random.random((2, *long.reward.shape)) < 0.3  # whatever an old block left behind
    for name in ("reward", "terminated", "truncated", "valid"):
        getattr(long, name)[:steps] = getattr(short, name)
    long.value[: steps + 1], long.finals = short.value, short.finals
    found = long.advantages(0.9, 0.8)
    np.testing.assert_array_equal(found[:steps], short.advantages(0.9, 0.8))
    assert not found[steps:].any()


BARS = st.sampled_from([(1.0, 1.0), (2.0, 0.7), (math.inf, math.inf), (0.5, 1.5)])


@pytest.mark.parametrize("same_step", [True, False], ids=["same-step reset", "next-step reset"])
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4), DISCOUNTS, BARS)
def test_vtrace_is_the_sum_over_products_of_the_paper(
    same_step: bool, seed: int, steps: int, rows: int, discounts: tuple[float, float], bars: tuple[float, float]
) -> None:
    segment = played(seed, steps, rows, same_step, *discounts)
    found = segment.vtrace(*discounts, *bars)
    target, advantage = np.zeros_like(segment.reward), np.zeros_like(segment.reward)
    for t, n, b, value, over in segment.pieces:
        own = slice(t, t + n)
        ratio, reward = segment.ratio[own, b].tolist(), segment.reward[own, b].tolist()
        target[own, b], advantage[own, b] = vtrace_by_definition(ratio, reward, value, over, *discounts, bars)
    scale = 1e-4 * max(1.0, float(np.abs(target).max()), float(np.abs(advantage).max()))
    np.testing.assert_allclose(found.target, target, rtol=1e-3, atol=scale)
    np.testing.assert_allclose(found.advantage, advantage, rtol=1e-3, atol=scale)
    assert found.target.dtype == found.advantage.dtype == np.float32


@pytest.mark.parametrize("bar", [1.0, math.inf])
@given(st.integers(0, 2**32), st.integers(1, 20), st.booleans(), DISCOUNTS)
def test_on_policy_vtrace_is_gae(bar: float, seed: int, steps: int, same_step: bool, discounts: tuple[float, float]) -> None:
    """For λ = 1 that is the n-step return."""
    segment = played(seed, steps, 3, same_step, *discounts)
    found = segment.vtrace(*discounts, bar, bar, np.ones_like(segment.ratio))
    np.testing.assert_allclose(found.advantage, segment.expected, rtol=1e-4, atol=1e-4)
    value = np.where(segment.valid, segment.value[:-1], 0)
    np.testing.assert_allclose(found.target, value + segment.expected, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_a_padded_segment_has_the_vtrace_of_the_unpadded(seed: int, steps: int, padding: int, same_step: bool) -> None:
    short = played(seed, steps, 2, same_step, 0.9, 0.8)
    long, random = Played(steps + padding, 2), np.random.default_rng(seed + 1)
    rubbish = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    long.reward[:], long.value[:] = (random.choice(rubbish, x.shape) for x in (long.reward, long.value))
    long.ratio[:] = random.choice(rubbish, long.ratio.shape)
    long.terminated[:], long.truncated[:] = random.random((2, *long.reward.shape)) < 0.3
    for name in ("reward", "terminated", "truncated", "valid", "ratio"):
        getattr(long, name)[:steps] = getattr(short, name)
    long.value[: steps + 1], long.finals = short.value, short.finals
    found, expected = long.vtrace(0.9, 0.8, 1.0, 1.0), short.vtrace(0.9, 0.8, 1.0, 1.0)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine[:steps], theirs)
        assert not mine[steps:].any()


def test_actions_that_the_policy_would_never_take_teach_nothing() -> None:
    segment = played(1, 10, 3, True, 0.9, 1.0)
    found = segment.vtrace(0.9, 1.0, 1.0, 1.0, np.zeros_like(segment.ratio))
    np.testing.assert_array_equal(found.target[segment.valid], segment.value[:-1][segment.valid])


def test_an_advantage_worked_out_by_hand() -> None:
    reward, value = np.array([[1.0], [2.0]], np.float32), np.array([[10.0], [20.0], [30.0]], np.float32)
    no, yes = np.zeros((2, 1), np.bool_), np.ones((2, 1), np.bool_)
    next_value = value[1:]
    last = 2 + 0.5 * 30 - 20  # -3
    first = (1 + 0.5 * 20 - 10) + 0.5 * 0.5 * last
    np.testing.assert_allclose(gae(reward, value[:-1], next_value, StepFlags(no, no, yes), 0.5, 0.5), [[first], [last]])
    over = np.array([[False], [True]])
    np.testing.assert_allclose(gae(reward, value[:-1], next_value, StepFlags(over, no, yes), 0.5, 0.5)[1], [2 - 20])
    np.testing.assert_allclose(gae(reward, value[:-1], next_value, StepFlags(no, over, yes), 0.5, 0.5)[1], [last])


def test_the_value_of_a_final_observation_stands_in_for_the_next_row_only_where_it_was_kept() -> None:
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    next_value = next_values(value, np.array([[1, 0], [2, 1]]), np.array([50.0, 60.0], np.float32))
    assert next_value.tolist() == [[2, 3], [50, 5], [6, 60]]
    assert value.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert next_values(value, np.zeros((0, 2), np.int64), np.zeros(0, np.float32)).tolist() == value[1:].tolist()


def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant() -> None:
    target = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    assert explained_variance(target, target) == pytest.approx(1)
    assert explained_variance(target + 5, target) == pytest.approx(1)
    assert explained_variance(np.full(4, 3, np.float32), target) == pytest.approx(0)
    assert explained_variance(-target, target) == pytest.approx(1 - 4)
    assert explained_variance(np.array([1.0, 2.0, 4.0, 0.0], np.float32), target) == pytest.approx(1 - 12 / 7.1875)


def test_explained_variance_of_a_constant_target_is_not_a_number() -> None:
    assert np.isnan(explained_variance(np.arange(3, dtype=np.float32), np.ones(3, np.float32)))
