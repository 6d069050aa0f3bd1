"""A cyclic game: rock-paper-scissors with stakes 1, 2 and 3, whose equilibrium plays 1/3, 1/2, 1/6.

    python -m bench.ground_truth.cyclic [--seeds 1 2 3 4 5]                          (about a minute per seed)

The league is `examples/leagues/rock_paper_scissors.yaml`, PSRO: each snapshot is a best response by PPO to the Nash meta-strategy of
those before it, and payoffs are estimated from matches. Its play is the last meta-strategy: one snapshot is drawn for every match. Naive
self-play is the same file with `scheme: self_play`, without new starts, for as many steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

import numpy as np
import torch

from bench.ground_truth.leagues import MAIN, FinishedLeague, Sections, read_example, run_example
from bench.ground_truth.report import write_report
from ludus.envs.matches.rock_paper_scissors import DEFAULT_STAKES
from ludus.game_theory.game_tree import Doubles
from ludus.game_theory.rock_paper_scissors import RockPaperScissors
from ludus.models.policy import Policy
from ludus.sampling.league_files import read_matchmaking

EXAMPLE = "rock_paper_scissors"
NASH = RockPaperScissors(DEFAULT_STAKES).equilibrium
COURSE_STEPS = 4_096
"""Steps between two observations of naive self-play."""
NEARLY_PURE = 0.9


def play_of(policy: Policy) -> Doubles:
    """Probabilities of rock, paper and scissors."""
    return np.asarray(policy.action_probabilities(np.zeros((1, 1), np.float32))[0], np.float64)


def distance(play: Doubles) -> float:
    """The largest difference of a probability to the equilibrium."""
    return float(np.abs(play - NASH).max())


def measure_league(league: FinishedLeague) -> dict[str, Any]:
    published = read_matchmaking(league.directory, MAIN)
    assert published is not None
    weights = {one.name: round(one.probability, 4) for one in published.opponents}
    play = np.sum([one.probability * play_of(league.policy(one.name)) for one in published.opponents], axis=0)
    return {"play": play.round(4).tolist(), "distance": distance(play), "steps": league.steps, "meta_strategy": weights}


def naive_changes(steps: int) -> Sections:
    rule = {"min_steps": COURSE_STEPS, "max_steps": COURSE_STEPS, "reset": 0.0}
    return {
        "matchmaking": {"scheme": "self_play"}, "snapshots": {"main": rule}, "evaluation": {"pairs": "none"},
        "stop": {"timesteps": steps, "snapshots": None},
    }  # fmt: skip


def measure_naive(league: FinishedLeague) -> dict[str, Any]:
    course = [play_of(league.policy(name)) for name in league.snapshots()]
    best = [int(play.argmax()) for play in course if play.max() > NEARLY_PURE]
    distances = [distance(play) for play in course]
    return {
        "play": course[-1].round(4).tolist(), "distance": distances[-1], "steps": league.steps,
        "changes": sum(a != b for a, b in itertools.pairwise(best)),
        "mean_distance": float(np.mean(distances[len(distances) // 2 :])), "course": [play.round(3).tolist() for play in course],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    leagues, naive = [], []
    for seed in args.seeds:
        with run_example(EXAMPLE, seed) as league:
            leagues.append({"seed": seed} | measure_league(league))
        with run_example(EXAMPLE, seed, naive_changes(leagues[-1]["steps"])) as league:
            naive.append({"seed": seed} | measure_naive(league))
        write(leagues, naive)


def write(leagues: list[dict[str, Any]], naive: list[dict[str, Any]]) -> None:
    rows = []
    for name, runs in (("league (PSRO)", leagues), ("naive self-play", naive)):
        found = [run["distance"] for run in runs]
        plays = "; ".join("/".join(f"{p:.2f}" for p in run["play"]) for run in runs)
        rows.append({"training": name, "median distance": statistics.median(found), "largest": max(found), "final play": plays})
    changes, mean = [run["changes"] for run in naive], statistics.median(run["mean_distance"] for run in naive)
    note = (
        "Distance: largest difference of a probability to the equilibrium (0.33/0.50/0.17). Naive self-play moved from one nearly pure action "
        f"to another {min(changes)} to {max(changes)} times; its mean distance over the second half was {mean:.2f} (median of the seeds)."
    )
    columns, title = ("training", "median distance", "largest", "final play"), "Rock-paper-scissors with stakes 1, 2, 3"
    write_report("cyclic", title, columns, rows, file=read_example(EXAMPLE, 0), league=leagues, naive=naive, note=note)


if __name__ == "__main__":
    main()
