"""What a large league costs: matchmaking, recording and restart with synthetic players and no learning.

    python -m bench.league [--players 1000] [--results 1000000]        (about fifteen minutes)

Players have a hidden strength; a match is won with the probability that their strengths give. Every result is stored before the next
match. Times are given per tenth of the run: a cost that grew with the age of the league would show.
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


def add_players(journal: LeagueJournal, count: int) -> list[str]:
    roles = [PlayerRole.MAIN] * 3 + [PlayerRole.MAIN_EXPLOITER] * 3 + [PlayerRole.LEAGUE_EXPLOITER] * 6
    players = [Player(f"{role.value}_{i}", role) for i, role in enumerate(roles)]
    for i in range(count - LEARNING):
        parent = players[i % LEARNING]
        players.append(Player(f"{parent.name}.{i}", PlayerRole.HISTORICAL, parent=parent.name, parent_role=parent.role))
    for player in players:
        journal.apply(PlayerAdded(player))
    return [player.name for player in players]


def play(journal: LeagueJournal, names: list[str], results: int, random: np.random.Generator) -> list[dict[str, float]]:
    strength = dict(zip(names, random.normal(size=len(names)), strict=True))
    parts = []
    for _ in range(PARTS):
        matchmaking, recording = [], []
        cpu_began = time.process_time()
        for _ in range(results // PARTS):
            # All players take part, also snapshots: their evaluation matches fill the payoff matrix.
            player = names[int(random.integers(LEARNING if random.random() < 0.5 else len(names)))]
            began = time.perf_counter()
            match = propose_match(journal.state, player)
            assert isinstance(match, MatchIssued)
            journal.apply(match)
            proposed = time.perf_counter()
            chance = 1 / (1 + np.exp(strength[match.opponent] - strength[match.player]))
            score = float(random.random() < chance)
            ready = time.perf_counter()
            refused = journal.apply(MatchFinished(match.match, score))
            assert refused is None
            matchmaking.append(proposed - began)
            recording.append(time.perf_counter() - ready)
        parts.append({f"matchmaking_{name}": value for name, value in _statistics(matchmaking).items()})
        parts[-1] |= {f"recording_{name}": value for name, value in _statistics(recording).items()}
        parts[-1]["cpu_ms"] = 1e3 * (time.process_time() - cpu_began) / len(recording)
        print({name: round(value, 3) for name, value in parts[-1].items()}, flush=True)
    return parts


def _statistics(seconds: list[float]) -> dict[str, float]:
    ms = 1e3 * np.array(seconds)
    return {
        "median_ms": float(np.median(ms)),
        "mean_ms": float(ms.mean()),
        "p99_ms": float(np.quantile(ms, 0.99)),
        "max_ms": float(ms.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--players", type=int, default=1000)
    parser.add_argument("--results", type=int, default=1_000_000)
    args = parser.parse_args()
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
    found = provenance() | {"players": args.players, "results": args.results, "parts": parts}
    found |= {"restart_s": round(restart_s, 2), "restart_cpu_s": round(restart_cpu_s, 2), "bytes_on_disk": size}
    (RESULTS / "league-scale.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "league-scale.md").write_text(report(found))
    print(report(found))


def report(found: dict[str, Any]) -> str:
    columns = [f"{what}_{name}_ms" for what in ("matchmaking", "recording") for name in ("median", "mean", "p99", "max")]
    columns.append("cpu_ms")
    lines = [
        f"# A league of {found['players']:,} players and {found['results']:,} results",
        f"{found['date']}, commit {found['commit']}, {found['cpu']}, other programs running at the same time",
        "Milliseconds per match. Matchmaking chooses the opponent and stores the match; recording stores the result with payoff matrix and "
        "ratings, and every 20,000 events a snapshot of the whole state (the maximum). CPU: time of this process for both, and for the simulated match.",
        "\n".join(
            [
                f"| results | {' | '.join(name.removesuffix('_ms').replace('_', ' ') for name in columns)} |",
                "|---" * (len(columns) + 1) + "|",
                *(
                    f"| to {(i + 1) * found['results'] // PARTS:,} | {' | '.join(f'{part[name]:.3f}' for name in columns)} |"
                    for i, part in enumerate(found["parts"])
                ),
            ]
        ),
        f"Restart: {found['restart_s']:.2f} s ({found['restart_cpu_s']:.2f} s of CPU). On disk: {found['bytes_on_disk'] / 1e6:.0f} MB.",
    ]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
