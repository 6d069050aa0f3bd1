"""Job specification, job status and the `Orchestrator` protocol that every backend implements.

    job = Job("cartpole", roles=(Role("learner", (...,)), Role("worker", (...,), count=3, restart="on-failure")), main="learner")
    id = orchestrator.submit(job)
    for line in orchestrator.logs(id, role="learner", follow=True):
        ...
    orchestrator.status(id).exit_code      # the learner's

`render` returns everything that `submit` would write, without side effects. A job ends with its main role; then all its processes
are stopped. A job holds the names of secrets, never their values. Backends pass the values on without exposing them in command
lines, logs or files that other users can read.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from ludus.core import plugins, trust
from ludus.errors import LudusError, UsageError

ORCHESTRATORS: Mapping[str, str] = {
    "local": "ludus.launch.local:LocalOrchestrator",
    "ssh": "ludus.launch.ssh.backend:SshOrchestrator",
    "slurm": "ludus.launch.slurm.backend:SlurmOrchestrator",
    "kubernetes": "ludus.launch.kubernetes.backend:KubernetesOrchestrator",
}

RoleRestart = Literal["never", "when-killed", "on-failure", "always"]
"""When a process that ended is restarted: never, if a signal killed it, if its exit code is not 0, or always."""

JobState = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ProcessState = Literal["pending", "running", "waiting", "ended"]
"""`waiting`: ended and due to be restarted."""

OVER: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MIN_SECRET_CHARS = 8
"""Shorter secrets are not searched for in command lines: they would match by chance."""


@dataclass(frozen=True)
class Role:
    """A command that runs as `count` processes. `environment` is written to disk; secrets belong in `Job.secrets`."""

    name: str
    command: tuple[str, ...]
    count: int = 1
    restart: RoleRestart = "never"
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1
    gpus: float = 0
    at: tuple[int, ...] = ()
    """Node number of each process, repeated cyclically. Empty: node 0."""
    log: str = ""
    """Path of the log, with `{index}` if `count` > 1. Empty: in the job's directory."""

    def node(self, index: int) -> int:
        return self.at[index % len(self.at)] if self.at else 0


@dataclass(frozen=True)
class Job:
    """Roles start in order. When `main` ends or the job is cancelled, the others are stopped in reverse order.

    `secrets`: names of environment variables of the submitting process, passed on and never written in clear. `grace_s`: seconds
    between SIGTERM and SIGKILL, long enough to write a checkpoint to a slow store. `place`: the directory or URL the job works on,
    shown in its status. `nodes`: number of machines, numbered from 0; main runs on node 0. `ray`: number of nodes that must have
    joined the job's Ray cluster, within `wait_s`, before work starts; passed to the processes by `process/job_env.py`.
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
    """`exit_code`: of the last run that ended; 128 + N when signal N killed it. None before the first end."""

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
    """`exit_code`: of the main role, once the job is over. `reason`: why it did not succeed. `logs`: directory of the logs."""

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
    """Backend that runs jobs. Any process of the same user may call any method, whether or not it submitted the job."""

    def render(self, job: Job) -> dict[str, str]:
        """Return the files that `submit` would write, name → text, without secrets or side effects. Raises UsageError if the job is invalid."""
        ...

    def submit(self, job: Job) -> str:
        """Start the job and return its id without waiting. Raises UsageError; WorkerFailed when the machine or the queue rejects it."""
        ...

    def status(self, job_id: str) -> JobStatus:
        """Raises UnknownName."""
        ...

    def logs(self, job_id: str, *, role: str | None = None, follow: bool = False) -> Iterator[str]:
        """Yield log lines without line ends, prefixed by the process name if there are several processes.

        `follow`: keep yielding new lines until the job is over. Raises UnknownName.
        """
        ...

    def cancel(self, job_id: str, *, at_once: bool = False) -> None:
        """Request the end of the job without waiting for it. A job that is over does not change.

        Processes get SIGTERM, main first, and SIGKILL after `grace_s`; with `at_once`, SIGKILL immediately. Raises UnknownName.
        """
        ...

    def list(self) -> list[JobStatus]:
        """Return all known jobs, oldest first."""
        ...


def open_orchestrator(name: str, **options: Any) -> Orchestrator:
    """Create a backend from its name or a `module:Class`. Raises UnknownName."""
    trust.allow(name)  # the name comes from the command line, cluster.yaml or the state directory, never from a run
    orchestrator: Orchestrator = plugins.resolve("orchestrator", name, ORCHESTRATORS)(**options)
    return orchestrator


def wait(orchestrator: Orchestrator, job_id: str, timeout_s: float, *, every_s: float = 0.1) -> JobStatus:
    """Wait until the job is over and return its final status. Raises LudusError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = orchestrator.status(job_id)
        if status.over:
            return status
        left = deadline - time.monotonic()
        if left <= 0:
            raise LudusError(f"The job {job_id} is still {status.state} after {timeout_s:g} s.")
        time.sleep(min(every_s, left))


# -- shared by the backends ---------------------------------------------------------------------------------------------


def check_job(job: Job, environ: Mapping[str, str] | None = None) -> Job:
    """Validate a job and return it. With `environ`, also check that its secrets are set and not exposed. Raises UsageError."""
    _check_name("job", job.name)
    if not job.roles:
        raise UsageError(f"The job {job.name} has no roles.")
    names = [role.name for role in job.roles]
    for role in job.roles:
        _check_role(role, job.secrets)
        if names.count(role.name) > 1:
            raise UsageError(f"The job {job.name} has two roles called {role.name!r}.")
    if job.main not in names:
        raise UsageError(f"The job {job.name} has no role {job.main!r}, its main role.", plugins.did_you_mean(job.main, names))
    main = next(role for role in job.roles if role.name == job.main)
    if main.count != 1:
        raise UsageError(
            f"The main role {job.main!r} has {main.count} processes.", "It must have one: its exit code is the job's."
        )
    if job.nodes < 1 or not 0 <= job.ray <= job.nodes or not 0 < job.wait_s < math.inf:
        raise UsageError(f"The job {job.name} has invalid values: nodes={job.nodes}, ray={job.ray}, wait_s={job.wait_s:g}.")
    if main.node(0) != 0:
        raise UsageError(f"The main role {job.main!r} is at node {main.node(0)}.", "It must be at node 0.")
    for role in job.roles:
        if unknown := [node for node in role.at if not 0 <= node < job.nodes]:
            raise UsageError(f"The role {role.name!r} is at node {unknown[0]}, and the job {job.name} has {job.nodes} nodes.")
    if not 0 <= job.grace_s < math.inf:
        raise UsageError(f"The job {job.name} has grace_s={job.grace_s}.", "Use a number of seconds >= 0.")
    for name in job.secrets:
        _check_variable(name)
    if environ is not None:
        _check_secrets(job, environ)
    return job


def exit_code(returned: int) -> int:
    """Return the shell's exit code for a `Popen.returncode`: 128 + N when signal N killed the process."""
    return 128 - returned if returned < 0 else returned


def should_restart(restart: RoleRestart, returned: int) -> bool:
    """`returned`: a `Popen.returncode`, negative when a signal killed the process."""
    return {"never": False, "when-killed": returned < 0, "on-failure": returned != 0, "always": True}[restart]


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"Invalid {what} name {name!r}.", "Use up to 63 letters, digits, dots, dashes and underscores.")


def _check_role(role: Role, secrets: tuple[str, ...]) -> None:
    _check_name("role", role.name)
    if not role.command or not all(isinstance(word, str) and "\0" not in word for word in role.command) or not role.command[0]:
        raise UsageError(f"The role {role.name!r} has an invalid command: {role.command!r}.")
    try:
        "".join((*role.command, *role.environment.values(), role.log)).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"The role {role.name!r} contains invalid text: {error.object!r}.", "Use UTF-8.") from error
    if role.count < 1:
        raise UsageError(f"The role {role.name!r} has {role.count} processes.", "Remove the role instead.")
    if role.restart not in get_args(RoleRestart):
        raise UsageError(
            f"The role {role.name!r} has restart={role.restart!r}.", f"Use one of: {', '.join(get_args(RoleRestart))}."
        )
    if role.cpus < 0 or role.gpus < 0:
        raise UsageError(f"The role {role.name!r} has cpus={role.cpus} and gpus={role.gpus}.", "Use numbers >= 0.")
    if role.count > 1 and role.log and "{index}" not in role.log:
        raise UsageError(f"The {role.count} processes of the role {role.name!r} cannot share the log {role.log}.", "Add {index}.")
    for name, value in role.environment.items():
        _check_variable(name)
        if "\0" in value:
            raise UsageError(f"The variable {name} of the role {role.name!r} contains a zero byte.")
        if name in secrets:
            raise UsageError(
                f"The secret {name} is in the environment of the role {role.name!r}, which is written to disk.",
                "Export it before you submit the job.",
            )


def _check_variable(name: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid name of an environment variable.")


def _check_secrets(job: Job, environ: Mapping[str, str]) -> None:
    for name in job.secrets:
        if name not in environ:
            raise UsageError(f"The job {job.name} needs the secret {name}, which is not in the environment.", f"export {name}=…")
        if len(secret := environ[name]) < _MIN_SECRET_CHARS:
            continue
        hint = f"Remove it there. If the match is a coincidence, change the value of {name}, or the text that contains it."
        for role in job.roles:
            if any(secret in word for word in role.command):
                raise UsageError(
                    f"The value of {name} is in the command of the role {role.name!r}, which all users can see.", hint
                )
            if any(secret in value for value in role.environment.values()):
                raise UsageError(
                    f"The value of {name} is in the environment of the role {role.name!r}, which is written to disk.", hint
                )
