"""Run a command in the test process and capture its output."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Call = Callable[..., CommandResult]


def one_line(result: CommandResult) -> str:
    """The error message of a command; asserts that it is a single line without a traceback."""
    (line,) = lines(result)
    return line


def lines(result: CommandResult) -> list[str]:
    """The lines of a command's error message; asserts that there is no traceback."""
    assert "Traceback" not in result.err
    found = [line for line in result.err.splitlines() if line.strip()]
    assert found, "no error message"
    assert found[0].startswith("ludus: ")
    return found
