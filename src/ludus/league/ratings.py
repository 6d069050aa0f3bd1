"""Ratings from results: Elo after every match, a Bayesian skill with uncertainty, and a fit of all results at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ludus.league.payoff import Doubles

ELO_START: Final = 1200.0
ELO_K: Final = 16.0
_ELO_SCALE: Final = 400 / math.log(10)
_SKILL_BETA: Final = 25 / 6  # spread of the performance in one match
_SKILL_DRIFT: Final = 25 / 300  # growth of the uncertainty per match: training players change
_SKILL_KAPPA: Final = 1e-4


def expected_score(own: float, other: float) -> float:
    """Expected score of a player with Elo `own` against `other`."""
    return 1 / (1 + 10 ** ((other - own) / 400))


def update_elo(
    own: float, other: float, score: float, k: float = ELO_K, *, own_fixed: bool = False, other_fixed: bool = False
) -> tuple[float, float]:
    """Return both ratings after a match; those of anchors stay."""
    change = k * (score - expected_score(own, other))
    return (own if own_fixed else own + change), (other if other_fixed else other - change)


@dataclass(frozen=True)
class SkillEstimate:
    """A normal distribution of the player's strength."""

    mu: float = 25.0
    sigma: float = 25.0 / 3

    @property
    def conservative(self) -> float:
        """The strength that the player has with a probability of 99.9 %."""
        return self.mu - 3 * self.sigma


def update_skill(
    teams: Sequence[Sequence[SkillEstimate]], scores: Sequence[float], fixed: Sequence[bool] = ()
) -> list[list[SkillEstimate]]:
    """Bayesian update after a match of teams; equal scores are draws. The skills of `fixed` teams stay.

    The Plackett-Luce model of Weng & Lin (2011), "A Bayesian approximation method for online ranking", algorithm 4.
    """
    before = [[SkillEstimate(one.mu, math.hypot(one.sigma, _SKILL_DRIFT)) for one in team] for team in teams]
    mu = [sum(one.mu for one in team) for team in before]
    variance = [sum(one.sigma**2 for one in team) for team in before]
    c = math.sqrt(sum(v + _SKILL_BETA**2 for v in variance))
    power = [math.exp(m / c) for m in mu]
    ties = [sum(other == score for other in scores) for score in scores]
    after = []
    for i, team in enumerate(before):
        omega = delta = 0.0
        for q, score in enumerate(scores):
            if score < scores[i]:
                continue
            chance = power[i] / sum(p for p, other in zip(power, scores, strict=True) if other <= score)
            omega += ((1.0 if q == i else 0.0) - chance) / ties[q]
            delta += chance * (1 - chance) / ties[q]
        omega *= variance[i] / c
        delta *= math.sqrt(variance[i]) / c * variance[i] / c**2
        share = [one.sigma**2 / variance[i] for one in team]
        after.append(
            [
                SkillEstimate(one.mu + part * omega, one.sigma * math.sqrt(max(1 - part * delta, _SKILL_KAPPA)))
                for one, part in zip(team, share, strict=True)
            ]
        )
    stays = list(fixed) or [False] * len(teams)
    return [list(team) if stay else rated for team, rated, stay in zip(teams, after, stays, strict=True)]


@dataclass(frozen=True)
class FittedRating:
    """Rating of one player with the half-width of its 95 % confidence interval, in Elo points."""

    elo: float
    interval: float


def fit_ratings(
    players: Sequence[str], score: Doubles, games: Doubles, anchors: Mapping[str, float], *, prior_games: float = 1.0
) -> dict[str, FittedRating]:
    """Maximum-likelihood ratings of all results at once (Bradley & Terry 1952), in Elo points. The order of results does not matter.

    `score[i, j]`: points of i against j, draws as half; `games[i, j]`: number of matches. `anchors`: players with a known rating; without
    any, the mean is 1200. `prior_games`: drawn matches against an average player, which keep undefeated players finite.
    """
    n = len(players)
    if not n:
        return {}
    known = np.array([name in anchors for name in players])
    center = float(np.mean(list(anchors.values()))) if known.any() else ELO_START
    strength = np.array([(anchors.get(name, center) - center) / _ELO_SCALE for name in players])
    free = np.flatnonzero(~known)
    information = np.zeros((n, n))
    for _ in range(100):  # Newton's method; the likelihood is concave
        chance = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
        prior = 1 / (1 + np.exp(-strength))
        gradient = (score - games * chance).sum(axis=1) + prior_games * (0.5 - prior)
        weight = games * chance * (1 - chance)
        information = np.diag(weight.sum(axis=1) + prior_games * prior * (1 - prior)) - weight
        if not free.size:
            break
        step = np.linalg.solve(information[np.ix_(free, free)], gradient[free])
        strength[free] += np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-9:
            break
    if not known.any():
        strength -= strength.mean()
    deviation = np.zeros(n)
    if free.size:
        deviation[free] = np.sqrt(np.maximum(np.diag(np.linalg.inv(information[np.ix_(free, free)])), 0.0))
    return {
        name: FittedRating(center + _ELO_SCALE * strength[i], 1.96 * _ELO_SCALE * deviation[i]) for i, name in enumerate(players)
    }
