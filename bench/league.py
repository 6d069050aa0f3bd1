"""What a large league costs: its coordinator, samplers and restart, with synthetic players and no learning.

    python -m bench.league [--players 1000] [--results 1000000]        (a few minutes)

The real coordinator reads reports and publishes opponents. Twelve samplers, one for each training player, draw opponents with the
published probabilities and report results; a thirteenth source reports matches between snapshots. Players have a hidden strength, and a
match is won with the probability that their strengths give. Times are given per tenth of the run. With 1,000 players the number of pairs
that have met grows all the time; with --players 100 all have met after the first tenth, and a cost that grew with the age of the
league alone would show.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.train import RESULTS, provenance
from ludus.league.events import PlayerAdded
from ludus.league.journal import LeagueJournal
from ludus.league.players import Player, PlayerRole
from ludus.league.runtime.coordinator import Coordinator
from ludus.league.runtime.league_file import LeagueConfig
from ludus.league.runtime.player_models import EVALUATION
from ludus.league.runtime.workers import LeagueWorkers
from ludus.sampling.league_files import MatchmakingWatch, ResultSpool

ROLES = [PlayerRole.MAIN] * 3 + [PlayerRole.MAIN_EXPLOITER] * 3 + [PlayerRole.LEAGUE_EXPLOITER] * 6
LEARNING = {f"{role.value}_{i}": role for i, role in enumerate(ROLES)}
SLOTS, MATCHES = 8, 64
"""Opponents of a sampler, and its matches, between two reports."""
ROUND = 2 * MATCHES * len(LEARNING)
"""Results between two steps of the coordinator; one half are matches between snapshots."""
PARTS = 10
PLAYERS = 1000


def add_players(journal: LeagueJournal, count: int) -> list[str]:
    players = [Player(name, role, f"players/{name}/g0@1") for name, role in LEARNING.items()]
    for i in range(count - len(LEARNING)):
        parent = players[i % len(LEARNING)]
        name = f"{parent.name}.{i // len(LEARNING) + 1}"
        players.append(Player(name, PlayerRole.HISTORICAL, f"players/{name}@1", parent=parent.name, parent_role=parent.role))
    for player in players:
        journal.apply(PlayerAdded(player))
    return [player.name for player in players]


class Stopwatch:
    """Wall and CPU time of a block, per use. On a busy machine the wall time includes that of other programs."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.thread_time()

    def __exit__(self, *exc: object) -> None:
        self._cpu.append(time.thread_time() - self._began[1])
        self._wall.append(time.perf_counter() - self._began[0])

    def statistics(self) -> dict[str, float]:
        wall, cpu = 1e3 * np.array(self._wall), 1e3 * np.array(self._cpu)
        return {
            "median": float(np.median(wall)),
            "mean": float(wall.mean()),
            "p99": float(np.quantile(wall, 0.99)),
            "max": float(wall.max()),
            "CPU mean": float(cpu.mean()),
            "CPU p99": float(np.quantile(cpu, 0.99)),
        }


class Matches:
    """Invented results."""

    def __init__(self, names: Sequence[str], random: np.random.Generator) -> None:
        self._random = random
        self._strength = dict(zip(names, random.normal(size=len(names)), strict=True))
        self._settled = [name for name in names if name not in LEARNING]

    def play(self, spool: ResultSpool, player: str, opponent: str, matches: int) -> None:
        chance = 1 / (1 + np.exp(self._strength[opponent] - self._strength[player]))
        for won in self._random.random(matches) < chance:
            spool.add(player, opponent, 0, float(won), 2.0 * won - 1.0)

    def draw_pair(self) -> tuple[str, str]:
        one, other = self._random.choice(len(self._settled), size=2, replace=False)
        return self._settled[one], self._settled[other]


class Sampler:
    """The part of a sampling process that concerns the league."""

    def __init__(self, league: Path, player: str, random: np.random.Generator) -> None:
        self._player, self._random = player, random
        self._watch, self._spool = MatchmakingWatch(league, player), ResultSpool(league, player)

    def play(self, matches: Matches, drawing: Stopwatch) -> None:
        with drawing:
            self._watch.update()
            assert self._watch.current is not None
            known = self._watch.current.opponents
            drawn = self._random.choice(len(known), size=SLOTS, p=[one.probability for one in known])
        for opponent in drawn:
            matches.play(self._spool, self._player, known[opponent].name, MATCHES // SLOTS)
        self._spool.flush()

    def close(self) -> None:
        self._spool.close()


class Clock:
    """Lets every interval of the coordinator end between two of its steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(journal: LeagueJournal, results: int, matches: Matches, seed: int) -> list[dict[str, dict[str, float]]]:
    players = {name: {"role": role.value} for name, role in LEARNING.items()}
    config = LeagueConfig.model_validate({"env": "none", "players": players, "parallel": 0})
    clock, parts = Clock(), []
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(LeagueWorkers(journal.directory, {}))
        coordinator = Coordinator(journal, config, workers, lambda line: None, clock)
        coordinator.step()
        samplers = [Sampler(journal.directory, name, np.random.default_rng([seed, i])) for i, name in enumerate(LEARNING)]
        evaluation = ResultSpool(journal.directory, EVALUATION)
        for source in (*samplers, evaluation):
            stack.callback(source.close)
        for _ in range(PARTS):
            coordinating, drawing = Stopwatch(), Stopwatch()
            for _ in range(-(-results // (PARTS * ROUND))):
                for sampler in samplers:
                    sampler.play(matches, drawing)
                for _ in range(ROUND // 2 // SLOTS):
                    matches.play(evaluation, *matches.draw_pair(), SLOTS)
                evaluation.flush()
                clock.now += 5.0
                before = journal.state.results
                with coordinating:
                    coordinator.step()
                assert journal.state.results == before + ROUND
            parts.append({"coordinator": coordinating.statistics(), "sampler": drawing.statistics()})
            print(json.dumps({what: {k: round(v, 3) for k, v in found.items()} for what, found in parts[-1].items()}), flush=True)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--players", type=int, default=PLAYERS)
    parser.add_argument("--results", type=int, default=1_000_000)
    args = parser.parse_args()
    head = provenance()  # before the run: the tree may change during it
    with tempfile.TemporaryDirectory() as directory:
        journal = LeagueJournal(Path(directory), LeagueConfig.model_validate({"env": "none", "players": {"a": {}}}).settings())
        names = add_players(journal, args.players)
        parts = play(journal, args.results, Matches(names, np.random.default_rng(0)), seed=1)
        before, events = journal.state, journal.events
        journal.close()
        began, cpu_began = time.perf_counter(), time.process_time()
        journal = LeagueJournal(Path(directory))
        restart_s, restart_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        assert journal.state == before
        assert journal.events == events
        journal.close()
        size = sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())
    found = head | {"players": args.players, "results": before.results, "events": events, "parts": parts}
    found |= {"restart_s": round(restart_s, 2), "restart_cpu_s": round(restart_cpu_s, 2), "bytes_on_disk": size}
    name = "league-scale" if args.players == PLAYERS else f"league-scale-{args.players}"
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(report(found))
    print(report(found))


def report(found: dict[str, Any]) -> str:
    lines = [
        f"# A league of {found['players']:,} players and {found['results']:,} results",
        f"{found['date']}, commit {found['commit']}, {found['cpu']}. Other programs ran at the same time: percentiles and maxima "
        "of wall time include waiting for them, CPU time does not.",
        f"Milliseconds per step. In a step the coordinator reads up to {ROUND // SLOTS} reports on {ROUND:,} matches, stores them, updates "
        f"payoff matrix and ratings, and publishes the opponents of {len(LEARNING)} players. Every 20,000 reports it also stores a snapshot "
        f"of the whole state: the maximum. A sampler reads its published opponents and draws {SLOTS} of them.",
        *(_table(found, what) for what in ("coordinator", "sampler")),
        f"Events: {found['events']:,}. Restart: {found['restart_s']:.2f} s ({found['restart_cpu_s']:.2f} s of CPU). "
        f"On disk: {found['bytes_on_disk'] / 1e6:.0f} MB.",
    ]
    return "\n\n".join(lines) + "\n"


def _table(found: dict[str, Any], what: str) -> str:
    columns = list(found["parts"][0][what])
    rows = [f"| {what}, results | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for i, part in enumerate(found["parts"]):
        numbers = " | ".join(f"{part[what][name]:.3f}" for name in columns)
        rows.append(f"| to {(i + 1) * found['results'] // PARTS:,} | {numbers} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
