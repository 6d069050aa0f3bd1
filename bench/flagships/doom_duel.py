"""A duel in ViZDoom: train the preset `doom-duel` by self-play, then play against random actions and two scripts that know where the enemy is.

    python -m bench.flagships.doom_duel                          (about half an hour)
    python -m bench.flagships.doom_duel --run RUN                only the matches, of an existing run

A match lasts 15 s of game time; more frags win. Policy and scripts see the same: where the enemy is on their
screen. The bot of `ludus.games.doom` moves in front of the enemy and fires, `sweep` runs from side to side and fires
whenever the enemy is ahead. Sides are swapped after half of the matches.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import ludus
from bench.flagships.report import Row, TrainedRun, draw_curve, match_row, train_preset, write_report
from ludus.core.types import Ints
from ludus.games.doom.engine import PRESSES, PlayerView
from ludus.games.doom.env import DoomDuelEnv
from ludus.games.doom.player import BotPlayer

NAME = "doom-duel"
FIRST_SEED = 1_000_000
PARALLEL = 10
CURVE_MATCHES = 20
CHECKPOINTS = ("--set", "checkpoint_time_s=45")
COLUMNS = ("player", "opponent", "matches", "won, % [95 %]", "drawn", "lost", "frags", "beaten")
LEFT, RIGHT, FIRE = 1, 2, 3

Player = Callable[[DoomDuelEnv, int], Ints]
"""(environment, camp) → action in every match."""


class SweepPlayer:
    """Runs from side to side, turning back when the enemy is far off the middle, and fires when the enemy is ahead."""

    AHEAD, LEAD = 0.12, 2.0
    FAR = 0.35
    STEPS = (4, 10)

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._direction, self._steps, self._before = LEFT, 0, 0.0

    def act(self, view: PlayerView, reward: float) -> int:
        enemy = view.enemy
        if self._steps <= 0:
            self._steps = self._random.randint(*self.STEPS)
            towards = enemy is not None and (abs(enemy) > self.FAR or self._random.random() < 0.5)
            self._direction = (
                (RIGHT if enemy > 0 else LEFT) if towards and enemy is not None else self._random.choice((LEFT, RIGHT))
            )
        self._steps -= 1
        if enemy is None:
            return self._direction
        ahead = abs(enemy + self.LEAD * (enemy - self._before)) < self.AHEAD
        self._before = enemy
        return self._direction + (FIRE if ahead else 0)


def scripted(kind: type[BotPlayer] | type[SweepPlayer], seed: int) -> Player:
    scripts = [kind(seed + number) for number in range(PARALLEL)]
    return lambda env, camp: np.array(
        [one.act(views[camp], 0.0) for one, views in zip(scripts, env.views, strict=True)], np.int64
    )


def at_random(seed: int) -> Player:
    generator = np.random.default_rng(seed)
    return lambda env, camp: generator.integers(len(PRESSES), size=PARALLEL)


def trained(run: Path, seed: int) -> Player:
    """Samples its actions as in training."""
    agent = ludus.load(run, seed=seed)
    return lambda env, camp: np.asarray(agent.act(env.observation[:, camp], deterministic=False)[0])


def play(env: DoomDuelEnv, name: str, player: Player, other_name: str, other: Player, matches: int) -> Row:
    results: list[tuple[int, int]] = []
    while len(results) < matches:
        swapped = len(results) >= matches // 2
        sides: Sequence[Player] = (other, player) if swapped else (player, other)
        step = env.reset(FIRST_SEED + len(results) + np.arange(PARALLEL), np.arange(PARALLEL))
        playing = np.ones(PARALLEL, np.bool_)
        while not step.terminated.any():
            step = env.step(np.stack([side(env, camp) for camp, side in enumerate(sides)], axis=1), playing)
        results += [(b, a) if swapped else (a, b) for a, b in env.frags.tolist()]
    lead = [own - others for own, others in results]
    row = match_row(name, other_name, sum(one > 0 for one in lead), sum(one == 0 for one in lead), sum(one < 0 for one in lead))
    own, others = np.mean(results, axis=0)
    row["frags"] = f"{own:.1f} : {others:.1f}"
    print(row["player"], row["opponent"], row["won, % [95 %]"], row["frags"], flush=True)
    return row


def curve_of(run: TrainedRun, env: DoomDuelEnv, opponent: Player) -> list[tuple[float, float, float]]:
    """(seconds, steps, share of wins) of the checkpoints against the bot. In self-play the return is always 0."""
    reports = {int(iteration): (seconds, steps) for seconds, steps, iteration in run.reports("iterations")}
    points = []
    for checkpoint in sorted((run.directory / "checkpoints").glob("[0-9]*")):
        row = play(env, f"after {int(checkpoint.name)} updates", trained(checkpoint, 4), "script `bot`", opponent, CURVE_MATCHES)
        points.append((*reports[int(checkpoint.name)], 100 * float(row["won"]) / CURVE_MATCHES))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--wall-s", type=float, default=0.0, help="of an existing run")
    parser.add_argument("--cpu-s", type=float, default=0.0, help="of an existing run")
    parser.add_argument("--matches", type=int, default=100)
    parser.add_argument("--curve", action=argparse.BooleanOptionalAction, default=True, help="play with every checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="doom-duel-") as folder:
        run = TrainedRun(args.run, args.wall_s, args.cpu_s) if args.run else train_preset(NAME, Path(folder), *CHECKPOINTS)
        opponents = {"random": at_random(1), "script `sweep`": scripted(SweepPlayer, 2), "script `bot`": scripted(BotPlayer, 3)}
        env, policy = DoomDuelEnv(PARALLEL), trained(run.directory, 4)
        rows = [play(env, "trained", policy, name, other, args.matches) for name, other in opponents.items()]
        sweep, bot = (opponents[name] for name in ("script `sweep`", "script `bot`"))
        rows.append(play(env, "script `sweep`", sweep, "random", opponents["random"], args.matches))
        rows.append(play(env, "script `sweep`", sweep, "script `bot`", bot, args.matches))
        curve = curve_of(run, env, bot) if args.curve else []
        env.close()
        write(run, rows, curve)


def write(run: TrainedRun, rows: list[Row], curve: list[tuple[float, float, float]]) -> None:
    if curve:
        draw_curve(NAME.replace("-", "_"), curve, "won against the script bot, %", {"half": 50.0}, "ViZDoom duel: checkpoints")
    note = f"{run.note} Matches of 15 s; seeds from {FIRST_SEED:,}."
    write_report(NAME, "ViZDoom duel", COLUMNS, rows, note=note, curve=curve)


if __name__ == "__main__":
    main()
