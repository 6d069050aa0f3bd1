"""The catalogue of games that a server can start, read from a YAML file. Nothing else can be started.

    games:
      mygame:
        command: [./mygame, --headless, --config, "{config}"]
        modes: [1v1]
        limits: {seconds: 1800, memory_mb: 2000}

Everything except `read` is pure.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ludus.core.plugins import did_you_mean
from ludus.errors import ConfigError, Refused
from ludus.io.yaml_documents import parse_yaml, read_text

BUILTIN = Path(__file__).with_name("games.yaml")
MAX_BYTES = 1_000_000

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of games, modes and runtime ids: never empty, a path or an option."""

STATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""Names of saved states, which games derive from their ids."""

WRAPPERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"wine": ("wine",), "xvfb-run": ("xvfb-run", "--auto-servernum"), "nice": ("nice", "-n", "10")}
)
PLACEHOLDERS = frozenset({"python", "runtime_id", "directory", "config", "result", "port"})
OPTION = "options."
_RESERVED = "LUDUS_GAME_"
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_MAX_TEXT = 128
_WEEK_S = 7 * 24 * 3600.0


def _to_word(value: Any) -> Any:
    """Accept numbers such as 8080 and 0.5 as words."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


Word = Annotated[str, BeforeValidator(_to_word), Field(pattern=r"^[^\x00]*$")]
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]  # a Rust pattern: $ matches only at the end
Variable = Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=(), allow_inf_nan=False)


class GameLimits(_Section):
    seconds: float = Field(3600.0, gt=0, le=_WEEK_S)
    memory_mb: int | None = Field(None, ge=1)
    threads: int | None = Field(None, ge=1, le=100_000)
    log_mb: float = Field(10.0, gt=0, le=100_000)
    games: int | None = Field(None, ge=1)
    start_s: float | None = Field(None, gt=0, le=_WEEK_S)


class GameRestartPolicy(_Section):
    on: Literal["crash", "never"] = "crash"
    times: int = Field(3, ge=0, le=1000)
    backoff_s: float = Field(1.0, ge=0, le=3600)


class StatePolicy(_Section):
    save: bool | float = True
    keep: int = Field(1000, ge=0, le=1_000_000)
    keep_mb: float = Field(1000.0, gt=0)

    @property
    def ratio(self) -> float:
        """Share of matches that may save states."""
        return float(self.save)

    @model_validator(mode="after")
    def _validate(self) -> StatePolicy:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"save is {self.save}: expected true, false or a share of the matches from 0 to 1")
        return self


class GameOption(_Section):
    """An option of a game that callers may set."""

    type: Literal["number", "integer", "boolean", "string"]
    default: bool | int | float | str | None = None
    """None: the game gets the option only if the caller sets it."""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str | None = None

    @model_validator(mode="after")
    def _validate(self) -> GameOption:
        if self.type in ("number", "integer") and (self.minimum is None or self.maximum is None):
            raise ValueError("a number needs a minimum and a maximum")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern is not a regular expression: {error}") from error
        if self.default is not None and (wrong := self.problem_with(self.default)):
            raise ValueError(f"default is {self.default!r}: {wrong}")
        return self

    def problem_with(self, value: Any) -> str:
        """Describe why a value is invalid; empty: it is valid."""
        if self.type == "boolean":
            return "" if isinstance(value, bool) else "true or false is expected"
        if self.type == "string":
            return self._text_problem(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            return f"{'an integer' if self.type == 'integer' else 'a number'} is expected"
        if self.type == "integer" and not isinstance(value, int):
            return "an integer is expected"
        assert self.minimum is not None
        assert self.maximum is not None
        return "" if self.minimum <= value <= self.maximum else f"it must be from {self.minimum:g} to {self.maximum:g}"

    def _text_problem(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > _MAX_TEXT or "\0" in value:
            return f"a text of at most {_MAX_TEXT} characters is expected"
        if self.choices:
            return "" if value in self.choices else f"it must be one of {', '.join(self.choices)}"
        pattern = NAME if self.pattern is None else re.compile(self.pattern)
        return "" if pattern.fullmatch(value) else f"it must match {pattern.pattern}"


def _expand_wrapper(wrapper: Any) -> Any:
    """Expand a wrapper: a name such as `nice`, or a list of names, words and lists of words."""
    if isinstance(wrapper, str):
        if wrapper not in WRAPPERS:
            raise ValueError(f"wrapper {wrapper!r} is unknown. {did_you_mean(wrapper, WRAPPERS)} A command is a list of words")
        return WRAPPERS[wrapper]
    if not isinstance(wrapper, list):
        return wrapper
    words: list[Any] = []
    for item in wrapper:
        if isinstance(item, list):
            words += map(_to_word, item)
        elif isinstance(item, str) and item in WRAPPERS:
            words += WRAPPERS[item]
        else:
            words.append(_to_word(item))
    return tuple(words)


class GameEntry(_Section):
    """The catalogue entry of one game."""

    command: tuple[Word, ...] = Field(min_length=1)
    environment: dict[Variable, Word] = {}
    inherit: tuple[Variable, ...] = ()
    directory: str | None = None
    modes: tuple[Name, ...] = ()
    wrapper: Annotated[tuple[str, ...], BeforeValidator(_expand_wrapper)] = ()
    """Words before the command."""
    display: Literal["auto", "xvfb", "egl", "none"] = "none"
    """Screen of the game."""
    windows: bool = False
    limits: GameLimits = GameLimits()
    restart: GameRestartPolicy = GameRestartPolicy(on="never")
    states: StatePolicy | None = None
    options: dict[Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,63}$")], GameOption] = {}
    warm: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")] | None = None
    grace_s: float = Field(5.0, ge=0, le=600)

    @model_validator(mode="after")
    def _validate(self) -> GameEntry:
        for word in (*self.command, *self.wrapper, *self.environment.values()):
            self._check_placeholders(word)
        if reserved := [name for name in self.environment if name.startswith(_RESERVED)]:
            raise ValueError(f"environment sets {reserved[0]}, which the server sets itself")
        if not self.command[0]:
            raise ValueError("command begins with an empty word")
        return self

    def _check_placeholders(self, word: str) -> None:
        for found in _PLACEHOLDER.finditer(word):
            name = found[1]
            if name is None and found[0] in ("{", "}"):
                raise ValueError(f"{word!r} has an unmatched brace; write a literal brace twice")
            known = {*PLACEHOLDERS, *(OPTION + key for key, option in self.options.items() if option.default is not None)}
            if name is not None and name not in known:
                hint = f"{did_you_mean(name, known)} Write a literal brace twice"
                raise ValueError(f"{word!r} has an unknown placeholder {name!r}. {hint}")

    @property
    def uses_wine(self) -> bool:
        return "wine" in self.wrapper

    def supports_mode(self, mode: str | None) -> bool:
        return mode is None or not self.modes or mode in self.modes

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a match: given values over defaults. Raises Refused."""
        for name, value in given.items():
            if name not in self.options:
                raise Refused(400, "option", f"options.{name[:64]} does not exist.", did_you_mean(name, self.options))
            if wrong := self.options[name].problem_with(value):
                raise Refused(400, "option", f"options.{name} is {_quote(value)}: {wrong}.")
        defaults = {name: option.default for name, option in self.options.items() if option.default is not None}
        return {**defaults, **given}


def fill_placeholders(word: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of one word. The result stays one word."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]] if found[1] is not None else found[0][0], word)


def find_placeholders(words: Iterable[str]) -> set[str]:
    """Return the names of all placeholders."""
    return {found[1] for word in words for found in _PLACEHOLDER.finditer(word) if found[1] is not None}


@dataclass(frozen=True)
class Catalogue:
    """`base`: directory that paths in the catalogue are relative to."""

    games: Mapping[str, GameEntry]
    base: Path

    def choose_game(self, game: str | None, mode: str | None) -> str:
        """Return `game` if given, else the first game with this mode. Raises Refused."""
        if game is not None:
            if game not in self.games:
                raise Refused(404, "unknown_game", f"There is no game {_quote(game)}.", did_you_mean(game[:128], self.games))
            if not self.games[game].supports_mode(mode):
                modes = ", ".join(self.games[game].modes)
                raise Refused(404, "unknown_game", f"{game} has no mode {_quote(mode)}.", f"It has {modes}.")
            return game
        for name, entry in self.games.items():
            if entry.supports_mode(mode):
                return name
        known = {mode for entry in self.games.values() for mode in entry.modes}
        raise Refused(404, "unknown_game", f"No game has mode {_quote(mode)}.", did_you_mean(str(mode)[:128], known))


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"


class _CatalogueFile(_Section):
    games: dict[Name, GameEntry] = Field(min_length=1)


def parse(text: str, source: str, base: Path) -> Catalogue:
    """Raises ConfigError, whose message names the key."""
    data = parse_yaml(text, source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} is not a catalogue of games.", "It has a key games: with a section for each game.")
    try:
        # Through JSON: strict mode then accepts a list as a tuple, but not "1" as a number.
        file = _CatalogueFile.model_validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        raise _to_config_error(error, source) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source} contains an unsupported value: {error}.") from error
    return Catalogue(MappingProxyType(file.games), base)


def read(path: Path | None = None) -> Catalogue:
    """Read a catalogue file (None: the built-in games). Raises ConfigError."""
    path = (path or BUILTIN).absolute()
    found = parse(read_text(path, MAX_BYTES, "It is the catalogue of games."), str(path), path.parent)
    for name, entry in found.games.items():
        if entry.directory is not None and not (path.parent / entry.directory).is_dir():
            raise ConfigError(f"{path}: games.{name}.directory {path.parent / entry.directory} does not exist.")
    return found


_MODELS: dict[str, type[_Section]] = {
    "limits": GameLimits,
    "restart": GameRestartPolicy,
    "states": StatePolicy,
    "options": GameOption,
}


def _to_config_error(error: pydantic.ValidationError, source: str) -> ConfigError:
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])  # `comand` explains the missing `command`
    path = [str(part) for part in first["loc"] if part != "[key]"]
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        model = _MODELS.get(path[2], GameEntry) if len(path) > 3 else GameEntry if len(path) > 2 else _CatalogueFile
        return ConfigError(f"{source}: unknown key {where!r}.", did_you_mean(path[-1], model.model_fields))
    if first["type"] == "missing":
        return ConfigError(f"{source}: {where} is missing.")
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{source}: {where}: {message[:1].lower()}{message[1:]}.")
