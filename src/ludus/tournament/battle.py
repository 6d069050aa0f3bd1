"""Battles: two contestants play each other many times, from both sides, and it is said how sure the outcome is.

battle("runs/arena/PPO_…", "rule:hard", Terms(games=200))

Matches of the Arena, and of environments whose agents stand in two camps, are stepped in this process, many at once. For any other
game, and in the Arena where somebody is reached over HTTP, a gamecore server starts them: the one that is named, or a private one.
"""

from __future__ import annotations

import contextlib
import heapq
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gymnasium as gym

from ludus.core import trust
from ludus.envs.video_writer import FrameProgress
from ludus.errors import LudusError, MissingExtra, StoreError, UsageError
from ludus.tournament.contestants import Contestant, Served, Trained
from ludus.tournament.gamecore_matches import ARENA, Place, ServerStage
from ludus.tournament.result import BattleResult, Played, Recorded, most_lopsided, one_sided, why
from ludus.tournament.settings import Keeping, Terms

if TYPE_CHECKING:
    from ludus.tournament.env_matches import World

Watch = Callable[[Played], None]
Pair = tuple[Contestant, Contestant]


def battle(
    a: Contestant,
    b: Contestant,
    terms: Terms | None = None,
    keeping: Keeping | None = None,
    place: Place | None = None,
    watch: Watch = lambda played: None,
    film_progress: FrameProgress | None = None,
) -> BattleResult:
    """`watch` is told of every match when it has ended, `film_progress` of every frame of a film. Raises UsageError, IncompatibleCheckpoint, Unreachable, Refused."""
    terms, keeping, place = terms or Terms(), keeping or Keeping(), place or Place()
    trust.allow(place.env)
    began = time.monotonic()
    world, notes = _world((a, b), place)
    elsewhere = place.asked or any(isinstance(one, Served) for one in (a, b))
    with _Shelf(keeping, film_progress) as shelf:
        if world is not None:
            games, about, more = _in_matches((a, b), terms, place, world, shelf, watch)
        else:
            games, about, more = (_on_server if elsewhere else _here)((a, b), terms, place, shelf, watch)
        games = shelf.finished(games)
    notes += [*more, *shelf.notes]
    ordered = tuple(sorted(games, key=lambda game: game.number))
    settled = terms.to_json() | about
    return BattleResult(a.to_json(), b.to_json(), settled, ordered, tuple(notes), time.monotonic() - began)


Outcome = tuple[list[Played], dict[str, object], list[str]]


def _world(pair: Pair, place: Place) -> tuple[World | None, list[str]]:
    """The environment with several agents that is meant, if one is; those who play the Arena meet there."""
    from ludus.tournament.env_matches import world_of

    if place.server is not None or place.game is not None or (place.env is None and any(map(_plays_the_arena, pair))):
        found: tuple[World | None, list[str]] = None, []
    else:
        found = world_of(pair, place.env, place.options)
    if found[0] is None and place.camps is not None:
        raise UsageError("--camps is for environments with several agents.", "Leave it out.")
    return found


def _plays_the_arena(one: Contestant) -> bool:
    if not isinstance(one, Trained) or not isinstance(one.policy.observation_space, gym.spaces.Dict):
        return False
    try:
        from ludus.tournament.arena_matches import plays_it
    except MissingExtra:
        return False
    return plays_it(one.policy)


def _in_matches(pair: Pair, terms: Terms, place: Place, world: World, shelf: _Shelf, watch: Watch) -> Outcome:
    from ludus.tournament.env_matches import AT_ONCE, MatchRecording, MatchStage

    games: list[Played] = []

    def tell(played: Played, recording: MatchRecording | None) -> None:
        games.append(played if recording is None else shelf.put(played, recording))
        watch(games[-1])

    _refuse_what_servers_have(place)
    if shelf.films:
        world.check_pictures()
    with MatchStage(pair, world, terms, camps=place.camps, aside=shelf.aside, at_once=place.parallel or AT_ONCE) as stage:
        stage.play(tell)
        return games, stage.about, stage.notes


def _refuse_what_servers_have(place: Place) -> None:
    given = {"--limit": place.limit_s, "--advertise": place.advertise, "--token-file": place.token_file}
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} is for games of a server.", "Leave it out: this is played in this process.")


def _here(pair: Pair, terms: Terms, place: Place, shelf: _Shelf, watch: Watch) -> Outcome:
    from ludus.tournament.arena_matches import AT_ONCE, ArenaStage, Ended, every_for, pairings, size_for

    _refuse_what_servers_have(place)
    size = size_for(terms, pair)
    every, notes = every_for(terms, pair)
    stage = ArenaStage(pair, size, every, terms, records=shelf.records, at_once=place.parallel or AT_ONCE)
    games: list[Played] = []

    def tell(ended: Ended) -> None:
        games.append(ended.played if ended.recording is None else shelf.put(ended.played, ended.recording))
        watch(games[-1])

    stage.play(pairings(terms, size), tell)
    return games, {"game": ARENA, "mode": f"{size}v{size}", "every": every, "where": "this process"}, notes


def _on_server(pair: Pair, terms: Terms, place: Place, shelf: _Shelf, watch: Watch) -> Outcome:
    games = []
    with ServerStage(pair, terms, place, aside=shelf.aside, films=bool(shelf.films)) as stage:
        for played, recording in stage.play():
            games.append(played if recording is None else shelf.put(played, recording))
            watch(games[-1])
        return games, stage.about, list(stage.notes)


class _Shelf:
    """Where recordings and films go. Of what is not written at once, only the most lopsided are held. A context manager."""

    def __init__(self, keeping: Keeping, film_progress: FrameProgress | None = None) -> None:
        self._keeping, self._film_progress = keeping, film_progress
        self._held: list[tuple[tuple[float, ...], Played, Recorded]] = []  # the least lopsided first
        self._stack = contextlib.ExitStack()
        self.notes: list[str] = []
        self.aside: Path | None = None
        """For what waits to be written; gone with the shelf."""

    def __enter__(self) -> _Shelf:
        if self._keeping.directory is not None:
            with _written(self._keeping.directory):
                self._keeping.directory.mkdir(parents=True, exist_ok=True)
                made = tempfile.TemporaryDirectory(prefix=".battle-", dir=self._keeping.directory)
                self.aside = Path(self._stack.enter_context(made))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def records(self) -> bool:
        return self._keeping.recorded

    @property
    def films(self) -> int:
        return self._keeping.films

    def put(self, played: Played, recording: Recorded) -> Played:
        keeping = self._keeping
        if keeping.most is None:
            played = self._recorded(played, recording)
        heapq.heappush(self._held, (one_sided(played), played, recording))
        if len(self._held) > max(keeping.films, keeping.most or 0):
            heapq.heappop(self._held)[2].drop()
        return played

    def finished(self, games: list[Played]) -> list[Played]:
        """The same, with the files that are written only now that it is known which they are."""
        held = {game.number: (game, recording) for _, game, recording in self._held}
        changed: dict[int, Played] = {}
        if self._keeping.most is not None:
            for game in most_lopsided([game for game, _ in held.values()], self._keeping.most):
                changed[game.number] = self._recorded(game, held[game.number][1])
        for game in most_lopsided([game for game, _ in held.values()], self._keeping.films):
            known = changed.get(game.number, game)
            try:
                filmed = held[game.number][1].film(self._path(game), self._keeping.speed, self._film_progress)
            except (LudusError, OSError) as error:  # what was played is not lost for it
                self.notes.append(f"game {game.number} has no film: {why(error)}")
                continue
            changed[game.number] = replace(known, video=str(filmed))
        return [changed.get(game.number, game) for game in games]

    def _path(self, played: Played) -> Path:
        """Without its ending."""
        assert self._keeping.directory is not None
        return self._keeping.directory / f"game-{played.number:04d}"

    def _recorded(self, played: Played, recording: Recorded) -> Played:
        path = self._path(played)
        with _written(path):
            file = recording.write(path)
        return played if file is None else replace(played, recording=str(file))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except NotADirectoryError as error:
        raise UsageError(f"{path} cannot be made: a part of it is a file.", "Name another directory.") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.", "Is there room, and may we write there?") from error
