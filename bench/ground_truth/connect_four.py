"""A league on Connect Four; its main player meets random play and minimax that looks four moves ahead.

    python -m bench.ground_truth.connect_four [--seeds 1] [--matches 400]     (about fifteen minutes per seed, one core)

The main player of `examples/leagues/connect_four.yaml` trains against itself and its snapshots; minimax is never met in training. In the
evaluation the main player plays its most probable actions; minimax draws among equally good moves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.ground_truth.leagues import MAIN, FinishedLeague, read_example, run_example
from bench.ground_truth.report import write_report
from ludus.core.statistics import wilson_interval
from ludus.envs.openspiel import load_states
from ludus.game_theory.connect_four import MinimaxPlayer, Position
from ludus.models.policy import Policy

EXAMPLE = "connect_four"
CURVE_POINTS = 12
CURVE_MATCHES = 100

Opponent = Callable[[Position], int]


def play(policy: Policy, opponent: Opponent, matches: int, first: bool) -> dict[str, Any]:
    """Matches of the policy, all at once, as first or second player."""
    game = load_states(EXAMPLE, read_example(EXAMPLE, 0)["env_config"])
    states = [game.game.new_initial_state() for _ in range(matches)]
    positions = [Position() for _ in range(matches)]
    own = 0 if first else 1
    while live := [i for i, state in enumerate(states) if not state.is_terminal()]:
        turn = [i for i in live if states[i].current_player() == own]
        actions = {i: opponent(positions[i]) for i in live if i not in set(turn)}
        if turn:
            observations = np.stack([game.observation(states[i], own) for i in turn])
            masks = np.array([states[i].legal_actions_mask(own) for i in turn], np.bool_)
            actions |= dict(zip(turn, policy.act(observations, mask=masks).action.tolist(), strict=True))
        for i, action in actions.items():
            states[i].apply_action(int(action))
            positions[i] = positions[i].play(int(action))
    returns = np.array([state.returns()[own] for state in states])
    won = int((returns > 0).sum())
    low, high = wilson_interval(won, matches, 1.96)
    return {"matches": matches, "won": won / matches, "low": low, "high": high, "lost": float((returns < 0).mean())}


def evaluate(policy: Policy, matches: int, seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    minimax = MinimaxPlayer(4, random)
    opponents: dict[str, Opponent] = {
        "random": lambda position: int(random.choice(position.legal_actions())),
        "minimax, depth 4": minimax.choose,
    }
    rows = []
    for name, opponent in opponents.items():
        for first in (True, False):
            found = play(policy, opponent, matches, first)
            shown = f"{100 * found['won']:.1f} [{100 * found['low']:.1f}–{100 * found['high']:.1f}]"
            row = {"opponent": name, "main player": "first" if first else "second", "won, % [95 %]": shown}
            rows.append(row | {"lost, %": round(100 * found["lost"], 1)} | found)
    return rows


def curve_of(league: FinishedLeague) -> list[dict[str, Any]]:
    """Win rates of some snapshots."""
    names = league.snapshots()
    curve = []
    for name in names[:: max(1, len(names) // CURVE_POINTS)]:
        rows = evaluate(league.policy(name), CURVE_MATCHES, 0)
        won = {f"{row['opponent']}, {row['main player']}": row["won"] for row in rows}
        curve.append({"steps": league.state.players[name].steps} | won)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--matches", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("seed", "opponent", "main player", "matches", "won, % [95 %]", "lost, %")
    rows, curves, notes = [], {}, []
    for seed in args.seeds:
        with run_example(EXAMPLE, seed, quiet=False) as league:
            rows += [{"seed": seed} | row for row in evaluate(league.policy(MAIN), args.matches, seed)]
            curves[seed] = curve_of(league)
            notes.append(f"Seed {seed}: {league.steps:,} environment steps, {league.cpu_s:.0f} s of one core.")
        title, file = "Connect Four: main player of a league", read_example(EXAMPLE, 0)
        write_report("connect-four", title, columns, rows, file=file, curves=curves, note=" ".join(notes))


if __name__ == "__main__":
    main()
