"""What the coordinator publishes for the samplers."""

from __future__ import annotations

from pathlib import Path

from ludus.league.events import PlayerTrained, SnapshotTaken
from ludus.league.journal import LeagueJournal
from ludus.league.runtime.coordinator import Coordinator, add_players
from ludus.league.runtime.league_file import LeagueConfig
from ludus.league.runtime.workers import LeagueWorkers
from ludus.sampling.league_files import LeagueOpponent, read_matchmaking


def test_opponents_are_published_with_their_generation(tmp_path: Path) -> None:
    players = {"main": {}, "hunter": {"role": "main_exploiter"}}
    data = {"env": "none", "players": players, "parallel": 0, "matchmaking": {"scheme": "round_robin"}}
    config = LeagueConfig.model_validate(data)
    journal = LeagueJournal(tmp_path, config.settings())
    add_players(journal, config, dict.fromkeys(players, ""), lambda line: None)
    for event in (
        PlayerTrained("hunter", 100, "players/hunter/g0@1"),
        SnapshotTaken("hunter", "hunter.1", "players/hunter.1@1", reset=True),
        PlayerTrained("hunter", 200, "players/hunter/g1@1"),
    ):
        assert journal.apply(event) is None
    with LeagueWorkers(tmp_path, {}) as workers:
        coordinator = Coordinator(journal, config, workers, lambda line: None)
        coordinator.step()
        coordinator._metrics.close()
    journal.close()
    published = read_matchmaking(tmp_path, "main")
    assert published is not None
    assert set(published.opponents) == {
        LeagueOpponent("hunter", "players/hunter/g1@1", 0.5, generation=1),
        LeagueOpponent("hunter.1", "players/hunter.1@1", 0.5, generation=0),
    }
