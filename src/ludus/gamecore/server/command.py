"""From an entry of the catalogue and an order to a command with its environment. Pure: no process is started here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.gamecore.server.catalogue import OPTION, Catalogue, Entry, filled, holes
from ludus.gamecore.server.request import Order

CONFIG, RESULT, TOKEN = "LUDUS_GAME_CONFIG", "LUDUS_GAME_RESULT", "LUDUS_GAME_TOKEN_"
STATES, SHARE = "LUDUS_GAME_STATES", "LUDUS_GAME_STATES_SHARE"
USE_WINE = "SIMULATOR_USE_WINE"

INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "NUMBA_CACHE_DIR"),
)
"""Of the server's environment; nothing else reaches a game, unless its entry says `inherit`."""


@dataclass(frozen=True)
class Place:
    """Where one game lives."""

    directory: Path

    @property
    def config(self) -> Path:
        return self.directory / "config.json"

    @property
    def result(self) -> Path:
        return self.directory / "result.json"

    @property
    def log(self) -> Path:
        return self.directory / "game.log"

    @property
    def record(self) -> Path:
        return self.directory / "record.json"

    @property
    def prefix(self) -> Path:
        """Of Wine, for games that need it."""
        return self.directory / "wine"


@dataclass(frozen=True)
class Launch:
    """What `CommandRunner.start` is given."""

    command: tuple[str, ...]
    environment: dict[str, str]
    directory: Path


def launch(
    catalogue: Catalogue,
    order: Order,
    place: Place,
    states: Path | None,
    surroundings: Mapping[str, str],
    free_port: Callable[[], int],
) -> Launch:
    """`states`: where the game may save some; `surroundings`: the server's own environment. `free_port` is asked only if one is used."""
    entry = catalogue.games[order.game]
    words = _words(entry, catalogue.base, surroundings)
    used = holes((*words, *entry.environment.values()))
    values = {
        "python": sys.executable,
        "runtime_id": order.runtime_id,
        "directory": str(place.directory),
        "config": str(place.config),
        "result": str(place.result),
        **{OPTION + name: _as_word(value) for name, value in order.options.items()},
    }
    if "port" in used:
        values["port"] = str(free_port())
    environment = {name: surroundings[name] for name in (*INHERITED, *entry.inherit) if name in surroundings}
    environment["PYTHONUNBUFFERED"] = "1"  # else the last lines of a game that is killed are lost
    if "wine" in words:
        environment |= {"WINEPREFIX": str(place.prefix), "WINEDEBUG": "-all"}
    if "xvfb-run" in words:
        environment["TMPDIR"] = str(place.directory)  # one that is stopped leaves a directory there
    environment |= {name: filled(value, values) for name, value in entry.environment.items()}
    environment |= {CONFIG: str(place.config), RESULT: str(place.result)}
    if states is not None:
        environment[STATES] = str(states)
        if order.plays_on and entry.states is not None:
            environment[SHARE] = str(entry.states.ratio)
    for index, camp in enumerate(order.camps):
        if camp is not None and camp.token is not None:
            environment[f"{TOKEN}{index}"] = camp.token
    directory = place.directory if entry.directory is None else catalogue.base / entry.directory
    return Launch(tuple(filled(word, values) for word in words), environment, directory)


def wrapped(entry: Entry, surroundings: Mapping[str, str]) -> bool:
    """Whether anything stands before its command."""
    return bool(entry.wrapper or _wine(entry, surroundings))


def uses_wine(entry: Entry, surroundings: Mapping[str, str]) -> bool:
    return entry.uses_wine or bool(_wine(entry, surroundings))


def _wine(entry: Entry, surroundings: Mapping[str, str]) -> tuple[str, ...]:
    return ("wine",) if entry.windows and surroundings.get(USE_WINE) == "1" and not entry.uses_wine else ()


def _words(entry: Entry, base: Path, surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """Wrappers first, the program as it is found from the catalogue."""
    program, *rest = entry.command
    if "/" in program and not program.startswith(("/", "{")):
        program = str(base / program)
    return (*entry.wrapper, *_wine(entry, surroundings), program, *rest)


def _as_word(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
