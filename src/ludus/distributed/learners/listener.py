"""Listener of the first learner of a job for those on its other nodes."""

from __future__ import annotations

import logging
import time

from ludus.distributed.learners.channel import LearnerChannel, LearnerListener
from ludus.errors import UsageError, WorkerFailed
from ludus.process.job_env import JobEnv

log = logging.getLogger(__name__)

_POLL_S = 0.5
_ANNOUNCE_S = 10.0


class JobLearnerListener(LearnerListener):
    """Accepts the learners of a job once all of them are connected. Those that disconnect meanwhile do not count.

    `hint`: hint of the error when some are missing.
    """

    def __init__(self, job: JobEnv, hint: str) -> None:
        """Raises UsageError when the address is in use, for instance for a moment by a learner that has just died."""
        host, port = job.learner_address
        try:
            super().__init__(host, job.token(), port)
        except OSError as error:
            raise UsageError(
                f"The first learner cannot listen for the others at {host}:{port}: {error.strerror or error}.",
                "The address must belong to this machine, and the port must be free.",
            ) from error
        self._job, self._hint = job, hint
        self._connected: list[LearnerChannel] = []

    def accept_rank(self, within_s: float) -> LearnerChannel:
        """The next learner. Raises a final WorkerFailed that names the missing ones."""
        self._connected = self._connected or self._wait_for_all(within_s)
        return self._connected.pop(0)

    def _wait_for_all(self, within_s: float) -> list[LearnerChannel]:
        connected: list[LearnerChannel] = []
        began, announced = time.monotonic(), False
        while len(connected) < self._job.learners:
            waited = time.monotonic() - began
            if waited >= within_s:
                for channel in connected:
                    channel.close()
                raise self._missing_error(connected, waited)
            if not announced and waited >= _ANNOUNCE_S:
                log.warning("waiting for learners of other machines at %s: %s", self.address, self._describe_count(connected))
                announced = True
            accepted = super().accept_rank(min(_POLL_S, within_s - waited))
            connected += [accepted] if accepted is not None else []
            for closed in [one for one in connected if one.is_closed]:
                connected.remove(closed)
                closed.close()
        return connected

    def close(self) -> None:
        for channel in self._connected:
            channel.close()
        super().close()

    def _describe_count(self, connected: list[LearnerChannel]) -> str:
        return f"{len(connected)} of {self._job.learners} are connected"

    def _missing_error(self, connected: list[LearnerChannel], waited_s: float) -> WorkerFailed:
        size = self._job.learners
        accepted = f" ({', '.join(channel.other.lower() for channel in connected)})" if connected else ""
        nodes = ", ".join(self._job.nodes[1:]) or "none"
        lost = (
            f"{size - len(connected)} of {size} learners of other machines did not come to {self.address} within {waited_s:.0f} s"
        )
        error = WorkerFailed(
            f"{lost}: {self._describe_count(connected)}{accepted}; the other nodes of this job are {nodes}.", self._hint
        )
        error.final = True  # they had all the time that the job allows
        return error
