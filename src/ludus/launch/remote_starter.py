"""How one supervisor starts the processes of a job on several machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ludus.launch.job import Job
from ludus.launch.job_dir import JobDirectory
from ludus.process.job_env import Surroundings


class Reach(Protocol):
    """Made of a job's directory and the job, on the machine of its main role: `node` 0."""

    def surroundings(self) -> Surroundings:
        """What all processes are told; each gets its own `node`."""
        ...

    def names(self) -> tuple[str, ...]:
        """Of the nodes, for people."""
        ...

    def words(self, node: int, command: tuple[str, ...]) -> tuple[str, ...]:
        """What is to be started here so that the command runs there. The command itself: it is started here.

        Else its input is a pipe that nobody writes to: where it ends, so does the process, with all that it has started.
        """
        ...

    def goes_on(self) -> bool:
        """Whether a job that is interrupted here is started again, by whoever has interrupted it or by `requeue`."""
        ...

    def requeue(self) -> str:
        """Have the job started again later, from the same directory; called when nothing of it runs. Why not, or nothing."""
        ...


MakeReach = Callable[[JobDirectory, Job], Reach]
