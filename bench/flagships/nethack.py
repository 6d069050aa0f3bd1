"""NetHack by orders: train the preset `nethack`, then compare it with random orders and three scripts on the same games.

    python -m bench.flagships.nethack                          (about fifteen minutes)
    python -m bench.flagships.nethack --run RUN                only the comparison, of an existing run

Every player plays games with the same seeds. The trained policy samples its orders as in training, or gives the most probable ones. The
score is that of the status line when the game ends, after 1,500 orders at most. A game is decided by its dice as much as by its
player: compare means.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ludus
from bench.flagships.report import Row, TrainedRun, compare_scores, draw_curve, score_row, train_preset, write_report
from ludus.games.nethack.env import NetHackOrders
from ludus.games.nethack.script import SCRIPTS
from ludus.io.atomic_file import replace_file

PRESET = "nethack"
FIRST_SEED = 1_000_000
COLUMNS = ("player", "episodes", "mean [95 %]", "depth", "experience_level", "orders")

PARALLEL = 20
"""Games played at once by the trained policy, one batch per order."""
TRAINED, SAMPLED, RANDOM = "trained, most probable orders", "trained, sampled orders", "random"
PLAYERS = (SAMPLED, TRAINED, RANDOM, *(f"script `{name}`" for name in SCRIPTS))

Player = Callable[[list[NetHackOrders], Any, Any], Sequence[int]]
"""(environments, observations, masks) → order of each."""


def play(name: str, player: Player, episodes: int) -> Row:
    """Play the episodes in turn, up to PARALLEL at once."""
    seeds, results = iter(range(FIRST_SEED, FIRST_SEED + episodes)), {}
    games = [_Game(NetHackOrders(), seed) for seed in itertools.islice(seeds, PARALLEL)]
    while games:
        orders = player(
            [game.env for game in games], np.stack([one.observation for one in games]), np.stack([one.mask for one in games])
        )
        for game, order in zip(list(games), orders, strict=True):
            if game.step(int(order)):
                results[game.seed] = game.result
                if (seed := next(seeds, None)) is None:
                    game.env.close()
                    games.remove(game)
                else:
                    game.begin(seed)
    found = [results[seed] for seed in sorted(results)]
    means = {key: round(float(np.mean([one[key] for one in found])), 1) for key in ("depth", "experience_level", "orders")}
    return score_row(name, [one["score"] for one in found]) | means


class _Game:
    def __init__(self, env: NetHackOrders, seed: int) -> None:
        self.env = env
        self.begin(seed)

    def begin(self, seed: int) -> None:
        self.seed, self.orders = seed, 0
        self.observation, self.result = self.env.reset(seed=seed)
        self.mask = self.result["action_mask"]

    def step(self, order: int) -> bool:
        """Whether the game is over."""
        self.observation, _, terminated, truncated, info = self.env.step(order)
        self.mask, self.orders = info["action_mask"], self.orders + 1
        self.result = info | {"orders": self.orders}
        return terminated or truncated


def player_named(name: str, run: Path) -> Player:
    random = np.random.default_rng(0)
    if name == RANDOM:
        return lambda envs, observations, masks: [int(random.choice(np.flatnonzero(mask))) for mask in masks]
    if name.startswith("script"):
        script = name.split("`")[1]
        return lambda envs, observations, masks: [env.script_action(script) for env in envs]
    agent = ludus.load(run)
    return lambda envs, observations, masks: agent.act(observations, mask=masks, deterministic=name == TRAINED)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--wall-s", type=float, default=0.0, help="of an existing run")
    parser.add_argument("--cpu-s", type=float, default=0.0, help="of an existing run")
    parser.add_argument("--episodes", type=int, default=120)
    parser.add_argument("--players", nargs="+", default=PLAYERS, help="those to measure now")
    parser.add_argument("--rows", type=Path, help="file that keeps the rows of all measured players")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="nethack-") as folder:
        run = TrainedRun(args.run, args.wall_s, args.cpu_s) if args.run else train_preset(PRESET, Path(folder))
        file = args.rows or Path(folder) / "rows.json"
        for name in args.players:
            row = play(name, player_named(name, run.directory), args.episodes)
            print(row["player"], row["mean [95 %]"], flush=True)
            known = json.loads(file.read_text()) if file.exists() else {}
            replace_file(file, json.dumps(known | {name: row}))
        rows = json.loads(file.read_text())
        if set(PLAYERS) <= set(rows):
            write(run, [rows[name] for name in PLAYERS])


def write(run: TrainedRun, rows: list[Row]) -> None:
    scripts = [row for row in rows if row["player"].startswith("script")]
    comparisons = []
    for row in rows[:2]:
        for other in (*scripts, rows[2]):
            found = compare_scores(row["scores"], other["scores"])
            shown = f"{found['difference']:.4g} [{found['low']:.4g}, {found['high']:.4g}]"
            comparisons.append({"player": row["player"], "against": other["player"], "difference [95 %]": shown} | found)
    curve = run.reports("episode_return_mean")
    baselines = {row["player"].replace("`", ""): row["mean"] for row in [*scripts, rows[2]]}
    draw_curve(PRESET, curve, "score", baselines, "NetHack: mean score of the last episodes")
    lines = [
        f"- {one['player']} against {one['against']}: {one['difference [95 %]']}, beaten: {'yes' if one['beaten'] else 'no'}"
        for one in comparisons
    ]
    note = "\n".join([run.note, f"Seeds of the games: {FIRST_SEED:,} and up. Differences of the mean scores:", "", *lines])
    write_report(PRESET, "NetHack by orders", COLUMNS, rows, note=note, curve=curve, comparisons=comparisons)


if __name__ == "__main__":
    main()
