"""Environments some of whose rows are played by a fixed policy and not learned from, such as the other camp of a match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np

from ludus.core.tree import Array, Tree, map_tree
from ludus.core.types import Bools, Floats, Ints
from ludus.envs.opponents.opponent_mix import LATEST, PAST, PAST_VERSION
from ludus.errors import ConfigError

if TYPE_CHECKING:
    from ludus.envs.vector_env import Environments, Observations, StepResult


ChooseScript = Callable[[int, str], str | None]
"""(number of a match in `match_of_row`, id of the next one) → the script of the game that plays its other side, "" for the default one;
None: opponent rows do. An environment with `current_matches` calls its attribute `choose_script` when it orders a match, on any thread.
"""


class RowPlayer(Protocol):
    """Plays the opponent rows, all rows of a match with the same opponent."""

    @property
    def versions(self) -> Ints:
        """By row: the version of the learner that plays it; -1: another player does."""
        ...

    @property
    def latest(self) -> Bools:
        """By row: whether the newest version plays it."""
        ...

    def play(self, observation: Tree, mask: Bools | None, first: Bools) -> Tree:
        """Return actions as the environment takes them; `first`: rows whose episode starts."""
        ...

    def finish(self, row: int, score: float) -> None:
        """The match of an opponent row is over. `score` of the learning side: 1 won, 0.5 drawn, 0 lost."""
        ...

    def close(self) -> None:
        """No match will follow."""
        ...


class OpponentRows:
    """Exposes the rows that are learned from; `player`, set before the first step, plays the others.

    Results against `past` are reported as results against `latest` if the newest version played.
    """

    def __init__(self, inner: Environments, opponent_rows: Bools, match_of_row: Ints) -> None:
        """`match_of_row`: by row, a number of its match. The rows of a match begin and end together."""
        if not opponent_rows.any() or opponent_rows.all():
            raise ValueError("Some rows must be opponent rows, and some not.")
        if match_of_row.shape != opponent_rows.shape:
            raise ValueError(f"match_of_row has shape {match_of_row.shape}, opponent_rows has {opponent_rows.shape}.")
        self._inner, self._opponent_rows = inner, opponent_rows
        self._own_rows: Bools = ~opponent_rows
        self.name, self.num = inner.name, int(self._own_rows.sum())
        self.observation_space: gym.Space[Any] = inner.observation_space
        self.action_space: gym.Space[Any] = inner.action_space
        self.same_step_autoreset = inner.same_step_autoreset
        if self.same_step_autoreset:
            raise ConfigError(f"{inner.name} has opponent rows and same-step autoreset.", "Use next-step autoreset.")
        self.player: RowPlayer | None = None
        self.match_of_opponent: Ints = match_of_row[opponent_rows]
        """By opponent row: a number of its match."""
        row_of_match = {match: row for row, match in enumerate(self.match_of_opponent.tolist())}
        self._opponent_of: Ints = np.array([row_of_match.get(match, -1) for match in match_of_row[self._own_rows].tolist()])
        """By own row: an opponent row of its match; -1: there is none."""
        names = inner.results
        against_latest = {name: name.removesuffix(PAST) + LATEST for name in names if name.endswith(f"/{PAST}")}
        self._columns_of_latest = [(names.index(a), names.index(b)) for a, b in against_latest.items() if b in names]
        self._outcome_columns = tuple(names.index(name) if name in names else -1 for name in (f"win/{PAST}", f"loss/{PAST}"))
        self._opponent_observations: Observations | None = None
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
    def reports_outcomes(self) -> bool:
        """Whether the environment reports who has won, so that `RowPlayer.finish` is called."""
        return min(self._outcome_columns) >= 0

    def plays_script(self, name: str) -> bool:
        """Whether the environment has a script of this name that can play opponent rows."""
        inner: Any = self._inner
        return bool(inner.plays_script(name))

    @property
    def current_matches(self) -> list[str] | None:
        """By number of a match: the id of the one that has begun last. None: the environment does not tell; episodes are matches."""
        matches: list[str] | None = getattr(self._inner, "current_matches", None)
        return matches

    def choose_scripts_by(self, choose: ChooseScript) -> None:
        """Let `choose` decide about the opponents of matches, if the environment orders them in advance."""
        inner: Any = self._inner
        inner.choose_scripts_by(choose)

    def script_actions(self, rows: Ints, scripts: Sequence[str]) -> Tree:
        """Return the actions of scripts in these opponent rows now. `scripts`: a name by row."""
        inner: Any = self._inner
        return inner.script_actions(np.flatnonzero(self._opponent_rows)[rows], scripts)

    @property
    def beat(self) -> Callable[[], None]:
        return self._inner.beat

    @beat.setter
    def beat(self, beat: Callable[[], None]) -> None:
        self._inner.beat = beat

    def reset(self, seed: int | None) -> Observations:
        seen = self._inner.reset(seed)
        self._first[:], self._over[:] = True, False
        self._opponent_observations = _select_rows(seen, self._opponent_rows)
        return _select_rows(seen, self._own_rows)

    def step(self, action: Tree) -> StepResult:
        """Raises ConfigError if no player is set."""
        outcome = self._inner.step(map_tree(self._merge_rows, action, self._opponent_actions()))
        theirs = self._opponent_rows
        done = outcome.terminated[theirs] | outcome.truncated[theirs]
        self._first, self._over = self._over, done
        if outcome.lost is not None:
            self._first = self._first | outcome.lost[theirs]
        self._opponent_observations = _select_rows(outcome.observations, theirs)
        own = self._own_rows
        if outcome.results is not None:
            self._report_outcomes(outcome.results[own])
        kept = type(outcome)(
            _select_rows(outcome.observations, own),
            outcome.reward[own],
            outcome.terminated[own],
            outcome.truncated[own],
            results=None if outcome.results is None else self._results_by_opponent(outcome.results[own]),
        )
        if outcome.lost is not None and outcome.lost[own].any():
            kept.lost = outcome.lost[own]
        return kept

    def _opponent_actions(self) -> Tree:
        if self.player is None or self._opponent_observations is None:
            raise ConfigError(
                f"{self.name} needs past versions as opponents, but none are available here.",
                "For evaluations and rollouts set the opponent to a script or to self.",
            )
        return self.player.play(self._opponent_observations.observation, self._opponent_observations.mask, self._first)

    def _report_outcomes(self, results: Floats) -> None:
        """Tell the player the outcomes of finished matches. In every match one own row reports."""
        assert self.player is not None
        if not self.reports_outcomes:
            return
        won, lost = (results[:, column] for column in self._outcome_columns)
        for row in np.flatnonzero((won[:, 1] > 0) & (self._opponent_of >= 0)).tolist():
            self.player.finish(int(self._opponent_of[row]), 0.5 + 0.5 * float(won[row, 0] - lost[row, 0]))

    def _results_by_opponent(self, results: Floats) -> Floats:
        """Add the versions of the opponents, and move results against the newest version to their own columns."""
        assert self.player is not None
        opposed: Bools = self._opponent_of >= 0
        latest: Bools = opposed & self.player.latest[self._opponent_of]
        for past, newest in self._columns_of_latest:
            results[latest, newest] = results[latest, past]
            results[latest, past] = 0
        if PAST_VERSION in self.results:
            version = results[:, self.results.index(PAST_VERSION)]
            played_by = np.where(opposed, self.player.versions[self._opponent_of], 0)
            version[latest | (played_by < 0)] = 0
            version[:, 0] = version[:, 1] * played_by
        return results

    def _merge_rows(self, own: Array, theirs: Array) -> Array:
        whole = np.empty((len(self._own_rows), *own.shape[1:]), own.dtype)
        whole[self._own_rows], whole[self._opponent_rows] = own, theirs
        return whole

    def progress(self, timesteps: int) -> None:
        self._inner.progress(timesteps)

    def close(self) -> None:
        if self.player is not None:
            self.player.close()
        self._inner.close()


def _select_rows(seen: Observations, which: Bools) -> Observations:
    return type(seen)(map_tree(lambda x: x[which], seen.observation), None if seen.mask is None else seen.mask[which])
