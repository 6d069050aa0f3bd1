"""Settings of a gamecore server, and their checks before it starts."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ludus.core.plugins import require
from ludus.errors import UsageError
from ludus.gamecore.server import catalogue
from ludus.gateway.auth import Tokens
from ludus.process.commands.thread_limits import raise_open_file_limit

HOST, PORT = "127.0.0.1", 23432
MAX_GAMES = 200
_RESERVED_FILES, _FILES_PER_GAME, _MIN_CONNECTIONS = 64, 1, 32
_PATHS = ("games", "token_file", "state_dir")


@dataclass(frozen=True)
class ServerLimits:
    body_bytes: int = 1_000_000
    head_bytes: int = 32_768
    connections: int = 4096
    receive_s: float = 10.0
    """Time limit for receiving the body of a request."""
    send_s: float = 10.0
    """Time limit for a client to read its reply."""
    idle_s: float = 30.0
    """Time limit for the head of a request, and between two requests."""
    unauthorized_idle_s: float = 10.0
    """The same for a connection that has not yet sent a valid token."""
    connections_per_address: int = 0
    """Connections per client address; 0 = unlimited."""


@dataclass(frozen=True)
class Settings:
    host: str = HOST
    port: int = PORT
    """0 = any free port."""
    games: Path | None = None
    """Catalogue file; None: the built-in games."""
    max_games: int = MAX_GAMES
    token_file: Path | None = None
    state_dir: Path | None = None
    keep: int = 1000
    """Finished games that are kept with their directories."""
    http: ServerLimits = field(default_factory=ServerLimits)

    def check(self) -> None:
        """Raises UsageError, ConfigError, MissingExtra."""
        for module in ("starlette", "uvicorn"):
            require(module, "gamecore", "The gamecore server")
        if self.max_games < 1:
            raise UsageError(f"--max-games is {self.max_games}.", "It must be at least 1.")
        catalogue.read(self.games)
        if self.token_file is not None:
            Tokens.read(self.token_file)
        elif self.host != "localhost":
            with contextlib.suppress(ValueError):
                if ipaddress.ip_address(self.host).is_loopback:
                    return
            hint = "Give a token (--token-file FILE), or listen on 127.0.0.1."
            raise UsageError(f"Listening on {self.host} without a token would give anyone access.", hint)

    def affordable_limits(self) -> ServerLimits:
        """Return the limits with connections reduced to the open-file limit, from which each running game takes one file."""
        others = _FILES_PER_GAME * self.max_games + _RESERVED_FILES
        limit = raise_open_file_limit(self.http.connections + others)
        if limit is None:
            return self.http
        room = limit - others
        return replace(self.http, connections=min(self.http.connections, max(_MIN_CONNECTIONS, room)))

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        data: dict[str, Any] = json.loads(text)
        data |= {key: Path(data[key]) for key in _PATHS if data[key] is not None}
        return cls(**{**data, "http": ServerLimits(**data["http"])})
