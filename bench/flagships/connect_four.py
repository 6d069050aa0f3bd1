"""Connect Four: the main player of the example league and the preset `connect-four` against a minimax engine that looks four moves ahead.

    python -m bench.flagships.connect_four                  (some seconds; reads bench/results/ground-truth-connect-four.json)
    python -m bench.flagships.connect_four --train          (also trains and measures the preset)

The league is trained and measured by `bench.ground_truth.connect_four`. This benchmark adds random play against the same engine and draws
the learning curve.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ludus
from bench.flagships.report import Row, draw_curve, match_row, train_preset, write_report
from bench.ground_truth.connect_four import play
from bench.train import RESULTS
from ludus.game_theory.connect_four import MinimaxPlayer, Position
from ludus.models.policy import Policy

DEPTH = 4
ENGINE = f"minimax, depth {DEPTH}"
COLUMNS = ("player", "opponent", "matches", "won, % [95 %]", "drawn", "lost", "beaten")


def random_rows(matches: int, seed: int) -> Row:
    """Random play against the engine, half of the matches as first player."""
    random = np.random.default_rng(seed)
    engine = MinimaxPlayer(DEPTH, random)
    results = [_random_match(engine, random, first=number % 2 == 0) for number in range(matches)]
    return match_row("random", ENGINE, results.count(1), results.count(0), results.count(-1))


def _random_match(engine: MinimaxPlayer, random: np.random.Generator, *, first: bool) -> int:
    """1 if random play won, 0 for a draw, −1 if it lost."""
    position, own_turn = Position(), first
    while (legal := position.legal_actions()) and not position.lost:
        position = position.play(int(random.choice(legal)) if own_turn else engine.choose(position))
        own_turn = not own_turn
    if not position.lost:
        return 0
    return -1 if own_turn else 1  # the player to move has lost


def policy_row(player: str, policy: Policy, matches: int, seed: int) -> Row:
    """Matches of a policy against the engine with its most probable actions, half of them as first player."""
    engine = MinimaxPlayer(DEPTH, np.random.default_rng(seed))
    halves = [play(policy, engine.choose, matches // 2, first, None) for first in (True, False)]
    won, lost = (round(sum(half[key] * half["matches"] for half in halves)) for key in ("won", "lost"))
    return match_row(player, ENGINE, won, matches - won - lost, lost)


def league_row(measured: list[dict[str, Any]]) -> Row:
    """The league's main player, from the result of `bench.ground_truth.connect_four`."""
    rows = [row for row in measured if row["opponent"] == ENGINE and row["actions"] == "most probable"]
    won, lost = (round(sum(row[key] * row["matches"] for row in rows)) for key in ("won", "lost"))
    matches = sum(row["matches"] for row in rows)
    return match_row("league, main player", ENGINE, won, matches - won - lost, lost)


def league_curve(found: dict[str, Any]) -> list[tuple[float, float, float]]:
    """(seconds, steps, share of wins) of the snapshots; the seconds are proportional to the steps."""
    (points, *_), (steps, seconds) = found["curves"].values(), _cost(found["note"])
    sides = [f"{ENGINE}, {side}, most probable" for side in ("first", "second")]
    return [(seconds * one["steps"] / steps, one["steps"], 100 * sum(one[side] for side in sides) / 2) for one in points]


def _cost(note: str) -> tuple[float, float]:
    """(steps, seconds) of "Seed 1: 6,004,736 environment steps, 357 s of one core."."""
    words = note.replace(",", "").split()
    return float(words[2]), float(words[5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matches", type=int, default=800)
    parser.add_argument("--train", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads((RESULTS / "ground-truth-connect-four.json").read_text())
    rows, notes = [league_row(found["rows"]), random_rows(args.matches, 1)], [f"League: {found['note']}"]
    if args.train:
        with tempfile.TemporaryDirectory(prefix="connect-four-") as folder:
            run = train_preset("connect-four", Path(folder))
            policy = ludus.load(run.directory).policy
            assert isinstance(policy, Policy)
            rows.insert(1, policy_row("preset `connect-four`, self-play", policy, args.matches, 1))
            notes.append(f"Preset: {run.note}")
    curve = league_curve(found)
    draw_curve(
        "connect_four", curve, "won against minimax, %", {"random play": 100 * rows[-1]["won"] / args.matches}, "Connect Four"
    )
    write_report("connect-four", "Connect Four against minimax of depth 4", COLUMNS, rows, note=" ".join(notes), curve=curve)


if __name__ == "__main__":
    main()
