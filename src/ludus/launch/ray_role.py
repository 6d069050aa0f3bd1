"""A node of a job's Ray, as a role of the job: `python -P -m ludus.launch.ray_role`, on every node; the first one is the head.

Everything else is in its environment (`JobEnv`). It holds the process that holds Ray (`ray_cluster/node_process.py`), imports no Ray
itself, and adopts whatever Ray lets go of: when it is told to end, it kills all that is below it, because Ray would take half a minute,
and removes its directory. When its Ray ends by itself, so does it, with code 1, so that whoever looks after it starts the next one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.errors import LudusError, UsageError, WorkerFailed
from ludus.io import json_lines
from ludus.io.json_lines import LineReader
from ludus.process import identity, job_env
from ludus.process.host import usable_cores
from ludus.process.job_env import JobEnv
from ludus.process.signals import SignalQueue
from ludus.ray_cluster import cluster
from ludus.ray_cluster.node_process import Orders

GAMECORE = "GAMECORE_SERVER_ADDR"
AUTO = "auto"

GRAIN = 50
"""Blocks of ports are made of so many at a time, and each has one owner."""

_FIXED = (
    "node_manager_port", "object_manager_port", "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)  # fmt: skip
_SPARE_WORKERS = 30
_SHM_SHARE = 0.5
_LEAST_STORE = 80 << 20
"""Ray wants 75 MB."""

_UNWANTED = ("LD_PRELOAD", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "ip_head", job_env.RUN, job_env.RAY, job_env.LEARNERS)
"""What is for the main role alone, or would lead those that run here astray."""

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_END_S = 3.0
_LINES = 6


@dataclass(frozen=True)
class Options:
    """`cpus`, `gpus`: None: as the surroundings say. `store_bytes`: at most. `stay`: wait for the head for ever."""

    cpus: int | None = None
    gpus: int | None = None
    memory: int | None = None
    store_bytes: int = cluster.STORE_BYTES
    gamecore: str = ""
    share_weights: bool = False
    log_dir: Path | None = None
    stay: bool = False


# -- what follows from what it is told ----------------------------------------------------------------------------------------


def cpus_of(options: Options, environ: Mapping[str, str]) -> int:
    """As the option says, else as Slurm does, else as many as this process may use."""
    if options.cpus is not None:
        return options.cpus
    given = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(given) if given.isdigit() else usable_cores()


def gpus_of(options: Options, environ: Mapping[str, str]) -> int | None:
    """None: as many as Ray finds."""
    if options.gpus is not None:
        return options.gpus
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    if given.isdigit():
        return int(given)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return 0 if visible in ("NoDevFiles", "-1") else len([word for word in visible.split(",") if word.strip()])


def store_of(asked: int, free: int) -> int:
    """Bytes of the object store: it lives in shared memory, which others need too, and Ray would fall back to a disk."""
    return max(_LEAST_STORE, min(asked, int(free * _SHM_SHARE)))


def block_size(cpus: int) -> int:
    """Ports of a node: those of Ray itself, and one for every process that runs in it or starts something in it."""
    return GRAIN * math.ceil((len(_FIXED) + _SPARE_WORKERS + 2 * cpus) / GRAIN)


def ports_of(first: int, size: int) -> dict[str, int]:
    named = dict(zip(_FIXED, range(first, first + size), strict=False))
    return named | {"min_worker_port": first + len(_FIXED), "max_worker_port": first + size - 1}


def environment_of(environ: Mapping[str, str], options: Options, home: Path) -> dict[str, str]:
    """Of Ray, and so of what it runs here."""
    kept = {name: value for name, value in environ.items() if name not in _UNWANTED}
    kept |= cluster.SETTINGS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / "token")}
    if options.gamecore:
        kept[GAMECORE] = options.gamecore
    if options.log_dir is not None:
        kept[cluster.NODE_LOG_DIR] = str(options.log_dir.absolute())
    return kept


@contextlib.contextmanager
def block(job: str, node: int, size: int, taken: Sequence[int]) -> Iterator[int]:
    """The first port of a block that nobody listens in, and that no other node of Ray on this machine has for its own.

    Where a job begins to look follows from its name: two of them begin apart. Raises UsageError where none is left.
    """
    for first in job_env.candidate_ports(job, size, f"ray-{node}"):
        span = range(first, first + size)
        if any(port in span for port in taken):
            continue
        with contextlib.ExitStack() as held:
            try:
                for grain in range(first, first + size, GRAIN):
                    held.enter_context(_owned(grain))
            except OSError:  # somebody else's, who may not listen yet
                continue
            if not all(job_env.is_port_free(port) for port in span):
                continue
            yield first
            return
    raise UsageError(f"No block of {size} free ports is left on this machine, of those from {job_env.FIRST_PORT} on.")


def _owned(grain: int) -> socket.socket:
    """Held until it is closed, or its process is gone: names like these belong to the network, as ports do, and not to a user."""
    owned = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            owned.bind(f"\0ludus-ports-{grain}")
    except OSError:
        owned.close()
        raise
    return owned


def meaningful(lines: Sequence[str]) -> list[str]:
    """What Ray's log says went wrong, without how it was doing before."""
    told = [line for line in lines if " C " in line[:60] or " E " in line[:60] or "Check failed" in line]
    return told[-_LINES:]


# -- the process --------------------------------------------------------------------------------------------------------------


class RayHost:
    """One life of a node of Ray."""

    def __init__(self, job: JobEnv, options: Options, home: Path) -> None:
        self._job, self._options, self._home = job, options, home
        self._environ = environment_of(os.environ, options, home)
        self._logs: Path | None = None
        self._failure = ""
        self._output: collections.deque[str] = collections.deque(maxlen=_LINES)

    def run(self, signals: SignalQueue) -> int:
        """Until Ray has ended (1), or somebody asks for its end (0)."""
        if os.environ.get("LD_PRELOAD"):
            say(f"LD_PRELOAD={os.environ['LD_PRELOAD']} is not for Ray and what it runs: it is dropped")
        cpus = cpus_of(self._options, os.environ)
        first_node = self._job.node == 0
        taken = range(self._job.port, self._job.port + job_env.PORTS)
        if first_node and not job_env.is_port_free(self._job.port):
            raise WorkerFailed(f"Port {self._job.port}, which is this job's, is taken by somebody else.", "Submit it again.")
        name = os.environ.get("LUDUS_JOB_ID", self._job.head)
        with block(name, self._job.node, block_size(cpus), taken) as first:
            ports = ports_of(first, block_size(cpus))
            orders = self._orders(cpus, ports)
            say(
                f"node {self._job.node} of {len(self._job.nodes)}, {orders.address}: {'the head' if orders.first else 'joins'} "
                f"{orders.head}, {cpus} cores, ports {first}-{ports['max_worker_port']}, object store {orders.store_bytes >> 20} MB"
            )
            return self._hold(orders, signals)

    def _orders(self, cpus: int, ports: Mapping[str, int]) -> Orders:
        job, options = self._job, self._options
        shm = Path("/dev/shm")  # noqa: S108
        free = shutil.disk_usage(shm).free if shm.is_dir() else options.store_bytes
        return Orders(
            first=job.node == 0,
            head=job.head,
            address=cluster.resolved(job.nodes[job.node]),
            name=cluster.node_name(job.node),
            directory=str(self._home / "r"),
            store_bytes=store_of(options.store_bytes, free),
            wait_s=None if options.stay else job.wait_s,
            cpus=cpus,
            gpus=gpus_of(options, os.environ),
            memory=options.memory,
            ports=dict(ports),
            labels={cluster.SHARES: "1"} if options.share_weights else {},
        )

    def _hold(self, orders: Orders, signals: SignalQueue) -> int:
        parent = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ludus.ray_cluster.node_process"],
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: identity.die_with_parent(parent, signal.SIGKILL),  # there are no threads here
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then it has ended, which is seen below
            process.stdin.write(orders.line())
            process.stdin.close()
        with selectors.DefaultSelector() as selector, process.stdout:
            selector.register(signals, selectors.EVENT_READ)
            selector.register(process.stdout, selectors.EVENT_READ)
            reader = LineReader(process.stdout.fileno())
            while True:
                for key, _ in selector.select():
                    if key.fileobj is signals:
                        if set(signals.take()) & set(_ENDS):
                            return 0
                        continue
                    for line in reader.read():
                        self._heard(json_lines.decode(line), orders)
                    if reader.at_end:
                        return self._ended()

    def _heard(self, said: Mapping[str, Any], orders: Orders) -> None:
        if "waiting" in said:
            say(f"waiting for the head at {said['waiting']} …")
        elif "ready" in said:
            self._logs = Path(said["logs"])
            say(f"Ray is up after {said['ready']:.1f} s")
        elif "failed" in said:
            self._failure = f"{said['failed']} {said['hint']}".strip()

    def _ended(self) -> int:
        say(self._failure or "the process that held Ray was killed")
        for line in self._last_words():
            say(f"  {line}")
        return 1

    def _last_words(self) -> list[str]:
        logs = self._logs or next(iter((self._home / "r").glob("session_[0-9]*/logs")), None)
        lines: list[str] = []
        for name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"):
            with contextlib.suppress(OSError, TypeError):
                text = (logs / name).read_text(errors="replace") if logs is not None else ""
                lines += meaningful(text.splitlines())
        return lines[-_LINES:]


def say(sentence: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} ray: {sentence}\n")
    sys.stdout.flush()


def host(job: JobEnv, options: Options) -> int:
    """Have Ray here until it ends, or SIGTERM; nothing of it is left when this returns. Raises LudusError."""
    token = job.token()
    identity.adopt_orphans()
    with SignalQueue(*_ENDS) as signals, cluster.home() as home, cluster.reaped(home):
        with open(os.open(home / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(token)
        try:
            return RayHost(job, options, home).run(signals)
        finally:
            left = identity.end_descendants(_END_S)
            if left:
                say(f"could not be killed: {left}")
            cluster.sweep_leftovers()


def options_of(words: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(prog="python -m ludus.launch.ray_role", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpus", type=_number, metavar="N|auto", help="cores that workers may fill here")
    parser.add_argument("--gpus", type=_number, metavar="N|auto")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="that trials may ask for")
    parser.add_argument("--store-bytes", type=int, default=cluster.STORE_BYTES, metavar="B", help="of the object store, at most")
    parser.add_argument("--gamecore", default="", metavar="HOST:PORT", help=f"{GAMECORE} of what runs here")
    parser.add_argument("--share-weights", action="store_true", help="a learner on this machine uses these cores itself")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="for the logs of workers: actor_N.log")
    parser.add_argument("--stay", action="store_true", help="wait for the head for ever")
    return Options(**vars(parser.parse_args(words)))


def _number(text: str) -> int | None:
    if text == AUTO:
        return None
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def main(words: Sequence[str]) -> int:
    try:
        job = JobEnv.from_environ(os.environ)
        if job is None or not job.port:
            raise UsageError("This process belongs to no job that has a Ray.", f"{job_env.NODES} and {job_env.PORT} say so.")
        return host(job, options_of(words))
    except LudusError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
