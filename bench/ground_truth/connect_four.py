"""A league on Connect Four; its main player meets random play and minimax that looks four moves ahead.

    python -m bench.ground_truth.connect_four [--seed 1] [--steps 6000000] [--matches 400]     (about fifteen minutes, one core)

The main player trains against itself (60 % of the matches) and its snapshots (40 %); minimax is never met in training. It plays its most
probable actions in the evaluation; minimax draws among equally good moves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.ground_truth.report import write_report
from bench.ground_truth.training import LeagueLearner, Opponents, TrainingSettings
from ludus.core.statistics import wilson_interval
from ludus.envs.openspiel import GameStates, load_game
from ludus.game_theory.connect_four import MinimaxPlayer, Position
from ludus.models.policy import Policy

ENV = "openspiel/connect_four"
SNAPSHOT_STEPS = 131_072
LATEST = 0.6
WINDOW = 40
"""Snapshots that are met in training: the newest ones."""

Opponent = Callable[[Position], int]


def settings(steps: int) -> TrainingSettings:
    ppo = {
        "lr": [[0, 1e-3], [steps, 1e-4]], "entropy_coeff": [[0, 0.05], [steps, 0.005]], "gamma": 0.99, "lambda": 0.9,
        "minibatch_size": 2048, "num_epochs": 3,
    }  # fmt: skip
    return TrainingSettings(ENV, hiddens=(256, 256), copies=256, batch_steps=16384, ppo=ppo)


def play(policy: Policy, opponent: Opponent, matches: int, first: bool) -> dict[str, Any]:
    """Matches of the policy, all at once, as first or second player."""
    game = GameStates(load_game("connect_four"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6_000_000)
    parser.add_argument("--matches", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    learner = LeagueLearner(settings(args.steps), args.seed)
    snapshots, curve = [learner.snapshot()], []
    while learner.steps < args.steps:
        newest = snapshots[-WINDOW:]
        learner.train(SNAPSHOT_STEPS, Opponents(LATEST, newest, np.ones(len(newest))))
        snapshots.append(learner.snapshot())
        if len(snapshots) % 4 == 0:
            rows = evaluate(learner.policy, 50, 0)
            curve.append({"steps": learner.steps} | {f"{r['opponent']}, {r['main player']}": r["won"] for r in rows})
            print(round(time.process_time() - began), curve[-1], flush=True)
    rows = evaluate(learner.policy, args.matches, args.seed)
    columns = ("opponent", "main player", "matches", "won, % [95 %]", "lost, %")
    cpu_s = round(time.process_time() - began, 1)
    write_report(
        "connect-four", "Connect Four: main player of a league", columns, rows, seed=args.seed, steps=learner.steps, cpu_s=cpu_s,
        settings=str(settings(args.steps)), curve=curve, note=f"{learner.steps:,} environment steps, {cpu_s:.0f} s of one core.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
