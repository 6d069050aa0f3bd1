"""The interface that battles use to play matches in each kind of game."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from ludus.tournament.result import MatchRecording, MatchResult
from ludus.tournament.settings import Pairing


@dataclass(frozen=True)
class MatchEnd:
    """A match that has ended, with its recording if one was made."""

    result: MatchResult
    recording: MatchRecording | None = None


OnMatchEnd = Callable[[MatchEnd], None]


class Stage(Protocol):
    """Plays matches between two contestants. A context manager: leaving it stops what still runs."""

    notes: list[str]
    """Caveats for the reader of the result. Recordings may append to it after the stage is closed."""

    @property
    def pairings(self) -> Sequence[Pairing]:
        """The matches of the battle, in the order in which they start. Raises UsageError, ConfigError."""
        ...

    @property
    def description(self) -> dict[str, object]:
        """The game and where it runs; becomes part of `BattleResult.terms`."""
        ...

    def play(self, pairings: Sequence[Pairing], on_end: OnMatchEnd) -> None:
        """Play all pairings and call `on_end` for each one as it ends, in this thread and in any order."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
