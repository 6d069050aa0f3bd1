"""The interface of a small two-player game whose tree can be enumerated."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, Protocol

CHANCE: Final = -1
"""Player number of a chance node."""
TERMINAL: Final = -2
"""Player number of a finished game."""


class ExtensiveGame(Protocol):
    """A finite zero-sum game of two players with perfect recall. States are hashable values; no method changes one."""

    name: str
    num_actions: int
    """Number of different actions of the players; actions are 0 … num_actions - 1."""

    def root(self) -> Hashable: ...

    def player(self, state: Any) -> int:
        """The player who acts: 0, 1, CHANCE or TERMINAL."""
        ...

    def chance_outcomes(self, state: Any) -> Sequence[tuple[int, float]]:
        """Outcomes of a chance node with their probabilities."""
        ...

    def legal_actions(self, state: Any) -> Sequence[int]: ...

    def child(self, state: Any, action: int) -> Hashable: ...

    def returns(self, state: Any) -> float:
        """Return of player 0 in a finished game; player 1 gets the negative."""
        ...

    def information(self, state: Any) -> Hashable:
        """What the acting player knows. Equal values form one information set; they must occur at one depth of the tree."""
        ...
