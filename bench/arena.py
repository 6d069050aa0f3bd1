"""Strength of the Arena's bots against each other, and decisions per second on one core.

    python -m bench.arena --ladder           400 games of every pair, 1v1 and 3v3 (about 10 minutes)
    python -m bench.arena --speed            (about 3 minutes)

The ladder: random line-ups, each bot once in each camp; a match at the time limit is a draw. Speed: uniformly random orders, of
which many are illegal; invalid targets are replaced by the nearest valid one, and every step builds observations and masks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.train import RESULTS, Row, provenance, spread
from ludus.core.types import Ints32
from ludus.games.arena.bots.bots import BOTS
from ludus.games.arena.bots.round_robin import PAIRS, BotMatch, PairResult, play, play_pairs
from ludus.games.arena.engine.geometry import distance
from ludus.games.arena.engine.heroes import HEROES, IDS
from ludus.games.arena.engine.jit import inner, kernel
from ludus.games.arena.engine.layout import ALIVE, CAMP, SEEN, X, Y
from ludus.games.arena.engine.vector import Arena

GOALS = {
    ("hard", "medium"): (0.70, 1.0),
    ("medium", "easy"): (0.80, 1.0),
    ("random", "medium"): (0.0, 0.02),
    ("nearest", "medium"): (0.0, 0.25),
}
SIZES = (1, 3)
AT_ONCE = (1, 64)
DECISIONS = {1: 5_000, 64: 20_000}
"""Goals: decisions per second on one core, by number of matches."""
UNCOMPILED_S = 600.0


# -- the ladder -------------------------------------------------------------------------------------------------------


def play_hero_pairs(games: int, seed: int, bot: str = "hard") -> dict[str, Any]:
    """Play every hero against every other, 1v1, `games` per pair, half from each side. `wins[i][j]`: wins of i over j."""
    rng = np.random.default_rng(seed)
    matches, who = [], []
    for i in range(len(IDS)):
        for j in range(i):
            for number in range(games):
                a, b = (i, j) if number % 2 == 0 else (j, i)
                matches.append(BotMatch((bot, bot), ((IDS[a],), (IDS[b],)), int(rng.integers(1 << 31))))
                who.append((a, b))
    winners, seconds = play(matches, 1)
    wins = np.zeros((len(IDS), len(IDS)), np.int64)
    for (a, b), winner in zip(who, winners, strict=True):
        if winner >= 0:
            wins[(a, b)[winner], (b, a)[winner]] += 1
    decided = wins + wins.T
    return {
        "heroes": [hero.name for hero in HEROES],
        "wins": wins.tolist(),
        "rate": {hero.name: round(float(wins[k].sum() / max(1, decided[k].sum())), 3) for k, hero in enumerate(HEROES)},
        "drawn": int(sum(winner < 0 for winner in winners)),
        "games": len(matches),
        "median_s": statistics.median(seconds),
    }


def ladder_table(standings: Sequence[PairResult]) -> str:
    lines = [
        "| | mode | games | won | lost | time up | won, % [95 %] | goal | median length, s [quartiles] |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for standing in standings:
        low, high = standing.bounds
        q1, q2, q3 = standing.row()["seconds"]
        goal = "–"
        if standing.pair in GOALS:
            least, most = GOALS[standing.pair]
            goal = f"{'≥' if least else '≤'} {100 * (least or most):.0f} %: {'reached' if least <= standing.rate <= most else 'missed'}"
        lines.append(
            f"| {standing.pair[0]} against {standing.pair[1]} | {standing.size}v{standing.size} | {standing.games} | {standing.won} | "
            f"{standing.lost} | {standing.drawn} | {100 * standing.rate:.1f} [{100 * low:.1f}–{100 * high:.1f}] | {goal} | {q2} [{q1}–{q3}] |"
        )
    return "\n".join(lines)


def heroes_table(found: Row) -> str:
    names = found["heroes"]
    lines = [f"| won by ↓ over → | {' | '.join(names)} | of those decided, % |", f"|---|{'---:|' * (len(names) + 1)}"]
    for name, row in zip(names, found["wins"], strict=True):
        lines.append(f"| {name} | {' | '.join(map(str, row))} | {100 * found['rate'][name]:.0f} |")
    return "\n".join(lines)


def run_ladder(games: int, seed: int) -> bool:
    """Run the ladder; return whether all goals are reached."""
    standings = []
    for size in SIZES:
        for pair in PAIRS:
            standings += play_pairs(games, size, seed, (pair,))
            print(json.dumps(standings[-1].row()), flush=True)
    found = play_hero_pairs(max(2, games // 10), seed)
    head = provenance()
    page = (
        f"# The ladder of the Arena's bots\n\n{head['date']}, commit {head['commit']}, {head['cpu']}\n\n"
        f"Random line-ups, each played by both bots; seed {seed}. Won: the base destroyed; after 480 seconds of game time a draw. "
        f"Intervals: Wilson.\n\n{ladder_table(standings)}\n\n"
        f"Heroes, 1v1, hard against hard, {found['games']} games, {found['drawn']} of them ended by time:\n\n{heroes_table(found)}\n"
    )
    if games >= 400:
        rows = [standing.row() for standing in standings]
        (RESULTS / "arena-ladder.json").write_text(json.dumps(head | {"seed": seed, "rows": rows, "heroes": found}, indent=1))
        (RESULTS / "arena-ladder.md").write_text(page)
    print(f"\n{page}")
    return all(GOALS[s.pair][0] <= s.rate <= GOALS[s.pair][1] for s in standings if s.pair in GOALS)


# -- speed ------------------------------------------------------------------------------------------------------------


def decisions(size: int, matches: int, seconds: float) -> float:
    """Return hero decisions per second, with observations and masks; orders are drawn beforehand."""
    arena = Arena(size, matches, lenient=True)
    arena.reset(range(matches))
    rng = np.random.default_rng(0)
    orders = rng.integers(0, [8, 16, 16, arena.slots], (64, matches, arena.heroes, 4)).astype(np.int32)
    done, began, used = 0, time.process_time(), 0.0
    while used < seconds:
        arena.step(orders[done % len(orders)])
        arena.observe()
        if arena.over.any():
            over = np.flatnonzero(arena.over)
            arena.reset(over + done, over.tolist())
        done += 1
        used = time.process_time() - began
    return done * matches * arena.heroes / used


@inner
def _nearest(units: Ints32, out: Ints32) -> None:
    for i in range(units.shape[1]):
        best, best_far = -1, 1 << 40
        for j in range(units.shape[1]):
            if units[ALIVE, i] == 1 and units[ALIVE, j] == 1 and units[CAMP, i] != units[CAMP, j] and units[SEEN, j] == 1:
                far = distance(units, i, j)
                if far < best_far:
                    best, best_far = j, far
        out[i] = best


@kernel
def nearest_compiled(units: Ints32, out: Ints32) -> None:
    """Find the nearest enemy of every unit, compiled."""
    for m in range(units.shape[0]):
        _nearest(units[m], out[m])


def nearest_numpy(units: Ints32, out: Ints32) -> None:
    """Find the nearest enemy of every unit with NumPy, for all matches at once."""
    x, y = units[:, X].astype(np.int64), units[:, Y].astype(np.int64)
    far = (x[:, :, None] - x[:, None]) ** 2 + (y[:, :, None] - y[:, None]) ** 2
    alive, camp = units[:, ALIVE] == 1, units[:, CAMP]
    fits = alive[:, :, None] & (alive & (units[:, SEEN] == 1))[:, None] & (camp[:, :, None] != camp[:, None])
    far[~fits] = 1 << 60
    out[:] = np.where(fits.any(-1), far.argmin(-1), -1)


def part(matches: int, seconds: float, function: Callable[[Ints32, Ints32], None]) -> float:
    """Return microseconds per match for nearest enemies in the middle of a 3v3."""
    arena = Arena(3, matches)
    arena.reset(range(matches))
    who = np.full((matches, 6), BOTS.index("medium"), np.int8)
    for _ in range(150):
        arena.step(arena.bot_actions(who))
    out = np.zeros((matches, arena.slots), np.int32)
    function(arena.units, out)
    done, began, used = 0, time.process_time(), 0.0
    while used < seconds:
        function(arena.units, out)
        done += 1
        used = time.process_time() - began
    return 1e6 * used / (done * matches)


def agree() -> None:
    """Check that both forms find targets at the same distance."""
    arena = Arena(3, 8)
    arena.reset(range(8))
    who = np.full((8, 6), BOTS.index("medium"), np.int8)
    for _ in range(150):
        arena.step(arena.bot_actions(who))
    found = [np.zeros((8, arena.slots), np.int32) for _ in range(2)]
    nearest_compiled(arena.units, found[0])
    nearest_numpy(arena.units, found[1])
    far = [
        (arena.units[:, X] - np.take_along_axis(arena.units[:, X], f, 1)).astype(np.int64) ** 2
        + (arena.units[:, Y] - np.take_along_axis(arena.units[:, Y], f, 1)).astype(np.int64) ** 2
        for f in found
    ]
    # Square roots are rounded down, so that squares may differ slightly.
    if not np.array_equal(np.sqrt(far[0]).astype(int), np.sqrt(far[1]).astype(int)):
        raise SystemExit("the compiled and the numpy form do not find the same targets")


def uncompiled(size: int, matches: int) -> float:
    """Return decisions per second without compilation, in a separate process."""
    code = f"from bench.arena import decisions; print(decisions({size}, {matches}, 5.0))"
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=UNCOMPILED_S)
    return float(ended.stdout) if ended.returncode == 0 else float("nan")


def run_speed(rounds: int, seconds: float) -> bool:
    """Run the speed measurements; return whether the goals are reached."""
    agree()
    rows: list[Row] = []
    measures: list[tuple[dict[str, Any], Callable[[], float]]] = [
        ({"what": "decisions/s", "size": size, "matches": m}, lambda size=size, m=m: decisions(size, m, seconds))  # type: ignore[misc]
        for size in SIZES
        for m in AT_ONCE
    ]
    for name, function in (("compiled", nearest_compiled), ("numpy", nearest_numpy)):
        measures += [
            ({"what": f"nearest, µs a match, {name}", "size": 3, "matches": m}, lambda m=m, f=function: part(m, seconds / 3, f))  # type: ignore[misc]
            for m in AT_ONCE
        ]
    for number in range(rounds + 1):  # the first round is a warm-up
        for label, measure in measures:
            row = label | {"round": number, "value": round(measure(), 3)}
            print(json.dumps(row), flush=True)
            if number:
                rows.append(row)
    for size in SIZES:
        rows += [
            {"what": "decisions/s, uncompiled", "size": size, "matches": m, "round": 1, "value": uncompiled(size, m)}
            for m in AT_ONCE
        ]
    lines = ["| | mode | matches at once | median [quartiles] | goal |", "|---|---|---:|---:|---|"]
    reached = True
    for what, size, m in dict.fromkeys((row["what"], row["size"], row["matches"]) for row in rows):
        values = [row["value"] for row in rows if (row["what"], row["size"], row["matches"]) == (what, size, m)]
        goal = "–"
        if what == "decisions/s":
            met = statistics.median(values) >= DECISIONS[m]
            reached = reached and met
            goal = f"≥ {DECISIONS[m]:,}: {'reached' if met else 'missed'}"
        lines.append(f"| {what} | {size}v{size} | {m} | {spread(values, 1 if 'µs' in what else 0)} | {goal} |")
    head = provenance()
    page = (
        f"# Speed of the Arena\n\n{head['date']}, commit {head['commit']}, {head['cpu']}\n\nOne core, CPU time; {rounds} interleaved rounds. "
        "Decisions of heroes, all counted, with observations and masks built; orders drawn at random, many of them refused. "
        "Uncompiled: one run of 5 s each, no spread. Nearest: the nearest enemy of every unit, a part of the "
        "rules, compiled and as numpy over all matches at once: the measurement behind choosing a compiler.\n\n"
        + "\n".join(lines)
        + "\n"
    )
    if rounds >= 5:
        (RESULTS / "arena-speed.json").write_text(json.dumps(head | {"rows": rows}, indent=1))
        (RESULTS / "arena-speed.md").write_text(page)
    print(f"\n{page}")
    return reached


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--games", type=int, default=400, help="Of every pair and mode; results of fewer than 400 are not kept.")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=7, help="Results of fewer than 5 are not kept.")
    parser.add_argument("--seconds", type=float, default=2.0, help="Of CPU for each measurement.")
    args = parser.parse_args(argv)
    if not args.play_pairs and not args.speed:
        parser.error("--ladder, --speed, or both")
    reached = [run_ladder(args.games, args.seed)] if args.play_pairs else []
    reached += [run_speed(args.rounds, args.seconds)] if args.speed else []
    return int(not all(reached))


if __name__ == "__main__":
    sys.exit(main())
