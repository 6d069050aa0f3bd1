"""0 A.D.: the preset `zero-ad-skirmish` against scripts.

    python -m bench.flagships.zero_ad [--seconds 780]          (trains and measures; needs the packages 0ad and 0ad-data)
    python -m bench.flagships.zero_ad --run RUN                (measures a run that exists)

Five soldiers a side. A match is won by the team with the higher return: hitpoints taken minus hitpoints lost, and the last enemy. The policy
samples its actions, as in training. The learning curve is the return of a soldier in training, against both scripts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from bench.flagships.report import Row, draw_curve, train_preset, write_report
from bench.flagships.vector_matches import (
    Player,
    load_policy,
    play_matches,
    policy_player,
    random_player,
    result_row,
    script_player,
    trained_run,
)
from ludus.games.zero_ad.env import SkirmishEnv
from ludus.games.zero_ad.scripts import attack_nearest, attack_weakest

PRESET = "zero-ad-skirmish"
NEAREST, WEAKEST, RANDOM = "attack nearest (script)", "attack weakest (script)", "random"
COLUMNS = ("player", "opponent", "matches", "won, % [95 %]", "drawn", "lost", "return [95 %]", "beaten")


def measure(env: SkirmishEnv, player: str, own: Player, opponent: str, other: Player, seed: int) -> Row:
    """One match in each place of the environment, half of them as blue."""
    return result_row(player, opponent, play_matches(env, own, other, seed), COLUMNS[-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=780)
    parser.add_argument("--matches", type=int, default=128)
    parser.add_argument("--run", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="zero-ad-") as folder:
        if args.run is None:
            run = train_preset(PRESET, Path(folder), "--stop", f"time_s={args.seconds}", "--set", "evaluation_interval=0")
        else:
            run = trained_run(args.run)
        env = SkirmishEnv(args.matches, matches_per_game=32)
        try:
            learned = f"preset `{PRESET}`"
            policy = policy_player(load_policy(run.directory), 1)
            scripts = {NEAREST: script_player(attack_nearest), WEAKEST: script_player(attack_weakest)}
            chance = random_player(int(env.single_action_space.n), 1)  # type: ignore[attr-defined]
            rows = [measure(env, learned, policy, name, script, 1) for name, script in scripts.items()]
            rows.append(measure(env, WEAKEST, scripts[WEAKEST], NEAREST, scripts[NEAREST], 2))
            rows.append(measure(env, RANDOM, chance, NEAREST, scripts[NEAREST], 3))
        finally:
            env.close()
        soldiers = len(env.possible_agents) // 2
        curve = [(seconds, steps, value / soldiers) for seconds, steps, value in run.reports("episode_return_mean")]
        levels = {"attack weakest": rows[2]["gain"] / 2}  # and 0 against itself: the opponents of training are drawn from both
        draw_curve("zero_ad", curve, "return of a match against the scripts", levels, "0 A.D., five soldiers a side")
        note = f"{run.note} Actions are sampled. Decisions every second of game time; matches of at most 90 s."
        write_report("zero-ad", "0 A.D., five soldiers a side", COLUMNS, rows, note=note, curve=curve)


if __name__ == "__main__":
    main()
