"""A pair of players that is to be compared, and loading both of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ludus.errors import LudusError
from ludus.sampling.league_files import ResultSpool

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")


class ModelUnusable(Exception):
    """The model of a player cannot be loaded; the coordinator of the league was told so."""


@dataclass(frozen=True)
class PairTask:
    """Matches to play between two players. Models as in matchmaking."""

    player: str
    model: str
    opponent: str
    opponent_model: str
    matches: int


def load_players(
    task: PairTask, load: Callable[[str, Callable[[str], None]], Loaded], spool: ResultSpool
) -> tuple[Loaded, Loaded]:
    """Load both players; `load` is called with the model, and a function to report a later failure. Raises ModelUnusable."""

    def load_one(player: str, model: str) -> Loaded:
        give_up = functools.partial(spool.report_unusable, player, model)
        try:
            return load(model, give_up)
        except (LudusError, OSError) as error:
            log.warning("the player %s cannot be evaluated: %s", player, error)
            give_up(str(error))
            raise ModelUnusable(f"The player {player} cannot be evaluated: {error}") from error

    return load_one(task.player, task.model), load_one(task.opponent, task.opponent_model)
