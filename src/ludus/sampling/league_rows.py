"""Players of a league play the opponent rows of vector environments, such as the other camp of the Arena.

Every match has one opponent from its first step to its last. A step costs one forward pass per opponent that plays, and one call of the
environment for all rows that its own scripts play.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ludus.config.schema import SelfPlayConfig
from ludus.core.tree import Array, Tree, map_tree, stack
from ludus.core.types import DEFAULT_MODEL, Bools, Ints
from ludus.envs.opponents.opponent_rows import OpponentRows
from ludus.envs.pettingzoo import sample_action
from ludus.errors import ConfigError
from ludus.models.inference.batched_policy import ActingPolicy
from ludus.models.weights.version_store import PolicySource
from ludus.sampling.league_opponents import LEAGUE, LeagueOpponents, match_of_sides
from ludus.sampling.league_policies import RULE, freeze_weights, script_name
from ludus.sampling.match_opponents import MatchOpponent
from ludus.sampling.self_play import FollowedSource, PolicyRowPlayer, join_rows


class _RowPolicies:
    """Loaded policies with the recurrent states of all rows. Implements FixedPolicies."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._policies: dict[str, ActingPolicy] = {}
        self._states: dict[str, tuple[Array, ...]] = {}

    def add_fixed(self, model: str, policy: ActingPolicy) -> None:
        freeze_weights(policy)
        self._policies[model] = policy

    def remove(self, model: str) -> None:
        del self._policies[model]
        self._states.pop(model, None)

    def __len__(self) -> int:
        return len(self._policies)

    def __getitem__(self, model: str) -> ActingPolicy:
        return self._policies[model]

    def states(self, model: str, policy: ActingPolicy) -> tuple[Array, ...]:
        """[rows, …] of a model; only rows that it plays have a meaning."""
        if model not in self._states:
            self._states[model] = tuple(spec.zeros(self._rows) for spec in policy.state_spec()) if policy.recurrent else ()
        return self._states[model]


class LeagueRowPlayer(PolicyRowPlayer):
    """Plays opponent rows with the opponents that a league chooses, and reports results to it. Implements RowPlayer."""

    def __init__(self, environments: OpponentRows, source: FollowedSource, settings: SelfPlayConfig, seed: int) -> None:
        """`source`: the one that the sampler uses. Raises ConfigError, OSError."""
        assert settings.league is not None
        assert settings.player is not None
        if not environments.reports_outcomes:
            raise ConfigError(
                f"config.self_play.opponents is league, and {environments.name} does not report who has won.",
                "Add win/past and loss/past to the result_names of the environment.",
            )
        super().__init__(source, environments.match_of_opponent, seed)
        self._environments, self._steps = environments, 0
        rows = len(environments.match_of_opponent)
        self._policies = _RowPolicies(rows)
        self._chooser = LeagueOpponents(
            Path(settings.league),
            settings.player,
            self._policies,
            DEFAULT_MODEL,
            source.policy,
            lambda: self._steps,
            plays_script=environments.plays_script,
            period=settings.period,
        )
        own = MatchOpponent(LEAGUE, DEFAULT_MODEL)
        self._opponents: list[MatchOpponent] = [own] * rows
        self._groups: list[tuple[str | None, Ints]] = [(DEFAULT_MODEL, np.arange(rows))]
        """Rows that are played together: those of one policy, those with random actions (None), and all with scripts (RULE)."""
        self._action_space: gym.Space[Any] = environments.action_space
        self._next: dict[int, MatchOpponent] = {}
        """Of environments that order their matches in advance: the opponent of the next order, by number of the match. Always complete, because
        it is read on other threads."""
        self._ordered: dict[int, dict[str, MatchOpponent]] = {match: {} for match in self._rows_of}
        """Opponents of ordered matches, by number and id."""
        self._match_ids: dict[int, str] = {}
        for match in self._rows_of if environments.current_matches is not None else ():
            self._next[match] = self._choose_opponent()
        environments.choose_scripts_by(self._choose_script)

    @property
    def versions(self) -> Ints:
        """Opponents are players, not versions of the learner."""
        return np.where(self.latest, self._source.version, -1)

    @property
    def latest(self) -> Bools:
        """By row: whether the newest version plays it."""
        return np.array([opponent.model == DEFAULT_MODEL for opponent in self._opponents])

    def play(self, observation: Tree, mask: Bools | None, first: Bools) -> Tree:
        current = self._environments.current_matches
        if current is not None:
            first = self._seat_ordered_opponents(current)
        elif first.any():
            self._choose_opponents(first)
        self._steps += len(self._rows_of)
        self._see(observation)
        return join_rows([(rows, self._play_rows(model, rows, mask, first)) for model, rows in self._groups])

    def finish(self, row: int, score: float) -> None:
        """A result is 1, 0 or -1 for the learning side, whatever the rewards are: they may be shaped."""
        report = self._opponents[row].on_finished
        if report is not None:
            gain = 2.0 * score - 1.0
            report(match_of_sides([gain], [-gain]))

    def close(self) -> None:
        self._chooser.close()

    def _choose_opponents(self, first: Bools) -> None:
        for rows in self._begun_matches(first):
            self._seat(rows, self._choose_opponent())
        self._group_rows()

    def _seat_ordered_opponents(self, current: Sequence[str]) -> Bools:
        """Seat the opponents of matches that have begun, and choose those of the next orders. Returns the rows whose match begins."""
        first: Bools = np.zeros(len(self._opponents), np.bool_)
        for match, rows in self._rows_of.items():
            if current[match] and current[match] != self._match_ids.get(match):
                self._match_ids[match], first[rows] = current[match], True
                begun = self._take_ordered(match, current[match])
                if self._next[match] is begun:
                    self._next[match] = self._choose_opponent()
                self._seat(rows, begun)
        if first.any():
            self._group_rows()
        return first

    def _take_ordered(self, match: int, match_id: str) -> MatchOpponent:
        """The opponent of a match that has begun; earlier ones with its number never will."""
        ordered = self._ordered[match]
        for earlier in list(ordered):
            opponent = ordered.pop(earlier)
            if earlier == match_id:
                return opponent
        raise KeyError(match_id)

    def _choose_script(self, match: int, match_id: str) -> str | None:
        """Called on any thread when a match is ordered. Implements ChooseScript."""
        opponent = self._ordered[match][match_id] = self._next[match]
        return None if opponent.model is None else script_name(opponent.model)

    def _choose_opponent(self) -> MatchOpponent:
        return self._chooser.choose(self._random, self._models_in_use)

    def _models_in_use(self) -> frozenset[str]:
        ordered = (one for by_id in self._ordered.values() for one in list(by_id.values()))
        known = (*self._opponents, *self._next.values(), *ordered)
        return frozenset(one.model for one in known if one.model is not None)

    def _seat(self, rows: Ints, opponent: MatchOpponent) -> None:
        self._end_episodes(rows)
        for row in rows.tolist():
            self._opponents[row] = opponent

    def _group_rows(self) -> None:
        rows_of: dict[str | None, list[int]] = {}
        for row, opponent in enumerate(self._opponents):
            model = opponent.model
            rows_of.setdefault(RULE if model is not None and script_name(model) is not None else model, []).append(row)
        self._groups = [(model, np.array(together)) for model, together in rows_of.items()]

    def _end_episodes(self, rows: Ints) -> None:
        """Tell the opponent of the previous match in these rows that it is over."""
        previous = self._opponents[rows[0]]
        if previous.on_episode_end is None or previous.model is None:
            return
        states = self._policies.states(previous.model, self._policies[previous.model])
        for row in rows.tolist():
            previous.on_episode_end(tuple(part[row] for part in states))

    def _play_rows(self, model: str | None, rows: Ints, mask: Bools | None, first: Bools) -> Tree:
        if model is None:
            masks = [None if mask is None else mask[row] for row in rows]
            return stack([sample_action(self._action_space, one, self._random) for one in masks])
        if model == RULE:
            return self._environments.script_actions(rows, [script_name(str(self._opponents[row].model)) or "" for row in rows])
        policy: ActingPolicy = self._newest_actor() if model == DEFAULT_MODEL else self._policies[model]
        states = self._policies.states(model, policy)
        begun = rows[first[rows]]
        for part in states:
            part[begun] = 0
        seen = map_tree(lambda x: x[rows], self._observation)
        noise = policy.draw_noise(len(rows), self._generator)
        acted = policy.act(seen, tuple(part[rows] for part in states), None if mask is None else mask[rows], noise)
        for part, after in zip(states, acted.state, strict=True):
            part[rows] = after
        if acted.lost is not None:
            self._give_up_matches(rows[acted.lost])
        return acted.action

    def _give_up_matches(self, rows: Ints) -> None:
        """The opponent of these rows does not answer: random actions end their matches, and the results do not count."""
        matches = self._environments.match_of_opponent
        for row in np.flatnonzero(np.isin(matches, matches[rows])).tolist():
            self._opponents[row] = replace(self._opponents[row], on_finished=None)


def with_league_opponents(environments: OpponentRows, source: PolicySource, settings: SelfPlayConfig, seed: int) -> PolicySource:
    """Return the policy source for a sampler; players of the league in `settings` play the opponent rows from now on."""
    followed = FollowedSource(source)
    environments.player = LeagueRowPlayer(environments, followed, settings, seed)
    return followed
