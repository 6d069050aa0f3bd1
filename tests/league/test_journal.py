from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from ludus.errors import Damaged, Fenced, NotFound, StoreFull
from ludus.league.events import PlayerAdded, PlayerQuarantined, ResultsReported, SettingsChanged
from ludus.league.history import rating_history
from ludus.league.journal import LeagueJournal, read_events, read_state
from ludus.league.players import Player, PlayerRole
from ludus.league.settings import LeagueSettings

RELEASE = Path(__file__).parents[1] / "old" / "release-0.1" / "league"


def fill(journal: LeagueJournal, reports: int) -> None:
    """Add players, and reports of one match each."""
    if not journal.state.players:
        for name in "abc":
            assert journal.apply(PlayerAdded(Player(name, PlayerRole.MAIN))) is None
    for _ in range(reports):
        number = journal.state.reports.get("test", 0) + 1
        assert journal.apply(ResultsReported("test", number, "a", "bc"[number % 2], 1, 0, 0)) is None


def test_a_restart_finds_the_same_state_with_and_without_snapshots(tmp_path: Path) -> None:
    for every in (7, 1000):
        journal = LeagueJournal(tmp_path / str(every), LeagueSettings(), snapshot_every=every)
        fill(journal, 20)
        journal.close()
        again = LeagueJournal(tmp_path / str(every), LeagueSettings(), snapshot_every=every)
        assert again.state == journal.state
        assert again.events == len(list(read_events(tmp_path / str(every)))) == 24  # the settings, three players, twenty reports
        fill(again, 1)
        assert again.events == 25
        again.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    fill(journal, 3)
    with pytest.raises(Fenced, match=f"process {os.getpid()}"):
        LeagueJournal(tmp_path, LeagueSettings())
    assert read_state(tmp_path).results == 3
    journal.close()
    LeagueJournal(tmp_path, LeagueSettings()).close()


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreFull, match="Cannot write to"):
        LeagueJournal(tmp_path / "file", LeagueSettings())


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    fill(journal, 3)
    journal.close()
    (segment,) = (tmp_path / "journal").glob("*.jsonl")
    with open(segment, "ab") as file:
        file.write(b'{"event": "ResultsRep')
    again = LeagueJournal(tmp_path, LeagueSettings())
    assert again.state == journal.state
    fill(again, 1)
    again.close()
    assert read_state(tmp_path).results == 4


def test_a_damaged_snapshot_is_replaced_by_the_earlier_one(tmp_path: Path) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings(), snapshot_every=10)
    fill(journal, 20)
    journal.close()
    newest = sorted(tmp_path.glob("state-*.msgpack"))[-1]
    newest.write_bytes(newest.read_bytes()[:50])
    assert read_state(tmp_path) == journal.state


def test_a_damaged_or_missing_journal_is_reported(tmp_path: Path) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    fill(journal, 3)
    journal.close()
    (segment,) = (tmp_path / "journal").glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(b"".join([*lines[:4], b"rubbish\n", *lines[5:]]))
    with pytest.raises(Damaged, match="Event 4"):
        read_state(tmp_path)
    segment.write_bytes(b"".join([*lines[:1], *lines[2:]]))  # without the player a
    with pytest.raises(Damaged, match="does not fit"):
        read_state(tmp_path)
    segment.rename(segment.with_name("000000000005.jsonl"))
    with pytest.raises(Damaged, match="missing"):
        read_state(tmp_path)


def test_what_does_not_fit_is_not_stored(tmp_path: Path) -> None:
    journal = LeagueJournal(tmp_path, LeagueSettings())
    fill(journal, 1)
    refused = journal.apply(PlayerQuarantined("nobody", "x"))
    assert refused is not None
    assert journal.events == 5
    journal.close()


def test_changed_settings_do_not_change_history(tmp_path: Path) -> None:
    first, second = LeagueSettings(elo_k=32.0, decay=0.5), LeagueSettings(elo_k=1.0, decay=1.0)
    journal = LeagueJournal(tmp_path, first)
    fill(journal, 5)
    before = journal.state
    journal.close()
    journal = LeagueJournal(tmp_path, second)
    assert (journal.state.elo, journal.state.payoff) == (before.elo, before.payoff)
    fill(journal, 5)
    journal.close()
    assert read_state(tmp_path) == journal.state
    events = list(read_events(tmp_path))
    assert [event.settings for event in events if isinstance(event, SettingsChanged)] == [first, second]
    assert [sample.ratings for sample in rating_history(events, 5)][-1].keys() == set("abc")
    for settings in (None, second):  # opened as it is, and with the same settings: nothing is recorded
        LeagueJournal(tmp_path, settings).close()
    assert len(list(read_events(tmp_path))) == len(events)


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_league_of_an_earlier_release_keeps_its_history(tmp_path: Path, snapshot: bool) -> None:
    """Its settings are in settings.json and not in the journal."""
    league = shutil.copytree(RELEASE, tmp_path / "league")
    if not snapshot:
        (league / "state-000000000006.msgpack").unlink()
    for settings in (None, LeagueSettings(elo_k=1.0, decay=1.0)):
        journal = LeagueJournal(league, settings)
        journal.close()
        state = read_state(league)
        # As that release has printed them, with elo_k 32 and decay 0.9.
        assert state.elo == {"main": 1269.05775985719, "random": 1000.0, "main.1": 1151.4329880876257}
        assert state.payoff.record("main", "main.1") == (11, 1, 6, 8.49905364703001, 0.7094103699853627, 5.0)
        assert (state.results, state.players["random"].retired) == (30, True)
    assert state.settings.elo_k == 1.0
    (sample,) = rating_history(read_events(league), 1000)
    assert sample.results == 30


def test_a_snapshot_with_matches_of_two_training_players_twice_is_read(tmp_path: Path) -> None:
    """Format 3 has them among the latest results of both players."""
    journal = LeagueJournal(tmp_path, LeagueSettings())
    for player in (Player("a", PlayerRole.MAIN), Player("b", PlayerRole.MAIN), Player("c", PlayerRole.FIXED, rating=1000.0)):
        assert journal.apply(PlayerAdded(player)) is None
    assert journal.apply(ResultsReported("test", 1, "a", "b", 3, 1, 2)) is None
    assert journal.apply(ResultsReported("test", 2, "a", "c", 4, 0, 0)) is None
    journal.snapshot()
    journal.close()
    (path,) = tmp_path.glob("state-*.msgpack")
    content = msgpack.unpackb(path.read_bytes())
    assert content["format"] == 4
    content["format"] = 3
    content["recent"]["b"] = [["a", 2, 1, 3]]
    path.write_bytes(msgpack.packb(content))
    for segment in (tmp_path / "journal").glob("*.jsonl"):
        if not segment.stem.endswith(str(content["events"])):
            segment.unlink()  # the state must come from the snapshot
    state = read_state(tmp_path)
    assert {name: recent.entries for name, recent in state.recent.items()} == {"a": (("b", 3, 1, 2), ("c", 4, 0, 0)), "b": ()}


def test_a_directory_without_a_league_is_reported(tmp_path: Path) -> None:
    for read in (read_state, LeagueJournal, lambda path: list(read_events(path))):
        with pytest.raises(NotFound, match="There is no league"):
            read(tmp_path / "none")
    assert not (tmp_path / "none").exists()


PROGRAM = """
import sys
from pathlib import Path
from ludus.league.journal import LeagueJournal
from ludus.league.settings import LeagueSettings
from tests.league.test_journal import fill
journal = LeagueJournal(Path(sys.argv[1]), LeagueSettings(), snapshot_every=50)
fill(journal, 0)
while True:
    fill(journal, 1)
    print(journal.state.results, flush=True)  # acknowledged
"""


def kill_repeatedly(directory: Path, kills: int) -> int:
    """Kill a process that records results; returns the number of results. Checks that each acknowledged one is counted once."""
    rng, acknowledged = random.Random(0), 0
    for _ in range(kills):
        wanted = acknowledged + rng.randint(1, 120)
        with subprocess.Popen([sys.executable, "-c", PROGRAM, str(directory)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                acknowledged = int(line)
                if acknowledged >= wanted:
                    break
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines()
        acknowledged = max([acknowledged, *(int(line) for line in rest if line.isdigit())])
        state = read_state(directory)
        assert acknowledged <= state.results <= acknowledged + 1  # the last one may be stored but not yet acknowledged
        acknowledged = state.results
    assert sum(state.payoff.record(own, other).games for own in "abc" for other in "abc") <= 2 * state.results
    events = [json.loads(line) for path in (directory / "journal").glob("*.jsonl") for line in path.read_bytes().splitlines()]
    counted = [event["number"] for event in events if event["event"] == "ResultsReported"]
    assert len(counted) == len(set(counted)) == state.results
    return state.results


def test_kills_lose_no_result_and_count_none_twice(tmp_path: Path) -> None:
    assert kill_repeatedly(tmp_path, 3) > 3


@pytest.mark.long
def test_fifty_kills_lose_no_result_and_count_none_twice(tmp_path: Path) -> None:
    assert kill_repeatedly(tmp_path, 50) > 50
