"""Checks whether a game conforms to the protocol: server events in, findings out. No sockets.

The gateway decides what is valid in a session; this module describes its replies and adds checks that a gateway cannot make:
slow or unsafe habits, and bodies that the built-in actor would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ludus.core import spaces
from ludus.core.plugins import did_you_mean
from ludus.core.types import Bools
from ludus.errors import ConfigError, Refused
from ludus.protocol.codec import ONLY_SEAT, Format, SeatSpaces, bounds_error, decode, is_msgpack
from ludus.protocol.spec import END, START

LARGE_BODY = 1 << 20
SLOW_S = 0.5
MANY_CONNECTIONS = 5
"""Connections with a single request each before a warning."""
_MAX_PAST = 100_000

Level = Literal["mistake", "warning"]


@dataclass(frozen=True)
class Check:
    kind: str
    level: Level
    rule: str
    remedy: str
    body: bool = False
    """Whether the check needs the spaces of the game."""


CHECKS: Mapping[str, Check] = {
    check.kind: check
    for check in (
        Check("no_match", "mistake", "A match is played from start to end", "Send start, ticks and end."),
        Check("path", "mistake", "Requests are POST /step, GET /spec or GET /health", "Correct the method and the path."),
        Check("malformed", "mistake", "Requests are well-formed HTTP/1.1", "Use the HTTP library of your engine."),
        Check("step_kind", "mistake", "step_kind is start, tick or end", "Send it as step_kind, or Ludus-Step behind a proxy."),
        Check("session", "mistake", "Every step names one session, in UTF-8", "Send it as session, or Ludus-Session behind a proxy."),
        Check("token", "mistake", "The token is right", "Send Authorization: Bearer TOKEN."),
        Check("headers", "mistake", "Headers are few and small", "Send only those of the protocol."),
        Check("too_large", "mistake", "Bodies are below the limit", "Send less, or raise the limit of the server."),
        Check("too_slow", "mistake", "A request arrives in time", "Send headers and body at once."),
        Check("hung_up", "mistake", "Replies are waited for", "Raise the time-out of the client; close after the reply."),
        Check("tick_before_start", "mistake", "start comes first", "Send start, and wait for its reply, before tick or end."),
        Check("after_end", "mistake", "Nothing follows end", "Start a new session, with a new id."),
        Check("double_start", "mistake", "A session is started once", "Use a new id for every match."),
        Check("concurrent", "mistake", "One request of a session at a time", "Wait for each reply before the next request."),
        Check("silent", "mistake", "Every session is ended", "Send end, also when a match is abandoned."),
        Check("lost", "mistake", "A lost session (410) is given up", "Start again with a new id."),
        Check("seq_number", "mistake", "seq is a whole number", "Send 0, 1, 2, …"),
        Check("seq_skipped", "mistake", "seq rises by 1", "Repeat the last number to retry, add 1 for a new request."),
        Check("seq_changed", "mistake", "A repeated seq repeats the request", "Add 1 for every new request."),
        Check("seq_mixed", "mistake", "All requests of a session have a seq, or none", "Number them all."),
        Check("too_fast", "mistake", "429 is obeyed", "Wait for the time in Retry-After."),
        Check("body", "mistake", "Bodies are of the agreed format", "See the page of the protocol.", body=True),
        Check("keys", "mistake", "Bodies have the known keys", "observation, reward, terminated, truncated, action_mask", body=True),
        Check("seats", "mistake", "Seats are those of the game", 'Send {"seats": {name: {…}}}.', body=True),
        Check("observation", "mistake", "Observations fit the space", "GET /spec shows the space.", body=True),
        Check("not_finite", "mistake", "Numbers are finite", "No NaN, no Infinity: check for a division by zero.", body=True),
        Check("reward", "mistake", "Rewards are numbers, after an action", "Reward what the action before did.", body=True),
        Check("flags", "mistake", "terminated and truncated are true or false", "Send a boolean.", body=True),
        Check("mask", "mistake", "Masks fit and leave a choice", "One entry per option; one allowed at least.", body=True),
        Check("no_seq", "warning", "Requests are numbered", "Send seq: without it a retry is not safe."),
        Check("session_reuse", "warning", "Session ids are used once", "A UUID per match keeps logs and retries apart."),
        Check("reconnecting", "warning", "Connections are kept", "Keep-alive: a connection per request is several times slower."),
        Check("old_http", "warning", "Requests are HTTP/1.1", "HTTP/1.0 closes the connection after each reply."),
        Check("large_body", "warning", "Bodies are below 1 MB", "Send what the agent sees, not the whole world."),
        Check("slow_send", "warning", "A request is sent at once", "Write headers and body in one call; set TCP_NODELAY."),
        Check("no_ticks", "warning", "A match has ticks", "Ask for an action before the match ends."),
        Check("unfinished", "warning", "No session is open at the end", "Fine if this check ended before the match did."),
        Check("bounds", "warning", "Observations keep their bounds", "Correct the space or the values.", body=True),
        Check("no_reward", "warning", "Every tick after the first has a reward", "It counts as 0.", body=True),
        Check("over_in_tick", "warning", "A match ends with end", "terminated in a tick: the next tick begins anew.", body=True),
        Check("no_outcome", "warning", "end has the outcome", "Send the last reward; without it the last action is not learned from.", body=True),
    )
}  # fmt: skip


# -- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReplied:
    """A step that reached its session, and its reply."""

    kind: str
    session: bytes
    seq: int
    status: int
    error: str = ""
    message: str = ""
    body_hash: int = 0
    body_bytes: int = 0
    receive_s: float = 0.0
    """Seconds from its first byte to its last."""


@dataclass(frozen=True)
class RequestRejected:
    """A request that was refused before it reached a session."""

    error: str
    message: str


@dataclass(frozen=True)
class ConnectionClosed:
    """A closed connection, with its number of steps."""

    steps: int


@dataclass(frozen=True)
class ClientDisconnected:
    """The client closed the connection before it got its reply."""


@dataclass(frozen=True)
class OldHttpVersion:
    """A request with HTTP/1.0."""


@dataclass(frozen=True)
class SessionTimedOut:
    session: bytes


Event = StepReplied | RequestRejected | ConnectionClosed | ClientDisconnected | OldHttpVersion | SessionTimedOut

_CHECK_OF_ERROR = {
    "method": "path", "not_found": "path", "step_kind": "step_kind", "session": "session", "seq": "seq_number",
    "unauthorized": "token", "authorization": "token", "headers_too_large": "headers", "body_too_large": "too_large", "too_slow": "too_slow",
    "too_many_connections": "reconnecting",
}  # fmt: skip
"""Check by error word of the gateway; other words mean malformed HTTP."""


# -- results ---------------------------------------------------------------------------------------------------


@dataclass
class CheckFinding:
    check: Check
    seen: str
    """Description of the first occurrence."""
    count: int = 1


@dataclass(frozen=True)
class ReportRow:
    check: Check
    state: Literal["ok", "warning", "mistake"]
    count: int
    seen: str


@dataclass(frozen=True)
class ConformanceReport:
    rows: list[ReportRow]
    matches: int
    requests: int
    retries: int

    @property
    def mistakes(self) -> int:
        return sum(row.count for row in self.rows if row.state == "mistake")

    @property
    def warnings(self) -> int:
        return sum(row.count for row in self.rows if row.state == "warning")

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not self.mistakes,
            "matches": self.matches,
            "requests": self.requests,
            "retries": self.retries,
            "mistakes": self.mistakes,
            "warnings": self.warnings,
            "checks": [
                {"check": row.check.kind, "rule": row.check.rule, "state": row.state, "count": row.count}
                | ({"seen": row.seen, "remedy": row.check.remedy} if row.count else {})
                for row in self.rows
            ],
        }


class BodyResult(NamedTuple):
    """How the built-in actor would handle a body."""

    findings: list[CheckFinding]
    """Findings of new kinds."""
    refused: Refused | None
    acting: dict[str, Bools | None]
    """Seats that need an action, with their masks."""


@dataclass
class _OpenSession:
    last: tuple[str, int, int]  # kind, seq, hash of the body
    ticks: int = 0
    playing: set[str] = field(default_factory=set)  # seats that have acted in their episode


class Conformance:
    """Collects findings over a whole run. `seats`: the spaces, if bodies are to be checked."""

    def __init__(self, form: Format | None = None, seats: Mapping[str, SeatSpaces] | None = None) -> None:
        self._form, self._seats = form, seats or {}
        self._fits = {name: spaces.SpaceParser(seat.observation) for name, seat in self._seats.items()}
        self._findings: dict[str, CheckFinding] = {}
        self._open: dict[bytes, _OpenSession] = {}
        self._past: dict[bytes, tuple[str, int, int]] = {}
        self._single = self._reused = 0
        self.matches = self.requests = self.retries = 0

    def observe(self, event: Event) -> list[CheckFinding]:
        """Count the findings of an event, and return those of new kinds."""
        return self._count(self._check_event(event))

    def summary(self) -> ConformanceReport:
        """Return the current report. Has no side effects."""
        found = dict(self._findings)
        if not self.matches:
            found["no_match"] = CheckFinding(CHECKS["no_match"], f"{self.requests} requests, no match from start to end")
        if self._open:
            shown = ", ".join(map(_quote, list(self._open)[:3]))
            found["unfinished"] = CheckFinding(CHECKS["unfinished"], f"still open: {shown}", len(self._open))
        rows = []
        for check in CHECKS.values():
            finding = found.get(check.kind)
            if finding is not None:
                rows.append(ReportRow(check, check.level, finding.count, finding.seen))
            elif self._form is not None or not check.body:
                rows.append(ReportRow(check, "ok", 0, ""))
        return ConformanceReport(rows, self.matches, self.requests, self.retries)

    def _count(self, seen: Iterator[tuple[str, str]]) -> list[CheckFinding]:
        new = []
        for kind, what in seen:
            if kind in self._findings:
                self._findings[kind].count += 1
            else:
                finding = self._findings[kind] = CheckFinding(CHECKS[kind], what)
                new.append(finding)
        return new

    def _check_event(self, event: Event) -> Iterator[tuple[str, str]]:
        if isinstance(event, StepReplied):
            yield from self._check_reply(event)
        elif isinstance(event, RequestRejected):
            self.requests += 1
            yield _CHECK_OF_ERROR.get(event.error, "malformed"), event.message
        elif isinstance(event, ConnectionClosed):
            yield from self._check_connection(event.steps)
        elif isinstance(event, ClientDisconnected):
            yield "hung_up", "The connection was closed while the reply was being computed."
        elif isinstance(event, OldHttpVersion):
            yield "old_http", "A request used HTTP/1.0."
        else:
            self._forget(event.session)
            yield "silent", f"session {_quote(event.session)} stopped sending without an end."

    def _check_connection(self, steps: int) -> Iterator[tuple[str, str]]:
        self._reused += steps > 1
        if steps != 1:
            return
        self._single += 1
        if self._single >= MANY_CONNECTIONS and self._single > self._reused:
            yield "reconnecting", f"{self._single} connections had one request each."

    # -- sessions

    def _check_reply(self, event: StepReplied) -> Iterator[tuple[str, str]]:
        self.requests += 1
        name = f"session {_quote(event.session)}"
        if event.body_bytes > LARGE_BODY:
            yield "large_body", f"{name}: a body of {event.body_bytes:,} bytes."
        if event.receive_s > SLOW_S:
            yield "slow_send", f"{name}: a {event.kind} took {event.receive_s:.1f} s from its first byte to its last."
        if event.status == 200:
            yield from self._check_accepted(event, name)
        else:
            yield from self._check_rejected(event, name)

    def _check_accepted(self, event: StepReplied, name: str) -> Iterator[tuple[str, str]]:
        this = (event.kind, event.seq, event.body_hash)
        before = self._open.get(event.session)
        last = before.last if before else self._past.get(event.session)
        if event.seq >= 0 and last is not None and last[:2] == this[:2]:
            self.retries += 1
            if last != this:
                yield "seq_changed", f"{name}: seq {event.seq} was sent again with another body, and got the reply of the first."
            return
        if event.kind is START:
            if event.session in self._past:
                yield "session_reuse", f"{name} was started again after its end."
            if event.seq < 0:
                yield "no_seq", f"{name}: start has no seq."
            self._open[event.session] = _OpenSession(this)
            return
        if before is None:  # started before the check began
            return
        before.last = this
        if event.kind is END:
            self.matches += 1
            self._forget(event.session)
            if not before.ticks:
                yield "no_ticks", f"{name}: end came right after start."
        else:
            before.ticks += 1

    def _check_rejected(self, event: StepReplied, name: str) -> Iterator[tuple[str, str]]:
        text = f"{name}: {event.kind} was answered {event.status}. {event.message}".strip()
        if event.error == "unknown_session":
            yield "after_end" if event.session in self._past else "tick_before_start", text
        elif event.error == "session_lost":
            self._forget(event.session)
            yield "lost", text
        elif event.error == "already_started":
            yield "double_start", text
        elif event.error == "busy":
            yield "concurrent", text
        elif event.error == "seq" and event.status == 400:
            yield "seq_mixed", text
        elif event.error == "seq":
            yield "seq_changed" if " was a " in event.message else "seq_skipped", text
        elif event.status == 429:
            yield "too_fast", text
        elif event.status >= 500:
            self._forget(event.session)

    def _forget(self, session: bytes) -> None:
        gone = self._open.pop(session, None)
        if gone is not None:
            self._past.pop(session, None)
            self._past[session] = gone.last
            if len(self._past) > _MAX_PAST:
                del self._past[next(iter(self._past))]

    # -- bodies

    def check_body(self, kind: str, session: bytes, body: bytes) -> BodyResult:
        """Check the body of an accepted tick or end, before it is answered."""
        name, known = f"session {_quote(session)}", self._open.get(session)
        playing = known.playing if known else set[str]()
        check = _BodyCheck(self._form, self._seats, self._fits, playing, last=kind is END)
        try:
            acting = check.run(body)
        except _BodyError as wrong:
            new = self._count(iter([(wrong.kind, f"{name}: {wrong}")]))
            return BodyResult(new, Refused(422, wrong.word, str(wrong), CHECKS[wrong.kind].remedy), {})
        new = self._count((kind, f"{name}: {what}") for kind, what in check.warnings)
        playing.difference_update(check.over)
        playing.update(acting)
        return BodyResult(new, None, acting)


class _BodyError(Exception):
    def __init__(self, kind: str, message: str, word: str = "") -> None:
        super().__init__(message)
        self.kind, self.word = kind, word or kind  # name of the check, error word of the reply


class _BodyCheck:
    """Checks one body: raises _BodyError for what the built-in actor refuses, and collects warnings."""

    def __init__(
        self,
        form: Format | None,
        seats: Mapping[str, SeatSpaces],
        fits: Mapping[str, spaces.SpaceParser],
        playing: set[str],
        *,
        last: bool,
    ) -> None:
        self._form, self._seats, self._fits, self._playing, self._last = form, seats, fits, playing, last
        self.warnings: list[tuple[str, str]] = []
        self.over: set[str] = set()

    def run(self, body: bytes) -> dict[str, Bools | None]:
        """Return the seats that need an action. Raises _BodyError."""
        if self._form is None:
            return {}
        if self._last and not body.strip():
            if self._playing:
                self.warnings.append(("no_outcome", "end was empty: the outcome of the last action is unknown."))
            return {}
        parts = self._parts(self._message(body))
        masks = {name: self._part(name, part) for name, part in parts.items()}
        missing = sorted(self._playing - parts.keys())
        if self._last and missing:
            self.warnings.append(("no_outcome", f"end lacks seat {missing[0]!r}: the outcome of its last action is unknown."))
        return {name: mask for name, mask in masks.items() if name not in self.over}

    def _message(self, body: bytes) -> dict[str, Any]:
        found: Format = "msgpack" if is_msgpack(body) else "json"
        if found != self._form:
            begins = f"begins with {body[:8]!r}" if body else "is empty"
            raise _BodyError("body", f"The body {begins}; expected {self._form}.", "malformed")
        try:
            message = decode(body)
        except ValueError as error:
            raise _BodyError("body", f"The body is not {found}: {error}.", "malformed") from None
        if not isinstance(message, dict):
            raise _BodyError("body", f"The body is {type(message).__name__}, not an object with keys.", "malformed")
        return message

    def _parts(self, message: dict[str, Any]) -> dict[str, Any]:
        if set(self._seats) == {ONLY_SEAT}:
            return {ONLY_SEAT: message}
        seats = message.get("seats")
        if not isinstance(seats, dict) or message.keys() - {"seats"} or not seats:
            raise _BodyError("seats", f"A game with several seats sends only seats; found {sorted(map(str, message))}.")
        for name in seats:
            if name not in self._seats:
                raise _BodyError("seats", f"There is no seat {name!r}. {did_you_mean(str(name), self._seats)}")
        return seats

    def _part(self, name: str, part: Any) -> Bools | None:
        where = f" of seat {name!r}" if name else ""
        if not isinstance(part, dict):
            raise _BodyError("body", f"The step{where} is {type(part).__name__}, not an object with keys.", "malformed")
        unknown = sorted(map(str, part.keys() - _KEYS))
        if unknown:
            raise _BodyError(
                "keys", f"The key {unknown[0]!r}{where} is unknown. {did_you_mean(unknown[0], _KEYS)}", "unknown_key"
            )
        terminated, truncated = _flag(part, "terminated", where), _flag(part, "truncated", where)
        self._reward(name, part, where)
        if self._last:
            terminated = terminated or not truncated
        over = terminated or truncated
        if over:
            self.over.add(name)
            if not self._last and not name:
                self.warnings.append(("over_in_tick", "a tick ended the episode."))
        self._observation(name, part.get("observation"), where, needed=not terminated)
        return None if over else self._mask(name, part.get("action_mask"), where)

    def _reward(self, name: str, part: dict[str, Any], where: str) -> None:
        reward, playing = part.get("reward"), name in self._playing
        if reward is None and "reward" not in part:
            if playing:
                self.warnings.append(("no_reward", f"the step{where} has no reward."))
            return
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise _BodyError("reward", f"The reward{where} is {reward!r}.")
        if reward - reward != 0:
            raise _BodyError("not_finite", f"The reward{where} is {reward!r}.", "reward")
        if reward and not playing:
            raise _BodyError("reward", f"A reward{where} of {reward:g} came before any action.")

    def _observation(self, name: str, given: Any, where: str, *, needed: bool) -> None:
        if given is None:
            if needed:
                raise _BodyError("observation", f"The observation{where} is missing.")
            return
        try:
            seen = self._fits[name](given)
        except ValueError as error:
            kind = "not_finite" if re.search(r"contains -?(nan|inf)", str(error)) else "observation"
            raise _BodyError(kind, f"The observation{where} does not fit: {error}.", "observation") from None
        problem = bounds_error(self._seats[name].observation, seen, "observation")
        if problem:
            self.warnings.append(("bounds", f"{problem}{where}."))

    def _mask(self, name: str, given: Any, where: str) -> Bools | None:
        if given is None:
            return None
        space = self._seats[name].action
        try:
            flat = spaces.flat_mask(given, space)
        except (ConfigError, ValueError, TypeError) as error:
            raise _BodyError("mask", f"The action mask{where} does not fit: {error}", "action_mask") from None
        for options in spaces.choices(space):
            if not flat[options].any():
                which = f"from {options.start} to {options.stop - 1}"
                raise _BodyError("mask", f"The action mask{where} forbids every option {which}.", "action_mask")
        return flat


_KEYS = frozenset({"observation", "reward", "terminated", "truncated", "action_mask"})


def _flag(part: dict[str, Any], key: str, where: str) -> bool:
    value = part.get(key, False)
    if not isinstance(value, bool):
        raise _BodyError("flags", f"{key}{where} is {value!r}.", key)
    return value


def _quote(session: bytes) -> str:
    text = session.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:37] + "…")
