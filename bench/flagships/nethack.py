"""NetHack by orders: train the preset `nethack`, then compare it with random orders and three scripts on the same games.

    python -m bench.flagships.nethack                          (about fifteen minutes)
    python -m bench.flagships.nethack --run RUN                only the comparison, of an existing run

Every player plays games with the same seeds. The trained policy samples its orders as in training, or gives the most probable ones. The
score is that of the status line when the game ends, after 1,500 orders at most. A game is decided by its dice as much as by its
player: compare means.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ludus
from bench.flagships.report import Row, TrainedRun, compare_scores, draw_curve, score_row, train_preset, write_report
from ludus.games.nethack.env import NetHackOrders
from ludus.games.nethack.script import SCRIPTS

PRESET = "nethack"
FIRST_SEED = 1_000_000
COLUMNS = ("player", "episodes", "mean [95 %]", "depth", "experience level", "orders", "minus best script [95 %]")

Player = Callable[[NetHackOrders, Any, Any], int]
"""(environment, observation, mask) → order."""


def play(name: str, player: Player, episodes: int) -> Row:
    env = NetHackOrders()
    scores, depths, levels, orders = [], [], [], []
    for number in range(episodes):
        observation, info = env.reset(seed=FIRST_SEED + number)
        over, made = False, 0
        while not over:
            observation, _, terminated, truncated, info = env.step(player(env, observation, info["action_mask"]))
            over, made = terminated or truncated, made + 1
        scores.append(info["score"])
        depths.append(info["depth"])
        levels.append(info["experience_level"])
        orders.append(made)
    env.close()
    means = {"depth": np.mean(depths), "experience level": np.mean(levels), "orders": np.mean(orders)}
    return score_row(name, scores) | {key: round(float(value), 1) for key, value in means.items()}


def players(run: Path) -> dict[str, Player]:
    random, agent = np.random.default_rng(0), ludus.load(run)

    def at_random(env: NetHackOrders, observation: Any, mask: Any) -> int:
        return int(random.choice(np.flatnonzero(mask)))

    def by_script(name: str) -> Player:
        return lambda env, observation, mask: env.script_action(name)

    def trained(*, deterministic: bool) -> Player:
        return lambda env, observation, mask: int(agent.act(observation, mask=mask, deterministic=deterministic)[0])

    return {
        "trained, sampled orders": trained(deterministic=False),
        "trained, most probable orders": trained(deterministic=True),
        "random": at_random,
    } | {f"script `{name}`": by_script(name) for name in SCRIPTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--wall-s", type=float, default=0.0, help="of an existing run")
    parser.add_argument("--cpu-s", type=float, default=0.0, help="of an existing run")
    parser.add_argument("--episodes", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="nethack-") as folder:
        run = TrainedRun(args.run, args.wall_s, args.cpu_s) if args.run else train_preset(PRESET, Path(folder))
        rows = []
        for name, player in players(run.directory).items():
            rows.append(play(name, player, args.episodes))
            print(rows[-1]["player"], rows[-1]["mean [95 %]"], flush=True)
        write(run, rows)


def write(run: TrainedRun, rows: list[Row]) -> None:
    scripts = [row for row in rows if row["player"].startswith("script")]
    best = max(scripts, key=lambda row: float(row["mean"]))
    for row in rows[:2]:
        found = compare_scores(row["scores"], best["scores"])
        row["minus best script [95 %]"] = f"{found['difference']:.4g} [{found['low']:.4g}, {found['high']:.4g}]"
        row["comparison"] = found
    curve = run.reports("episode_return_mean")
    baselines = {best["player"].replace("`", ""): best["mean"], "random": rows[2]["mean"]}
    draw_curve(PRESET, curve, "score", baselines, "NetHack: mean score of the last episodes")
    note = f"{run.note} The best script is {best['player']}. Seeds of the games: {FIRST_SEED:,} and up."
    write_report(PRESET, "NetHack by orders", COLUMNS, rows, note=note, curve=curve)


if __name__ == "__main__":
    main()
