"""Small leagues with invented results."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ludus.league.events import LeagueEvent, PlayerAdded, PlayerTrained, ResultsReported, SnapshotTaken
from ludus.league.players import Player, PlayerRole
from ludus.league.state import LeagueState, Refusal, step


def apply_all(state: LeagueState, events: Iterable[LeagueEvent]) -> LeagueState:
    for event in events:
        after = step(state, event)
        assert not isinstance(after, Refusal), after.reason
        state = after
    return state


def play_matches(state: LeagueState, player: str, opponent: str, wins: int, draws: int, losses: int) -> LeagueState:
    number = state.reports.get("test", 0) + 1
    return apply_all(state, [ResultsReported("test", number, player, opponent, wins, draws, losses)])


def league_events(families: int, snapshots: int, random: np.random.Generator) -> list[LeagueEvent]:
    """Training players with snapshots that grow stronger, two scripts, and matches between random pairs."""
    events: list[LeagueEvent] = [
        PlayerAdded(Player("easy", PlayerRole.FIXED, "rule:easy", rating=1000.0)),
        PlayerAdded(Player("hard", PlayerRole.FIXED, "rule:hard")),
    ]
    roles = [PlayerRole.MAIN, PlayerRole.MAIN_EXPLOITER, PlayerRole.LEAGUE_EXPLOITER]
    parents = [Player(f"{roles[i % 3].value}_{i}", roles[i % 3]) for i in range(families)]
    events += map(PlayerAdded, parents)
    names, number = ["easy", "hard", *(player.name for player in parents)], 0
    for taken in range(snapshots):
        for player in parents:
            events.append(PlayerTrained(player.name, (taken + 1) * 50_000, ""))
            events.append(SnapshotTaken(player.name, f"{player.name}.{taken + 1}", ""))
            names.append(f"{player.name}.{taken + 1}")
            for _ in range(3):
                own, other = random.choice(names, size=2, replace=False).tolist()
                number += 1
                wins, draws, losses = random.multinomial(10, [0.5, 0.1, 0.4]).tolist()
                events.append(ResultsReported("test", number, own, other, wins, draws, losses))
    return events
