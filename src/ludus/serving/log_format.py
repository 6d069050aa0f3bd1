"""Log format of a service: one line per record on the standard error, as text or JSON."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

Form = Literal["text", "json"]
FORMS: tuple[Form, ...] = ("text", "json")


class JsonFormatter(logging.Formatter):
    """Formats records as JSON objects with time, level, process, logger, message and traceback."""

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
    """Configure logging of this process; `who` names it, for example "worker 0"."""
    text = logging.Formatter(f"%(asctime)s %(levelname)s {who}: %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(who) if form == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    ours = logging.getLogger("ludus")  # workers give it a handler
    ours.handlers.clear()
    ours.propagate = True
