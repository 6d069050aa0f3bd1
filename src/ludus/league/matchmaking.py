"""Probabilities of the opponents of a training player. Pure: the coordinator publishes them, and samplers draw with them.

Prioritised fictitious self-play (PFSP) draws opponents with weights that depend on the win rate against them; the probabilities of
the roles are those of AlphaStar (Vinyals et al. 2019). The other schemes are plain self-play, fictitious self-play, OpenAI Five's 80/20
with quality scores, round-robin, and PSRO (Lanctot et al. 2017), which draws from the meta-strategy over the population.

A scheme is a mixture of branches: shares of the matches with their opponents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ludus.game_theory.meta_solvers import find_meta_solver
from ludus.league.payoff import Doubles, PayoffTable
from ludus.league.players import Player, PlayerRole

_NEGLIGIBLE: Final = 1e-10

WEIGHTINGS: Final[Mapping[str, Callable[[Doubles], Doubles]]] = {
    "squared": lambda x: (1 - x) ** 2,
    "variance": lambda x: x * (1 - x),
    "linear": lambda x: 1 - x,
    "linear_capped": lambda x: np.minimum(0.5, 1 - x),
}
"""PFSP weight of an opponent by the win rate x against it: `squared` prefers strong opponents, `variance` even ones."""


def pfsp(win_rates: Doubles, weighting: str = "squared") -> Doubles:
    """Probabilities of the opponents; uniform if all weights vanish."""
    weights = np.maximum(WEIGHTINGS[weighting](np.asarray(win_rates, np.float64)), 0.0)
    total = float(weights.sum())
    if not total >= _NEGLIGIBLE:
        return np.full(len(weights), 1 / len(weights))
    return weights / total


@dataclass(frozen=True)
class MatchmakingSettings:
    """Probabilities and thresholds. Defaults are the published ones."""

    scheme: str = "league"
    """league, self_play, fictitious, past_quality, round_robin, pfsp or psro."""
    weighting: str = "squared"
    main_pfsp: float = 0.5
    """Share of a main player's matches against all snapshots by PFSP."""
    main_verification: float = 0.15
    """Share against exploiter snapshots that beat it, and own snapshots that it no longer beats."""
    main_fixed: float = 0.0
    """Share against fixed players alone, by PFSP: as snapshots become many, a strong script would be met less and less."""
    too_hard: float = 0.3
    """Win rate against another main player below which a main player plays the snapshots of that one instead."""
    exploiter_too_hard: float = 0.1
    """The same threshold of a main exploiter."""
    forgotten: float = 0.7
    """Win rate below which an own snapshot counts as no longer beaten."""
    latest: float = 0.8
    """past_quality: share of matches against itself."""
    meta_solver: str = "nash"
    """psro: uniform, nash, prd or alpha_rank."""


@dataclass(frozen=True)
class MatchmakingView:
    """The part of the state of a league that matchmaking reads."""

    players: Mapping[str, Player]
    payoff: PayoffTable
    quality: Mapping[str, float] = field(default_factory=dict)
    """Quality scores of snapshots, for `past_quality`."""


Pool = tuple[Sequence[str], Doubles]
"""Opponents and their probabilities."""


@dataclass(frozen=True)
class MatchmakingBranch:
    """A share of a player's matches, and the opponents in these matches."""

    share: float
    pool: Pool


def opponent_probabilities(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> dict[str, float]:
    """Return the probability of every opponent; they add up to 1. Without another player it is the player itself."""
    found: dict[str, float] = {}
    branches = SCHEMES[settings.scheme](view, player, settings)
    whole = sum(branch.share for branch in branches)
    for branch in branches:
        for name, probability in zip(*branch.pool, strict=True):
            if branch.share * probability > 0:
                found[name] = found.get(name, 0.0) + branch.share / whole * float(probability)
    return found


def _names(
    view: MatchmakingView, *, role: PlayerRole | None = None, parent_role: PlayerRole | None = None, parent: str | None = None
) -> list[str]:
    """Return the names of the available players that fit all given conditions. Fixed players have no parent."""
    return [
        one.name
        for one in view.players.values()
        if (role is None or one.role is role)
        and (parent_role is None or one.parent_role is parent_role)
        and (parent is None or one.parent == parent)
        and one.available
    ]


def population(view: MatchmakingView) -> list[str]:
    """Available players whose policy does not change: snapshots and fixed players."""
    return [one.name for one in view.players.values() if one.available and one.role in (PlayerRole.HISTORICAL, PlayerRole.FIXED)]


def _certainly(name: str) -> Pool:
    return [name], np.ones(1)


def _equally(names: Sequence[str]) -> Pool:
    return names, np.full(len(names), 1 / len(names))


def _by_pfsp(view: MatchmakingView, player: Player, names: Sequence[str], weighting: str) -> Pool:
    return names, pfsp(view.payoff.win_rates(player.name, names), weighting)


# -- the roles of AlphaStar ------------------------------------------------------------------------------------------------


def _league(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    match player.role:
        case PlayerRole.MAIN_EXPLOITER:
            return _for_main_exploiter(view, player, settings)
        case PlayerRole.LEAGUE_EXPLOITER:
            return _pfsp_all(view, player, settings)
        case _:
            return _for_main(view, player, settings)


def _for_main(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    branches = [MatchmakingBranch(settings.main_pfsp, _all_by_pfsp(view, player, settings))]
    if fixed := _names(view, role=PlayerRole.FIXED):
        branches.append(MatchmakingBranch(settings.main_fixed, _by_pfsp(view, player, fixed, settings.weighting)))
    mains = _names(view, role=PlayerRole.MAIN) or [player.name]
    verified = settings.main_verification / len(mains)
    rest = max(0.0, 1 - settings.main_pfsp - settings.main_verification - settings.main_fixed) / len(mains)
    for main in mains:
        against = _self_play_or_snapshots(view, player, main, settings.too_hard)
        verify = _verification(view, player, main, settings) or against
        branches += [MatchmakingBranch(verified, verify), MatchmakingBranch(rest, against)]
    return branches


def _verification(view: MatchmakingView, player: Player, opponent: str, settings: MatchmakingSettings) -> Pool | None:
    """Exploiter snapshots that beat the player; without any, snapshots of a main player that it no longer beats."""
    exploiters = _names(view, role=PlayerRole.HISTORICAL, parent_role=PlayerRole.MAIN_EXPLOITER)
    if exploiters and view.payoff.win_rates(player.name, exploiters).min() < settings.too_hard:
        return _by_pfsp(view, player, exploiters, "squared")
    past = _names(view, role=PlayerRole.HISTORICAL, parent=opponent)
    past = past[: _forgotten_until(view.payoff.win_rates(player.name, past))]
    if past and view.payoff.win_rates(player.name, past).min() < settings.forgotten:
        return _by_pfsp(view, player, past, "squared")
    return None


def _forgotten_until(win_rates: Doubles) -> int:
    """Number of snapshots that can count as forgotten: all but the newest ones, along which the win rate only falls because they improve."""
    rising = np.flatnonzero(win_rates[:-1] < win_rates[1:])
    return int(rising[-1]) + 2 if rising.size else 0


def _self_play_or_snapshots(view: MatchmakingView, player: Player, opponent: str, too_hard: float) -> Pool:
    """The main player itself, or its snapshots if it is too strong."""
    past = _names(view, role=PlayerRole.HISTORICAL, parent=opponent)
    if opponent == player.name or view.payoff.win_rate(player.name, opponent) > too_hard or not past:
        return _certainly(opponent)
    return _by_pfsp(view, player, past, "variance")


def _for_main_exploiter(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    mains = _names(view, role=PlayerRole.MAIN)
    against = [_self_play_or_snapshots(view, player, main, settings.exploiter_too_hard) for main in mains]
    return [MatchmakingBranch(1 / len(mains), pool) for pool in against] or _pfsp_all(view, player, settings)


def _pfsp_all(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    return [MatchmakingBranch(1.0, _all_by_pfsp(view, player, settings))]


def _all_by_pfsp(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> Pool:
    """All snapshots and fixed players by PFSP."""
    names = population(view)
    return _by_pfsp(view, player, names, settings.weighting) if names else _certainly(player.name)


# -- other schemes ----------------------------------------------------------------------------------------------------------


def _self_play(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    return [MatchmakingBranch(1.0, _certainly(player.name))]


def _fictitious(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    """Every past version of the player with equal probability, itself included."""
    return [MatchmakingBranch(1.0, _equally([player.name, *_names(view, role=PlayerRole.HISTORICAL, parent=player.name)]))]


def _past_quality(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    """OpenAI Five: mostly itself; past versions by the softmax of their quality scores."""
    past = _names(view, role=PlayerRole.HISTORICAL, parent=player.name)
    if not past:
        return _self_play(view, player, settings)
    return [
        MatchmakingBranch(settings.latest, _certainly(player.name)),
        MatchmakingBranch(1 - settings.latest, (past, quality_probabilities(view.quality, past))),
    ]


def quality_probabilities(quality: Mapping[str, float], names: Sequence[str]) -> Doubles:
    scores = np.array([quality.get(name, 0.0) for name in names])
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum(), np.float64)


def quality_after_loss(quality: float, probability: float, pool: int, rate: float = 0.01) -> float:
    """New quality score of a past version that was beaten: q - η / (N p) (Berner et al. 2019, appendix N)."""
    return quality - rate / (pool * max(probability, 1e-6))


def _round_robin(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    """All other players with equal probability."""
    return [MatchmakingBranch(1.0, _equally([name for name in _names(view) if name != player.name] or [player.name]))]


def _psro(view: MatchmakingView, player: Player, settings: MatchmakingSettings) -> list[MatchmakingBranch]:
    """The population by its meta-strategy: the player trains a best response to it."""
    return [MatchmakingBranch(1.0, meta_strategy(view, settings.meta_solver) or _certainly(player.name))]


def meta_strategy(view: MatchmakingView, solver: str) -> Pool | None:
    """Solve the meta-game of the population, whose payoffs are mean gains per match; None without a population."""
    names = population(view)
    if not names:
        return None
    return names, _solve(solver, len(names), view.payoff.mean_gains(names).tobytes())


@functools.lru_cache(maxsize=16)
def _solve(solver: str, players: int, payoffs: bytes) -> Doubles:
    return find_meta_solver(solver)(np.frombuffer(payoffs, np.float64).reshape(players, players))[0]


PSRO: Final = "psro"
Scheme = Callable[[MatchmakingView, Player, MatchmakingSettings], list[MatchmakingBranch]]
SCHEMES: Final[Mapping[str, Scheme]] = {
    "league": _league,
    "self_play": _self_play,
    "fictitious": _fictitious,
    "past_quality": _past_quality,
    "pfsp": _pfsp_all,
    "round_robin": _round_robin,
    PSRO: _psro,
}
