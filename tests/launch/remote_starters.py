"""A remote starter whose nodes are all this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ludus.launch.job import Job
from ludus.launch.job_dir import JobDirectory
from ludus.process.job_env import JobEnv


class FakeStarter:
    """Runs the commands of other nodes here, with the node's name in the variable FAR."""

    def __init__(self, directory: JobDirectory, job: Job) -> None:
        self._directory, self._job = directory, job

    def job_env(self) -> JobEnv:
        if "SLOW" in os.environ:
            (self._directory.path / "setting-up").touch()
            while not (self._directory.path / "go-on").exists():
                time.sleep(0.02)
        nodes = tuple(f"10.0.0.{index + 1}" for index in range(self._job.nodes))
        return JobEnv(nodes, 0, 12_345, self._directory.token(), self._job.ray, self._job.wait_s)

    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{index + 1}" for index in range(self._job.nodes))

    def wrap_command(self, node: int, command: tuple[str, ...]) -> tuple[str, ...]:
        return command if node == 0 else ("env", f"FAR={self.node_names()[node]}", *command)

    def restarts_job(self) -> bool:
        return "ALLOCATION" not in os.environ

    def requeue(self) -> str:
        why = os.environ.get("REQUEUE", "")
        with open(Path(self._directory.path) / "requeued", "a") as file:
            file.write(f"{self._directory.read().status.state}\n")
        return why
