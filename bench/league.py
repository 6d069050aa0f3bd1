"""What a large league costs: matchmaking, recording and restart with synthetic players and no learning.

    python -m bench.league [--players 1000] [--results 1000000]        (about fifteen minutes)

Players have a hidden strength; a match is won with the probability that their strengths give. Every result is stored before the next
match. Times are given per tenth of the run. With 1,000 players the number of pairs that have met grows all the time; with --players 100 all have
met after the first tenth, and a cost that grew with the age of the league alone would show.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.train import RESULTS, provenance
from ludus.league.events import MatchFinished, MatchIssued, PlayerAdded
from ludus.league.journal import LeagueJournal
from ludus.league.players import Player, PlayerRole
from ludus.league.state import LeagueSettings, propose_match

LEARNING = 12
"""Training players: 3 main, 3 main exploiters, 6 league exploiters."""
PARTS = 10
PLAYERS = 1000


def add_players(journal: LeagueJournal, count: int) -> list[str]:
    roles = [PlayerRole.MAIN] * 3 + [PlayerRole.MAIN_EXPLOITER] * 3 + [PlayerRole.LEAGUE_EXPLOITER] * 6
    players = [Player(f"{role.value}_{i}", role) for i, role in enumerate(roles)]
    for i in range(count - LEARNING):
        parent = players[i % LEARNING]
        players.append(Player(f"{parent.name}.{i}", PlayerRole.HISTORICAL, parent=parent.name, parent_role=parent.role))
    for player in players:
        journal.apply(PlayerAdded(player))
    return [player.name for player in players]


class Stopwatch:
    """Wall and CPU time of a block, per use. On a busy machine the wall time includes that of other programs."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.thread_time()

    def __exit__(self, *exc: object) -> None:
        self._cpu.append(time.thread_time() - self._began[1])
        self._wall.append(time.perf_counter() - self._began[0])

    def statistics(self) -> dict[str, float]:
        wall, cpu = 1e3 * np.array(self._wall), 1e3 * np.array(self._cpu)
        return {
            "median": float(np.median(wall)),
            "mean": float(wall.mean()),
            "p99": float(np.quantile(wall, 0.99)),
            "max": float(wall.max()),
            "CPU mean": float(cpu.mean()),
            "CPU p99": float(np.quantile(cpu, 0.99)),
        }


def play(
    journal: LeagueJournal, names: list[str], results: int, random: np.random.Generator
) -> list[dict[str, dict[str, float]]]:
    strength = dict(zip(names, random.normal(size=len(names)), strict=True))
    parts = []
    for _ in range(PARTS):
        matchmaking, recording = Stopwatch(), Stopwatch()
        for _ in range(results // PARTS):
            # All players take part, also snapshots: their evaluation matches fill the payoff matrix.
            player = names[int(random.integers(LEARNING if random.random() < 0.5 else len(names)))]
            with matchmaking:
                match = propose_match(journal.state, player)
                assert isinstance(match, MatchIssued)
                journal.apply(match)
            chance = 1 / (1 + np.exp(strength[match.opponent] - strength[match.player]))
            score = float(random.random() < chance)
            with recording:
                refused = journal.apply(MatchFinished(match.match, score))
            assert refused is None
        parts.append({"matchmaking": matchmaking.statistics(), "recording": recording.statistics()})
        print(json.dumps({what: {k: round(v, 3) for k, v in found.items()} for what, found in parts[-1].items()}), flush=True)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--players", type=int, default=PLAYERS)
    parser.add_argument("--results", type=int, default=1_000_000)
    args = parser.parse_args()
    head = provenance()  # before the run: the tree may change during it
    with tempfile.TemporaryDirectory() as directory:
        journal = LeagueJournal(Path(directory), LeagueSettings())
        parts = play(journal, add_players(journal, args.players), args.results, np.random.default_rng(0))
        before, events = journal.state, journal.events
        journal.close()
        began, cpu_began = time.perf_counter(), time.process_time()
        journal = LeagueJournal(Path(directory), LeagueSettings())
        restart_s, restart_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        assert journal.state == before
        assert journal.events == events
        journal.close()
        size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    found = head | {"players": args.players, "results": args.results, "parts": parts}
    found |= {"restart_s": round(restart_s, 2), "restart_cpu_s": round(restart_cpu_s, 2), "bytes_on_disk": size}
    name = "league-scale" if args.players == PLAYERS else f"league-scale-{args.players}"
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(report(found))
    print(report(found))


def report(found: dict[str, Any]) -> str:
    lines = [
        f"# A league of {found['players']:,} players and {found['results']:,} results",
        f"{found['date']}, commit {found['commit']}, {found['cpu']}. Other programs ran at the same time, with priority: percentiles and maxima "
        "of wall time include waiting for them, CPU time does not.",
        "Milliseconds per match. Matchmaking chooses the opponent and stores the match; recording stores the result and updates payoff matrix "
        "and ratings. Every 20,000 events one of them also stores a snapshot of the whole state: the maximum.",
        *(_table(found, what) for what in ("matchmaking", "recording")),
        f"Restart: {found['restart_s']:.2f} s ({found['restart_cpu_s']:.2f} s of CPU). On disk: {found['bytes_on_disk'] / 1e6:.0f} MB.",
    ]
    return "\n\n".join(lines) + "\n"


def _table(found: dict[str, Any], what: str) -> str:
    columns = list(found["parts"][0][what])
    rows = [f"| {what}, results | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for i, part in enumerate(found["parts"]):
        numbers = " | ".join(f"{part[what][name]:.3f}" for name in columns)
        rows.append(f"| to {(i + 1) * found['results'] // PARTS:,} | {numbers} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
