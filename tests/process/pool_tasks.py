"""Task functions for the tests of the task pool."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ludus.errors import EnvironmentFault
from ludus.process.workers.supervisor import Context


class Clerk:
    """Squares numbers; `die`: kills itself, once or always; `hang`: the same without a word."""

    def __init__(self, context: Context, notes: str) -> None:
        self._context, self._notes = context, Path(notes)

    def __call__(self, errand: dict[str, Any]) -> Any:
        number = int(errand["number"])
        with (self._notes / f"{number}.tries").open("a") as file:
            file.write("x")
        first = (self._notes / f"{number}.tries").stat().st_size == 1
        if errand.get("die") == "always" or (errand.get("die") == "once" and first):
            os.kill(os.getpid(), signal.SIGKILL)
        if errand.get("hang") and first:
            signal.pause()
        if errand.get("fail"):
            raise EnvironmentFault("the game crashed", "Try another.")
        return {"square": number * number, "pid": os.getpid(), "much": "x" * int(errand.get("much", 0))}


class Unmade:
    def __init__(self, context: Context) -> None:
        raise EnvironmentFault("it cannot be made")

    def __call__(self, errand: Any) -> Any:
        raise AssertionError("unreachable")


class Stillborn:
    def __init__(self, context: Context) -> None:
        os._exit(3)

    def __call__(self, errand: Any) -> Any:
        raise AssertionError("unreachable")
