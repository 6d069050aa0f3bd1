"""Stage for matches of any two-camp game that a gamecore server starts; the games reach the contestants over HTTP.

For each local policy, a gateway runs on a background thread of this process until the battle ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from ludus.core.plugins import did_you_mean
from ludus.envs.video_writer import FrameProgress
from ludus.errors import LudusError, Refused, Unreachable, UsageError, WorkerFailed
from ludus.gamecore.vector_env import ADVERTISE
from ludus.games.arena.engine.layout import TICKS_PER_SECOND
from ludus.gateway.agent import Seat
from ludus.gateway.builtin_actor import BuiltinActor
from ludus.gateway.server import GatewaySettings
from ludus.gateway.threaded_server import ThreadedGateway, own_address
from ludus.io.atomic_file import path_for_replace
from ludus.models.inference.batched_policy import ActingPolicy, BatchedPolicy
from ludus.process.host import usable_cores
from ludus.protocol.client import Client
from ludus.protocol.gamecore_client import GamecoreClient, GameState
from ludus.serving.worker import FixedPolicySource
from ludus.tournament.contestants import ONLY_SEAT, RULE, Contestant, ScriptedContestant, ServedContestant, TrainedContestant
from ludus.tournament.result import (
    MAX_REASON_CHARS,
    HeroStats,
    MatchRecording,
    MatchResult,
    contestant_in_camp,
    failure_text,
    lopsidedness,
)
from ludus.tournament.settings import BattleSettings, Pairing, schedule
from ludus.tournament.stage import MatchEnd, OnMatchEnd, Stage

ARENA: Final = "arena"
LOOPBACK: Final = "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 5.0
_BUSY_STATUSES: Final = frozenset({408, 429, 503})
"""HTTP statuses of a server that is full or limits the request rate."""
_BUSY_TIMEOUT_S: Final = 60.0
_BUSY_RETRY_S: Final = 0.5
_FIRST_SEAT: Final = "hero_0"
"""Seat of the first hero if the Arena has one session per camp."""
_MAX_NUMBER: Final = 1e100
_MAX_SUFFIX_CHARS: Final = 16
_NOT_STATS: Final = frozenset({"camp", "hero_id", "asked"})
"""Numbers in a hero's entry that are not statistics."""

T = TypeVar("T")


@dataclass(frozen=True)
class GameLocation:
    """The game of a battle and where it runs.

    `server`: host:port or URL of a gamecore server; None: a private one, if one is needed. `advertise`: host under which its games reach
    this process; None: LUDUS_ADVERTISE, else the local address of the route to the server. `parallel`: concurrent matches; 0: one per
    core, or 64 (Arena) and 16 (environments) in this process. `options`: of the game. `env`: a multi-agent environment instead of a
    game; None: that of a contestant's training. `camps`: its agents, "red_*/blue_*".
    """

    server: str | None = None
    game: str | None = None
    token_file: str | Path | None = None
    advertise: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    parallel: int = 0
    limit_s: float | None = None
    """Wall-clock limit of a match; None: that of the server."""
    env: str | None = None
    camps: str | None = None

    def __post_init__(self) -> None:
        if self.env is not None and (self.server is not None or self.game is not None):
            raise UsageError("An environment is played in this process.", "Leave out --env, or --server and --game.")

    @property
    def needs_server(self) -> bool:
        """Whether only a gamecore server can play this."""
        return self.server is not None or self.game not in (None, ARENA) or bool(self.options)


@dataclass(frozen=True)
class GameFiles:
    """Files that a game wrote about a match, downloaded to the scratch directory."""

    recording: Path | None
    video: Path | None
    no_video_reason: str = ""

    def write(self, path: Path) -> Path | None:
        return None if self.recording is None else _copy_file(self.recording, path.with_suffix(self.recording.suffix))

    def write_video(self, path: Path, speed: float | None, progress: FrameProgress | None = None) -> Path:
        """Copy the game's own video; `speed` has no effect. Raises UsageError if there is none."""
        if self.video is None:
            raise UsageError(self.no_video_reason)
        suffix = self.video.suffix
        same_suffix = self.recording is not None and self.recording.suffix == suffix
        return _copy_file(self.video, path.with_name(f"{path.name}-film{suffix}") if same_suffix else path.with_suffix(suffix))

    def discard(self) -> None:
        for file in (self.recording, self.video):
            if file is not None:
                file.unlink(missing_ok=True)


def _copy_file(file: Path, path: Path) -> Path:
    with path_for_replace(path) as temporary:
        shutil.copyfile(file, temporary)
    return path


# -- the matches ----------------------------------------------------------------------------------------------------------


class GamecoreStage(Stage):
    """Plays matches of two contestants on a gamecore server. Entering it connects, or starts a private server; leaving it stops the
    running matches and the private server."""

    def __init__(
        self,
        contestants: tuple[Contestant, Contestant],
        settings: BattleSettings,
        location: GameLocation,
        *,
        scratch_dir: Path | None = None,
        videos: bool = False,
    ) -> None:
        """`scratch_dir`: receives files of the games; None: no recording. `videos`: download videos too."""
        super().__init__()
        self._contestants, self._settings, self._location = contestants, settings, location
        self._scratch_dir, self._videos = scratch_dir, videos
        self._max_parallel = location.parallel or usable_cores()
        self._recordings: dict[int, MatchRecording] = {}
        self._missing_recordings: dict[int, str] = {}  # reasons by match
        self._stopping = threading.Event()
        self._running_ids: set[str] = set()
        self._id, self._token = f"battle-{secrets.token_hex(4)}", secrets.token_urlsafe(24)

    def __enter__(self) -> GamecoreStage:
        with self._stack as stack:  # closes what was opened if a later part fails
            self._open()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        super().__exit__(*exc)

    @property
    def description(self) -> dict[str, object]:
        where = self._location.server or "a private server"  # the words of the JSON result
        return {"game": self._game, "mode": self._mode, "where": where, "options": self._options}

    def _open(self) -> None:
        location, settings = self._location, self._settings
        server = location.server or self._start_private_server()
        max_ticks = -1 if settings.seconds is None else settings.seconds * TICKS_PER_SECOND
        self._client = self._stack.enter_context(GamecoreClient(server, token_file=location.token_file, max_frame_num=max_ticks))
        self._game, entry = _find_game(self._client, location.game, settings.mode)
        self._game_options = entry.get("options") or {}
        self._size = self._choose_size()
        self._mode = settings.mode or (f"{self._size}v{self._size}" if self._size else None)
        per_hero = self._choose_session_kind()
        self._options = self._match_options(per_hero)
        self._camp_actors = self._serve_contestants(per_hero)
        self._stack.callback(self._stop_all)

    def _start_private_server(self) -> str:
        if self._location.game not in (None, ARENA):
            raise UsageError(
                f"{self._location.game!r} needs a gamecore server.", "Name one that has the game: --server HOST:PORT."
            )
        from ludus.gamecore.server.http.app import Settings, running

        state_dir = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ludus-battle-")))
        settings = Settings(port=0, state_dir=state_dir, max_games=max(1, self._max_parallel))
        return self._stack.enter_context(running(settings)).url

    # -- settings of the matches

    @property
    def _is_arena(self) -> bool:
        return self._game == ARENA

    def _choose_size(self) -> int:
        if not self._is_arena:
            return 0
        from ludus.tournament.arena_matches import check_contestant, decision_interval, team_size

        size = team_size(self._settings, self._contestants)
        for one in self._contestants:
            if one != ScriptedContestant(""):  # the game's default player
                check_contestant(one, size)
        every, notes = decision_interval(replace(self._settings, every=self._settings.every or 3), self._contestants)
        if every != 3 and "every" not in self._game_options:
            raise UsageError(f"--every {every}: the game on the server decides every 3 ticks.", "Leave --every out.")
        self.notes += notes
        return size

    def _choose_session_kind(self) -> bool:
        """Whether the Arena opens one session per hero; policies that were trained in environments need that."""
        if not self._is_arena:
            return False
        option = self._location.options.get("sessions")
        wanted = [per_hero for one in self._contestants if (per_hero := self._session_per_hero(one)) is not None]
        if option is None and len(set(wanted)) > 1:
            raise UsageError("One contestant plays a whole camp in a session, the other one hero.", "Serve both in the same way.")
        return option == "hero" if option is not None else not wanted or wanted[0]

    def _session_per_hero(self, one: Contestant) -> bool | None:
        """Whether a contestant needs one session per hero; None: it takes both, or that is unknown."""
        if isinstance(one, TrainedContestant):
            return None if len(set(map(id, one.seats.values()))) == 1 else _FIRST_SEAT not in one.seats
        if not isinstance(one, ServedContestant):
            return None
        try:
            with contextlib.closing(Client(one.url, one.token, _CONNECT_TIMEOUT_S, 0)) as client:
                return "seats" not in client.spec()
        except Unreachable as error:
            if self._location.server is None:
                raise
            self.notes.append(f"{one.url} cannot be reached from here: {str(error)[:MAX_REASON_CHARS]}")
            return None

    def _match_options(self, per_hero: bool) -> dict[str, Any]:
        """Options of the game: those that a fair battle needs, if the game has them, and those of the user."""
        wanted: dict[str, Any] = {"on_lost": "end", "lenient": True, "record": self._scratch_dir is not None}
        wanted |= {"sessions": "hero" if per_hero else "camp"} if self._is_arena else {}
        rules = {one.name for one in self._contestants if isinstance(one, ScriptedContestant)}
        if len(rules) > 1:
            raise UsageError("A server plays only one rule in a match.", "In the Arena, leave --server out.")
        if rules and (name := rules.pop()):
            if "rule" not in self._game_options:
                raise UsageError(f"{self._game} has no option 'rule'.", f"Its default player is {RULE!r}, without a name.")
            wanted["rule"] = name
        wanted |= {"every": self._settings.every} if self._settings.every is not None else {}
        return {name: value for name, value in wanted.items() if name in self._game_options} | dict(self._location.options)

    def _serve_contestants(self, per_hero: bool) -> list[Any]:
        """The actor of each contestant in the form of a start request; local policies are served first."""
        actors: list[Any] = []
        for number, one in enumerate(self._contestants):
            if isinstance(one, ScriptedContestant):
                actors.append(None)
            elif isinstance(one, ServedContestant):
                actors.append({"url": one.url} | ({"token": one.token} if one.token else {}))
            else:
                assert isinstance(one, TrainedContestant)  # a battle with a function does not come here
                seats = one.seats
                if self._is_arena and per_hero:
                    seats = {ONLY_SEAT: one.policy}
                elif self._is_arena and _FIRST_SEAT not in seats:
                    seats = {f"hero_{i}": one.policy for i in range(self._size)}
                url = self._serve_policy(seats, one.version, self._settings.seed + number)
                actors.append({"url": url, "token": self._token})
        return actors

    def _serve_policy(self, seats: Mapping[str, ActingPolicy], version: int, seed: int) -> str:
        """Start a gateway on a background thread; returns its URL. Raises UsageError."""
        by_policy: dict[int, Seat] = {}
        for policy in seats.values():
            batched = BatchedPolicy(FixedPolicySource(policy, version), seed=seed, deterministic=self._settings.deterministic)
            by_policy.setdefault(id(policy), Seat(batched))
        by_seat = {seat: by_policy[id(policy)] for seat, policy in seats.items()}
        settings = GatewaySettings(token=self._token)
        gateway = ThreadedGateway(_reachable_host(self._location), lambda: BuiltinActor(by_seat), settings)
        self._stack.callback(gateway.close)
        return gateway.url

    # -- playing

    def play(self, pairings: Sequence[Pairing], on_end: OnMatchEnd) -> None:
        """A match that crashes has `failed` set; when the server becomes unreachable, all remaining matches do."""
        pool = ThreadPoolExecutor(self._max_parallel, thread_name_prefix="battle")
        try:
            waiting: list[Future[MatchResult]] = [pool.submit(self._play_match, pairing) for pairing in pairings]
            for done in as_completed(waiting):
                result = done.result()
                on_end(MatchEnd(result, self._recordings.pop(result.number, None)))
            if self._scratch_dir is not None and self._missing_recordings:
                number, (first, *_) = len(self._missing_recordings), self._missing_recordings.values()
                self.notes.append(f"{number} game{'s have' if number > 1 else ' has'} no recording: {first}")
        finally:
            self._stopping.set()
            self._stop_all()
            pool.shutdown(wait=True, cancel_futures=True)

    @property
    def pairings(self) -> list[Pairing]:
        if self._is_arena:
            from ludus.tournament.arena_matches import schedule_matches

            return schedule_matches(self._settings, self._size)
        if isinstance(self._settings.lineups, str):
            raise UsageError("Random line-ups are for the Arena.", "Name the heroes: --lineup A,B/C,D.")
        return schedule(self._settings, 0)

    def _play_match(self, pairing: Pairing) -> MatchResult:
        unplayed = MatchResult(pairing.number, pairing.a_camp, pairing.seed)
        if self._stopping.is_set():
            return replace(unplayed, failed="not started: the server is gone")
        name = f"{self._id}-{pairing.number:04d}"
        self._running_ids.add(name)
        try:
            self._start(name, pairing)
            state = self._client.wait_game(name)
        except WorkerFailed as error:
            return replace(unplayed, failed=failure_text(error))
        except Unreachable as error:
            self._stopping.set()
            return replace(unplayed, failed=failure_text(error))
        except Refused as error:
            if error.status < 500 and error.status not in _BUSY_STATUSES:
                raise
            return replace(unplayed, failed=failure_text(error))
        finally:
            self._running_ids.discard(name)
        result = parse_match_result(unplayed, state, self._is_arena)
        if self._scratch_dir is not None and not result.failed:
            self._fetch_recordings(name, result, state)
        return result

    def _start(self, name: str, pairing: Pairing) -> None:
        """Raises Refused."""
        camps = self._camp_actors if pairing.a_camp == 0 else self._camp_actors[::-1]
        teams: dict[str, Any] = {} if self._mode is None else {"mode": self._mode}
        teams |= {} if pairing.heroes is None else {"heroes": [list(camp) for camp in self._ids(pairing)]}
        self._retry_while_busy(
            lambda: self._client.start_game(
                name, camps, teams or None, eval_mode=True, game=self._game, seed=pairing.seed,
                timeout_s=self._location.limit_s, options=self._options,
            )
        )  # fmt: skip

    def _retry_while_busy(self, request: Callable[[], T]) -> T:
        """Repeat a request while the server is full or limits the rate, for a bounded time. Raises Refused."""
        until = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                return request()
            except Refused as error:
                if error.status not in _BUSY_STATUSES or time.monotonic() > until or self._stopping.wait(_BUSY_RETRY_S):
                    raise

    def _ids(self, pairing: Pairing) -> tuple[tuple[int | str, ...], ...]:
        assert pairing.heroes is not None
        if not self._is_arena:
            return pairing.heroes
        from ludus.games.arena.engine.heroes import HEROES, row_of

        return tuple(tuple(HEROES[row_of(hero)].id for hero in camp) for camp in pairing.heroes)

    def _fetch_recordings(self, name: str, result: MatchResult, state: GameState) -> None:
        """Download the files that the game names in its result. Errors become notes. Runs on the pool's threads."""
        named = state.result if isinstance(state.result, Mapping) else {}
        kinds: tuple[Literal["recording", "video"], ...] = ("recording", "video") if self._videos else ("recording",)
        files: dict[str, Path] = {}
        missing: dict[str, str] = {}
        for kind in kinds:
            try:
                files[kind] = self._download(name, result, kind, named.get(kind))
            except (LudusError, OSError) as error:
                missing[kind] = failure_text(error)
        try:
            if self._is_arena and "recording" in files:
                self._recordings[result.number] = self._read_arena_recording(files["recording"], result)
            elif files:
                self._recordings[result.number] = GameFiles(files.get("recording"), files.get("video"), missing.get("video", ""))
        except (LudusError, OSError) as error:
            missing["recording"] = failure_text(error)
        if "recording" in missing:
            self._missing_recordings[result.number] = missing["recording"]

    def _download(self, name: str, result: MatchResult, kind: Literal["recording", "video"], file_name: Any) -> Path:
        assert self._scratch_dir is not None
        if not isinstance(file_name, str):
            raise UsageError(f"{self._game} names no {kind} in its result")
        data = self._retry_while_busy(lambda: self._client.download(name, kind))
        suffix = re.sub(r"[^.A-Za-z0-9]", "", Path(file_name).suffix)[:_MAX_SUFFIX_CHARS]
        path = self._scratch_dir / f"{result.number}-{kind}{suffix}"
        path.write_bytes(data)
        return path

    def _read_arena_recording(self, path: Path, result: MatchResult) -> MatchRecording:
        from ludus.games.arena.engine.recording import read_recording
        from ludus.tournament.arena_matches import ArenaRecording

        recording = read_recording(path)
        path.unlink()
        a, b = (one.label for one in self._contestants)
        return ArenaRecording(replace(recording, names=(a, b) if result.a_camp == 0 else (b, a)))

    def _stop_all(self) -> None:
        for name in list(self._running_ids):
            with contextlib.suppress(LudusError):
                self._client.stop_game(name, grace_s=0)


def _find_game(client: GamecoreClient, game: str | None, mode: str | None) -> tuple[str, Mapping[str, Any]]:
    """Name and catalogue entry of the game, by default the first that has the mode. Raises UsageError, Unreachable, Refused."""
    games = client.catalogue()["games"]
    name = game or next(
        (name for name, entry in games.items() if not entry.get("modes") or mode in (None, *entry["modes"])), None
    )
    if name is None:
        raise UsageError(f"No game of {client.server} plays {mode}.", f"It has {', '.join(games)}.")
    if name not in games:
        raise UsageError(f"{client.server} has no game {name!r}.", did_you_mean(name, games))
    return name, games[name]


def _reachable_host(location: GameLocation) -> str:
    """Host name or address under which games reach this process. Raises UsageError."""
    if location.server is None:
        return LOOPBACK
    if advertised := location.advertise or os.environ.get(ADVERTISE):
        return advertised
    at = urlsplit(location.server if "//" in location.server else f"//{location.server}")
    return own_address(at.hostname or "", at.port or 80)


# -- results ----------------------------------------------------------------------------------------------------------------


def parse_match_result(unplayed: MatchResult, state: GameState, arena: bool = False) -> MatchResult:
    """Validate the result that a game wrote: `winner` is a camp, or null for a draw."""
    result = state.result
    if state.state != "finished":
        return replace(unplayed, failed=f"the game {state.describe()}"[:MAX_REASON_CHARS])
    if not isinstance(result, Mapping) or "winner" not in result:
        return replace(unplayed, failed="the game wrote no result with a winner")
    winner = result["winner"]
    if winner is not None and (isinstance(winner, bool) or winner not in (0, 1)):
        return replace(unplayed, failed=f"the game reports the unknown camp {winner!r} as the winner"[:MAX_REASON_CHARS])
    if result.get("lost") or result.get("completed") is False:
        return replace(unplayed, failed=f"the game was not completed: {result.get('reason', '')}"[:MAX_REASON_CHARS])
    ticks = result.get("ticks")
    ticks = ticks if isinstance(ticks, int) and not isinstance(ticks, bool) else None
    return replace(
        unplayed,
        winner=None if winner is None else contestant_in_camp(winner, unplayed.a_camp),
        reason=str(result.get("reason", ""))[:MAX_REASON_CHARS],
        ticks=ticks,
        seconds=ticks / TICKS_PER_SECOND if arena and ticks is not None else state.seconds,
        heroes=_heroes(result.get("heroes"), unplayed.a_camp),
        lopsided=_result_lopsidedness(result),
    )


def _heroes(given: Any, a_camp: int) -> tuple[HeroStats, ...]:
    if not isinstance(given, list) or not all(isinstance(hero, Mapping) and hero.get("camp") in (0, 1) for hero in given):
        return ()
    return tuple(
        HeroStats(
            contestant_in_camp(hero["camp"], a_camp),
            str(hero.get("name", hero.get("hero_id", "")))[:80],
            {key: value for key, value in hero.items() if key not in _NOT_STATS and _is_number(value)},
        )
        for hero in given
    )


def _result_lopsidedness(result: Mapping[str, Any]) -> float:
    """From the camps' buildings and gold if the game reports them, else the difference of the two numbers in `score`, else 0."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        gold = [float(sum(hero["gold"] for hero in result["heroes"] if hero["camp"] == camp)) for camp in (0, 1)]
        blue, red = (sum(camp.values()) / len(camp) for camp in result["buildings"])
        return lopsidedness((blue, red), gold)
    score = result.get("score")
    if isinstance(score, list) and len(score) == 2 and all(map(_is_number, score)):
        return abs(float(score[0]) - float(score[1]))
    return 0.0


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number of a sane size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER
