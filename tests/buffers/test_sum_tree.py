"""The sum tree draws exactly what a running sum over all weights would, however often they were changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.buffers.sum_tree import SumTree


def by_definition(weights: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """The first item at which the running sum exceeds the fraction of the total."""
    sums = np.cumsum(weights)
    return np.array([next(i for i, s in enumerate(sums) if s > f * sums[-1]) for f in fractions])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=2100).filter(any),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_items_are_drawn_by_the_cumulative_sum(weights: list[int], fractions: list[float]) -> None:
    """Whole numbers add up exactly, in any order: the very same item is drawn."""
    tree, given_weights, given_fractions = SumTree(len(weights)), np.array(weights, float), np.array(fractions)
    tree.set(np.arange(len(weights)), given_weights)
    assert tree.total == sum(weights)
    assert tree.draw(given_fractions).tolist() == by_definition(given_weights, given_fractions).tolist()


def test_updated_weights_take_effect() -> None:
    rng = np.random.default_rng(3)
    tree, plain = SumTree(5000), np.zeros(5000)
    for _ in range(50):
        index, weight = rng.integers(5000, size=64), rng.integers(0, 9, 64).astype(float)
        tree.set(index, weight)
        for i, w in zip(index, weight, strict=True):  # of an item that is named twice the last weight counts
            plain[i] = w
    fractions = rng.random(300)
    assert tree[np.arange(5000)].tolist() == plain.tolist()
    assert tree.draw(fractions).tolist() == by_definition(plain, fractions).tolist()


def test_items_are_drawn_in_proportion_to_their_weights() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random(40) ** 3
    tree = SumTree(40)
    tree.set(np.arange(40), weights)
    draws = 40_000
    seen = np.bincount(tree.draw(rng.random(draws)), minlength=40)
    expected = draws * weights / weights.sum()
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    assert chi2 < 39 + 6 * np.sqrt(2 * 39)  # six deviations of its distribution


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e12])
def test_an_item_of_weight_zero_is_never_drawn(scale: float) -> None:
    """Also not where rounding leads to the very end of a node."""
    rng = np.random.default_rng(1)
    weights = np.where(rng.random(3000) < 0.02, rng.random(3000), 0.0) * scale
    tree = SumTree(3000)
    tree.set(np.arange(3000), weights)
    fractions = np.concatenate([[0.0, np.nextafter(1.0, 0.0)], rng.random(20_000)])
    assert (weights[tree.draw(fractions)] > 0).all()
