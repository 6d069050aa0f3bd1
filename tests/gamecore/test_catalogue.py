"""Catalogues: valid entries and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.errors import ConfigError, Refused
from ludus.gamecore.server import catalogue
from ludus.gamecore.server.catalogue import Catalogue, GameEntry, fill_placeholders, find_placeholders, parse


def one(text: str) -> GameEntry:
    return parse(f"games: {{a: {{{text}}}}}", "games.yaml", Path("/c")).games["a"]


def test_the_built_in_catalogue_has_the_arena() -> None:
    found = catalogue.read()
    arena = found.games["arena"]
    assert {"1v1", "3v3"} <= set(arena.modes)
    assert arena.command[1:] == ("-P", "-m", "ludus.games.arena")


def test_an_entry_needs_only_a_command() -> None:
    entry = one("command: [./game, 8080, 0.5, -v]")
    assert entry.command == ("./game", "8080", "0.5", "-v")
    assert entry.restart.on == "never"
    assert entry.limits.seconds == 3600
    assert entry.states is None
    assert entry.supports_mode("anything")


def test_a_restart_section_enables_restarts() -> None:
    assert one("command: [x], restart: {times: 2}").restart.on == "crash"
    assert one("command: [x], restart: {on: never}").restart.on == "never"


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("nice", ("nice", "-n", "10")),
        ("wine", ("wine",)),
        ("[nice, xvfb-run]", ("nice", "-n", "10", "xvfb-run", "--auto-servernum")),
        ("[taskset, -c, 1]", ("taskset", "-c", "1")),
        ("[nice, [prlimit, --as=1000]]", ("nice", "-n", "10", "prlimit", "--as=1000")),
        ("[]", ()),
    ],
)
def test_wrappers_are_names_words_and_lists_of_them(wrapper: str, words: tuple[str, ...]) -> None:
    assert one(f"command: [x], wrapper: {wrapper}").wrapper == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("comand: [x]", "unknown key 'games.a.comand'. Did you mean 'command'"),
        ("command: []", "games.a.command: "),
        ("command: x", "games.a.command: "),
        ("command: ['']", "begins with an empty word"),
        ("command: [x, true]", "games.a.command.1: "),
        ("command: [x, '{prt}']", "an unknown placeholder 'prt'. Did you mean 'port'"),
        ("command: [x, '{options.speed}']", "placeholder 'options.speed'"),
        ("command: [x, 'a { b']", "an unmatched brace"),
        ("command: [x], limits: {second: 1}", "unknown key 'games.a.limits.second'. Did you mean 'seconds'"),
        ("command: [x], limits: {seconds: 0}", "games.a.limits.seconds: "),
        ("command: [x], limits: {seconds: .inf}", "games.a.limits.seconds: "),
        ("command: [x], limits: {seconds: true}", "games.a.limits.seconds: "),
        ("command: [x], limits: {memory_mb: '5'}", "games.a.limits.memory_mb: "),
        ("command: [x], restart: {on: always}", "games.a.restart.on: "),
        ("command: [x], wrapper: wne", "wrapper 'wne' is unknown. Did you mean 'wine'"),
        ("command: [x], states: {save: 2}", "from 0 to 1"),
        ("command: [x], environment: {A-B: c}", "games.a.environment.A-B"),
        ("command: [x], environment: {LUDUS_GAME_CONFIG: c}", "which the server sets itself"),
        ("command: [x], warm: 'os; id'", "games.a.warm: "),
        ("command: [x], modes: ['../x']", "games.a.modes.0: "),
        ("command: [x], options: {s: {type: number, default: 0}}", "a number needs a minimum and a maximum"),
        ("command: [x], options: {s: {type: string, default: -x}}", "it must match"),
        ("command: [x], options: {s: {type: string, pattern: '('}}", "not a regular expression"),
        ("command: [x], options: {s: {type: integer, minimum: 0, maximum: 5, default: 1.5}}", "an integer is expected"),
        ("command: [x], options: {S/x: {type: boolean}}", "games.a.options.S/x"),
    ],
)
def test_invalid_entries_are_reported_with_their_key(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        one(text)
    assert said in str(caught.value)


def test_game_names_cannot_be_paths() -> None:
    for name in ("../a", "a/b", "a b", "-a", ".a", "''"):
        with pytest.raises(ConfigError):
            parse(f"games: {{{name}: {{command: [x]}}}}", "games.yaml", Path("/c"))
    for text in ("", "games: {}", "[]", "games: 5", "game: {a: {command: [x]}}"):
        with pytest.raises(ConfigError, match=r"games\.yaml"):
            parse(text, "games.yaml", Path("/c"))


def test_a_missing_game_directory_is_reported_when_the_catalogue_is_read(tmp_path: Path) -> None:
    path = tmp_path / "games.yaml"
    path.write_text("games: {a: {command: [x], directory: nowhere}}")
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        catalogue.read(path)
    (tmp_path / "nowhere").mkdir()
    assert catalogue.read(path).games["a"].directory == "nowhere"


def test_placeholders_are_filled_once_and_stay_inside_their_word() -> None:
    assert fill_placeholders("a{x}b{{c}}", {"x": "{y} $(z)"}) == "a{y} $(z)b{c}"
    assert find_placeholders(["{a}{b}", "{{c}}"]) == {"a", "b"}


def test_a_game_is_chosen_by_name_or_by_the_first_that_plays_the_mode() -> None:
    found = parse("games: {a: {command: [x], modes: [1v1]}, b: {command: [x], modes: [1v1, 3v3]}}", "f", Path("/c"))
    assert found.choose_game(None, "1v1") == "a"
    assert found.choose_game(None, "3v3") == "b"
    assert found.choose_game(None, None) == "a"
    assert found.choose_game("b", "1v1") == "b"
    for game, mode in (("c", None), ("a", "3v3"), (None, "5v5")):
        with pytest.raises(Refused) as caught:
            found.choose_game(game, mode)
        assert (caught.value.status, caught.value.error) == (404, "unknown_game")


def test_options_have_defaults_only_if_declared() -> None:
    entry = one(
        "command: [x, '{options.n}'], options: {n: {type: integer, minimum: 1, maximum: 3, default: 2},"
        " s: {type: string, choices: [a, b]}, f: {type: boolean, default: false}}"
    )
    assert entry.resolve_options({}) == {"n": 2, "f": False}
    assert entry.resolve_options({"s": "b", "f": True, "n": 3}) == {"n": 3, "f": True, "s": "b"}
    for wrong in ({"s": "c"}, {"n": 4}, {"n": 2.0}, {"n": True}, {"f": 1}, {"x": 1}):
        with pytest.raises(Refused):
            entry.resolve_options(wrong)
    assert isinstance(parse("games: {a: {command: [x]}}", "f", Path("/c")), Catalogue)
