"""`ludus battle`: text output, JSON and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ludus.games.arena.bots.round_robin import play_pairs
from ludus.games.arena.engine.settings import ArenaSettings
from tests.cli.calling import Call, one_line

SHORT = ("--games", "4", "--seconds", "200", "--lineup", "random", "--seed", "9")


def test_programs_get_one_object_and_its_numbers_are_those_of_the_ladder(call: Call) -> None:
    (standing,) = play_pairs(4, 1, 9, (("hard", "easy"),), ArenaSettings(seconds=200))
    result = call("battle", "rule:hard", "rule:easy", *SHORT, "--json")
    assert result.code == 0
    assert len(result.out.splitlines()) == 1
    found = result.json
    assert [found[key] for key in ("games", "won", "lost", "drawn")] == [4, standing.won, standing.lost, standing.drawn]
    assert (found["low"], found["high"]) == tuple(round(bound, 4) for bound in standing.bounds)
    assert found["a"]["name"] == "rule:hard"
    assert (found["terms"]["mode"], found["terms"]["seed"]) == ("1v1", 9)
    assert [match["side_of_a"] for match in found["matches"]] == ["blue", "red", "blue", "red"]
    assert found["matches"][0]["heroes"][0].keys() >= {"kills", "deaths", "assists", "gold", "level", "last_hits", "damage"}
    assert found["sides"]["blue"]["games"] == found["sides"]["red"]["games"] == 2
    assert call("battle", "rule:hard", "rule:easy", *SHORT, "--json").json["matches"] == found["matches"]


def test_people_see_a_table(call: Call) -> None:
    result = call("battle", "rule:hard", "rule:random", *SHORT, "--no-swap-sides")
    assert result.code == 0
    assert "A  rule:hard" in result.out
    assert "4 games of arena 1v1, seed 9" in result.out
    assert "won, % [95 %]" in result.out
    assert "last hits" in result.out
    assert not any(line.startswith("red") for line in result.out.splitlines())


def test_recordings_can_be_inspected(call: Call, tmp_path: Path) -> None:
    result = call(
        "battle", "rule:easy", "rule:random", "--games", "3", "--seconds", "20", "--record", tmp_path, "--record-most", "1"
    )
    assert result.code == 0
    (file,) = tmp_path.iterdir()
    replayed = call("games", "arena", "replay", file, "--check")
    assert replayed.code == 0
    assert "bit for bit" in replayed.out
    assert "rule:easy" in replayed.out


def test_an_environment_with_several_agents(call: Call, tmp_path: Path) -> None:
    env = ("--env", "tests.cards:make_cards", "-o", "rounds=3", "--camps", "blue_*/red_*", "--games", "6")
    result = call("battle", "rule:random", "rule:random", *env, "--record", tmp_path, "--record-most", "2")
    assert result.code == 0
    assert "6 games of tests.cards:make_cards, seed 0" in result.out
    assert "blue  blue_0, blue_1" in result.out
    assert "length  3 steps [3–3], 3 to 3 steps" in result.out
    assert re.search(r"agent +games +return +decisions", result.out)
    assert len(list(tmp_path.iterdir())) == 2
    found = call("battle", "rule:random", "rule:random", *env, "--json").json
    assert found["steps"]["p50"] == 3
    assert found["terms"]["camps"]["red"] == ["red_0", "red_1"]
    assert found["terms"]["options"] == {"rounds": 3}
    assert {hero["decisions"] for match in found["matches"] for hero in match["heroes"]} == {3.0}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("rule:hrad", "rule:easy"), 2, "Did you mean 'rule:hard'"),
        (("hard", "rule:easy"), 2, "Did you mean 'rule:hard'"),
        (("no/such/run", "rule:easy"), 2, "There is no run or checkpoint"),
        (("rule:hard", "rule:easy", "--mode", "1v2"), 2, "no mode '1v2'"),
        (("rule:hard", "rule:easy", "--lineup", "107"), 2, "The line-up '107'"),
        (("rule:hard", "rule:easy", "--lineup", "lacner/107"), 2, "no hero 'lacner'"),
        (("rule:hard", "rule:easy", "--video", "1"), 2, "--record DIR"),
        (("rule:hard", "rule:easy", "--every", "99"), 2, "every 99 ticks"),
        (("rule:hard", "rule:easy", "--camps", "a/b"), 2, "--camps is for environments"),
        (("rule:hard", "rule:random", "--env", "tests.cards:make_cards"), 2, "no player 'rule:hard'"),
        (
            ("rule:random", "rule:random", "--env", "tests.cards:make_cards", "--camps", "red_*"),
            2,
            "--camps 'red_*' does not have two parts",
        ),
        (("rule:random", "rule:random", "--env", "tests.cards:make_card"), 2, "make_card"),
        (("rule:hard", "rule:easy", "--game", "nim"), 2, "--server HOST:PORT"),
        (("rule:hard", "http://127.0.0.1:9"), 1, "127.0.0.1:9"),
        (("rule:hard", "rule:hard", "--server", "127.0.0.1:9"), 1, "127.0.0.1:9"),
    ],
)
def test_usage_errors_are_one_line(call: Call, words: tuple[str, ...], code: int, told: str) -> None:
    result = call("battle", *words)
    assert result.code == code
    assert told in one_line(result)
