"""Opponents in training matches: the newest version, past versions, or the players of a league.

Opponents are chosen between matches; a match keeps its opponent to its end. A process plays with a few opponents at a time, so that the
matches of one opponent share a forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ludus.config.schema import SelfPlayConfig
from ludus.envs.opponents.opponent_mix import LATEST, PAST
from ludus.models.centralized_critic import actor_policy
from ludus.models.inference.batched_policy import State
from ludus.models.policy import Policy, Weights
from ludus.models.weights.serialization import policy_from
from ludus.models.weights.version_store import PolicySource
from ludus.sampling.multi_agent.match_runner import MatchRunner
from ludus.sampling.multi_agent.policy_set import PolicySet
from ludus.sampling.multi_agent.seating import FinishedMatch, SeatAgents, Seating
from ludus.sampling.self_play import OpponentDraw, PolicyHistory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MatchOpponent:
    """The opponent in one match."""

    name: str
    """Its name in results: latest, past or league."""
    model: str | None
    """Its name in the PolicySet; None: random actions."""
    on_finished: Callable[[FinishedMatch], None] | None = None
    """Called with the match when it is over."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Agent → name in the PolicySet, if its agents have different policies."""
    on_episode_end: Callable[[State], None] | None = None
    """Called with the last recurrent state of each of its agents when the agent's episode is over."""


ModelsInUse = Callable[[], frozenset[str]]
"""Returns the models of all matches that are not over. That costs time, and is needed only when policies are loaded or dropped."""


class OpponentChooser(Protocol):
    def choose(self, random: np.random.Generator, in_use: ModelsInUse) -> MatchOpponent:
        """Choose the opponent of the next match."""
        ...

    def close(self) -> None:
        """Release resources after the last match."""
        ...


class LoadedOpponents:
    """Opponent policies of this process. A policy that was replaced stays until no match uses it."""

    def __init__(self, policies: PolicySet, like: Policy) -> None:
        """`like`: a policy with the architecture of the opponents."""
        self._policies, self._description = policies, like.description()
        self._loaded: set[str] = set()

    def load(self, model: str, weights: Weights) -> None:
        with torch.random.fork_rng(devices=[]):
            policy = policy_from(self._description)
        policy.load_weights(weights)
        self._policies.add_fixed(model, actor_policy(policy))
        self._loaded.add(model)

    def keep(self, models: frozenset[str]) -> None:
        """Drop all policies except these."""
        for model in self._loaded - models:
            self._policies.remove(model)
        self._loaded &= models


class SelfPlayOpponents:
    """The newest version with probability `latest`, otherwise past versions, all kept ones equally likely."""

    def __init__(
        self,
        settings: SelfPlayConfig,
        model: str,
        source: PolicySource,
        history: PolicyHistory,
        loaded: LoadedOpponents,
        steps: Callable[[], int],
    ) -> None:
        """`model`: the model that learns. `steps`: environment steps of this process so far."""
        self._model, self._source, self._history, self._loaded = model, source, history, loaded
        self._draw, self._steps = OpponentDraw(settings, history), steps
        self._versions: dict[str, int] = {}
        """Model → version, of the loaded ones."""

    def choose(self, random: np.random.Generator, in_use: ModelsInUse) -> MatchOpponent:
        self._history.add(*self._source.newest())
        version = self._draw.draw(random, self._steps(), lambda: self._versions_in(in_use()))
        if version is None:
            return MatchOpponent(LATEST, self._model)
        model = f"{self._model}@{version}"
        if model not in self._versions:
            kept = in_use() | {f"{self._model}@{active}" for active in self._draw.active}
            self._loaded.keep(kept)
            self._loaded.load(model, self._draw.active[version])
            self._versions = {name: number for name, number in self._versions.items() if name in kept} | {model: version}
        return MatchOpponent(PAST, model)

    def _versions_in(self, models: frozenset[str]) -> set[int]:
        return {version for model, version in self._versions.items() if model in models}

    def close(self) -> None:
        """Nothing to release: the policies belong to the PolicySet."""


def result_names(settings: SelfPlayConfig) -> tuple[str, ...]:
    """Names of the results that self-play adds to batches."""
    kinds = {None: (), "mix": (LATEST, PAST)}.get(settings.opponents, (settings.opponents,))
    return tuple(f"{result}/{kind}" for kind in kinds for result in ("win", "draw"))


def seat_self_play(
    settings: SelfPlayConfig, policy_mapping: Mapping[str, str], source: PolicySource, seed: int, run: Path | None = None
) -> Callable[[MatchRunner, PolicySet], SeatAgents]:
    """Return a function that seats the agents of a sampler. `source`: of the model that learns. `run`: may have stored earlier versions."""
    (model,) = set(policy_mapping.values())

    def make(matches: MatchRunner, policies: PolicySet) -> SeatAgents:
        if settings.opponents == "league":
            opponents = _league_opponents(settings, policy_mapping, source, matches, policies)
        else:
            opponents = _own_versions(settings, model, source, matches, policies, run)
        sides = settings.sides or [[agent] for agent in policy_mapping]
        return TwoSides(sides, policy_mapping, opponents, matches.models_in_use, seed, swap_sides=settings.swap_sides)

    return make


def _own_versions(
    settings: SelfPlayConfig, model: str, source: PolicySource, matches: MatchRunner, policies: PolicySet, run: Path | None
) -> OpponentChooser:
    history = PolicyHistory(settings, model)
    policy, version = source.newest()
    history.add(policy, version)
    if run is not None:
        history.load_from_run(run, version)
    return SelfPlayOpponents(settings, model, source, history, LoadedOpponents(policies, policy), lambda: matches.env_steps)


def _league_opponents(
    settings: SelfPlayConfig, policy_mapping: Mapping[str, str], source: PolicySource, matches: MatchRunner, policies: PolicySet
) -> OpponentChooser:
    from ludus.sampling.league_opponents import LeagueOpponents  # imports this module

    assert settings.league is not None
    assert settings.player is not None
    league, like, (model,) = Path(settings.league), source.newest()[0], set(policy_mapping.values())
    return LeagueOpponents(
        league,
        settings.player,
        policies,
        model,
        like,
        lambda: matches.env_steps,
        agents=list(policy_mapping),
        period=settings.period,
    )


class TwoSides:
    """Seats the sides of a game: one learns, the opponent plays the other. Implements SeatAgents.

    If the opponent is the model that learns, both sides are recorded, unless the learning side is fixed.
    """

    def __init__(
        self,
        sides: Sequence[Sequence[str]],
        policy_mapping: Mapping[str, str],
        opponents: OpponentChooser,
        in_use: ModelsInUse,
        seed: int,
        *,
        swap_sides: bool = True,
    ) -> None:
        self._sides, self._mapping = [tuple(side) for side in sides], policy_mapping
        self._opponents, self._in_use = opponents, in_use
        self._random = np.random.default_rng([seed, 2])  # separate from the random numbers of environments and sampler
        self._swap_sides = swap_sides

    def __call__(self, copy: int) -> Seating:
        learning = int(self._random.integers(len(self._sides))) if self._swap_sides else 0
        opponent = self._opponents.choose(self._random, self._in_use)
        models: dict[str, str | None] = {}
        for number, side in enumerate(self._sides):
            for agent in side:
                models[agent] = self._mapping[agent] if number == learning else opponent.models.get(agent, opponent.model)
        own, end = frozenset(self._sides[learning]), opponent.on_episode_end
        ends = {} if end is None else {agent: end for agent in models if agent not in own}
        both_learn = self._swap_sides and models == dict(self._mapping)
        return Seating(models, None if both_learn else own, opponent.name, opponent.on_finished, ends, own)

    def close(self) -> None:
        self._opponents.close()
