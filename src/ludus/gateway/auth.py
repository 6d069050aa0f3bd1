"""Bearer tokens of a service, each with a name for the logs and an optional rate limit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ludus.errors import UsageError
from ludus.protocol.spec import warn_about_token_file

DEFAULT_NAME = "default"


class RateLimit:
    """Token bucket of `rate` requests per second; a burst of one second's worth is allowed."""

    __slots__ = ("_allowance", "_at", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._allowance, self._at = max(rate, 1.0), 0.0

    def allow(self, now: float) -> bool:
        """Count one request and return whether the limit allows it. `now` is a monotonic clock in seconds."""
        most = max(self.rate, 1.0)
        self._allowance = min(most, self._allowance + (now - self._at) * self.rate) if self._at else most
        self._at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True


class Caller(RateLimit):
    """The owner of one token, with its rate limit (0 = unlimited)."""

    __slots__ = ("name",)

    def __init__(self, name: str, rate: float = 0.0) -> None:
        super().__init__(rate)
        self.name = name


class Tokens:
    """The accepted tokens, looked up by hash so that the lookup time reveals nothing about them."""

    def __init__(self, lines: Iterable[tuple[str, str, float]]) -> None:
        """(name, token, requests per second or 0)."""
        self._callers = {_hash(f"Bearer {token}".encode()): Caller(name, rate) for name, token, rate in lines}

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, authorization: bytes) -> Caller | None:
        """Return the owner of an `Authorization` header, or None if it is not valid."""
        return self._callers.get(_hash(authorization))

    @classmethod
    def single(cls, token: str, rate: float = 0.0) -> Tokens:
        return cls([(DEFAULT_NAME, token, rate)])

    @classmethod
    def read(cls, path: Path, rate: float = 0.0) -> Tokens:
        """Read a file of lines `TOKEN`, `NAME TOKEN` or `NAME TOKEN REQUESTS_PER_S`.

        `rate` is the default. Raises UsageError, whose message never contains a token.
        """
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"Cannot read the token file {path}: {error}.") from error
        entries: list[tuple[str, str, float]] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                entries.append(_parse_line(words, f"Line {number} of the token file {path}", rate))
        if not entries:
            raise UsageError(f"The token file {path} contains no token.", "One per line: TOKEN, NAME TOKEN, or NAME TOKEN RATE.")
        if len({token for _, token, _ in entries}) != len(entries):
            raise UsageError(f"The token file {path} contains a token twice.")
        warn_about_token_file(path, [token for _, token, _ in entries])
        return cls(entries)


def _parse_line(words: list[str], where: str, rate: float) -> tuple[str, str, float]:
    hint = "One token per line: TOKEN, NAME TOKEN, or NAME TOKEN REQUESTS_PER_S."
    if len(words) > 3 or not all(word.isascii() and word.isprintable() for word in words):
        raise UsageError(f"{where} is not one printable token with its name.", hint)
    if len(words) == 1:
        return DEFAULT_NAME, words[0], rate
    if len(words) == 3:
        try:
            rate = -1.0 if "_" in words[2] else float(words[2])  # Python also reads 1_0 as a number
        except ValueError:
            rate = -1.0
        if not 0 <= rate < float("inf"):
            raise UsageError(f"{where} does not end with a number of requests per second.", hint)
    return words[0], words[1], rate


def _hash(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
