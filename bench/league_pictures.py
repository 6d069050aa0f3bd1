"""A simulated league and its pictures, for the documentation and to look at pictures of any size.

    python -m bench.league_pictures [--players 12] [--matches 12000] [--lanes 1] [--directory DIR]

Writes docs/league_payoff.png; with --directory, all pictures and the league itself, so that `ludus league status DIR` and the other commands
can be tried. Players have a strength that grows with training and a style; styles beat each other in a cycle.
"""

from __future__ import annotations

import argparse
import io
import math
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from ludus.league.events import PlayerAdded, PlayerTrained, ResultsReported, SnapshotTaken
from ludus.league.history import rating_history
from ludus.league.journal import LeagueJournal, read_events
from ludus.league.matchmaking import opponent_probabilities
from ludus.league.pictures.canvas import to_png
from ludus.league.pictures.family_tree import draw_family_tree
from ludus.league.pictures.payoff_heat_map import draw_payoff
from ludus.league.pictures.rating_curves import draw_curves
from ludus.league.players import Player, PlayerRole
from ludus.league.settings import LeagueSettings

PICTURE = Path(__file__).parents[1] / "docs" / "league_payoff.png"
REPORT = 10
"""Matches per report."""
LEARNING = {
    "main": PlayerRole.MAIN,
    "exploiter": PlayerRole.MAIN_EXPLOITER,
    "league_exploiter": PlayerRole.LEAGUE_EXPLOITER,
}
SCRIPTS = {"rule:easy": 1000.0, "rule:medium": None, "rule:hard": None}


class Strengths:
    """Strength and style of every player; the chance of a win is the logistic function of the advantage."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._values: dict[str, tuple[float, float]] = {}

    def set(self, name: str, strength: float, style: float) -> None:
        self._values[name] = strength, style

    def copy(self, name: str, copy: str) -> None:
        self._values[copy] = self._values[name]

    def play(self, player: str, opponent: str, matches: int) -> tuple[int, int, int]:
        (own, style), (other, other_style) = self._values[player], self._values[opponent]
        advantage = own - other + 1.2 * math.sin(style - other_style)
        chance = 1 / (1 + math.exp(-advantage))
        won, drawn, lost = self._random.multinomial(matches, [0.9 * chance, 0.1, 0.9 * (1 - chance)]).tolist()
        return won, drawn, lost


def simulate(journal: LeagueJournal, players: int, matches: int, lanes: int = 1, seed: int = 0) -> None:
    """Play until the league has this many matches; snapshots are taken evenly, so that it ends with this many players."""
    random = np.random.default_rng(seed)
    strengths = Strengths(random)
    learning = {f"{name}_{i}" if lanes > 1 else name: role for i in range(lanes) for name, role in LEARNING.items()}
    for number, (name, rating) in enumerate(SCRIPTS.items()):
        journal.apply(PlayerAdded(Player(name, PlayerRole.FIXED, name, rating=rating)))
        strengths.set(name, -1.0 + number, 0.0)
    for name, role in learning.items():
        journal.apply(PlayerAdded(Player(name, role)))
    snapshots = max(players - len(learning) - len(SCRIPTS), 0)
    taken = 0
    pace = dict(zip(learning, random.uniform(0.7, 1.3, len(learning)), strict=True))
    for number in range(matches // REPORT):
        done = number * REPORT / matches
        for k, name in enumerate(learning):
            strengths.set(name, -1.5 + 3.5 * pace[name] * done**0.6, 2 * math.pi * (k / len(learning) + 2.0 * done))
        own, other = _pair(journal, list(learning), number, random)
        if own != other:
            report = ResultsReported("simulation", number + 1, own, other, *strengths.play(own, other, REPORT))
            assert journal.apply(report) is None
        while taken < snapshots * done:
            parent = list(learning)[taken % len(learning)]
            steps = int(1e7 * done * pace[parent])
            journal.apply(PlayerTrained(parent, steps, ""))
            copy = f"{parent}.{taken // len(learning) + 1}"
            journal.apply(SnapshotTaken(parent, copy, ""))
            strengths.copy(parent, copy)
            taken += 1


def _pair(journal: LeagueJournal, learning: list[str], number: int, random: np.random.Generator) -> tuple[str, str]:
    """A match of a training player, or of any two players: evaluation matches fill the payoff matrix."""
    if number % 2:
        own, other = random.choice(list(journal.state.players), size=2, replace=False).tolist()
        return own, other
    player = journal.state.players[learning[number // 2 % len(learning)]]
    found = opponent_probabilities(journal.state.view(), player, journal.state.settings.matchmaking)
    return player.name, str(random.choice(list(found), p=list(found.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--players", type=int, default=12)
    parser.add_argument("--matches", type=int, default=12_000)
    parser.add_argument("--lanes", type=int, default=1, help="Training players of each role.")
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        journal = LeagueJournal(args.directory or Path(scratch), LeagueSettings())
        simulate(journal, args.players, args.matches, args.lanes)
        state = journal.state
        if args.directory is None:
            with Image.open(io.BytesIO(to_png(draw_payoff(state)))) as picture:
                picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(PICTURE, optimize=True)
        else:
            history = rating_history(read_events(args.directory), every=max(1, state.results // 60))
            for name, figure in {
                "payoff": draw_payoff(state),
                "curves": draw_curves(state, history),
                "curves_steps": draw_curves(state, history, "steps"),
                "tree": draw_family_tree(state),
            }.items():
                (args.directory / f"{name}.png").write_bytes(to_png(figure))
        journal.close()


if __name__ == "__main__":
    main()
