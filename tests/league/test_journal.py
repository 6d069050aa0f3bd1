from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ludus.errors import Damaged, Fenced, StoreFull
from ludus.league.events import MatchFinished, MatchIssued, PlayerAdded, PlayerQuarantined
from ludus.league.journal import LeagueJournal, read_state
from ludus.league.players import Player, PlayerRole
from ludus.league.state import LeagueSettings, propose_match


def fill(journal: LeagueJournal, matches: int) -> None:
    if not journal.state.players:
        for name in "abc":
            assert journal.apply(PlayerAdded(Player(name, PlayerRole.MAIN))) is None
    for _ in range(matches):
        match = propose_match(journal.state, "a")
        assert isinstance(match, MatchIssued)
        assert journal.apply(match) is None
        assert journal.apply(MatchFinished(match.match, 1.0)) is None


def test_a_restart_finds_the_same_state_with_and_without_snapshots(tmp_path: Path) -> None:
    for every in (7, 1000):
        journal = LeagueJournal(tmp_path / str(every), LeagueSettings(), snapshot_every=every)
        fill(journal, 20)
        journal.close()
        again = LeagueJournal(tmp_path / str(every), LeagueSettings(), snapshot_every=every)
        assert again.state == journal.state
        assert again.events == 43
        assert len(list(again.history())) == 43
        fill(again, 1)
        assert again.events == 45
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
        file.write(b'{"event": "MatchFin')
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
    segment.write_bytes(b"".join([*lines[:3], *lines[4:]]))
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


PROGRAM = """
import sys
from pathlib import Path
from ludus.league.journal import LeagueJournal
from ludus.league.state import LeagueSettings
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
    finished = [event["match"] for event in events if event["event"] == "MatchFinished"]
    assert len(finished) == len(set(finished)) == state.results
    return state.results


def test_kills_lose_no_result_and_count_none_twice(tmp_path: Path) -> None:
    assert kill_repeatedly(tmp_path, 3) > 3


@pytest.mark.long
def test_fifty_kills_lose_no_result_and_count_none_twice(tmp_path: Path) -> None:
    assert kill_repeatedly(tmp_path, 50) > 50
