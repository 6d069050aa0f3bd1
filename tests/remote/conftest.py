from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ludus
from ludus.remote.context import RunContext


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunContext]:
    """A run of this test alone; whatever it starts is closed with it."""
    with ludus.init(project=tmp_path, trial="t", report_interval_s=60) as session:
        yield session


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """A run for all tests of a module that start processes: they share what the processes are forked from."""
    with ludus.init(project=tmp_path_factory.mktemp("busy"), trial="t", report_interval_s=60) as session:
        yield session
