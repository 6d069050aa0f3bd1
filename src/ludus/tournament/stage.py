"""The interface that battles use to play matches in each kind of game."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ludus.tournament.result import MatchRecording, MatchResult
from ludus.tournament.settings import Pairing


@dataclass(frozen=True)
class MatchEnd:
    """A match that has ended, with its recording if one was made."""

    result: MatchResult
    recording: MatchRecording | None = None


OnMatchEnd = Callable[[MatchEnd], None]


class Stage(abc.ABC):
    """Plays matches between two contestants. A context manager: leaving it stops what still runs."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Caveats for the reader of the result. Recordings may append to it after the stage is closed."""
        self._stack = contextlib.ExitStack()

    @property
    @abc.abstractmethod
    def pairings(self) -> Sequence[Pairing]:
        """The matches of the battle, in the order in which they start. Raises UsageError, ConfigError."""

    @property
    @abc.abstractmethod
    def description(self) -> dict[str, object]:
        """The game and where it runs; becomes part of `BattleResult.terms`."""

    @abc.abstractmethod
    def play(self, pairings: Sequence[Pairing], on_end: OnMatchEnd) -> None:
        """Play all pairings and call `on_end` for each one as it ends, in this thread and in any order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def single_torch_thread() -> Iterator[None]:
    """For small batches, where threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
