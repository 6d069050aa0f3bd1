"""Files between the coordinator of a league and its samplers: atomic, numbered, and robust against damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ludus.errors import Damaged
from ludus.sampling.league_files import (
    RESULTS,
    LeagueOpponent,
    Matchmaking,
    MatchmakingWatch,
    PairReport,
    ResultSpool,
    SpoolReader,
    UnusableModel,
    matchmaking_path,
    read_matchmaking,
    write_matchmaking,
)


def spool_of(league: Path) -> Path:
    (path,) = (league / RESULTS).glob("*.jsonl")
    return path


def test_matchmaking_is_read_as_it_was_written_and_only_when_it_changes(tmp_path: Path) -> None:
    watch = MatchmakingWatch(tmp_path, "main")
    assert not watch.update()
    written = Matchmaking("main", 2, (LeagueOpponent("a", "rule:random", 0.25), LeagueOpponent("main", "", 0.75)), "enough")
    write_matchmaking(tmp_path, written)
    assert watch.update()
    assert watch.current == written
    assert not watch.update()


def test_a_damaged_matchmaking_file_leaves_the_last_one_in_force(tmp_path: Path) -> None:
    write_matchmaking(tmp_path, Matchmaking("main"))
    watch = MatchmakingWatch(tmp_path, "main")
    watch.update()
    matchmaking_path(tmp_path, "main").write_text('{"player": "main"')
    assert not watch.update()
    assert watch.current == Matchmaking("main")
    with pytest.raises(Damaged):
        read_matchmaking(tmp_path, "main")


def test_results_are_added_up_and_numbered(tmp_path: Path) -> None:
    spool = ResultSpool(tmp_path, "main")
    for score, gain in ((1.0, 2.0), (0.0, -1.0), (0.5, 0.0), (1.0, 4.0)):
        spool.add("main", "a", 3, score, gain)
    spool.flush()
    spool.flush()
    spool.add("main", "b", 3, 0.0, -2.0)
    spool.report_unusable("c", "players/c@1", "no such file")
    spool.close()
    reader = SpoolReader(spool_of(tmp_path))
    assert list(reader.read()) == [
        PairReport(1, "main", "a", 3, 2, 1, 1, 5.0, 0),
        UnusableModel(2, "c", "players/c@1", "no such file"),
        PairReport(3, "main", "b", 3, 0, 0, 1, -2.0, 0),
    ]
    assert list(reader.read()) == []
    assert reader.source == spool.source


def test_results_against_different_generations_of_an_opponent_are_different_reports(tmp_path: Path) -> None:
    spool = ResultSpool(tmp_path, "main")
    spool.add("main", "a", 0, 1.0, 1.0, opponent_generation=1)
    spool.add("main", "a", 0, 0.0, -1.0, opponent_generation=2)
    spool.close()
    found = [one for one in SpoolReader(spool_of(tmp_path)).read() if isinstance(one, PairReport)]
    assert [(one.opponent_generation, one.wins, one.losses) for one in found] == [(1, 1, 0), (2, 0, 1)]


def test_reports_and_matchmaking_of_earlier_releases_have_no_generation_of_the_opponent(tmp_path: Path) -> None:
    path = tmp_path / "source.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n")
    (report,) = SpoolReader(path).read()
    assert isinstance(report, PairReport)
    assert report.opponent_generation is None
    write_matchmaking(tmp_path, Matchmaking("main", 0, (LeagueOpponent("a", "x@1", 1.0, generation=3),)))
    read = read_matchmaking(tmp_path, "main")
    assert read is not None
    assert read.opponents[0].generation == 3
    file = matchmaking_path(tmp_path, "main")
    values = json.loads(file.read_bytes())
    del values["opponents"][0]["generation"]
    file.write_text(json.dumps(values))
    assert read_matchmaking(tmp_path, "main") == Matchmaking("main", 0, (LeagueOpponent("a", "x@1", 1.0),))


def test_the_coordinator_knows_whether_the_writer_lives(tmp_path: Path) -> None:
    spool = ResultSpool(tmp_path, "main")
    reader = SpoolReader(spool.path)
    assert not reader.is_finished()
    spool.close()
    assert reader.is_finished()


def test_an_incomplete_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    spool = ResultSpool(tmp_path, "main")
    spool.add("main", "a", 0, 1.0, 1.0)
    spool.flush()
    whole = spool.path.read_bytes()
    reader = SpoolReader(spool.path)
    os.truncate(spool.path, len(whole) - 5)
    assert list(reader.read()) == []
    spool.path.write_bytes(whole)
    assert [report.number for report in reader.read()] == [1]
    spool.close()


GOOD = {"number": 2, "player": "main", "opponent": "a", "generation": 0, "wins": 1, "draws": 0, "losses": 0, "gain": 1.0}


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff\xfe",
        b"[]",
        b"12",
        b'{"number": 1}',
        b"[" * 100_000,
        *(
            json.dumps(GOOD | change).encode()
            for change in (
                {"wins": -1}, {"wins": 1.5}, {"wins": True}, {"wins": "1"}, {"wins": 1 << 50}, {"number": None}, {"gain": float("nan")},
                {"gain": float("inf")}, {"gain": "1"}, {"player": 3}, {"opponent": None}, {"generation": -1}, {"opponent_generation": "1"},
            )
        ),
    ],
)  # fmt: skip
def test_damaged_lines_are_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "source.jsonl"
    path.write_bytes(line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    reader = SpoolReader(path)
    assert [report.number for report in reader.read()] == [2]
    assert reader.damaged == 1


def test_results_go_to_a_new_file_when_the_old_one_was_removed(tmp_path: Path) -> None:
    spool = ResultSpool(tmp_path, "main")
    before = spool.source
    spool.path.unlink()
    spool.add("main", "a", 0, 1.0, 1.0)
    spool.close()
    assert spool.source != before
    assert list(SpoolReader(spool_of(tmp_path)).read()) == [PairReport(1, "main", "a", 0, 1, 0, 0, 1.0, 0)]
