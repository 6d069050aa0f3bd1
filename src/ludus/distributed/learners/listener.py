"""Where the first learner of a job waits for those of its other nodes."""

from __future__ import annotations

import logging
import time

from ludus.distributed.learners.channel import Entrance, Link
from ludus.errors import UsageError, WorkerFailed
from ludus.process.job_env import JobEnv

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_SAY_S = 10.0


class FarEntrance(Entrance):
    """Lets them in when all of them are here. Those that left again while the others were awaited have not come.

    `hint`: what is to be done when they do not come.
    """

    def __init__(self, job: JobEnv, hint: str) -> None:
        """Raises UsageError when its place is taken; by a learner that has just died, for a moment."""
        host, port = job.learner_address
        try:
            super().__init__(host, job.token(), port)
        except OSError as error:
            raise UsageError(
                f"The first learner cannot wait for the others at {host}:{port}: {error.strerror or error}.",
                "It must be an address of this machine, and free.",
            ) from error
        self._job, self._hint = job, hint
        self._here: list[Link] = []

    def admit(self, within_s: float) -> Link:
        """The next one of them. Raises a final WorkerFailed that says who is missing."""
        self._here = self._here or self._all(within_s)
        return self._here.pop(0)

    def _all(self, within_s: float) -> list[Link]:
        here: list[Link] = []
        began, said = time.monotonic(), False
        while len(here) < self._job.learners:
            waited = time.monotonic() - began
            if waited >= within_s:
                for link in here:
                    link.close()
                raise self._missing(here, waited)
            if not said and waited >= _SAY_S:
                log.warning("waiting for learners of other machines at %s: %s", self.address, self._counted(here))
                said = True
            came = super().admit(min(_LOOK_S, within_s - waited))
            here += [came] if came is not None else []
            for left in [one for one in here if one.gone]:
                here.remove(left)
                left.close()
        return here

    def close(self) -> None:
        for link in self._here:
            link.close()
        super().close()

    def _counted(self, here: list[Link]) -> str:
        return f"{len(here)} of {self._job.learners} are here"

    def _missing(self, here: list[Link], waited_s: float) -> WorkerFailed:
        size = self._job.learners
        came = f" ({', '.join(link.other.lower() for link in here)})" if here else ""
        nodes = ", ".join(self._job.nodes[1:]) or "none"
        lost = f"{size - len(here)} of {size} learners of other machines did not come to {self.address} within {waited_s:.0f} s"
        error = WorkerFailed(f"{lost}: {self._counted(here)}{came}; the other nodes of this job are {nodes}.", self._hint)
        error.final = True  # they had all the time that the job gives them
        return error
