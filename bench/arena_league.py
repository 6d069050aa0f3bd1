"""Leagues in the Arena: 1v1 against training with the scripts alone, with an equal number of environment steps; 3v3 against the scripts.

    python -m bench.arena_league [--steps 3000000] [--seed 1]            (about half an hour on two quiet cores)
    python -m bench.arena_league --league DIR --scripts RUN [--games N]  only the battles, of existing runs
    python -m bench.arena_league --mode 3v3 [--league DIR]               (about an hour and a half on two quiet cores)

The league is examples/leagues/arena-MODE.yaml without its exploiters: one main player, its snapshots, and the scripts as fixed players. In
1v1 the other agent trains with the preset Arena_1v1_PPO, which has the same network and settings and meets the scripts; both sample in
the process that learns. A battle has 400 matches with sides swapped, once with the most probable actions and once with sampled ones.
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
LEAGUES = HERE / "examples" / "leagues"
STEPS = {"1v1": 3_000_000, "3v3": 28_000_000}
PRESET = "Arena_1v1_PPO"
GOAL = 0.65
GAMES, SCRIPT_GAMES = 400, 200


def run_ludus(*words: str | Path) -> str:
    command = [str(Path(sys.executable).with_name("ludus")), *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def league_file(mode: str, steps: int, seed: int) -> dict[str, Any]:
    """The example with one training player, which ends after `steps`."""
    league: dict[str, Any] = yaml.safe_load((LEAGUES / f"arena-{mode}.yaml").read_text())
    league["players"] = {name: one for name, one in league["players"].items() if one["role"] in ("main", "fixed")}
    if mode == "1v1":
        league["config"] |= {"num_workers": 0, "sampling": "sync"}
        return league | {"stop": {"timesteps": steps}, "turn_steps": 500_000, "seed": seed}
    # Mostly the scripts, those with whom matches are even; few self-play matches and past versions.
    league["matchmaking"] |= {"weighting": "variance", "main_pfsp": 0.15, "main_verification": 0.05, "main_fixed": 0.65}
    league["snapshots"]["main"] = {"min_steps": 2_000_000, "max_steps": 4_000_000}
    return league | {"stop": {"timesteps": steps}, "turn_steps": 4_000_000, "seed": seed}


def train_league(directory: Path, mode: str, steps: int, seed: int) -> Path:
    file = directory / "league.yaml"
    file.write_text(yaml.safe_dump(league_file(mode, steps, seed)))
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


ASKED = {
    "1v1": "the main player of the league wins at least {goal} of its matches against the agent that was trained with the scripts alone",
    "3v3": "the main player of the league wins at least {goal} of its matches against `hard`",
}


def write(mode: str, rows: list[dict[str, Any]], **about: Any) -> None:
    head, name = provenance(), f"arena-league-{mode}"
    (RESULTS / f"{name}.json").write_text(json.dumps(head | about | {"goal": GOAL, "rows": rows}, indent=1) + "\n")
    lines = [f"# A league in the Arena, {mode}", "", f"{head['date']}, commit {head['commit']}, {head['cpu']}", ""]
    lines += [f"`python -m bench.arena_league --mode {mode}`: {about['steps']:,} environment steps each, seed {about['seed']}."]
    lines += [f"Asked: {ASKED[mode].format(goal=f'{100 * GOAL:.0f} %')}.", ""]
    lines += ["| player | opponent | actions | matches | won, % [95 %] | lost | drawn |", "|---|---|---|---:|---:|---:|---:|"]
    for row in rows:
        won = f"{100 * row['win_rate']:.1f} [{100 * row['low']:.1f}–{100 * row['high']:.1f}]"
        lines.append(
            f"| {row['player']} | {row['opponent']} | {row['actions']} | {row['games']} | {won} | {row['lost']} | {row['drawn']} |"
        )
    if about["note"]:
        lines += ["", about["note"]]
    text = "\n".join(lines) + "\n"
    (RESULTS / f"{name}.md").write_text(text)
    print(text)


def compare_with_scripts(player: Path, games: int) -> list[dict[str, Any]]:
    return [
        play("league", player, script, f"rule:{script}", games, how)
        for script in ("hard", "medium", "easy")
        for how in ("most probable", "sampled")
    ]


def compare_with_training(player: Path, baseline: Path, games: int) -> list[dict[str, Any]]:
    rows = [play("league", player, "trained with the scripts", baseline, games, how) for how in ("most probable", "sampled")]
    for name, one in (("league", player), ("trained with the scripts", baseline)):
        for script in ("easy", "medium", "hard"):
            rows.append(play(name, one, script, f"rule:{script}", min(games, SCRIPT_GAMES), "most probable"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=list(STEPS), default="1v1")
    parser.add_argument("--steps", type=int, help="environment steps; with --league: those that it has made")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--league", type=Path, help="directory of a league that has been run")
    parser.add_argument("--scripts", type=Path, help="run that was trained with the scripts")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    steps = args.steps or STEPS[args.mode]
    with tempfile.TemporaryDirectory() as scratch:
        league = args.league or train_league(Path(scratch), args.mode, steps, args.seed)
        player = league / "players" / "main" / "g0"
        if args.mode == "3v3":
            rows = compare_with_scripts(player, args.games)
        else:
            baseline = args.scripts or train_with_scripts(Path(scratch), steps, args.seed)
            rows = compare_with_training(player, baseline, args.games)
    write(args.mode, rows, steps=steps, seed=args.seed, note=args.note)


if __name__ == "__main__":
    main()
