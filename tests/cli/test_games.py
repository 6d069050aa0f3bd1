"""`ludus games arena`: recordings are inspected, matches are played."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from ludus.cli.games import games
from ludus.games.arena.engine.heroes import HEROES
from ludus.games.arena.engine.recording import read_recording, verify
from tests.arena.random_recordings import write_random_recording
from tests.cli.calling import Call, one_line


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("matches") / "match.arena"
    write_random_recording(path, decisions=60)
    return path


def test_a_recording_is_described_and_verified(call: Call, file: Path) -> None:
    result = call("games", "arena", "replay", file, "--check", "--json")
    assert result.code == 0
    assert result.json["mode"] == "1v1"
    assert result.json["camps"] == ["Blue · left", "Red · right"]
    assert result.json["outcome"] == "not over after 0:12"
    assert result.json["hash"] == verify(read_recording(file))
    assert "bit for bit: 60 decisions" in call("games", "arena", "replay", file, "--check").out


def test_a_moment_becomes_a_picture_and_a_match_a_film(call: Call, file: Path, tmp_path: Path) -> None:
    picture, film = tmp_path / "moment.png", tmp_path / "film.mp4"
    arguments = [
        "--picture",
        picture,
        "--at",
        "6",
        "--camp",
        "1",
        "--video",
        film,
        "--speed",
        "20",
        "--fps",
        "5",
        "--width",
        "320",
    ]
    result = call("games", "arena", "replay", file, *arguments)
    assert result.code == 0, result.err
    assert result.out.splitlines()[1:] == [f"picture    {picture}", f"video      {film}"]
    with Image.open(picture) as image:
        assert image.size == (320, 136)
    assert film.stat().st_size > 1_000


def test_a_match_names_the_files_it_wrote_also_as_json(call: Call, tmp_path: Path) -> None:
    recording, picture = tmp_path / "m.arena", tmp_path / "end.png"
    result = call("games", "arena", "play", "--record", recording, "--picture", picture, "--width", "160", "--json")
    assert (result.json["recording"], result.json["picture"]) == (str(recording), str(picture))
    assert "video" not in result.json
    assert recording.exists()
    assert picture.exists()


def test_a_file_that_is_none_is_one_line(call: Call, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("nothing")
    result = call("games", "arena", "replay", text)
    assert result.code == 2
    assert "notes.txt is not a recording of the Arena" in one_line(result)
    result = call("games", "arena", "replay", tmp_path / "gone.arena")
    assert result.code == 1
    assert "There is no file" in one_line(result)


def test_the_heroes_are_listed_with_their_skills(call: Call) -> None:
    result = call("games", "arena", "heroes")
    assert result.code == 0
    for hero in HEROES:
        (line,) = (line for line in result.out.splitlines() if line.split()[:2] == [str(hero.id), hero.name])
        assert all(skill.name in line for skill in hero.skills)
    assert [row["id"] for row in call("games", "arena", "heroes", "--json").json] == [hero.id for hero in HEROES]


def test_two_scripts_play_a_match_that_can_be_replayed(call: Call, tmp_path: Path) -> None:
    file, picture = tmp_path / "match.arena", tmp_path / "end.png"
    arguments = ["--camps", "nearest,random", "--heroes", "Ember/tank", "--seed", "3", "--record", file, "--picture", picture]
    output = call("games", "arena", "play", *arguments, "--json")
    assert output.code == 0, output.err
    found = read_recording(file)
    assert found.names == ("nearest", "random")
    assert output.json["lineup"] == [["Ember"], ["Bulwark"]]
    assert output.json["winner"] == found.result["winner"]
    assert [hero["hero"] for hero in output.json["heroes"]] == ["Ember", "Bulwark"]
    assert found.result["over"]
    verify(found)
    with Image.open(picture) as image:
        assert image.size == (1280, 720)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--camps", "hard"], "does not name two scripted bots"),
        (["--camps", "hard,mediun"], "medium"),
        (["--mode", "2v3"], "no mode '2v3'"),
        (["--heroes", "Ember"], "does not fit 1v1"),
        (["--heroes", "Ember/Nobody"], "no hero 'Nobody'"),
        (["--start-from", "nowhere.state"], "no file nowhere.state"),
    ],
)
def test_a_match_that_cannot_be_is_one_line(arguments: list[str], expected: str, call: Call) -> None:
    result = call("games", "arena", "play", *arguments)
    assert result.code in (1, 2)
    assert expected in one_line(result)


def test_scripts_play_one_another(call: Call) -> None:
    result = call("games", "arena", "ladder", "--games", "2", "--pairs", "nearest:random", "--json")
    assert result.code == 0, result.err
    (row,) = result.json
    assert (row["first"], row["second"], row["games"]) == ("nearest", "random", 2)
    assert row["won"] + row["lost"] + row["drawn"] == 2


def test_the_table_of_a_match_fits_into_a_terminal_of_80_columns() -> None:
    numbers = {"level": 10, "kills": 4, "deaths": 1, "assists": 8, "last hits": 12, "gold": 12_780, "damage": 18_428}
    row = {"camp": "Blue", "hero": "Bulwark"} | numbers | {"to buildings": 2_045, "healed": 13_183}
    out = io.StringIO()
    games._print_table([row], Console(file=out, force_terminal=True, color_system=None, width=80))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines if line.startswith("Blue")] == [
        [
            "Blue",
            "Bulwark",
            "10",
            "4",
            "1",
            "8",
            "12",
            "12,780",
            "18,428",
            "2,045",
            "13,183",
        ]
    ]
