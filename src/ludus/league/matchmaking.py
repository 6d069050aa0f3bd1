"""Choice of the opponent for a training player. Pure: randomness comes from the given generator.

Prioritised fictitious self-play (PFSP) draws opponents with weights that depend on the win rate against them; the probabilities of
the roles are those of AlphaStar (Vinyals et al. 2019). The other schemes are plain self-play, fictitious self-play, OpenAI Five's 80/20
with quality scores, and round-robin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

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
    """league, self_play, fictitious, past_quality, round_robin or pfsp."""
    weighting: str = "squared"
    main_pfsp: float = 0.5
    """Share of a main player's matches against all snapshots by PFSP."""
    main_verification: float = 0.15
    """Share against exploiter snapshots that beat it, and own snapshots that it has forgotten how to beat."""
    too_hard: float = 0.3
    """A main player that wins less against another one plays its snapshots instead."""
    exploiter_too_hard: float = 0.1
    """A main exploiter that wins less against a main player plays the snapshots of that one instead."""
    forgotten: float = 0.7
    latest: float = 0.8
    """past_quality: share of matches against itself."""


@dataclass(frozen=True)
class MatchmakingView:
    """What matchmaking looks at."""

    players: Mapping[str, Player]
    payoff: PayoffTable
    quality: Mapping[str, float] = field(default_factory=dict)
    """Quality scores of snapshots, for `past_quality`."""
    matches: int = 0
    """Matches issued so far, for `round_robin`."""


def choose_opponent(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    """Return the name of the next opponent; the player itself if there is no other."""
    return SCHEMES[settings.scheme](view, player, settings, random)


def _names(
    view: MatchmakingView, *, role: PlayerRole | None = None, parent_role: PlayerRole | None = None, parent: str | None = None
) -> list[str]:
    """Available players. Fixed players count as snapshots of nobody in particular."""
    return [
        one.name
        for one in view.players.values()
        if (role is None or one.role is role)
        and (parent_role is None or one.parent_role is parent_role)
        and (parent is None or one.parent == parent)
        and one.available
    ]


def _snapshots(view: MatchmakingView) -> list[str]:
    return [one.name for one in view.players.values() if one.available and one.role in (PlayerRole.HISTORICAL, PlayerRole.FIXED)]


def _draw(names: Sequence[str], probabilities: Doubles, random: np.random.Generator) -> str:
    return names[int(random.choice(len(names), p=probabilities))]


def _draw_pfsp(view: MatchmakingView, player: Player, names: Sequence[str], weighting: str, random: np.random.Generator) -> str:
    return _draw(names, pfsp(view.payoff.win_rates(player.name, names), weighting), random)


# -- the roles of AlphaStar ------------------------------------------------------------------------------------------------


def _league(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    match player.role:
        case PlayerRole.MAIN_EXPLOITER:
            return _for_main_exploiter(view, player, settings, random)
        case PlayerRole.LEAGUE_EXPLOITER:
            return _pfsp_all(view, player, settings, random)
        case _:
            return _for_main(view, player, settings, random)


def _for_main(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    coin = random.random()
    if coin < settings.main_pfsp:
        return _pfsp_all(view, player, settings, random)
    mains = _names(view, role=PlayerRole.MAIN) or [player.name]
    opponent = mains[int(random.integers(len(mains)))]
    if coin < settings.main_pfsp + settings.main_verification:
        verified = _verification(view, player, opponent, settings, random)
        if verified is not None:
            return verified
    return _self_play_or_snapshots(view, player, opponent, settings.too_hard, random)


def _verification(
    view: MatchmakingView, player: Player, opponent: str, settings: MatchmakingSettings, random: np.random.Generator
) -> str | None:
    """Exploiters that the player loses to; else snapshots of a main player that it has forgotten how to beat."""
    exploiters = _names(view, role=PlayerRole.HISTORICAL, parent_role=PlayerRole.MAIN_EXPLOITER)
    if exploiters and view.payoff.win_rates(player.name, exploiters).min() < settings.too_hard:
        return _draw_pfsp(view, player, exploiters, "squared", random)
    past = _names(view, role=PlayerRole.HISTORICAL, parent=opponent)
    past = past[: _forgotten_until(view.payoff.win_rates(player.name, past))]
    if past and view.payoff.win_rates(player.name, past).min() < settings.forgotten:
        return _draw_pfsp(view, player, past, "squared", random)
    return None


def _forgotten_until(win_rates: Doubles) -> int:
    """Number of snapshots without the newest ones whose win rates only fall: against those, losing is no forgetting."""
    rising = np.flatnonzero(win_rates[:-1] < win_rates[1:])
    return int(rising[-1]) + 2 if rising.size else 0


def _self_play_or_snapshots(
    view: MatchmakingView, player: Player, opponent: str, too_hard: float, random: np.random.Generator
) -> str:
    """The current main player; its snapshots if it is too strong."""
    past = _names(view, role=PlayerRole.HISTORICAL, parent=opponent)
    if opponent == player.name or view.payoff.win_rate(player.name, opponent) > too_hard or not past:
        return opponent
    return _draw_pfsp(view, player, past, "variance", random)


def _for_main_exploiter(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    mains = _names(view, role=PlayerRole.MAIN)
    if not mains:
        return _pfsp_all(view, player, settings, random)
    opponent = mains[int(random.integers(len(mains)))]
    return _self_play_or_snapshots(view, player, opponent, settings.exploiter_too_hard, random)


def _pfsp_all(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    """All snapshots and fixed players by PFSP."""
    names = _snapshots(view)
    return _draw_pfsp(view, player, names, settings.weighting, random) if names else player.name


# -- other schemes ----------------------------------------------------------------------------------------------------------


def _self_play(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    return player.name


def _fictitious(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    """Every past version of the player with equal probability, itself included."""
    names = [player.name, *_names(view, role=PlayerRole.HISTORICAL, parent=player.name)]
    return names[int(random.integers(len(names)))]


def _past_quality(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    """OpenAI Five: mostly itself; past versions by the softmax of their quality scores."""
    past = _names(view, role=PlayerRole.HISTORICAL, parent=player.name)
    if not past or random.random() < settings.latest:
        return player.name
    return _draw(past, quality_probabilities(view.quality, past), random)


def quality_probabilities(quality: Mapping[str, float], names: Sequence[str]) -> Doubles:
    scores = np.array([quality.get(name, 0.0) for name in names])
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum(), np.float64)


def quality_after_loss(quality: float, probability: float, pool: int, rate: float = 0.01) -> float:
    """New quality score of a past version that was beaten: q - η / (N p) (Berner et al. 2019, appendix N)."""
    return quality - rate / (pool * max(probability, 1e-6))


def _round_robin(view: MatchmakingView, player: Player, settings: MatchmakingSettings, random: np.random.Generator) -> str:
    names = [name for name in _names(view) if name != player.name]
    return names[view.matches % len(names)] if names else player.name


Scheme = Callable[[MatchmakingView, Player, MatchmakingSettings, np.random.Generator], str]
SCHEMES: Final[Mapping[str, Scheme]] = {
    "league": _league,
    "self_play": _self_play,
    "fictitious": _fictitious,
    "past_quality": _past_quality,
    "pfsp": _pfsp_all,
    "round_robin": _round_robin,
}
