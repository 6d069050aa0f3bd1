from __future__ import annotations

import numpy as np
import pytest

from ludus.errors import ConfigError, UnknownName
from ludus.game_theory.exploitability import exploitability
from ludus.game_theory.game_tree import build_tree
from ludus.game_theory.kuhn_poker import KuhnPoker
from ludus.game_theory.leduc_poker import LeducPoker
from ludus.game_theory.meta_solvers import META_SOLVERS, alpha_rank, find_meta_solver, nash, projected_replicator_dynamics
from ludus.game_theory.psro import ExactPSRO

ROCK_PAPER_SCISSORS = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])


def antisymmetric(seed: int, n: int = 5) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    drawn = np.random.default_rng(seed).normal(size=(n, n))
    return drawn - drawn.T


@pytest.mark.parametrize("name", list(META_SOLVERS))
def test_rock_paper_scissors_is_mixed_equally(name: str) -> None:
    for side in find_meta_solver(name)(ROCK_PAPER_SCISSORS):
        np.testing.assert_allclose(side, 1 / 3, atol=1e-6)


@pytest.mark.parametrize("name", ["nash", "prd", "alpha_rank"])
def test_a_dominant_player_gets_most_of_the_weight(name: str) -> None:
    row, _ = find_meta_solver(name)(np.array([[0.0, 0.5, 1.0], [-0.5, 0.0, 1.0], [-1.0, -1.0, 0.0]]))
    assert row[0] > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_nash_leaves_nothing_to_gain(seed: int) -> None:
    payoffs = np.random.default_rng(seed).normal(size=(4, 7))
    row, column = nash(payoffs)
    value = row @ payoffs @ column
    assert (payoffs @ column).max() <= value + 1e-9
    assert (row @ payoffs).min() >= value - 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_alpha_rank_equals_openspiels(seed: int) -> None:
    alpharank = pytest.importorskip("open_spiel.python.egt.alpharank")
    payoffs = antisymmetric(seed)
    np.testing.assert_allclose(alpha_rank(payoffs, intensity=1.0)[0], alpharank.compute([payoffs], m=50, alpha=1.0)[2], atol=1e-6)


def test_projected_replicator_dynamics_equal_openspiels() -> None:
    openspiel = pytest.importorskip("open_spiel.python.algorithms.projected_replicator_dynamics")
    payoffs = antisymmetric(0)
    theirs = openspiel.projected_replicator_dynamics([payoffs, -payoffs], prd_iterations=20_000)
    np.testing.assert_allclose(projected_replicator_dynamics(payoffs), theirs, atol=1e-4)


def test_alpha_rank_refuses_two_populations() -> None:
    with pytest.raises(ConfigError, match="square"):
        alpha_rank(np.zeros((2, 3)))


def test_an_unknown_meta_solver_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName) as error:
        find_meta_solver("nahs")
    assert "nash" in str(error.value.hint)


def test_psro_solves_kuhn_poker() -> None:
    tree = build_tree(KuhnPoker())
    psro = ExactPSRO(tree)
    assert psro.payoffs()[0, 0] == pytest.approx(tree.value(tree.uniform()))
    for _ in range(12):
        psro.step()
    assert exploitability(tree, psro.strategy()) < 1e-6


def test_psro_on_leduc_reaches_an_exploitability_of_five_hundredths() -> None:
    tree = build_tree(LeducPoker())
    psro = ExactPSRO(tree)
    for _ in range(250):
        if psro.step() <= 0.05:
            break
    assert exploitability(tree, psro.strategy()) <= 0.05
