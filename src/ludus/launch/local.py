"""Backend that runs jobs as processes of this machine, each under its own supervisor process."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.launch import job_dir
from ludus.launch.job import Job, JobStatus, check_job
from ludus.launch.job_dir import JobDirectory
from ludus.launch.job_index import JobIndex

_START_S = 60.0
_SUPERVISOR = (sys.executable, "-P", "-m", "ludus.launch.supervisor")


class LocalOrchestrator(JobIndex):
    """`attached`: cancel the submitted jobs when this object is closed or its process ends in any way.

    Otherwise a job outlives the submitting process. `cpus` and `gpus` of roles are not enforced.
    """

    kind = "local processes"

    def __init__(self, directory: Path | None = None, *, attached: bool = False) -> None:
        if sys.platform == "win32":
            raise UsageError("Jobs of local processes need Linux or macOS.", "Use WSL, or start the roles by hand.")
        super().__init__((directory or job_dir.state_dir()) / "jobs")
        self._attached = attached
        self._lifelines: list[int] = []

    def __enter__(self) -> LocalOrchestrator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._lifelines:
            os.close(self._lifelines.pop())

    def command(self) -> str:
        """Return the command that `submit` runs after it has written the rendered files into the job directory."""
        return shlex.join([*_SUPERVISOR, str(self.directory / "ID")])

    def render(self, job: Job) -> dict[str, str]:
        return {job_dir.JOB: job_dir.job_to_json(check_job(job))}

    def submit(self, job: Job) -> str:
        check_job(job, os.environ)
        with self._new_directory(job, self.render(job)) as directory:
            self._launch(directory)
        return directory.id

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        directory = self._find(job_id)
        if self._status(directory).over:
            return
        with contextlib.suppress(OSError):  # a full disk: the signal alone must do
            directory.request_cancel()  # before the signal: a supervisor that is still starting checks the mark
        self._signal_supervisor(directory, at_once=at_once)

    def _launch(self, directory: JobDirectory) -> None:
        words, log_path = [*_SUPERVISOR, str(directory.path)], directory.log("supervisor")
        inherited: tuple[int, ...] = ()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as stack:
            if self._attached:
                theirs, ours = os.pipe()
                stack.callback(os.close, theirs)
                undo.callback(os.close, ours)
                words.append(str(theirs))
                inherited = (theirs,)
            try:
                log = stack.enter_context(open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab"))
                done = subprocess.run(  # noqa: S603
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    pass_fds=inherited,
                    timeout=_START_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise WorkerFailed(f"The supervisor of {directory.id} did not start: {error}.") from error
            if done.returncode != 0:
                raise WorkerFailed(f"The supervisor of {directory.id} did not start: {_last_line(log_path)}")
            if self._attached:
                self._lifelines.append(ours)
            undo.pop_all()

    def _status(self, directory: JobDirectory) -> JobStatus:
        return self._supervised_status(directory, _START_S)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        raise LudusError(f"{log} cannot be read: {error.strerror}.") from error
    return lines[-1] if lines else f"it printed nothing; see {log}."
