"""Hot updates under load: new checkpoints reach a service with thousands of open recurrent sessions, and every reply is checked.

Two ways to serve them. *Kept*: all versions may live side by side, so a session stays with the version that it began with; the
load generator compares every reply of every session. *Moved*: two versions may live (the default), so the oldest sessions move to
the newest version and take their recurrent state along; the replies of a sample of sessions are explained here, tick by tick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.serving import agents, generator, services
from bench.serving.agents import Array, Traffic
from bench.serving.generator import Driven, Load, percentile_ms
from bench.serving.process import serving
from bench.serving.stacks import Stack
from bench.train import Row
from ludus.models.policy import Policy

MATCH = 24
DURING_S = 5.0
SLICE_S = 0.25
CLOSE = 1e-3  # logits this near to the best are as good as it: a batch of another size rounds differently
MOST_HYPOTHESES = 24


@dataclass(frozen=True)
class Plan:
    sessions: int = 10_000
    connections: int = 64
    rate: float = 0.0
    quiet_s: float = 15.0
    gap_s: float = 10.0
    versions: int = 4
    live: int = 8
    """How many versions may live side by side."""
    traced: int = 500
    workers: int = 1
    backend: str = "torch"

    @property
    def name(self) -> str:
        kept = "kept" if self.live >= self.versions else "moved"
        return f"{kept}, {f'{self.rate:,.0f} ticks/s' if self.rate else 'closed loop'}, {self.workers} worker{'s'[: self.workers - 1]}"

    def stack(self, agent: services.Served) -> Stack:
        options = ("--follow", "--max-live-versions", str(self.live))
        return services.ludus(agent, self.backend, options, workers=self.workers, pinned=self.workers == 1)

    @property
    def seconds(self) -> float:
        return self.quiet_s + self.gap_s * (self.versions - 1)


@dataclass
class Drops:
    """Writes the next version into the run now and then, and remembers when."""

    run: Path
    policies: list[Policy]
    plan: Plan
    at: dict[int, float] = field(default_factory=dict)

    def __call__(self) -> None:
        time.sleep(self.plan.quiet_s)
        for number in range(1, self.plan.versions):
            agents.write_checkpoint(self.run, self.policies[number], number + 1)
            self.at[number] = time.monotonic()
            time.sleep(self.plan.gap_s - 1.0)


def measure(plan: Plan, agent: services.Served, policies: list[Policy], binary: Path, busy: Callable[[], float]) -> Row:
    """`agent` is a fresh run with the first of the policies. Raises ServerFailed."""
    traffic = agents.make_traffic("lstm", policies, MATCH)
    drops = Drops(agent.run, policies, plan)
    with serving(plan.stack(agent)) as server:
        load = Load(traffic, plan.connections, plan.seconds, "u", plan.sessions, plan.rate, SLICE_S, plan.traced)
        driven = generator.drive(binary, server, load, busy, drops)
    return _row(plan, driven, drops, traffic, policies)


def _row(plan: Plan, driven: Driven, drops: Drops, traffic: Traffic, policies: list[Policy]) -> Row:
    row, window = driven.row, driven.row["window_s"]
    found = {
        "what": plan.name,
        "backend": plan.backend,
        "sessions": plan.sessions,
        "connections": plan.connections,
        "updates": len(drops.at),
        "ticks": row["ticks"],
        "requests_per_s": round(row["requests"] / window, 1),
        "failed": sum(row[kind] for kind in ("bad_status", "wrong", "transport", "lost")),
        "example": row["example"],
        "matches_by_version": row["matches"],
        "undecided": row["undecided"],
        "foreign_cores": round((row["busy_s"] - row["server_cpu_s"] - row["cpu_s"]) / window, 3),
    }
    explained = explain(driven.trace, traffic, policies, drops.at)
    found |= {"traced_sessions": explained.sessions, "traced_ticks": explained.ticks, "moves": explained.moves}
    found["wrong_state"] = explained.wrong + (row["strayed"] if plan.live >= plan.versions else 0)
    if plan.live < plan.versions:
        found["left_their_version"] = row["strayed"]
    return found | _latencies(driven, drops)


def _latencies(driven: Driven, drops: Drops) -> Row:
    times = (np.arange(len(driven.slices)) + 0.5) * SLICE_S
    starts = [at - driven.began for at in drops.at.values()]
    before = times < min(starts)
    during = np.zeros(len(times), bool)
    for start in starts:
        during |= (times >= start) & (times < start + DURING_S)
    quiet, busy = driven.slices[before].sum(axis=0), driven.slices[during].sum(axis=0)
    p99_before, p99_during = percentile_ms(quiet, 0.99), percentile_ms(busy, 0.99)
    return {
        "p50_before_ms": round(percentile_ms(quiet, 0.5), 3),
        "p99_before_ms": round(p99_before, 3),
        "p99_during_ms": round(p99_during, 3),
        "ratio": round(p99_during / p99_before, 3),
        "max_before_ms": round(percentile_ms(quiet, 1 - 1e-9), 2),
        "max_during_ms": round(percentile_ms(busy, 1 - 1e-9), 2),
        "worst_slice_p99_ms": round(max(percentile_ms(counts, 0.99) for counts in driven.slices[during] if counts.sum()), 2),
    }


# -- what the replies of a session mean -----------------------------------------------------------------------------------


class Explained(NamedTuple):
    sessions: int
    ticks: int
    moves: int
    wrong: int
    """Matches with a reply that no version explains."""


@dataclass(frozen=True)
class _Game:
    """One match as it was seen."""

    lane: int
    first: bool
    """It began when there was only one version."""
    actions: Array
    sent: Array
    got: Array


class _Hypothesis(NamedTuple):
    game: int
    version: int
    state: tuple[Array, ...]
    moves: int


def explain(trace: Array, traffic: Traffic, policies: list[Policy], drops: dict[int, float]) -> Explained:
    """Whether every match can be the play of one version after another, each taking over the state of the one before.

    A match may begin with any version that was there; it may move to a newer one between two ticks, soon after that one came.
    """
    games = _games(trace, len(traffic.bodies) // traffic.match)
    seen = traffic.bodies.reshape(-1, traffic.match, traffic.bodies.shape[1])[:, :, 8:]
    observed = np.ascontiguousarray(seen).view("<f4")
    zero = tuple(np.zeros(256, np.float32) for _ in range(2))
    alive = [
        _Hypothesis(number, version, zero, 0)
        for number, game in enumerate(games)
        for version in range(len(policies))
        if version == 0 or (not game.first and drops[version] <= game.got[0])
    ]
    ended: dict[int, int] = {}
    for tick in range(traffic.match):
        for hypothesis in alive:
            if len(games[hypothesis.game].actions) == tick:
                ended[hypothesis.game] = min(hypothesis.moves, ended.get(hypothesis.game, 99))
        playing = [hypothesis for hypothesis in alive if len(games[hypothesis.game].actions) > tick]
        alive = _stepped([*playing, *_moved(playing, games, tick, drops)], games, tick, observed, policies)
    for hypothesis in alive:
        ended[hypothesis.game] = min(hypothesis.moves, ended.get(hypothesis.game, 99))
    sessions = len(np.unique(trace["session"]))
    return Explained(sessions, sum(len(game.actions) for game in games), sum(ended.values()), len(games) - len(ended))


def _games(trace: Array, lanes: int) -> list[_Game]:
    good = trace[trace["status"] == 200]
    order = np.lexsort((good["tick"], good["match"], good["session"]))
    rows = good[order]
    breaks = np.flatnonzero((np.diff(rows["session"]) != 0) | (np.diff(rows["match"].astype(np.int64)) != 0)) + 1
    games = []
    for part in np.split(rows, breaks):
        if len(part):
            lane = int(part["session"][0] + part["match"][0]) % lanes
            times = part["sent"] / 1e9, part["got"] / 1e9
            games.append(_Game(lane, part["match"][0] == 0, part["action"], *times))
    return games


def _moved(playing: list[_Hypothesis], games: list[_Game], tick: int, drops: dict[int, float]) -> list[_Hypothesis]:
    if tick == 0:
        return []
    return [
        _Hypothesis(old.game, version, old.state, old.moves + 1)
        for old in playing
        for version, at in drops.items()
        if version > old.version and at <= games[old.game].got[tick] and games[old.game].got[tick - 1] <= at + DURING_S
    ]


def _stepped(
    asked: list[_Hypothesis], games: list[_Game], tick: int, observed: Array, policies: list[Policy]
) -> list[_Hypothesis]:
    """Those that would have given the reply of this tick, with the state after it."""
    kept: list[_Hypothesis] = []
    for version, policy in enumerate(policies):
        own = [hypothesis for hypothesis in asked if hypothesis.version == version]
        if not own:
            continue
        seen = np.stack([observed[games[h.game].lane, tick] for h in own])
        state = tuple(np.stack(part) for part in zip(*(h.state for h in own), strict=True))
        outputs, after = agents._outputs(policy, seen, state)
        actions = np.array([games[h.game].actions[tick] for h in own])
        right = outputs[np.arange(len(own)), actions] >= outputs.max(axis=1) - CLOSE
        kept += [h._replace(state=tuple(part[row] for part in after)) for row, h in enumerate(own) if right[row]]
    counts: dict[int, int] = {}
    few = []
    for hypothesis in sorted(kept, key=lambda h: h.moves):
        counts[hypothesis.game] = counts.get(hypothesis.game, 0) + 1
        if counts[hypothesis.game] <= MOST_HYPOTHESES:
            few.append(hypothesis)
    return few


def table(rows: list[Row]) -> str:
    lines = [
        "| update | sessions | ticks | failed | wrong state | traced: ticks, moves | requests/s | p99 before ms | during ms | ratio | others, cores |",
        "|---|" + "---:|" * 10,
    ]
    for row in rows:
        lines.append(
            f"| {row['what']} | {row['sessions']:,} | {row['ticks']:,} | {row['failed']} | {row['wrong_state']} "
            f"| {row['traced_ticks']:,}, {row['moves']:,} | {row['requests_per_s']:,.0f} | {row['p99_before_ms']:.2f} "
            f"| {row['p99_during_ms']:.2f} | {row['ratio']:.2f} | {max(0.0, row['foreign_cores']):.2f} |"
        )
    return "\n".join(lines)
