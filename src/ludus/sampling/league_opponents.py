"""Opponents from a league: drawn with the probabilities that its coordinator publishes, loaded when drawn, results reported.

A process plays with a few opponents at a time (slots), so that matches of one opponent share a forward pass. Every slot was drawn with
the published probabilities, and the oldest one is drawn anew after `period` environment steps or a few seconds, whichever comes first. An
opponent that trains keeps its slots and gets its newest model there; matches that have begun keep the model that they began with.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
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
from ludus.sampling.match_opponents import MatchOpponent, ModelsInUse
from ludus.sampling.multi_agent.seating import FinishedMatch, Seating

log = logging.getLogger(__name__)

LEAGUE: Final = "league"
_SLOTS: Final = 8
_SLOT_S: Final = 5.0
"""Seconds after which the oldest slot is drawn anew, in games in which `period` steps take longer."""
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
        self._given_up: list[_LoadedPlayer] = []  # that matches may still use
        self._failures: Counter[str] = Counter()  # how often a loaded model was given up
        self._unusable: dict[str, float] = {}  # model → time from which it is tried again
        self._renew_steps, self._renew_at = 0, clock()
        self._poll_at = self._report_at = clock()

    def choose(self, random: np.random.Generator, in_use: ModelsInUse) -> MatchOpponent:
        self.report_results()
        if (now := self._clock()) >= self._poll_at:
            self._poll_at = now + _POLL_S
            if self._watch.update():
                self._update_slots(in_use)
        opponent = self._draw_slot(random, in_use) or LeagueOpponent(self._player, "", 1.0, generation=self._generation)
        on_finished = functools.partial(self._finish, opponent)
        if opponent.name == self._player:
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

    def _finish(self, opponent: LeagueOpponent, match: FinishedMatch) -> None:
        self._spool.add(self._player, opponent.name, self._generation, *match.side_result, opponent.generation)

    def _update_slots(self, in_use: ModelsInUse) -> None:
        """Give the slots the newest models of their opponents, and drop those whose opponent is gone.

        Slots of an opponent with a new model are not drawn anew: opponents that train would be met too rarely in slow games.
        """
        assert self._watch.current is not None
        models = {one.model for one in self._watch.current.opponents}
        self._unusable = {model: until for model, until in self._unusable.items() if model in models}
        usable = {one.name: one for one in self._usable_opponents()}
        self._slots = [usable[one.name] for one in self._slots if one.name in usable]
        for opponent in dict.fromkeys(self._slots):
            self._load(opponent, in_use)  # gives its slots up if that fails

    def _usable_opponents(self) -> list[LeagueOpponent]:
        current, now = self._watch.current, self._clock()
        known = () if current is None else current.opponents
        return [one for one in known if one.probability > 0 and self._unusable.get(one.model, now) <= now]

    def _draw_slot(self, random: np.random.Generator, in_use: ModelsInUse) -> LeagueOpponent | None:
        """Draw one of the slots, all with equal probability; None: there is no other opponent, the player meets itself."""
        if len(self._slots) == _SLOTS and (self._steps() >= self._renew_steps or self._clock() >= self._renew_at):
            self._slots.pop(0)
        while len(self._slots) < _SLOTS:
            drawn = self._draw(random)
            if drawn is None:
                return None
            if self._load(drawn, in_use):
                self._slots.append(drawn)
                self._renew_steps, self._renew_at = self._steps() + self._period, self._clock() + _SLOT_S
        return self._slots[int(random.integers(len(self._slots)))]

    def _draw(self, random: np.random.Generator) -> LeagueOpponent | None:
        usable = self._usable_opponents()
        if not usable:
            return None
        weights = np.array([one.probability for one in usable])
        return usable[int(random.choice(len(usable), p=weights / weights.sum()))]

    def _load(self, opponent: LeagueOpponent, in_use: ModelsInUse) -> bool:
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
        model = opponent.model
        if again := self._failures[model]:  # matches that began before may still use the names of the model that was given up
            model = f"{model} #{again + 1}"
        names = {agent: f"{LEAGUE} {model} {agent}".rstrip() for agent in policies.by_agent}
        for agent, policy in policies.by_agent.items():
            self._policies.add_fixed(names[agent], policy)
        self._loaded[opponent.model] = _LoadedPlayer(names, policies)
        return True

    def _give_up(self, opponent: LeagueOpponent, reason: str, temporary: bool = False) -> None:
        """Stop using an opponent until its model changes or the coordinator publishes it again, and report it."""
        log.warning("the player %s is not used as an opponent: %s", opponent.name, reason)
        self._unusable[opponent.model] = self._clock() + _AWAY_S if temporary else math.inf
        self._slots = [one for one in self._slots if one.model != opponent.model]
        loaded = self._loaded.pop(opponent.model, None)  # its policies may have failed for good: it is loaded anew
        if loaded is not None:
            self._given_up.append(loaded)
            self._failures[opponent.model] += 1
        self._spool.report_unusable(opponent.name, opponent.model, reason, temporary)

    def _drop_unused(self, in_use: ModelsInUse) -> None:
        """Drop policies that were given up, and the least recently used ones, until there is room for one more.

        Policies that a match or a slot uses stay.
        """
        if len(self._loaded) < _KEPT and not self._given_up:
            return
        playing, needed = in_use(), {one.model for one in self._slots}
        for player in [one for one in self._given_up if playing.isdisjoint(one.names.values())]:
            self._given_up.remove(player)
            self._unload(player)
        for model, player in list(self._loaded.items()):
            if len(self._loaded) < _KEPT:
                return
            if model not in needed and playing.isdisjoint(player.names.values()):
                self._unload(self._loaded.pop(model))

    def _unload(self, player: _LoadedPlayer) -> None:
        for name in player.names.values():
            self._policies.remove(name)
        player.policies.close()

    def close(self) -> None:
        for player in (*self._loaded.values(), *self._given_up):
            player.policies.close()
        self._spool.close()
