"""A Redis server of one job: on the loopback, with a password, with an append-only file. `python -m ludus.launch.redis_role PORT`.

The password is in LUDUS_MEMORY_PASSWORD, and goes into a configuration that only its owner can read: not into the command line.
Files are in the scratch directory of the job, and go with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ludus.errors import MissingExtra, UsageError
from ludus.transport.message_stream import PASSWORD

PROGRAM = "redis-server"
SCRATCH = "LUDUS_JOB_SCRATCH"
HOST = "127.0.0.1"

_PORTS = range(20_000, 32_000)
"""Below those that Linux gives to outgoing connections, so that nobody gets ours by chance while the server is down."""

_MEMORY_SHARE = 0.25
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Of a container, as it sees them itself: cgroups of version 2 and 1."""
_ATTEMPTS = 100


def command(port: int) -> tuple[str, ...]:
    """What to run. Raises MissingExtra where there is no Redis."""
    program()
    return (sys.executable, "-P", "-m", "ludus.launch.redis_role", str(port))


def program() -> str:
    beside = Path(sys.executable).parent / PROGRAM
    found = shutil.which(PROGRAM) or (str(beside) if beside.is_file() else None)
    if found is None:
        raise MissingExtra(
            f"A fleet needs a Redis server, and there is no {PROGRAM} here.",
            "Install it (Debian, Ubuntu: apt install redis-server; macOS: brew install redis), or name one that runs: redis_url.",
        )
    return found


def new_password() -> str:
    return secrets.token_hex(24)


def free_port() -> int:
    for _ in range(_ATTEMPTS):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise UsageError(f"No free port between {_PORTS.start} and {_PORTS.stop} on {HOST}.")


def configuration(port: int, password: str, directory: Path, max_bytes: int) -> str:
    """Nothing is ever evicted: a full server pushes back. At most a second of what was not acknowledged is lost in a crash."""
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


def memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Of this machine, or of the container that this is."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            found.append(int((groups / name).read_text()))
    return min(found)


def main(words: Sequence[str]) -> None:
    """Becomes the server."""
    port, password, scratch = int(words[0]), os.environ.pop(PASSWORD, ""), os.environ.get(SCRATCH, "")
    if not password or not scratch:
        sys.exit(f"{PASSWORD} and {SCRATCH} have to be set.")
    directory = Path(scratch) / "redis"
    directory.mkdir(mode=0o700, exist_ok=True)
    max_bytes = int(memory_bytes() * _MEMORY_SHARE)
    path = directory / "redis.conf"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(configuration(port, password, directory, max_bytes))
    os.execv(program(), [PROGRAM, str(path)])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
