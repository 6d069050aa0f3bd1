"""Opponents of matches that external games play in sessions: which side learns, and which version plays the other.

The learning side depends only on the name of the match and the seed, so that all processes of a gateway choose the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ludus.config.schema import SelfPlayConfig
from ludus.core.types import DEFAULT_MODEL
from ludus.models.inference.batched_policy import BatchedPolicy
from ludus.models.inference.served_policy import ServedDecider
from ludus.models.policy import Policy
from ludus.models.weights.version_store import FixedSource, PolicySource
from ludus.sampling.league_policies import ScriptDecider
from ludus.sampling.self_play import OpponentDraw, OpponentPolicies, PolicyHistory


def sides_of(settings: SelfPlayConfig, seats: Sequence[str]) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the names of both sides: `sides`, or the two seats of a session; None: the sides are only called 0 and 1."""
    if settings.sides is not None:
        first, second = settings.sides
        return frozenset(first), frozenset(second)
    return (frozenset(seats[:1]), frozenset(seats[1:])) if len(seats) == 2 else None


def seats_are_sides(settings: SelfPlayConfig, seats: Sequence[str]) -> bool:
    """Whether the seats of one session are both sides of a match."""
    sides = sides_of(settings, seats)
    return sides is not None and frozenset().union(*sides) == set(seats)


@dataclass(frozen=True)
class SessionResult:
    """How a session of a match has ended."""

    complete: bool
    """The game has ended it, with the outcome of the last actions."""
    returns: tuple[Sequence[float], Sequence[float]]
    """By side: the returns of the seats that the session has played."""
    acted: frozenset[int]
    """Sides for which it has chosen an action."""
    winners: frozenset[int | None] = frozenset()
    """The side that has won, as reported by the game; None: a draw. Empty: the game has reported none."""


SessionPolicy = BatchedPolicy[Any] | ServedDecider | ScriptDecider


class MatchOpponents(Protocol):
    """Opponents of the matches of one process."""

    steps: int
    """Ticks of the matches so far, counted by the caller; self_play.period refers to them."""

    def join(self, match: str) -> tuple[int, Callable[[str], SessionPolicy]]:
        """Count a session of a match. Return the side that learns, 0 or 1, and the policies of the other side, by seat."""
        ...

    def leave(self, match: str, result: SessionResult) -> None:
        """Count the end of a session of a match."""
        ...

    def update(self) -> None:
        """Do periodic work; called about once a second."""
        ...

    def close(self) -> None:
        """No session will follow."""
        ...


def match_random(seed: int, match: str) -> np.random.Generator:
    """The random numbers of a match, the same in all processes."""
    return np.random.default_rng([seed, *np.frombuffer(hashlib.sha256(match.encode()).digest(), np.uint32).tolist()])


@dataclass
class _Match:
    learning: int
    version: int | None
    """The version that plays the other side; None: the newest one."""
    sessions: int = 0


class SessionOpponents:
    """The newest version and earlier ones. A match keeps its opponent until its last session in this process has ended.

    Implements MatchOpponents.
    """

    def __init__(
        self,
        settings: SelfPlayConfig,
        newest: BatchedPolicy[Policy],
        source: PolicySource,
        seed: int,
        *,
        model: str = DEFAULT_MODEL,
        run: Path | None = None,
        deterministic: bool = False,
    ) -> None:
        """`newest`: the policy of the learning side. `run`: directory that may have stored earlier versions."""
        self._swap_sides, self._seed, self._deterministic = settings.swap_sides, seed, deterministic
        self._newest, self._source = newest, source
        self._history = PolicyHistory(settings, model)
        policy, version = source.newest()
        self._history.add(policy, version)
        if run is not None:
            self._history.load_from_run(run, version)
        self._draw, self._policies = OpponentDraw(settings, self._history), OpponentPolicies(policy)
        self._playing: dict[int, BatchedPolicy[Policy]] = {}
        self._matches: dict[str, _Match] = {}
        self.steps = 0

    def join(self, match: str) -> tuple[int, Callable[[str], SessionPolicy]]:
        joined = self._matches.get(match)
        if joined is None:
            joined = self._matches[match] = self._draw_match(match)
        joined.sessions += 1
        policy = self._newest if joined.version is None else self._playing[joined.version]
        return joined.learning, lambda seat: policy

    def versions(self) -> dict[str, int | None]:
        """Match → the past version that plays its other side; None: the newest version."""
        return {name: match.version for name, match in self._matches.items()}

    def leave(self, match: str, result: SessionResult) -> None:
        left = self._matches[match]
        left.sessions -= 1
        if not left.sessions:
            del self._matches[match]

    def update(self) -> None:
        """There is no periodic work."""

    def close(self) -> None:
        """Nothing to close."""

    def _draw_match(self, name: str) -> _Match:
        random = match_random(self._seed, name)
        learning = int(random.integers(2)) if self._swap_sides else 0
        self._history.add(*self._source.newest())
        in_use = {match.version for match in self._matches.values() if match.version is not None}
        version = self._draw.draw(random, self.steps, lambda: in_use)
        if version is not None and version not in self._playing:
            kept = {version, *in_use, *self._draw.active}
            self._policies.load(version, self._draw.active[version])
            self._policies.keep(kept)
            self._playing = {number: policy for number, policy in self._playing.items() if number in kept}
            fixed = FixedSource(self._policies[version])
            seed = int(random.integers(1 << 31))
            self._playing[version] = BatchedPolicy(fixed, seed=seed, deterministic=self._deterministic)
        return _Match(learning, version)
