from __future__ import annotations

import os

import pytest
from hypothesis import settings

from ludus.core import trust
from tests.s3 import s3_proxy as s3_proxy
from tests.s3 import s3_server as s3_server
from tests.s3 import s3_url as s3_url

settings.register_profile("ludus", deadline=None)  # a busy machine is not a bug
settings.load_profile("ludus")

LONGEST_FIRST = (
    "system", "docs", "experiments", "remote", "distributed", "ray_cluster", "launch", "process", "cli", "tournament",
    "serving", "gamecore", "algorithms", "transport", "models",
)  # fmt: skip
"""Files that take long, and have few tests, would else be the last ones: one process would wait for the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"tests/{folder}/": place for place, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: next((place for start, place in order.items() if item.nodeid.startswith(start)), len(order)))


@pytest.fixture(autouse=True)
def _names_of_this_test_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test trusts is not trusted in the next."""
    for variable in (trust.VARIABLE, trust.PROJECTS):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    monkeypatch.setattr(trust, "_runs", set())
