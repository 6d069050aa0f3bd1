"""A command in the process of the test, and what it said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Call = Callable[..., Said]


def one_line(said: Said) -> str:
    """The error of a command: one line that is ours, and no traceback."""
    (line,) = lines(said)
    return line


def lines(said: Said) -> list[str]:
    """The error of a command, which is ours, and no traceback."""
    assert "Traceback" not in said.err
    found = [line for line in said.err.splitlines() if line.strip()]
    assert found, "nothing was said"
    assert found[0].startswith("ludus: ")
    return found
