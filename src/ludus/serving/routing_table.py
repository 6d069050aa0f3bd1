"""The routing table: which releases are offered, and which one a new session gets.

The checkpoint follower replaces the file atomically; every worker reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ludus.core.plugins import did_you_mean
from ludus.errors import Refused
from ludus.io.atomic_file import replace_json
from ludus.protocol.spec import StartOptions

FILE = "lineup.json"
DEFAULT_AGENT = "default"
"""Name of an agent without a given name."""


@dataclass(frozen=True)
class AgentRoutes:
    """The versions of one agent: the current one, the levels and the canary."""

    current: int
    releases: Mapping[int, str]
    """Version → directory of its files, relative to the routing table."""
    levels: tuple[int, ...] = ()
    """Versions that a session may request in addition to the current one."""
    canary: int | None = None
    percent: float = 0.0
    """Percentage of new sessions that get the canary."""
    withdrawn: tuple[int, ...] = ()
    """Versions that failed; their sessions move to the current one."""

    def choose(self, session: str, requested: int) -> int:
        """Return the version for a new session; the same for every retry. Raises Refused (404)."""
        if requested >= 0:
            if requested in self.releases:
                return requested
            available = ", ".join(str(version) for version in sorted(self.releases))
            raise Refused(404, "version", f"Version {requested} is not served here.", f"Available: {available}.")
        return (
            self.canary if self.canary is not None and session_fraction(session, "canary") < self.percent / 100 else self.current
        )


@dataclass(frozen=True)
class RoutingTable:
    agents: Mapping[str, AgentRoutes] = field(default_factory=dict)
    """By the name in the model header; the first one is the default."""

    def choose(self, session: str, options: StartOptions) -> tuple[str, int]:
        """Return (agent, version) for a new session. Raises Refused (404)."""
        name = options.model or next(iter(self.agents))
        if name not in self.agents:
            quoted = name[:80]
            raise Refused(404, "model", f"There is no model {quoted!r} here.", did_you_mean(quoted, self.agents))
        return name, self.agents[name].choose(session, options.version)

    def write(self, directory: Path) -> None:
        replace_json(directory / FILE, {name: asdict(agent) for name, agent in self.agents.items()})

    @classmethod
    def read(cls, directory: Path) -> RoutingTable:
        data = json.loads((directory / FILE).read_text(encoding="utf-8"))
        agents = {}
        for name, agent in data.items():
            releases = {int(version): path for version, path in agent["releases"].items()}
            lists = {key: tuple(agent[key]) for key in ("levels", "withdrawn")}
            agents[name] = AgentRoutes(**{**agent, **lists, "releases": releases})
        return cls(agents)


def escape_file_name(name: str) -> str:
    """Escape a name of any characters for use as a file name."""
    return "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):x}" for c in name)


def session_fraction(session: str, purpose: str) -> float:
    """Hash a session and a purpose to a number in [0, 1); the same in every process and release."""
    digest = hashlib.blake2b(f"{purpose}:{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / (1 << 64)
