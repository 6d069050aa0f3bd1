"""A pair of players that is to be compared, and loading both of them."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ludus.errors import LudusError, Unreachable
from ludus.sampling.league_files import ResultSpool
from ludus.sampling.league_policies import GiveUp
from ludus.tournament.battle import battle
from ludus.tournament.contestants import Contestant
from ludus.tournament.gamecore_matches import GameLocation
from ludus.tournament.result import MatchResult
from ludus.tournament.settings import BattleSettings

log = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")
Loaded_co = TypeVar("Loaded_co", covariant=True)


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
    token_file: str = ""
    """Files with the tokens of served addresses."""
    opponent_token_file: str = ""


class _Stopped(Exception):
    """The evaluation was asked to end."""


def play_battle(
    pair: tuple[Contestant, Contestant],
    settings: BattleSettings,
    location: GameLocation | None,
    task: PairTask,
    spool: ResultSpool,
    interrupted: Callable[[], bool],
) -> list[str]:
    """Play a battle and report its results: a gain is 1, 0 or -1. Returns why matches have failed; these are not reported."""
    failures = []

    def count(result: MatchResult) -> None:
        if result.failed:
            failures.append(result.failed)
        else:
            gain = {None: 0.0, "a": 1.0, "b": -1.0}[result.winner]
            spool.add(task.player, task.opponent, 0, 0.5 + 0.5 * gain, gain)
        if interrupted():
            raise _Stopped

    with contextlib.suppress(_Stopped):
        battle(*pair, settings, location=location, on_result=count)
    return failures


class Load(Protocol[Loaded_co]):
    def __call__(self, model: str, token_file: str, give_up: GiveUp, /) -> Loaded_co:
        """Load a player. `token_file` may be empty; `give_up` is called if it fails later. Raises LudusError, OSError."""
        ...


def load_players(task: PairTask, load: Load[Loaded], spool: ResultSpool) -> tuple[Loaded, Loaded]:
    """Load both players. A failure is reported to the coordinator. Raises ModelUnusable."""

    def load_one(player: str, model: str, token_file: str) -> Loaded:
        give_up = functools.partial(spool.report_unusable, player, model)
        try:
            return load(model, token_file, give_up)
        except (LudusError, OSError) as error:
            log.warning("the player %s cannot be evaluated: %s", player, error)
            give_up(str(error), isinstance(error, Unreachable))
            raise ModelUnusable(f"The player {player} cannot be evaluated: {error}") from error

    own = load_one(task.player, task.model, task.token_file)
    return own, load_one(task.opponent, task.opponent_model, task.opponent_token_file)
