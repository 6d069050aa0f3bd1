"""Launch specification of a game process: environment variables and one JSON file, no command-line arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ludus.errors import UsageError
from ludus.io.atomic_file import replace_file

CONFIG: Final = "LUDUS_GAME_CONFIG"
RESULT: Final = "LUDUS_GAME_RESULT"
TOKEN: Final = "LUDUS_GAME_TOKEN_"  # noqa: S105 - the name of a variable; a camp's number follows

TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class ActorAddress:
    """Address and token of the actor of a camp."""

    url: str
    timeout_s: float = TIMEOUT_S
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class LaunchSpec:
    runtime_id: str
    camps: tuple[ActorAddress | None, ActorAddress | None]
    """None: the built-in bot plays it."""
    directory: Path
    """Working directory of the game."""
    result: Path | None
    seed: int = 0
    max_frames: int | None = None
    eval_mode: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> LaunchSpec:
        """Read the specification. Raises UsageError."""
        path = environment.get(CONFIG, "")
        if not path:
            raise UsageError(f"{CONFIG} is not set.", "Set it to the JSON file that describes the match.")
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            camps = [*fields.get("camps", ()), None, None][:2]
            result = environment.get(RESULT)
            return cls(
                runtime_id=str(fields["runtime_id"]),
                camps=(_camp(camps[0], environment, 0), _camp(camps[1], environment, 1)),
                directory=Path(path).resolve().parent,
                result=Path(result).absolute() if result else None,
                seed=int(fields.get("seed") or 0),
                max_frames=None if fields.get("max_frames") is None else int(fields["max_frames"]),
                eval_mode=bool(fields.get("eval_mode")),
                options=dict(fields.get("options") or {}),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{path} ({CONFIG}) cannot be used: {error!r}.", "docs/gamecore.md describes its content."
            ) from error


def _camp(fields: Mapping[str, Any] | None, environment: Mapping[str, str], number: int) -> ActorAddress | None:
    if fields is None:
        return None
    return ActorAddress(
        str(fields["url"]), float(fields.get("timeout_s") or TIMEOUT_S), environment.get(f"{TOKEN}{number}") or None
    )


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    if path is not None:
        replace_file(path, json.dumps(result, allow_nan=False))
