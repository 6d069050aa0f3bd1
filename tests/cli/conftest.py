from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.cli.main import main
from tests.cli.calling import Call, CommandResult


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Run the command in this process, which is faster than a new one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["ludus", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        result = capfd.readouterr()
        code = ended.value.code
        return CommandResult(0 if code is None else int(code), result.out, result.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
