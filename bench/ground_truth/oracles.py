"""The oracles themselves: published constants, OpenSpiel's values, the rate of CFR, and PSRO with exact best responses.

python -m bench.ground_truth.oracles                            (about two minutes)
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyspiel
from open_spiel.python import policy as openspiel_policy
from open_spiel.python.algorithms import exploitability as openspiel

from bench.ground_truth.report import write_report
from ludus.game_theory.cfr import CFR
from ludus.game_theory.exploitability import exploitability, nash_conv
from ludus.game_theory.game_tree import build_tree
from ludus.game_theory.kuhn_poker import KuhnPoker
from ludus.game_theory.leduc_poker import LeducPoker
from ludus.game_theory.observed_game import observe_game
from ludus.game_theory.psro import ExactPSRO

CFR_ITERATIONS = 300
PSRO_TARGET = 0.05


def uniform_rows() -> list[dict[str, Any]]:
    rows = []
    for game, published in ((KuhnPoker(), 11 / 12), (LeducPoker(), 4.747222)):
        tree = build_tree(game)
        theirs = pyspiel.load_game(game.name)
        found = nash_conv(tree, tree.uniform())
        uniform = openspiel_policy.UniformRandomPolicy(theirs)
        rows.append(
            _row(f"NashConv of uniform play, {game.name}", f"{published:.6f}", found, openspiel.nash_conv(theirs, uniform))
        )
    return rows


def random_policy_row() -> dict[str, Any]:
    """The largest difference to OpenSpiel over random policies of Leduc."""
    observed, game = observe_game("openspiel/leduc_poker"), pyspiel.load_game("leduc_poker")
    differences = []
    for seed in range(5):
        strategy = observed.tree.normalise(np.random.default_rng(seed).random(observed.tree.slots) ** 3)
        table = {str(one.key): one for one in observed.tree.information_sets}

        def probabilities(state: Any, strategy: Any = strategy, table: Any = table) -> dict[int, float]:
            one = table[state.information_state_string()]
            return dict(zip(one.actions, strategy[one.first_slot : one.first_slot + len(one.actions)], strict=True))

        theirs = openspiel.nash_conv(game, openspiel_policy.tabular_policy_from_callable(game, probabilities))
        differences.append(abs(theirs - nash_conv(observed.tree, strategy)))
    return _row("largest difference to OpenSpiel, NashConv of 5 random policies of leduc_poker", "0", max(differences), 0.0)


def cfr_row() -> dict[str, Any]:
    tree = build_tree(LeducPoker())
    ours = CFR(tree)
    ours.run(CFR_ITERATIONS)
    game = pyspiel.load_game("leduc_poker")
    theirs = pyspiel.CFRSolver(game)
    for _ in range(CFR_ITERATIONS):
        theirs.evaluate_and_update_policy()
    other = pyspiel.nash_conv(game, theirs.average_policy()) / 2
    found = exploitability(tree, ours.average())
    return _row(f"exploitability after {CFR_ITERATIONS} iterations of CFR, leduc_poker", "0.0355 ± 0.0005", found, other)


def psro_row() -> dict[str, Any]:
    tree, began = build_tree(LeducPoker()), time.perf_counter()
    solver, found, iterations = ExactPSRO(tree), np.inf, 0
    while found > PSRO_TARGET and iterations < 400:
        found, iterations = solver.step(), iterations + 1
    row = _row(
        f"exploitability of PSRO with exact best responses, leduc_poker, {iterations} iterations", f"≤ {PSRO_TARGET}", found
    )
    return row | {"iterations": iterations, "seconds": round(time.perf_counter() - began, 1)}


def _row(figure: str, expected: str, ours: float, theirs: float | None = None) -> dict[str, Any]:
    other = "" if theirs is None else f"{theirs:.6f}"
    return {"figure": figure, "expected": expected, "Ludus": f"{ours:.6f}", "OpenSpiel": other, "value": ours}


def main() -> None:
    rows = [*uniform_rows(), random_policy_row(), cfr_row(), psro_row()]
    write_report("oracles", "Exact oracles", ("figure", "expected", "Ludus", "OpenSpiel"), rows)


if __name__ == "__main__":
    main()
