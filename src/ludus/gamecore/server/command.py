"""Builds the command and environment of a game from its catalogue entry and a request. Pure: starts no process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ludus.gamecore.server.catalogue import OPTION, Catalogue, GameEntry, fill_placeholders, find_placeholders
from ludus.gamecore.server.request import GameRequest

CONFIG, RESULT, TOKEN = "LUDUS_GAME_CONFIG", "LUDUS_GAME_RESULT", "LUDUS_GAME_TOKEN_"
STATES, SHARE = "LUDUS_GAME_STATES", "LUDUS_GAME_STATES_SHARE"
USE_WINE = "SIMULATOR_USE_WINE"

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "NUMBA_CACHE_DIR"),
)
"""Variables of the server's environment that games inherit; further ones are listed under `inherit` in the catalogue."""


@dataclass(frozen=True)
class GameDirectory:
    """Directory of one game and its files."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        return self.path / "game.log"

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    @property
    def prefix(self) -> Path:
        """Wine prefix, for games that use Wine."""
        return self.path / "wine"


@dataclass(frozen=True)
class GameCommand:
    """Arguments of `Games.start`."""

    words: tuple[str, ...]
    environment: dict[str, str]
    directory: Path


def build_command(
    catalogue: Catalogue,
    request: GameRequest,
    game_dir: GameDirectory,
    states: Path | None,
    base_environment: Mapping[str, str],
    free_port: Callable[[], int],
) -> GameCommand:
    """`states`: directory in which the game may save states; `base_environment`: the server's. `free_port` is called only if needed."""
    entry = catalogue.games[request.game]
    program, *arguments = entry.command
    if "/" in program and not program.startswith(("/", "{")):
        program = str(catalogue.base / program)
    words = (*entry.wrapper, *_wine(entry, base_environment), program, *arguments)
    used = find_placeholders((*words, *entry.environment.values()))
    values = {
        "python": sys.executable,
        "runtime_id": request.runtime_id,
        "directory": str(game_dir.path),
        "config": str(game_dir.config),
        "result": str(game_dir.result),
        **{
            OPTION + name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in request.options.items()
        },
    }
    if "port" in used:
        values["port"] = str(free_port())
    environment = {name: base_environment[name] for name in (*INHERITED, *entry.inherit) if name in base_environment}
    environment["PYTHONUNBUFFERED"] = "1"  # otherwise the last output of a killed game is lost
    if "wine" in words:
        environment |= {"WINEPREFIX": str(game_dir.prefix), "WINEDEBUG": "-all"}
    if "xvfb-run" in words:
        environment["TMPDIR"] = str(game_dir.path)  # a stopped xvfb-run leaves a directory there
    environment |= {name: fill_placeholders(value, values) for name, value in entry.environment.items()}
    environment |= {CONFIG: str(game_dir.config), RESULT: str(game_dir.result)}
    if states is not None:
        environment[STATES] = str(states)
        if request.plays_several and entry.states is not None:
            environment[SHARE] = str(entry.states.ratio)
    for index, camp in enumerate(request.camps):
        if camp is not None and camp.token is not None:
            environment[f"{TOKEN}{index}"] = camp.token
    directory = game_dir.path if entry.directory is None else catalogue.base / entry.directory
    return GameCommand(tuple(fill_placeholders(word, values) for word in words), environment, directory)


def has_wrapper(entry: GameEntry, base_environment: Mapping[str, str]) -> bool:
    """Whether a wrapper precedes the command."""
    return bool(entry.wrapper or _wine(entry, base_environment))


def uses_wine(entry: GameEntry, base_environment: Mapping[str, str]) -> bool:
    return entry.uses_wine or bool(_wine(entry, base_environment))


def _wine(entry: GameEntry, base_environment: Mapping[str, str]) -> tuple[str, ...]:
    return ("wine",) if entry.windows and base_environment.get(USE_WINE) == "1" and not entry.uses_wine else ()
