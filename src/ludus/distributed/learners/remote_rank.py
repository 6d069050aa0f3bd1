"""A learner beside the first one, on another machine of a job: `python -m ludus.distributed.learners.remote_rank`, until it is ended.

The first learner may be started again, from its newest checkpoint; then this one comes to it again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from types import FrameType

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.process.job_env import JobEnv

log = logging.getLogger(__name__)

_POLL_S = 0.5


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    job = JobEnv.from_environ(os.environ)
    if job is None:
        raise UsageError("This process belongs to no job.", "It is started by `ludus submit` or `ludus learner start`.")
    token, (host, port) = job.token(), job.learner_address
    from ludus.distributed.learners.rank import learn_for  # torch

    said = ""
    while True:
        try:
            learn_for(f"tcp://{host}:{port}", token)
            why = "the first learner has left"
        except (WorkerFailed, UsageError) as error:  # one that dies while it greets us seems to refuse our token
            why = str(error)
        if why != said:
            log.info("%s; it is looked for again", why)
            said = why
        time.sleep(_POLL_S)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # nothing of a learner outlives it; a sum that it is waiting for would keep it


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LudusError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
