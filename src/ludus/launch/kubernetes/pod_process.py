"""First process of every container that a Kubernetes job starts: `python -m ludus.launch.kubernetes.pod_process … -- COMMAND`.

It runs the command, and roles `--beside` it, under the supervisor of local jobs: children are reaped, SIGTERM ends the command first
and then the others, and the exit code is that of the command. Their output goes to standard output. Secrets are files; those in the
folder `env` become environment variables of the roles. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ludus.launch.job import Job, JobStatus, Role, RoleRestart
from ludus.launch.job_dir import JOB, JobDirectory, hostname, job_to_json
from ludus.launch.supervisor import run_guard
from ludus.process.job_env import NODE, RUN, JobEnv

FILES, SECRETS = Path("/etc/ludus/files"), Path("/etc/ludus/secrets")
ENV_SECRETS = "env"
"""Folder of SECRETS whose files are environment variables of the roles."""

PLACEHOLDER = "replace-me"
"""Value of every key of a Secret in rendered files. A process that is given it must not start: everybody knows it."""

TERMINATION_LOG = Path("/dev/termination-log")
EXIT_CODE = "exit code "
"""Beginning of the termination message if the container's exit code is not that of the command."""

INDEX = "LUDUS_JOB_INDEX"
RESTART_CODE = 75
"""Exit code of a container whose command ended with 0 and is to be restarted."""

PLACEHOLDER_CODE = 2
"""Exit code of a container whose Secret contains placeholders, as of a command with a wrong option."""

_MAX_SECRET = 1 << 20


class StdoutLog:
    """Log of a role on standard output. `prefix`: before each line; complete lines only, so that roles do not mix."""

    lost = 0

    def __init__(self, prefix: str = "", fd: int = 1) -> None:
        self._prefix, self._fd = prefix.encode(), fd
        self._rest = b""

    def write(self, data: bytes) -> None:
        if not self._prefix:
            self._put(data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._put(b"".join(self._prefix + line + b"\n" for line in lines))

    def line(self, text: str) -> None:
        self.write(f"{text}\n".encode(errors="replace"))

    def close(self) -> None:
        if self._rest:
            self._put(self._prefix + self._rest + b"\n")
            self._rest = b""

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError:  # nobody reads
                self.lost += len(view)
                return


class PodStarter:
    """Processes of a pod, for the supervisor: they are children of its process, and know the nodes of the whole job."""

    def __init__(self, directory: JobDirectory, job: Job) -> None:
        self._env = JobEnv.from_environ(os.environ) or JobEnv()

    def job_env(self) -> JobEnv:
        return self._env

    def node_names(self) -> tuple[str, ...]:
        return (hostname(),)

    def wrap_command(self, node: int, command: tuple[str, ...]) -> tuple[str, ...]:
        return command

    def restarts_job(self) -> bool:
        return False  # the controller of the pod decides

    def requeue(self) -> str:
        return "a pod has no queue"


@dataclass(frozen=True)
class PodOptions:
    job: str
    role: str
    command: tuple[str, ...]
    index: int = 0
    restart: RoleRestart = "never"
    grace_s: float = 30.0
    beside: tuple[Role, ...] = ()


def pod_job(options: PodOptions, environ: Mapping[str, str]) -> Job:
    """Return the roles of this pod as a job of one machine. The kubelet restarts the main one, the supervisor those beside it."""
    node = {name: environ[name] for name in (NODE,) if name in environ}
    run = {name: environ[name] for name in (RUN,) if name in environ}
    beside = [replace(role, environment={**role.environment, **node}) for role in options.beside]
    main = Role(options.role, options.command, environment={INDEX: str(options.index), **node, **run})
    return Job(options.job, (*beside, main), options.role, grace_s=options.grace_s)


def map_exit_code(code: int, restart: RoleRestart) -> tuple[int, str]:
    """Return the exit code of the container, by which the kubelet restarts it (not 0) or not (0), and the termination message.

    The kubelet itself cannot tell a process that was killed from one that failed.
    """
    if restart == "when-killed" and 0 < code < 128:
        return 0, f"{EXIT_CODE}{code}"
    if restart == "always" and code == 0:
        return RESTART_CODE, f"{EXIT_CODE}{code}"
    return code, ""


def read_secrets(folder: Path) -> dict[str, str]:
    """Read the variables in a folder of a mounted Secret, whose files are links."""
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                with open(path, "rb") as file:
                    found[path.name] = file.read(_MAX_SECRET).decode()
    return found


def find_placeholders(folder: Path) -> list[str]:
    """Return the names of the mounted values that are still the placeholder."""
    return [
        path.name
        for path in sorted((*folder.glob("[!.]*"), *folder.glob(f"{ENV_SECRETS}/[!.]*")))
        if path.is_file() and path.stat().st_size <= _MAX_SECRET and path.read_bytes().strip() == PLACEHOLDER.encode()
    ]


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a mounted ConfigMap, which are links, into the working directory, which belongs to another user."""
    for directory, folders, names in os.walk(source, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith("..")]  # those of the mount itself
        inside = target / Path(directory).relative_to(source)
        inside.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(Path(directory) / name, inside / name)


def run(options: PodOptions) -> int:
    """Run the roles of this pod to their end and return the exit code of the container."""
    if names := find_placeholders(SECRETS):
        sys.stderr.write(
            f"The value of {', '.join(names)} in the Secret is the placeholder {PLACEHOLDER!r}. "
            "Create the Secret with real values, then start this pod again.\n"
        )
        return PLACEHOLDER_CODE
    copy_files(FILES, Path.cwd())
    job = pod_job(options, os.environ)
    os.environ.pop(RUN, None)
    parent = Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 # an emptyDir of the pod
    directory = JobDirectory(parent / options.job)
    shutil.rmtree(directory.path, ignore_errors=True)  # of the container before, which the kubelet has restarted
    status = JobStatus(options.job, options.job, "pending", submitted_at=time.time())
    directory.create({JOB: job_to_json(job)}, status)
    os.environ.update(read_secrets(SECRETS / ENV_SECRETS))  # inherited by the roles: a file would be on the disk of the node
    prefixes = {role.name: f"{role.name}-{role.environment[INDEX]}: " for role in options.beside}
    code = run_guard(directory, starter=PodStarter, open_log=lambda role, index, path: StdoutLog(prefixes.get(role, "")))
    mapped, message = map_exit_code(code, options.restart)
    if message:
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_text(message)
    return mapped


def parse_options(words: Sequence[str]) -> PodOptions:
    parser = argparse.ArgumentParser(prog="python -m ludus.launch.kubernetes.pod_process")
    parser.add_argument("--job", required=True, metavar="ID")
    parser.add_argument("--role", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--restart", default="never")
    parser.add_argument("--grace-s", type=float, default=30.0)
    parser.add_argument("--beside", action="append", default=[], metavar="ROLE-INDEX=COMMAND")
    split = list(words).index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:split])
    beside = tuple(map(_parse_beside, args.beside))
    return PodOptions(args.job, args.role, tuple(words[split + 1 :]), args.index, args.restart, args.grace_s, beside)


def _parse_beside(text: str) -> Role:
    name, _, command = text.partition("=")
    role, _, index = name.rpartition("-")
    return Role(role, tuple(shlex.split(command)), restart="on-failure", environment={INDEX: index})


if __name__ == "__main__":
    sys.exit(run(parse_options(sys.argv[1:])))
