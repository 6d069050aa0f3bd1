"""Battles: two contestants play each other many times, from both sides, and it is said how sure the outcome is.

battle("runs/arena/PPO_…", "rule:hard", Terms(games=200))

Matches of the Arena are stepped in this process, many at once. Where somebody is reached over HTTP, or for any other game, a gamecore
server starts them: the one that is named, or a private one.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ludus.errors import StoreError, UsageError
from ludus.experiment.battle_result import BattleResult, Played, most_lopsided
from ludus.experiment.battle_server import ARENA, Place, ServerStage
from ludus.experiment.battle_terms import Keeping, Terms
from ludus.experiment.contestants import Contestant, Served

if TYPE_CHECKING:
    from ludus.games.arena.recording import Recording

Watch = Callable[[Played], None]
Pair = tuple[Contestant, Contestant]
ENDING: Final = ".arena"


def battle(
    a: Contestant,
    b: Contestant,
    terms: Terms | None = None,
    keeping: Keeping | None = None,
    place: Place | None = None,
    watch: Watch = lambda played: None,
) -> BattleResult:
    """`watch` is told of every match when it has ended. Raises UsageError, IncompatibleCheckpoint, Unreachable, Refused."""
    terms, keeping, place = terms or Terms(), keeping or Keeping(), place or Place()
    began = time.monotonic()
    elsewhere = place.asked or any(isinstance(one, Served) for one in (a, b))
    shelf = _Shelf(keeping)
    games, about, notes = (_on_server if elsewhere else _here)((a, b), terms, place, shelf, watch)
    games = shelf.finished(games)
    ordered = tuple(sorted(games, key=lambda game: game.number))
    settled = terms.to_json() | about
    return BattleResult(a.to_json(), b.to_json(), settled, ordered, tuple(notes), time.monotonic() - began)


Outcome = tuple[list[Played], dict[str, object], list[str]]


def _here(pair: Pair, terms: Terms, place: Place, shelf: _Shelf, watch: Watch) -> Outcome:
    from ludus.experiment.battle_arena import ArenaStage, Ended, every_for, pairings, size_for

    size = size_for(terms, pair)
    every, notes = every_for(terms, pair)
    stage = ArenaStage(pair, size, every, terms, records=shelf.records)
    games: list[Played] = []

    def tell(ended: Ended) -> None:
        games.append(ended.played if ended.recording is None else shelf.put(ended.played, ended.recording))
        watch(games[-1])

    stage.play(pairings(terms, size), tell)
    return games, {"game": ARENA, "mode": f"{size}v{size}", "every": every, "where": "this process"}, notes


def _on_server(pair: Pair, terms: Terms, place: Place, shelf: _Shelf, watch: Watch) -> Outcome:
    games = []
    with ServerStage(pair, terms, place, records=shelf.records) as stage:
        for played, recording in stage.play():
            games.append(played if recording is None else shelf.put(played, recording))
            watch(games[-1])
        return games, stage.about, list(stage.notes)


class _Shelf:
    """Where recordings and films go. Of what is not written at once, only the most lopsided are held."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._held: list[tuple[float, int, Played, Recording]] = []  # the least lopsided first
        if keeping.directory is not None:
            with _written(keeping.directory):
                keeping.directory.mkdir(parents=True, exist_ok=True)

    @property
    def records(self) -> bool:
        return self._keeping.recorded

    def put(self, played: Played, recording: Recording) -> Played:
        keeping = self._keeping
        if keeping.most is None:
            played = replace(played, recording=str(self._write(played, recording)))
        number = max(keeping.films, keeping.most or 0)
        if number:
            heapq.heappush(self._held, (played.lopsided, -played.number, played, recording))
            if len(self._held) > number:
                heapq.heappop(self._held)
        return played

    def finished(self, games: list[Played]) -> list[Played]:
        """The same, with the files that are written only now that it is known which they are."""
        held = {game.number: (game, recording) for _, _, game, recording in self._held}
        changed: dict[int, Played] = {}
        if self._keeping.most is not None:
            for game in most_lopsided([game for game, _ in held.values()], self._keeping.most):
                changed[game.number] = replace(game, recording=str(self._write(game, held[game.number][1])))
        for game in most_lopsided([game for game, _ in held.values()], self._keeping.films):
            known = changed.get(game.number, game)
            changed[game.number] = replace(known, video=str(self._film(game, held[game.number][1])))
        return [changed.get(game.number, game) for game in games]

    def _path(self, played: Played, ending: str) -> Path:
        assert self._keeping.directory is not None
        return self._keeping.directory / f"game-{played.number:04d}{ending}"

    def _write(self, played: Played, recording: Recording) -> Path:
        from ludus.games.arena.recording import write_recording

        path = self._path(played, ENDING)
        with _written(path):
            return write_recording(path, recording)

    def _film(self, played: Played, recording: Recording) -> Path:
        from ludus.games.arena.film import film

        path = self._path(played, ".mp4")
        film(recording, path, speed=self._keeping.speed)
        return path


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except NotADirectoryError as error:
        raise UsageError(f"{path} cannot be made: a part of it is a file.", "Name another directory.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.", "Is there room, and may we write there?") from error
