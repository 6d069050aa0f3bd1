"""Commands built from requests: wrappers, placeholders, environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ludus.gamecore.server.catalogue import parse
from ludus.gamecore.server.command import GameCommand, GameDirectory, build_command
from ludus.gamecore.server.request import parse_request

HERE = {"PATH": "/bin", "HOME": "/home/me", "SECRET": "hush", "SHARED": "yes"}


def made(entry: str, environ: dict[str, str] | None = None, states: Path | None = None, **order: Any) -> GameCommand:
    catalogue = parse(f"games: {{a: {{{entry}}}}}", "games.yaml", Path("/cat"))
    asked = parse_request({"runtime_id": "r-1", **order}, catalogue)
    return build_command(catalogue, asked, GameDirectory(Path("/s/games/r-1")), states, HERE | (environ or {}), lambda: 4711)


def test_a_command_is_relative_to_the_catalogue_or_on_the_path() -> None:
    assert made("command: [bin/game, -x]").words == ("/cat/bin/game", "-x")
    assert made("command: [./game]").words == ("/cat/game",)
    assert made("command: [/opt/game]").words == ("/opt/game",)
    assert made("command: [game]").words == ("game",)
    assert made("command: ['{python}', -c, pass]").words == (sys.executable, "-c", "pass")


def test_placeholders_name_what_belongs_to_this_game() -> None:
    what = made("command: [game, '{runtime_id}', '--c={config}', '{directory}/x', '{result}', '{port}']")
    assert what.words[1:] == ("r-1", "--c=/s/games/r-1/config.json", "/s/games/r-1/x", "/s/games/r-1/result.json", "4711")


def test_options_reach_a_command_only_through_placeholders() -> None:
    options = "options: {f: {type: boolean, default: true}, n: {type: number, minimum: 0, maximum: 9, default: 1}}"
    assert made(f"command: [game], {options}", options={"n": 3}).words == ("game",)
    assert made(f"command: [game, 'n={{options.n}}', '{{options.f}}'], {options}", options={"n": 3}).words == (
        "game",
        "n=3",
        "true",
    )


def test_a_game_works_in_its_own_directory_unless_its_entry_has_one() -> None:
    assert made("command: [game]").directory == Path("/s/games/r-1")
    assert made("command: [game], directory: assets").directory == Path("/cat/assets")


def test_little_of_the_environment_reaches_a_game() -> None:
    found = made("command: [game], inherit: [SHARED, ABSENT], environment: {COLOUR: blue, WHO: 'me {runtime_id}'}").environment
    assert found == {
        "PATH": "/bin",
        "HOME": "/home/me",
        "SHARED": "yes",
        "PYTHONUNBUFFERED": "1",
        "COLOUR": "blue",
        "WHO": "me r-1",
        "LUDUS_GAME_CONFIG": "/s/games/r-1/config.json",
        "LUDUS_GAME_RESULT": "/s/games/r-1/result.json",
    }


def test_states_and_tokens_are_passed_in_environment_variables() -> None:
    camps = [{"address": "a:1", "token": "t0"}, {"address": "b:2"}, None]
    found = made("command: [game]", states=Path("/s/states/a"), camps=camps).environment
    assert found["LUDUS_GAME_STATES"] == "/s/states/a"
    assert found["LUDUS_GAME_TOKEN_0"] == "t0"
    assert "LUDUS_GAME_TOKEN_1" not in found
    assert "LUDUS_GAME_STATES_SHARE" not in found


@pytest.mark.parametrize(("options", "share"), [({"together": 4}, "0.25"), ({"together": 0}, None), ({}, None)])
def test_a_process_with_several_matches_gets_the_share_that_saves_states(options: dict[str, int], share: str | None) -> None:
    entry = "command: [game], states: {save: 0.25}, options: {together: {type: integer, minimum: 0, maximum: 9}}"
    found = made(entry, states=Path("/s/states/a"), options=options).environment
    assert found.get("LUDUS_GAME_STATES_SHARE") == share


def test_wine_has_a_prefix_of_its_own_for_every_game() -> None:
    what = made("command: [game.exe], wrapper: [nice, wine]")
    assert what.words == ("nice", "-n", "10", "wine", "game.exe")
    assert what.environment["WINEPREFIX"] == "/s/games/r-1/wine"
    assert "WINEPREFIX" not in made("command: [game], wrapper: nice").environment


def test_files_of_a_display_are_removed_with_the_game() -> None:
    assert made("command: [game], wrapper: xvfb-run").environment["TMPDIR"] == "/s/games/r-1"
    assert "TMPDIR" not in made("command: [game]").environment


def test_windows_games_use_wine_if_the_server_enables_it() -> None:
    asked = {"SIMULATOR_USE_WINE": "1"}
    assert made("command: [bin/game.exe], windows: true, wrapper: xvfb-run", asked).words == (
        "xvfb-run", "--auto-servernum", "wine", "/cat/bin/game.exe",
    )  # fmt: skip
    assert made("command: [game.exe], windows: true, wrapper: wine", asked).words == ("wine", "game.exe")
    assert made("command: [game], windows: true").words == ("game",)
    assert made("command: [game], windows: true", {"SIMULATOR_USE_WINE": "0"}).words == ("game",)
    assert made("command: [game]", asked).words == ("game",)
