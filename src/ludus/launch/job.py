"""Orchestrator: starts the processes of a job somewhere, and says how they fare.

    job = Job("cartpole", roles=(Role("learner", (...,)), Role("worker", (...,), count=3, restart="on-failure")), main="learner")
    id = orchestrator.submit(job)
    for line in orchestrator.logs(id, role="learner", follow=True):
        ...
    orchestrator.status(id).exit_code      # the learner's

A job is data: what would be written and run is known before anything is (`render`). It is over when its main role is; then nothing
of it is left running. Secrets are named, never contained: each backend hands the variables on by means that leave no trace in
command lines, files that others can read, or logs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from ludus.core import plugins, trust
from ludus.errors import LudusError, UnknownName, UsageError

ORCHESTRATORS: Mapping[str, str] = {
    "local": "ludus.launch.local:LocalOrchestrator",
    "ssh": "ludus.launch.ssh.backend:SshOrchestrator",
    "slurm": "ludus.launch.slurm.backend:SlurmOrchestrator",
}
PLANNED = ("kubernetes",)
"""Names that mean something, and that have no backend here."""

Restart = Literal["never", "when-killed", "on-failure", "always"]
"""Whether a process that ended is started anew: one that was killed by a signal; one that did not end with code 0; any."""

JobState = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ProcessState = Literal["pending", "running", "waiting", "ended"]
"""`waiting`: it ended and will be started again."""

OVER: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHORT = 8
"""A secret that is shorter than this is not looked for in command lines: it would be found everywhere."""


@dataclass(frozen=True)
class Role:
    """A command that is run `count` times. What is in `environment` may be written down; secrets are the job's."""

    name: str
    command: tuple[str, ...]
    count: int = 1
    restart: Restart = "never"
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1
    gpus: float = 0
    at: tuple[int, ...] = ()
    """The node of each of its processes, by number; fewer than processes: over again from the first. Empty: node 0."""
    log: str = ""
    """A path for what it writes, with {index} in it where there are several. Empty: in the job's directory."""

    def node(self, index: int) -> int:
        return self.at[index % len(self.at)] if self.at else 0


@dataclass(frozen=True)
class Job:
    """Roles start in their order. When `main` has ended, or when the job is cancelled, the others end, the last one first.

    `secrets`: names of variables of the environment of whoever submits it, that are handed on and never written. `grace_s`: how
    long a process may take to end when it is asked to; a checkpoint on a slow store is written in it. `place`: what it works on,
    so that others can see that somebody does. `nodes`: machines that it needs, numbered from 0; main is on node 0. `ray`: how many
    of them are to be in the job's Ray before work begins; its processes are told (`process/job_env.py`).
    """

    name: str
    roles: tuple[Role, ...]
    main: str
    secrets: tuple[str, ...] = ()
    grace_s: float = 30.0
    place: str = ""
    nodes: int = 1
    ray: int = 0
    wait_s: float = 300.0


@dataclass(frozen=True)
class ProcessStatus:
    """`exit_code`: of its last life that ended; 128 + N when signal N killed it. None while it has never ended."""

    role: str
    index: int
    state: ProcessState
    exit_code: int | None = None
    restarts: int = 0
    pid: int | None = None
    host: str = ""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class JobStatus:
    """`exit_code`: of the main role, when the job is over. `reason`: in a sentence, why it did not succeed. `logs`: where they are kept.

    `place`: the job's.
    """

    id: str
    name: str
    state: JobState
    exit_code: int | None = None
    processes: tuple[ProcessStatus, ...] = ()
    reason: str = ""
    logs: str = ""
    submitted_at: float = 0.0
    place: str = ""

    @property
    def over(self) -> bool:
        return self.state in OVER

    def of(self, role: str) -> tuple[ProcessStatus, ...]:
        return tuple(process for process in self.processes if process.role == role)


class Orchestrator(Protocol):
    """All methods may be called from any process of the same user, also from one that did not submit the job."""

    def render(self, job: Job) -> dict[str, str]:
        """Exactly what submit would write: name → text. Touches nothing; contains no secret. Raises UsageError for a job that cannot be."""
        ...

    def submit(self, job: Job) -> str:
        """Have it started, and return its id at once. Raises UsageError; WorkerFailed when this machine, or the queue, will not have it."""
        ...

    def status(self, job_id: str) -> JobStatus:
        """Raises UnknownName."""
        ...

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        """Lines of what its processes wrote, without line ends; of several processes each with the name of its own in front.

        `follow`: further lines as they come, until the job is over. Raises UnknownName.
        """
        ...

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        """Ask for its end, and return: `status` says when it is over. What is over stays as it is.

        Processes are asked to end (SIGTERM), main first, and are killed when they take too long; with `at_once`, killed. Raises UnknownName.
        """
        ...

    def list(self) -> list[JobStatus]:
        """Those that it knows of, oldest first."""
        ...


def open_orchestrator(name: str, **options: Any) -> Orchestrator:
    """By its name, or `module:Class` of your own. Raises UnknownName."""
    if name in PLANNED:
        raise UnknownName(
            f"The orchestrator {name!r} is not available in this version.",
            f"Use one of: {', '.join(ORCHESTRATORS)}; or start `ludus fleet worker` on each machine yourself, with the same --memory and --store.",
        )
    trust.allow(name)  # it is never in a run: the command line, the user's cluster.yaml or state directory name it
    opened: Orchestrator = plugins.resolve("orchestrator", name, ORCHESTRATORS)(**options)
    return opened


def wait(orchestrator: Orchestrator, job_id: str, timeout_s: float, *, every_s: float = 0.1) -> JobStatus:
    """Until the job is over. Raises LudusError when it is not after so long."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = orchestrator.status(job_id)
        if status.over:
            return status
        left = deadline - time.monotonic()
        if left <= 0:
            raise LudusError(f"The job {job_id} is still {status.state} after {timeout_s:g} s.")
        time.sleep(min(every_s, left))


# -- what every backend shares ------------------------------------------------------------------------------------------


def checked(job: Job, environ: Mapping[str, str] | None = None) -> Job:
    """The job, if it can be one. With `environ`: and if its secrets are there, and nowhere where they would be seen. Raises UsageError."""
    _check_name("job", job.name)
    if not job.roles:
        raise UsageError(f"The job {job.name} has no roles.")
    names = [role.name for role in job.roles]
    for role in job.roles:
        _check_role(role, job.secrets)
        if names.count(role.name) > 1:
            raise UsageError(f"The job {job.name} has two roles called {role.name!r}.")
    if job.main not in names:
        raise UsageError(f"The main role {job.main!r} is none of the job {job.name}.", plugins.did_you_mean(job.main, names))
    main = next(role for role in job.roles if role.name == job.main)
    if main.count != 1:
        raise UsageError(f"The main role {job.main!r} has {main.count} processes; the exit code of a job is that of one.")
    if job.nodes < 1 or not 0 <= job.ray <= job.nodes or not 0 < job.wait_s < math.inf:
        raise UsageError(f"The job {job.name} has {job.nodes} nodes, {job.ray} of them in its Ray within {job.wait_s:g} s.")
    if main.node(0) != 0:
        raise UsageError(f"The main role {job.main!r} is at node {main.node(0)}.", "It is at node 0, by which a job is known.")
    for role in job.roles:
        if astray := [node for node in role.at if not 0 <= node < job.nodes]:
            raise UsageError(f"The role {role.name!r} is at node {astray[0]}, and the job {job.name} has {job.nodes}.")
    if not 0 <= job.grace_s < math.inf:
        raise UsageError(f"The job {job.name} has grace_s={job.grace_s}.", "It is a number of seconds.")
    for name in job.secrets:
        _check_variable(name)
    if environ is not None:
        _check_secrets(job, environ)
    return job


def exit_code(returned: int) -> int:
    """As a shell says it: 128 + N when signal N killed it."""
    return 128 - returned if returned < 0 else returned


def is_restarted(restart: Restart, returned: int) -> bool:
    """`returned`: negative when a signal killed it."""
    return {"never": False, "when-killed": returned < 0, "on-failure": returned != 0, "always": True}[restart]


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a {what}.", "Use up to 63 letters, digits, dots, dashes and underscores.")


def _check_role(role: Role, secrets: tuple[str, ...]) -> None:
    _check_name("role", role.name)
    if not role.command or not all(isinstance(word, str) and "\0" not in word for word in role.command) or not role.command[0]:
        raise UsageError(f"The role {role.name!r} has no command that can be run: {role.command!r}.")
    try:
        "".join((*role.command, *role.environment.values(), role.log)).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"A word of the role {role.name!r} is no text: {error.object!r}.", "Use UTF-8.") from error
    if role.count < 1:
        raise UsageError(f"The role {role.name!r} has {role.count} processes.", "Leave it out instead.")
    if role.restart not in get_args(Restart):
        raise UsageError(
            f"The role {role.name!r} has restart={role.restart!r}.", f"It is one of: {', '.join(get_args(Restart))}."
        )
    if role.cpus < 0 or role.gpus < 0:
        raise UsageError(f"The role {role.name!r} asks for {role.cpus} cores and {role.gpus} accelerators.")
    if role.count > 1 and role.log and "{index}" not in role.log:
        raise UsageError(f"The {role.count} processes of the role {role.name!r} cannot share the log {role.log}.", "Add {index}.")
    for name, value in role.environment.items():
        _check_variable(name)
        if "\0" in value:
            raise UsageError(f"The variable {name} of the role {role.name!r} contains a zero byte.")
        if name in secrets:
            raise UsageError(
                f"The secret {name} is in the environment of the role {role.name!r}, which is written down.",
                "Put it into the environment of whoever submits the job.",
            )


def _check_variable(name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} is no name of an environment variable.")


def _check_secrets(job: Job, environ: Mapping[str, str]) -> None:
    for name in job.secrets:
        if name not in environ:
            raise UsageError(f"The job {job.name} needs the secret {name}, which is not in the environment.", f"export {name}=…")
        seen = _seen(environ[name])
        for role in job.roles:
            hint = f"Leave it out there; or, if it is there by chance, choose another value or name than that of {name}."
            if any(seen(word) for word in role.command):
                raise UsageError(
                    f"The value of {name} is in the command of the role {role.name!r}, which everybody can see.", hint
                )
            if any(seen(value) for value in role.environment.values()):
                raise UsageError(
                    f"The value of {name} is in the environment of the role {role.name!r}, which is written down.", hint
                )


def _seen(secret: str) -> Callable[[str], bool]:
    return lambda text: len(secret) >= _SHORT and secret in text
