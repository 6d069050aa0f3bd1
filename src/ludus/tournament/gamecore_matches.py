"""Matches that a gamecore server starts, of any game with two camps; contestants are reached over HTTP.

Policies of ours are served by a gateway in a thread of this process, one for each, for as long as the battle lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from ludus.core.plugins import did_you_mean
from ludus.envs.video_writer import FrameProgress
from ludus.errors import LudusError, Refused, Unreachable, UsageError, WorkerFailed
from ludus.gamecore.vector_env import ADVERTISE
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.server import Gateway, GatewaySettings
from ludus.gateway.threaded_server import listen_on, own_address
from ludus.io.atomic_file import path_for_replace
from ludus.models.inference.batched_policy import ActingPolicy, BatchedPolicy
from ludus.process.host import usable_cores
from ludus.protocol.client import Client
from ludus.protocol.gamecore_client import GamecoreClient, GameState
from ludus.serving.worker import FixedPolicySource
from ludus.tournament.contestants import ONLY_SEAT, RULE, Contestant, Script, Served, Trained
from ludus.tournament.result import SHORT, Hero, Played, Recorded, lopsided, who_of, why
from ludus.tournament.settings import Pairing, Terms, schedule

ARENA: Final = "arena"
HERE: Final = "127.0.0.1"
_REACH_S: Final = 5.0
_LATER: Final = frozenset({408, 429, 503})
"""What a server answers that is full, or has been asked too often."""
_FULL_S: Final = 60.0
_PAUSE_S: Final = 0.5
_LOOP_S: Final = 30.0
_FIRST: Final = "hero_0"
"""The seat of the first hero, where the Arena begins a session for a whole camp."""
_LARGEST: Final = 1e100
_ENDING: Final = 16
"""Characters of a file's ending."""
_UNCOUNTED: Final = frozenset({"camp", "hero_id", "asked"})
"""Numbers of a hero that say nothing about its deeds."""

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """`server`: host:port or URL of a gamecore server; None: a private one, if one is needed. `advertise`: by what name or address its
    games reach this machine; else LUDUS_ADVERTISE, else the one that it has towards the server. `parallel`: matches at once; 0: as many as there are cores here, in this process 64 or 16. `options`: of the game.

    `env`: an environment with several agents instead of a server's game; None: that of whoever was trained in one. `camps`: who
    plays with whom in it, "red_*/blue_*"."""

    server: str | None = None
    game: str | None = None
    token_file: str | Path | None = None
    advertise: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    parallel: int = 0
    limit_s: float | None = None
    """Of the clock, for each match; None: as long as the server allows."""
    env: str | None = None
    camps: str | None = None

    def __post_init__(self) -> None:
        if self.env is not None and (self.server is not None or self.game is not None):
            raise UsageError("An environment is played in this process.", "Leave out --env, or --server and --game.")

    @property
    def asked(self) -> bool:
        """Only a server can do it."""
        return self.server is not None or self.game not in (None, ARENA) or bool(self.options)


@dataclass(frozen=True)
class Left:
    """Files that a game has left of itself."""

    recording: Path | None
    video: Path | None
    why: str = ""
    """There is no video."""

    def write(self, path: Path) -> Path | None:
        return None if self.recording is None else _copied(self.recording, path.with_suffix(self.recording.suffix))

    def film(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        """As the game has made it, whatever `speed` says."""
        if self.video is None:
            raise UsageError(self.why)
        alike = self.recording is not None and self.recording.suffix == self.video.suffix
        return _copied(
            self.video, path.with_name(f"{path.name}-film{self.video.suffix}") if alike else path.with_suffix(self.video.suffix)
        )

    def drop(self) -> None:
        for file in (self.recording, self.video):
            if file is not None:
                file.unlink(missing_ok=True)


def _copied(file: Path, path: Path) -> Path:
    with path_for_replace(path) as temporary:
        shutil.copyfile(file, temporary)
    return path


# -- policies behind an address -----------------------------------------------------------------------------------------


class Backstage:
    """Gateways of this process, on an event loop in a thread of its own."""

    def __init__(self, host: str = HERE, *, deterministic: bool = True, seed: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._host, self._deterministic, self._seed = host, deterministic, seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="battle-gateways", daemon=True)
        self._gateways: list[Gateway] = []
        self._thread.start()

    def serve(self, seats: Mapping[str, ActingPolicy], version: int) -> int:
        """The port where it answers."""
        listening = listen_on(self._host)
        number = len(self._gateways)

        async def start() -> Gateway:
            made: dict[int, Seat] = {}
            for policy in seats.values():
                deciding = BatchedPolicy(
                    FixedPolicySource(policy, version), seed=self._seed + number, deterministic=self._deterministic
                )
                made.setdefault(id(policy), Seat(deciding))
            told = {seat: made[id(policy)] for seat, policy in seats.items()}
            gateway = Gateway(lambda: BuiltinActor(told), GatewaySettings(token=self.token))
            await gateway.start([listening])
            return gateway

        self._gateways.append(self._run(start()))
        port: int = listening.getsockname()[1]
        return port

    def close(self) -> None:
        try:
            for gateway in self._gateways:
                self._run(gateway.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_LOOP_S)
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LOOP_S)


# -- the matches ----------------------------------------------------------------------------------------------------------


class ServerStage:
    """Ready when it is entered; leaving it ends what is still played, and the private server if there was one."""

    def __init__(
        self,
        contestants: tuple[Contestant, Contestant],
        terms: Terms,
        place: Place,
        *,
        aside: Path | None = None,
        films: bool = False,
    ) -> None:
        """`aside`: where files of the games wait for whoever wants them; None: nobody does. `films`: also what the games have filmed."""
        self._contestants, self._terms, self._place, self._aside, self._films = contestants, terms, place, aside, films
        self._kept: dict[int, Recorded] = {}
        self._unkept: dict[int, str] = {}  # why games have left no recording
        self._stack = contextlib.ExitStack()
        self._gone = threading.Event()
        self._running: set[str] = set()
        self._id = f"battle-{secrets.token_hex(4)}"
        self.notes: list[str] = []

    def __enter__(self) -> ServerStage:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._gone.set()
        self._stack.close()

    @property
    def about(self) -> dict[str, object]:
        where = self._place.server or "a private server"
        return {"game": self._game, "mode": self._mode, "where": where, "options": self._options}

    def _open(self) -> None:
        place, terms = self._place, self._terms
        server = place.server or self._private()
        self._client = self._stack.enter_context(
            GamecoreClient(server, token_file=place.token_file, max_frame_num=-1 if terms.seconds is None else self._ticks())
        )
        self._game, entry = _entry(self._client, place.game, terms.mode)
        self._known = entry.get("options") or {}
        self._size = self._agree_on_size()
        self._mode = terms.mode or (f"{self._size}v{self._size}" if self._size else None)
        by_hero = self._sessions()
        self._options = self._settle(by_hero)
        self._camps = self._addresses(by_hero)
        self._stack.callback(self._stop_all)

    def _private(self) -> str:
        if self._place.game not in (None, ARENA):
            raise UsageError(f"Who starts {self._place.game!r}?", "Name a gamecore server that knows it: --server HOST:PORT.")
        from ludus.gamecore.server.http.app import Settings, running

        home = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ludus-battle-")))
        settings = Settings(port=0, state_dir=home, max_games=max(1, self._parallel()))
        return self._stack.enter_context(running(settings)).url

    def _parallel(self) -> int:
        return self._place.parallel or usable_cores()

    def _ticks(self) -> int:
        from ludus.games.arena.engine.layout import TICKS_PER_SECOND

        return (self._terms.seconds or 0) * TICKS_PER_SECOND

    # -- what is agreed

    @property
    def _is_arena(self) -> bool:
        return self._game == ARENA

    def _agree_on_size(self) -> int:
        if not self._is_arena:
            return 0
        from ludus.tournament.arena_matches import check, every_for, size_for

        size = size_for(self._terms, self._contestants)
        for one in self._contestants:
            if one != Script(""):  # the game's own choice
                check(one, size)
        every, notes = every_for(replace(self._terms, every=self._terms.every or 3), self._contestants)
        if every != 3 and "every" not in self._known:
            raise UsageError(f"Decisions every {every} ticks: the game there decides every 3.", "Leave --every out.")
        self.notes += notes
        return size

    def _sessions(self) -> bool:
        """Whether the Arena begins a session for each hero: those who were trained in environments know no other."""
        if not self._is_arena:
            return False
        said = self._place.options.get("sessions")
        forms = [form for one in self._contestants if (form := self._form(one)) is not None]
        if said is None and len(set(forms)) > 1:
            raise UsageError("One contestant plays a whole camp in a session, the other one hero.", "Serve them alike.")
        return said == "hero" if said is not None else not forms or forms[0]

    def _form(self, one: Contestant) -> bool | None:
        """Whether it wants a session for each hero; None: it takes what comes, or nobody knows."""
        if isinstance(one, Trained):
            return None if len(set(map(id, one.seats.values()))) == 1 else _FIRST not in one.seats
        if not isinstance(one, Served):
            return None
        try:
            with contextlib.closing(Client(one.url, one.token, _REACH_S, 0)) as client:
                return "seats" not in client.spec()
        except Unreachable as error:
            if self._place.server is None:
                raise
            self.notes.append(f"{one.url} cannot be reached from here: {str(error)[:SHORT]}")
            return None

    def _settle(self, by_hero: bool) -> dict[str, Any]:
        """Options of the game: what makes a battle fair, as far as the game knows it, and what was asked for."""
        wanted: dict[str, Any] = {"on_lost": "end", "lenient": True, "record": self._aside is not None}
        wanted |= {"sessions": "hero" if by_hero else "camp"} if self._is_arena else {}
        rules = {one.name for one in self._contestants if isinstance(one, Script)}
        if len(rules) > 1:
            raise UsageError("A server plays one rule in a match, not two.", "In the Arena, leave --server out.")
        if rules and (name := rules.pop()):
            if "rule" not in self._known:
                raise UsageError(f"{self._game} has no option 'rule'.", f"Its own player is {RULE!r}, without a name.")
            wanted["rule"] = name
        wanted |= {"every": self._terms.every} if self._terms.every is not None else {}
        return {name: value for name, value in wanted.items() if name in self._known} | dict(self._place.options)

    def _addresses(self, by_hero: bool) -> list[Any]:
        """Of either contestant, as an order says who plays a camp."""
        trained = [one for one in self._contestants if isinstance(one, Trained)]
        if not trained:
            return [_camp(one) for one in self._contestants]
        host = _own_address(self._place)
        stage = Backstage(host, deterministic=self._terms.deterministic, seed=self._terms.seed)
        self._stack.callback(stage.close)
        shown = f"[{host}]" if ":" in host else host
        addresses: list[Any] = []
        for one in self._contestants:
            if isinstance(one, Trained):
                port = stage.serve(self._seats_of(one, by_hero), one.version)
                addresses.append({"url": f"http://{shown}:{port}", "token": stage.token})
            else:
                addresses.append(_camp(one))
        return addresses

    def _seats_of(self, one: Trained, by_hero: bool) -> Mapping[str, ActingPolicy]:
        if not self._is_arena or (not by_hero and _FIRST in one.seats):
            return one.seats
        return {ONLY_SEAT: one.policy} if by_hero else {f"hero_{i}": one.policy for i in range(self._size)}

    # -- playing

    def play(self) -> Iterator[tuple[Played, Recorded | None]]:
        """As they end. One that crashes is told as `failed`; when the server itself is gone, so are all that are left."""
        queue = self._pairings()
        pool = ThreadPoolExecutor(self._parallel(), thread_name_prefix="battle")
        try:
            waiting: list[Future[Played]] = [pool.submit(self._one, pairing) for pairing in queue]
            for done in as_completed(waiting):
                played = done.result()
                yield played, self._kept.pop(played.number, None)
            if self._aside is not None and self._unkept:
                number, (first, *_) = len(self._unkept), self._unkept.values()
                self.notes.append(f"{number} game{'s have' if number > 1 else ' has'} no recording: {first}")
        finally:
            self._gone.set()
            self._stop_all()
            pool.shutdown(wait=True, cancel_futures=True)

    def _pairings(self) -> list[Pairing]:
        if self._is_arena:
            from ludus.tournament.arena_matches import pairings

            return pairings(self._terms, self._size)
        if isinstance(self._terms.lineups, str):
            raise UsageError("Random line-ups are for the Arena.", "Name the heroes: --lineup A,B/C,D.")
        return schedule(self._terms, 0)

    def _name(self, pairing: Pairing) -> str:
        return f"{self._id}-{pairing.number:04d}"

    def _one(self, pairing: Pairing) -> Played:
        bare = Played(pairing.number, pairing.a_camp, pairing.seed)
        if self._gone.is_set():
            return replace(bare, failed="it was not begun: the server is gone")
        name = self._name(pairing)
        self._running.add(name)
        try:
            self._start(name, pairing)
            state = self._client.wait_game(name)
        except WorkerFailed as error:
            return replace(bare, failed=why(error))
        except Unreachable as error:
            self._gone.set()
            return replace(bare, failed=why(error))
        except Refused as error:
            if error.status < 500 and error.status not in _LATER:
                raise
            return replace(bare, failed=why(error))
        finally:
            self._running.discard(name)
        played = judged(bare, state, self._is_arena)
        if self._aside is not None and not played.failed:
            self._keep(name, played, state)
        return played

    def _start(self, name: str, pairing: Pairing) -> None:
        """Raises Refused."""
        camps = self._camps if pairing.a_camp == 0 else self._camps[::-1]
        teams: dict[str, Any] = {} if self._mode is None else {"mode": self._mode}
        teams |= {} if pairing.heroes is None else {"heroes": [list(camp) for camp in self._ids(pairing)]}
        self._insisted(
            lambda: self._client.start_game(
                name, camps, teams or None, eval_mode=True, game=self._game, seed=pairing.seed,
                timeout_s=self._place.limit_s, options=self._options,
            )
        )  # fmt: skip

    def _insisted(self, ask: Callable[[], T]) -> T:
        """A server that has no room, or no time, is asked again for a while. Raises Refused."""
        until = time.monotonic() + _FULL_S
        while True:
            try:
                return ask()
            except Refused as error:
                if error.status not in _LATER or time.monotonic() > until or self._gone.wait(_PAUSE_S):
                    raise

    def _ids(self, pairing: Pairing) -> tuple[tuple[int | str, ...], ...]:
        assert pairing.heroes is not None
        if not self._is_arena:
            return pairing.heroes
        from ludus.games.arena.engine.heroes import HEROES, row_of

        return tuple(tuple(HEROES[row_of(hero)].id for hero in camp) for camp in pairing.heroes)

    def _keep(self, name: str, played: Played, state: GameState) -> None:
        """What the game has left of itself and names in its result; called by threads. A match is not lost for it."""
        result = state.result if isinstance(state.result, Mapping) else {}
        wanted: tuple[Literal["recording", "video"], ...] = ("recording", "video") if self._films else ("recording",)
        found: dict[str, Path] = {}
        missing: dict[str, str] = {}
        for what in wanted:
            try:
                found[what] = self._brought(name, played, what, result.get(what))
            except (LudusError, OSError) as error:
                missing[what] = why(error)
        try:
            if self._is_arena and "recording" in found:
                self._kept[played.number] = self._of_arena(found["recording"], played)
            elif found:
                self._kept[played.number] = Left(found.get("recording"), found.get("video"), missing.get("video", ""))
        except (LudusError, OSError) as error:
            missing["recording"] = why(error)
        if "recording" in missing:
            self._unkept[played.number] = missing["recording"]

    def _brought(self, name: str, played: Played, what: Literal["recording", "video"], named: Any) -> Path:
        assert self._aside is not None
        if not isinstance(named, str):
            raise UsageError(f"{self._game} names no {what} in its result")
        data = self._insisted(lambda: self._client.kept(name, what))
        ending = re.sub(r"[^.A-Za-z0-9]", "", Path(named).suffix)[:_ENDING]
        path = self._aside / f"{played.number}-{what}{ending}"
        path.write_bytes(data)
        return path

    def _of_arena(self, path: Path, played: Played) -> Recorded:
        from ludus.games.arena.engine.recording import read_recording
        from ludus.tournament.arena_matches import ArenaRecording

        recording = read_recording(path)
        path.unlink()
        a, b = (one.label for one in self._contestants)
        return ArenaRecording(replace(recording, names=(a, b) if played.a_camp == 0 else (b, a)))

    def _stop_all(self) -> None:
        for name in list(self._running):
            with contextlib.suppress(LudusError):
                self._client.stop_game(name, grace_s=0)


def _entry(client: GamecoreClient, game: str | None, mode: str | None) -> tuple[str, Mapping[str, Any]]:
    """A game of the server's catalogue. Raises UsageError, Unreachable, Refused."""
    games = client.catalogue()["games"]
    name = game or next(
        (name for name, entry in games.items() if not entry.get("modes") or mode in (None, *entry["modes"])), None
    )
    if name is None:
        raise UsageError(f"No game of {client.server} plays {mode}.", f"It has {', '.join(games)}.")
    if name not in games:
        raise UsageError(f"{client.server} has no game {name!r}.", did_you_mean(name, games))
    return name, games[name]


def _camp(one: Contestant) -> Any:
    if isinstance(one, Script):
        return None
    assert isinstance(one, Served)
    return {"url": one.url} | ({"token": one.token} if one.token else {})


def _own_address(place: Place) -> str:
    """By which name or address games reach this machine, as in training. Raises UsageError."""
    if place.server is None:
        return HERE
    if told := place.advertise or os.environ.get(ADVERTISE):
        return told
    at = urlsplit(place.server if "//" in place.server else f"//{place.server}")
    return own_address(at.hostname or "", at.port or 80)


# -- results ----------------------------------------------------------------------------------------------------------------


def judged(bare: Played, state: GameState, arena: bool = False) -> Played:
    """What a game says of itself, believed as far as it makes sense: `winner` is a camp, or null for a draw."""
    result = state.result
    if state.state != "finished":
        return replace(bare, failed=f"the game {state.describe()}"[:SHORT])
    if not isinstance(result, Mapping) or "winner" not in result:
        return replace(bare, failed="the game wrote no result with a winner")
    winner = result["winner"]
    if winner is not None and (isinstance(winner, bool) or winner not in (0, 1)):
        return replace(bare, failed=f"the game says that camp {winner!r} has won"[:SHORT])
    if result.get("lost") or result.get("completed") is False:
        return replace(bare, failed=f"it did not come to its end: {result.get('reason', '')}"[:SHORT])
    ticks = result.get("ticks")
    ticks = ticks if isinstance(ticks, int) and not isinstance(ticks, bool) else None
    return replace(
        bare,
        winner=None if winner is None else who_of(winner, bare.a_camp),
        reason=str(result.get("reason", ""))[:SHORT],
        ticks=ticks,
        seconds=_game_seconds(ticks) if arena and ticks is not None else state.seconds,
        heroes=_heroes(result.get("heroes"), bare.a_camp),
        lopsided=_lopsided(result),
    )


def _game_seconds(ticks: int) -> float:
    from ludus.games.arena.engine.layout import TICKS_PER_SECOND

    return ticks / TICKS_PER_SECOND


def _heroes(given: Any, a_camp: int) -> tuple[Hero, ...]:
    if not isinstance(given, list) or not all(isinstance(hero, Mapping) and hero.get("camp") in (0, 1) for hero in given):
        return ()
    return tuple(
        Hero(
            who_of(hero["camp"], a_camp),
            str(hero.get("name", hero.get("hero_id", "")))[:80],
            {key: value for key, value in hero.items() if key not in _UNCOUNTED and _is_number(value)},
        )
        for hero in given
    )


def _lopsided(result: Mapping[str, Any]) -> float:
    """Of a game that tells what is left of the camps' buildings, and the gold of their heroes; of one that tells their `score`, two
    numbers, the difference; 0 for any other."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        gold = [float(sum(hero["gold"] for hero in result["heroes"] if hero["camp"] == camp)) for camp in (0, 1)]
        blue, red = (sum(camp.values()) / len(camp) for camp in result["buildings"])
        return lopsided((blue, red), gold)
    score = result.get("score")
    if isinstance(score, list) and len(score) == 2 and all(map(_is_number, score)):
        return abs(float(score[0]) - float(score[1]))
    return 0.0


def _is_number(value: Any) -> bool:
    """One that can be reckoned with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
