"""A learner on another machine than the first one of its job: `python -m ludus.distributed.learners.remote_rank`, until it is ended.

The first learner may be restarted from its newest checkpoint; this one then connects again.
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
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    job = JobEnv.from_environ(os.environ)
    if job is None:
        raise UsageError("This process belongs to no job.", "It is started by `ludus submit` or `ludus learner start`.")
    token, (host, port) = job.token(), job.learner_address
    from ludus.distributed.learners.rank import serve_remote_rank  # torch

    logged = ""
    while True:
        try:
            serve_remote_rank(f"tcp://{host}:{port}", token)
            why = "the first learner has left"
        except (WorkerFailed, UsageError) as error:  # a learner that dies during the handshake looks like a refused token
            why = str(error)
        if why != logged:
            log.info("%s; connecting again", why)
            logged = why
        time.sleep(_POLL_S)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # a learner owns nothing that must be closed; a pending all-reduce would block the exit


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LudusError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
