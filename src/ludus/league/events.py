"""Events of a league. Every change of its state is one of these values, and the journal stores them as JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ludus.errors import Damaged
from ludus.league.players import Player, PlayerRole, name_problem
from ludus.league.settings import LeagueSettings, settings_from_json


@dataclass(frozen=True)
class SettingsChanged:
    """The settings that apply to the following events; the first event of a league."""

    settings: LeagueSettings


@dataclass(frozen=True)
class PlayerAdded:
    player: Player


@dataclass(frozen=True)
class PlayerTrained:
    """A training player has reached this number of environment steps; `model` is its newest version.

    Of a fixed player: its model was copied into the league, or is served at another address.
    """

    name: str
    steps: int
    model: str
    token_file: str | None = None
    """File with the token of a served address; None: as before."""


@dataclass(frozen=True)
class SnapshotTaken:
    """A training player was copied to a historical player."""

    name: str
    snapshot: str
    model: str
    reset: bool = False
    """The training player starts again from its initial weights."""


@dataclass(frozen=True)
class PlayerRetired:
    name: str


@dataclass(frozen=True)
class PlayerQuarantined:
    """The model of a player cannot be used; an empty reason ends the quarantine."""

    name: str
    reason: str
    source: str = ""
    """Source of the report with this reason, as in `ResultsReported`; empty: decided by the coordinator."""
    number: int = 0


@dataclass(frozen=True)
class ReportIgnored:
    """A report that had no effect when it was read; it has none when it is read again."""

    source: str
    number: int


@dataclass(frozen=True)
class ResultsReported:
    """Results of many matches of one pair, from a worker that drew its opponents itself.

    `source` numbers its reports 1, 2, 3 …; a report that was counted before is ignored.
    """

    source: str
    number: int
    player: str
    opponent: str
    wins: int
    draws: int
    losses: int
    gain: float | None = None
    """Sum over the matches of half the difference between the mean returns of the sides. None: 1 per win, -1 per loss."""
    generation: int | None = None
    """Generation of the player in these matches. Results of an earlier one count as matches, but not in payoffs and ratings."""
    opponent_generation: int | None = None
    """The same of the opponent. None: not known, as in journals of earlier releases."""


@dataclass(frozen=True)
class SourceClosed:
    """A source will send no more reports; its last number is forgotten."""

    source: str


LeagueEvent = (
    SettingsChanged
    | PlayerAdded
    | PlayerTrained
    | SnapshotTaken
    | PlayerRetired
    | PlayerQuarantined
    | ReportIgnored
    | ResultsReported
    | SourceClosed
)

_KINDS: Final[Mapping[str, type[LeagueEvent]]] = {
    kind.__name__: kind
    for kind in (
        SettingsChanged, PlayerAdded, PlayerTrained, SnapshotTaken, PlayerRetired, PlayerQuarantined, ReportIgnored, ResultsReported,
        SourceClosed,
    )
}  # fmt: skip


def event_to_json(event: LeagueEvent) -> dict[str, Any]:
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def event_from_json(values: Mapping[str, Any]) -> LeagueEvent:
    """Inverse of `event_to_json`. Raises Damaged."""
    fields = dict(values)
    kind = _KINDS.get(str(fields.pop("event", "")))
    if kind is None:
        raise Damaged(f"The journal of the league has an unknown event {values.get('event')!r}.")
    try:
        if kind is PlayerAdded:
            return PlayerAdded(player_from_json(fields["player"]))
        if kind is SettingsChanged:
            return SettingsChanged(settings_from_json(fields["settings"]))
        return kind(**fields)
    except (TypeError, KeyError, ValueError) as error:
        raise Damaged(f"The journal of the league has a damaged {kind.__name__}: {error}.") from error


def check_submitted(value: LeagueEvent | Player) -> None:
    """Check an event that another program may have written. Raises Damaged if a field has a value of another type, or if the event
    changes settings, which come from the file of the league.
    """
    if isinstance(value, SettingsChanged):
        raise Damaged("The settings of a league cannot be changed by another process.", "Change the file of the league.")
    for name, hint in typing.get_type_hints(type(value)).items():
        given = getattr(value, name)
        if not _fits(given, hint):
            raise Damaged(f"{name} of a {type(value).__name__} is {given!r}.")
        if isinstance(given, Player):
            check_submitted(given)


def _fits(value: object, hint: Any) -> bool:
    if isinstance(hint, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


def player_from_json(values: Mapping[str, Any]) -> Player:
    """Raises TypeError, KeyError or ValueError if the values are not those of a player."""
    if problem := name_problem(str(values["name"])):
        raise ValueError(problem)
    parent_role = values.get("parent_role")
    return Player(**{**values, "role": PlayerRole(values["role"]), "parent_role": parent_role and PlayerRole(parent_role)})
