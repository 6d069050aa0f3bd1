"""The example league on two-player Pong: do its snapshots become stronger?

    python -m bench.league_pong [--steps 200000] [--games 50] [--dir DIR] [--seed 0]     (about twenty minutes of one core)

Runs examples/leagues/pong.yaml with that many steps, and then lets every snapshot play against the first one. The league itself plays the matches
against random play and against the script that follows the ball; the main player never meets these two in training. Actions are sampled, as in
training.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from bench.train import RESULTS, provenance
from ludus.core.statistics import wilson_interval
from ludus.league.journal import read_state
from ludus.league.payoff import PairRecord
from ludus.league.players import PlayerRole
from ludus.league.rating_table import rate_players

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/leagues/pong.yaml"
FIRST, RANDOM, FOLLOWER = "main.1", "random", "follower"


def ludus(*words: str) -> str:
    """Output of a command. Its errors are shown."""
    command = [sys.executable, "-m", "ludus.cli.main", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def write_league(directory: Path, steps: int, games: int, seed: int) -> Path:
    """The example with other numbers of steps and matches."""
    league: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    league["stop"], league["seed"] = {"timesteps": steps}, seed
    league["evaluation"]["matches"] = games
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "pong.yaml"
    path.write_text(yaml.safe_dump(league, sort_keys=False))
    return path


def win_rate(wins: int, draws: int, games: int) -> dict[str, Any]:
    low, high = wilson_interval(wins, games, 1.96)
    shown = f"{100 * wins / games:.0f} [{100 * low:.0f}–{100 * high:.0f}]" + (f", {draws} drawn" if draws else "")
    return {"won": wins, "drawn": draws, "games": games, "low": low, "high": high, "text": shown}


def of_pair(record: PairRecord) -> dict[str, Any]:
    return win_rate(record.wins, record.draws, record.games)


def play_first(league: Path, snapshot: str, games: int) -> dict[str, Any]:
    """Matches of a snapshot against the first one."""
    result = json.loads(ludus("league", "match", str(league), snapshot, FIRST, "--games", str(games), "--explore", "--json"))
    return win_rate(result["won"], result["drawn"], result["games"])


def measure(league: Path, games: int) -> list[dict[str, Any]]:
    state = read_state(league)
    ratings = {one.name: one.rating for one in rate_players(state)}
    snapshots = [one for one in state.players.values() if one.role is PlayerRole.HISTORICAL]
    rows = []
    for player in sorted(snapshots, key=lambda one: one.steps):
        row: dict[str, Any] = {"player": player.name, "steps": player.steps}
        row |= {"rating": round(ratings[player.name].elo), "± 95 %": round(ratings[player.name].interval)}
        row |= {name: of_pair(state.payoff.record(player.name, name)) for name in (RANDOM, FOLLOWER)}
        row[FIRST] = None if player.name == FIRST else play_first(league, player.name, games)
        rows.append(row)
        print(row, flush=True)
    return rows


def write_report(rows: list[dict[str, Any]], **more: Any) -> None:
    head = provenance()
    (RESULTS / "league-pong.json").write_text(json.dumps(head | more | {"rows": rows}, indent=1) + "\n")
    lines = [
        "# Two-player Pong: snapshots of the example league",
        "",
        f"{head['date']}, commit {head['commit']}, {head['cpu']}",
        "",
    ]
    lines += ["| player | steps | rating (± 95 %) | against random play: won, % [95 %] | against the script | against main.1 |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row[name]["text"] if row[name] else "–" for name in (RANDOM, FOLLOWER, FIRST)]
        lines.append(f"| {row['player']} | {row['steps']:,} | {row['rating']} ± {row['± 95 %']} | " + " | ".join(cells) + " |")
    lines += ["", more["note"]]
    (RESULTS / "league-pong.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.dir or Path(scratch)
        league, began = directory / "league", time.monotonic()
        file = write_league(directory, args.steps, args.games, args.seed)
        ludus("league", "run", "-f", str(file), "--dir", str(league), "--json")
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, wall_s = spent.ru_utime + spent.ru_stime, time.monotonic() - began
        rows = measure(league, args.games)
        note = (
            f"Seed {args.seed}; {args.games} matches of five points per pair. The league took {cpu_s:.0f} s of one core, evaluation "
            "included. Ratings: random play has 1000."
        )
        write_report(
            rows, seed=args.seed, steps=args.steps, games=args.games, cpu_s=round(cpu_s), wall_s=round(wall_s), note=note
        )


if __name__ == "__main__":
    main()
