from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.cli.main import main
from tests.cli.calling import Call, Said


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """The command in this process, for what a fresh one would add nothing to."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["ludus", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        code = ended.value.code
        return Said(0 if code is None else int(code), said.out, said.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)
