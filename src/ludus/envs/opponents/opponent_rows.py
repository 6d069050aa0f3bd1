"""Environments some of whose rows are played by somebody who is not learned from: the other camp of a match, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools
from ludus.envs.opponents.opponent_mix import PAST_VERSION
from ludus.errors import ConfigError

if TYPE_CHECKING:
    from ludus.envs.vector_env import Environments, Outcome, Seen


class Player(Protocol):
    """Whoever plays those rows."""

    version: int

    def play(self, observation: Tree, mask: Bools | None, first: Bools) -> Tree:
        """Actions as the environment takes them; `first`: rows whose episode begins."""
        ...


class Opposed:
    """Shows the rows that are learned from, and has the others played by `player`, who comes before the first step."""

    def __init__(self, inner: Environments, opponent_rows: Bools) -> None:
        if not opponent_rows.any() or opponent_rows.all():
            raise ValueError("Some rows must be the opponent's, and some not.")
        self._inner, self._theirs = inner, opponent_rows
        self._own: Bools = ~opponent_rows
        self.name, self.num = inner.name, int(self._own.sum())
        self.observation_space: gym.Space[Any] = inner.observation_space
        self.action_space: gym.Space[Any] = inner.action_space
        self.resets_at_once = inner.resets_at_once
        if self.resets_at_once:
            raise ConfigError(f"{inner.name} has rows of opponents and resets at once.", "Use next-step autoreset.")
        self.player: Player | None = None
        self._shown: Seen | None = None
        self._first: Bools = np.ones(int(opponent_rows.sum()), np.bool_)
        self._over: Bools = np.zeros_like(self._first)

    @property
    def masked(self) -> bool:
        return self._inner.masked

    @property
    def restarts(self) -> int:
        return self._inner.restarts

    @property
    def results(self) -> tuple[str, ...]:
        return self._inner.results

    @property
    def beat(self) -> Callable[[], None]:
        return self._inner.beat

    @beat.setter
    def beat(self, beat: Callable[[], None]) -> None:
        self._inner.beat = beat

    def reset(self, seed: int | None) -> Seen:
        seen = self._inner.reset(seed)
        self._first[:], self._over[:] = True, False
        self._shown = _rows(seen, self._theirs)
        return _rows(seen, self._own)

    def step(self, action: Tree) -> Outcome:
        """Raises ConfigError when there is nobody to play the other rows."""
        outcome = self._inner.step(map_tree(self._joined, action, self._answer()))
        theirs = self._theirs
        done = outcome.terminated[theirs] | outcome.truncated[theirs]
        self._first, self._over = self._over, done
        if outcome.lost is not None:
            self._first = self._first | outcome.lost[theirs]
        self._shown = _rows(outcome.seen, theirs)
        own = self._own
        if outcome.results is not None and PAST_VERSION in self.results and self.player is not None:
            column = outcome.results[:, self.results.index(PAST_VERSION)]
            column[:, 0] = column[:, 1] * self.player.version
        kept = type(outcome)(
            _rows(outcome.seen, own),
            outcome.reward[own],
            outcome.terminated[own],
            outcome.truncated[own],
            results=None if outcome.results is None else outcome.results[own],
        )
        if outcome.lost is not None and outcome.lost[own].any():
            kept.lost = outcome.lost[own]
        return kept

    def _answer(self) -> Tree:
        if self.player is None or self._shown is None:
            raise ConfigError(
                f"{self.name} has opponents from the past, and nobody here has one.",
                "In evaluations and rollouts name a script, or self.",
            )
        return self.player.play(self._shown.observation, self._shown.mask, self._first)

    def _joined(self, own: Array, theirs: Array) -> Array:
        whole = np.empty((len(self._own), *own.shape[1:]), own.dtype)
        whole[self._own], whole[self._theirs] = own, theirs
        return whole

    def progress(self, timesteps: int) -> None:
        self._inner.progress(timesteps)

    def close(self) -> None:
        self._inner.close()


def _rows(seen: Seen, which: Bools) -> Seen:
    return type(seen)(map_tree(lambda x: x[which], seen.observation), None if seen.mask is None else seen.mask[which])
