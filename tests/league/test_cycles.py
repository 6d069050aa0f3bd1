from __future__ import annotations

import itertools

import numpy as np
import pytest

from ludus.league.cycles import cyclic_share, find_cycles


def random_rates(n: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    rates = np.random.default_rng(seed).uniform(size=(n, n))
    rates = np.triu(rates, 1)
    return rates + np.tril(1 - rates.T, -1) + np.eye(n) / 2


def test_cycles_equal_those_of_brute_force() -> None:
    rates = random_rates(9, 0)
    names = [str(i) for i in range(9)]
    expected = {
        (a, b, c): min(rates[a, b], rates[b, c], rates[c, a])
        for a, b, c in itertools.permutations(range(9), 3)
        if a < b and a < c and min(rates[a, b], rates[b, c], rates[c, a]) > 0.55
    }
    found = find_cycles(names, rates, limit=1000)
    assert {tuple(map(int, cycle.players)): cycle.strength for cycle in found} == expected
    assert [cycle.strength for cycle in found] == sorted(expected.values(), reverse=True)
    assert find_cycles(names, rates, limit=3) == found[:3]


def test_chance_alone_makes_no_cycles() -> None:
    """60 equal players with 10 matches per pair: thousands of triples look like cycles, few are certain."""
    random = np.random.default_rng(1)
    wins = random.binomial(10, 0.5, size=(60, 60))
    rates = np.triu(wins / 10, 1)
    rates = rates + np.tril(1 - rates.T, -1) + np.eye(60) / 2
    games = 10.0 * (1 - np.eye(60))
    names = [str(i) for i in range(60)]
    assert len(find_cycles(names, rates, limit=10_000)) > 1000
    assert len(find_cycles(names, rates, games, limit=10_000)) < 10
    real = np.array([[0.5, 0.8, 0.2], [0.2, 0.5, 0.8], [0.8, 0.2, 0.5]])
    (cycle,) = find_cycles("abc", real, np.full((3, 3), 40.0))
    assert (cycle.players, cycle.games) == (("a", "b", "c"), (40, 40, 40))
    assert find_cycles("abc", real, np.full((3, 3), 4.0)) == []


def test_pairs_without_matches_are_no_cycles() -> None:
    """A ranking of five players of which only neighbours have met is no cycle, although unseen pairs count as even."""
    strength = np.arange(5.0)
    rates = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
    met = np.abs(strength[None, :] - strength[:, None]) == 1
    unseen = np.where(met, rates, 0.5)
    assert cyclic_share(unseen) > 0.1
    assert cyclic_share(unseen, met * 1e6) == pytest.approx(0.0, abs=1e-9)
    assert cyclic_share(np.full((3, 3), 0.5), np.zeros((3, 3))) == 0.0
    assert cyclic_share(np.zeros((0, 0)), np.zeros((0, 0))) == 0.0
