"""Matches of external games, in sessions, against the players of a league.

A match is over when all its sessions have ended. Its result is the winner that the game has reported, or else follows from the returns
of both sides. A match counts once, and only if all its sessions were played to their end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.config.schema import SelfPlayConfig
from ludus.core.types import DEFAULT_MODEL
from ludus.models.inference.batched_policy import ActingPolicy, BatchedPolicy
from ludus.models.inference.served_policy import ServedDecider, ServedPolicy
from ludus.models.policy import Policy
from ludus.models.weights.version_store import FixedSource, PolicySource
from ludus.protocol.codec import ONLY_SEAT
from ludus.sampling.league_opponents import LeagueOpponents, match_of_sides
from ludus.sampling.league_policies import ScriptDecider, ScriptedPolicy, freeze_weights, random_policy
from ludus.sampling.match_opponents import MatchOpponent
from ludus.sampling.session_opponents import MatchOpponents, SessionOpponents, SessionPolicy, SessionResult, match_random

log = logging.getLogger(__name__)


@dataclass
class _Match:
    learning: int
    opponent: MatchOpponent
    sessions: int = 0
    returns: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """By side."""
    acted: set[int] = field(default_factory=set)
    winners: set[int | None] = field(default_factory=set)
    cut: bool = False
    """A session has ended before its end."""
    deciders: list[ServedDecider | ScriptDecider] = field(default_factory=list)
    """Policies that may fail, of the opponent's seats."""


class _SessionPolicies:
    """Loaded policies. Implements FixedPolicies."""

    def __init__(self, seed: int, deterministic: bool) -> None:
        self._seed, self._deterministic = seed, deterministic
        self._policies: dict[str, BatchedPolicy[Any] | ServedPolicy] = {}

    def add_fixed(self, model: str, policy: ActingPolicy) -> None:
        freeze_weights(policy)
        self._seed += 1
        self._policies[model] = (
            policy
            if isinstance(policy, ServedPolicy)
            else BatchedPolicy(FixedSource(policy), seed=self._seed, deterministic=self._deterministic)
        )

    def remove(self, model: str) -> None:
        del self._policies[model]

    def __getitem__(self, model: str) -> BatchedPolicy[Any] | ServedPolicy:
        return self._policies[model]


class LeagueSessions:
    """Opponents that a league chooses. Implements MatchOpponents. Close it at the end: that reports the last results."""

    def __init__(
        self,
        settings: SelfPlayConfig,
        newest: BatchedPolicy[Policy],
        source: PolicySource,
        seed: int,
        *,
        seats: Sequence[str] = (),
        model: str = DEFAULT_MODEL,
        deterministic: bool = False,
    ) -> None:
        """`newest`: the policy of the learning side. `seats`: of a session."""
        assert settings.league is not None
        assert settings.player is not None
        self._swap_sides, self._seed, self._newest, self._model = settings.swap_sides, seed, newest, model
        self._policies = _SessionPolicies(seed, deterministic)
        like = source.newest()[0]
        self._random = BatchedPolicy(FixedSource(random_policy(like, seed)))
        self.steps = 0
        self._chooser = LeagueOpponents(
            Path(settings.league),
            settings.player,
            self._policies,
            model,
            like,
            lambda: self.steps,
            agents=[seat for seat in seats if seat != ONLY_SEAT],
            period=settings.period,
        )
        self._matches: dict[str, _Match] = {}
        self.counts: Counter[str] = Counter()
        """Matches by outcome: `counted`, or why they were not counted."""

    def join(self, match: str) -> tuple[int, Callable[[str], SessionPolicy]]:
        joined = self._matches.get(match)
        if joined is None:
            random = match_random(self._seed, match)
            learning = int(random.integers(2)) if self._swap_sides else 0
            joined = self._matches[match] = _Match(learning, self._chooser.choose(random, self._models_in_use))
        joined.sessions += 1
        return joined.learning, lambda seat: self._policy_of(joined, seat)

    def _models_in_use(self) -> frozenset[str]:
        opponents = [match.opponent for match in self._matches.values()]
        return frozenset(model for one in opponents for model in (one.model, *one.models.values()) if model is not None)

    def _policy_of(self, match: _Match, seat: str) -> SessionPolicy:
        model = match.opponent.models.get(seat, match.opponent.model)
        if model is None or model == self._model:
            return self._random if model is None else self._newest
        policy = self._policies[model]
        if isinstance(policy, ServedPolicy):
            match.deciders.append(ServedDecider(policy))
        elif isinstance(policy.policy, ScriptedPolicy):
            match.deciders.append(ScriptDecider(policy))
        else:
            return policy
        return match.deciders[-1]

    def leave(self, match: str, result: SessionResult) -> None:
        left = self._matches[match]
        for side, returns in enumerate(result.returns):
            left.returns[side].extend(returns)
        left.acted |= result.acted
        left.winners |= result.winners
        left.cut |= not result.complete
        left.sessions -= 1
        if not left.sessions:
            del self._matches[match]
            for decider in left.deciders:
                decider.close()
            self._finish(match, left)

    def _finish(self, name: str, match: _Match) -> None:
        reason = _why_not_counted(match)
        self.counts[reason or "counted"] += 1
        if reason:
            if self.counts[reason] == 1:
                log.warning("the match %s is not counted in the league: %s; further ones are not logged", name, reason)
            return
        own, other = match.returns[match.learning], match.returns[1 - match.learning]
        if match.winners:
            (winner,) = match.winners
            gain = 0.0 if winner is None else 1.0 if winner == match.learning else -1.0
            own, other = [gain], [-gain]
        assert match.opponent.on_finished is not None
        match.opponent.on_finished(match_of_sides(own, other))

    def update(self) -> None:
        self._chooser.report_results()

    def close(self) -> None:
        self._chooser.close()


def _why_not_counted(match: _Match) -> str:
    """Empty: it is counted."""
    if any(decider.lost for decider in match.deciders):
        return "its opponent, a script or a served agent, has failed"
    if match.cut:
        return "a session ended without the outcome of its last action"
    if not all(match.returns):
        return "the game has started sessions of one side only"
    if match.learning not in match.acted:
        return "the learning side has not acted"
    if len(match.winners) > 1:
        return "its sessions report different winners"
    return ""


def make_match_opponents(
    settings: SelfPlayConfig,
    newest: BatchedPolicy[Policy],
    source: PolicySource,
    seed: int,
    *,
    seats: Sequence[str],
    model: str,
    run: Path,
    deterministic: bool,
) -> MatchOpponents:
    """The opponents of an external game with two sides, as `settings` say. `run`: directory that may have stored earlier versions."""
    if settings.opponents == "league":
        return LeagueSessions(settings, newest, source, seed, seats=seats, model=model, deterministic=deterministic)
    return SessionOpponents(settings, newest, source, seed, model=model, run=run, deterministic=deterministic)
