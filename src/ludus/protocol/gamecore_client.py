"""Client of a gamecore server: starts games, waits for them, inspects and stops them.

    with GamecoreClient("node1:23432") as client:
        camps = {"mode": "3v3", "heroes": [[{"hero_id": 190}, …], [{"hero_id": 141}, …]]}
        client.start_game("match-17", [None, ("10.0.0.5", 8000)], camps)   # rule AI against the actor at that address
        print(client.wait_game("match-17").result)

Uses the standard library only. Uses /v1 if the server has it, else the older /v2.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from ludus.core.plugins import did_you_mean
from ludus.errors import DeadlineMissed, LudusError, Refused, Unreachable, UsageError, WorkerFailed
from ludus.io.tcp import keep_alive
from ludus.protocol.spec import read_token, refusal_from

log = logging.getLogger(__name__)

PORT: Final = 23432
ADDRESS_VARIABLE: Final = "GAMECORE_SERVER_ADDR"
TOKEN_VARIABLE: Final = "LUDUS_GAMECORE_TOKEN_FILE"  # noqa: S105 - the name of a variable

OVER: Final = frozenset({"finished", "crashed", "stopped", "timed-out", "lost", "over"})
"""An older server reports only `over`, not how a game ended."""
BROKEN: Final = frozenset({"crashed", "timed-out", "lost"})

START_FROM: Final[Mapping[str, str | None]] = {"remote": None, "repeat": "any", "remote_repeat": "any", "repeat_only": "any"}
"""simulator_type → saved state that a match starts from."""

_POLL_S = 20.0
"""Duration of one long-poll request; the server replies earlier when the game ends."""
_POLL_PAUSE_S = 0.5
"""Poll interval for servers without long polls."""
_AWAY_S = 60.0
"""Time for which a restarting server is waited for."""
_AWAY_PAUSE_S = 0.5
_RESTARTING = frozenset({502, 503, 504})
"""Status codes of a stopping server, or of a proxy in front of it."""
_HOST_LOST = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH})
"""Errors of a connection to a host that no longer responds."""
_LOST_S = 60.0
"""Upper limit for detecting a lost host by TCP keep-alive, whatever `timeout_s` allows for a reply."""
_SLACK_S = 5.0
"""Additional time for the reply to a long poll."""
_START_S = 150.0
"""Additional time for a start: the first game of its kind may wait for the import and compilation of a module."""
_DOWNLOAD_S = 60.0
"""Additional time for a file of up to 64 MB."""
_STOP_S = 30.0
"""Additional time for a stop: a game may save its state first."""
_NO_V1 = frozenset({200, 404, 405, 501})
"""Status codes of a server without /v1/catalogue; 200 is an HTML page."""
_MAX_ANSWER = 64 << 20
_CHUNK = 65_536
_MAX_IDLE = 8
"""Idle connections that are kept."""

Address: TypeAlias = tuple[str, int]
Camp: TypeAlias = "str | tuple[str, int] | Sequence[Any] | Mapping[str, Any] | None"
"""Who plays a camp: None for the game's rule AI, or the address of an actor: (ip, port), "host:port", "http(s)://…", or a
mapping with `address` or `url`, and optionally `token` and `timeout_s`."""
GameStates: TypeAlias = "list[GameState]"
Names: TypeAlias = "list[str]"


@dataclass(frozen=True)
class GameState:
    """The state of a game, as reported by its server."""

    runtime_id: str
    state: str
    """starting, running, finished, crashed, stopped, timed-out or lost (it was running when its server died)."""
    game: str | None = None
    mode: str | None = None
    pid: int | None = None
    started: float | None = None
    """Unix time, in seconds."""
    seconds: float | None = None
    exit_code: int | None = None
    """Negative for a signal."""
    reason: str = ""
    restarts: int = 0
    result: Any = None
    """The result that the game wrote, for example {"winner": 0, "ticks": 8612}."""
    last_lines: tuple[str, ...] = ()
    cpu_s: float | None = None
    memory_mb: float | None = None
    threads: int | None = None
    eval_mode: bool = False
    task_id: str | None = None
    seed: int | None = None
    start_from: str | None = None
    """The saved state that it started from."""
    finished: float | None = None
    """Unix time, in seconds."""

    @property
    def over(self) -> bool:
        return self.state in OVER

    @property
    def broken(self) -> bool:
        """Whether it ended abnormally."""
        return self.state in BROKEN

    @property
    def lost_camps(self) -> dict[str, str]:
        """Camp number → why its actor did not play it to the end, from `lost` in the game's result."""
        lost = self.result.get("lost") if isinstance(self.result, Mapping) else None
        return {str(camp): str(why) for camp, why in lost.items()} if isinstance(lost, Mapping) else {}

    @classmethod
    def from_json(cls, data: Any) -> GameState:
        """Parse a state, ignoring unknown or mistyped fields of newer servers. Raises Refused."""
        if not (isinstance(data, dict) and isinstance(data.get("runtime_id"), str) and isinstance(data.get("state"), str)):
            raise _reply_error("a state of a game")
        known = {field.name: data[field.name] for field in fields(cls) if data.get(field.name) is not None}
        sane: dict[str, Any] = {name: value for name, value in known.items() if isinstance(value, _KINDS.get(name, object))}
        sane["last_lines"] = tuple(str(line) for line in sane.get("last_lines", ()))
        return cls(**sane)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"last_lines": list(self.last_lines)}

    def describe(self) -> str:
        """Describe the state in one line, beginning with camps that their actor did not play."""
        brief = self.seconds is None or self.seconds < 0.05 or self.state == "lost"
        took = "" if brief else f" {'after' if self.over else 'for'} {self.seconds:.1f} s"
        code = "" if self.exit_code is None or self.state in ("finished", "stopped") else f", exit code {self.exit_code}"
        again = f", restarted {self.restarts}×" if self.restarts else ""
        known_reason = not self.reason or self.state in ("finished", "lost") or f"code {self.exit_code}" in self.reason
        why = "" if known_reason else f": {self.reason.rstrip('.')}"
        lost = "".join(f"Lost camp {camp}: {_shorten(reason)} " for camp, reason in self.lost_camps.items())
        stand_in = "The game's own AI played instead. " if lost and self.state == "finished" else ""
        return f"{lost}{stand_in}Game {self.runtime_id!r} {_VERBS.get(self.state, 'is ' + self.state)}{took}{code}{again}{why}."


def _shorten(reason: str) -> str:
    """Shorten to one line of at most `_MAX_REASON` characters that ends like a sentence."""
    line = " ".join(reason.split()).rstrip(".") or "no reason given"
    return f"{line}." if len(line) < _MAX_REASON else f"{line[: _MAX_REASON - 1]}…"


_MAX_REASON = 200
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("started", "seconds", "cpu_s", "memory_mb", "finished"), (int, float)),
    **dict.fromkeys(("pid", "exit_code", "restarts", "threads", "seed"), int),
    **dict.fromkeys(("game", "mode", "reason", "task_id", "start_from"), str),
    "last_lines": list,
}

_VERBS = {
    "starting": "is starting",
    "running": "is running",
    "finished": "has finished",
    "crashed": "has crashed",
    "stopped": "was stopped",
    "timed-out": "was ended at its time limit",
    "lost": "was lost when its server died",
    "over": "is over",
}


class GamecoreClient:
    """Client of one gamecore server. Thread-safe.

    `server_addr`: "host:port" or a URL; default: GAMECORE_SERVER_ADDR, else this machine. The token, if the server needs one, comes
    from `token`, `token_file` or the file named by LUDUS_GAMECORE_TOKEN_FILE. `timeout_s` limits each request, in addition to the
    time that a start or stop takes.

    For every started game: `gamecore_req_timeout` is its time limit for an action of an actor (milliseconds), `default_hero_config`
    maps a hero_id to default settings of the hero, `max_frame_num` ends a match (-1: never). `simulator_type` selects where matches
    start: remote (a new match), repeat or remote_repeat (a saved state if there is one), repeat_only (a saved state).

    Raises Unreachable when there is no reply, Refused when the server refuses, UsageError for invalid arguments.
    """

    def __init__(
        self,
        server_addr: str | None = None,
        gamecore_req_timeout: int = 30_000,
        default_hero_config: Mapping[Any, Mapping[str, Any]] | None = None,
        max_frame_num: int = -1,
        simulator_type: str = "remote",
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise UsageError(f"timeout_s is {timeout_s}.", "It is a number of seconds above 0.")
        if gamecore_req_timeout <= 0:
            raise UsageError(f"gamecore_req_timeout is {gamecore_req_timeout}.", "It is a number of milliseconds above 0.")
        if simulator_type not in START_FROM:
            raise UsageError(f"simulator_type is {simulator_type!r}.", did_you_mean(simulator_type, START_FROM))
        if token is None:
            token = read_token(token_file or os.environ.get(TOKEN_VARIABLE) or None)
        self._http = _HttpPool(server_addr or os.environ.get(ADDRESS_VARIABLE) or f"127.0.0.1:{PORT}", token, timeout_s)
        self._actor_s, self._simulator = gamecore_req_timeout / 1000, simulator_type
        self._max_frames = max_frame_num if max_frame_num > 0 else None
        self._defaults = {str(hero): dict(config) for hero, config in (default_hero_config or {}).items()}
        self._has_v1: bool | None = None
        weakref.finalize(self, self._http.close)  # callers often do not close it

    def __enter__(self) -> GamecoreClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections. Games continue; the next call connects again."""
        self._http.close()

    @property
    def server(self) -> str:
        """The URL of the server."""
        return self._http.url

    # -- games

    def start_game(
        self,
        runtime_id: str,
        server_config: Sequence[Camp] | None = None,
        camp_config: Mapping[str, Any] | Sequence[Sequence[Any]] | None = None,
        eval_mode: bool | str | None = False,
        task_id: str | bool | None = None,
        extra_abs_key_info: Mapping[str, Any] | None = None,
        *,
        game: str | None = None,
        seed: int | None = None,
        start_from: str | None = None,
        timeout_s: float | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> GameState:
        """Start a game, or find it running: a repeated call with the same id does not start a second one.

        `server_config` has one entry per camp, see `Camp`; None: rule AI in all camps. `camp_config` is
        {"mode": "3v3", "heroes": [[…], […]]} with {"hero_id": …} or a number for each hero, or the two lists alone. `game` is a name in
        the server's catalogue; default: the first with this mode. `start_from` names a saved state, or is "any". `timeout_s` is the
        time limit of the game.
        """
        if isinstance(task_id, bool) or not isinstance(eval_mode, (bool, type(None))):  # older callers pass the task first
            eval_mode, task_id = task_id, eval_mode
        task = None if task_id is None else str(task_id)
        mode, heroes = _parse_camp_config(camp_config, self._defaults)
        actors = _parse_actors(server_config, heroes, self._actor_s)
        simulator = "remote" if eval_mode else self._simulator
        request = {
            "runtime_id": _check_id(runtime_id),
            "game": game,
            "mode": mode,
            "heroes": heroes,
            "camps": None if actors is None else [actor and actor.to_json() for actor in actors],
            "eval_mode": True if eval_mode else None,
            "seed": seed,
            "max_frames": self._max_frames,
            "timeout_s": timeout_s,
            "start_from": start_from,
            "task_id": task,
            "options": dict(options) if options else None,
        }
        request = {key: value for key, value in request.items() if value is not None}
        if not self._uses_v1():
            self._request_v2("newGame", _to_v2(request, actors or (), simulator, extra_abs_key_info or {}))
            return GameState(runtime_id, "starting", mode=mode, eval_mode=bool(eval_mode), task_id=task)
        if extra_abs_key_info:
            log.warning("ignoring extra_abs_key_info, which %s does not support", self.server)
        if not start_from and START_FROM[simulator]:
            request["start_from"] = START_FROM[simulator]
        if simulator == "repeat_only":
            request["must_resume"] = True
        return GameState.from_json(self._request("POST", "/v1/games", request, self._http.timeout_s + _START_S))

    def wait_game(self, runtime_id: str, max_timeout_second: float = 0) -> GameState:
        """Wait for the end of a game and return its state: finished or stopped. 0 seconds: no time limit.

        Raises WorkerFailed, with exit code and last lines, when it crashed, hit its time limit or was lost; DeadlineMissed when it is
        still running after the time limit. Waits for a server that restarts meanwhile.
        """
        until = time.monotonic() + max_timeout_second if max_timeout_second > 0 else math.inf
        state = self._wait_until_over(_check_id(runtime_id), until)
        if not state.over:
            message = f"Game {runtime_id!r} is still {state.state} after {max_timeout_second:g} s."
            raise DeadlineMissed(message, "It is still running: wait again, or stop it.")
        if state.broken:
            raise failure(state)
        return state

    def stop_game(self, runtime_id: str, *, grace_s: float | None = None) -> GameState | None:
        """Stop a running game within `grace_s`. Returns None if the server has no such game or does not report its state."""
        path = _path(runtime_id, "" if grace_s is None else f"?{urlencode({'grace_s': grace_s})}")
        if not self._uses_v1():
            self._request_v2("stopGame", {"runtime_id": runtime_id})
            return None
        try:
            found = self._request("DELETE", path, timeout_s=self._http.timeout_s + _STOP_S + (grace_s or 0))
        except Refused as refused:
            if refused.status == 404:
                return None
            raise
        return GameState.from_json(found)

    def exists(self, runtime_id: str) -> bool:
        """Whether the game is starting or running."""
        _check_id(runtime_id)
        if not self._uses_v1():
            found = self._request_v2("exists", {"runtime_id": runtime_id})
            if "exists" not in found:
                found = _data(found)
            return bool(found.get("exists"))
        try:
            return not self.state(runtime_id).over
        except Refused as refused:
            if refused.status == 404:
                return False
            raise

    def state(self, runtime_id: str) -> GameState:
        """Return the state of a running or kept game. Raises Refused (404) for any other."""
        path = _path(runtime_id)
        self._require_v1("report the state of a game, only whether it exists")
        return GameState.from_json(self._request("GET", path))

    def list(self, state: str | None = None) -> GameStates:
        """List all games that the server keeps, or those in this state."""
        self._require_v1("list games, only tasks")
        found = self._request("GET", "/v1/games" + (f"?{urlencode({'state': state})}" if state else ""))
        games = found.get("games")
        if not isinstance(games, list):
            raise _reply_error("a list of games")
        return [GameState.from_json(item) for item in games]

    def logs(self, runtime_id: str, lines: int = 100) -> str:
        """Return the last lines of the game's output."""
        path = _path(runtime_id, f"/log?{urlencode({'lines': lines})}")
        self._require_v1("show logs")
        return self._http.request("GET", path).body.decode("utf-8", "replace")

    def download(self, runtime_id: str, what: Literal["recording", "video"]) -> bytes:
        """Download the recording or video that the game's result names. Raises Refused if there is none."""
        path = _path(runtime_id, f"/{what}")
        self._require_v1("send files of games")
        return self._http.request("GET", path, timeout_s=self._http.timeout_s + _DOWNLOAD_S).body

    kept = download  # its name in earlier releases

    def forget(self, runtime_id: str) -> None:
        """Remove the record and files of a finished game."""
        path = _path(runtime_id, "/forget")
        self._require_v1("remove a game")
        self._request("POST", path, {})

    def clear(self) -> dict[str, Any]:
        """Remove all finished games; returns the server's reply."""
        self._require_v1("remove games, only tasks")
        return self._request("POST", "/v1/clear", {})

    def catalogue(self) -> dict[str, Any]:
        """Return the games that can be started, with their modes and options: {"games": {name: …}}."""
        self._require_v1("show its catalogue")
        return self._request("GET", "/v1/catalogue")

    def health(self) -> dict[str, Any]:
        return self._request("GET", "/health")

    # -- tasks: games that were started with the same task_id

    def task_list(self) -> Names:
        ids = _data(self._request_v2("taskList", {})).get("task_ids")
        return [str(name) for name in ids or ()]

    def task_detail(self, task_id: str) -> dict[str, Any]:
        """Return the task, with the state of each of its games in `game_states`."""
        return _data(self._request_v2("taskDetail", {"task_id": task_id}))

    def task_remove(self, task_id: str) -> None:
        self._request_v2("taskRemove", {"task_id": task_id})

    def task_clear(self) -> None:
        self._request_v2("taskClear", {})

    # -- requests

    def _wait_until_over(self, runtime_id: str, until: float) -> GameState:
        """Wait until the game is over or the deadline, and return its last state."""
        away: float | None = None
        while True:
            left_s = until - time.monotonic()
            try:
                state = self._poll_state(runtime_id, max(0.0, min(left_s, _POLL_S)))
            except (Unreachable, Refused) as error:
                now = time.monotonic()
                away = now if away is None else away
                gone = isinstance(error, Refused) and error.status not in _RESTARTING
                if gone or self._has_v1 is None or now - away >= _AWAY_S or now >= until:
                    raise
                time.sleep(min(_AWAY_PAUSE_S, until - now))
                continue
            away = None
            if state.over or time.monotonic() >= until:
                return state

    def _poll_state(self, runtime_id: str, wait_s: float) -> GameState:
        """Return the state, after waiting up to `wait_s` for the end of the game."""
        if self._uses_v1():
            path = _path(runtime_id, f"/wait?{urlencode({'timeout_s': round(wait_s, 3)})}")
            return GameState.from_json(self._request("GET", path, timeout_s=wait_s + max(_SLACK_S, self._http.timeout_s)))
        if not self.exists(runtime_id):
            return GameState(runtime_id, "over", reason="The server does not report how.")
        time.sleep(min(_POLL_PAUSE_S, wait_s))
        return GameState(runtime_id, "running")

    def _uses_v1(self) -> bool:
        """Detect /v1 once, by its catalogue: other servers may have something else at /v1."""
        if self._has_v1 is None:
            try:
                self._has_v1 = isinstance(self._request("GET", "/v1/catalogue").get("games"), (dict, list))
            except Refused as refused:
                if refused.status not in _NO_V1:
                    raise
                self._has_v1 = False
        return self._has_v1

    def _require_v1(self, what: str) -> None:
        if not self._uses_v1():
            message = f"{self.server} supports only /v2, which cannot {what}."
            raise Refused(404, "old_server", message, "Use `ludus gamecore serve`.")

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        reply = self._http.request(method, path, None if body is None else _encode(body), timeout_s)
        return _parse_object(reply)

    def _request_v2(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        slow_s = {"newGame": _START_S, "stopGame": _STOP_S}.get(verb, 0.0)
        found = self._request("POST", f"/v2/{verb}", body, self._http.timeout_s + slow_s)
        if isinstance(code := found.get("code"), int) and code not in (0, 200):
            raise Refused(200, "v2", f"{self.server} answered {verb} with code {code}: {found.get('msg') or 'no reason'}.")
        return found


def failure(state: GameState) -> WorkerFailed:
    """Build the error for a game that ended abnormally, with its last lines."""
    lines = "".join(f"  {line}\n" for line in state.last_lines[-_QUOTED_LINES:])
    quoted = f"Its last lines:\n{lines}Full log: ludus gamecore logs {state.runtime_id}" if lines else "It has no output."
    return WorkerFailed(state.describe(), quoted)


_QUOTED_LINES = 15


# -- start requests; no sockets --------------------------------------------------------------------------------------------------


class _Actor(NamedTuple):
    """The actor that plays a camp."""

    url: str
    timeout_s: float
    token: str | None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value is not None}


def _to_v2(
    request: Mapping[str, Any], actors: Sequence[_Actor | None], simulator: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Translate a start request of /v1. Raises UsageError for values that /v2 does not support."""
    given = [name for name in ("game", "seed", "timeout_s", "options") if name in request]
    start_from = request.get("start_from")
    if start_from not in (None, "any"):
        given.append("start_from")
    if given:
        hint = "Leave it out, or use a Ludus server: ludus gamecore serve."
        raise UsageError(f"The server supports only /v2, which has no {', '.join(given)}.", hint)
    if "heroes" not in request:
        raise UsageError("The server supports only /v2, which needs the heroes of both camps.", "Give camp_config.")
    config: dict[str, Any] = {"game_mode": request["mode"], "hero_conf": _hero_conf(request["heroes"], actors)}
    renamed = {"max_frame_num": request.get("max_frames"), "task_id": request.get("task_id"), "extra_abs_key_info": extra or None}
    config |= {key: value for key, value in renamed.items() if value is not None}
    simulator = "repeat" if start_from and simulator == "remote" else simulator
    return {"simulator_type": simulator, "runtime_id": request["runtime_id"], "simulator_config": config}


def _hero_conf(heroes: list[list[dict[str, Any]]], actors: Sequence[_Actor | None]) -> list[dict[str, Any]]:
    """All heroes in one list; the first of a camp has the address of its actor, the others refer to it."""
    entries: list[dict[str, Any]] = []
    for camp, actor in zip(heroes, actors or [None] * len(heroes), strict=True):
        first = len(entries)
        for hero in camp:
            request_info: dict[str, Any] = {} if actor is None else {"request_id": first}
            if actor is not None and len(entries) == first:
                host, port = _v2_address(actor)
                request_info = {"ip": host, "port": port, "timeout": round(actor.timeout_s * 1000)}
            entries.append(hero | {"request_info": request_info})
    return entries


def _v2_address(actor: _Actor) -> Address:
    parts = urlsplit(actor.url)
    if parts.scheme != "http" or parts.path.strip("/") or actor.token is not None or parts.hostname is None:
        message = f"The server supports only /v2, which takes an actor as address and port; {actor.url!r} is not one."
        raise UsageError(message, "Use a Ludus server for paths, tokens and https: ludus gamecore serve.")
    return parts.hostname, parts.port or 80


def _check_id(runtime_id: str) -> str:
    ok = isinstance(runtime_id, str) and 0 < len(runtime_id) <= 128 and runtime_id.isascii()
    if not ok or not runtime_id[0].isalnum() or not all(c.isalnum() or c in ".-_" for c in runtime_id):
        hint = "It is up to 128 letters, digits, dots and hyphens, and begins with a letter or digit."
        raise UsageError(f"The runtime_id is {runtime_id!r}.", hint)
    return runtime_id


def _path(runtime_id: str, rest: str = "") -> str:
    return f"/v1/games/{quote(_check_id(runtime_id), safe='')}{rest}"


def _parse_camp_config(
    given: Mapping[str, Any] | Sequence[Sequence[Any]] | None, defaults: Mapping[str, Mapping[str, Any]]
) -> tuple[str | None, list[list[dict[str, Any]]] | None]:
    """(mode, heroes of each camp)."""
    if given is None:
        return None, None
    mode, camps = (given.get("mode"), given.get("heroes")) if isinstance(given, Mapping) else (None, given)
    hint = 'It looks like {"mode": "3v3", "heroes": [[{"hero_id": 190}, …], [{"hero_id": 141}, …]]}.'
    if isinstance(given, Mapping) and (unknown := set(given) - {"mode", "heroes"}):
        raise UsageError(f"camp_config has {', '.join(map(repr, sorted(map(str, unknown))))}.", hint)
    if mode is not None and not isinstance(mode, str):
        raise UsageError(f"The mode of camp_config is {mode!r}.", hint)
    if camps is None:
        return mode, None
    if not _is_list(camps) or not all(map(_is_list, camps)):
        raise UsageError(f"The heroes of camp_config are {camps!r}.", hint)
    heroes = [[_parse_hero(hero, defaults) for hero in camp] for camp in camps]
    return mode or "v".join(str(len(camp)) for camp in heroes), heroes


def _parse_hero(given: Any, defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    hero = {"hero_id": given} if isinstance(given, int) else given
    if not isinstance(hero, Mapping) or not hero or isinstance(given, bool):
        raise UsageError(f"A hero of camp_config is {given!r}.", 'It looks like {"hero_id": 190}, or just 190.')
    return {**defaults.get(str(hero.get("hero_id")), {}), **hero}


def _parse_actors(given: Sequence[Camp] | None, heroes: Sequence[object] | None, timeout_s: float) -> list[_Actor | None] | None:
    if given is None:
        return None
    if not _is_list(given):
        raise UsageError(f"server_config is {given!r}.", "It is a list with one entry per camp: [None, ('10.0.0.5', 8000)].")
    if heroes is not None and len(given) != len(heroes):
        message = f"server_config has {len(given)} entries, but camp_config has {len(heroes)} camps."
        raise UsageError(message, "Give one entry per camp; None: rule AI.")
    return [_parse_actor(camp, f"server_config[{i}]", timeout_s) for i, camp in enumerate(given)]


def _parse_actor(given: Camp, where: str, timeout_s: float) -> _Actor | None:
    if given is None:
        return None
    hint = "It is None, (ip, port), 'host:port', 'http://host:port', or a mapping with address or url, and optionally token and timeout_s."
    token: Any = None
    address: Any = given
    if isinstance(given, Mapping):
        if unknown := set(given) - {"address", "url", "ip", "port", "token", "timeout_s"}:
            raise UsageError(f"{where} has {', '.join(map(repr, sorted(map(str, unknown))))}.", hint)
        token, timeout_s = given.get("token"), given.get("timeout_s", timeout_s)
        address = given.get("url") or given.get("address") or (given.get("ip"), given.get("port"))
    if _is_list(address) and len(address) == 2 and isinstance(address[0], str):
        host, port = address
        address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    # A mapping is not quoted, because it may contain a token in the wrong place.
    quoted = "a mapping without a usable address" if isinstance(given, Mapping) else repr(given)
    if not isinstance(address, str) or (found := _url(address)) is None:
        raise UsageError(f"{where} is {quoted}.", hint)
    if not (token is None or (isinstance(token, str) and token.isprintable() and token.isascii() and token)):
        raise UsageError(f"The token of {where} is not one printable word.")
    if not (isinstance(timeout_s, (int, float)) and 0 < timeout_s < math.inf):
        raise UsageError(f"The timeout_s of {where} is {timeout_s!r}.", "It is a number of seconds above 0.")
    return _Actor(found, float(timeout_s), token)


def _url(address: str, port: int | None = None) -> str | None:
    """Normalise `host:port` or a URL to a URL; None when it is neither. `port`: default port."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        given = parts.port
    except ValueError:
        return None
    plain = "://" not in address
    if plain and given is None:
        given = port
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
        return None
    if given == 0 or (plain and (given is None or parts.path)) or not parts.netloc.isprintable() or " " in address:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{'' if given is None else f':{given}'}{parts.path.rstrip('/')}"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


# -- HTTP ------------------------------------------------------------------------------------------------------------


class _HttpReply(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float | None


class _HttpPool:
    """Connections to one server: one per concurrent request; idle ones are reused."""

    def __init__(self, address: str, token: str | None, timeout_s: float) -> None:
        url = _url(address, PORT)
        if url is None:
            hint = f"It looks like node1:{PORT} or http://node1:{PORT}."
            raise UsageError(f"The address {address!r} does not name a server.", hint)
        self.url, self.timeout_s = url, timeout_s
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._secure, self._prefix = parts.scheme == "https", parts.path
        self._headers = {"Accept": "application/json"}
        if token is not None:
            if not token or not token.isascii() or not token.isprintable():
                raise UsageError("The token is not one printable line.")
            self._headers["Authorization"] = f"Bearer {token}"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def request(self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None) -> _HttpReply:
        """Raises Refused for every reply that is not 2xx, Unreachable when there is none."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        wait_s = limit_s
        try:
            if kept is not None:
                try:
                    return _check_reply(self._send(kept, method, path, body, limit_s), self.url)
                except (http.client.RemoteDisconnected, OSError) as error:
                    if isinstance(error, OSError) and not isinstance(error, ConnectionError) and error.errno not in _HOST_LOST:
                        raise
                    # The idle connection was closed. All requests are idempotent, so send it again.
            wait_s = self.timeout_s
            connection = self._connect()
            wait_s = limit_s
            return _check_reply(self._send(connection, method, path, body, limit_s), self.url)
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self.url, error, wait_s) from error

    def _connect(self) -> http.client.HTTPConnection:
        """Connect within `timeout_s`, with TCP keep-alive to detect a lost host during long requests."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            connection.connect()
            lost_s = math.ceil(min(self.timeout_s, _LOST_S)) + 1
            keep_alive(connection.sock, math.ceil(lost_s / 2), lost_s, unheard=True)
            undo.pop_all()
        return connection

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, limit_s: float
    ) -> _HttpReply:
        until = time.monotonic() + limit_s
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)  # also when interrupted: a late reply must not be taken for the next one
            connection.sock.settimeout(limit_s)
            headers = self._headers if body is None else self._headers | {"Content-Type": "application/json"}
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
            parts, size = [], 0
            while part := response.read1(_CHUNK):
                parts.append(part)
                size += len(part)
                if size > _MAX_ANSWER or time.monotonic() > until:
                    raise TimeoutError("the reply does not end")
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            response.close()  # read1 leaves it open, which would block the connection
            retry_after = response.getheader("Retry-After") or ""
            with self._lock:
                if not response.will_close and len(self._idle) < _MAX_IDLE:
                    undo.pop_all()
                    self._idle.append(connection)
        retry_after_s = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
        return _HttpReply(response.status, b"".join(parts), retry_after_s)


def _check_reply(reply: _HttpReply, url: str) -> _HttpReply:
    if 200 <= reply.status < 300:
        return reply
    refused = refusal_from(reply.status, reply.body)
    hint = refused.hint
    if refused.status == 404 and not hint:
        hint = "Check that it is a gamecore server."
    if refused.status == 401 and not hint:
        hint = f"Give the server's token: token_file=, --token-file, or {TOKEN_VARIABLE}."
    foreign = f"{url} answered {reply.status}, not in the words of a gamecore server."
    message = foreign if refused.error == "http" else refused.message
    raise Refused(refused.status, refused.error, message, hint, reply.retry_after_s)


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        hint = "Use plain values: numbers, strings, lists, mappings."
        raise UsageError(f"Cannot encode the request: {error}.", hint) from error


def _parse_object(reply: _HttpReply) -> dict[str, Any]:
    try:
        found = json.loads(reply.body or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _reply_error("a JSON object")
    return found


def _data(found: dict[str, Any]) -> dict[str, Any]:
    """Unwrap `data` of a /v2 reply, if present."""
    data = found.get("data")
    return data if isinstance(data, dict) else found


def _reply_error(expected: str) -> Refused:
    return Refused(200, "http", f"The reply is not {expected}.", "Check that it is a gamecore server.")


def _unreachable(url: str, error: OSError | http.client.HTTPException, timeout_s: float) -> LudusError:
    where = url.partition("://")[2]
    correct = f"or correct the address (server_addr, --server, {ADDRESS_VARIABLE})."
    if isinstance(error, ConnectionRefusedError):
        port = urlsplit(url).port or PORT
        hint = f"Start one there: `ludus gamecore serve --port {port}`, {correct}"
        return Unreachable(f"No gamecore server listens on {where}.", hint)
    if isinstance(error, socket.gaierror):
        return Unreachable(f"The host of {where} is unknown.", f"Check the name, use its IP address, {correct}")
    if isinstance(error, OSError) and error.errno in _HOST_LOST:
        return Unreachable(f"The host of {where} does not respond.", f"Check that it is running and reachable, {correct}")
    if isinstance(error, TimeoutError):
        hint = f"Check whether it is overloaded or behind a firewall, {correct}"
        return Unreachable(f"{where} did not answer within {timeout_s:g} s.", hint)
    message = str(error) or type(error).__name__
    return Unreachable(f"The connection to {where} broke: {message}.", "Check that it is a running gamecore server.")
