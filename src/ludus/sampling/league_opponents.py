"""Opponents from a league: drawn with the probabilities that its coordinator publishes, loaded when drawn, results reported.

A process plays with a few opponents at a time (slots), so that matches of one opponent share a forward pass. Every slot was drawn with
the published probabilities, and the oldest one is drawn anew after `period` environment steps.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from ludus.errors import LudusError, Unreachable
from ludus.models.centralized_critic import actor_policy
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.models.policy import Policy
from ludus.sampling.league_files import LeagueOpponent, MatchmakingWatch, ResultSpool
from ludus.sampling.league_policies import LeaguePolicies, load_league_policies, script_name
from ludus.sampling.match_opponents import MatchOpponent
from ludus.sampling.multi_agent.seating import FinishedMatch, Seating

log = logging.getLogger(__name__)

LEAGUE: Final = "league"
_SLOTS: Final = 8
_KEPT: Final = 24
"""Loaded policies, those of slots included; least recently used ones are dropped first."""
_POLL_S: Final = 1.0
_REPORT_S: Final = 1.0
_AWAY_S: Final = 60.0
"""A served address that did not answer is tried again after this time, or as soon as the coordinator publishes it again."""


def match_of_sides(own: Sequence[float], other: Sequence[float]) -> FinishedMatch:
    """A finished match with these returns of the learning side and of the other side."""
    mine, theirs = ({f"{side} {i}": gained for i, gained in enumerate(of)} for side, of in (("own", own), ("other", other)))
    return FinishedMatch({**mine, **theirs}, 0, Seating({}, frozenset(mine), LEAGUE))


class FixedPolicies(Protocol):
    """Where loaded policies are kept, such as a PolicySet."""

    def add_fixed(self, model: str, policy: ActingPolicy) -> None: ...
    def remove(self, model: str) -> None: ...


@dataclass(frozen=True)
class _LoadedPlayer:
    """A player whose policies are in `FixedPolicies`."""

    names: Mapping[str, str]
    """Agent → name there; "" is the name for all other agents. Empty: random actions."""
    policies: LeaguePolicies

    def as_opponent(self, on_finished: Callable[[FinishedMatch], None]) -> MatchOpponent:
        by_agent = {agent: name for agent, name in self.names.items() if agent}
        served = self.policies.served
        return MatchOpponent(LEAGUE, self.names.get(""), on_finished, by_agent, None if served is None else served.end_episode)


class LeagueOpponents:
    """Chooses the opponents of one training player. Implements OpponentChooser. Close it at the end: that reports the last results."""

    def __init__(
        self,
        league: Path,
        player: str,
        policies: FixedPolicies,
        own_model: str,
        like: Policy,
        steps: Callable[[], int],
        *,
        plays_script: Callable[[str], bool] = lambda name: False,
        agents: Sequence[str] = (),
        period: int = 2_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own_model`: the model that learns. `like`: its policy. `steps`: environment steps of this process so far.

        `plays_script`: whether the environment has a script of this name. Models that are such scripts are not loaded, and a match has
        the model as it is. `agents`: names of all agents; without names all are alike.
        """
        self._league, self._player, self._own_model, self._like = league, player, own_model, actor_policy(like)
        self._policies, self._steps, self._period, self._clock = policies, steps, period, clock
        self._plays_script, self._agents = plays_script, tuple(agents)
        self._watch = MatchmakingWatch(league, player)
        self._watch.update()
        self._generation = 0 if self._watch.current is None else self._watch.current.generation
        self._spool = ResultSpool(league, player)
        self._slots: list[LeagueOpponent] = []
        self._loaded: dict[str, _LoadedPlayer] = {}  # by model of the league, in order of use
        self._unusable: dict[str, float] = {}  # model → time from which it is tried again
        self._renew_at = 0
        self._poll_at = self._report_at = clock()

    def choose(self, random: np.random.Generator, in_use: frozenset[str]) -> MatchOpponent:
        self.report_results()
        if (now := self._clock()) >= self._poll_at:
            self._poll_at = now + _POLL_S
            if self._watch.update():
                self._drop_outdated_slots()
        opponent = self._draw_slot(random, in_use)
        name = self._player if opponent is None else opponent.name
        on_finished = functools.partial(self._finish, name)
        if opponent is None or opponent.name == self._player:
            return MatchOpponent(LEAGUE, self._own_model, on_finished)
        if self._is_script(opponent.model):
            return MatchOpponent(LEAGUE, opponent.model, on_finished)
        return self._loaded[opponent.model].as_opponent(on_finished)

    def report_results(self) -> None:
        """Write the results since the last report, about once a second."""
        if (now := self._clock()) >= self._report_at:
            self._report_at = now + _REPORT_S
            self._spool.flush()

    def _is_script(self, model: str) -> bool:
        name = script_name(model)
        return name is not None and self._plays_script(name)

    def _finish(self, opponent: str, match: FinishedMatch) -> None:
        self._spool.add(self._player, opponent, self._generation, *match.side_result)

    def _drop_outdated_slots(self) -> None:
        """Drop slots whose opponent is gone or has another model now."""
        assert self._watch.current is not None
        known = {(one.name, one.model) for one in self._watch.current.opponents}
        self._slots = [one for one in self._slots if (one.name, one.model) in known]
        models = {one.model for one in self._watch.current.opponents}
        self._unusable = {model: until for model, until in self._unusable.items() if model in models}

    def _draw_slot(self, random: np.random.Generator, in_use: frozenset[str]) -> LeagueOpponent | None:
        """Draw one of the slots, all with equal probability; None: there is no other opponent, the player meets itself."""
        if len(self._slots) == _SLOTS and self._steps() >= self._renew_at:
            self._slots.pop(0)
        while len(self._slots) < _SLOTS:
            drawn = self._draw(random)
            if drawn is None:
                return None
            if self._load(drawn, in_use):
                self._slots.append(drawn)
                self._renew_at = self._steps() + self._period
        return self._slots[int(random.integers(len(self._slots)))]

    def _draw(self, random: np.random.Generator) -> LeagueOpponent | None:
        current = self._watch.current
        known = () if current is None else current.opponents
        now = self._clock()
        usable = [one for one in known if one.probability > 0 and self._unusable.get(one.model, now) <= now]
        if not usable:
            return None
        weights = np.array([one.probability for one in usable])
        return usable[int(random.choice(len(usable), p=weights / weights.sum()))]

    def _load(self, opponent: LeagueOpponent, in_use: frozenset[str]) -> bool:
        if opponent.name == self._player or self._is_script(opponent.model):
            return True
        if opponent.model in self._loaded:
            self._loaded[opponent.model] = self._loaded.pop(opponent.model)  # now the most recently used one
            return True
        give_up = functools.partial(self._give_up, opponent)
        try:
            policies = load_league_policies(
                self._league, opponent.model, self._like, give_up, token_file=opponent.token_file, agents=self._agents
            )
        except (LudusError, OSError) as error:
            give_up(str(error), isinstance(error, Unreachable))
            return False
        self._drop_unused(in_use)
        names = {agent: f"{LEAGUE} {opponent.model} {agent}".rstrip() for agent in policies.by_agent}
        for agent, policy in policies.by_agent.items():
            self._policies.add_fixed(names[agent], policy)
        self._loaded[opponent.model] = _LoadedPlayer(names, policies)
        return True

    def _give_up(self, opponent: LeagueOpponent, reason: str, temporary: bool = False) -> None:
        """Stop using an opponent until its model changes or the coordinator publishes it again, and report it."""
        log.warning("the player %s is not used as an opponent: %s", opponent.name, reason)
        self._unusable[opponent.model] = self._clock() + _AWAY_S if temporary else math.inf
        self._slots = [one for one in self._slots if one.model != opponent.model]
        self._spool.report_unusable(opponent.name, opponent.model, reason, temporary)

    def _drop_unused(self, in_use: frozenset[str]) -> None:
        """Drop the least recently used policies that neither a match nor a slot uses, until there is room for one more."""
        needed = {one.model for one in self._slots}
        for model, player in list(self._loaded.items()):
            if len(self._loaded) < _KEPT:
                return
            if model not in needed and in_use.isdisjoint(player.names.values()):
                del self._loaded[model]
                for name in player.names.values():
                    self._policies.remove(name)
                player.policies.close()

    def close(self) -> None:
        for player in self._loaded.values():
            player.policies.close()
        self._spool.close()
