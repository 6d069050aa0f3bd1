"""The HTTP protocol between a game and an agent, as data: paths, headers, step kinds, error replies. See `docs/protocol.md`.

POST /step      headers session, step_kind (start | tick | end), optionally seq, match, side, Authorization: Bearer …
                body: opaque bytes; reply: opaque bytes
GET  /spec      protocol version, observation and action spaces
GET  /health, /ready, /metrics
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ludus.errors import Refused, UsageError

log = logging.getLogger(__name__)

VERSION: Final = 1

STEP: Final = "/step"
SPEC: Final = "/spec"
HEALTH: Final = "/health"
READY: Final = "/ready"
METRICS: Final = "/metrics"
PAGES: Final = (SPEC, HEALTH, READY, METRICS)

START: Final = "start"
TICK: Final = "tick"
END: Final = "end"

KINDS: Final[Mapping[bytes, str]] = {b"start": START, b"tick": TICK, b"end": END, b"stop": END}
"""Accepted values of `step_kind`."""

SESSION_HEADERS: Final = frozenset({b"session", b"game_id", b"game-id", b"ludus-session"})
KIND_HEADERS: Final = frozenset({b"step_kind", b"step-kind", b"ludus-step"})
SEQ_HEADERS: Final = frozenset({b"seq", b"ludus-seq"})
MATCH_HEADERS: Final = frozenset({b"match", b"ludus-match"})
SIDE_HEADERS: Final = frozenset({b"side", b"ludus-side"})
MODEL_HEADERS: Final = frozenset({b"model", b"ludus-model"})
VERSION_HEADERS: Final = frozenset({b"version", b"ludus-version"})
TEMPERATURE_HEADERS: Final = frozenset({b"temperature", b"ludus-temperature"})
REQUEST_ID_HEADER: Final = "X-Request-Id"
ENDPOINT_HEADER: Final = "Ludus-Endpoint"
"""In the reply to `start`: HOST:PORT that reaches this session's worker directly."""

MAX_NAME_BYTES: Final = 256
"""Maximum length of the name of a session, match, side or model."""
SHORT_TOKEN: Final = 16
"""Shorter tokens cause a warning."""
MAX_TEMPERATURE: Final = 100.0
MAX_SEQ: Final = (1 << 63) - 1

REASONS: Final[Mapping[int, str]] = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    410: "Gone",
    413: "Content Too Large",
    417: "Expectation Failed",
    422: "Unprocessable Content",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}


class StartOptions(NamedTuple):
    """Optional headers of `start`."""

    match: str = ""
    model: str = ""
    version: int = -1
    """Model version; -1: the current one."""
    temperature: float = -1.0
    """Sampling temperature; below 0: the server's default."""
    side: str = ""
    """Side of the match that the session plays."""


DEFAULT_OPTIONS: Final = StartOptions()


def error_body(refused: Refused) -> bytes:
    """The JSON body of every reply that is not 200."""
    fields: dict[str, Any] = {"error": refused.error, "message": refused.message, "hint": refused.hint}
    if refused.last is not None:
        fields["last"] = refused.last
    return json.dumps(fields).encode()


def refusal_from(status: int, body: bytes) -> Refused:
    """Parse a reply that is not 200, also one from a proxy in between."""
    try:
        data: Any = json.loads(body)
        last = data.get("last")
        last = last if type(last) is int and 0 <= last <= MAX_SEQ else None
        return Refused(status, str(data["error"]), str(data["message"]), str(data.get("hint", "")), last=last)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Refused(status, "http", f"The server answered {status} {REASONS.get(status, '')}.".replace(" .", "."))


def read_token(path: str | Path | None) -> str | None:
    """Read a file with one token, a single printable line. Raises UsageError."""
    if path is None:
        return None
    try:
        token = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the token file {path}: {error}.") from error
    if not token or not token.isascii() or not token.isprintable():
        raise UsageError(f"The token file {path} is empty, or contains more than one printable line.")
    warn_about_token_file(Path(path), [token])
    return token


def warn_about_token_file(path: Path, tokens: Iterable[str]) -> None:
    """Log a warning about tokens that are easy to guess and about a file that other users can read.

    A file of another user that our group may read was given to us, as a Secret mounted in a pod is: it is no mistake. Nor can we change
    the mode of a file on a read-only file system.
    """
    length = min(map(len, tokens))
    if length < SHORT_TOKEN:
        log.warning("a token in %s has only %d characters: use 32 random ones (openssl rand -hex 16)", path, length)
    with contextlib.suppress(OSError):
        status = path.expanduser().stat()
        mode = status.st_mode
        if os.name != "posix" or os.statvfs(path.expanduser()).f_flag & os.ST_RDONLY:
            return
        if mode & 0o007 or (mode & 0o070 and status.st_uid == os.getuid()):
            log.warning("the token file %s is readable by others (mode %04o): chmod 600 %s", path, mode & 0o777, path)
