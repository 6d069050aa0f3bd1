from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from ludus.league.cycles import cyclic_share, find_cycles

Matrix = npt.NDArray[np.float64]


def random_rates(n: int, seed: int) -> Matrix:
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


def sample_rates(strength: Matrix, games: int, random: np.random.Generator, cyclic: float = 0.0) -> Matrix:
    """Win rates after matches of players with these strengths; with `cyclic`, neighbours on a circle also beat each other."""
    n = len(strength)
    angle = 2 * np.pi * np.arange(n) / n
    advantage = strength[:, None] - strength[None, :] + cyclic * np.sin(angle[None, :] - angle[:, None])
    rates = np.triu(random.binomial(games, 1 / (1 + np.exp(-advantage))) / games, 1)
    return np.asarray(rates + np.tril(1 - rates.T, -1) + np.eye(n) / 2)


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_chance_alone_makes_no_cycles(spread: float) -> None:
    """Hundreds of triples of a ranking look like cycles after ten matches of each pair; none is certain, and the cyclic share is nothing."""
    random = np.random.default_rng(1)
    names, games = [str(i) for i in range(60)], 10.0 * (1 - np.eye(60))
    found = shares = 0.0
    for _ in range(5):
        rates = sample_rates(random.normal(scale=spread, size=60), 10, random)
        assert len(find_cycles(names, rates, limit=10_000)) > 200
        found += len(find_cycles(names, rates, games))
        shares += cyclic_share(rates, games) / 5
    assert found <= 1
    assert shares < 0.02


def test_a_cycle_is_certain_after_enough_matches() -> None:
    real = np.array([[0.5, 0.8, 0.2], [0.2, 0.5, 0.8], [0.8, 0.2, 0.5]])
    (cycle,) = find_cycles("abc", real, np.full((3, 3), 40.0))
    assert (cycle.players, cycle.games) == (("a", "b", "c"), (40, 40, 40))
    assert find_cycles("abc", real, np.full((3, 3), 4.0)) == []


def test_the_cyclic_share_does_not_depend_on_the_number_of_matches() -> None:
    """A ranking with a cyclic part as strong: with few matches and with very many, the share is the same."""
    random = np.random.default_rng(2)
    strength = random.normal(size=40)
    off = 1 - np.eye(40)
    exact = cyclic_share(sample_rates(strength, 10**8, random, cyclic=1.5))
    assert 0.2 < exact < 0.8
    for games in (5, 30):
        estimates = [cyclic_share(sample_rates(strength, games, random, cyclic=1.5), games * off) for _ in range(4)]
        assert np.mean(estimates) == pytest.approx(exact, abs=0.04)


def test_pairs_without_matches_are_no_cycles() -> None:
    """A ranking of five players of which only neighbours have met is no cycle, although unseen pairs count as even."""
    strength = np.arange(5.0)
    rates = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
    met = np.abs(strength[None, :] - strength[:, None]) == 1
    unseen = np.where(met, rates, 0.5)
    assert cyclic_share(unseen) > 0.05
    assert cyclic_share(unseen, met * 1e6) == pytest.approx(0.0, abs=1e-3)
    assert cyclic_share(np.full((3, 3), 0.5), np.zeros((3, 3))) == 0.0
    assert cyclic_share(np.zeros((0, 0)), np.zeros((0, 0))) == 0.0
