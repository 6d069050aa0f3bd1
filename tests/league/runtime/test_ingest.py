"""Reports reach the journal exactly once, whichever process is killed."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ludus.league.events import PlayerAdded, PlayerQuarantined, ResultsReported
from ludus.league.journal import LeagueJournal, read_state
from ludus.league.players import Player, PlayerRole
from ludus.league.runtime import ingest
from ludus.league.runtime.ingest import ResultIngest
from ludus.league.settings import LeagueSettings
from ludus.league.spool import apply_spool, submit_events
from ludus.sampling import league_files
from ludus.sampling.league_files import PairReport, ResultSpool, SpoolReader


def open_league(directory: Path) -> LeagueJournal:
    journal = LeagueJournal(directory, LeagueSettings())
    for player in (
        Player("main", PlayerRole.MAIN),
        Player("old", PlayerRole.HISTORICAL, "players/old@1"),
        Player("gone", PlayerRole.FIXED, retired=True),
    ):
        if player.name not in journal.state.players:
            assert journal.apply(PlayerAdded(player)) is None
    return journal


def write(league: Path, *matches: tuple[str, float]) -> ResultSpool:
    spool = ResultSpool(league, "main")
    for opponent, score in matches:
        spool.add("main", opponent, 0, score, 2 * score - 1)
    spool.flush()
    return spool


def test_reports_are_counted_once_across_restarts(tmp_path: Path) -> None:
    spool = write(tmp_path, ("old", 1.0), ("old", 0.0), ("gone", 0.5))
    for _ in range(3):
        journal = open_league(tmp_path)
        ResultIngest(journal).poll()
        assert journal.state.results == 3
        journal.close()
    spool.add("main", "old", 0, 1.0, 1.0)
    spool.close()
    journal = open_league(tmp_path)
    ResultIngest(journal).poll()
    record = journal.state.payoff.record("main", "old")
    assert (record.wins, record.losses, record.gain, journal.state.results) == (2, 1, 1.0, 4)
    journal.close()


def test_results_for_unknown_players_and_damaged_lines_are_counted_as_such(tmp_path: Path) -> None:
    spool = write(tmp_path, ("nobody", 1.0), ("old", 1.0))
    with open(spool.path, "ab") as file:
        file.write(b"\x00garbage\n")
    spool.add("main", "old", 0, 1.0, 1.0)
    spool.close()
    journal = open_league(tmp_path)
    reports = ResultIngest(journal)
    reports.poll()
    assert (journal.state.results, reports.refused, reports.damaged) == (2, 1, 1)
    journal.close()


def test_a_file_is_removed_when_its_writer_has_ended_and_all_is_counted(tmp_path: Path) -> None:
    now = 0.0
    spool = write(tmp_path, ("old", 1.0))
    journal = open_league(tmp_path)
    reports = ResultIngest(journal, lambda: now)
    for _ in range(4):
        reports.poll()
        now += ingest._QUIET_S
    assert spool.path.exists(), "its writer lives"
    spool.close()
    reports.poll()
    assert not spool.path.exists()
    assert journal.state.reports == {}
    assert journal.state.results == 1
    journal.close()


def test_a_file_is_not_removed_while_it_has_reports_that_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer may add its last reports and end between the last read and the moment at which its lock is free."""
    now, spool, journal = 0.0, write(tmp_path, ("old", 1.0)), open_league(tmp_path)
    reports = ResultIngest(journal, lambda: now)
    reports.poll()
    now += ingest._QUIET_S

    def lock(file: int, kind: int) -> None:
        if spool._fd >= 0:
            spool.add("main", "old", 0, 0.0, -1.0)
            spool.close()
        fcntl.flock(file, kind)

    monkeypatch.setattr(league_files, "fcntl", SimpleNamespace(flock=lock, LOCK_SH=fcntl.LOCK_SH, LOCK_NB=fcntl.LOCK_NB))
    for _ in range(2):
        reports.poll()
    assert journal.state.results == 2
    now += ingest._QUIET_S
    reports.poll()
    assert not spool.path.exists()
    journal.close()


def test_the_torn_last_line_of_a_killed_writer_does_not_keep_its_file(tmp_path: Path) -> None:
    now, spool, journal = 0.0, write(tmp_path, ("old", 1.0)), open_league(tmp_path)
    spool.close()
    with open(spool.path, "ab") as file:
        file.write(b'{"number": 2')
    reports = ResultIngest(journal, lambda: now)
    for _ in range(2):
        reports.poll()
        now += ingest._QUIET_S
    assert (journal.state.results, spool.path.exists()) == (1, False)
    journal.close()


def test_a_coordinator_killed_between_removal_and_journal_counts_nothing_twice(tmp_path: Path) -> None:
    spool = write(tmp_path, ("old", 1.0))
    spool.close()
    journal = open_league(tmp_path)
    ResultIngest(journal).poll()
    journal.close()
    spool.path.unlink()
    journal = open_league(tmp_path)
    assert journal.state.reports
    ResultIngest(journal).poll()
    assert (journal.state.reports, journal.state.results) == ({}, 1)
    journal.close()


def test_a_player_whose_model_cannot_be_loaded_is_excluded_unless_it_has_another_one(tmp_path: Path) -> None:
    spool = write(tmp_path)
    spool.report_unusable("old", "players/old@0", "an earlier model")
    spool.report_unusable("main", "", "a training player")
    spool.report_unusable("nobody", "x", "unknown")
    journal = open_league(tmp_path)
    reports = ResultIngest(journal)
    reports.poll()
    assert all(not player.quarantine for player in journal.state.players.values())
    spool.report_unusable("old", "players/old@1", "damaged")
    spool.close()
    reports.poll()
    assert journal.state.players["old"].quarantine == "damaged"
    journal.close()


def test_a_quarantine_that_has_ended_is_not_repeated_by_reports_that_were_read_before(tmp_path: Path) -> None:
    """The sources of learners on other machines stay, and a restarted coordinator reads them from their beginning."""

    def reason(journal: LeagueJournal) -> str:
        return journal.state.players["old"].quarantine

    first, second = write(tmp_path), write(tmp_path)
    for spool in (first, second, first):
        spool.report_unusable("old", "players/old@1", "its file is damaged")
    journal = open_league(tmp_path)
    ResultIngest(journal).poll()
    assert reason(journal) == "its file is damaged"
    journal.apply(PlayerQuarantined("old", ""))
    journal.close()

    journal = open_league(tmp_path)
    reports = ResultIngest(journal)
    reports.poll()
    assert reason(journal) == ""
    second.report_unusable("old", "players/old@1", "it is still damaged")
    reports.poll()
    assert reason(journal) == "it is still damaged"
    journal.close()


def test_an_old_report_of_a_server_that_did_not_answer_does_not_wait_for_it_again(tmp_path: Path) -> None:
    write(tmp_path).report_unusable("old", "players/old@1", "no answer", temporary=True)
    asked: list[str] = []
    for _ in range(2):
        journal = open_league(tmp_path)
        ResultIngest(journal, on_away=lambda player, reason: asked.append(player.name)).poll()
        journal.apply(PlayerQuarantined("old", ""))
        journal.close()
    assert asked == ["old"]


WRITER = """
import sys, json, pathlib, time
from ludus.io.atomic_file import replace_json
from ludus.sampling.league_files import ResultSpool
league, acknowledged, seed = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
spool, total = ResultSpool(league, f"main-{seed}"), 0
while not (league / "enough").exists():
    for n in range(7):
        spool.add("main", ("old", "gone", "main")[n % 3], 0, (1.0, 0.5, 0.0)[(n + total) % 3], 0.25)
    spool.flush()
    total += 7
    replace_json(acknowledged, total)
    time.sleep(0.002)
spool.close()
"""

READER = """
import sys, pathlib, time
from ludus.league.journal import LeagueJournal
from ludus.league.runtime.ingest import ResultIngest
from ludus.league.settings import LeagueSettings
journal = LeagueJournal(pathlib.Path(sys.argv[1]), LeagueSettings(), snapshot_every=50)
reports = ResultIngest(journal)
print("ready", flush=True)
while True:
    reports.poll()
    time.sleep(0.001)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE)


def kill_readers(league: Path, kills: int, on_kill: Callable[[int], None] = lambda number: None) -> None:
    chance = random.Random(5)
    for number in range(kills):
        with start(READER, league) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.0, 0.15))
            reader.send_signal(signal.SIGKILL)
        on_kill(number)


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.long)])
def test_killing_the_coordinator_and_writers_loses_and_repeats_nothing(tmp_path: Path, kills: int) -> None:
    open_league(tmp_path).close()
    acknowledged = [tmp_path / f"acknowledged-{n}" for n in range(3)]
    writers = [start(WRITER, tmp_path, path, n) for n, path in enumerate(acknowledged)]
    try:
        kill_readers(tmp_path, kills, lambda number: writers[0].kill() if number == kills // 2 else None)
        (tmp_path / "enough").touch()
        assert [writer.wait(60) for writer in writers] == [-signal.SIGKILL, 0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    journal = open_league(tmp_path)
    ResultIngest(journal).poll()
    written = [
        sum(one.wins + one.draws + one.losses for one in SpoolReader(path).read() if isinstance(one, PairReport))
        for path in sorted((tmp_path / "results").glob("*.jsonl"))
    ]
    told = [json.loads(path.read_text()) for path in acknowledged]
    assert journal.state.results == sum(written)
    assert written[1:] == told[1:]
    assert told[0] <= written[0] <= told[0] + 7, "the killed writer may have written one more batch than it said"
    assert read_state(tmp_path).results == sum(written)
    assert os.listdir(tmp_path / "results") != []
    journal.close()


def test_a_recorded_match_counts_once_if_the_coordinator_is_killed_before_its_file_is_deleted(tmp_path: Path) -> None:
    write(tmp_path).close()
    journal = open_league(tmp_path)
    submit_events(tmp_path, [ResultsReported("match-1", 1, "main", "old", 3, 0, 1)])
    (file,) = (tmp_path / "spool").glob("*.json")
    content = file.read_bytes()
    assert apply_spool(journal) == 1
    journal.close()
    file.write_bytes(content)
    journal = open_league(tmp_path)
    ResultIngest(journal)
    apply_spool(journal)
    assert journal.state.results == 4
    journal.close()
