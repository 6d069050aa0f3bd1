"""Checks whether a game conforms to the protocol: server events in, findings out. No sockets.

The gateway decides what is valid in a session; this module describes its replies and adds checks that a gateway cannot make:
slow or unsafe habits, and bodies that the built-in actor would refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ludus.core.types import Bools
from ludus.errors import Refused
from ludus.protocol.codec import Format, SeatSpaces, bounds_error, is_msgpack
from ludus.protocol.spec import END, START
from ludus.protocol.step_message import SeatParser, decode_message, parse_step, split_seats

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
        self._form = form
        self._seats = {name: SeatParser(seat.observation, seat.action) for name, seat in (seats or {}).items()}
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
        check = _BodyCheck(self._form, self._seats, playing, last=kind is END)
        try:
            acting = check.run(body)
        except Refused as refused:
            wrong = _check_of_refusal(refused)
            new = self._count(iter([(wrong, f"{name}: {refused.message} {refused.hint}".rstrip())]))
            return BodyResult(new, refused, {})
        new = self._count((kind, f"{name}: {what}") for kind, what in check.warnings)
        playing.difference_update(check.over)
        playing.update(acting)
        return BodyResult(new, None, acting)


_CHECK_OF_REFUSAL = {
    "malformed": "body", "unknown_key": "keys", "terminated": "flags", "truncated": "flags", "action_mask": "mask",
}  # fmt: skip
"""Check by error word of `step_message`; other words are names of checks."""


def _check_of_refusal(refused: Refused) -> str:
    if refused.error in ("observation", "reward") and re.search(r"(is|contains) -?(nan|inf)", refused.message):
        return "not_finite"
    return _CHECK_OF_REFUSAL.get(refused.error, refused.error)


class _BodyCheck:
    """Checks one body: raises Refused as the built-in actor does, and collects warnings."""

    def __init__(self, form: Format | None, seats: Mapping[str, SeatParser], playing: set[str], *, last: bool) -> None:
        self._form, self._seats, self._playing, self._last = form, seats, playing, last
        self.warnings: list[tuple[str, str]] = []
        self.over: set[str] = set()

    def run(self, body: bytes) -> dict[str, Bools | None]:
        """Return the seats that need an action, with their masks. Raises Refused."""
        if self._form is None:
            return {}
        if self._last and not body.strip():
            if self._playing:
                self.warnings.append(("no_outcome", "end was empty: the outcome of the last action is unknown."))
            return {}
        if is_msgpack(body) != (self._form == "msgpack"):
            begins = f"begins with {body[:8]!r}" if body else "is empty"
            raise Refused(422, "malformed", f"The body {begins}; expected {self._form}.", CHECKS["body"].remedy)
        message, _ = decode_message(body)
        parts = split_seats(message, self._seats)
        masks = {name: self._check_part(name, part) for name, part in parts.items()}
        missing = sorted(self._playing - parts.keys())
        if self._last and missing:
            self.warnings.append(("no_outcome", f"end lacks seat {missing[0]!r}: the outcome of its last action is unknown."))
        return {name: mask for name, mask in masks.items() if name not in self.over}

    def _check_part(self, name: str, part: Any) -> Bools | None:
        where, seat = f" of seat {name!r}" if name else "", self._seats[name]
        step = parse_step(part, name, playing=name in self._playing, last=self._last)
        if name in self._playing and "reward" not in part:
            self.warnings.append(("no_reward", f"the step{where} has no reward."))
        if step.over:
            self.over.add(name)
            if not self._last and not name:
                self.warnings.append(("over_in_tick", "a tick ended the episode."))
        if step.observation is not None:
            problem = bounds_error(seat.observation_space, seat.observation(step.observation), "observation")
            if problem:
                self.warnings.append(("bounds", f"{problem}{where}."))
        return None if step.over else seat.mask(step.action_mask)


def _quote(session: bytes) -> str:
    text = session.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:37] + "…")
