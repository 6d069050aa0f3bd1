"""A league in the Arena, 1v1, against training with the scripts alone, with an equal number of environment steps.

    python -m bench.arena_league [--steps 3000000] [--seed 1]            (about half an hour on two quiet cores)
    python -m bench.arena_league --league DIR --scripts RUN [--games N]  only the battles, of existing runs

The league is examples/leagues/arena-1v1.yaml without its exploiters: one main player, its snapshots, and the scripts as fixed players. The
other agent trains with the preset Arena_1v1_PPO, which has the same network and settings and meets the scripts. Both sample in the
process that learns. The battle has 400 matches with sides swapped, once with the most probable actions and once with sampled ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bench.train import RESULTS, provenance

HERE = Path(__file__).parents[1]
FILE = HERE / "examples" / "leagues" / "arena-1v1.yaml"
PRESET = "Arena_1v1_PPO"
GOAL = 0.65
GAMES, SCRIPT_GAMES = 400, 200


def run_ludus(*words: str | Path) -> str:
    command = [str(Path(sys.executable).with_name("ludus")), *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def league_file(steps: int, seed: int) -> dict[str, Any]:
    """The example with one training player, which ends after `steps`."""
    league: dict[str, Any] = yaml.safe_load(FILE.read_text())
    league["players"] = {name: one for name, one in league["players"].items() if one["role"] in ("main", "fixed")}
    league["config"] |= {"num_workers": 0, "sampling": "sync"}
    return league | {"stop": {"timesteps": steps}, "turn_steps": 500_000, "seed": seed}


def train_league(directory: Path, steps: int, seed: int) -> Path:
    file = directory / "league.yaml"
    file.write_text(yaml.safe_dump(league_file(steps, seed)))
    run_ludus("league", "run", "-f", file, "--dir", directory / "league")
    return directory / "league"


def train_with_scripts(directory: Path, steps: int, seed: int) -> Path:
    own = ("--num-workers", "0", "--set", "config.sampling=sync", "--seed", str(seed), "--local-dir", directory / "runs")
    run_ludus("train", "-p", PRESET, "--stop", f"timesteps={steps}", *own)
    return max((directory / "runs" / PRESET).iterdir(), key=lambda run: run.stat().st_mtime)


def play(name: str, player: Path, opponent: str, opponent_model: str | Path, games: int, how: str) -> dict[str, Any]:
    option = {"most probable": "--deterministic", "sampled": "--explore"}[how]
    found = json.loads(run_ludus("battle", player, opponent_model, "--games", str(games), option, "--json").splitlines()[-1])
    row = {"player": name, "opponent": opponent, "actions": how} | {key: found[key] for key in ("games", "won", "lost", "drawn")}
    print(row, flush=True)
    return row | {"win_rate": found["win_rate"], "low": found["low"], "high": found["high"]}


def write(rows: list[dict[str, Any]], **about: Any) -> None:
    head = provenance()
    (RESULTS / "arena-league-1v1.json").write_text(json.dumps(head | about | {"goal": GOAL, "rows": rows}, indent=1) + "\n")
    lines = ["# A league in the Arena, 1v1", "", f"{head['date']}, commit {head['commit']}, {head['cpu']}", ""]
    lines += [
        f"`python -m bench.arena_league`: {about['steps']:,} environment steps each, seed {about['seed']}. Asked: the main player of the"
    ]
    lines += [
        f"league wins at least {100 * GOAL:.0f} % of its matches against the agent that was trained with the scripts alone.",
        "",
    ]
    lines += ["| player | opponent | actions | matches | won, % [95 %] | lost | drawn |", "|---|---|---|---:|---:|---:|---:|"]
    for row in rows:
        won = f"{100 * row['win_rate']:.1f} [{100 * row['low']:.1f}–{100 * row['high']:.1f}]"
        lines.append(
            f"| {row['player']} | {row['opponent']} | {row['actions']} | {row['games']} | {won} | {row['lost']} | {row['drawn']} |"
        )
    if about["note"]:
        lines += ["", about["note"]]
    text = "\n".join(lines) + "\n"
    (RESULTS / "arena-league-1v1.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--league", type=Path, help="directory of a league that has been run")
    parser.add_argument("--scripts", type=Path, help="run that was trained with the scripts")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        league = args.league or train_league(Path(scratch), args.steps, args.seed)
        baseline = args.scripts or train_with_scripts(Path(scratch), args.steps, args.seed)
        main_player = league / "players" / "main" / "g0"
        rows = [
            play("league", main_player, "trained with the scripts", baseline, args.games, how)
            for how in ("most probable", "sampled")
        ]
        for name, player in (("league", main_player), ("trained with the scripts", baseline)):
            games = min(args.games, SCRIPT_GAMES)
            rows += [
                play(name, player, script, f"rule:{script}", games, "most probable") for script in ("easy", "medium", "hard")
            ]
    write(rows, steps=args.steps, seed=args.seed, note=args.note)


if __name__ == "__main__":
    main()
