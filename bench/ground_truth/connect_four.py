"""A league on Connect Four; its main player meets random play and minimax that looks four moves ahead.

    python -m bench.ground_truth.connect_four [--seeds 1] [--matches 400]     (about fifteen minutes per seed, one core)

The main player of `examples/leagues/connect_four.yaml` trains against itself, its snapshots and fixed players: random play and minimax of
depth 2 and 4. In training, matches start after a few random moves; in the evaluation, from the empty board. The main player plays its most
probable actions, or samples them as in training. Minimax (`ludus.game_theory.connect_four`) counts open threes at its horizon and draws
among equally good moves.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.ground_truth.leagues import MAIN, FinishedLeague, Sections, read_example, run_example
from bench.ground_truth.report import write_report
from ludus.core.statistics import wilson_interval
from ludus.envs.matches.connect_four import ConnectFourEnv
from ludus.game_theory.connect_four import MinimaxPlayer, Position
from ludus.models.policy import Policy

EXAMPLE = "connect_four"
CURVE_POINTS = 12
CURVE_MATCHES = 50

Opponent = Callable[[Position], int]


def play(policy: Policy, opponent: Opponent, matches: int, first: bool, seed: int | None) -> dict[str, Any]:
    """Matches of the policy, all at once, as first or second player. It samples its actions with `seed`; None: the most probable ones."""
    env = ConnectFourEnv(matches, egocentric_obs_tensor=True)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    step = env.reset(np.zeros(matches, np.int64), np.arange(matches))
    positions, own, returns = [Position() for _ in range(matches)], 0 if first else 1, np.zeros(matches)
    while len(live := np.flatnonzero(~step.terminated[:, own])):
        actions = np.zeros((matches, 2), np.int64)
        if step.acting[live[0], own]:
            assert step.action_mask is not None
            noise = None if generator is None else policy.draw_noise(len(live), generator)
            actions[live] = policy.act(step.observation[live, own], mask=step.action_mask[live, own], noise=noise).action[:, None]
        else:
            actions[live] = np.array([opponent(positions[number]) for number in live])[:, None]
        for number in live.tolist():
            positions[number] = positions[number].play(int(actions[number, own]))
        playing = np.zeros(matches, np.bool_)
        playing[live] = True
        step = env.step(actions, playing)
        returns[live] += step.reward[live, own]
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
    for (name, opponent), first, sampled in itertools.product(opponents.items(), (True, False), (False, True)):
        found = play(policy, opponent, matches, first, seed if sampled else None)
        shown = f"{100 * found['won']:.1f} [{100 * found['low']:.1f}–{100 * found['high']:.1f}]"
        actions = "sampled" if sampled else "most probable"
        row = {"opponent": name, "main player": "first" if first else "second", "actions": actions, "won, % [95 %]": shown}
        rows.append(row | {"lost, %": round(100 * found["lost"], 1)} | found)
    return rows


def curve_of(league: FinishedLeague) -> list[dict[str, Any]]:
    """Win rates of some snapshots."""
    names = league.snapshots()
    curve = []
    for name in names[:: max(1, len(names) // CURVE_POINTS)]:
        rows = evaluate(league.policy(name), CURVE_MATCHES, 0)
        won = {f"{row['opponent']}, {row['main player']}, {row['actions']}": row["won"] for row in rows}
        curve.append({"steps": league.state.players[name].steps} | won)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--matches", type=int, default=400)
    parser.add_argument("--steps", type=int, help="in place of those of the example")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("seed", "opponent", "main player", "actions", "matches", "won, % [95 %]", "lost, %")
    changes: Sections = {} if args.steps is None else {"stop": {"timesteps": args.steps}}
    title, file = "Connect Four: main player of a league", read_example(EXAMPLE, 0, changes)
    rows, curves, notes = [], {}, []
    for seed in args.seeds:
        with run_example(EXAMPLE, seed, changes, quiet=False) as league:
            rows += [{"seed": seed} | row for row in evaluate(league.policy(MAIN), args.matches, seed)]
            curves[seed] = curve_of(league)
            notes.append(f"Seed {seed}: {league.steps:,} environment steps, {league.cpu_s:.0f} s of one core.")
        write_report("connect-four", title, columns, rows, file=file, curves=curves, note=" ".join(notes))


if __name__ == "__main__":
    main()
