"""`ludus league`: commands that read and change a league."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ludus.experiments.runs import checkpoint
from ludus.league.events import PlayerAdded, PlayerQuarantined, ResultsReported
from ludus.league.journal import LeagueJournal, read_state
from ludus.league.players import Player, PlayerRole
from ludus.league.settings import LeagueSettings
from ludus.models.inference.onnx_policy import OnnxPolicy
from tests.cli.calling import Call, one_line
from tests.experiments import small

RANDOM = "rule:random"
CARDS = ("--env", "tests.cards:make_cards", "-o", "rounds=3", "--camps", "blue_*/red_*")


@pytest.fixture
def league(tmp_path: Path) -> Path:
    """Rock, paper and scissors, a script that loses to all, and a player whose model is damaged."""
    directory = tmp_path / "rps"
    journal = LeagueJournal(directory, LeagueSettings())
    for player in (
        Player("anchor", PlayerRole.FIXED, RANDOM, rating=1000.0),
        Player("hard", PlayerRole.FIXED, RANDOM),
        Player("main", PlayerRole.MAIN, steps=5000),
        *(
            Player(name, PlayerRole.HISTORICAL, parent="main", parent_role=PlayerRole.MAIN, steps=10)
            for name in ("rock", "paper", "scissors")
        ),
        Player("broken", PlayerRole.HISTORICAL),
    ):
        journal.apply(PlayerAdded(player))
    pairs = [("rock", "scissors"), ("scissors", "paper"), ("paper", "rock")]
    pairs += [(name, "anchor") for name in ("rock", "paper", "scissors")]
    for number, (own, other) in enumerate(pairs, start=1):
        journal.apply(ResultsReported("test", number, own, other, 80, 10, 10))
    journal.apply(PlayerQuarantined("broken", "its file is truncated"))
    journal.close()
    return directory


def test_status_lists_players_matches_and_reasons(call: Call, league: Path) -> None:
    result = call("league", "status", league)
    assert result.code == 0
    assert "7: 2 fixed, 1 main, 4 historical" in result.out
    assert "600 counted" in result.out
    assert "its file is truncated" in result.out
    assert "not running" in result.out
    found = call("league", "status", league, "--json").json
    main = next(player for player in found["players"] if player["name"] == "main")
    assert (main["steps"], main["snapshots"], found["results"]) == (5000, 3, 600)


def test_ratings_mark_anchors_and_are_sorted(call: Call, league: Path) -> None:
    found = call("league", "ratings", league, "--json").json
    assert [one["rating"] for one in found] == sorted((one["rating"] for one in found), reverse=True)
    by_name = {one["player"]: one for one in found}
    assert (by_name["anchor"]["rating"], by_name["anchor"]["interval"], by_name["anchor"]["anchor"]) == (1000.0, 0.0, True)
    assert by_name["rock"]["rating"] == pytest.approx(by_name["paper"]["rating"])
    assert by_name["rock"]["rating"] == pytest.approx(1000 + 400 * 0.7533, abs=20)  # log10(85 / 15)
    assert by_name["rock"]["games"] == 300
    result = call("league", "ratings", league, "--top", "2")
    assert len(result.out.splitlines()) == 4


def test_payoff_shows_cycles(call: Call, league: Path, tmp_path: Path) -> None:
    picture = tmp_path / "pictures" / "payoff.png"
    result = call("league", "payoff", league, "--png", picture)
    assert result.code == 0
    assert "paper > rock > scissors > paper" in result.out
    assert "85 (100)" in result.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = call("league", "payoff", league, "--json").json
    ((cycle),) = found["cycles"]
    assert cycle["win_rates"] == [0.85, 0.85, 0.85]
    rock, scissors = found["players"].index("rock"), found["players"].index("scissors")
    assert (found["win_rates"][rock][scissors], found["games"][rock][scissors]) == (0.85, 100)
    assert found["win_rates"][rock][rock] is None


def test_curves_and_tree_write_pictures(call: Call, league: Path, tmp_path: Path) -> None:
    assert call("league", "curves", league, "--samples", "3").code == 0
    assert (league / "plots" / "ratings.png").read_bytes().startswith(b"\x89PNG")
    assert (
        one_line(call("league", "curves", league, "--over", "days")) == "ludus: --over days is not known. Use results or steps."
    )
    result = call("league", "tree", league, "--png", tmp_path / "tree.png")
    names = [re.sub(r"^[│├└─ ]+", "", line).split(" · ")[0] for line in result.out.splitlines()]
    main = names.index("main")
    assert names[main + 1 : main + 4] == ["rock", "paper", "scissors"]
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_a_match_counts_only_if_recorded(call: Call, league: Path) -> None:
    battle = ("league", "match", league, "hard", "anchor", "--games", "4", *CARDS)
    played = call(*battle, "--json").json
    assert read_state(league).results == 600
    result = call(*battle, "--record")
    assert result.code == 0
    assert "4 results of hard against anchor are recorded" in result.out
    assert read_state(league).payoff.record("hard", "anchor")[:3] == (played["won"], played["drawn"], played["lost"])


def test_recorded_matches_are_played_like_those_of_the_league(call: Call, league: Path) -> None:
    """Policies sample their actions in training and evaluation; the most probable ones would be another player."""
    battle = ("league", "match", league, "hard", "anchor", "--games", "2", *CARDS, "--json")
    assert call(*battle).json["terms"]["deterministic"]
    assert not call(*battle, "--record").json["terms"]["deterministic"]
    assert call(*battle, "--record", "--deterministic").json["terms"]["deterministic"]


def test_players_are_added_and_retired(call: Call, league: Path) -> None:
    assert call("league", "add", league, "medium", "rule:medium", "--rating", "1300").code == 0
    assert read_state(league).players["medium"] == Player("medium", PlayerRole.FIXED, "rule:medium", rating=1300.0)
    assert "already" in one_line(call("league", "add", league, "medium", "rule:hard"))
    assert "is not a name" in one_line(call("league", "add", league, "a/b", "rule:hard"))
    assert "no/such/run" in one_line(call("league", "add", league, "run", "no/such/run"))
    assert "--rating nan is not a rating" in one_line(call("league", "add", league, "new", "rule:hard", "--rating", "nan"))
    assert call("league", "retire", league, "medium").code == 0
    assert read_state(league).players["medium"].retired
    assert "retired already" in call("league", "retire", league, "medium").out
    assert "Did you mean 'medium'?" in one_line(call("league", "retire", league, "medum"))


def test_a_running_coordinator_gets_the_changes(call: Call, league: Path) -> None:
    journal = LeagueJournal(league, LeagueSettings())
    result = call("league", "retire", league, "hard")
    journal.close()
    assert result.code == 0
    assert "as soon as the running coordinator has read the change" in result.out
    assert not read_state(league).players["hard"].retired
    assert len(list((league / "spool").glob("*.json"))) == 1


def test_errors_say_what_to_do(call: Call, league: Path, tmp_path: Path) -> None:
    assert one_line(call("league", "status", tmp_path / "none")).endswith("`ludus league run` creates one.")
    assert "has no model yet" in one_line(call("league", "match", league, "main", "hard"))
    assert "no policy to export" in one_line(call("league", "export", league, "hard", tmp_path / "x.onnx"))
    assert "cannot be recorded" in one_line(call("league", "match", league, "hard", "hard", "--record"))


def test_the_policy_of_a_player_is_exported_and_plays(call: Call, league: Path, tmp_path: Path) -> None:
    """From a version of a run outside the league, a checkpoint inside it, and an export."""
    run = small.train(tmp_path / "run").run_dir
    shutil.copytree(run, league / "players" / "copy")
    version = checkpoint.open_checkpoint(run)[1].state["models"]["model"]["version"]
    assert call("league", "add", league, "outside", f"{run}@{version}").code == 0
    assert read_state(league).players["outside"].model == f"{run}@{version}"
    journal = LeagueJournal(league, LeagueSettings())
    journal.apply(PlayerAdded(Player("inside", PlayerRole.HISTORICAL, f"players/copy@{version}")))
    journal.close()
    for name in ("outside", "inside"):
        result = call("league", "export", league, name, tmp_path / "exports", "--json")
        assert result.code == 0, result.err
        assert OnnxPolicy(tmp_path / "exports" / f"{name}.onnx").version == version
        assert result.json["passed"]
    assert call("league", "add", league, "file", tmp_path / "exports" / "inside.onnx").code == 0
    assert call("league", "export", league, "file", tmp_path / "copied.onnx").code == 0
    assert (tmp_path / "copied.onnx").read_bytes() == (tmp_path / "exports" / "inside.onnx").read_bytes()


def test_a_league_in_which_no_player_can_train_fails(call: Call, tmp_path: Path) -> None:
    file, directory = tmp_path / "rps.yaml", tmp_path / "rps"
    file.write_text("env: tests.league.games:make_rps\nplayers: {main: {}}\n")
    journal = LeagueJournal(directory, LeagueSettings())
    journal.apply(PlayerAdded(Player("main", PlayerRole.MAIN, retired=True)))
    journal.close()
    result = call("league", "run", "-f", file, "--dir", directory)
    assert "stopped by no player can train" in result.out
    assert result.code == 1
