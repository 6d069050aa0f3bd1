"""Meta-solvers: distributions over the players of a population, from their payoff matrix. Pure.

All take the payoffs of the row player in a two-player zero-sum meta-game and return one distribution per side. For a symmetric
population (`payoffs[i, j] = -payoffs[j, i]`) the two are the same up to ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError, MissingExtra, UnknownName
from ludus.game_theory.game_tree import Doubles

MetaSolver = Callable[[Doubles], tuple[Doubles, Doubles]]


def uniform(payoffs: Doubles) -> tuple[Doubles, Doubles]:
    """Fictitious play against the whole population."""
    rows, columns = payoffs.shape
    return np.full(rows, 1 / rows), np.full(columns, 1 / columns)


def nash(payoffs: Doubles) -> tuple[Doubles, Doubles]:
    """A Nash equilibrium of the meta-game, by linear programming."""
    return _maximin(payoffs), _maximin(-payoffs.T)


def _maximin(payoffs: Doubles) -> Doubles:
    """The row distribution with the best worst case: maximise v subject to payoffsᵀ x ≥ v."""
    try:
        from scipy.optimize import linprog
    except ModuleNotFoundError as error:
        raise MissingExtra("The Nash meta-solver needs SciPy.", "pip install 'ludus[league]'") from error
    rows, columns = payoffs.shape
    scale = max(1.0, float(np.abs(payoffs).max()))
    found = linprog(
        c=np.append(np.zeros(rows), -1.0),
        A_ub=np.hstack([-payoffs.T / scale, np.ones((columns, 1))]),
        b_ub=np.zeros(columns),
        A_eq=np.append(np.ones(rows), 0.0)[None, :],
        b_eq=[1.0],
        bounds=[(0.0, None)] * rows + [(None, None)],
        method="highs",
    )
    if found.status != 0:
        raise ConfigError(f"The meta-game has no solution: {found.message}", "Check the payoffs for values that are not finite.")
    return _distribution(found.x[:rows])


def projected_replicator_dynamics(
    payoffs: Doubles, *, iterations: int = 20_000, step: float = 1e-3, exploration: float = 1e-6
) -> tuple[Doubles, Doubles]:
    """Replicator dynamics that keep every player at least at `exploration` (Lanctot et al. 2017); the time average.

    Converges to a Nash equilibrium in zero-sum games, with full support on the way.
    """
    row, column = uniform(payoffs)
    row_sum, column_sum = np.zeros_like(row), np.zeros_like(column)
    for _ in range(iterations):
        row_gain, column_gain = payoffs @ column, -(row @ payoffs)
        row = _project(row + step * row * (row_gain - row @ row_gain), exploration)
        column = _project(column + step * column * (column_gain - column @ column_gain), exploration)
        row_sum += row
        column_sum += column
    return _distribution(row_sum), _distribution(column_sum)


def _project(x: Doubles, least: float) -> Doubles:
    return _distribution(np.maximum(x, least / len(x)))


def alpha_rank(payoffs: Doubles, *, intensity: float = 100.0, population: int = 50) -> tuple[Doubles, Doubles]:
    """α-Rank of a symmetric population (Omidshafiei et al. 2019): how often evolution visits each player.

    A mutant of one kind takes over a population of the other with a probability that depends on their payoffs; the ranking is the
    stationary distribution of this Markov chain. Raises ConfigError if the matrix is not square.
    """
    rows, columns = payoffs.shape
    if rows != columns:
        raise ConfigError(f"α-Rank needs a square payoff matrix, not {rows} × {columns}.", "Use nash or prd.")
    if rows == 1:
        return np.ones(1), np.ones(1)
    # fixation[j, i]: probability that one mutant j takes over a population of i, under local selection (their paper, section 3.4).
    advantage = intensity * np.clip(payoffs - payoffs.T, -1e3, 1e3)
    near = np.abs(advantage) < 1e-12
    with np.errstate(over="ignore", invalid="ignore"):
        fixation = np.where(near, 1 / population, np.expm1(-advantage) / np.expm1(-population * advantage))
    fixation = np.where(np.isnan(fixation), 0.0, np.clip(fixation, 0.0, 1.0))
    transition = fixation.T / (rows - 1)
    np.fill_diagonal(transition, 0.0)
    np.fill_diagonal(transition, 1 - transition.sum(axis=1))
    return (stationary := _stationary(transition)), stationary


def _stationary(transition: Doubles) -> Doubles:
    """The stationary distribution, regularised so that it is unique also if some states are never left."""
    n = len(transition)
    mixed = (1 - 1e-9) * transition + 1e-9 / n
    system = np.vstack([mixed.T - np.eye(n), np.ones(n)])
    solution = np.linalg.lstsq(system, np.append(np.zeros(n), 1.0), rcond=None)[0]
    return _distribution(np.maximum(solution, 0.0))


def _distribution(weights: Doubles) -> Doubles:
    positive = np.maximum(np.asarray(weights, np.float64), 0.0)
    total = positive.sum()
    return positive / total if total > 0 else np.full(len(positive), 1 / len(positive))


META_SOLVERS: Final[Mapping[str, MetaSolver]] = {
    "uniform": uniform,
    "nash": nash,
    "prd": projected_replicator_dynamics,
    "alpha_rank": alpha_rank,
}


def find_meta_solver(name: str) -> MetaSolver:
    """Raises UnknownName."""
    if name not in META_SOLVERS:
        raise UnknownName(f"Unknown meta-solver {name!r}.", did_you_mean(name, META_SOLVERS))
    return META_SOLVERS[name]
