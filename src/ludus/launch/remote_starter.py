"""Protocol by which a supervisor starts the processes of a job on several machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ludus.launch.job import Job
from ludus.launch.job_dir import JobDirectory
from ludus.process.job_env import JobEnv


class RemoteStarter(Protocol):
    """Created from a job directory and its job, on the machine of the main role (node 0)."""

    def job_env(self) -> JobEnv:
        """Return the environment for all processes; the supervisor sets `node` for each."""
        ...

    def node_names(self) -> tuple[str, ...]: ...

    def wrap_command(self, node: int, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the local command that runs `command` on a node; `command` itself if the node is this machine.

        The stdin of a wrapping command is a pipe without data. When it closes, the remote process and its children must end.
        """
        ...

    def restarts_job(self) -> bool:
        """Return whether an interrupted job is started again, by the queue or by `requeue`."""
        ...

    def requeue(self) -> str:
        """Queue the job again, from the same directory, after its processes have ended. Return the error, or ""."""
        ...


StarterFactory = Callable[[JobDirectory, Job], RemoteStarter]
