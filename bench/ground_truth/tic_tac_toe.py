"""A league on tic-tac-toe against perfect play, checked on the whole game tree.

    python -m bench.ground_truth.tic_tac_toe [--seeds 1 2 3] [--steps 1000000]      (about a minute per seed)

The main player of the league, playing its most probable actions, meets an opponent that draws among all perfect moves. The share of lost
matches is exact: it is computed from the tree. The best response wins all that can be won against the player by any play.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from bench.ground_truth.report import write_report
from bench.ground_truth.training import LeagueLearner, Opponents, TrainingSettings
from ludus.game_theory.exploitability import best_response
from ludus.game_theory.game_tree import Doubles, InformationSet
from ludus.game_theory.observed_game import ObservedGame, observe_game
from ludus.game_theory.tic_tac_toe import perfect_actions

ENV = "openspiel/tic_tac_toe"
SNAPSHOT_STEPS = 32_768
LATEST = 0.5


def settings(steps: int) -> TrainingSettings:
    ppo = {
        "lr": [[0, 1e-3], [steps, 1e-4]], "entropy_coeff": [[0, 0.1], [steps, 0.005]], "gamma": 1.0, "lambda": 0.95,
        "minibatch_size": 1024, "num_epochs": 4,
    }  # fmt: skip
    return TrainingSettings(ENV, hiddens=(128, 128), copies=256, batch_steps=8192, ppo=ppo)


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


def train(game: ObservedGame, perfect: Doubles, seed: int, steps: int) -> dict[str, Any]:
    began = time.process_time()
    learner = LeagueLearner(settings(steps), seed)
    snapshots = [learner.snapshot()]
    while learner.steps < steps:
        learner.train(SNAPSHOT_STEPS, Opponents(LATEST, list(snapshots), np.ones(len(snapshots))))
        snapshots.append(learner.snapshot())
    own = game.strategy_of(learner.policy, deterministic=True)
    return {
        "seed": seed, "steps": learner.steps, "cpu_s": round(time.process_time() - began, 1),
        "lost first": loss_share(game, own, perfect, 0), "lost second": loss_share(game, perfect, own, 1),
        "best response second": best_response(game.tree, own, 1)[0], "best response first": best_response(game.tree, own, 0)[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    game = observe_game(ENV)
    perfect = perfect_strategy(game)
    rows = []
    for seed in args.seeds:
        rows.append(train(game, perfect, seed, args.steps))
        columns = ("seed", "lost first", "lost second", "best response second", "best response first", "cpu_s")
        note = (
            "lost first, lost second: exact share of matches that the player loses as first and as second player against an opponent that draws "
            "among all perfect moves. best response second, first: the expected return of the best opponent on that side; 0 is a draw."
        )
        write_report(
            "tic-tac-toe", "Tic-tac-toe against perfect play", columns, rows, settings=str(settings(args.steps)), note=note
        )


if __name__ == "__main__":
    main()
