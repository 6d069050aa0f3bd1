"""Rocket League physics: the preset `rocket-league-1v1` against scripts.

    python -m bench.flagships.rocket_league [--seconds 780]          (trains and measures)
    python -m bench.flagships.rocket_league --run RUN                (measures a run that exists)

Matches of 30 s of game time from kickoffs. More goals win a match; without a difference it is drawn. The policy samples its actions, as in
training. The learning curve shows the goals against the chaser of every checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.flagships.report import Row, TrainedRun, draw_curve, train_preset, write_report
from bench.flagships.vector_matches import (
    Player,
    Results,
    load_policy,
    play_matches,
    policy_player,
    random_player,
    result_row,
    script_player,
    trained_run,
)
from ludus.games.rocket_league.controls import GROUND_CONTROLS
from ludus.games.rocket_league.env import RocketLeagueEnv
from ludus.games.rocket_league.scripts import chase_ball, hit_towards_goal
from ludus.models.policy import Policy

PRESET = "rocket-league-1v1"
CHASER, STRIKER, RANDOM = "chaser (script)", "striker (script)", "random"
COLUMNS = ("player", "opponent", "matches", "won, % [95 %]", "drawn", "lost", "goals, difference [95 %]", "beaten")
CURVE_MATCHES = 60
_AT_ONCE = 100


def measure(player: str, own: Player, opponent: str, other: Player, matches: int) -> Row:
    """Half of the matches as blue."""
    return result_row(player, opponent, play(own, other, matches), COLUMNS[-2])


def play(own: Player, other: Player, matches: int) -> Results:
    parts = [
        play_matches(RocketLeagueEnv(min(_AT_ONCE, matches - first), controls="ground"), own, other, seed=1 + first).returns
        for first in range(0, matches, _AT_ONCE)
    ]
    return Results(np.concatenate(parts))


def checkpoints(run: Path) -> Sequence[Path]:
    return sorted(path for path in (run / "checkpoints").iterdir() if path.is_dir() and path.name.isdigit())


def curve_of(run: TrainedRun, score: Callable[[Policy], float]) -> list[tuple[float, float, float]]:
    """(seconds, timesteps, score) of the checkpoints."""
    by_iteration = {round(value): (seconds, steps) for seconds, steps, value in run.reports("iterations")}
    points = []
    for path in checkpoints(run.directory):
        if int(path.name) in by_iteration:
            points.append((*by_iteration[int(path.name)], score(load_policy(path))))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=780)
    parser.add_argument("--matches", type=int, default=400)
    parser.add_argument("--run", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rocket-league-") as folder:
        if args.run is None:
            options = ["--stop", f"time_s={args.seconds}", "--set", "evaluation_interval=0", "--set", "checkpoint_time_s=100"]
            run = train_preset(PRESET, Path(folder), *options, "--keep-checkpoints-num", "20")
        else:
            run = trained_run(args.run)
        policy = policy_player(load_policy(run.directory), 1)
        players = {
            CHASER: script_player(chase_ball),
            STRIKER: script_player(hit_towards_goal),
            RANDOM: random_player(GROUND_CONTROLS, 1),
        }
        rows = [measure(f"preset `{PRESET}`", policy, name, player, args.matches) for name, player in players.items()]
        rows += [measure(name, players[name], CHASER, players[CHASER], args.matches) for name in (STRIKER, RANDOM)]
        chaser = players[CHASER]
        curve = curve_of(run, lambda found: float(play(policy_player(found, 1), chaser, CURVE_MATCHES).returns.mean()))
        draw_curve(
            "rocket_league",
            curve,
            "goals per match against the chaser",
            {name: row["gain"] for name, row in zip((STRIKER, RANDOM), rows[-2:], strict=True)} | {"even": 0.0},
            "Rocket League physics, 1v1",
        )
        note = f"{run.note} Matches of 30 s from kickoffs; actions are sampled."
        write_report("rocket-league", "Rocket League physics, one car a side", COLUMNS, rows, note=note, curve=curve)


if __name__ == "__main__":
    main()
