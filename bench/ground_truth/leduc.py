"""A league on Leduc poker against naive self-play with the same network, settings and steps; exploitability is exact.

    python -m bench.ground_truth.leduc [--seeds 1 2 3 4 5]     (about three minutes per seed and row, one core)

An interrupted start continues with the seeds that are missing. All rows are leagues of `examples/leagues/leduc.yaml`, run by the
coordinator of `ludus league run`; those of self-play have `matchmaking: {scheme: self_play}`. The product of the league is its
population: one snapshot of the last part of the training is drawn for every match. The product of self-play is its last version. A row
with a usual, constant entropy bonus shows the effect of the entropy schedule, which the league and the other self-play share.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from typing import Any

import numpy as np
import torch

from bench.ground_truth.leagues import MAIN, FinishedLeague, Sections, read_example, run_example
from bench.ground_truth.report import write_report
from bench.train import RESULTS, provenance
from ludus.game_theory.exploitability import exploitability
from ludus.game_theory.game_tree import Doubles
from ludus.game_theory.mixtures import mix_strategies
from ludus.game_theory.observed_game import ObservedGame, observe_game

EXAMPLE = "leduc"
CURVE_POINTS = 12
SELF_PLAY: Sections = {"matchmaking": {"scheme": "self_play"}}
LEAGUE, NAIVE, CONSTANT = "league", "naive self-play", "naive self-play, constant entropy bonus of 0.01"
KINDS: dict[str, Sections] = {LEAGUE: {}, NAIVE: SELF_PLAY, CONSTANT: {**SELF_PLAY, "config": {"entropy_coeff": 0.01}}}
"""Changes of the example's file."""
NOTE = (
    "A population draws one snapshot of the second half of the training for every match. The first naive self-play differs from the "
    "league in its opponents alone: compare its population with the league's for their effect. The entropy schedule was chosen from eight "
    "configurations by exact exploitability on seed 1; the constant bonus was not tuned."
)


def population(game: ObservedGame, strategies: list[Doubles]) -> float:
    """Exploitability of drawing one of the snapshots of the second half."""
    kept = strategies[len(strategies) // 2 :]
    return exploitability(game.tree, mix_strategies(game.tree, kept, np.full(len(kept), 1 / len(kept))))


def measure(game: ObservedGame, league: FinishedLeague) -> dict[str, Any]:
    names = league.snapshots()
    strategies = [game.strategy_of(league.policy(name)) for name in names]
    every = max(1, len(names) // CURVE_POINTS)
    curve = [
        [league.state.players[names[n - 1]].steps, round(exploitability(game.tree, strategies[n - 1]), 4),
         round(population(game, strategies[:n]), 4)]
        for n in range(every, len(names) + 1, every)
    ]  # fmt: skip
    last = exploitability(game.tree, game.strategy_of(league.policy(MAIN)))
    return {
        "steps": league.steps, "cpu_s": league.cpu_s, "snapshots": len(names), "matches": league.state.results, "last": last,
        "population": population(game, strategies), "curve": curve,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    torch.set_num_threads(1)
    game = observe_game("openspiel/leduc_poker")
    runs = finished_runs()
    for seed, (kind, changes) in itertools.product(args.seeds, KINDS.items()):
        if any(run["seed"] == seed for run in runs[kind]):
            continue
        with run_example(EXAMPLE, seed, changes) as league:
            runs[kind].append({"seed": seed, "commit": provenance()["commit"]} | measure(game, league))
        print(kind, {key: value for key, value in runs[kind][-1].items() if key != "curve"}, flush=True)
        write(runs)


def files() -> dict[str, Any]:
    """The files of the leagues, without the seed."""
    return {kind: read_example(EXAMPLE, 0, changes) for kind, changes in KINDS.items()}


def finished_runs() -> dict[str, list[dict[str, Any]]]:
    """Runs of an earlier, interrupted start with the same settings."""
    report = RESULTS / "ground-truth-leduc.json"
    found = json.loads(report.read_text()) if report.exists() else {}
    before = found.get("files", {})
    return {kind: list(found["runs"].get(kind, [])) if before.get(kind) == file else [] for kind, file in files().items()}


def write(runs: dict[str, list[dict[str, Any]]]) -> None:
    columns = {
        "league: population": [run["population"] for run in runs[LEAGUE]],
        "league: last version of the main player": [run["last"] for run in runs[LEAGUE]],
        NAIVE: [run["last"] for run in runs[NAIVE]],
        f"{NAIVE}: population": [run["population"] for run in runs[NAIVE]],
        CONSTANT: [run["last"] for run in runs[CONSTANT]],
    }
    rows = [
        {"product": name, "median": statistics.median(found), "seeds": ", ".join(f"{value:.3f}" for value in found)}
        for name, found in columns.items()
        if found
    ]
    median = {row["product"]: row["median"] for row in rows}
    ratios = {name: median[name] / rows[0]["median"] for name in (NAIVE, CONSTANT) if name in median}
    shown = [
        f"{name.capitalize()} is {ratio:.1f} times as exploitable as the league's population." for name, ratio in ratios.items()
    ]
    write_report(
        "leduc", "Exploitability on Leduc poker", ("product", "median", "seeds"), rows, files=files(), runs=runs, ratios=ratios,
        note=" ".join([f"{runs[LEAGUE][0]['steps']:,} environment steps each.", *shown, NOTE]),
    )  # fmt: skip


if __name__ == "__main__":
    main()
