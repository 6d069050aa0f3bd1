"""Read and write saved states of matches: the bytes of `Arena.save` with a header and a checksum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ludus.errors import ConfigError, Damaged
from ludus.games.arena.engine.checksummed_file import encode_file, read_file, write_file
from ludus.games.arena.engine.heroes import HEROES
from ludus.games.arena.engine.layout import HERO_ROW, RULES, TICK, TICKS_PER_SECOND
from ludus.games.arena.engine.vector import parse_state

KIND: Final = b"LudusArenaMoment"


@dataclass(frozen=True)
class SavedState:
    data: bytes
    """Input of `Arena.load`."""
    size: int
    tick: int
    heroes: tuple[str, ...]

    @property
    def mode(self) -> str:
        return f"{self.size}v{self.size}"

    @property
    def seconds(self) -> float:
        return self.tick / TICKS_PER_SECOND


def write_state(path: Path, data: bytes) -> Path:
    """Write atomically. Raises ConfigError for an invalid state, StoreError if the file cannot be written."""
    state = _summarise_state(data)
    header: dict[str, Any] = {"rules": RULES, "mode": state.mode, "tick": state.tick, "heroes": list(state.heroes)}
    return write_file(path, encode_file(KIND, header, [data]))


def read_state(path: Path) -> SavedState:
    """Raises NotFound, UsageError for a file of another kind, Damaged for a truncated one, ConfigError for other rules."""
    _, parts = read_file(path, KIND, "a saved state of the Arena")
    if len(parts) != 1:
        raise Damaged(f"{path} has {len(parts)} parts instead of one.")
    try:
        return _summarise_state(parts[0])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.hint) from error


def _summarise_state(data: bytes) -> SavedState:
    size, match, units = parse_state(data)
    names = tuple(HEROES[row].name for row in units[HERO_ROW, : 2 * size])
    return SavedState(data, size, int(match[TICK]), names)
