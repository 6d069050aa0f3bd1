"""How a game fares, as callers are told, and what follows from the way in which it ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ludus.core.backoff import exponential_delay
from ludus.gamecore.server.catalogue import Restart

State = Literal["starting", "running", "finished", "crashed", "stopped", "timed-out", "lost"]
STATES: tuple[State, ...] = get_args(State)
ALIVE: tuple[State, ...] = ("starting", "running")

MAX_BACKOFF_S = 60.0


@dataclass
class Status:
    """Of one game, from its order until it is forgotten."""

    runtime_id: str
    game: str
    mode: str | None = None
    state: State = "starting"
    pid: int | None = None
    started: float = 0.0
    """Unix seconds."""
    finished: float | None = None
    seconds: float = 0.0
    exit_code: int | None = None
    """Of its process; negative for a signal."""
    reason: str = ""
    restarts: int = 0
    result: dict[str, Any] | None = None
    last_lines: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    memory_mb: float = 0.0
    threads: int = 0
    eval_mode: bool = False
    task_id: str | None = None
    seed: int = 0
    start_from: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state not in ALIVE

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Any) -> Status:
        """Raises ValueError for what is none."""
        known = {one.name for one in fields(cls)}
        if not isinstance(data, dict) or data.get("state") not in STATES:
            raise ValueError("it is no record of a game")
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Verdict:
    """What becomes of a game whose process has ended. `again_s`: it is started again after so many seconds."""

    state: State
    reason: str
    again_s: float | None = None


def verdict(code: int | None, said: str, asked: tuple[State, str] | None, restarts: int, policy: Restart) -> Verdict:
    """`said`: how the process ended, in words; `asked`: as what it was to end, and why, if it did not end by itself."""
    if asked is not None:
        state, reason = asked
    elif code == 0:
        state, reason = "finished", ""
    else:
        state, reason = "crashed", said
    if state != "crashed" or policy.on == "never" or restarts >= policy.times:
        return Verdict(state, reason)
    return Verdict("starting", reason, exponential_delay(restarts + 1, policy.backoff_s, max(MAX_BACKOFF_S, policy.backoff_s)))
