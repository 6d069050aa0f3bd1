"""Connections between rank 0 of the learners and ranks on other nodes, authenticated with the token of the run."""

from __future__ import annotations

import logging
import socket
import time

from ludus.distributed.frames import REPLY_TIMEOUT_S, FrameSocket
from ludus.errors import UsageError, WorkerFailed
from ludus.io.addresses import host_and_port, tcp_address
from ludus.process.auth import Handshake, authenticate_blocking, connect_blocking
from ludus.process.job_env import JobEnv

log = logging.getLogger(__name__)

_POLL_S = 0.5
_ANNOUNCE_S = 10.0
_MAGIC = b"LUDUS-L\n"


def _handshake(token: bytes) -> Handshake:
    return Handshake(token, magic=_MAGIC, context=_MAGIC)


def connect(address: str, token: bytes, timeout_s: float = REPLY_TIMEOUT_S) -> FrameSocket:
    """Connect to rank 0 at `tcp://host:port`. Raises WorkerFailed when it is not there, UsageError when the tokens differ."""
    try:
        connection = connect_blocking(*host_and_port(address), _handshake(token), f"The learner at {address}", timeout_s)
    except OSError as error:
        raise WorkerFailed(
            f"There is no learner at {address}: {error}.", "Check the address, and that its run is alive."
        ) from error
    return FrameSocket(connection, "Learner 0", is_remote=True)


class LearnerListener:
    """Accepts ranks of other nodes. Listens on the given address of this node, on a free port unless one is given."""

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        if len(token) < 16:
            raise UsageError(f"A token of {len(token)} bytes is too short.", "Use 16 random bytes or more.")
        self.host, self._handshake = host, _handshake(token)
        self._listening = socket.create_server((host, port))
        self.address = tcp_address(host, self._listening.getsockname()[1])

    def accept_rank(self, within_s: float) -> FrameSocket | None:
        """The next connection with the token, or None; others are closed. Handshakes run one after another."""
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            self._listening.settimeout(left)
            try:
                connection, peer = self._listening.accept()
            except TimeoutError:
                break
            try:
                authenticate_blocking(connection, self._handshake)
            except (OSError, EOFError) as error:
                log.warning("refused a connection from %s: %s", peer[0], error or "it closed the connection")
                connection.close()
            else:
                return FrameSocket(connection, f"The learner at {peer[0]}", is_remote=True)
        return None

    def close(self) -> None:
        self._listening.close()


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
        self._connected: list[FrameSocket] = []

    def accept_rank(self, within_s: float) -> FrameSocket:
        """The next learner. Raises a final WorkerFailed that names the missing ones."""
        self._connected = self._connected or self._wait_for_all(within_s)
        return self._connected.pop(0)

    def _wait_for_all(self, within_s: float) -> list[FrameSocket]:
        connected: list[FrameSocket] = []
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

    def _describe_count(self, connected: list[FrameSocket]) -> str:
        return f"{len(connected)} of {self._job.learners} are connected"

    def _missing_error(self, connected: list[FrameSocket], waited_s: float) -> WorkerFailed:
        size = self._job.learners
        accepted = f" ({', '.join(channel.peer.lower() for channel in connected)})" if connected else ""
        nodes = ", ".join(self._job.nodes[1:]) or "none"
        lost = (
            f"{size - len(connected)} of {size} learners of other machines did not come to {self.address} within {waited_s:.0f} s"
        )
        error = WorkerFailed(
            f"{lost}: {self._describe_count(connected)}{accepted}; the other nodes of this job are {nodes}.", self._hint
        )
        error.final = True  # they had all the time that the job allows
        return error
