"""Runs the Redis server of a job on loopback, with a password and an append-only file: `python -m ludus.launch.redis_role PORT`.

The password comes from LUDUS_MEMORY_PASSWORD and is written to a configuration file with mode 0600, never to a command line.
The files are in the job's scratch directory, which is deleted with the job.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ludus.errors import MissingExtra
from ludus.process.cgroups import Cgroups, find_cgroups
from ludus.process.job_env import find_free_ports
from ludus.transport.message_stream import PASSWORD

PROGRAM = "redis-server"
SCRATCH = "LUDUS_JOB_SCRATCH"
HOST = "127.0.0.1"

_MEMORY_SHARE = 0.25


def command(port: int) -> tuple[str, ...]:
    """Return the command of the role. Raises MissingExtra if Redis is not installed."""
    program()
    return (sys.executable, "-P", "-m", "ludus.launch.redis_role", str(port))


def program() -> str:
    in_venv = Path(sys.executable).parent / PROGRAM
    path = shutil.which(PROGRAM) or (str(in_venv) if in_venv.is_file() else None)
    if path is None:
        raise MissingExtra(
            f"A fleet needs a Redis server, and there is no {PROGRAM} here.",
            "Install it (Debian, Ubuntu: apt install redis-server; macOS: brew install redis), or name a running one: redis_url.",
        )
    return path


def new_password() -> str:
    return secrets.token_hex(24)


def free_port() -> int:
    """Return a port below Linux' range for outgoing connections, so that none takes it while the server restarts."""
    return find_free_ports(secrets.token_hex(8), 1, address=HOST)


def configuration(port: int, password: str, directory: Path, max_bytes: int) -> str:
    """Render redis.conf. Nothing is evicted: a full server rejects writes. A crash loses at most one second of unacknowledged data."""
    quoted = str(directory).replace("\\", "\\\\").replace('"', '\\"')
    return f"""bind {HOST}
port {port}
protected-mode yes
requirepass {password}
dir "{quoted}"
appendonly yes
appendfsync everysec
save ""
daemonize no
logfile ""
maxmemory {max_bytes}
maxmemory-policy noeviction
"""


def memory_bytes(groups: Cgroups) -> int:
    """Return the memory of this machine or container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in groups.numbers("memory", "memory.limit_in_bytes", "memory.max"))])


def main(words: Sequence[str]) -> None:
    """Replace this process by the server."""
    port, password, scratch = int(words[0]), os.environ.pop(PASSWORD, ""), os.environ.get(SCRATCH, "")
    if not password or not scratch:
        sys.exit(f"{PASSWORD} and {SCRATCH} must be set.")
    directory = Path(scratch) / "redis"
    directory.mkdir(mode=0o700, exist_ok=True)
    max_bytes = int(memory_bytes(find_cgroups()) * _MEMORY_SHARE)
    path = directory / "redis.conf"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(configuration(port, password, directory, max_bytes))
    os.execv(program(), [PROGRAM, str(path)])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
