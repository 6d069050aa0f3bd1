"""Ratings from results: Elo after every match, a Bayesian skill with uncertainty, and a fit of all results at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ludus.league.payoff import Doubles

ELO_START: Final = 1200.0
ELO_K: Final = 16.0
_ELO_SCALE: Final = 400 / math.log(10)
_SKILL_BETA: Final = 25 / 6  # spread of the performance in one match
_SKILL_DRIFT: Final = 25 / 300  # growth of the uncertainty per match: training players change
_SKILL_KAPPA: Final = 1e-4
ELO_PER_SKILL: Final = _ELO_SCALE / (math.sqrt(2) * _SKILL_BETA)
"""Elo points per point of skill, between players without uncertainty."""


def expected_score(own: float, other: float) -> float:
    """Expected score of a player with Elo `own` against `other`."""
    return 1 / (1 + 10 ** ((other - own) / 400))


def update_elo(
    own: float, other: float, score: float, k: float = ELO_K, *, own_fixed: bool = False, other_fixed: bool = False
) -> tuple[float, float]:
    """Return both ratings after a match; those of anchors do not change."""
    change = k * (score - expected_score(own, other))
    return (own if own_fixed else own + change), (other if other_fixed else other - change)


@dataclass(frozen=True)
class SkillEstimate:
    """A normal distribution of the player's strength."""

    mu: float = 25.0
    sigma: float = 25.0 / 3

    @property
    def conservative(self) -> float:
        """Lower bound of the player's strength, with a probability of 99.9 %."""
        return self.mu - 3 * self.sigma


def update_skill(
    teams: Sequence[Sequence[SkillEstimate]], scores: Sequence[float], fixed: Sequence[bool] = ()
) -> list[list[SkillEstimate]]:
    """Bayesian update after a match of teams; equal scores are draws. The skills of `fixed` teams do not change.

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


def skill_of_anchor(rating: float) -> SkillEstimate:
    """Return the skill, without uncertainty, that predicts the same win probabilities as this Elo rating."""
    return SkillEstimate(SkillEstimate.mu + (rating - ELO_START) / ELO_PER_SKILL, 0.0)


def spread_outcomes(wins: int, draws: int, losses: int, limit: int) -> list[float]:
    """Scores of at most `limit` matches with these shares of wins, draws and losses, mixed evenly.

    Online ratings weight the latest result most; a report that listed its wins first would be rated too low.
    """
    games = wins + draws + losses
    number = min(games, limit)
    taken = [0.0, 0.0, 0.0]
    outcomes = []
    for i in range(1, number + 1):
        lacking = [count * i / games - before for count, before in zip((wins, draws, losses), taken, strict=True)]
        chosen = lacking.index(max(lacking))
        taken[chosen] += 1
        outcomes.append((1.0, 0.5, 0.0)[chosen])
    return outcomes


@dataclass(frozen=True)
class FittedRating:
    """Rating of one player with the half-width of its 95 % confidence interval, in Elo points."""

    elo: float
    interval: float


def fit_ratings(
    players: Sequence[str],
    score: Doubles,
    games: Doubles,
    anchors: Mapping[str, float],
    *,
    draws: Doubles | None = None,
    prior_games: float = 1.0,
) -> dict[str, FittedRating]:
    """Maximum-likelihood ratings of all results at once (Bradley & Terry 1952), in Elo points. The order of results does not matter.

    `score[i, j]`: points of i against j, draws as half; `games[i, j]`: number of matches. `anchors`: players with a known rating; without
    any, the mean is 1200. `draws[i, j]`: number of drawn matches, which narrow the intervals: a draw varies less than a win or a loss.
    `prior_games`: drawn matches against an average player, which keep undefeated players finite.
    """
    n = len(players)
    if not n:
        return {}
    known = np.array([name in anchors for name in players])
    center = float(np.mean([anchors[name] for name in players if name in anchors])) if known.any() else ELO_START
    strength = np.array([(anchors.get(name, center) - center) / _ELO_SCALE for name in players])
    free = np.flatnonzero(~known)
    for _ in range(100):  # Newton's method; the likelihood is concave
        if not free.size:
            break
        gradient, information = _derivatives(strength, score, games, prior_games)
        step = np.linalg.solve(information[np.ix_(free, free)], gradient[free])
        strength[free] += np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-9:
            break
    deviation = np.zeros(n)
    if free.size:
        deviation[free] = _deviations(strength, free, games, draws, prior_games, centered=not known.any())
    if not known.any():
        strength -= strength.mean()
    return {
        name: FittedRating(center + _ELO_SCALE * strength[i], 1.96 * _ELO_SCALE * deviation[i]) for i, name in enumerate(players)
    }


def _derivatives(strength: Doubles, score: Doubles, games: Doubles, prior_games: float) -> tuple[Doubles, Doubles]:
    """Gradient and negative Hessian of the log-likelihood."""
    chance = _win_chances(strength)
    prior = 1 / (1 + np.exp(-strength))
    gradient = (score - games * chance).sum(axis=1) + prior_games * (0.5 - prior)
    return gradient, _laplacian(games * chance * (1 - chance), prior_games * prior * (1 - prior))


def _deviations(
    strength: Doubles, free: npt.NDArray[np.intp], games: Doubles, draws: Doubles | None, prior_games: float, *, centered: bool
) -> Doubles:
    """Standard deviations of the free players' strengths; `centered`: of their differences from the mean."""
    chance = _win_chances(strength)
    prior = 1 / (1 + np.exp(-strength))
    prior_weight = prior_games * prior * (1 - prior)
    weight = games * chance * (1 - chance)
    inverse = np.linalg.inv(_laplacian(weight, prior_weight)[np.ix_(free, free)])
    covariance = inverse
    if draws is not None:
        # The variance of one score is p (1 - p) - P(draw) / 4. The share of draws is estimated as if two more matches had been decided.
        varying = np.maximum(weight - 0.25 * draws * games / (games + 2), 0.0)
        covariance = inverse @ _laplacian(varying, prior_weight)[np.ix_(free, free)] @ inverse
    if centered:
        covariance = covariance - covariance.mean(axis=0)
        covariance = covariance - covariance.mean(axis=1, keepdims=True)
    return np.sqrt(np.maximum(np.diag(covariance), 0.0))


def _win_chances(strength: Doubles) -> Doubles:
    return np.asarray(1 / (1 + np.exp(strength[None, :] - strength[:, None])), np.float64)


def _laplacian(weight: Doubles, diagonal: Doubles) -> Doubles:
    return np.asarray(np.diag(weight.sum(axis=1) + diagonal) - weight, np.float64)
