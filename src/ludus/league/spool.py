"""Files with events that other processes leave for the coordinator of a league.

    <league>/spool/<time>-<id>.json        a list of events, as in the journal

A file is deleted after its events are in the journal. A coordinator that is killed in between applies the file again: events that
were counted before are refused.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ludus.core import trust
from ludus.errors import Damaged, Fenced
from ludus.io.atomic_file import replace_file
from ludus.league.events import LeagueEvent, PlayerAdded, PlayerTrained, check_submitted, event_from_json, event_to_json
from ludus.league.journal import LeagueJournal
from ludus.league.players import Player
from ludus.league.state import Refusal

log = logging.getLogger(__name__)

_FOLDER: Final = "spool"


def submit_events(directory: Path, events: Sequence[LeagueEvent]) -> list[Refusal] | None:
    """Apply events to a league, or leave them to its coordinator if one runs.

    Returns the refusals, or None if the coordinator will apply the events. Raises NotFound if there is no league.
    """
    try:
        journal = LeagueJournal(directory)
    except Fenced:
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
        (directory / _FOLDER).mkdir(exist_ok=True)
        data = json.dumps([event_to_json(event) for event in events], allow_nan=False).encode()
        replace_file(directory / _FOLDER / name, data)
        return None
    try:
        apply_spool(journal)
        return [refusal for event in events if (refusal := journal.apply(event)) is not None]
    finally:
        journal.close()


def apply_spool(journal: LeagueJournal) -> int:
    """Apply the events that other processes left; for the coordinator, every few seconds. Returns the number of events applied.

    Refused events are logged, among them token files that the user of this process did not name. A damaged file is renamed to
    `.damaged` and stays.
    """
    applied = 0
    for path in sorted((journal.directory / _FOLDER).glob("*.json")):
        try:
            events = [event_from_json(values) for values in json.loads(path.read_bytes())]
            for event in events:
                check_submitted(event)
        except (ValueError, TypeError, AttributeError, Damaged) as error:
            log.warning("%s is not applied to the league: %s", path, error)
            path.rename(path.with_suffix(".damaged"))
            continue
        for event in events:
            refusal = _refuse_token(event) or journal.apply(event)
            if refusal is None:
                applied += 1
            elif not refusal.repeated:
                log.warning("%s of %s is refused: %s", type(event).__name__, path, refusal.reason)
        path.unlink(missing_ok=True)
    return applied


def _refuse_token(event: LeagueEvent) -> Refusal | None:
    """A token file may be any file that this user can read, and the address that of any server."""
    given = event.player if isinstance(event, PlayerAdded) else event
    if not isinstance(given, Player | PlayerTrained) or not given.token_file:
        return None
    if trust.is_token_allowed(given.model, given.token_file):
        return None
    return Refusal(
        f"{given.name} has the token file {given.token_file}; start `ludus league run` with --trust, or name the player in its file"
    )
