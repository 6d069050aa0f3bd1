"""Ports for players of tests: each process of pytest-xdist has its own, so that a player gets the port that a test expects."""

from __future__ import annotations

import os

_PER_PROCESS = 50


def first_port(number: int) -> int:
    return number + _PER_PROCESS * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
