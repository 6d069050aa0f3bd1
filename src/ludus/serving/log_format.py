"""What a service says of itself: one line per event on the standard error, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

Form = Literal["text", "json"]
FORMS: tuple[Form, ...] = ("text", "json")


class JsonLines(logging.Formatter):
    """Time, level, where it comes from, what it says, and the traceback if there is one."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "who": self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(form: Form, who: str) -> None:
    """For this whole process; `who` is the worker's number, or the follower."""
    text = logging.Formatter(f"%(asctime)s %(levelname)s {who}: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(who) if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    ours = logging.getLogger("ludus")  # which may have a handler of its own, as workers do
    ours.handlers.clear()
    ours.propagate = True
