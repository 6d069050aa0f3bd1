"""Status of a game, and the decision that follows from the exit of its process. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ludus.core.backoff import exponential_delay
from ludus.gamecore.server.catalogue import GameRestartPolicy

State = Literal["starting", "running", "finished", "crashed", "stopped", "timed-out", "lost"]
STATES: tuple[State, ...] = get_args(State)
ALIVE: tuple[State, ...] = ("starting", "running")

MAX_BACKOFF_S = 60.0


@dataclass
class GameStatus:
    """Status of one game, as returned to callers and saved in its record."""

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
    """Exit code of its process; negative for a signal."""
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
    def from_json(cls, data: Any) -> GameStatus:
        """Raises ValueError."""
        known = {one.name for one in fields(cls)}
        if not isinstance(data, dict) or data.get("state") not in STATES:
            raise ValueError("it is not a record of a game")
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class EndDecision:
    """What to do after the exit of a process. `again_s`: delay before a restart; None: no restart."""

    state: State
    reason: str
    again_s: float | None = None


def decide_end(
    code: int | None, description: str, requested: tuple[State, str] | None, restarts: int, policy: GameRestartPolicy
) -> EndDecision:
    """`description`: how the process ended, in words; `requested`: state and reason of a requested end."""
    if requested is not None:
        state, reason = requested
    elif code == 0:
        state, reason = "finished", ""
    else:
        state, reason = "crashed", description
    if state != "crashed" or policy.on == "never" or restarts >= policy.times:
        return EndDecision(state, reason)
    return EndDecision(
        "starting", reason, exponential_delay(restarts + 1, policy.backoff_s, max(MAX_BACKOFF_S, policy.backoff_s))
    )
