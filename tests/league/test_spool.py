from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from ludus.core import trust
from ludus.errors import NotFound
from ludus.league.events import (
    LeagueEvent,
    PlayerAdded,
    PlayerRetired,
    PlayerTrained,
    ResultsReported,
    SettingsChanged,
    event_to_json,
)
from ludus.league.journal import LeagueJournal, read_owner, read_state
from ludus.league.matchmaking import MatchmakingSettings
from ludus.league.players import Player, PlayerRole
from ludus.league.settings import LeagueSettings, SnapshotRule
from ludus.league.spool import apply_spool, submit_events

PLAYERS = [PlayerAdded(Player(name, PlayerRole.FIXED)) for name in "ab"]
RESULTS = ResultsReported("match-1", 1, "a", "b", 3, 1, 0)


def test_events_are_applied_at_once_if_nobody_runs_the_league(tmp_path: Path) -> None:
    LeagueJournal(tmp_path, LeagueSettings(decay=0.5)).close()
    assert read_owner(tmp_path) == ""
    assert submit_events(tmp_path, [*PLAYERS, RESULTS]) == []
    state = read_state(tmp_path)
    assert state.payoff.record("a", "b")[:3] == (3, 1, 0)
    assert state.settings.decay == 0.5
    (refusal,) = submit_events(tmp_path, [PlayerRetired("c")]) or []
    assert "no player 'c'" in refusal.reason


def test_a_running_coordinator_applies_them_once(tmp_path: Path) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    assert "process" in read_owner(tmp_path)
    assert submit_events(tmp_path, PLAYERS) is None
    assert submit_events(tmp_path, [RESULTS]) is None
    assert apply_spool(journal) == 3
    assert apply_spool(journal) == 0
    # Killed after the journal was written and before the file was deleted: the file is read again.
    (tmp_path / "spool" / "again.json").write_text(json.dumps([event_to_json(RESULTS)]))
    assert apply_spool(journal) == 0
    assert journal.state.results == 4
    assert list((tmp_path / "spool").iterdir()) == []
    journal.close()


def test_what_a_stopped_coordinator_left_comes_first(tmp_path: Path) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    submit_events(tmp_path, PLAYERS)
    journal.close()
    assert submit_events(tmp_path, [RESULTS]) == []
    assert read_state(tmp_path).results == 4


@pytest.mark.parametrize("content", ["{", "[1]", '{"event": 1}', '[{"event": "Nonsense"}]', '[{"event": "PlayerRetired"}]'])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: str) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    submit_events(tmp_path, PLAYERS)
    (tmp_path / "spool" / "0.json").write_text(content)
    assert apply_spool(journal) == 2
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["0.damaged"]
    journal.close()


TOKEN_EVENTS = [
    PlayerAdded(Player("live", PlayerRole.FIXED, "http://10.0.0.1:80", token_file="/home/me/secret")),
    PlayerTrained("served", 0, "http://10.0.0.1:80", "/home/me/secret"),
]


@pytest.mark.parametrize("event", TOKEN_EVENTS)
def test_a_token_file_of_another_process_needs_the_consent_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: LeagueEvent
) -> None:
    """The content of the file would be sent to the address."""
    monkeypatch.setenv(trust.VARIABLE, "")
    journal = LeagueJournal(tmp_path, LeagueSettings())
    journal.apply(PlayerAdded(Player("served", PlayerRole.FIXED, "http://localhost:80")))
    before = journal.state
    for address, file in {"http://10.0.0.1:81": "/home/me/secret", "http://10.0.0.1:80": "/home/me/token"}.items():
        trust.allow_token(address, file)
    submit_events(tmp_path, [event])
    assert apply_spool(journal) == 0
    assert journal.state == before
    trust.allow_token("http://10.0.0.1:80", "/home/me/secret")
    submit_events(tmp_path, [event])
    assert apply_spool(journal) == 1
    journal.close()


def test_settings_are_read_back(tmp_path: Path) -> None:
    settings = LeagueSettings(
        MatchmakingSettings("pfsp", "variance", latest=0.6),
        {PlayerRole.MAIN: SnapshotRule(1, 2, 0.6, 0.5)},
        seed=3,
        rating_window=50,
    )
    LeagueJournal(tmp_path, settings).close()
    assert read_state(tmp_path).settings == settings
    with pytest.raises(NotFound, match="There is no league"):
        read_state(tmp_path / "other")


@pytest.mark.parametrize(
    "event",
    [
        event_to_json(RESULTS) | {"gain": math.nan, "number": 2},
        event_to_json(RESULTS) | {"wins": 10**400, "number": 2},
        {"event": "PlayerAdded", "player": {"name": "c", "role": "fixed", "rating": math.nan}},
    ],
)
def test_numbers_out_of_range_are_refused_and_the_coordinator_goes_on(tmp_path: Path, event: dict[str, object]) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    submit_events(tmp_path, [*PLAYERS, RESULTS])
    (tmp_path / "spool" / "bad.json").write_text(json.dumps([event]))
    assert apply_spool(journal) == 3
    assert list((tmp_path / "spool").iterdir()) == []
    assert journal.state.results == 4
    journal.close()


@pytest.mark.parametrize(
    "event",
    [
        event_to_json(RESULTS) | {"losses": "x"},
        event_to_json(RESULTS) | {"wins": True},
        {"event": "PlayerTrained", "name": "a", "steps": 5, "model": 3},
        {"event": "PlayerAdded", "player": {"name": "c", "role": "fixed", "steps": None}},
        event_to_json(SettingsChanged(LeagueSettings(elo_k=1.0))),
        {"event": "PlayerAdded", "player": {"name": "../../precious", "role": "fixed", "model": "/a/run"}},
    ],
)
def test_an_event_with_a_value_of_another_type_is_put_aside(tmp_path: Path, event: dict[str, object]) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    submit_events(tmp_path, PLAYERS)
    apply_spool(journal)
    before = journal.state
    (tmp_path / "spool" / "bad.json").write_text(json.dumps([event]))
    assert apply_spool(journal) == 0
    assert (tmp_path / "spool" / "bad.damaged").exists()
    assert journal.state == before
    journal.close()
