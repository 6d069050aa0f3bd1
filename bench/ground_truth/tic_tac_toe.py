"""A league on tic-tac-toe against perfect play, checked on the whole game tree.

    python -m bench.ground_truth.tic_tac_toe [--seeds 1 2 3]      (about three minutes per seed)

The main player of `examples/leagues/tic_tac_toe.yaml`, playing its most probable actions, meets an opponent that draws among all
perfect moves. The share of lost matches is exact: it is computed from the tree. The best response wins all that can be won against the
player by any play.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from bench.ground_truth.leagues import MAIN, FinishedLeague, read_example, run_example
from bench.ground_truth.report import write_report
from ludus.game_theory.exploitability import best_response
from ludus.game_theory.game_tree import Doubles, InformationSet
from ludus.game_theory.observed_game import ObservedGame, observe_game
from ludus.game_theory.tic_tac_toe import perfect_actions

EXAMPLE = "tic_tac_toe"
NOTE = (
    "lost first, lost second: exact share of matches that the player loses as first and as second player against an opponent that draws "
    "among all perfect moves. best response second, first: the expected return of the best opponent on that side; 0 is a draw."
)


def perfect_strategy(game: ObservedGame) -> Doubles:
    def perfect(one: InformationSet) -> list[float]:
        board = tuple(".xo".index(square) for square in str(one.key).replace("\n", ""))
        best = perfect_actions(board)
        return [float(action in best) / len(best) for action in one.actions]

    return game.tree.strategy(perfect)


def loss_share(game: ObservedGame, first: Doubles, second: Doubles, player: int) -> float:
    """Probability that the player loses."""
    tree, strategy = game.tree, game.combine(first, second)
    own, other = tree.reach(strategy, player, own=True), tree.reach(strategy, player, own=False)
    sign = 1 if player == 0 else -1
    return float(sum((a * b)[sign * level.utility < 0].sum() for level, a, b in zip(tree.levels, own, other, strict=True)))


def measure(game: ObservedGame, perfect: Doubles, league: FinishedLeague) -> dict[str, Any]:
    own = game.strategy_of(league.policy(MAIN), deterministic=True)
    return {
        "steps": league.steps, "cpu_s": league.cpu_s,
        "lost first": loss_share(game, own, perfect, 0), "lost second": loss_share(game, perfect, own, 1),
        "best response second": best_response(game.tree, own, 1)[0], "best response first": best_response(game.tree, own, 0)[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    game = observe_game("openspiel/tic_tac_toe")
    perfect, rows = perfect_strategy(game), []
    columns = ("seed", "lost first", "lost second", "best response second", "best response first", "cpu_s")
    for seed in args.seeds:
        with run_example(EXAMPLE, seed) as league:
            rows.append({"seed": seed} | measure(game, perfect, league))
        file = read_example(EXAMPLE, 0)
        write_report("tic-tac-toe", "Tic-tac-toe against perfect play", columns, rows, file=file, note=NOTE)


if __name__ == "__main__":
    main()
