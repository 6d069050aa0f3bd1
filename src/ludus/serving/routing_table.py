"""The line-up: which releases there are, and which of them a new session gets. Written by the one who follows the training,
read by every worker, as one file that is replaced as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ludus.core.plugins import did_you_mean
from ludus.errors import Refused
from ludus.io.atomic_file import replace_json
from ludus.protocol.spec import About

FILE = "lineup.json"
DEFAULT_AGENT = "default"
"""The name of one that was given none."""


@dataclass(frozen=True)
class Agent:
    """One of those who can be played against at this port: `--version 120` is a level, 121 the current one, 122 on trial."""

    current: int
    releases: Mapping[int, str]
    """Version → the directory of its files, relative to that of the line-up."""
    levels: tuple[int, ...] = ()
    """Versions that a session may ask for at any time, besides the current one."""
    canary: int | None = None
    percent: float = 0.0
    """Of the new sessions that get the canary."""
    withdrawn: tuple[int, ...] = ()
    """Versions that have failed: their sessions move to the current one."""

    def choose(self, session: str, asked: int) -> int:
        """The version for a new session: the same for the same session, however often it tries. Raises Refused (404)."""
        if asked >= 0:
            if asked in self.releases:
                return asked
            there = ", ".join(str(version) for version in sorted(self.releases))
            raise Refused(404, "version", f"Version {asked} is not served here.", f"There is {there}.")
        return self.canary if self.canary is not None and drawn(session, "canary") < self.percent / 100 else self.current


@dataclass(frozen=True)
class Lineup:
    agents: Mapping[str, Agent] = field(default_factory=dict)
    """By the name that the model header says; the first is for sessions that name none."""

    def choose(self, session: str, about: About) -> tuple[str, int]:
        """(agent, version) for a new session. Raises Refused (404)."""
        name = about.model or next(iter(self.agents))
        if name not in self.agents:
            shown = name[:80]
            raise Refused(404, "model", f"There is no model {shown!r} here.", did_you_mean(shown, self.agents))
        return name, self.agents[name].choose(session, about.version)

    def write(self, directory: Path) -> None:
        replace_json(directory / FILE, {name: asdict(agent) for name, agent in self.agents.items()})

    @classmethod
    def read(cls, directory: Path) -> Lineup:
        data = json.loads((directory / FILE).read_text(encoding="utf-8"))
        agents = {}
        for name, agent in data.items():
            releases = {int(version): path for version, path in agent["releases"].items()}
            lists = {key: tuple(agent[key]) for key in ("levels", "withdrawn")}
            agents[name] = Agent(**{**agent, **lists, "releases": releases})
        return cls(agents)


def as_file(name: str) -> str:
    """A name of any characters as that of a file."""
    return "".join(c if c.isalnum() or c in "-_" else f"%{ord(c):x}" for c in name)


def drawn(session: str, what: str) -> float:
    """A number in [0, 1) that this session has for this question, in every process and for ever."""
    digest = hashlib.blake2b(f"{what}:{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / (1 << 64)
