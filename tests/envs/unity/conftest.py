"""The stand-in draws nothing: its players get no private screen, which would cost 0.1 s each."""

import pytest


@pytest.fixture(autouse=True)
def without_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUDUS_SCREEN", "none")
