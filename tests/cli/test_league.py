"""`ludus league`: commands that read and change a league."""

from __future__ import annotations

import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.core import trust
from ludus.experiments.runs import checkpoint
from ludus.league.events import PlayerAdded, PlayerQuarantined, ResultsReported
from ludus.league.journal import LeagueJournal, read_state
from ludus.league.players import Player, PlayerRole
from ludus.league.settings import LeagueSettings
from ludus.models.custom import loader
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
    for name in ("a/b", "main.1", "rule:hard", "evaluation"):
        assert "is not a name" in one_line(call("league", "add", league, name, "rule:hard"))
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
    """From a version of a run outside the league, and a checkpoint inside it."""
    run = small.train(tmp_path / "run").run_dir
    shutil.copytree(run, league / "players" / "copy")
    version = checkpoint.open_checkpoint(run)[1].state["models"]["model"]["version"]
    assert call("league", "add", league, "outside", f"{run}@{version}").code == 0
    assert read_state(league).players["outside"].model == f"players/outside@{version}"
    journal = LeagueJournal(league, LeagueSettings())
    journal.apply(PlayerAdded(Player("inside", PlayerRole.HISTORICAL, f"players/copy@{version}")))
    journal.close()
    for name in ("outside", "inside"):
        result = call("league", "export", league, name, tmp_path / "exports", "--json")
        assert result.code == 0, result.err
        assert OnnxPolicy(tmp_path / "exports" / f"{name}.onnx").version == version
        assert result.json["passed"]


def test_the_league_has_a_copy_of_a_model_as_soon_as_it_is_added(call: Call, league: Path, tmp_path: Path) -> None:
    """No coordinator runs: RUN/best may be another checkpoint later, and the run may be deleted."""
    run = small.train(tmp_path / "run").run_dir
    assert call("league", "add", league, "old", run).code == 0
    shutil.rmtree(run)
    model = read_state(league).players["old"].model
    assert model.startswith("players/old@")
    assert (league / "players" / "old" / "checkpoints").is_dir()
    assert call("league", "export", league, "old", tmp_path / "exports", "--json").json["passed"]
    assert "already" in one_line(call("league", "add", league, "old", league / "players" / "old"))
    assert (league / "players" / "old" / "checkpoints").is_dir()


def test_a_match_is_shown_with_the_names_of_the_players(call: Call, league: Path) -> None:
    shown = call("league", "match", league, "hard", "anchor", "--games", "2", *CARDS).out.splitlines()
    assert shown[:2] == ["A  hard", "B  anchor"]


def test_an_unknown_model_is_not_taken_for_a_script_of_another_game(call: Call, project: Path, tmp_path: Path) -> None:
    LeagueJournal(tmp_path / "new", LeagueSettings()).close()
    (tmp_path / "new" / "league.yaml").write_text((project / "league.yaml").read_text())
    trust.allow("tests.league.games:make_rps")
    refused = one_line(call("league", "add", tmp_path / "new", "x", "nope"))
    assert "easy" not in refused
    assert "Name a run, RUN/best, RUN@VERSION or a checkpoint; or rule:random" in refused
    assert "Did you mean 'rule:random'?" in one_line(call("league", "add", tmp_path / "new", "x", "random"))


def test_the_export_of_a_player_that_an_earlier_release_added_is_copied(call: Call, league: Path, tmp_path: Path) -> None:
    (tmp_path / "old.onnx").write_bytes(b"export")
    journal = LeagueJournal(league)
    journal.apply(PlayerAdded(Player("file", PlayerRole.FIXED, str(tmp_path / "old.onnx"))))
    journal.close()
    assert call("league", "export", league, "file", tmp_path / "copied.onnx").code == 0
    assert (tmp_path / "copied.onnx").read_bytes() == b"export"


def test_a_league_in_which_no_player_can_train_fails(call: Call, tmp_path: Path) -> None:
    file, directory = tmp_path / "rps.yaml", tmp_path / "rps"
    file.write_text("env: tests.league.games:make_rps\nplayers: {main: {}}\n")
    journal = LeagueJournal(directory, LeagueSettings())
    journal.apply(PlayerAdded(Player("main", PlayerRole.MAIN, retired=True)))
    journal.close()
    result = call("league", "run", "-f", file, "--dir", directory)
    assert "stopped by no player can train" in result.out
    assert result.code == 1


# -- models of players ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a file of a league and scripts, which is not on the import path."""
    directory = tmp_path / "project"
    directory.mkdir()
    (directory / "cli_bots.py").write_text("table = [1, 2, 3]\n\n\ndef rock(observation, mask):\n    return 0\n")
    (directory / "cli_broken.py").write_text("raise RuntimeError\n")
    (directory / "league.yaml").write_text("env: tests.league.games:make_rps\nplayers:\n  main: {}\n")
    path, modules = list(sys.path), set(sys.modules)
    for variable in (trust.VARIABLE, trust.PROJECTS, loader.VARIABLE):
        monkeypatch.setenv(variable, "")
    yield directory
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


BAD_MODELS = {
    "script:cli_bots:paper": "'cli_bots' has no 'paper'",
    "script:nowhere:rock": "There is no module 'nowhere'",
    "script:cli_broken:rock": "raised RuntimeError",
    "script:cli_bots:table": "is a list, not a function",
    "script:os:system": "standard library",
    "script:cli_bots": "not of the form 'module:Name'",
    "rule:hard": "has no such script. Known: random.",
    "agent.onnx": "is an export, which cannot play in training",
    "localhost:8000": "cannot play in training",
    "runs/none": "runs/none",
}


@pytest.mark.parametrize(("model", "reason"), list(BAD_MODELS.items()))
def test_models_that_cannot_play_are_refused_by_the_file_and_by_add(
    call: Call, project: Path, tmp_path: Path, model: str, reason: str
) -> None:
    file, directory = project / "league.yaml", tmp_path / "new"
    valid = file.read_text()
    file.write_text(f'{valid}  bad: {{role: fixed, model: "{model}"}}\n')
    result = call("league", "run", "-f", file, "--dir", directory)
    assert result.code == 2
    assert f"league.yaml:4: players.bad.model is {model}: " in result.err
    assert reason in result.err
    assert not (directory / "league.yaml").exists(), "nothing has started"

    LeagueJournal(directory, LeagueSettings()).close()
    (directory / "league.yaml").write_text(valid)
    trust.allow("tests.league.games:make_rps")
    result = call("league", "add", directory, "bad", model)
    assert result.code == 2
    assert reason in result.err
    assert read_state(directory).players == {}


def test_a_training_player_starts_with_a_stored_policy(call: Call, project: Path, tmp_path: Path) -> None:
    file = project / "league.yaml"
    for model, reason in {"rule:random": "starts with the weights of a run", "runs/none": "runs/none"}.items():
        file.write_text(f'env: tests.league.games:make_rps\nplayers:\n  main: {{model: "{model}"}}\n')
        result = call("league", "run", "-f", file, "--dir", tmp_path / "new")
        assert f"league.yaml:3: players.main.model is {model}: " in result.err
        assert reason in result.err


def test_a_script_plays_a_match_and_gains_are_recorded(call: Call, project: Path, tmp_path: Path) -> None:
    """Rock against itself draws; against random play the gain is the number of wins minus that of losses, as its returns say."""
    directory = tmp_path / "new"
    sys.path.insert(0, str(project))
    trust.add_project(project)
    journal = LeagueJournal(directory, LeagueSettings())
    for name, model in {"rock": "script:cli_bots:rock", "stone": "script:cli_bots:rock", "random": "rule:random"}.items():
        journal.apply(PlayerAdded(Player(name, PlayerRole.FIXED, model)))
    journal.close()
    (directory / "league.yaml").write_text((project / "league.yaml").read_text())
    even = call("league", "match", directory, "rock", "stone", "--games", "6", "--json").json
    assert (even["drawn"], even["terms"]["game"]) == (6, "tests.league.games:make_rps")
    played = call("league", "match", directory, "random", "rock", "--games", "30", "--record", "--json").json
    record = read_state(directory).payoff.record("random", "rock")
    returns = [hero["return"] for match in played["matches"] for hero in match["heroes"] if hero["who"] == "a"]
    assert record.gain == sum(returns) != 0
    assert (record.wins, record.draws, record.losses) == (played["won"], played["drawn"], played["lost"])


def test_gains_of_a_match_are_those_of_the_league(call: Call, league: Path) -> None:
    """Half of the difference between the mean returns of the sides, which is not one per match here."""
    played = call("league", "match", league, "hard", "anchor", "--games", "20", *CARDS, "--record", "--json").json
    means = [
        {who: statistics.mean(hero["return"] for hero in match["heroes"] if hero["who"] == who) for who in ("a", "b")}
        for match in played["matches"]
    ]
    gain = sum((mean["a"] - mean["b"]) / 2 for mean in means)
    assert read_state(league).payoff.record("hard", "anchor").gain == pytest.approx(gain)
    assert abs(gain) != abs(played["won"] - played["lost"])


def test_a_script_that_fails_has_no_results(call: Call, project: Path, tmp_path: Path) -> None:
    directory = tmp_path / "new"
    (project / "cli_fails.py").write_text("def f(observation, mask):\n    return 1 // 0\n")
    sys.path.insert(0, str(project))
    trust.add_project(project)
    journal = LeagueJournal(directory, LeagueSettings())
    for name, model in {"bad": "script:cli_fails:f", "random": "rule:random"}.items():
        journal.apply(PlayerAdded(Player(name, PlayerRole.FIXED, model)))
    journal.close()
    result = call(
        "league", "match", directory, "bad", "random", "--games", "2", "--env", "tests.league.games:make_rps", "--record"
    )
    assert result.code == 1
    assert "script:cli_fails:f failed: ZeroDivisionError" in result.err
    assert read_state(directory).results == 0
