"""What a long run measured, for `bench/results`: one JSON line per test, where `make test-long` asks for it."""

from __future__ import annotations

import json
import os
from pathlib import Path


def record(name: str, **numbers: float | int | str) -> None:
    where = os.environ.get("LUDUS_LONG_RESULTS")
    if where:
        with Path(where).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": name, **numbers}) + "\n")
