"""A league in TensorBoard: ratings as scalars, payoff matrix, rating curves and family tree as images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ludus.core.metrics import TensorBoardSink
from ludus.league.cycles import cyclic_share
from ludus.league.history import RatingSample
from ludus.league.pictures.canvas import to_png
from ludus.league.pictures.family_tree import draw_family_tree
from ludus.league.pictures.payoff_heat_map import draw_payoff
from ludus.league.pictures.rating_curves import draw_curves
from ludus.league.rating_table import fit_league, win_rates_and_games
from ludus.league.state import LeagueState


def write_tensorboard(directory: Path, state: LeagueState, history: Sequence[RatingSample]) -> None:
    """Add the state of a league to the events in `directory`, at the step `state.results`.

    Scalars: ratings of the training players, numbers of players and matches, cyclic share. For a coordinator, every few minutes: one call
    takes about a second per hundred players.
    """
    sink = TensorBoardSink(directory)
    try:
        sink.write({"timesteps": float(state.results), **_scalars(state)})
        pictures = {"payoff": draw_payoff(state), "ratings": draw_curves(state, history), "family_tree": draw_family_tree(state)}
        for name, figure in pictures.items():
            sink.picture(to_png(figure), f"league/{name}", state.results)
    finally:
        sink.close()


def _scalars(state: LeagueState) -> dict[str, float]:
    fitted = fit_league(state)
    rates, games = win_rates_and_games(state, list(state.players))
    learning = [player.name for player in state.players.values() if player.role.learns]
    return {
        **{f"rating/{name}": fitted[name].elo for name in learning},
        "league/players": float(len(state.players)),
        "league/matches": float(state.results),
        "league/cyclic_share": cyclic_share(rates, games),
    }
